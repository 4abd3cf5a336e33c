"""Casts: no compression, half precision and bfloat16."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import numpy as np

from hvdcomp.arrays.types import Array, ArrayFunctions, allreduce_dtype
from hvdcomp.compressors.base import Compressor
from hvdcomp.compressors.bucket import Bucket, BucketAggregation, Payload
from hvdcomp.compressors.gathering import EXCHANGE, Gathering, Rounding
from hvdcomp.compressors.packing import outcome_like
from hvdcomp.compressors.protocol import Aggregation, AllReduce, Context, Outcome
from hvdcomp.compressors.randomness import random_words, rank_key
from hvdcomp.errors import SpecError
from hvdcomp.kernels import cuda
from hvdcomp.kernels.limits import INFINITE_BITS, LARGEST_BITS
from hvdcomp.kernels.tables import EVERYTHING
from hvdcomp.specs.described import Rule

_EXCHANGE = Rule(lambda value: value == "allreduce" or EXCHANGE.allows(value), f'"allreduce", {EXCHANGE.allowed_text}')


@dataclass(frozen=True)
class NoCompression(Compressor):
    """Sends the gradient uncompressed. Gradients in bfloat16 are sent as float32, because Horovod cannot add bfloat16.

    Example:
        >>> NoCompression().payload_bytes((1000, 1000))
        4000000
    """

    name: ClassVar[str] = "none"
    examples: ClassVar[tuple[str, ...]] = ("none",)
    sends: ClassVar[str] = "all elements"
    lossless: ClassVar[bool] = True

    def aggregate(self, xp: ArrayFunctions, x: Array, state: tuple[Array, ...], context: Context) -> Aggregation:
        mean = yield AllReduce(xp.astype(x, self.wire_dtype(xp.dtype_name(x))))
        return Outcome(mean, x)

    def aggregate_bucket(self, bucket: Bucket) -> BucketAggregation:
        """Like `aggregate`, but for all tensors of a bucket. The kernel `dense_encode` computes x and copies it to the
        payload, and `dense_decode` writes the mean to the results."""
        if self.wire_dtype(bucket.dtype) == "float16":
            return (yield from _in_half_precision(bucket, 2))  # if x overflows float16, the residual keeps the excess
        wire = _wire(bucket, "float32")
        # This is set before the first kernel call, so that the table is copied to a device only once.
        bucket.segments["sent_rule"] = EVERYTHING
        bucket.found_inf = bucket.call("dense_encode", wire.with_room)
        mean = yield wire.mean
        found_inf = bucket.call("dense_decode", mean)
        _let_go(bucket, wire)
        return found_inf

    def wire_dtype(self, dtype: str) -> str:
        return allreduce_dtype(dtype)


@dataclass(frozen=True)
class _Cast(Gathering):
    """Base of casts to 16 bits. Ranks exchange the numbers as bit patterns, and add them in float32.

    Attributes:
        rounding: "nearest" or "stochastic". "nearest" (ties to even) gives the same result in every run. "stochastic"
            rounds at random to one of the two neighbors, so that the expectation is the element itself. Both ways of
            rounding turn the same magnitudes into infinity.
    """

    rounding: Rounding = "nearest"

    sends: ClassVar[str] = "all elements, 16 bits each"

    def lay_out(self, bucket: Bucket) -> _BitPatterns:
        return _BitPatterns(bucket)

    def _encode_bucket(self, bucket: Bucket, kernel: str) -> None:
        layout: _BitPatterns = bucket.layout
        nearest = self.rounding == "nearest"
        if not nearest:
            bucket.draw_keys()
        bucket.found_inf = bucket.call(kernel, layout.patterns, nearest)


@dataclass(frozen=True)
class FP16(_Cast):
    """Casts gradients to IEEE half precision. Sums are in half precision, as in Horovod's own fp16 compression, or in
    float32.

    Magnitudes beyond 65504 become infinite, and all ranks skip the step, as after any overflow. With exchange "gather"
    or "scatter", sums are float32, so only the elements themselves can overflow. With "scatter", a rank sends and
    receives the same number of bytes as in an allreduce in half precision, for any number of ranks.

    Attributes:
        exchange: "allreduce" adds in half precision. "gather", "scatter" and "auto" work as in other methods, and add
            in float32.
        rounding: "nearest", or "stochastic" (unbiased). "stochastic" does not work with exchange "allreduce", whose
            sums are rounded to nearest.

    Example:
        >>> FP16().payload_bytes((1000, 1000))
        2000000
    """

    exchange: Annotated[str, _EXCHANGE] = field(default="allreduce", kw_only=True)

    name: ClassVar[str] = "fp16"
    examples: ClassVar[tuple[str, ...]] = ("fp16", "fp16:rounding=stochastic,exchange=gather")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rounding != "nearest" and self.exchange == "allreduce":
            raise SpecError(
                f"fp16: rounding={self.rounding} with exchange=allreduce is not allowed, because an all-reduce rounds "
                "its sums to nearest; set exchange=scatter, or leave out rounding"
            )

    def aggregate(self, xp: ArrayFunctions, x: Array, state: tuple[Array, ...], context: Context) -> Aggregation:
        if self.exchange != "allreduce":
            return (yield from super().aggregate(xp, x, state, context))
        half = xp.astype(x, "float16")
        mean = yield AllReduce(half)
        return outcome_like(xp, x, mean, half)

    def aggregate_bucket(self, bucket: Bucket) -> BucketAggregation:
        if self.exchange != "allreduce":
            return (yield from super().aggregate_bucket(bucket))
        return (yield from _in_half_precision(bucket, 1))

    def encode(self, xp: ArrayFunctions, x: Array, context: Context) -> tuple[Array]:
        vector = xp.flatten(x)
        nearest = xp.bitcast(xp.astype(vector, "float16"), "int16")
        return (nearest if self.rounding == "nearest" else _half_at_random(xp, vector, nearest, self.name, context),)

    def decode(self, xp: ArrayFunctions, parts: Sequence[Array], shape: tuple[int, ...]) -> Array:
        return xp.astype(xp.bitcast(parts[0], "float16"), "float32")

    def encode_bucket(self, bucket: Bucket) -> None:
        self._encode_bucket(bucket, "half_encode")

    def decode_bucket(self, bucket: Bucket, first: Array, ranks: int, stride: int) -> bool | Array:
        return bucket.call("half_decode", first, ranks, stride)

    def wire_dtype(self, dtype: str) -> str | None:
        return "float16" if self.exchange == "allreduce" else None


@dataclass(frozen=True)
class BF16(_Cast):
    """Casts gradients to bfloat16, exchanges the 16-bit values, and adds them in float32, so that no sum is rounded to
    16 bits.

    With exchange "gather" among N ranks, a rank receives 2 (N - 1) bytes per element. With four ranks, an allreduce in
    float32 would receive the same number of bytes. With "scatter", a rank sends and receives half the bytes of an
    allreduce in float32, for any number of ranks.

    Example:
        >>> BF16().payload_bytes((1000, 1000))
        2000000
    """

    name: ClassVar[str] = "bf16"
    examples: ClassVar[tuple[str, ...]] = ("bf16", "bf16:rounding=stochastic")

    def encode(self, xp: ArrayFunctions, x: Array, context: Context) -> tuple[Array]:
        vector = xp.flatten(x)
        nearest = xp.to_bfloat16_bits(vector)
        if self.rounding == "nearest":
            return (nearest,)
        return (_bfloat16_at_random(xp, vector, nearest, self.name, context),)

    def decode(self, xp: ArrayFunctions, parts: Sequence[Array], shape: tuple[int, ...]) -> Array:
        return xp.from_bfloat16_bits(parts[0])

    def encode_bucket(self, bucket: Bucket) -> None:
        self._encode_bucket(bucket, "bfloat16_encode")

    def decode_bucket(self, bucket: Bucket, first: Array, ranks: int, stride: int) -> bool | Array:
        return bucket.call("bfloat16_decode", first, ranks, stride)


def _bfloat16_at_random(xp: ArrayFunctions, vector: Array, nearest: Array, purpose: str, context: Context) -> Array:
    """Rounds a vector at random to bfloat16, and returns the bit patterns, int16. The function adds 16 random bits
    below the last bit that is kept.

    Args:
        vector: the numbers to round.
        nearest: the bit patterns of the numbers rounded to nearest. Infinities and NaNs in the result come from these
            patterns.
        purpose: text that distinguishes these random numbers from others of the same step.
        context: the tensor's name, the step, the seed, the rank and the number of ranks.
    """
    bits = xp.bitcast(xp.astype(vector, "float32"), "int32")
    magnitudes = bits & 0x7FFFFFFF
    codes = magnitudes.clip(0, LARGEST_BITS["bfloat16"])
    codes += (_random_words(xp, vector, purpose, context) >> 16) & 0xFFFF
    return _with_signs(xp, codes >> 16, bits, nearest, magnitudes < INFINITE_BITS["bfloat16"])


def _half_at_random(xp: ArrayFunctions, vector: Array, nearest: Array, purpose: str, context: Context) -> Array:
    """Rounds a vector at random to float16, and returns the bit patterns. Digits below 2**-43 are ignored.

    Between two powers of two, and below 2**-14, float16 numbers are equally spaced. A magnitude is divided by this
    spacing, multiplied by 2**19 and converted to an integer. This is exact for magnitudes of at least 2**-20. Then 19
    random bits are added to the integer, and its lowest 19 bits are dropped.
    """
    bits = xp.bitcast(xp.astype(vector, "float32"), "int32")
    magnitudes = bits & 0x7FFFFFFF
    clipped = magnitudes.clip(0, LARGEST_BITS["float16"])
    above = (clipped & 0x7F800000).clip(_LEAST_HALF, 0x7F800000) - _LEAST_HALF
    factors = xp.bitcast((283 << 23) - _LEAST_HALF - above, "float32")
    codes = xp.astype(xp.bitcast(clipped, "float32") * factors, "int32")
    codes += (_random_words(xp, vector, purpose, context) >> 13) & 0x7FFFF
    return _with_signs(xp, (codes >> 19) + (above >> 13), bits, nearest, magnitudes < INFINITE_BITS["float16"])


_LEAST_HALF = 0x38800000  # bits of 2**-14, the smallest normal float16, as float32


def _random_words(xp: ArrayFunctions, vector: Array, purpose: str, context: Context) -> Array:
    like = xp.astype(vector, "float32")
    return random_words(xp, rank_key(context, purpose), vector.shape[0], like=like)


def _with_signs(xp: ArrayFunctions, codes: Array, bits: Array, nearest: Array, finite: Array) -> Array:
    """Adds the signs of float32 numbers to the codes of their magnitudes. If a number is not finite, the result is its
    code in `nearest`."""
    return xp.where(finite, xp.astype(codes | ((bits >> 16) & -0x8000), "int16"), nearest)


class _BitPatterns:
    """A payload with one 16-bit number for each element of a bucket.

    Attributes:
        payload: the storage of the payload, uint8.
        patterns: the same storage, seen as int16.
    """

    def __init__(self, bucket: Bucket) -> None:
        places, count = bucket.places(2 * bucket.segments["size"])
        bucket.segments["values"] = places[0] // 2
        self.payload = bucket.payload(count)
        room = self.payload.with_room
        self.patterns = bucket.xp.from_bytes(room, like=bucket.zeros(room.shape[0] // 2, "int16"))


def _in_half_precision(bucket: Bucket, nearest: int) -> BucketAggregation:
    """Runs a step with sums in half precision. `nearest` is an argument of the kernel `half_encode`."""
    wire = _wire(bucket, "float16")
    bucket.found_inf = bucket.call("half_encode", wire.with_room, nearest)
    mean = yield wire.mean
    found_inf = bucket.call("half_decode", mean, 1, 0)
    _let_go(bucket, wire)
    return found_inf


def _wire(bucket: Bucket, dtype: str) -> Payload:
    """A payload with one number for each element. On the host, the payload is the bucket's layout and is reused. On a
    device, each step allocates a new payload, because a payload that is kept between steps would take as much memory as
    the model."""
    wire: Payload | None = bucket.layout
    if wire is None:
        sizes = bucket.segments["size"]
        bucket.segments["values"] = np.cumsum(sizes) - sizes
        wire = bucket.payload(int(sizes.sum()), dtype, kept=bucket.device is None)
        if bucket.device is None:
            bucket.layout = wire
    return wire


def _let_go(bucket: Bucket, wire: Payload) -> None:
    if bucket.device is not None:
        cuda.let_go(wire.with_room)
