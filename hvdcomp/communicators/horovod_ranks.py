"""What communicators over Horovod know of their ranks, whatever the framework."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from typing import Any

import numpy as np

from hvdcomp.communicators import Communicator, LoopbackCommunicator
from hvdcomp.communicators.nodes import DYNAMIC, Nodes
from hvdcomp.errors import ConfigurationError, RankMismatchError, UnevenNodesError

RANKS_PER_NODE = "HVDCOMP_RANKS_PER_NODE"
"""In the environment: how many ranks, one after the other, count as a node, whatever Horovod says."""


class HorovodRanks(Communicator):
    """The ranks of a Horovod process set: what a communicator over Horovod knows beside how to communicate.

    Args:
        hvd: Horovod's module for the framework, such as horovod.torch.
        process_set: of Horovod.

    Attributes:
        included: whether this process is one of them; if not, it is the only one that it knows of.
        rank: this process's place among them; -1 outside of the process set.
        world_size: how many they are; 1 outside of the process set, where there is nobody to exchange with.
    """

    def __init__(self, hvd: Any, process_set: Any) -> None:
        self._hvd = hvd
        self._process_set = process_set
        self._ops = {"mean": hvd.Average, "sum": hvd.Sum, "max": hvd.Max}
        self.included: bool = process_set.included()
        self.rank, self.world_size = self._rank_and_size()
        self._parts: dict[str, Communicator] = {}

    def _rank_and_size(self) -> tuple[int, int]:
        return (self._process_set.rank(), self._process_set.size()) if self.included else (-1, 1)

    def part(self, group: str) -> Communicator:
        if group == "all":
            return self
        if not self._parts:
            self._parts = self._make_parts()
        return self._parts[group]

    def _make_parts(self) -> dict[str, Communicator]:
        if self.world_size != self._hvd.size():  # all of Horovod's ranks must ask for a process set
            raise ConfigurationError(
                f"two levels work among all {self._hvd.size()} ranks, and the process set has {self.world_size}; leave "
                "out process_set or two_level"
            )
        nodes = Nodes(self._node_of_ranks())
        sets = {group: _process_set(self._hvd, list(group)) for group in nodes.groups()}
        parts: dict[str, Communicator] = {}
        for name in ("node", "across"):
            members = nodes.members(self.rank, name)
            if len(members) == self.world_size:
                parts[name] = self
            else:
                parts[name] = LoopbackCommunicator() if len(members) == 1 else self._of(sets[members])
        return parts

    def _of(self, process_set: Any) -> Communicator:
        """The communicator of a process set."""
        return type(self)(process_set)  # type: ignore[call-arg]

    def _node_of_ranks(self) -> list[int]:
        """The number of each rank's node.

        All ranks learn what all know, and so refuse alike: one that went on alone would wait for ever.
        """
        hvd = self._hvd
        facts = np.array([hvd.cross_rank(), hvd.local_size(), *_from_environment()], np.int32)
        gathered = np.asarray(self.gather_bytes(facts.view(np.uint8), "hvdcomp.nodes"))
        nodes, sizes, given, may_group = gathered.reshape(-1).view(np.int32).reshape(-1, len(facts)).T.tolist()
        for name, values in ((RANKS_PER_NODE, given), (DYNAMIC, may_group)):
            if len(set(values)) > 1:
                raise ConfigurationError(f"the ranks' environments differ in {name}; set it alike on all ranks")
        if given[0] < 0:
            raise ConfigurationError(
                f"{RANKS_PER_NODE}={os.environ[RANKS_PER_NODE]!r} is not allowed; give a whole number of at least 1, "
                "or leave it out"
            )
        if given[0]:
            return [rank // given[0] for rank in range(self.world_size)]
        if len(set(sizes)) > 1:  # where Horovod's numbers of nodes say nothing
            raise UnevenNodesError(
                "two levels need the same number of ranks on every node, and there are nodes with "
                f"{' and '.join(map(str, sorted(set(sizes))))}; start as many on each, or leave out two_level"
            )
        return nodes

    def gather_bytes(self, mine: np.ndarray, name: str) -> Any:
        """Every rank's bytes, uint8 (world_size, length)."""
        raise NotImplementedError

    @property
    def has_mpi(self) -> bool:
        """Whether all of MPI's ranks take part, and MPI can be used beside Horovod's own thread."""
        hvd = self._hvd
        everyone = self.world_size == hvd.size()
        return everyone and hvd.mpi_enabled() and hvd.mpi_threads_supported() and find_spec("mpi4py") is not None

    @property
    def is_stale(self) -> bool:
        """Whether Horovod was started anew with other ranks."""
        return self._rank_and_size() != (self.rank, self.world_size)

    @property
    def root(self) -> int:
        """The number, among all of Horovod's ranks, of the one that is first in the process set."""
        return self._process_set.ranks[0] if self._process_set.ranks else 0

    def check_gathered(self, gathered: int, mine: int, name: str) -> None:
        """Makes sure that all ranks put the same number of bytes into an allgather, whose total every rank sees.

        Args:
            gathered, mine: bytes of all ranks, and of this one.
            name: of the collective.

        Raises:
            RankMismatchError: on every rank that put in less or more than the mean.
        """
        if gathered != mine * self.world_size:
            raise RankMismatchError(
                f"the ranks' payloads differ in size: rank {self.rank} sent {mine} bytes in {name}, and all "
                f"{self.world_size} ranks together {gathered}. The same tensors must be compressed alike on every "
                "rank: give all ranks the same model, and change levels on all of them between the same two steps."
            )


def _from_environment() -> tuple[int, int]:
    """Ranks a node as the user gives them, 0 if not, and -1 if that is no such number; and whether Horovod may make
    process sets."""
    text = os.environ.get(RANKS_PER_NODE)
    given = 0
    if text is not None:
        given = int(text) if text.isdecimal() and len(text) < 10 else 0
        given = given or -1
    return given, int(os.environ.get(DYNAMIC, "0") not in ("", "0"))


def _process_set(hvd: Any, ranks: list[int]) -> Any:
    """Horovod's process set of some ranks: one that is there, or a new one. All ranks ask for the same in one order.

    Raises:
        ConfigurationError: if Horovod lets nobody make process sets now.
    """
    known = sys.modules[f"{hvd.__name__}.mpi_ops"]._basics._get_process_set_ids_and_ranks()
    for number, members in known.items():
        if members == ranks:
            found = hvd.ProcessSet(ranks)
            found.process_set_id = number
            return found
    try:
        return hvd.add_process_set(ranks)
    except ValueError as error:
        raise ConfigurationError(
            "two levels need process sets of Horovod, which it lets nobody make now: set "
            f"{DYNAMIC}=1 in the environment of all ranks, or start with hvd.init(process_sets='dynamic') ({error})"
        ) from error
