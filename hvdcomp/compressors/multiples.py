"""The common part of several quantizers. They divide a scale into equal steps, and round each element at random to a
multiple of this step.

Each quantizer is implemented twice: with array functions for one tensor, and with kernels for a bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from hvdcomp.arrays.types import Array, ArrayFunctions, number_of_elements
from hvdcomp.compressors.bucket import Bucket
from hvdcomp.compressors.gathering import Gathering
from hvdcomp.compressors.packing import pack, packed_bytes, pad, unpack
from hvdcomp.compressors.protocol import Context
from hvdcomp.compressors.randomness import random_words, rank_key
from hvdcomp.kernels.limits import SMALLEST_SCALE

_UNIT = 2.0**23  # fixed point: the distance between two codes is 2**23, so that 23 random bits can be added


def steps_of(bits: int) -> int:
    """The number of steps from the lowest to the highest code of `bits` bits. The number is `2 * s` if `s` is the
    highest code, or 1 for one bit."""
    return max(1, 2**bits - 2)


def in_runs(xp: ArrayFunctions, x: Array, most: int) -> Array:
    """Splits a tensor into runs of at most `most` neighboring elements. Returns float32 (runs, length), padded with
    zeros."""
    vector = xp.flatten(xp.astype(x, "float32"))
    length = min(most, vector.shape[0])
    return xp.reshape(pad(xp, vector, length), (-1, length))


def encode_multiples(
    xp: ArrayFunctions, size: int, runs: Array, scales: Array, bits: int, purpose: str, context: Context
) -> tuple[Array, Array]:
    """Rounds elements at random to multiples of a fraction of the scale of their run. Returns the packed codes and the
    scales.

    Args:
        xp: array functions.
        size: number of elements of the tensor.
        runs: the elements of the tensor, cut into runs and padded with zeros, float32 (runs, length).
        scales: the scale of each run, (runs, 1). Magnitudes above the scale are clipped to the scale.
        bits: number of bits of a code.
        purpose: text that distinguishes these random numbers from others of the same step.
        context: the tensor's name, the step, the seed, the rank and the number of ranks.
    """
    # floor(s x / scale + u) + s, with u uniform in [0, 1), in fixed point: everything is multiplied by 2**23, and u is
    # 23 random bits.
    highest = steps_of(bits) / 2 * _UNIT
    values = xp.flatten(runs * (xp.reciprocal_or_zero(scales, SMALLEST_SCALE) * highest))[:size]
    codes = random_words(xp, rank_key(context, purpose), size, like=values)
    codes >>= 9
    codes &= 0x7FFFFF
    codes += int(highest)
    codes += xp.astype(values.clip(-highest, highest), "int32")
    codes >>= 23
    return pack(xp, xp.astype(codes, "uint8"), bits), scales


class Multiples(Gathering):
    """Base of methods that send packed codes. A code is an integer that represents a multiple of a fraction of the
    scale.

    Class attributes:
        bits: the number of bits of a code. In some methods, this number is a setting.
    """

    bits: ClassVar[int]

    @property
    def run(self) -> int | None:
        """The number of neighboring elements that share a scale; None if all elements of a tensor share one scale."""
        return None

    def decode(self, xp: ArrayFunctions, parts: Sequence[Array], shape: tuple[int, ...]) -> Array:
        """Decodes each code to (code - s) scale / s."""
        size = number_of_elements(shape)
        packed, scales = parts
        length, steps = min(self.run or size, size), steps_of(self.bits)
        codes = pad(xp, unpack(xp, packed, self.bits, size), length)
        values = xp.astype(xp.reshape(codes, (-1, length)), "float32")
        values -= steps / 2
        values *= scales * (2 / steps)
        return xp.flatten(values)[:size]

    def lay_out(self, bucket: Bucket) -> MultiplesLayout:
        return MultiplesLayout(bucket, self.run)

    def decode_bucket(self, bucket: Bucket, first: Array, ranks: int, stride: int) -> bool | Array:
        return bucket.call("multiples_decode", bucket.layout.length, first, ranks, stride)


class MultiplesLayout:
    """The layout of a bucket's payload: all scales, then the codes of each tensor.

    Args:
        bucket: the bucket that is compressed.
        length: the number of elements that share a scale; None if all elements of a tensor share one scale.
    """

    def __init__(self, bucket: Bucket, length: int | None) -> None:
        segments = bucket.segments
        sizes, bits = segments["size"], [compressor.bits for compressor in bucket.compressors]
        largest = int(sizes.max())
        self.length = min(length or largest, largest)
        of_scales = 4 * -(-sizes // self.length)
        of_codes = packed_bytes(np.array(bits), sizes)
        segments["count"] = bits
        (segments["scales"], segments["codes"]), count = bucket.places(of_scales, of_codes)
        self.payload = bucket.payload(count)


def encode_multiples_of_bucket(bucket: Bucket, kernel: str, *arguments: float) -> None:
    """Writes the payload of a bucket whose codes are rounded at random.

    Args:
        bucket: the bucket that is compressed.
        kernel: name of the kernel.
        arguments: the arguments of the kernel between the bucket and the payload.
    """
    bucket.draw_keys()
    bucket.found_inf = bucket.call(kernel, *arguments, bucket.layout.payload.vector)
