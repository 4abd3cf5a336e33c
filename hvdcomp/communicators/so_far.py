"""Which rank this process is, as far as that is known before the ranks meet."""

from __future__ import annotations

import os
import sys

_HOROVOD = ("horovod.torch", "horovod.tensorflow")
# Set by horovodrun (Gloo), torchrun, Open MPI's mpirun, and srun. The inner launcher counts; an outer one's stay set.
_LAUNCHERS = ("HOROVOD_RANK", "RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")


def rank_so_far() -> int:
    """The rank of this process: `connected_rank`, or else by the launcher's variables; 0 without either.

    It waits for nobody. A process set, or a group, may count its ranks otherwise.
    """
    connected = connected_rank()
    if connected is not None:
        return connected
    return next((int(os.environ[name]) for name in _LAUNCHERS if os.environ.get(name, "").isdecimal()), 0)


def connected_rank() -> int | None:
    """The rank of this process, as the library says that connects the ranks; None if none was started yet."""
    for name in _HOROVOD:
        hvd = sys.modules.get(name)
        if hvd is not None and hvd.is_initialized():
            return int(hvd.rank())
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return int(dist.get_rank())
    return None
