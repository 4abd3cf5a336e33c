"""Quantizers round each element at random to one of a few values. The expectation of the result is the element itself.

To round a number v up with probability v - floor(v), and down otherwise, compute floor(v + u) with u uniform in [0, 1).
All methods in this file round in this way, each with its own scale. `Natural` does so with integer arithmetic on the
bits of a float.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

import numpy as np

from hvdcomp.arrays.types import Array, ArrayFunctions, number_of_elements
from hvdcomp.compressors.base import Compressor, Count, most_level_for
from hvdcomp.compressors.bucket import Bucket, BucketAggregation, Payload
from hvdcomp.compressors.gathering import Gathering
from hvdcomp.compressors.multiples import (
    Multiples,
    encode_multiples,
    encode_multiples_of_bucket,
    in_runs,
    steps_of,
)
from hvdcomp.compressors.packing import outcome_like, pack, packed_bytes, pad, unpack
from hvdcomp.compressors.protocol import Aggregation, AllReduce, Context
from hvdcomp.compressors.randomness import random_words, rank_key, uniform
from hvdcomp.errors import ConfigurationError
from hvdcomp.kernels.limits import SMALLEST_SCALE
from hvdcomp.specs.described import between, is_number
from hvdcomp.specs.levels import Level


@dataclass(frozen=True)
class QSGD(Multiples):
    """Rounds each element at random to a multiple of a fraction of its bucket's 2-norm (Alistarh et al. 2017, section
    3.1).

    A code has 2**bits - 1 possible values. They are the integers from -s to s, with s = 2**(bits - 1) - 1, and are
    decoded as multiples of norm / s. With one bit, the values are + norm and - norm, and + is chosen with probability
    (1 + x / norm) / 2. This choice is also unbiased, but has a variance near bucket * norm**2.

    Attributes:
        bits: bits per element, including the sign, 1 to 8.
        bucket: number of consecutive elements that share a norm. The last bucket may be shorter.

    Example:
        >>> QSGD(bits=4).payload_bytes((1000, 1000))
        507816
    """

    bits: Annotated[int, between(1, 8)]  # type: ignore[misc]
    bucket: Count = 512

    name: ClassVar[str] = "qsgd"
    examples: ClassVar[tuple[str, ...]] = ("qsgd:bits=4", "qsgd:bits=2", "qsgd:bits=1,bucket=64")
    level_name: ClassVar[str | None] = "bits"
    sends: ClassVar[str] = "a few bits per element, and a 2-norm per bucket"
    reference: ClassVar[str] = "Alistarh et al. 2017, arXiv:1610.02132"

    @property
    def run(self) -> int:
        return self.bucket

    @property
    def unit(self) -> int:  # type: ignore[override]
        """`bucket` if it is a multiple of 8, otherwise 8 times `bucket`. Chunks begin at multiples of this number."""
        return self.bucket if self.bucket % 8 == 0 else 8 * self.bucket

    @property
    def variance(self) -> float:  # type: ignore[override]
        """bucket / (4 s**2), because rounding to multiples of norm / s has a variance of at most (norm / s)**2 / 4."""
        return self.bucket / steps_of(self.bits) ** 2

    def encode(self, xp: ArrayFunctions, x: Array, context: Context) -> tuple[Array, Array]:
        """Applies section 3.1: in each run, rounds s x / norm at random to one of the two nearest integers."""
        size = number_of_elements(tuple(x.shape))
        runs = in_runs(xp, x, self.bucket)
        return encode_multiples(xp, size, runs, xp.row_norms(runs), self.bits, self.name, context)

    def encode_bucket(self, bucket: Bucket) -> None:
        encode_multiples_of_bucket(bucket, "qsgd_encode", bucket.layout.length)

    def level_for(self, compression_factor: float, shape: tuple[int, ...]) -> Level | None:
        super().level_for(compression_factor, shape)
        return most_level_for(self, compression_factor, shape, range(1, 9))


@dataclass(frozen=True)
class TernGrad(Multiples):
    """Rounds each element at random to -1, 0 or 1 times the largest magnitude (Wen et al. 2017, algorithm 1, with one
    scale per tensor).

    The result is unbiased with respect to the clipped gradient. The standard deviation for clipping is computed about
    zero, as sqrt(mean(x**2)), because gradients are assumed to have mean zero. If the deviation were computed about the
    tensor's own mean, a constant tensor would have the deviation 0 and would be clipped to zeros.

    Attributes:
        clip: magnitudes are first clipped to `clip` times the standard deviation of the elements. 0 or inf means no
            clipping.

    Example:
        >>> TernGrad().payload_bytes((1000, 1000))
        250004
    """

    clip: float = 2.5

    bits: ClassVar[int] = 2
    name: ClassVar[str] = "terngrad"
    examples: ClassVar[tuple[str, ...]] = ("terngrad",)
    sends: ClassVar[str] = "two bits per element, and the largest magnitude"
    reference: ClassVar[str] = "Wen et al. 2017, arXiv:1705.07878"

    def __post_init__(self) -> None:
        allowed = (is_number(self.clip) or self.clip == math.inf) and self.clip >= 0
        self.require(allowed, "clip", "a number of standard deviations (2.5 is usual), or 0 for no clipping")
        super().__post_init__()

    def encode(self, xp: ArrayFunctions, x: Array, context: Context) -> tuple[Array, Array]:
        """Runs algorithm 1: encodes sign(x) b times the scale. b is 1 with the probability |x| / scale, and 0
        otherwise."""
        size = number_of_elements(tuple(x.shape))
        vector = xp.reshape(xp.astype(x, "float32"), (1, size))
        scale = xp.reshape(abs(vector).max(), (1, 1))
        if 0 < self.clip < math.inf:
            bound = xp.row_norms(vector) * (self.clip / math.sqrt(size))  # clip * sigma
            scale = xp.where(bound < scale, bound, scale)
        # Encoding clips magnitudes to the scale.
        return encode_multiples(xp, size, vector, scale, self.bits, self.name, context)

    def encode_bucket(self, bucket: Bucket) -> None:
        encode_multiples_of_bucket(bucket, "terngrad_encode", float(self.clip))


_INFINITE = 0x7F800000  # the exponent's bits


@dataclass(frozen=True)
class Natural(Gathering):
    """Natural compression: rounds each element at random to a power of two, and sends the sign and the exponent, which
    together take 9 bits (Horvath et al. 2019, section 2).

    The method adds random bits to the mantissa of a float and keeps only the carry. So the method rounds up to the next
    power of two with exactly the right probability. The rounding is also unbiased for denormal numbers, which become 0
    or 2**-126. Magnitudes above 2**127, the highest power of two in float32, become 2**127. inf and NaN are kept.

    Example:
        >>> Natural().payload_bytes((1000, 1000))
        1125000
    """

    name: ClassVar[str] = "natural"
    examples: ClassVar[tuple[str, ...]] = ("natural",)
    sends: ClassVar[str] = "one sign bit and one exponent byte per element"
    reference: ClassVar[str] = "Horvath et al. 2019, arXiv:1905.10988"

    def encode(self, xp: ArrayFunctions, x: Array, context: Context) -> tuple[Array, Array]:
        """Encodes the sign, and the exponent after rounding |x| to the lower or the upper neighboring power of two.
        The upper neighbor is chosen with the probability (|x| - lower) / (upper - lower). The bits of the mantissa
        represent this probability."""
        vector = xp.flatten(xp.astype(x, "float32"))
        size = vector.shape[0]
        noise = random_words(xp, rank_key(context, self.name), size, like=vector) >> 9
        noise &= 0x7FFFFF
        words = xp.bitcast(vector, "int32")
        noise += words
        # The conversion to uint8 keeps the eight bits of the exponent and drops the sign bit above them.
        exponents = xp.astype(noise >> 23, "uint8").clip(0, 254)
        exponents |= xp.astype(words & _INFINITE == _INFINITE, "uint8") * 255
        return exponents, pack(xp, xp.astype(vector < 0, "uint8"), 1)

    def decode(self, xp: ArrayFunctions, parts: Sequence[Array], shape: tuple[int, ...]) -> Array:
        exponents, signs = parts
        upper_half = xp.astype(exponents, "int16") << 7
        upper_half |= xp.astype(unpack(xp, signs, 1, exponents.shape[0]), "int16") << 15
        return xp.from_bfloat16_bits(upper_half)

    def lay_out(self, bucket: Bucket) -> _NaturalLayout:
        sizes = bucket.segments["size"]
        places, count = bucket.places(sizes, packed_bytes(1, sizes))
        bucket.segments["exponents"], bucket.segments["signs"] = places
        return _NaturalLayout(bucket.payload(count))

    def encode_bucket(self, bucket: Bucket) -> None:
        encode_multiples_of_bucket(bucket, "natural_encode")

    def decode_bucket(self, bucket: Bucket, first: Array, ranks: int, stride: int) -> bool | Array:
        return bucket.call("natural_decode", first, ranks, stride)


class _NaturalLayout(NamedTuple):
    """The layout of a bucket's payload: first all exponents, and then all signs."""

    payload: Payload


@dataclass(frozen=True)
class GlobalQSGD(Compressor):
    """Rounds each element at random to an integer multiple of a fraction of the largest magnitude on any rank. An
    allreduce adds up the integers (Xin et al. 2023, uniform levels and maximum norm; integer sums as in IntSGD,
    Mishchenko et al. 2021).

    An int32 is divided into 32 // bits fields of `bits` bits, and each field contains one integer. With N ranks, each
    rank sends integers from -s to s, with s = (2**bits - 1) // (2 N), so that the sum of N integers fits the field. The
    payload has the same size for any N, but the precision decreases: with more ranks, s is smaller. `bits` must be
    large enough for s >= 1.

    Attributes:
        bits: bits per element in the sum, 2 to 16. Only 2, 4, 8 and 16 use all bits of an int32.

    Example:
        >>> GlobalQSGD().payload_bytes((1000, 1000))
        1000004
    """

    bits: Annotated[int, between(2, 16)] = 8

    name: ClassVar[str] = "globalqsgd"
    examples: ClassVar[tuple[str, ...]] = ("globalqsgd",)
    level_name: ClassVar[str | None] = "bits"
    sends: ClassVar[str] = "the largest magnitude, and then the elements, packed as 32 // bits elements per int32"
    sent_is_own: ClassVar[bool] = False  # the scale is the largest magnitude on any rank
    reference: ClassVar[str] = "Xin et al. 2023, arXiv:2305.18627; Mishchenko et al. 2021, arXiv:2102.08374"

    def levels(self, ranks: int) -> int:
        """The number s for this number of ranks: each rank sends integers from -s to s.

        Raises:
            ConfigurationError: if the sum over the ranks does not fit a field.
        """
        levels = (2**self.bits - 1) // (2 * ranks)
        if levels < 1:
            raise ConfigurationError(
                f"globalqsgd: bits={self.bits} can add up the gradients of at most {(2**self.bits - 1) // 2} ranks, "
                f"but there are {ranks} ranks, which need at least bits={self.least_level(ranks)} (the maximum is 16)"
            )
        return levels

    def least_level(self, ranks: int) -> int:
        return (2 * ranks).bit_length()

    def aggregate(self, xp: ArrayFunctions, x: Array, state: tuple[Array, ...], context: Context) -> Aggregation:
        s, ranks = self.levels(context.world_size), context.world_size
        vector = xp.flatten(xp.astype(x, "float32"))
        size = vector.shape[0]
        # The scale is the largest magnitude on any rank.
        scale = yield AllReduce(xp.reshape(abs(vector).max(), (1,)), op="max")
        # floor(s x / scale + u), with u uniform in [0, 1), is an integer from -s to s.
        values = vector * (xp.reciprocal_or_zero(scale, SMALLEST_SCALE) * s)
        values += uniform(xp, rank_key(context, self.name), size, like=values)
        values = xp.floor(values).clip(-s, s)
        # The sum of the integers over the ranks is exact. Multiplied by scale / (s N), it is the mean.
        total = yield AllReduce(self._pack(xp, xp.astype(values, "int32")), op="sum")
        mean = xp.astype(self.unpack_words(xp, total, s * ranks), "float32")[:size]
        mean *= scale * (1 / (s * ranks))
        values *= scale * (1 / s)
        return outcome_like(xp, x, mean, values)

    def aggregate_bucket(self, bucket: Bucket) -> BucketAggregation:
        """Like `aggregate`, but in passes over all tensors of the bucket:

        1. `globalqsgd_measure` computes x, and the largest magnitude of each tensor.
        2. `globalqsgd_encode` rounds x to integers, and packs them.
        3. `globalqsgd_decode` computes the means from the sums of the integers, and writes the means to the results.
        """
        if bucket.layout is None:
            bucket.layout = _GlobalLayout(bucket)
        layout, ranks = bucket.layout, bucket.context.world_size
        bucket.draw_keys()
        bucket.found_inf = bucket.call("globalqsgd_measure", layout.maxima)
        scales = yield AllReduce(layout.maxima, op="max")
        bucket.call("globalqsgd_encode", scales, ranks, layout.words)
        total = yield AllReduce(layout.words, op="sum")
        return bucket.call("globalqsgd_decode", scales, ranks, total)

    def _pack(self, xp: ArrayFunctions, codes: Array) -> Array:
        """Packs codes, int32, as signed digits of int32 numbers to the base 2**bits.

        Magnitudes of codes must be below 2**(bits - 1). If the numbers of all ranks are added, each digit of the sum is
        the sum of the ranks' digits, without overflow.
        """
        fields = 32 // self.bits
        codes = pad(xp, codes, fields)
        length = codes.shape[0] // fields
        words = codes[(fields - 1) * length :]
        for field in range(fields - 2, -1, -1):
            words = (words << self.bits) + codes[field * length : (field + 1) * length]
        return words

    def unpack_words(self, xp: ArrayFunctions, words: Array, largest: int) -> Array:
        """Unpacks words into their digits, int32. Magnitudes of digits are at most `largest`."""
        fields = 32 // self.bits
        # Adding `largest` makes each digit non-negative, so that digits occupy separate bits.
        words = words + sum(largest << (self.bits * field) for field in range(fields))
        digits = xp.concatenate([words >> (self.bits * field) for field in range(fields)])
        digits &= (1 << self.bits) - 1
        digits -= largest
        return digits

    def level_for(self, compression_factor: float, shape: tuple[int, ...]) -> Level | None:
        super().level_for(compression_factor, shape)
        return most_level_for(self, compression_factor, shape, range(2, 17))


class _GlobalLayout:
    """The payloads of a bucket of Global-QSGD.

    Attributes:
        maxima: the largest magnitude of each tensor, float32 (tensors,).
        words: the packed codes of all tensors, as words of type int32.
    """

    def __init__(self, bucket: Bucket) -> None:
        for compressor in set(bucket.compressors):
            compressor.levels(bucket.context.world_size)  # raises an error if there are too many ranks
        segments = bucket.segments
        segments["count"] = [compressor.bits for compressor in bucket.compressors]
        words = -(-segments["size"] // (32 // segments["count"]))
        segments["codes"] = np.cumsum(words) - words
        self.maxima = bucket.zeros(len(words), "float32")
        self.words = bucket.zeros(int(words.sum()), "int32")
