"""The base of communicators between processes, over any library."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from hvdcomp.communicators import Communicator, LoopbackCommunicator
from hvdcomp.communicators.nodes import RANKS_PER_NODE, Nodes, asked_ranks_per_node, check_ranks_per_node
from hvdcomp.errors import ConfigurationError, RankMismatchError, UnevenNodesError


class Ranks(Communicator):
    """Ranks that may be split into nodes.

    Attributes:
        included: whether this process is one of the ranks.

    Class attributes:
        GROUPING: name of the environment variable that allows groups of ranks; set it to the same value on all ranks.
            "" if no variable is needed.
    """

    GROUPING: ClassVar[str] = ""
    included: bool = True

    def __init__(self) -> None:
        self._parts: dict[str, Communicator] = {}

    def part(self, group: str) -> Communicator:
        if group == "all":
            return self
        if not self._parts:
            self._parts = self._make_parts()
        return self._parts[group]

    def _make_parts(self) -> dict[str, Communicator]:
        self.check_grouping()
        nodes = Nodes(self._node_of_ranks())
        communicators = self.make_groups(nodes.groups())
        parts: dict[str, Communicator] = {}
        for name in ("node", "across"):
            members = nodes.members(self.rank, name)
            if len(members) == self.world_size:
                parts[name] = self
            else:
                parts[name] = LoopbackCommunicator() if len(members) == 1 else communicators[members]
        return parts

    def _node_of_ranks(self) -> list[int]:
        """The number of each rank's node.

        All ranks get the facts of all ranks, so that all refuse alike; a rank that went on alone would wait for ever.
        """
        facts = np.array([*self.place(), *_from_environment(self.GROUPING), self.number], np.int32)
        gathered = np.asarray(self.gather_bytes(facts.view(np.uint8), "hvdcomp.nodes"))
        columns = gathered.reshape(-1).view(np.int32).reshape(-1, len(facts)).T.tolist()
        nodes, sizes, ranks_per_node, may_group, numbers = columns
        for name, values in ((RANKS_PER_NODE, ranks_per_node), (self.GROUPING, may_group)):
            if len(set(values)) > 1:
                raise ConfigurationError(
                    f"the environment variable {name} differs between ranks; set it to the same value on all ranks"
                )
        check_ranks_per_node(ranks_per_node[0])
        if ranks_per_node[0]:
            return [number // ranks_per_node[0] for number in numbers]
        if len(set(sizes)) > 1:  # then numbers of nodes are not comparable
            raise UnevenNodesError(
                "two-level compression needs the same number of ranks on every node, but there are nodes with "
                f"{' and '.join(map(str, sorted(set(sizes))))} ranks; start the same number of ranks on each node, or "
                "leave out two_level"
            )
        return nodes

    def duplicate(self) -> Ranks:
        """A second communicator of the same ranks. Its collectives and those of this communicator do not block each
        other if their names differ. Call it on every rank."""
        return self

    # Methods that each library implements.

    @property
    def number(self) -> int:
        """The number of this rank in the whole job."""
        return self.rank

    @property
    def has_mpi(self) -> bool:
        """Whether MPI can be used in addition to the library that exchanges gradients, and all of MPI's ranks take
        part."""
        return False

    @property
    def is_stale(self) -> bool:
        """Whether the library was restarted with other ranks."""
        return False

    def renewed(self) -> Ranks:
        """Makes a new communicator of all present ranks. Call it if this communicator `is_stale`.

        Raises:
            ConfigurationError: on every rank, if this communicator had only some of all ranks.
        """
        raise NotImplementedError

    def check_grouping(self) -> None:
        """Raises ConfigurationError if these ranks cannot be split into groups of ranks."""

    def make_groups(self, groups: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], Communicator]:
        """The communicators of groups of these ranks, at least of the groups that this rank is in. All ranks call it
        with the same groups in the same order.

        Raises:
            ConfigurationError: if groups of ranks cannot be made.
        """
        raise NotImplementedError

    def place(self) -> tuple[int, int]:
        """The number of this rank's node and the node's number of ranks, from the launcher."""
        raise NotImplementedError

    def gather_bytes(self, own: np.ndarray, name: str) -> Any:
        """Every rank's bytes, uint8 (world_size, length)."""
        raise NotImplementedError

    def check_gathered(self, gathered: int, own: int, name: str) -> None:
        """Checks that all ranks sent the same number of bytes to an allgather, by the total that every rank sees.

        Args:
            gathered, own: bytes of all ranks, and of this rank.
            name: name of the collective.

        Raises:
            RankMismatchError: on every rank that sent less or more than the mean.
        """
        if gathered != own * self.world_size:
            raise RankMismatchError(
                f"the payloads of the ranks differ in size: rank {self.rank} sent {own} bytes in {name}, and all "
                f"{self.world_size} ranks together sent {gathered}. The same tensors must be compressed in the same "
                "way on every rank: give all ranks the same model, and change levels on all ranks between the same two "
                "steps."
            )


def _from_environment(grouping: str) -> tuple[int, int]:
    """`asked_ranks_per_node`, and whether groups of ranks may be made."""
    return asked_ranks_per_node(), int(not grouping or os.environ.get(grouping, "0") not in ("", "0"))
