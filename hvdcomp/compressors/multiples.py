"""Elements as multiples of a fraction of a scale, rounded at random: what several quantizers have in common.

Each has a form for one tensor, in array functions, and for a bucket of tensors, in kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import numpy as np

from hvdcomp.arrays.types import Array
from hvdcomp.compressors.bucket import Bucket
from hvdcomp.compressors.packing import pack, packed_bytes, pad, unpack
from hvdcomp.compressors.protocol import Context
from hvdcomp.compressors.randomness import random_words, rank_key, step_keys

SMALLEST_SCALE = 2.0**-96
"""A scale that is not above this counts as zero, so that dividing by it stays within float32."""

_ONE = 2.0**23  # a unit as values are rounded: whole numbers of 1 / _ONE of it, and 23 random bits


def steps_of(bits: int) -> int:
    """2 s, from the lowest code of `bits` bits to the highest; 1 for one bit."""
    return max(1, 2**bits - 2)


def encode_multiples(
    xp: ModuleType, size: int, buckets: Array, scales: Array, bits: int, purpose: str, context: Context
) -> tuple[Array, Array]:
    """Rounds elements at random to multiples of a fraction of their bucket's scale; the packed codes, and the scales.

    Args:
        size: number of elements.
        buckets: the elements, and zeros that fill up the last bucket, float32 (buckets, length).
        scales: of the buckets (buckets, 1). What lies beyond plus or minus a scale is clipped to it.
        bits: of a code.
        purpose: of the random numbers.
    """
    highest = steps_of(bits) / 2 * _ONE
    values = xp.flatten(buckets * (xp.reciprocal_or_zero(scales, SMALLEST_SCALE) * highest))[:size]
    codes = xp.astype(values.clip(-highest, highest), "int32")
    codes += int(highest)
    codes += (random_words(xp, rank_key(context, purpose), size, like=values) >> 9) & 0x7FFFFF
    codes = xp.astype(codes >> 23, "uint8")
    return pack(xp, codes, bits), scales


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


def encode_multiples_of_bucket(bucket: Bucket, kernel: str, *arguments: float) -> None:
    """Makes the payload of a bucket whose layout is a `MultiplesLayout`.

    Args:
        kernel: that makes it, with its arguments between the bucket and the payload.
    """
    context = bucket.context
    bucket.segments["key"] = step_keys(bucket.layout.keys, context.step, context.rank)
    bucket.found_inf = bucket.call(kernel, *arguments, bucket.layout.payload.vector)
