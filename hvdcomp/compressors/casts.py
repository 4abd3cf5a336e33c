"""Casts: no compression, half precision and bfloat16."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar

import numpy as np

from hvdcomp.arrays.types import Array, allreduce_dtype
from hvdcomp.compressors.base import Compressor
from hvdcomp.compressors.bucket import Bucket, BucketAggregation, Payload
from hvdcomp.compressors.gathering import Gathering
from hvdcomp.compressors.packing import outcome_like
from hvdcomp.compressors.protocol import Aggregation, AllReduce, Context, Outcome
from hvdcomp.kernels.tables import EVERYTHING


@dataclass(frozen=True)
class NoCompression(Compressor):
    """Sends the gradient as it is. bfloat16 travels as float32, because Horovod cannot add bfloat16."""

    name: ClassVar[str] = "none"
    examples: ClassVar[tuple[str, ...]] = ("none",)
    sends: ClassVar[str] = "all elements"
    lossless: ClassVar[bool] = True

    def aggregate(self, xp: ModuleType, x: Array, state: tuple[Array, ...], context: Context) -> Aggregation:
        mean = yield AllReduce(xp.astype(x, self.wire_dtype(xp.dtype_name(x))))
        return Outcome(mean, x)

    def aggregate_bucket(self, bucket: Bucket) -> BucketAggregation:
        wire = _wire(bucket, "float32")
        bucket.found_inf = bucket.call("dense_encode", wire.with_room)
        bucket.segments["sent_rule"] = EVERYTHING
        mean = yield AllReduce(wire.vector, with_room=wire.with_room)
        return bucket.call("dense_decode", mean)

    def wire_dtype(self, dtype: str) -> str:
        return allreduce_dtype(dtype)


@dataclass(frozen=True)
class FP16(Compressor):
    """Casts to IEEE half precision, sums in half precision, casts back; as Horovod's own fp16 compression.

    Values beyond 65504 become infinite and are then dealt with as any other overflow.
    """

    name: ClassVar[str] = "fp16"
    examples: ClassVar[tuple[str, ...]] = ("fp16",)
    sends: ClassVar[str] = "all elements, 16 bits each"

    def aggregate(self, xp: ModuleType, x: Array, state: tuple[Array, ...], context: Context) -> Aggregation:
        half = xp.astype(x, self.wire_dtype(xp.dtype_name(x)))
        mean = yield AllReduce(half)
        return outcome_like(xp, x, mean, half)

    def aggregate_bucket(self, bucket: Bucket) -> BucketAggregation:
        wire = _wire(bucket, "float16")
        bucket.found_inf = bucket.call("half_encode", wire.with_room)
        mean = yield AllReduce(wire.vector, with_room=wire.with_room)
        return bucket.call("half_decode", mean)

    def wire_dtype(self, dtype: str) -> str:
        return "float16"


@dataclass(frozen=True)
class BF16(Gathering):
    """Casts to bfloat16, gathers or scatters the bit patterns, and adds them in float32: no sum is rounded to 16 bits.

    Gathered, a rank receives 2 (N - 1) bytes an element from N ranks, as many as of dense gradients with four ranks.
    Scattered, it sends and receives half of what an allreduce of float32 does, with any number of ranks.
    """

    name: ClassVar[str] = "bf16"
    examples: ClassVar[tuple[str, ...]] = ("bf16",)
    sends: ClassVar[str] = "all elements, 16 bits each"

    def encode(self, xp: ModuleType, x: Array, context: Context) -> tuple[Array]:
        return (xp.to_bfloat16_bits(xp.flatten(x)),)

    def decode(self, xp: ModuleType, parts: Sequence[Array], shape: tuple[int, ...]) -> Array:
        return xp.from_bfloat16_bits(parts[0])

    def lay_out(self, bucket: Bucket) -> _BitPatterns:
        return _BitPatterns(bucket)

    def encode_bucket(self, bucket: Bucket) -> None:
        bucket.found_inf = bucket.call("bfloat16_encode", bucket.layout.patterns)

    def decode_bucket(self, bucket: Bucket, first: Array, ranks: int, stride: int) -> bool | Array:
        return bucket.call("bfloat16_decode", first, ranks, stride)


class _BitPatterns:
    """One 16-bit number for each of a bucket's elements.

    Attributes:
        payload: their bytes.
        patterns: the same storage, as numbers.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.payload = bucket.payload(2 * _places_of_elements(bucket))
        room = self.payload.with_room
        self.patterns = bucket.xp.from_bytes(room, like=bucket.zeros(room.shape[0] // 2, "int16"))


def _wire(bucket: Bucket, dtype: str) -> Payload:
    """One number for each of a bucket's elements, kept as its layout."""
    if bucket.layout is None:
        bucket.layout = bucket.payload(_places_of_elements(bucket), dtype)
    wire: Payload = bucket.layout
    return wire


def _places_of_elements(bucket: Bucket) -> int:
    """Says where each tensor's numbers lie, tensor behind tensor, in `place[0]` of the table; how many there are."""
    ends = np.cumsum(bucket.segments["size"])
    bucket.segments["place"][:, 0] = ends - bucket.segments["size"]
    return int(ends[-1])
