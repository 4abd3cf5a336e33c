"""Simulated ranks: threads of one process with the results of real ranks, bit for bit, on links of predicted speed.

An allreduce adds up in the order of Gloo's ring, which torch.distributed uses on CPUs. Each rank has a clock for each
simulated link. The clock runs while the rank computes, stops while other ranks compute, and advances by the predicted
time of each exchange on its link. So one run predicts the times on several links.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvdcomp.arrays import arrays_for
from hvdcomp.arrays.types import Array
from hvdcomp.communicators.in_process import Contribution, InProcessCommunicator, InProcessGroup, results_of

LinkCost = Callable[[str, int, int], float]
"""Seconds of a collective: its kind, the bytes that each rank hands over, and the ranks that take part."""

Moment = np.ndarray
"""A time on each clock of a rank, in seconds since the start."""

_SEGMENT_BYTES = 2**20  # Gloo's largest segment


class SimulatedGroup(InProcessGroup):
    """The group of simulated ranks.

    Args:
        size: number of ranks.
        costs: cost of collectives on each link; None for a link that takes no time. Ranks go by the first link's clock.
        timer: function that returns the calling thread's compute time in seconds.
        finish: function that waits for the accelerator to finish the calling thread's work.
        ranks_per_node: as in `InProcessGroup`. With several nodes, exchanges within a node take no time.
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
        self._clocks = np.zeros((size, len(costs)))  # clocks of each rank at its latest mark
        self._marks: dict[int, float] = {}  # timer readings of ranks that compute
        self._starts: dict[int, Moment] = {}  # times at which each rank's contribution was ready
        self._links_free = np.zeros(len(costs))  # times from which each link is free

    def moment(self, rank: int) -> Moment:
        """The clocks of a rank. Only this rank may call it."""
        reading = self._timer()
        self._clocks[rank] += reading - self._marks.get(rank, reading)
        self._marks[rank] = reading
        return self._clocks[rank].copy()

    def meet_at(self, rank: int, contribution: Contribution, start: Moment) -> Array:
        """Like `exchange`, for a collective that started earlier according to the clocks of this rank."""
        self._starts[rank] = start
        self._finish_computing()
        self.moment(rank)
        result = self.exchange(rank, contribution)
        self._marks[rank] = self._timer()
        return result

    def share(self, rank: int, value: Any, name: str) -> list[Any]:
        """Copies of the values of all ranks. The simulated clocks count no time for this."""
        self._finish_computing()
        self.moment(rank)
        all_ranks = tuple(range(self.world_size))
        packed: Any = self.exchange(rank, ("objects", name, (), pickle.dumps(value), all_ranks))
        values = [pickle.loads(row) for row in packed]
        self._marks[rank] = self._timer()
        return values

    def _communicator(self, rank: int) -> SimulatedCommunicator:
        return SimulatedCommunicator(self, rank)

    def _results_of(self, contributions: dict[int, Contribution]) -> dict[int, Array]:
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
        """Seconds of a collective on each link."""
        within_node = self.nodes.count > 1 and set(members) <= set(self.nodes.members(members[0], "node"))
        costs = [None] * len(self._costs) if within_node else self._costs
        return np.array([0.0 if cost is None else cost(kind, size, len(members)) for cost in costs])

    def _combined(self, arrays: list[Array], kind: str) -> list[Array]:
        if kind == "objects":
            return [arrays] * len(arrays)
        if kind.startswith("reducescatter"):
            return _rows_added(arrays, kind)
        return results_of(arrays, kind, add_in_a_ring)


class SimulatedCommunicator(InProcessCommunicator):
    """One rank of a `SimulatedGroup`, with the methods that bindings use.

    Attributes:
        starts_at: the moment at which collectives count as started, if it is earlier than the present.
    """

    has_mpi = False
    is_stale = False
    group: SimulatedGroup

    def __init__(self, group: SimulatedGroup, rank: int, members: tuple[int, ...] = ()) -> None:
        super().__init__(group, rank, members)
        self.starts_at: Moment | None = None

    def now(self) -> float:
        """Seconds on this rank's clock of the first link."""
        return float(self.moment()[0])

    def moment(self) -> Moment:
        """Seconds on this rank's clock of each link."""
        return self.group.moment(self._number)

    def renewed(self) -> SimulatedCommunicator:
        raise NotImplementedError("simulated ranks never change")

    def _start(self, kind: str, name: str, array: Array) -> Any:
        return kind, name, array, self.moment() if self.starts_at is None else self.starts_at

    def wait(self, started: Any) -> Array:
        kind, name, array, start = started
        return self.group.meet_at(self._number, (kind, name, tuple(array.shape), array, self._members), start)


def add_in_a_ring(arrays: list[Array]) -> Array:
    """The sum of flat arrays in the order of Gloo's ring, in which each block starts at another rank.

    Blocks have equal numbers of whole segments; the last block may be shorter. The sum of block j begins with the array
    of rank j - 1 and goes down from rank to rank.

    The order was found by experiment; tests/tools/train/test_train_simulated.py compares it with real ranks.
    """
    ranks, length = len(arrays), arrays[0].shape[0]
    if ranks < 3:  # the order of two makes no difference
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


def _rows_added(arrays: list[Array], kind: str) -> list[Array]:
    """The rows of each rank, added up after an alltoall, as torch.distributed does it on CPUs."""
    xp, ranks = arrays_for(arrays[0]), len(arrays)
    rows = results_of(arrays, "alltoall", add_in_a_ring)
    factor = 1 / ranks if kind.endswith("mean") else 1.0
    sums = [row.sum(0) if not isinstance(row, np.ndarray) else np.add.reduce(row, axis=0) for row in rows]
    return [xp.concatenate([array * factor]) if factor != 1.0 else array for array in sums]
