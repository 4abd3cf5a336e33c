"""What communicators over Horovod know of their ranks, whatever the framework."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from hvdcomp.communicators import Communicator
from hvdcomp.errors import RankMismatchError


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

    def _rank_and_size(self) -> tuple[int, int]:
        return (self._process_set.rank(), self._process_set.size()) if self.included else (-1, 1)

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
