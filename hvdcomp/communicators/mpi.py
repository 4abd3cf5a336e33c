"""Broadcasts by MPI itself, beside Horovod: they need not wait for the next cycle of Horovod's background thread."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI


class MPIBroadcaster:
    """Broadcasts over a duplicate of the world's communicator, so that nothing else can match its messages.

    Every rank has to make it at the same point, and MPI must be initialised for several threads.
    """

    def __init__(self) -> None:
        self._communicator = MPI.COMM_WORLD.Dup()

    def start(self, message: np.ndarray) -> tuple[Any, np.ndarray]:
        return self._communicator.Ibcast(message, root=0), message

    def wait(self, started: tuple[Any, np.ndarray]) -> np.ndarray:
        request, message = started
        request.Wait()
        return message
