"""Compares bucket forms of stateless compressors, on any number of ranks, with single tensors in NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hvdcomp.communicators.in_process import run_ranks
from hvdcomp.compressors import Compressor
from hvdcomp.compressors.bucket import Bucket
from hvdcomp.compressors.memory import ErrorFeedback, Memory, NoMemory
from hvdcomp.compressors.protocol import AllGather, AllReduce, Context, TensorInfo
from tests.harness import densify
from tests.lockstep import run_lockstep

GUARD = np.float32(-12345.0)


class Step(NamedTuple):
    """One rank's step. found_inf: in x or what was sent; found_inf_after: in a mean. x is what is left of it."""

    found_inf: bool
    found_inf_after: bool
    means: list[np.ndarray]
    x: list[np.ndarray]
    bytes_sent: int


class Rank:
    """One rank's bucket, with a guard around everything that kernels write to.

    Args:
        xs: of the tensors; where a memory keeps something, their gradients.
        sources: what is compressed in their place; x is there already then.
        start: elements by which everything is out of line.
    """

    def __init__(
        self,
        compressors: Sequence[Compressor],
        xs: Sequence[np.ndarray],
        context: Context,
        memory: Memory,
        threads: int = 1,
        start: int = 0,
        sources: Sequence[np.ndarray] | None = None,
    ) -> None:
        self._start = start
        tensors = [TensorInfo(f"t{i}", x.shape) for i, x in enumerate(xs)]
        self.bucket = bucket = Bucket(tensors, compressors, memory)
        bucket.context = context
        bucket.table.bucket.threads = threads
        self._rooms: list[np.ndarray] = []
        gradients, self.means, self.x = ([self._room(x) for x in xs] for _ in range(3))
        for mean in self.means:
            mean[:] = GUARD
        bucket.segments["gradient"] = [x.ctypes.data for x in gradients]
        bucket.segments["result"] = [x.ctypes.data for x in self.means]
        compressed = gradients
        if bucket.keeps:
            bucket.segments["x"] = [x.ctypes.data for x in self.x]
        if sources is not None:
            compressed = [self._room(source) for source in sources]
            bucket.segments["source"] = [source.ctypes.data for source in compressed]

    def _room(self, x: np.ndarray) -> np.ndarray:
        room = np.full(self._start + x.size + 3, GUARD, np.float32)
        self._rooms.append(room)
        own = room[self._start : -3]
        own[:] = x.reshape(-1)
        return own

    def check_guards(self) -> None:
        for room in self._rooms:
            assert (room[: self._start] == GUARD).all()
            assert (room[-3:] == GUARD).all()


def run_buckets(
    compressors: Sequence[Compressor],
    xs: Sequence[Sequence[np.ndarray]],
    step: int = 0,
    keeps: bool = False,
    **options: Any,
) -> list[Step]:
    """A step of a bucket on `len(xs)` ranks.

    Args:
        xs: of each rank and tensor.
        keeps: whether what is not sent is kept.
        options: of `Rank`.
    """
    memory = ErrorFeedback() if keeps else NoMemory()

    def work(communicator: Any) -> Step:
        context = Context("", step, 5, communicator.rank, communicator.world_size)
        rank = Rank(compressors, xs[communicator.rank], context, memory, **options)
        generator = rank.bucket.compressors[0].aggregate_bucket(rank.bucket)
        answer: Any = None
        bytes_sent = 0
        while True:
            try:
                request = generator.send(answer)
            except StopIteration as stop:
                rank.check_guards()
                return Step(rank.bucket.found_inf, stop.value, rank.means, rank.x, bytes_sent)
            rank.check_guards()
            if isinstance(request, AllGather):
                (vector,) = request.parts
                bytes_sent += vector.nbytes
                assert request.with_room is not None
                rows = communicator.wait(communicator.start_allgather(request.with_room, "round"))
                assert rows.strides[0] % 8 == 0
                answer = rows[:, : len(vector)]
            else:
                assert isinstance(request, AllReduce)
                bytes_sent += request.array.nbytes
                answer = communicator.wait(communicator.start_allreduce(request.array, request.op, "round"))

    return list(run_ranks(len(xs), work))


def assert_as_by_themselves(
    compressors: Sequence[Compressor],
    xs: Sequence[Sequence[np.ndarray]],
    steps: Sequence[Step],
    step: int = 0,
    sources: Sequence[Sequence[np.ndarray]] | None = None,
    keeps: bool = False,
) -> None:
    """Each tensor's mean and, if it is kept, x - C(x), bit by bit; and the bytes of all."""
    for place, compressor in enumerate(compressors):
        compressed = [own[place] for own in sources or xs]
        expected = run_lockstep(compressor, compressed, step, 5, f"t{place}")
        for rank, (outcome, found) in enumerate(zip(expected.outcomes, steps, strict=True)):
            where = f"tensor {place} ({compressor}, {compressed[0].shape}), rank {rank}"
            np.testing.assert_array_equal(found.means[place], outcome.mean.reshape(-1), where)
            if keeps:
                with np.errstate(over="ignore"):
                    left = xs[rank][place].reshape(-1) - densify(outcome.sent, found.x[place].shape)
                np.testing.assert_array_equal(found.x[place], np.where(np.isfinite(left), left, 0), where)
    for rank, found in enumerate(steps):
        assert not found.found_inf
        payloads = sum(c.payload_bytes(x.shape) for c, x in zip(compressors, xs[rank], strict=True))
        assert 0 <= found.bytes_sent - payloads < 4
