"""Communicators run the collectives of the engine. Each communicator uses one library, such as Horovod, and does not
depend on compressors."""

from __future__ import annotations

from typing import Any, Protocol

from hvdcomp.arrays.types import AnyArray
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
    """Starts collectives, and waits for their results. All ranks start the same collectives in the same order. Each
    collective has a name, which is the same on all ranks and in all steps.

    Attributes:
        rank: number of this process among the ranks, from 0.
        world_size: number of ranks.
    """

    rank: int
    world_size: int

    def part(self, group: str) -> Communicator:
        """The communicator of a part of the ranks.

        Args:
            group: "all" for all ranks, that is, this communicator itself; "node" for the ranks of this rank's node;
                "across" for the ranks of different nodes that have the same local rank.

        Raises:
            ConfigurationError: if nodes have different numbers of ranks, or if the library cannot create groups of
                ranks.
        """

    def start_allreduce(self, array: AnyArray, op: str, name: str) -> Any:
        """Starts an allreduce of a vector. `op` is "mean", "sum" or "max". The allreduce may overwrite `array`."""

    def start_allgather(self, array: AnyArray, name: str) -> Any:
        """Starts an allgather of uint8 vectors, (length,) on every rank. The result is (world_size, length)."""

    def start_alltoall(self, array: AnyArray, name: str) -> Any:
        """Starts an alltoall of uint8 vectors, (world_size * length,) on every rank. The vector consists of one row of
        `length` elements for each rank. The result has the rows that all ranks sent to this rank, (world_size,
        length)."""

    def start_reducescatter(self, array: AnyArray, op: str, name: str) -> Any:
        """Starts a reduce-scatter of vectors, (world_size * length,) on every rank. `op` is "mean" or "sum". The result
        is this rank's row of the mean or sum, (length,)."""

    def start_broadcast(self, array: AnyArray, name: str) -> Any:
        """Starts a broadcast of the uint8 vector of rank 0. `array` must have the same length on all ranks."""

    def wait(self, started: Any) -> AnyArray:
        """Waits for a collective, and returns its result. `started` is the return value of the method that started the
        collective."""
