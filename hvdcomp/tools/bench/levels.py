"""Whether the ranks of this run have two levels to exchange in."""

from __future__ import annotations

from dataclasses import dataclass

from hvdcomp.communicators import Communicator
from hvdcomp.compressors import Compressor, needs_nodes
from hvdcomp.errors import SpecError, UnevenNodesError


@dataclass(frozen=True)
class Levels:
    """The levels of a run.

    Attributes:
        ranks: all of them, with the groups that they form as `part`.
        ranks_per_node: None where there are no two levels.
        why_not: the reason why there are none; empty where there are.
    """

    ranks: Communicator
    ranks_per_node: int | None = None
    why_not: str = ""

    def check(self, compressor: Compressor) -> None:
        """Sees that a compressor can be used here.

        Raises:
            SpecError: for two levels where there are none.
        """
        if self.ranks_per_node is None and needs_nodes(compressor):
            raise SpecError(
                f"{compressor} cannot be measured here: {self.why_not}; start the same number of ranks, two or more, "
                "on each of several nodes, or leave it out"
            )


def find_levels(ranks: Communicator) -> Levels:
    """The levels of all ranks, which make their groups here. To be called on every rank.

    Raises:
        ConfigurationError: on every rank, if Horovod lets nobody make process sets, or the environments of the ranks
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
