"""The part of communicators over Horovod that is the same in all frameworks: their ranks and nodes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from hvdcomp.communicators import Communicator
from hvdcomp.communicators.nodes import DYNAMIC
from hvdcomp.communicators.ranks import Ranks
from hvdcomp.errors import ConfigurationError

_SHUTDOWNS = "hvdcomp_shutdowns"  # of Horovod's library, where its Python keeps it


class HorovodRanks(Ranks):
    """The ranks of a Horovod process set: what a communicator over Horovod knows beside how to communicate.

    Args:
        hvd: Horovod's module for the framework, such as horovod.torch.
        process_set: of Horovod.

    Attributes:
        included: whether this process is one of them; if not, it is the only one that it knows of.
        rank: this process's place among them; -1 outside of the process set.
        world_size: how many they are; 1 outside of the process set, where there is nobody to exchange with.
    """

    GROUPING = DYNAMIC

    def __init__(self, hvd: Any, process_set: Any) -> None:
        super().__init__()
        self._hvd = hvd
        self._shutdowns = _shutdowns(hvd)
        self._generation = self._shutdowns.count
        self._process_set = process_set
        self._ops = {"mean": hvd.Average, "sum": hvd.Sum, "max": hvd.Max}
        self.included = process_set.included()
        self.rank, self.world_size = self._rank_and_size()

    def _rank_and_size(self) -> tuple[int, int]:
        return (self._process_set.rank(), self._process_set.size()) if self.included else (-1, 1)

    def check_grouping(self) -> None:
        if self.world_size != self._hvd.size():  # all of Horovod's ranks must ask for a process set
            raise ConfigurationError(
                f"two levels work among all {self._hvd.size()} ranks, and the process set has {self.world_size}; leave "
                "out process_set or two_level"
            )

    def make_groups(self, groups: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], Communicator]:
        sets = {group: process_set_of(self._hvd, list(group)) for group in groups}
        return {group: self._of(made) for group, made in sets.items() if self.rank in group}

    def _of(self, process_set: Any) -> Communicator:
        """The communicator of a process set."""
        return type(self)(process_set)  # type: ignore[call-arg]

    def place(self) -> tuple[int, int]:
        return self._hvd.cross_rank(), self._hvd.local_size()

    @property
    def has_mpi(self) -> bool:
        hvd = self._hvd
        everyone = self.world_size == hvd.size()
        return everyone and hvd.mpi_enabled() and hvd.mpi_threads_supported() and find_spec("mpi4py") is not None

    @property
    def is_stale(self) -> bool:
        return self._shutdowns.count != self._generation  # asked for each gradient

    def anew(self) -> Ranks:
        if self._process_set.process_set_id != 0:
            raise ConfigurationError(
                f"{self._process_set} is gone: Horovod forgets process sets when its ranks change. In an elastic job "
                "compression works among all ranks; leave out process_set"
            )
        return type(self)()  # type: ignore[call-arg]

    @property
    def root(self) -> int:
        """The number, among all of Horovod's ranks, of the one that is first in the process set."""
        return self._process_set.ranks[0] if self._process_set.ranks else 0


@dataclass
class _Shutdowns:
    """How often Horovod was shut down in this process, as far as it was counted."""

    count: int = 0


def _shutdowns(hvd: Any) -> _Shutdowns:
    """Counts, from the first call on, how often Horovod is shut down in this process.

    Horovod does not tell. After an elastic change rank and size may be those of before, though another worker has gone
    and a new one has come. So the function by which Horovod's Python shuts its library down is counted here.

    Args:
        hvd: Horovod's module for the framework.
    """
    library = sys.modules[f"{hvd.__name__}.mpi_ops"]._basics.MPI_LIB_CTYPES
    if not hasattr(library, _SHUTDOWNS):
        shut_down, made = library.horovod_shutdown, _Shutdowns()

        def counted() -> Any:
            made.count += 1
            return shut_down()

        setattr(library, _SHUTDOWNS, made)
        library.horovod_shutdown = counted
    shutdowns: _Shutdowns = getattr(library, _SHUTDOWNS)
    return shutdowns


def process_set_of(hvd: Any, ranks: list[int]) -> Any:
    """Horovod's process set of some ranks: one that is there, or a new one. All ranks ask for the same in one order.

    Raises:
        ConfigurationError: if Horovod lets nobody make process sets now.
    """
    known = sys.modules[f"{hvd.__name__}.mpi_ops"]._basics._get_process_set_ids_and_ranks()
    for number, members in known.items():
        if members == ranks:
            process_set = hvd.ProcessSet(ranks)
            process_set.process_set_id = number
            return process_set
    try:
        return hvd.add_process_set(ranks)
    except ValueError as error:
        raise ConfigurationError(
            "two levels need process sets of Horovod, which it lets nobody make now: set "
            f"{DYNAMIC}=1 in the environment of all ranks, or start with hvd.init(process_sets='dynamic') ({error})"
        ) from error
