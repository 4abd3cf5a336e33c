"""Elements as multiples of a fraction of a scale, rounded at random: what QSGD and TernGrad have in common.

Both have a form for one tensor, in array functions, and for a bucket of tensors, in kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from hvdcomp.arrays.types import Array, number_of_elements
from hvdcomp.compressors.bucket import Bucket, BucketAggregation, gathered
from hvdcomp.compressors.packing import average_decoded, pack, packed_bytes, pad, unpack
from hvdcomp.compressors.protocol import Aggregation, AllGather, Context
from hvdcomp.compressors.randomness import random_words, rank_key, step_keys

SMALLEST_SCALE = 2.0**-96
"""A scale that is not above this counts as zero, so that dividing by it stays within float32."""

_ONE = 2.0**23  # a unit as values are rounded: whole numbers of 1 / _ONE of it, and 23 random bits


def steps_of(bits: int) -> int:
    """2 s, from the lowest code of `bits` bits to the highest; 1 for one bit."""
    return max(1, 2**bits - 2)


def gather_multiples(
    xp: ModuleType, x: Array, buckets: Array, scales: Array, bits: int, purpose: str, context: Context
) -> Aggregation:
    """Rounds elements at random to multiples of a fraction of their bucket's scale, and gathers codes and scales.

    Args:
        x: what is compressed.
        buckets: its elements, and zeros that fill up the last bucket, float32 (buckets, length).
        scales: of the buckets (buckets, 1). What lies beyond plus or minus a scale is clipped to it.
        bits: of a code.
        purpose: of the random numbers.
    """
    size, length, half = number_of_elements(tuple(x.shape)), buckets.shape[1], steps_of(bits) / 2
    highest = half * _ONE
    values = xp.flatten(buckets * (xp.reciprocal_or_zero(scales, SMALLEST_SCALE) * highest))[:size]
    codes = xp.astype(values.clip(-highest, highest), "int32")
    codes += int(highest)
    codes += (random_words(xp, rank_key(context, purpose), size, like=values) >> 9) & 0x7FFFFF
    codes = xp.astype(codes >> 23, "uint8")
    ranks = yield AllGather((pack(xp, codes, bits), scales))

    def decode(packed: Array, scales: Array) -> Array:
        return decode_multiples(xp, packed, scales, bits, length, size)

    return average_decoded(xp, x, ranks, decode, context)


def decode_multiples(xp: ModuleType, packed: Array, scales: Array, bits: int, length: int, size: int) -> Array:
    """What packed codes and scales stand for.

    Args:
        scales: (buckets, 1).
        length: of a bucket.
        size: number of codes.
    """
    steps = steps_of(bits)
    codes = pad(xp, unpack(xp, packed, bits, size), length)
    values = xp.astype(xp.reshape(codes, (-1, length)), "float32")
    values -= steps / 2
    values *= scales * (2 / steps)
    return xp.flatten(values)[:size]


class MultiplesLayout:
    """Where the scales and the codes of a bucket's tensors lie in a payload: all scales, then the codes of each tensor.

    Args:
        bits: of a code, of each tensor.
        length: elements that share a scale; None for a tensor's all.
        purpose: of the random numbers.
    """

    def __init__(self, bucket: Bucket, bits: Sequence[int], length: int | None, purpose: str) -> None:
        segments = bucket.segments
        sizes = segments["size"]
        self.length = length or int(sizes.max())
        of_scales = 4 * -(-sizes // self.length)
        of_codes = packed_bytes(np.array(bits), sizes)
        segments["count"] = bits
        begin = of_scales.sum()
        segments["place"][:, 0] = begin + np.cumsum(of_codes) - of_codes
        segments["place"][:, 1] = np.cumsum(of_scales) - of_scales
        self.keys = bucket.keys(purpose)
        self.payload = bucket.payload(int(begin + of_codes.sum()))


def aggregate_multiples(
    bucket: Bucket, bits: Callable[[Any], int], length: int | None, purpose: str, kernel: str, *arguments: float
) -> BucketAggregation:
    """A bucket's step.

    Args:
        bits: of a code, of a compressor.
        length, purpose: as of `MultiplesLayout`.
        kernel: that makes the payload, with its arguments between the bucket and the payload.
    """
    if bucket.layout is None:
        bucket.layout = MultiplesLayout(bucket, [bits(one) for one in bucket.compressors], length, purpose)
    layout, context = bucket.layout, bucket.context
    payload = layout.payload
    bucket.segments["key"] = step_keys(layout.keys, context.step, context.rank)
    bucket.found_inf = bucket.call(kernel, *arguments, payload.vector)
    ranks = yield AllGather((payload.vector,), payload.with_room)
    return bucket.call("multiples_decode", layout.length, *gathered(ranks))
