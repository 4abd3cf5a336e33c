"""Chunked top-k sends the largest elements of each chunk of neighboring elements. Indices and values need few bits."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Annotated, ClassVar

import numpy as np

from hvdcomp.arrays import arrays_for, numpy_arrays
from hvdcomp.arrays.types import Array, ArrayFunctions, number_of_elements, wide_dtype
from hvdcomp.compressors import sparse_payload
from hvdcomp.compressors.base import Compressor, Count, most_level_for
from hvdcomp.compressors.bucket import Bucket, BucketAggregation, gathered
from hvdcomp.compressors.packing import groups, pack, packed_bytes, unpack
from hvdcomp.compressors.protocol import Aggregation, AllGather, Context, Outcome, SparseVector
from hvdcomp.compressors.signs import from_signs, representable, to_signs
from hvdcomp.kernels.tables import CHUNK_PIECE, CODE_BITS, FOUR_MEANS, IN_FLOAT, IN_HALF, IN_SIGN, Tasks
from hvdcomp.specs.described import Rule, between
from hvdcomp.specs.levels import Level

VALUES = {"2bit": FOUR_MEANS, "sign": IN_SIGN, "fp16": IN_HALF, "float32": IN_FLOAT}
"""The allowed encodings of values, each with the number that stands for it in kernels."""

_MEANINGS = "'2bit' (one of four means), 'sign' (a sign), 'fp16' (half precision) or 'float32'"
_Values = Annotated[str, Rule(lambda values: values in VALUES, _MEANINGS)]
_BOUNDS = (-2.25, -0.75, 0.75)  # the borders between the four bins, in standard deviations from the mean
_SHARED_BYTES = {FOUR_MEANS: 16, IN_SIGN: 4}  # the bytes of a tensor's means
_VALUE_BYTES = {IN_HALF: 2, IN_FLOAT: 4}


@dataclass(frozen=True)
class ChunkedTopK(Compressor):
    """Sends the k elements of largest magnitude of each chunk of consecutive elements, as in SparseLoCo (Sarfi et al.
    2025, arXiv:2508.15706).

    An index within a chunk has as few bits as possible: 12 bits for 4096 elements. With two bits per value, float32
    gradients need 4096 * 32 / (64 * (12 + 2)) = 146.3 times more bits. 146.3 is the published number, which does not
    count four float32 means for each tensor. The last chunk of a tensor may have fewer elements. This last chunk sends
    the same share of its elements: ceil(k length / chunk).

    With `values=2bit`, two bits indicate which of four bins contains a value. The value is decoded as the mean of the
    values in this bin:

        bin(v) = round((v - mean) / s + 2), limited to 0 ... 3;  s = 6 sigma / 4

    mean and sigma are the mean and the standard deviation of all sent values of the tensor. So the borders between bins
    are at -2.25, -0.75 and 0.75 sigma from the mean. To compute sigma, the sum of squares is divided by n, not by n -
    1, for n values. With this choice, the method is a contraction even if only two values are sent: |x - C(x)| < |x|
    unless x = 0.

    The paper compresses the change of 30 local steps, with a residual decay of 0.95
    (`memory=error_feedback:decay=0.95`).

    With `values=sign`, only the sign of a value is sent. The sign is decoded as plus or minus the mean magnitude of the
    sent values of the tensor. Zero counts as positive. For example, if each chunk of 8 elements sends its largest
    element, a chunk takes 4 bits: one bit for the sign, and 3 bits for the index. To compute the mean magnitude, the
    magnitudes are added in float64, and the sum is multiplied by 1 / n in float64, for n values. The mean magnitude is
    then rounded to float32, or to the gradient's type if this has 16 bits. NumPy, PyTorch and kernels may add in
    different orders, but the error of a float64 sum hardly ever changes the float32 result. Ranks never differ, because
    all ranks decode with the magnitude that was sent.

    Attributes:
        chunk: number of elements in a chunk.
        k: number of elements of each chunk that are sent, at most `chunk`.
        values: how a value is sent. With "2bit", each value is sent as one of four numbers. With "sign", only the sign
            of each value is sent, together with one mean magnitude for the tensor. With "fp16" or "float32", each value
            is sent as a float. The memory keeps the rounding error.

    Raises:
        SpecError: if k is more than `chunk`.

    Example:
        >>> ChunkedTopK().payload_bytes((4096, 4096))  # 64 * 14 bits of each of 4096 chunks, and four means
        458768
        >>> ChunkedTopK(chunk=8, k=1, values="sign").payload_bytes((4096, 4096))  # 4 bits of each 8, and a magnitude
        1048580
    """

    chunk: Annotated[int, between(2, CHUNK_PIECE)] = 4096
    k: Count = 64
    values: _Values = "2bit"

    name: ClassVar[str] = "chunkedtopk"
    examples: ClassVar[tuple[str, ...]] = (
        "chunkedtopk",
        "chunkedtopk:chunk=128,k=4,values=float32",
        "chunkedtopk:chunk=8,k=1,values=sign",
    )
    level_name: ClassVar[str | None] = "k"
    sends: ClassVar[str] = (
        "k indices and k values of a few bits for each chunk; also four means with values=2bit, or one magnitude with "
        "values=sign"
    )
    biased: ClassVar[bool] = True
    reference: ClassVar[str] = "Sarfi et al. 2025, arXiv:2508.15706"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.k <= self.chunk, "k", f"at most chunk={self.chunk}, the number of elements in a chunk")

    @property
    def nested(self) -> bool:  # type: ignore[override]
        """False if values are sent as 2 bits or as signs. The means that are sent with them depend on which elements
        are chosen."""
        return VALUES[self.values] not in CODE_BITS

    def aggregate(self, xp: ArrayFunctions, x: Array, state: tuple[Array, ...], context: Context) -> Aggregation:
        """Sends the largest elements of each chunk. C(x) has the decoded values of these elements, and zeros elsewhere.
        The result is the mean of C(x) over the ranks."""
        vector = xp.flatten(x)
        size, wide = vector.shape[0], wide_dtype(xp.dtype_name(x))
        places = self._choose(xp, vector)
        indices = self._indices(xp, places, size)
        values = self._encode(xp, xp.take(vector, indices), x)
        ranks = yield AllGather((self._pack_places(xp, places, size), *values))
        decoded = (  # the values and the indices of each rank
            (self._decode(xp, values, size), self._indices(xp, self._unpack_places(xp, packed, size), size))
            for packed, *values in ranks
        )
        mean = sparse_payload.mean_of_sparse(xp, decoded, vector, context)
        sent = SparseVector(indices, xp.astype(self._decode(xp, values, size), wide))
        return Outcome(xp.reshape(mean, x.shape), sent)

    def aggregate_bucket(self, bucket: Bucket) -> BucketAggregation:
        """Like `aggregate`, but in passes over all tensors of the bucket:

        1. `chunks_encode` computes x, chooses the largest elements of each chunk, encodes them, and subtracts the
           decoded elements from x.
        2. `chunks_decode` adds the elements of all ranks to the results.
        """
        if bucket.layout is None:
            bucket.layout = _Layout(bucket, self.chunk, VALUES[self.values])
        layout = bucket.layout
        payload = layout.payload
        bucket.found_inf = bucket.call("chunks_encode", *layout.passed, bucket.masks, *layout.scratch, payload.vector)
        rows = yield payload.gather
        return bucket.call("chunks_decode", *layout.passed, *gathered(rows))

    def count(self, size: int) -> int:
        """The number of elements that are sent of a tensor with `size` elements."""
        return size // self.chunk * self.k + self._of_chunk(size % self.chunk)

    def _of_chunk(self, length: int) -> int:
        return -(-self.k * length // self.chunk)

    def _choose(self, xp: ArrayFunctions, vector: Array) -> Array:
        """The positions of the elements to send, int32 (count,). Each position is counted from the start of its chunk.
        The positions are in the order of the chunks."""
        magnitudes, functions = abs(xp.astype(vector, wide_dtype(xp.dtype_name(vector)))), xp
        if not xp.waits(vector):  # so that all frameworks make the same choice among equal elements as NumPy
            magnitudes, functions = arrays_for(magnitudes).to_numpy(magnitudes), numpy_arrays
        chunks = groups(functions, magnitudes, self.chunk)
        chosen = [functions.top(rows, self._of_chunk(rows.shape[1])) for rows in chunks]
        places = functions.astype(functions.concatenate([functions.flatten(row) for row in chosen]), "int32")
        return places if functions is xp else xp.from_numpy(np.asarray(places), like=vector)

    def _indices(self, xp: ArrayFunctions, places: Array, size: int) -> Array:
        """Converts positions within chunks to indices within the tensor, (count,). The indices are int32 unless the
        tensor is too long for int32."""
        places = xp.astype(places, "int32" if size < 2**31 else "int64")
        starts = xp.arange(-(-size // self.chunk), like=places) * self.chunk
        starts = xp.reshape(starts, (-1, 1)) + xp.zeros((1, self.k), like=places)
        return places + xp.flatten(starts)[: places.shape[0]]

    def place_bits(self, size: int) -> int:
        """The number of bits of a position within a chunk, for a tensor with `size` elements."""
        return max(1, (min(self.chunk, size) - 1).bit_length())

    def _pack_places(self, xp: ArrayFunctions, places: Array, size: int) -> Array:
        bits = self.place_bits(size)
        low = pack(xp, xp.astype(places & 0xFF, "uint8"), min(bits, 8))
        return low if bits <= 8 else xp.concatenate([low, pack(xp, xp.astype(places >> 8, "uint8"), bits - 8)])

    def _unpack_places(self, xp: ArrayFunctions, packed: Array, size: int) -> Array:
        bits, count = self.place_bits(size), self.count(size)
        if bits <= 8:
            return xp.astype(unpack(xp, packed, bits, count), "int32")
        high = xp.astype(unpack(xp, packed[count:], bits - 8, count), "int32")
        return xp.astype(packed[:count], "int32") | (high << 8)

    def _encode(self, xp: ArrayFunctions, values: Array, like: Array) -> tuple[Array, ...]:
        """Encodes the values of the sent elements. `values` is a vector of shape (count,)."""
        if self.values == "2bit":
            return _to_bins(xp, values, like)
        if self.values == "sign":
            return to_signs(xp, values, like)
        if self.values == "fp16":
            return (sparse_payload.round_values(xp, values, "fp16"),)
        return (xp.astype(values, "float32"),)

    def _decode(self, xp: ArrayFunctions, parts: Sequence[Array], size: int) -> Array:
        """Decodes the values of the sent elements, as a vector (count,)."""
        if len(parts) == 1:  # the values are sent as floats
            return parts[0]
        packed, means = parts
        if self.values == "sign":
            return from_signs(xp, packed, means, self.count(size))
        return xp.take(means, xp.astype(unpack(xp, packed, 2, self.count(size)), "int32"))

    def payload_floats(self, shape: tuple[int, ...], level: Level | None = None) -> float:
        count = self.at_level(level).count(number_of_elements(shape))  # type: ignore[attr-defined]
        return {"2bit": 4 + count / 16, "sign": 1 + count / 32}.get(self.values, count)

    def level_for(self, compression_factor: float, shape: tuple[int, ...]) -> Level | None:
        super().level_for(compression_factor, shape)  # raises an error for a factor below 1
        return most_level_for(self, compression_factor, shape, range(1, self.chunk + 1))

    def level_for_elements(self, compression_factor: float, shape: tuple[int, ...]) -> Level | None:
        super().level_for(compression_factor, shape)
        return max(1, math.floor(self.chunk / compression_factor))


def _to_bins(xp: ArrayFunctions, values: Array, like: Array) -> tuple[Array, Array]:
    """The packed bins of values (count,), and the mean of each bin, rounded to the type of `like`."""
    # In float64 no sum of float32 values overflows, and all frameworks get the same float32 result.
    count = values.shape[0]
    row = xp.reshape(xp.astype(values, "float64"), (1, count))
    centered = row - row.sum(1, keepdims=True) / count  # v - mean
    sigma = xp.row_norms(centered) / math.sqrt(count)
    # bin(v) = round((v - mean) / s + 2) is the number of borders that v - mean reaches.
    reached = (xp.astype(centered >= bound * sigma, "uint8") for bound in _BOUNDS)  # all 0 if any value is not finite
    bins = reduce(operator.add, reached)
    # The mean of the values in each bin.
    members = bins == xp.reshape(xp.arange(4, like=xp.flatten(bins)), (4, 1))
    numbers = xp.astype(xp.astype(members, "int32").sum(1, keepdims=True), "float64")
    sums = xp.where(members, row, xp.zeros((1, 1), like=row)).sum(1, keepdims=True)
    means = xp.flatten(sums * xp.reciprocal_or_zero(numbers, 0))
    return pack(xp, xp.flatten(bins), 2), representable(xp, means, like)


class _Layout:
    """The offsets of the tensors' parts in the payload, as in `isa_sparse_chunked.c`, and scratch memory.

    The payload contains first the values of all tensors, and then all packed codes.
    """

    def __init__(self, bucket: Bucket, chunk: int, encoding: int) -> None:
        sizes = bucket.segments["size"].tolist()
        pairs = list(zip(bucket.compressors, sizes, strict=True))
        counts = np.array([method.count(size) for method, size in pairs])
        bits = np.array([method.place_bits(size) for method, size in pairs])
        values = counts * _VALUE_BYTES.get(encoding, 0) + _SHARED_BYTES.get(encoding, 0)
        codes = packed_bytes(np.minimum(bits, 8), counts) + packed_bytes(np.maximum(bits - 8, 0), counts)
        codes += packed_bytes(CODE_BITS.get(encoding, 0), counts)
        segments = bucket.segments
        segments["count"], segments["found"] = counts, np.cumsum(counts) - counts
        segments["sent_of_chunk"] = [compressor.k for compressor in bucket.compressors]
        segments["values"] = np.cumsum(values) - values
        segments["indices"] = values.sum() + np.cumsum(codes) - codes
        self.payload = bucket.payload(int(values.sum() + codes.sum()))
        self.scratch = [bucket.zeros(int(counts.sum()), dtype) for dtype in ("float32", "int16")]
        self.passed: tuple[int, ...] = chunk, encoding
        if bucket.device is None:
            self._tasks = Tasks([(-(-size // chunk), max(1, CHUNK_PIECE // chunk)) for size in sizes])
            self.passed = *self._tasks.passed, chunk, encoding
