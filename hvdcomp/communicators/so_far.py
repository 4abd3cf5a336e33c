"""Finds the rank of this process, even before the ranks are connected to each other."""

from __future__ import annotations

import os
import sys

_HOROVOD = ("horovod.torch", "horovod.tensorflow")
# The environment variables that tell a process its rank. They are set by horovodrun (with Gloo), torchrun, Open MPI's
# mpirun and srun. If one launcher starts another, the variable of the inner launcher comes first.
_LAUNCHERS = ("HOROVOD_RANK", "RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")


def rank_so_far() -> int:
    """The rank of this process. The rank comes from Horovod or torch.distributed if they were initialized, or else from
    the launcher's environment variable. The rank is 0 if both are missing.

    This function does not wait for other ranks. The result is the rank among all processes; in a process set or process
    group, this process may have a different rank.
    """
    connected = connected_rank()
    if connected is not None:
        return connected
    return next((int(os.environ[name]) for name in _LAUNCHERS if os.environ.get(name, "").isdecimal()), 0)


def connected_rank() -> int | None:
    """The rank of this process in Horovod or torch.distributed; None if neither was initialized."""
    for name in _HOROVOD:
        hvd = sys.modules.get(name)
        if hvd is not None and hvd.is_initialized():
            return int(hvd.rank())
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return int(dist.get_rank())
    return None
