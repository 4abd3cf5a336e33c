"""Casts: no compression, half precision and bfloat16."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar

import numpy as np

from hvdcomp.arrays.types import Array, allreduce_dtype
from hvdcomp.compressors.base import Compressor
from hvdcomp.compressors.bucket import Bucket, BucketAggregation, Payload, gathered
from hvdcomp.compressors.packing import average_decoded, outcome_like
from hvdcomp.compressors.protocol import Aggregation, AllGather, AllReduce, Context, Outcome
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
class BF16(Compressor):
    """Casts to bfloat16, gathers the bit patterns and adds them in float32, because Horovod has no bfloat16."""

    name: ClassVar[str] = "bf16"
    examples: ClassVar[tuple[str, ...]] = ("bf16",)
    sends: ClassVar[str] = "all elements, 16 bits each"

    def aggregate(self, xp: ModuleType, x: Array, state: tuple[Array, ...], context: Context) -> Aggregation:
        bits = xp.to_bfloat16_bits(xp.flatten(x))
        ranks = yield AllGather((bits,))
        return average_decoded(xp, x, ranks, xp.from_bfloat16_bits, context)

    def aggregate_bucket(self, bucket: Bucket) -> BucketAggregation:
        wire = _wire(bucket, "int16")
        bucket.found_inf = bucket.call("bfloat16_encode", wire.with_room)
        ranks = yield AllGather((bucket.xp.as_bytes(wire.vector),), bucket.xp.as_bytes(wire.with_room))
        return bucket.call("bfloat16_decode", *gathered(ranks))


def _wire(bucket: Bucket, dtype: str) -> Payload:
    """One element for each of a bucket's, tensor behind tensor, where `place[0]` of the table says."""
    if bucket.layout is None:
        ends = np.cumsum(bucket.segments["size"])
        bucket.segments["place"][:, 0] = ends - bucket.segments["size"]
        bucket.layout = bucket.payload(int(ends[-1]), dtype)
    wire: Payload = bucket.layout
    return wire
