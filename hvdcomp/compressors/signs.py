"""Sign methods send one bit per element, and a few numbers that are needed to decode the bits.

The methods differ in how receivers decode the bits: by a majority vote (SignSGD), as two means (one-bit SGD), or as one
magnitude (EF-SignSGD).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from hvdcomp.arrays.types import Array, ArrayFunctions, matrix_shape, number_of_elements
from hvdcomp.compressors.base import Compressor
from hvdcomp.compressors.bucket import Bucket, BucketAggregation, gathered
from hvdcomp.compressors.gathering import Gathering
from hvdcomp.compressors.memory import Memory, NoMemory
from hvdcomp.compressors.packing import outcome_like, pack, packed_bytes, unpack
from hvdcomp.compressors.protocol import Aggregation, AllGather, Context
from hvdcomp.errors import SpecError
from hvdcomp.kernels.tables import NOT_NEGATIVE, POSITIVE
from hvdcomp.specs.described import Truth

# With at most this number of votes, the difference of the votes fits into an int8.
_VOTES_PER_BYTE = 127


@dataclass(frozen=True)
class SignSGD(Compressor):
    """Sends the sign of each element. The result is the sign that the majority of ranks sent, or 0 if there is a tie
    (Bernstein et al. 2018).

    One bit cannot express that an element is zero. Therefore each rank also sends one bit for each row (first
    dimension). This bit indicates whether the row votes. A row of zeros, such as the embedding of a word that is not in
    the batch, does not vote. With `zeros="elements"`, each element has such a bit, and zeros do not vote. The payload
    then takes two bits per element. With `zeros="rows"`, a zero in a row with a nonzero element does vote. The vote of
    a zero alternates between + and - from step to step and from rank to rank. So the votes of two ranks for their zeros
    cancel, and the votes of one rank for a zero cancel within two steps.

    The elements of the result have magnitude 1 (or 0). Choose the learning rate for this magnitude. As published, the
    method has no error feedback, because a residual is in the gradient's units and a sign is not. (`EFSignSGD` scales
    the signs.)

    Attributes:
        zeros: the parts of a tensor that have an extra bit, "rows" or "elements". The bit indicates whether the part
            votes.

    Example:
        >>> SignSGD().payload_bytes((1000, 1000))
        125125
    """

    zeros: str = "rows"

    name: ClassVar[str] = "signsgd"
    examples: ClassVar[tuple[str, ...]] = ("signsgd", "signsgd:zeros=elements")
    sends: ClassVar[str] = "one bit per element, and one bit per row (per element with zeros=elements)"
    biased: ClassVar[bool] = True
    in_units: ClassVar[bool] = False
    reference: ClassVar[str] = "Bernstein et al. 2018, arXiv:1802.04434; Bernstein et al. 2019, arXiv:1810.05291"

    def __post_init__(self) -> None:
        allowed = '"rows" (a bit for each row, to say that it is all zero) or "elements" (a bit for each element)'
        self.require(self.zeros in ("rows", "elements"), "zeros", allowed)

    def aggregate(self, xp: ArrayFunctions, x: Array, state: tuple[Array, ...], context: Context) -> Aggregation:
        """Each rank sends sign(x). The result is the sign of the sum of the signs."""
        shape = tuple(x.shape)
        rows, columns = matrix_shape(shape) if self.zeros == "rows" else (number_of_elements(shape), 1)
        matrix = xp.reshape(x, (rows, columns))
        # A row votes unless all its elements are zero. In a row that votes, a zero votes + in one step, and - in the
        # next.
        cast = xp.astype((matrix != 0).any(1), "uint8")
        zero_is_positive = (context.step + context.rank) % 2 == 0
        positive = matrix >= 0 if zero_is_positive else matrix > 0
        bits = xp.flatten(xp.astype(positive, "uint8") & xp.reshape(cast, (rows, 1)))
        ranks = yield AllGather((pack(xp, bits, 1), pack(xp, cast, 1)))
        # The mean is the sign of the votes for + minus the votes for -.
        mean = xp.astype(self._count(xp, ranks, rows, columns).clip(-1, 1), xp.dtype_name(x))
        return outcome_like(xp, x, mean, balance(xp, bits, cast))

    def aggregate_bucket(self, bucket: Bucket) -> BucketAggregation:
        """Like `aggregate`, but in passes over all tensors of the bucket:

        1. `votes_encode` computes x, its sign bits, and the bits that indicate which rows vote.
        2. `votes_keep` subtracts the votes from x, if there is a memory.
        3. `votes_decode` writes the signs of the majority to the results.
        """
        if bucket.layout is None:
            bucket.layout = _VotesLayout(bucket, self.zeros == "rows")
        layout, context = bucket.layout, bucket.context
        payload = layout.payload
        zero_is_positive = (context.step + context.rank) % 2 == 0
        bucket.found_inf = bucket.call(
            "votes_encode", zero_is_positive, payload.vector, layout.votes, len(layout.votes)
        )
        if bucket.keeps:
            bucket.call("votes_keep", payload.vector, aside=True)
        rows = yield payload.gather
        bucket.call("votes_decode", *gathered(rows))
        return False

    @staticmethod
    def _count(xp: ArrayFunctions, ranks: Sequence[tuple[Array, Array]], rows: int, columns: int) -> Array:
        """The votes of all ranks for + minus the votes for -, int8 (rows, columns), or int16 if there are too many
        ranks for int8."""
        total = None
        for start in range(0, len(ranks), _VOTES_PER_BYTE):
            (bits, cast), *more = ranks[start : start + _VOTES_PER_BYTE]
            positive, votes = unpack(xp, bits, 1, rows * columns), unpack(xp, cast, 1, rows)
            for bits, cast in more:
                positive += unpack(xp, bits, 1, rows * columns)
                votes += unpack(xp, cast, 1, rows)
            counted = balance(xp, positive, votes)
            total = counted if total is None else xp.astype(total, "int16") + xp.astype(counted, "int16")
        assert total is not None
        return total

    @property
    def of_matrices(self) -> bool:  # type: ignore[override]
        """True if rows have the extra bit."""
        return self.zeros == "rows"

    @property
    def default_memory(self) -> Memory:
        """No memory, although the method is biased: a sign is not in the gradient's units."""
        return NoMemory()


@dataclass(frozen=True)
class OneBit(Gathering):
    """One-bit SGD: sends one bit per element, which indicates whether the element is positive. A 1 is decoded as the
    mean of the positive elements, and a 0 as the mean of the other elements (Seide et al. 2014, section 3.2).

    Attributes:
        per_row: whether each row of the gradient matrix (the first dimension gives the rows) has its own pair of means.
            If False, the tensor has one pair. Seide et al. use one pair for each column of their weight matrices.

    Example:
        >>> OneBit().payload_bytes((1000, 1000))
        125008
    """

    per_row: Truth = False

    name: ClassVar[str] = "onebit"
    examples: ClassVar[tuple[str, ...]] = ("onebit", "onebit:per_row=True")
    sends: ClassVar[str] = "one bit per element, and two means (two means per row if per_row)"
    biased: ClassVar[bool] = True
    reference: ClassVar[str] = "Seide et al. 2014, 1-bit stochastic gradient descent, Interspeech"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.per_row and self.exchange != "gather":
            raise SpecError(
                f"onebit: per_row=True with exchange={self.exchange} is not allowed, because this exchange cuts "
                "tensors into chunks, which have no rows; leave out one of the two"
            )

    def encode(self, xp: ArrayFunctions, x: Array, context: Context) -> tuple[Array, ...]:
        """Encodes the bits x > 0, and for each row two means: the mean of the elements with the bit 1, and the mean of
        the elements with the bit 0."""
        rows, columns = self._matrix_shape(tuple(x.shape))
        matrix = xp.reshape(xp.astype(x, "float32"), (rows, columns))
        positive = matrix > 0
        above = xp.astype(positive.sum(1, keepdims=True), "float32")  # number of elements with the bit 1
        below = columns - above
        # Elements are divided before they are summed, so that no sum overflows.
        upper = (matrix.clip(0, float("inf")) * xp.reciprocal_or_zero(above, 0)).sum(1, keepdims=True)
        lower = (matrix.clip(float("-inf"), 0) * xp.reciprocal_or_zero(below, 0)).sum(1, keepdims=True)
        bits = pack(xp, xp.astype(xp.flatten(positive), "uint8"), 1)
        return bits, representable(xp, upper, x), representable(xp, lower, x)

    def decode(self, xp: ArrayFunctions, parts: Sequence[Array], shape: tuple[int, ...]) -> Array:
        bits, upper, lower = parts
        rows, columns = self._matrix_shape(shape)
        return xp.where(xp.reshape(unpack(xp, bits, 1, rows * columns), (rows, columns)) > 0, upper, lower)

    @property
    def of_matrices(self) -> bool:  # type: ignore[override]
        """True if each row has its own means."""
        return self.per_row

    def _matrix_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        return matrix_shape(shape) if self.per_row else (1, number_of_elements(shape))

    @property
    def has_bucket_form(self) -> bool:
        """False if `per_row`, because there is no kernel for means of rows."""
        return not self.per_row and super().has_bucket_form

    def lay_out(self, bucket: Bucket) -> _BitsLayout:
        return _BitsLayout(bucket, 4 * 2)

    def encode_bucket(self, bucket: Bucket) -> None:
        _encode_two_values(bucket, POSITIVE)

    def decode_bucket(self, bucket: Bucket, first: Array, ranks: int, stride: int) -> bool | Array:
        return bucket.call("two_values_decode", POSITIVE, first, ranks, stride)


@dataclass(frozen=True)
class EFSignSGD(Gathering):
    """Sends the sign of each element, and one magnitude for all elements: the mean magnitude |x|_1 / d (Karimireddy et
    al. 2019, algorithm 1). Zero counts as positive.

    Example:
        >>> EFSignSGD().payload_bytes((1000, 1000))
        125004
    """

    name: ClassVar[str] = "efsignsgd"
    examples: ClassVar[tuple[str, ...]] = ("efsignsgd",)
    sends: ClassVar[str] = "one bit per element, and the mean magnitude"
    biased: ClassVar[bool] = True
    reference: ClassVar[str] = "Karimireddy et al. 2019, arXiv:1901.09847"

    def encode(self, xp: ArrayFunctions, x: Array, context: Context) -> tuple[Array, Array]:
        """Runs algorithm 1, line 5: encodes (|p|_1 / d) sign(p) as the bits of the signs and the magnitude."""
        vector = xp.flatten(xp.astype(x, "float32"))
        d = vector.shape[0]
        # Elements are divided before they are summed, so that the sum does not overflow.
        shares = abs(vector)
        shares *= 1 / d
        magnitude = xp.flatten(xp.reshape(shares, (1, d)).sum(1, keepdims=True))
        return pack(xp, xp.astype(vector >= 0, "uint8"), 1), representable(xp, magnitude, x)

    def decode(self, xp: ArrayFunctions, parts: Sequence[Array], shape: tuple[int, ...]) -> Array:
        """Decodes each bit to plus or minus the magnitude, computed as 2 * magnitude * bit - magnitude."""
        bits, magnitude = parts
        values = xp.astype(unpack(xp, bits, 1, number_of_elements(shape)), "float32")
        values *= 2 * magnitude
        values -= magnitude
        return values

    def lay_out(self, bucket: Bucket) -> _BitsLayout:
        return _BitsLayout(bucket, 4)

    def encode_bucket(self, bucket: Bucket) -> None:
        _encode_two_values(bucket, NOT_NEGATIVE)

    def decode_bucket(self, bucket: Bucket, first: Array, ranks: int, stride: int) -> bool | Array:
        return bucket.call("two_values_decode", NOT_NEGATIVE, first, ranks, stride)


def _encode_two_values(bucket: Bucket, rule: int) -> None:
    """Writes the payload of a method whose bits are decoded as one of two values.

    Args:
        bucket: the bucket that is compressed.
        rule: which elements have the bit 1, given as `POSITIVE` or `NOT_NEGATIVE`.
    """
    # This is set before the first kernel call, so that the table is copied to a device only once.
    bucket.segments["sent_rule"] = rule
    bucket.found_inf = bucket.call("two_values_encode", rule, bucket.layout.payload.vector)


class _BitsLayout:
    """The layout of a bucket's payload: first all values, then the bits of each tensor.

    Args:
        bucket: the bucket that is compressed.
        bytes_of_values: number of bytes in the payload for the values of each tensor, in addition to the bits.
    """

    def __init__(self, bucket: Bucket, bytes_of_values: int) -> None:
        sizes = bucket.segments["size"]
        places, count = bucket.places(np.full_like(sizes, bytes_of_values), packed_bytes(1, sizes))
        bucket.segments["scales"], bucket.segments["signs"] = places
        self.payload = bucket.payload(count)


class _VotesLayout:
    """The layout of a payload of votes: the sign bits of each tensor, then the bits that indicate which rows vote.

    Args:
        bucket: the bucket that is compressed.
        by_rows: whether each row of a tensor has a bit that indicates whether the row votes. If False, each element has
            such a bit.
    """

    def __init__(self, bucket: Bucket, by_rows: bool) -> None:
        sizes = bucket.segments["size"]
        rows = np.array(
            [matrix_shape(tensor.shape)[0] if by_rows else tensor.size for tensor in bucket.tensors], np.int64
        )
        bytes_of = packed_bytes(1, np.stack([sizes, rows]))
        ends = np.cumsum(bytes_of, axis=1)
        bucket.segments["count"] = sizes // rows
        bucket.segments["signs"] = ends[0] - bytes_of[0]
        bucket.segments["row_votes"] = ends[0][-1] + ends[1] - bytes_of[1]
        bucket.segments["votes"] = np.cumsum(rows) - rows
        self.payload = bucket.payload(int(bytes_of.sum()))
        self.votes = bucket.zeros(int(rows.sum()))


def representable(xp: ArrayFunctions, scale: Array, like: Array) -> Array:
    """Rounds float32 values to the type of `like`, so that receivers decode exactly the values that were sent."""
    return xp.astype(xp.astype(scale, xp.dtype_name(like)), "float32")


def to_signs(xp: ArrayFunctions, values: Array, like: Array) -> tuple[Array, Array]:
    """The packed signs of values (count,), and the mean magnitude of the values, float32 (1,).

    Zero counts as positive. The sum is float64, so it does not overflow, and all frameworks get the same float32
    result.
    """
    count = values.shape[0]
    magnitudes = xp.reshape(abs(xp.astype(values, "float64")), (1, count))
    mean = xp.flatten(magnitudes.sum(1, keepdims=True)) * (1 / count)
    return pack(xp, xp.astype(values >= 0, "uint8"), 1), representable(xp, mean, like)


def from_signs(xp: ArrayFunctions, signs: Array, magnitude: Array, count: int) -> Array:
    """Decodes the result of `to_signs` to values, float32 (count,)."""
    values = xp.astype(unpack(xp, signs, 1, count), "float32")
    values *= 2
    values -= 1
    values *= magnitude
    return values


def balance(xp: ArrayFunctions, positive: Array, votes: Array) -> Array:
    """The votes for + minus the votes for -, int8 (rows, columns), for at most 127 ranks. The result reuses the storage
    of `positive`.

    Args:
        xp: array functions.
        positive: the number of votes for +, uint8 (rows * columns,).
        votes: the number of votes, uint8 (rows,).
    """
    positive *= 2  # the byte may overflow; subtracting the votes brings it back into range
    difference = xp.reshape(positive, (votes.shape[0], -1))
    difference -= xp.reshape(votes, (-1, 1))
    return xp.bitcast(difference, "int8")
