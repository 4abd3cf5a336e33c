"""Communicators: how the engine reaches the other ranks. Each knows one library; none knows a compressor."""

from __future__ import annotations

from typing import Any, Protocol

from hvdcomp.arrays.types import Array
from hvdcomp.communicators.loopback import LoopbackCommunicator

__all__ = ["Communicator", "LoopbackCommunicator"]


class Communicator(Protocol):
    """Starts collectives under stable names and waits for them; every rank starts the same ones in the same order.

    Attributes:
        rank: this process's number among the ranks that take part, from 0.
        world_size: how many ranks take part.
    """

    rank: int
    world_size: int

    def start_allreduce(self, array: Array, op: str, name: str) -> Any:
        """Starts an allreduce of a vector, op "mean", "sum" or "max"; may overwrite `array`."""

    def start_allgather(self, array: Array, name: str) -> Any:
        """Starts gathering uint8 vectors (length,), equally long on all ranks, into (world_size, length)."""

    def start_broadcast(self, array: Array, name: str) -> Any:
        """Starts sending rank 0's uint8 vector to all ranks, on all of which it has this length."""

    def wait(self, handle: Any) -> Array:
        """The result of a started collective, in storage that nobody else uses."""
