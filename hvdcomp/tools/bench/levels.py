"""The levels of a run. A run has two levels if its ranks can exchange within nodes and between nodes."""

from __future__ import annotations

from dataclasses import dataclass

from hvdcomp.communicators import Communicator
from hvdcomp.compressors import Compressor, needs_nodes
from hvdcomp.errors import SpecError, UnevenNodesError


@dataclass(frozen=True)
class Levels:
    """How the ranks of a run are distributed over nodes, for two-level exchanges.

    Attributes:
        ranks: the communicator of all ranks. Its method `part` returns the communicators of groups of ranks.
        ranks_per_node: number of ranks per node; None if no two-level exchange is possible.
        why_not: the reason why no two-level exchange is possible; empty if it is possible.
    """

    ranks: Communicator
    ranks_per_node: int | None = None
    why_not: str = ""

    def check(self, compressor: Compressor) -> None:
        """Checks that this run can use a compressor.

        Raises:
            SpecError: if the compressor is two-level but the run does not have two levels.
        """
        if self.ranks_per_node is None and needs_nodes(compressor):
            raise SpecError(
                f"{compressor} cannot be measured here: {self.why_not}; start the same number of ranks, two or more, "
                "on each of several nodes, or leave this compressor out"
            )


def find_levels(ranks: Communicator) -> Levels:
    """Finds the levels of this run, and creates the groups of ranks. Every rank must call this function.

    Raises:
        ConfigurationError: on every rank, if Horovod does not allow process sets, or if environment variables differ
            between ranks.
    """
    try:
        inside, nodes = (ranks.part(group).world_size for group in ("node", "across"))
    except UnevenNodesError:
        return Levels(ranks, why_not="the nodes have different numbers of ranks")
    if nodes == 1:
        return Levels(ranks, why_not="all ranks are on one node")
    if inside == 1:
        return Levels(ranks, why_not="each node has one rank")
    return Levels(ranks, inside)
