"""The base class of communicators between processes, for any library."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from hvdcomp.communicators import Communicator, LoopbackCommunicator
from hvdcomp.communicators.nodes import RANKS_PER_NODE, Nodes, asked_ranks_per_node, check_ranks_per_node
from hvdcomp.errors import ConfigurationError, RankMismatchError, UnevenNodesError


class Ranks(Communicator):
    """A communicator between processes, whose ranks can be split into nodes.

    Attributes:
        included: whether this process is one of the ranks.

    Class attributes:
        GROUPING: name of the environment variable that allows groups of ranks. The user must set it to the same value
            on all ranks. Empty if no variable is needed.
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
        """The number of the node of each rank, in rank order.

        All ranks exchange the numbers that this method checks. Therefore all ranks raise the same error. If only some
        ranks raised an error, the other ranks would wait forever.
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
        if len(set(sizes)) > 1:  # then ranks of the same node may get different node numbers
            raise UnevenNodesError(
                "two-level compression needs the same number of ranks on every node, but there are nodes with "
                f"{' and '.join(map(str, sorted(set(sizes))))} ranks; start the same number of ranks on each node, or "
                "leave out two_level"
            )
        return nodes

    def duplicate(self) -> Ranks:
        """A second communicator of the same ranks, or this communicator itself if the library matches collectives by
        their names. In both cases, a collective of the result does not wait for a collective of this communicator with
        another name. Call this method on every rank."""
        return self

    # Methods that each library implements.

    @property
    def number(self) -> int:
        """The number of this process among all processes of the job."""
        return self.rank

    @property
    def has_mpi(self) -> bool:
        """Whether hvdcomp can use MPI in addition to the library that exchanges gradients. This requires that all
        ranks of MPI are ranks of this communicator."""
        return False

    @property
    def is_stale(self) -> bool:
        """Whether the library was restarted since this communicator was created, because ranks joined or left."""
        return False

    def renewed(self) -> Ranks:
        """Creates a new communicator of all current ranks. Call this method if the property `is_stale` is True.

        Raises:
            ConfigurationError: on every rank, if this communicator did not have all ranks.
        """
        raise NotImplementedError

    def check_grouping(self) -> None:
        """Raises ConfigurationError if these ranks cannot be split into groups of ranks."""

    def make_groups(self, groups: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], Communicator]:
        """The communicators of groups of ranks, by the ranks of the group. The result has at least the groups that this
        rank is in. All ranks call this method with the same groups in the same order.

        Raises:
            ConfigurationError: if the library cannot create groups of ranks.
        """
        raise NotImplementedError

    def place(self) -> tuple[int, int]:
        """Two numbers from the launcher: the number of this rank's node, and the number of ranks on this node."""
        raise NotImplementedError

    def gather_bytes(self, own: np.ndarray, name: str) -> Any:
        """Gathers the bytes of all ranks, uint8 (world_size, length).

        Args:
            own: bytes of this rank, uint8 (length,).
            name: name of the collective.
        """
        raise NotImplementedError

    def check_gathered(self, gathered: int, own: int, name: str) -> None:
        """Checks that all ranks sent the same number of bytes to an allgather. A rank knows only the total number of
        bytes and the number of bytes that it sent itself.

        Args:
            gathered: number of bytes that all ranks sent together.
            own: number of bytes that this rank sent.
            name: name of the collective, for the error message.

        Raises:
            RankMismatchError: on every rank that did not send the mean number of bytes.
        """
        if gathered != own * self.world_size:
            raise RankMismatchError(
                f"the payloads of the ranks differ in size: rank {self.rank} sent {own} bytes in {name}, and all "
                f"{self.world_size} ranks together sent {gathered}. The same tensors must be compressed in the same "
                "way on every rank: give all ranks the same model, and change levels on all ranks between the same two "
                "steps."
            )


def _from_environment(grouping: str) -> tuple[int, int]:
    """Two numbers from the environment: the result of `asked_ranks_per_node`, and whether groups of ranks are allowed
    (1) or not (0)."""
    return asked_ranks_per_node(), int(not grouping or os.environ.get(grouping, "0") not in ("", "0"))
