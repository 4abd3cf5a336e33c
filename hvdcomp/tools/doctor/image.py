"""Runs checks of a container image that do not need a GPU. `python -m hvdcomp.tools.doctor.image` fails if a check
fails.

docker/Dockerfile runs this program in the finished image. LD_LIBRARY_PATH then contains the CUDA toolkit's stub of the
driver library. If PyTorch is a build for CUDA, the program also checks the files that only training on a GPU uses.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from hvdcomp.kernels.cuda import compiled_ahead
from hvdcomp.tools.doctor.checks import find_problems, runs_on
from hvdcomp.tools.doctor.facts import Facts
from hvdcomp.tools.doctor.gather import ask_python, gather
from hvdcomp.tools.horovod_build import BuildError
from hvdcomp.tools.horovod_build.check import load_extension
from hvdcomp.tools.horovod_build.wheel import installed_record

_TIMEOUT = 300.0  # seconds
_TRITON = "triton/backends/nvidia/bin"
# Libraries with code for GPUs, in the folders from which Python imports. If code for a GPU were missing, training would
# begin and then fail. Only the last library, which belongs to TensorFlow, may be a build for CPU.
_LIBRARIES = ("torch/lib/libtorch_cuda.so", "nvidia/nccl/lib/libnccl.so.2", "tensorflow/libtensorflow_cc.so.2")

# RTLD_NOW resolves all symbols when the library is loaded, not when a function is called.
_OWN_CODE = """
import ctypes, os
from pathlib import Path
from hvdcomp.kernels import build
own = Path(build.__file__).with_name(build.LIBRARY)
ctypes.CDLL(os.environ.get("HVDCOMP_KERNELS_LIBRARY") or str(own), os.RTLD_NOW)
found = {}
"""
# Triton needs a C compiler for its loader, but the image has none. The compiled loader must therefore be in the image,
# for every user.
_DRIVER = """
import os
os.environ |= {"CC": "false", "HOME": "/dev/null"}
from hvdcomp.kernels import cuda
assert cuda.available(), cuda.why_not()
from triton.backends.nvidia.driver import CudaUtils
CudaUtils()
found = {}
"""


def code_in(library: Path) -> tuple[str, ...]:
    """The GPUs for which a library has code: for example, "sm_70" for machine code, or "compute_90" for PTX, which a
    driver compiles.

    `cuobjdump`, from Triton's package, lists them. Without `cuobjdump`, the result is empty.
    """
    program = _find(f"{_TRITON}/cuobjdump")
    if program is None:
        return ()
    kinds: set[str] = set()
    for option, ending, kind in (("--list-elf", "cubin", "sm"), ("--list-ptx", "ptx", "compute")):
        command = [str(program), option, str(library)]
        listed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT).stdout
        # Code for sm_90a is left out, because it does not run on later GPUs.
        kinds |= {f"{kind}_{number}" for number in re.findall(rf"\bsm_(\d+)\.{ending}$", listed, re.M)}
    return tuple(sorted(kinds))


def look_at_doctor(facts: Facts) -> Iterator[str]:
    """The problems that `hvdcomp doctor` finds."""
    for problem in find_problems(facts):
        yield f"hvdcomp doctor: {problem.what}"


def look_at_symbols(facts: Facts) -> Iterator[str]:
    """Finds symbols of Horovod's extensions and of hvdcomp's kernels that no library defines."""
    for framework in facts.bindings:
        try:
            load_extension(framework)
        except BuildError as error:
            yield str(error)
    yield from _failure("hvdcomp's kernels", _OWN_CODE)


def look_at_code(facts: Facts) -> Iterator[str]:
    """Finds libraries that have no code for the GPUs for which Horovod was compiled."""
    capabilities = wanted_capabilities()
    for name in _LIBRARIES:
        library = _find(name)
        if library is None:
            continue
        code = code_in(library)
        print(f"{name}: {', '.join(code) or 'no code for GPUs'}")
        for capability in capabilities:
            if not runs_on(capability, code) and (code or name != _LIBRARIES[-1]):
                yield f"{library} has no code for GPUs of compute capability {capability}"


def look_at_triton(facts: Facts) -> Iterator[str]:
    """Checks that Triton can launch kernels without a C compiler, and that the image has compiled kernels for the GPUs
    for which Horovod was compiled."""
    folder = compiled_ahead()
    yield from _failure(f"Triton's driver, which should be compiled in {folder}", _DRIVER)
    kernels = kernels_in(Path(folder))
    for capability in wanted_capabilities():
        print(f"{folder}: {kernels[capability] or 'no'} kernels for compute capability {capability}")
        if not kernels[capability]:
            yield f"{folder} has no kernels for GPUs of compute capability {capability}"


def kernels_in(folder: Path) -> Counter[str]:
    """The number of kernels in a folder of compiled kernels, by compute capability, such as "7.0"."""
    # Some of these files describe a kernel, and others describe a group of files. Only a kernel has a target.
    records = (json.loads(file.read_text()) for file in folder.glob("*/*.json"))
    return Counter(_capability(record["target"]["arch"]) for record in records if "target" in record)


def wanted_capabilities() -> tuple[str, ...]:
    """The compute capabilities for which Horovod has code, such as "7.0"."""
    options = (installed_record() or {}).get("options")
    numbers = options.get("cuda_arch", ()) if isinstance(options, dict) else ()
    return tuple(map(_capability, numbers))


def _capability(number: int) -> str:
    return f"{number // 10}.{number % 10}"


def look(facts: Facts) -> list[str]:
    """Runs all checks, prints a line for each check, and returns the faults."""
    looks: list[Callable[[Facts], Iterator[str]]] = [look_at_doctor, look_at_symbols]
    if facts.torch is not None and facts.torch.cuda:
        looks += [look_at_code, look_at_triton]
    wrong = []
    for check in looks:
        faults = list(check(facts))
        print(f"{check.__name__.removeprefix('look_at_')}: {len(faults) or 'nothing'} wrong", flush=True)
        wrong += faults
    return wrong


def _failure(subject: str, program: str) -> Iterator[str]:
    error = ask_python(program, _TIMEOUT).get("error")
    if error:
        yield f"{subject}: {error}"


def _find(name: str) -> Path | None:
    """A file of an installed package; None if it does not exist."""
    paths = (Path(folder) / name for folder in sys.path)
    return next((path for path in paths if path.is_file()), None)


def main() -> int:
    wrong = look(gather())
    for fault in wrong:
        print(fault, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
