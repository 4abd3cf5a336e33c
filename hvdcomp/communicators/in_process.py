"""Many ranks as threads of one process: real collectives without a network, for tests and for trying things out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from hvdcomp.arrays import arrays_for
from hvdcomp.collectives import Array

Result = TypeVar("Result")


class InProcessGroup:
    """The meeting place of `size` ranks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.slots: list[Any] = [None] * size
        self.barrier = threading.Barrier(size)

    def meet(self, rank: int, contribution: Any) -> list[Any]:
        """Gives this rank's contribution and returns all of them, in rank order."""
        self.slots[rank] = contribution
        self.barrier.wait()
        everyone = list(self.slots)
        self.barrier.wait()
        return everyone


class InProcessCommunicator:
    """One rank of an `InProcessGroup`. Sums run in rank order, so that all ranks get the same bits."""

    def __init__(self, group: InProcessGroup, rank: int) -> None:
        self._group = group
        self.rank = rank
        self.size = group.size

    def start_allreduce(self, array: Array, op: str, name: str) -> tuple[str, str, Array]:
        return f"allreduce {op}", name, array

    def start_allgather(self, array: Array, name: str) -> tuple[str, str, Array]:
        return "allgather", name, array

    def start_broadcast(self, array: Array, name: str) -> tuple[str, str, Array]:
        return "broadcast", name, array

    def wait(self, handle: tuple[str, str, Array]) -> Array:
        kind, name, array = handle
        everyone = self._group.meet(self.rank, (kind, name, tuple(array.shape), array))
        if len({contribution[:3] for contribution in everyone}) > 1:
            raise RuntimeError(f"the ranks started different collectives: {[c[:3] for c in everyone]}")
        arrays = [contribution[3] for contribution in everyone]
        result = _combine(kind, arrays)
        self._group.barrier.wait()  # nobody reuses an array that another rank still reads
        return result


def _combine(kind: str, arrays: list[Array]) -> Array:
    xp = arrays_for(arrays[0])
    if kind == "broadcast":
        return xp.concatenate(arrays[:1])
    if kind == "allgather":
        return xp.reshape(xp.concatenate(arrays), (len(arrays), arrays[0].shape[0]))
    total = xp.concatenate(arrays[:1])
    for array in arrays[1:]:
        total = xp.where(array > total, array, total) if kind == "allreduce max" else total + array
    return xp.scale(total, 1 / len(arrays)) if kind == "allreduce mean" else total


def run_ranks(size: int, work: Callable[[InProcessCommunicator], Result]) -> Sequence[Result]:
    """Runs `work` on `size` ranks at once and returns their results in rank order.

    Raises:
        The first error of any rank; the other ranks are released from their collectives.
    """
    group = InProcessGroup(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(InProcessCommunicator(group, rank))
        except BaseException as error:
            if not isinstance(error, threading.BrokenBarrierError):
                errors.append(error)
            group.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
