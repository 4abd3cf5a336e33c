"""Determines the ranks of each node, and the ranks of different nodes that have the same local rank."""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence

from hvdcomp.errors import ConfigurationError, UnevenNodesError

DYNAMIC = "HOROVOD_DYNAMIC_PROCESS_SETS"

RANKS_PER_NODE = "HVDCOMP_RANKS_PER_NODE"
"""The environment variable with which a user sets the number of ranks per node. Consecutive ranks then form a node,
regardless of the launcher."""


def allow_process_sets() -> None:
    """Lets Horovod create process sets after its start, unless the user's environment forbids this. Call it before
    `hvd.init`."""
    os.environ.setdefault(DYNAMIC, "1")


def asked_ranks_per_node() -> int:
    """The number of ranks per node that the user has set in the environment; 0 if it is not set, and -1 if it is
    invalid."""
    text = os.environ.get(RANKS_PER_NODE)
    if text is None:
        return 0
    return (int(text) if text.isdecimal() and len(text) < 10 else 0) or -1


def check_ranks_per_node(ranks_per_node: int) -> None:
    """Raises ConfigurationError if `ranks_per_node` is -1, that is, if `asked_ranks_per_node` found an invalid
    number."""
    if ranks_per_node < 0:
        raise ConfigurationError(
            f"{RANKS_PER_NODE}={os.environ[RANKS_PER_NODE]!r} is not allowed; set it to a whole number of at least 1, "
            "or unset it"
        )


class Nodes:
    """The ranks of each node. All nodes have the same number of ranks.

    Args:
        of_ranks: for each rank, a key that identifies the rank's node, such as the node's number.

    Attributes:
        count: number of nodes.
        ranks_per_node: number of ranks on each node.

    Raises:
        UnevenNodesError: if nodes have different numbers of ranks.

    Example:
        >>> nodes = Nodes(["a", "a", "b", "b"])
        >>> nodes.members(3, "node"), nodes.members(3, "across")
        ((2, 3), (1, 3))
    """

    def __init__(self, of_ranks: Sequence[Hashable]) -> None:
        nodes: dict[Hashable, list[int]] = {}
        for rank, node in enumerate(of_ranks):
            nodes.setdefault(node, []).append(rank)
        self._nodes = [tuple(ranks) for ranks in nodes.values()]
        self._node_of = {rank: ranks for ranks in self._nodes for rank in ranks}
        self.count = len(self._nodes)
        self.ranks_per_node = len(self._nodes[0])
        if any(len(ranks) != self.ranks_per_node for ranks in self._nodes):
            numbers = ", ".join(str(len(ranks)) for ranks in self._nodes)
            raise UnevenNodesError(
                f"two-level compression needs the same number of ranks on every node, but the nodes have {numbers} "
                "ranks; start the same number of ranks on each node, or leave out two_level"
            )

    def members(self, rank: int, group: str) -> tuple[int, ...]:
        """The ranks of a rank's group, in ascending order. The group "all" consists of all ranks, "node" of the ranks
        on the same node as `rank`, and "across" of the ranks of all nodes that have the same local rank as `rank`."""
        if group == "all":
            return tuple(sorted(self._node_of))
        own_node = self._node_of[rank]
        return own_node if group == "node" else tuple(ranks[own_node.index(rank)] for ranks in self._nodes)

    def groups(self) -> list[tuple[int, ...]]:
        """All "node" and "across" groups of ranks, without duplicates, and in the same order on all ranks. Groups of
        one rank and of all ranks are omitted, because they need no communicator of their own."""
        groups = [*self._nodes, *zip(*self._nodes, strict=True)]
        return [ranks for ranks in dict.fromkeys(groups) if 1 < len(ranks) < len(self._node_of)]
