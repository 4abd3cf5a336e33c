"""Simulated ranks: threads of one process that compute the same results as real ranks, bit for bit. The durations of
collectives are predicted instead of measured.

An allreduce adds up in the order of Gloo's ring, which torch.distributed uses on CPUs. Each rank has one clock for each
simulated link. A clock runs while its rank computes, and stops while other ranks compute. With each collective, each
clock advances by the time that is predicted for its link. Therefore one run predicts the times on several links.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvdcomp.arrays import arrays_for
from hvdcomp.arrays.types import AnyArray
from hvdcomp.communicators.in_process import Contribution, InProcessCommunicator, InProcessGroup, results_of

LinkCost = Callable[[str, int, int], float]
"""A function that predicts the duration of a collective on one link, in seconds. Its arguments are the kind of
collective, the bytes that each rank contributes, and the number of ranks that take part."""

Moment = np.ndarray
"""The times on all clocks of a rank in seconds since the start of the run, as an array of shape (links,)."""

_SEGMENT_BYTES = 2**20  # Gloo sends segments of at most this size


class SimulatedGroup(InProcessGroup):
    """Runs simulated ranks, and keeps their clocks.

    Args:
        size: number of ranks.
        costs: for each link, a function that predicts the duration of a collective in seconds; None for a link on which
            collectives take no time. If a rank asks for the time, it gets the time on its clock for the first link.
        timer: function that returns how many seconds the calling thread has computed.
        finish: function that waits until the accelerator has finished the work of the calling thread.
        ranks_per_node: number of ranks per node; None if all ranks are on one node. If there are several nodes,
            collectives within a node take no time.
    """

    def __init__(
        self,
        size: int,
        costs: Sequence[LinkCost | None] = (None,),
        timer: Callable[[], float] = time.thread_time,
        finish: Callable[[], None] = lambda: None,
        ranks_per_node: int | None = None,
    ) -> None:
        super().__init__(size, ranks_per_node)
        self._costs = costs
        self._timer = timer
        self._finish_computing = finish
        # Times on the clocks of each rank when the rank's timer was last read.
        self._clocks = np.zeros((size, len(costs)))
        self._marks: dict[int, float] = {}  # for each rank that computes, the last reading of its timer
        self._starts: dict[int, Moment] = {}  # for each rank, the times at which its contribution was ready
        self._links_free = np.zeros(len(costs))  # for each link, the time at which it becomes free

    def moment(self, rank: int) -> Moment:
        """The times on the clocks of a rank. Only the thread of this rank may call this method."""
        reading = self._timer()
        self._clocks[rank] += reading - self._marks.get(rank, reading)
        self._marks[rank] = reading
        return self._clocks[rank].copy()

    def meet_at(self, rank: int, contribution: Contribution, start: Moment) -> AnyArray:
        """Runs a collective like `exchange`, and advances the clocks of this rank. According to these clocks, the
        collective started at the moment `start`."""
        self._starts[rank] = start
        self._finish_computing()
        self.moment(rank)
        result = self.exchange(rank, contribution)
        self._marks[rank] = self._timer()
        return result

    def share(self, rank: int, value: Any, name: str) -> list[Any]:
        """Gives every rank a copy of the values of all ranks, in rank order. This takes no time on the simulated
        clocks."""
        self._finish_computing()
        self.moment(rank)
        all_ranks = tuple(range(self.world_size))
        packed: Any = self.exchange(rank, ("objects", name, (), pickle.dumps(value), all_ranks))
        values = [pickle.loads(row) for row in packed]
        self._marks[rank] = self._timer()
        return values

    def _communicator(self, rank: int) -> SimulatedCommunicator:
        return SimulatedCommunicator(self, rank)

    def _results_of(self, contributions: dict[int, Contribution]) -> dict[int, AnyArray]:
        results = super()._results_of(contributions)
        if next(iter(contributions.values()))[0] == "objects":
            self._clocks[:] = self._clocks.max(axis=0)
            return results
        begun = self._links_free
        for members in {contribution[4] for contribution in contributions.values()}:
            kind, _, _, array, _ = contributions[members[0]]
            ready = np.max([self._starts[rank] for rank in members], axis=0)
            seconds = self._seconds(kind.split()[0], int(array.nbytes), members)
            done = np.maximum(ready, begun) + seconds
            for rank in members:
                self._clocks[rank] = np.maximum(self._clocks[rank], done)
            self._links_free = np.maximum(self._links_free, done)
        return results

    def _seconds(self, kind: str, size: int, members: tuple[int, ...]) -> np.ndarray:
        """The predicted duration of a collective on each link in seconds, as an array of shape (links,)."""
        within_node = self.nodes.count > 1 and set(members) <= set(self.nodes.members(members[0], "node"))
        costs = [None] * len(self._costs) if within_node else self._costs
        return np.array([0.0 if cost is None else cost(kind, size, len(members)) for cost in costs])

    def _combined(self, arrays: list[AnyArray], kind: str) -> list[AnyArray]:
        if kind == "objects":
            return [arrays] * len(arrays)
        if kind.startswith("reducescatter"):
            return _rows_added(arrays, kind)
        return results_of(arrays, kind, add_in_a_ring)


class SimulatedCommunicator(InProcessCommunicator):
    """The communicator of one rank of a `SimulatedGroup`, with the methods that bindings need.

    Attributes:
        starts_at: the moment that is recorded as the start of every collective; None to record the moment when the
            collective is actually started.
    """

    has_mpi = False
    is_stale = False
    group: SimulatedGroup

    def __init__(self, group: SimulatedGroup, rank: int, members: tuple[int, ...] = ()) -> None:
        super().__init__(group, rank, members)
        self.starts_at: Moment | None = None

    def now(self) -> float:
        """The time on this rank's clock for the first link, in seconds since the start of the run."""
        return float(self.moment()[0])

    def moment(self) -> Moment:
        """The times on this rank's clocks for all links in seconds since the start of the run, as an array of shape
        (links,)."""
        return self.group.moment(self._number)

    def renewed(self) -> SimulatedCommunicator:
        raise NotImplementedError("simulated ranks never change")

    def _start(self, kind: str, name: str, array: AnyArray) -> Any:
        return kind, name, array, self.moment() if self.starts_at is None else self.starts_at

    def wait(self, started: Any) -> AnyArray:
        kind, name, array, start = started
        return self.group.meet_at(self._number, (kind, name, tuple(array.shape), array, self._members), start)


def add_in_a_ring(arrays: list[AnyArray]) -> AnyArray:
    """The sum of flat arrays, added up in the order of Gloo's ring. Gloo cuts the arrays into one block for each rank,
    and adds up each block in a different order.

    Blocks have equal numbers of whole segments; the last block may be shorter. The sum of block j begins with the array
    of rank j - 1, and continues with ranks j - 2, j - 3 and so on.

    We found the order by experiment; tests/tools/train/test_train_simulated.py compares it with real ranks.
    """
    ranks, length = len(arrays), arrays[0].shape[0]
    if ranks < 3:  # the sum of two arrays does not depend on the order of addition
        return arrays[0] + arrays[1] if ranks == 2 else arrays_for(arrays[0]).concatenate(arrays)
    itemsize = int(arrays[0].nbytes) // max(length, 1)
    segments = max(-(-length * itemsize // _SEGMENT_BYTES), 2 * ranks)
    segments = -(-segments // ranks) * ranks
    block = segments // ranks * -(-length // segments)
    blocks = []
    for number in range(ranks):
        place = slice(number * block, (number + 1) * block)
        total = arrays[number - 1][place]
        for distance in range(2, ranks + 1):
            total = total + arrays[(number - distance) % ranks][place]
        blocks.append(total)
    return arrays_for(arrays[0]).concatenate(blocks)


def _rows_added(arrays: list[AnyArray], kind: str) -> list[AnyArray]:
    """The results of a reduce-scatter, in rank order. An alltoall gives each rank its rows from all ranks, and the rank
    adds up these rows. hvdcomp's communicator for torch.distributed does the same on CPUs."""
    xp, ranks = arrays_for(arrays[0]), len(arrays)
    rows = results_of(arrays, "alltoall", add_in_a_ring)
    factor = 1 / ranks if kind.endswith("mean") else 1.0
    sums = [row.sum(0) if not isinstance(row, np.ndarray) else np.add.reduce(row, axis=0) for row in rows]
    return [xp.concatenate([array * factor]) if factor != 1.0 else array for array in sums]
