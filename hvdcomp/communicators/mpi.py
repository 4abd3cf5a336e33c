"""Broadcasts with MPI. Unlike Horovod's broadcasts, these broadcasts do not wait for the next cycle of Horovod's
background thread."""

from __future__ import annotations

import atexit
import sys
from typing import Any

import numpy as np
from mpi4py import MPI


class MPIBroadcaster:
    """Broadcasts from rank 0 to all ranks of MPI. It uses a duplicate of MPI's communicator of all ranks, so no other
    MPI message of the program can be mistaken for a broadcast.

    Create the object on all ranks at the same point. MPI must be initialized for several threads.

    If one rank ends, Horovod ends MPI on all ranks, and a later call of MPI causes a segmentation fault. Therefore a
    rank that reaches its end waits first until rank 0 has sent the broadcast that this rank has started.
    """

    def __init__(self) -> None:
        _require_mpi()
        self._communicator = MPI.COMM_WORLD.Dup()
        self._under_way: MPI.Request | None = None
        # At exit, Python calls this handler before Horovod's handler, because Python calls the handler that was
        # registered last first.
        atexit.register(self._wait_at_exit)

    def start(self, message: np.ndarray) -> tuple[Any, np.ndarray]:
        _require_mpi()
        self._under_way = self._communicator.Ibcast(message, root=0)
        return self._under_way, message

    def wait(self, started: tuple[Any, np.ndarray]) -> np.ndarray:
        _require_mpi()
        request, message = started
        request.Wait()
        self._under_way = None
        return message

    def _wait_at_exit(self) -> None:
        failed = hasattr(sys, "last_type")  # this rank ends with an exception, so rank 0 may never send the broadcast
        if self._under_way is not None and not failed and not MPI.Is_finalized():
            self._under_way.Wait()


def _require_mpi() -> None:
    if MPI.Is_finalized():
        raise RuntimeError(
            "MPI has ended, so a decision of rank 0 cannot reach the other ranks. Horovod ends MPI on all ranks when "
            "one of them exits or calls hvd.shutdown(). Let all ranks make the same number of steps"
        )
