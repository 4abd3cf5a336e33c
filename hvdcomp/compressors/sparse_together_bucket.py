"""The bucket form of the sparsifiers whose ranks send the same blocks: one allreduce of the numbers that choose the
blocks of all tensors, and one of the chosen blocks' elements."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hvdcomp.arrays.types import Array, allreduce_dtype
from hvdcomp.compressors.bucket import Bucket, BucketAggregation
from hvdcomp.compressors.low_rank_bucket import Tasks
from hvdcomp.compressors.protocol import AllReduce

_PIECE = 1 << 16  # elements of a task, unless a block has more


class Blocks:
    """The blocks of a bucket's tensors, laid out as in `isa_sparse_together.c`, or on a device as in `together.py`.

    Attributes:
        judged: this rank's numbers for each block, tensor by tensor.
        rows: for each tensor the slice of its blocks among all blocks.
        passed: the tasks, as arguments of host kernels.
    """

    def __init__(self, bucket: Bucket) -> None:
        pairs = list(zip(bucket.compressors, bucket.tensors, strict=True))
        shapes = [method.blocks_of(tensor.shape) for method, tensor in pairs]
        counts = np.array([method.count(tensor.shape) for method, tensor in pairs])
        blocks, lengths = np.array(shapes, np.int64).T
        method = bucket.compressors[0]
        numbers = self._numbers = method.numbers_of_block()
        starts, ends = np.cumsum(blocks) - blocks, np.cumsum(blocks)
        self.rows = list(map(slice, starts.tolist(), ends.tolist()))
        self.judged = bucket.payload(int(ends[-1]) * numbers, "float32")
        wire = allreduce_dtype(bucket.dtype)
        self._half = wire == "float16"
        self._sent = bucket.payload(int(counts @ lengths), wire)
        self._chosen = bucket.zeros(int(counts.sum()), "int64")
        self._scratch = counts  # on a device
        self.passed: tuple[int, ...] = ()
        segments = bucket.segments
        segments["length"] = lengths
        if bucket.device is None:
            self._scratch = np.zeros(int(ends[-1]) if numbers > 1 else 0, np.float32)
            self._tasks = Tasks([(count, max(1, _PIECE // length)) for count, length in shapes])
            self.passed = self._tasks.passed
            segments["count"], segments["blocks"] = counts, starts
            segments["chosen"] = np.cumsum(counts) - counts
            segments["taken"] = np.cumsum(counts * lengths) - counts * lengths
        elif method.of_matrices:
            columns = lengths * numbers
            segments["count"], segments["p_factor"], segments["columns"] = numbers, starts * numbers, lengths
            segments["q_factor"] = np.cumsum(columns) - columns
        else:
            segments["count"], segments["scales"] = numbers, 4 * starts

    def exchange(self, bucket: Bucket) -> BucketAggregation:
        """The rest of a step, once `judged` is filled."""
        judged = yield AllReduce(self.judged.vector, with_room=self.judged.with_room)
        sent = self._sent
        bucket.call("together_encode", judged, self._numbers, self._scratch, self._chosen, sent.vector, self._half)
        mean = yield AllReduce(sent.vector, with_room=sent.with_room)
        return bucket.call("together_decode", *self.passed, mean, self._chosen, self._half)


def aggregate_together(bucket: Bucket, judge: Callable[[Bucket, Blocks], bool | Array]) -> BucketAggregation:
    """Runs a step for all tensors of a bucket.

    Args:
        bucket: the bucket.
        judge: function that makes x and fills `judged`; returns as `Bucket.call` does.
    """
    if bucket.layout is None:
        bucket.layout = Blocks(bucket)
    bucket.found_inf = judge(bucket, bucket.layout)
    return (yield from bucket.layout.exchange(bucket))
