"""The levels of a run: whether its ranks can exchange within nodes and between nodes."""

from __future__ import annotations

from dataclasses import dataclass

from hvdcomp.communicators import Communicator
from hvdcomp.compressors import Compressor, needs_nodes
from hvdcomp.errors import SpecError, UnevenNodesError


@dataclass(frozen=True)
class Levels:
    """The levels of a run.

    Attributes:
        ranks: all ranks; `part` gives their groups.
        ranks_per_node: None without two levels.
        why_not: the reason why there are no two levels; empty with two levels.
    """

    ranks: Communicator
    ranks_per_node: int | None = None
    why_not: str = ""

    def check(self, compressor: Compressor) -> None:
        """Checks that this run can use a compressor.

        Raises:
            SpecError: for a compressor in two levels, if the run has none.
        """
        if self.ranks_per_node is None and needs_nodes(compressor):
            raise SpecError(
                f"{compressor} cannot be measured here: {self.why_not}; start the same number of ranks, two or more, "
                "on each of several nodes, or leave this compressor out"
            )


def find_levels(ranks: Communicator) -> Levels:
    """The levels of this run; makes the groups of ranks. Every rank must call it.

    Raises:
        ConfigurationError: on every rank, if Horovod does not allow process sets, or the environments of the ranks
            differ.
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
