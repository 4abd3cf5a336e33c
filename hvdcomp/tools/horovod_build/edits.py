"""The edits that the sources of Horovod 0.28.1 need to work with current frameworks. Each edit has a condition and a
reason.

The edits do not change Horovod's behavior. They set the C++ standard, replace functions that newer frameworks and
Python versions no longer have, make the Keras callbacks use tf_keras, and disable the search for CUDA in a build for
CPU.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from hvdcomp.tools.horovod_build import BuildError
from hvdcomp.tools.horovod_build.environment import Environment, release


@dataclass(frozen=True)
class Edit:
    """Replaces the only occurrence of `old` with `new` in the file `file`, a path below the root of the sources."""

    file: str
    old: str
    new: str
    when: str
    why: str


def _torch_needs_newer_standard(environment: Environment, gpu: bool) -> bool:
    return environment.torch is not None and release(environment.torch) >= (2, 1)


def _from_tensorflow(*version: int) -> Callable[[Environment, bool], bool]:
    return lambda environment, gpu: environment.tensorflow is not None and release(environment.tensorflow) >= version


def _python_lacks_distutils(environment: Environment, gpu: bool) -> bool:
    return release(environment.python) >= (3, 12)


def _for_cpu(environment: Environment, gpu: bool) -> bool:
    return not gpu


def _for_cpu_with_cuda_torch(environment: Environment, gpu: bool) -> bool:
    return not gpu and environment.torch_cuda is not None


# Pairs of a condition and an edit. The arguments of the condition are the environment, and whether it is a build for
# GPUs.
EDITS: tuple[tuple[Callable[[Environment, bool], bool], Edit], ...] = (
    (
        _torch_needs_newer_standard,
        Edit(
            file="CMakeLists.txt",
            old="set(CMAKE_CXX_STANDARD 14)",
            new="set(CMAKE_CXX_STANDARD 20)",
            when="torch >= 2.1",
            why="Gloo and the core must be compiled for the same C++ standard as the torch extension",
        ),
    ),
    (
        _torch_needs_newer_standard,
        Edit(
            file="horovod/torch/CMakeLists.txt",
            old="set(CMAKE_CXX_STANDARD 14)",
            new="set(CMAKE_CXX_STANDARD 20)",
            when="torch >= 2.1",
            why="torch's headers need C++17, newer ones C++20",
        ),
    ),
    (
        _from_tensorflow(2, 19),
        Edit(
            file="horovod/tensorflow/CMakeLists.txt",
            old='list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n',
            new="",
            when="TensorFlow >= 2.19",
            why="TensorFlow no longer ships a header this file needs; Horovod's XLA operations are left out",
        ),
    ),
    (
        _from_tensorflow(2, 19),
        Edit(
            file="horovod/tensorflow/mpi_ops.cc",
            old="GpuStreamHandle AsGpuStreamValue(Stream* stream);",
            # This is a template because Stream is defined only further below.
            new="template <typename S> GpuStreamHandle AsGpuStreamValue(S* stream) {\n"
            "  return static_cast<GpuStreamHandle>(stream->platform_specific_handle().stream);\n"
            "}",
            when="TensorFlow >= 2.19",
            why="TensorFlow no longer exports this function, and an extension for GPU could not be loaded without it",
        ),
    ),
    (
        _from_tensorflow(2, 16),
        Edit(
            file="horovod/tensorflow/keras/callbacks.py",
            old="    from keras import backend as K\n",
            new="    K = keras.backend\n",
            when="TensorFlow >= 2.16",
            why="the package keras is Keras 3, and the callbacks serve tf.keras, which has to be tf_keras",
        ),
    ),
    (
        _from_tensorflow(2, 16),
        Edit(
            file="horovod/_keras/callbacks.py",
            old="        if hasattr(self.model.optimizer, 'momentum') and self.momentum_correction:\n",
            new="        momentum = getattr(self.model.optimizer, 'momentum', 0)\n"
            "        fixed = isinstance(momentum, (int, float))\n"
            "        if fixed and momentum and self.momentum_correction:\n"
            "            raise ValueError('momentum_correction needs an optimizer whose momentum is a variable: '\n"
            "                             'take one of tf_keras.optimizers.legacy, or set '\n"
            "                             'momentum_correction=False')\n"
            "        if not fixed and self.momentum_correction:\n",
            when="TensorFlow >= 2.16",
            why="the momentum of newer optimizers is not a variable; 0 means no momentum, and no correction",
        ),
    ),
    (
        _for_cpu,
        Edit(
            file="CMakeLists.txt",
            old="check_language(CUDA)\nif(NOT CMAKE_CUDA_COMPILER)\n",
            new="if(FALSE)\n",
            when="without --gpu",
            why="a CUDA compiler of an unsuitable version stops the build, though it is not needed",
        ),
    ),
    (
        _for_cpu_with_cuda_torch,
        Edit(
            file="cmake/Modules/FindPytorch.cmake",
            old='string(TOUPPER "${Pytorch_CUDA}" Pytorch_CUDA)',
            new="set(Pytorch_CUDA FALSE)",
            when="without --gpu, torch for CUDA",
            why="if there is a CUDA toolkit, the torch extension would be built for CUDA",
        ),
    ),
    (
        _python_lacks_distutils,
        Edit(
            file="horovod/runner/js_run.py",
            old="from distutils.spawn import find_executable",
            new="from shutil import which as find_executable",
            when="Python >= 3.12",
            why="Python no longer has distutils, and horovodrun imports this file",
        ),
    ),
)


def applicable_edits(environment: Environment, gpu: bool) -> list[Edit]:
    """The edits that a build needs in this environment, in order. `gpu` is whether it is a build for GPUs."""
    return [edit for needed, edit in EDITS if needed(environment, gpu)]


def digest(edits: Sequence[Edit]) -> str:
    """A short hash of the edits, which is part of the wheel's key in the cache."""
    changes = json.dumps([astuple(edit)[:3] for edit in edits])
    return hashlib.sha256(changes.encode()).hexdigest()[:12]


def apply_edits(root: Path, edits: Sequence[Edit]) -> None:
    """Applies the edits to the unpacked source in `root`.

    Raises:
        BuildError: if a file is missing, or does not contain the expected text exactly once. In this case nothing is
            written.
    """
    changed: dict[Path, str] = {}
    for edit in edits:
        path = root / edit.file
        if path not in changed:
            if not path.is_file():
                raise BuildError(f"Horovod's source has no file {edit.file}: is this the expected release?")
            changed[path] = path.read_text(encoding="utf-8")
        count = changed[path].count(edit.old)
        if count != 1:
            raise BuildError(
                f"Horovod's {edit.file} contains the text {edit.old.strip()!r} {count} times instead of once: "
                f"is this the expected release, not yet edited?"
            )
        changed[path] = changed[path].replace(edit.old, edit.new)
    for path, text in changed.items():
        path.write_text(text, encoding="utf-8")
