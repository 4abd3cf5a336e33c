"""Sparsifiers in which all ranks choose the same elements, so that an allreduce can add up the values.

With such a method, a rank sends and receives about the same number of bytes with a hundred ranks as with two. If each
rank chose its own elements, values and indices would have to be gathered, and the received bytes would grow with the
number of ranks.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from hvdcomp.arrays import numpy_arrays
from hvdcomp.arrays.magnitudes import Magnitudes
from hvdcomp.arrays.types import Array, ArrayFunctions, allreduce_dtype, matrix_shape, number_of_elements, wide_dtype
from hvdcomp.compressors.base import Compressor, Count
from hvdcomp.compressors.bucket import Bucket, BucketAggregation
from hvdcomp.compressors.casts import NoCompression
from hvdcomp.compressors.inside import numbers_may_overflow
from hvdcomp.compressors.packing import pad
from hvdcomp.compressors.protocol import Aggregation, AllReduce, Context, Outcome, TensorInfo
from hvdcomp.compressors.randomness import drawn, shared_generator
from hvdcomp.compressors.sparse_payload import elements_kept
from hvdcomp.compressors.sparsification import WithRatio
from hvdcomp.kernels.tables import Tasks
from hvdcomp.specs.levels import Level

_PIECE = 1 << 16  # number of elements of a task, unless a block has more


@dataclass(frozen=True)
class BlocksTogether(WithRatio):
    """Base of methods in which all ranks send the same blocks of consecutive elements.

    A first allreduce sums numbers from which the score of each block is computed. A second allreduce sums the elements
    of the best blocks.
    """

    biased: ClassVar[bool] = True
    sent_is_own: ClassVar[bool] = False  # all ranks choose the blocks

    def blocks_of(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """The number of blocks of a tensor, and the number of elements of a block. The last block may have fewer
        elements."""
        raise NotImplementedError

    def judge(self, xp: ArrayFunctions, blocks: Array, context: Context) -> Array:
        """Computes numbers that describe each block of this rank (blocks, numbers). `scores` gets the means of these
        numbers over the ranks."""
        raise NotImplementedError

    def scores(self, xp: ArrayFunctions, judged: Array) -> Array:
        """The score of each block (blocks,), computed from the means of the numbers of `judge`. The blocks with the
        largest scores are sent."""
        raise NotImplementedError

    def numbers_of_block(self) -> int:
        """How many numbers `judge` computes for a block."""
        raise NotImplementedError

    def count(self, shape: tuple[int, ...]) -> int:
        """Number of blocks sent."""
        number, length = self.blocks_of(shape)
        return min(number, math.ceil(elements_kept(self.ratio, number_of_elements(shape)) / length))

    def aggregate(self, xp: ArrayFunctions, x: Array, state: tuple[Array, ...], context: Context) -> Aggregation:
        shape, dtype = tuple(x.shape), xp.dtype_name(x)
        vector, wide = xp.flatten(x), wide_dtype(dtype)
        size, (_, length) = vector.shape[0], self.blocks_of(shape)
        padded = pad(xp, vector, length)
        blocks = xp.reshape(padded, (-1, length))
        # All ranks compute scores from the same means, so they choose the same blocks.
        judged = yield AllReduce(self.judge(xp, xp.astype(blocks, wide), context))
        count = self.count(shape)
        chosen = Magnitudes(xp, self.scores(xp, judged), count).top(count)
        # The elements of the chosen blocks are averaged.
        places = xp.flatten(xp.reshape(chosen, (-1, 1)) * length + xp.arange(length, like=chosen))
        values = xp.take(padded, places)
        mean = yield AllReduce(xp.astype(values, allreduce_dtype(dtype)))

        def spread(elements: Array) -> Array:
            """Returns a tensor with the given elements at the chosen positions, and zeros elsewhere."""
            zeros = xp.zeros((padded.shape[0],), like=xp.astype(vector[:0], wide))
            return xp.reshape(xp.add_at(zeros, places, xp.astype(elements, wide))[:size], shape)

        return Outcome(spread(mean), xp.astype(spread(values), dtype))

    form: ClassVar[str] = "judge_bucket"

    def judge_bucket(self, bucket: Bucket, layout: _BlocksLayout) -> bool | Array:
        """Computes x, and writes this rank's numbers for each block to `layout.judged`. Returns whether a kernel found
        an inf or NaN, like `Bucket.call`."""
        raise NotImplementedError

    def aggregate_bucket(self, bucket: Bucket) -> BucketAggregation:
        """Like `aggregate`, but in passes over all tensors of the bucket:

        1. `judge_bucket` computes x and the numbers for its blocks.
        2. `together_encode` chooses the best blocks of each tensor by the means of these numbers, copies the blocks to
           the payload, and subtracts them from x.
        3. `together_decode` writes the means of the blocks to the results, and zeros elsewhere.
        """
        if bucket.layout is None:
            bucket.layout = _BlocksLayout(bucket)
        layout: _BlocksLayout = bucket.layout
        bucket.found_inf = self.judge_bucket(bucket, layout)
        judged = yield layout.judged.mean
        sent, chosen, half = layout.sent, layout.chosen, layout.half
        bucket.call("together_encode", judged, layout.numbers, layout.scratch, chosen, sent.vector, half)
        mean = yield sent.mean
        return bucket.call("together_decode", *layout.passed, mean, chosen, half)

    def level_for(self, compression_factor: float, shape: tuple[int, ...]) -> Level | None:
        super().level_for(compression_factor, shape)  # refuses a factor below 1
        size = number_of_elements(shape)
        if not size:
            return self.ratio
        number, length = self.blocks_of(shape)
        count = max(1, math.floor((size / compression_factor - number * self.numbers_of_block()) / length))
        return min(1.0, count * length / size)

    def route(self, tensor: TensorInfo) -> Compressor:
        return self if tensor.size and self.payload_floats(tensor.shape) < tensor.size else NoCompression()


@dataclass(frozen=True)
class TopKC(BlocksTogether):
    """Sends the chunks of consecutive elements with the largest sum of squares over all ranks (Han et al. 2024,
    arXiv:2407.01378: TopK chunked).

    Attributes:
        ratio: the share of the elements that is sent, rounded to whole chunks; at least one chunk is sent.
        chunk: the number of elements in a chunk. A smaller tensor is a single chunk.

    Example:
        >>> TopKC(ratio=0.01).payload_bytes((1000, 1000))
        102692
    """

    chunk: Count = 64

    name: ClassVar[str] = "topkc"
    examples: ClassVar[tuple[str, ...]] = ("topkc:ratio=0.01", "topkc:ratio=0.05,chunk=16")
    sends: ClassVar[str] = "a sum of squares per chunk, and the elements of the chosen chunks"
    reference: ClassVar[str] = "Han et al. 2024, arXiv:2407.01378"

    def blocks_of(self, shape: tuple[int, ...]) -> tuple[int, int]:
        size = number_of_elements(shape)
        length = max(1, min(self.chunk, size))
        return -(-size // length), length

    def judge(self, xp: ArrayFunctions, blocks: Array, context: Context) -> Array:
        """Computes |x_c|^2 of each chunk c."""
        norms = xp.astype(xp.row_norms(blocks), "float32")  # precise enough to compare chunks, even if x is float64
        return norms * norms

    def scores(self, xp: ArrayFunctions, judged: Array) -> Array:
        return xp.flatten(judged)

    def numbers_of_block(self) -> int:
        return 1

    def judge_bucket(self, bucket: Bucket, layout: _BlocksLayout) -> bool | Array:
        return bucket.call("together_judge", *layout.passed, layout.judged.vector)


@dataclass(frozen=True)
class ARCTopK(BlocksTogether):
    """Sends the rows of the mean gradient matrix that have the largest norms. A sketch estimates the norms (Chen et al.
    2025, arXiv:2510.26709).

    V is a matrix with `sketch` random columns. V is the same on all ranks and is drawn again in each step. The ranks
    average G V for their gradients G. The norm of a row of this average estimates the norm of the same row of the mean
    gradient. So gradients that cancel between ranks do not raise the estimate, although they would raise a sum of
    squares.

    Attributes:
        ratio: the share of the elements that is sent, rounded to whole rows; at least one row is sent.
        sketch: the number of columns of the random matrix V. With more columns, the estimates of the norms are more
            accurate.

    Example:
        >>> ARCTopK(ratio=0.05).payload_bytes((1000, 1000))
        216000
    """

    sketch: Count = 4

    name: ClassVar[str] = "arctopk"
    examples: ClassVar[tuple[str, ...]] = ("arctopk:ratio=0.05", "arctopk:ratio=0.1,sketch=2")
    sends: ClassVar[str] = "`sketch` numbers per row, and the elements of the chosen rows"
    of_matrices: ClassVar[bool] = True
    reference: ClassVar[str] = "Chen et al. 2025, arXiv:2510.26709"

    def blocks_of(self, shape: tuple[int, ...]) -> tuple[int, int]:
        return matrix_shape(shape)

    def judge(self, xp: ArrayFunctions, blocks: Array, context: Context) -> Array:
        """Computes the sketch G V, which has a few numbers for each row of the gradient G."""
        columns, dtype = blocks.shape[1], xp.dtype_name(blocks)
        return blocks @ drawn(
            xp, lambda: self._draw(columns, dtype, context), (columns, self.sketch), dtype, like=blocks
        )

    def _draw(self, columns: int, dtype: str, context: Context) -> np.ndarray:
        """Draws the random matrix V."""
        random = shared_generator(context, "arctopk")
        return random.standard_normal((columns, self.sketch), dtype=np.dtype(dtype).type)

    def scores(self, xp: ArrayFunctions, judged: Array) -> Array:
        return xp.flatten(xp.row_norms(judged))

    def numbers_of_block(self) -> int:
        return self.sketch

    def judge_bucket(self, bucket: Bucket, layout: _BlocksLayout) -> bool | Array:
        """Computes the sketches of all matrices. On the host NumPy computes the products, because a kernel would add in
        a different order."""
        contexts = [dataclasses.replace(bucket.context, name=tensor.name) for tensor in bucket.tensors]
        shapes = [matrix_shape(tensor.shape) for tensor in bucket.tensors]
        sketches = layout.judged.vector
        if bucket.device is not None:
            pairs = zip(shapes, contexts, strict=True)
            parts = [self._draw(columns, "float32", context).T.reshape(-1) for (_, columns), context in pairs]
            columns = bucket.xp.from_numpy(np.concatenate(parts), like=sketches)
            return bucket.call("together_sketch", columns, sketches)
        found_inf = bucket.call("make_x")
        sketches = sketches.reshape(-1, self.sketch)
        with numbers_may_overflow():
            for x, shape, context, rows in zip(bucket.compressed(), shapes, contexts, layout.rows, strict=True):
                sketches[rows] = self.judge(numpy_arrays, x.reshape(shape), context)
        return found_inf


class _BlocksLayout:
    """The layout of the blocks of a bucket's tensors. On the host, `isa_sparse_together.c` describes this layout, and
    on a device `together.py` does.

    Attributes:
        numbers: how many numbers `judge` computes for each block.
        judged: the numbers that `judge` computes for this rank's blocks, in the order of tensors.
        sent: the payload of the second allreduce: the elements of the chosen blocks.
        chosen: the indices of the chosen blocks.
        half: whether elements are sent in half precision.
        scratch: storage that the kernel `together_encode` needs. On a device, it contains the number of chosen blocks
            of each tensor.
        rows: for each tensor, the slice of its blocks in the list of all blocks.
        passed: the tasks of the kernels, in the form in which host kernels get them.
    """

    def __init__(self, bucket: Bucket) -> None:
        pairs = list(zip(bucket.compressors, bucket.tensors, strict=True))
        shapes = [method.blocks_of(tensor.shape) for method, tensor in pairs]
        counts = np.array([method.count(tensor.shape) for method, tensor in pairs])
        blocks, lengths = np.array(shapes, np.int64).T
        method = bucket.compressors[0]
        numbers = self.numbers = method.numbers_of_block()
        starts, ends = np.cumsum(blocks) - blocks, np.cumsum(blocks)
        self.rows = list(map(slice, starts.tolist(), ends.tolist()))
        self.judged = bucket.payload(int(ends[-1]) * numbers, "float32")
        wire = allreduce_dtype(bucket.dtype)
        self.half = wire == "float16"
        self.sent = bucket.payload(int(counts @ lengths), wire)
        self.chosen = bucket.zeros(int(counts.sum()), "int64")
        self.scratch = counts  # a device stores the number of chosen blocks of each tensor here
        self.passed: tuple[int, ...] = ()
        segments = bucket.segments
        segments["length"] = lengths
        if bucket.device is None:
            self.scratch = np.zeros(int(ends[-1]) if numbers > 1 else 0, np.float32)
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
