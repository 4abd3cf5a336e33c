"""Communicators carry out the engine's collectives. Each communicator uses one library, and knows nothing about
compressors."""

from __future__ import annotations

from typing import Any, Protocol

from hvdcomp.arrays.types import Array
from hvdcomp.communicators.loopback import LoopbackCommunicator
from hvdcomp.communicators.nodes import allow_process_sets, asked_ranks_per_node, check_ranks_per_node
from hvdcomp.communicators.simulated import LinkCost, SimulatedCommunicator, SimulatedGroup
from hvdcomp.communicators.so_far import connected_rank, rank_so_far

__all__ = [
    "Communicator",
    "LinkCost",
    "LoopbackCommunicator",
    "SimulatedCommunicator",
    "SimulatedGroup",
    "allow_process_sets",
    "asked_ranks_per_node",
    "check_ranks_per_node",
    "connected_rank",
    "rank_so_far",
]


class Communicator(Protocol):
    """Starts collectives under stable names and waits for them; all ranks start the same collectives in the same order.

    Attributes:
        rank: this process's number among the ranks, from 0.
        world_size: number of ranks.
    """

    rank: int
    world_size: int

    def part(self, group: str) -> Communicator:
        """The communicator of a `protocol.Group`; for "all", this communicator itself.

        Raises:
            ConfigurationError: if the nodes have different numbers of ranks, or groups of ranks cannot be made.
        """

    def start_allreduce(self, array: Array, op: str, name: str) -> Any:
        """Starts an allreduce of a vector, op "mean", "sum" or "max"; may overwrite `array`."""

    def start_allgather(self, array: Array, name: str) -> Any:
        """Starts gathering uint8 vectors (length,), equally long on all ranks, into (world_size, length)."""

    def start_alltoall(self, array: Array, name: str) -> Any:
        """Starts an exchange of uint8 vectors (world_size * length,), equally long on all ranks, whose row r goes to
        rank r. The result has the rows that all ranks sent to this rank, (world_size, length)."""

    def start_reducescatter(self, array: Array, op: str, name: str) -> Any:
        """Starts a reduction of vectors (world_size * length,), op "mean" or "sum", into this rank's row (length,)."""

    def start_broadcast(self, array: Array, name: str) -> Any:
        """Starts a broadcast of rank 0's uint8 vector, which has the same length on all ranks."""

    def wait(self, started: Any) -> Array:
        """Waits for a started collective, and returns its result in new storage."""
