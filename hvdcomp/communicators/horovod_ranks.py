"""The part of Horovod's communicators that PyTorch and TensorFlow share: ranks and nodes."""

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

_SHUTDOWNS = "hvdcomp_shutdowns"  # the attribute of Horovod's library in which the counter of shutdowns is stored


class HorovodRanks(Ranks):
    """The ranks of a Horovod process set. Subclasses add the collectives.

    Args:
        hvd: Horovod's module for the framework, such as horovod.torch.
        process_set: the process set.

    Attributes:
        included: whether this process is in the process set.
        rank: number of this process in the process set; -1 if it is not in the process set.
        world_size: number of ranks in the process set; 1 if this process is not in the process set, because it then
            exchanges nothing.
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
        if self.world_size != self._hvd.size():  # Horovod creates a process set only if all ranks of the job request it
            raise ConfigurationError(
                "two-level compression (exact means within a node, compression between nodes) needs all "
                f"{self._hvd.size()} ranks, but the process set has {self.world_size}; leave out process_set or "
                "two_level"
            )

    def make_groups(self, groups: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], Communicator]:
        sets = {group: process_set_of(self._hvd, list(group)) for group in groups}
        return {group: self._of(process_set) for group, process_set in sets.items() if self.rank in group}

    def _of(self, process_set: Any) -> Communicator:
        """The communicator of a process set."""
        return type(self)(process_set)  # type: ignore[call-arg]

    def place(self) -> tuple[int, int]:
        return self._hvd.cross_rank(), self._hvd.local_size()

    @property
    def has_mpi(self) -> bool:
        hvd = self._hvd
        all_ranks = self.world_size == hvd.size()
        return all_ranks and hvd.mpi_enabled() and hvd.mpi_threads_supported() and find_spec("mpi4py") is not None

    @property
    def is_stale(self) -> bool:
        # Only a cheap comparison, because this property is read for each gradient.
        return self._shutdowns.count != self._generation

    def renewed(self) -> Ranks:
        if self._process_set.process_set_id != 0:
            raise ConfigurationError(
                f"{self._process_set} no longer exists: Horovod forgets process sets when its ranks change. In an "
                "elastic job, hvdcomp can compress only among all ranks; leave out process_set"
            )
        return type(self)()  # type: ignore[call-arg]

    @property
    def root(self) -> int:
        """The Horovod rank of the first rank in the process set."""
        return self._process_set.ranks[0] if self._process_set.ranks else 0


@dataclass
class _Shutdowns:
    """Counts the shutdowns of Horovod in this process."""

    count: int = 0


def _shutdowns(hvd: Any) -> _Shutdowns:
    """The counter of Horovod's shutdowns in this process. The counter counts only the shutdowns after the first call of
    this function.

    Horovod itself has no such counter. After a change of ranks in an elastic job, this process may have the same rank
    and the same number of ranks as before, although one rank has left and another rank has joined. Therefore we count
    the calls of the function that shuts down Horovod's library.

    Args:
        hvd: Horovod's module for the framework, such as horovod.torch.
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
    """Horovod's process set of these ranks. The process set is created if it does not exist. Call this function on all
    ranks, and make several calls in the same order on all ranks.

    Raises:
        ConfigurationError: if Horovod was started without permission to create process sets later.
    """
    process_sets = sys.modules[f"{hvd.__name__}.mpi_ops"]._basics._get_process_set_ids_and_ranks()
    for number, members in process_sets.items():
        if members == ranks:
            process_set = hvd.ProcessSet(ranks)
            process_set.process_set_id = number
            return process_set
    try:
        return hvd.add_process_set(ranks)
    except ValueError as error:
        raise ConfigurationError(
            "two-level compression needs new process sets of Horovod, but Horovod was started without permission to "
            f"create process sets later. Set {DYNAMIC}=1 in the environment of all ranks, or start with "
            f"hvd.init(process_sets='dynamic') ({error})"
        ) from error
