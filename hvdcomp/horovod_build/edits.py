"""The source edits that Horovod 0.28.1 needs beside current frameworks, each with its condition and reason.

Nothing of Horovod's behaviour is changed: the edits touch which C++ standard is asked for, one source file
that no longer compiles, and one import from a module that newer Pythons lack.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from hvdcomp.horovod_build import BuildError
from hvdcomp.horovod_build.environment import Environment, release


@dataclass(frozen=True)
class Edit:
    """Replace the one occurrence of `old` in `file` (a path below the source's root) by `new`."""

    file: str
    old: str
    new: str
    when: str
    why: str


def _torch_needs_newer_standard(environment: Environment) -> bool:
    return environment.torch is not None and release(environment.torch) >= (2, 1)


def _tensorflow_lacks_xla_header(environment: Environment) -> bool:
    return environment.tensorflow is not None and release(environment.tensorflow) >= (2, 19)


def _python_lacks_distutils(environment: Environment) -> bool:
    return release(environment.python) >= (3, 12)


# Which environments need the edit, and the edit.
EDITS: tuple[tuple[Callable[[Environment], bool], Edit], ...] = (
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
        _tensorflow_lacks_xla_header,
        Edit(
            file="horovod/tensorflow/CMakeLists.txt",
            old='list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n',
            new="",
            when="TensorFlow >= 2.19",
            why="TensorFlow no longer ships a header this file needs; Horovod's XLA operations are left out",
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


def applicable_edits(environment: Environment) -> list[Edit]:
    """The edits that this environment needs, in order."""
    return [edit for needed, edit in EDITS if needed(environment)]


def digest(edits: Sequence[Edit]) -> str:
    """A short fingerprint of what the edits do; part of the wheel's cache key."""
    changes = json.dumps([astuple(edit)[:3] for edit in edits])
    return hashlib.sha256(changes.encode()).hexdigest()[:12]


def apply_edits(root: Path, edits: Sequence[Edit]) -> None:
    """Apply the edits to the unpacked source in `root`.

    Raises:
        BuildError: a file is missing, or does not hold the expected text exactly once; nothing is written.
    """
    changed: dict[Path, str] = {}
    for edit in edits:
        path = root / edit.file
        if path not in changed:
            if not path.is_file():
                raise BuildError(f"Horovod's source has no file {edit.file}: is this the expected release?")
            changed[path] = path.read_text(encoding="utf-8")
        found = changed[path].count(edit.old)
        if found != 1:
            raise BuildError(
                f"Horovod's {edit.file} holds the text {edit.old.strip()!r} {found} times instead of once: "
                f"is this the expected release, not yet edited?"
            )
        changed[path] = changed[path].replace(edit.old, edit.new)
    for path, text in changed.items():
        path.write_text(text, encoding="utf-8")
