"""Broadcasts by MPI, independent of the cycles of Horovod's background thread."""

from __future__ import annotations

import atexit
import sys
from typing import Any

import numpy as np
from mpi4py import MPI


class MPIBroadcaster:
    """Broadcasts over a duplicate of the world's communicator, so that nothing else can match its messages.

    All ranks make it at the same point, and MPI must be initialised for several threads.

    Horovod ends MPI on all ranks as soon as one rank ends, and a later MPI call causes a segmentation fault. So a rank
    that ends first waits for its started broadcast, which rank 0 may not have sent yet.
    """

    def __init__(self) -> None:
        _require_mpi()
        self._communicator = MPI.COMM_WORLD.Dup()
        self._under_way: MPI.Request | None = None
        atexit.register(self._wait_at_exit)  # runs before Horovod's handler, which was registered earlier

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
        failed = hasattr(sys, "last_type")  # this rank ends by an exception; others may never send
        if self._under_way is not None and not failed and not MPI.Is_finalized():
            self._under_way.Wait()


def _require_mpi() -> None:
    if MPI.Is_finalized():
        raise RuntimeError(
            "MPI has ended, so a decision of rank 0 cannot reach the other ranks. Horovod ends MPI on all ranks when "
            "one of them ends or calls hvd.shutdown(); let all ranks make the same number of steps"
        )
