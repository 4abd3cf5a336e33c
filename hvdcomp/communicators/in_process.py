"""Ranks that are threads of one process. Their collectives work without a network, for tests and experiments."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from hvdcomp.arrays import arrays_for
from hvdcomp.arrays.types import AnyArray
from hvdcomp.communicators.nodes import Nodes

Result = TypeVar("Result")
# What a rank contributes to a collective: kind and name of the collective, shape of the rank's array, the array, and
# the ranks that take part.
Contribution = tuple[str, str, tuple[int, ...], AnyArray, tuple[int, ...]]


class ReleasedError(Exception):
    """This rank waits for a collective that will not happen, because another rank has ended or failed."""


class InProcessGroup:
    """Runs `size` ranks in threads, with their collectives. Each node has `ranks_per_node` ranks. If `ranks_per_node`
    is None, all ranks are on one node.

    In each collective, all ranks wait for each other. They also do so if only some of the ranks exchange data, because
    the threads of all ranks reach each collective at the same point of their program.

    Only one rank runs at a time. This rank runs until its next collective, and then the next rank runs. If threads ran
    concurrently, they would spend most of a short step waiting for Python's lock.
    """

    def __init__(self, size: int, ranks_per_node: int | None = None) -> None:
        self.world_size = size
        self.nodes = Nodes([rank // (ranks_per_node or size) for rank in range(size)])
        self.error: BaseException | None = None  # the first error that occurs on any rank; this error ends all ranks
        self._turns = [threading.Semaphore(0) for _ in range(size)]
        self._left: set[int] = set()
        self._contributions: dict[int, Contribution] = {}
        self._results: dict[int, AnyArray] = {}

    def exchange(self, rank: int, contribution: Contribution) -> AnyArray:
        """Adds this rank's contribution to a collective, waits for the contributions of all ranks, and returns the
        result for this rank."""
        if self.world_size == 1:
            return self._results_of({0: contribution})[0]
        if self._left:
            self._fail(_missed(min(self._left), contribution))
        else:
            self._contributions[rank] = contribution
            if len(self._contributions) == self.world_size:
                self._finish()
            self._pass_on(rank)
            self._turns[rank].acquire()
        if self.error is not None:
            raise ReleasedError
        return self._results[rank]

    def run(self, work: Callable[[InProcessCommunicator], Result]) -> Sequence[Result]:
        """Runs the function `work` on all ranks, and returns their results in rank order, as `run_ranks` does. The
        object does not reset other state, such as the clocks of a subclass, between two runs."""
        self.error, self._left, self._contributions = None, set(), {}
        results: list[Any] = [None] * self.world_size

        def run(rank: int) -> None:
            self._turns[rank].acquire()
            try:
                results[rank] = work(self._communicator(rank))
            except ReleasedError:
                pass
            except BaseException as error:
                self._fail(error)
            self._leave(rank)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self.world_size)]
        for thread in threads:
            thread.start()
        self._turns[0].release()
        for thread in threads:
            thread.join()
        if self.error is not None:
            raise self.error
        return results

    def _communicator(self, rank: int) -> Any:
        return InProcessCommunicator(self, rank)

    def _leave(self, rank: int) -> None:
        self._left.add(rank)
        if self._contributions:
            self._fail(_missed(rank, next(iter(self._contributions.values()))))
        self._pass_on(rank)

    def _fail(self, error: BaseException) -> None:
        """Records an error if it is the first error. This error ends all ranks at their next collective."""
        self.error = self.error or error

    def _finish(self) -> None:
        contributions, self._contributions = self._contributions, {}
        try:
            self._results = self._results_of(contributions)
        except Exception as error:
            self._fail(error)

    def _results_of(self, contributions: dict[int, Contribution]) -> dict[int, AnyArray]:
        """The result of a collective for each rank, as a mapping from rank numbers to new arrays."""
        results_by_rank: dict[int, AnyArray] = {}
        for members in {contribution[4] for contribution in contributions.values()}:
            group = [contributions[rank] for rank in members]
            if len({(*contribution[:3], contribution[4]) for contribution in group}) > 1:
                raise RuntimeError(f"the ranks started different collectives: {[c[:3] for c in group]}")
            results = self._combined([array for _, _, _, array, _ in group], group[0][0])
            results_by_rank.update(zip(members, results, strict=True))
        return results_by_rank

    def _combined(self, arrays: list[AnyArray], kind: str) -> list[AnyArray]:
        """The result of a collective for each rank that takes part, in rank order."""
        return results_of(arrays, kind, add_in_rank_order)

    def _pass_on(self, rank: int) -> None:
        following = ((rank + distance) % self.world_size for distance in range(1, self.world_size + 1))
        for next_rank in following:
            if next_rank not in self._left:
                self._turns[next_rank].release()
                break


class InProcessCommunicator:
    """The communicator of one rank of an `InProcessGroup`. Sums add arrays in rank order, so that all ranks get the
    same bits.

    Args:
        group: the object that runs all ranks.
        rank: number of this rank among all ranks.
        members: the ranks of this communicator, which take part in its collectives; all ranks by default.
    """

    def __init__(self, group: InProcessGroup, rank: int, members: tuple[int, ...] = ()) -> None:
        self.group = group
        self._number = rank
        self._members = members or tuple(range(group.world_size))
        self.rank = self._members.index(rank)
        self.world_size = len(self._members)

    def part(self, group: str) -> InProcessCommunicator:
        if group == "all":
            return self
        return type(self)(self.group, self._number, self.group.nodes.members(self._number, group))

    def start_allreduce(self, array: AnyArray, op: str, name: str) -> Any:
        return self._start(f"allreduce {op}", name, array)

    def start_allgather(self, array: AnyArray, name: str) -> Any:
        return self._start("allgather", name, array)

    def start_alltoall(self, array: AnyArray, name: str) -> Any:
        return self._start("alltoall", name, array)

    def start_reducescatter(self, array: AnyArray, op: str, name: str) -> Any:
        return self._start(f"reducescatter {op}", name, array)

    def start_broadcast(self, array: AnyArray, name: str) -> Any:
        return self._start("broadcast", name, array)

    def _start(self, kind: str, name: str, array: AnyArray) -> Any:
        return kind, name, array

    def wait(self, started: Any) -> AnyArray:
        kind, name, array = started
        return self.group.exchange(self._number, (kind, name, tuple(array.shape), array, self._members))


def _missed(rank: int, contribution: Contribution) -> RuntimeError:
    return RuntimeError(
        f"rank {rank} has ended, but another rank waits for rank {rank} in this collective: {contribution[:3]}"
    )


def results_of(arrays: list[AnyArray], kind: str, add: Callable[[list[AnyArray]], AnyArray]) -> list[AnyArray]:
    """The result of a collective for each rank, in rank order.

    Args:
        arrays: the array of each rank, in rank order.
        kind: kind of the collective, and its operation if it has one, such as "allreduce mean".
        add: function that returns the sum of arrays as a new array.
    """
    xp, ranks = arrays_for(arrays[0]), range(len(arrays))
    if kind == "alltoall":
        rows = [xp.reshape(array, (len(arrays), array.shape[0] // len(arrays))) for array in arrays]
        return [xp.reshape(xp.concatenate([row[rank] for row in rows]), rows[0].shape) for rank in ranks]
    if kind.startswith("reducescatter"):
        whole = _combine(kind.replace("reducescatter", "allreduce"), arrays, add)
        length = whole.shape[0] // len(arrays)
        return [xp.concatenate([whole[rank * length : (rank + 1) * length]]) for rank in ranks]
    combined = _combine(kind, arrays, add)
    return [combined, *(xp.concatenate([combined]) for _ in arrays[1:])]


def add_in_rank_order(arrays: list[AnyArray]) -> AnyArray:
    """The sum of the arrays, added up in rank order, as a new array."""
    total = arrays_for(arrays[0]).concatenate(arrays[:1])
    for array in arrays[1:]:
        total = total + array
    return total


def _combine(kind: str, arrays: list[AnyArray], add: Callable[[list[AnyArray]], AnyArray]) -> AnyArray:
    xp = arrays_for(arrays[0])
    if kind == "broadcast":
        return xp.concatenate(arrays[:1])
    if kind == "allgather":
        return xp.reshape(xp.concatenate(arrays), (len(arrays), arrays[0].shape[0]))
    if kind == "allreduce max":
        largest = xp.concatenate(arrays[:1])
        for array in arrays[1:]:
            largest = xp.where(array > largest, array, largest)
        return largest
    total = add(arrays)
    return total * (1 / len(arrays)) if kind == "allreduce mean" else total


def run_ranks(
    size: int, work: Callable[[InProcessCommunicator], Result], ranks_per_node: int | None = None
) -> Sequence[Result]:
    """Runs the function `work` on `size` ranks, which are threads, and returns their results in rank order.

    Raises:
        The first error of any rank. The other ranks end at their next collective.
    """
    return InProcessGroup(size, ranks_per_node).run(work)
