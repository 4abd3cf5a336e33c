"""Block quantizers send 8 or 4 bits per element (integers or floats), and one scale for each block of consecutive
elements.

The scale of a block is its largest magnitude, which becomes the largest code. So an outlier reduces only the precision
of its own block. By default, elements are rounded to the nearest code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from hvdcomp.arrays.types import Array, ArrayFunctions, number_of_elements
from hvdcomp.compressors.base import Count
from hvdcomp.compressors.bucket import Bucket
from hvdcomp.compressors.gathering import Gathering, Rounding
from hvdcomp.compressors.multiples import (
    Multiples,
    MultiplesLayout,
    encode_multiples,
    encode_multiples_of_bucket,
    in_runs,
    steps_of,
)
from hvdcomp.compressors.packing import pack, pad
from hvdcomp.compressors.protocol import Context
from hvdcomp.compressors.randomness import random_words, rank_key
from hvdcomp.kernels.limits import SMALLEST_SCALE
from hvdcomp.specs.described import Rule

_TO_WHOLE = 1.5 * 2.0**23
"""Adding this number rounds a float32 to an integer. If the magnitude of the float32 is below 2**22, the sum has no
bits for a fraction. The lowest bits of the sum are then the nearest integer (ties to even)."""

_FORMAT = Rule(lambda value: value in ("e4m3", "e5m2"), '"e4m3" or "e5m2"')


@dataclass(frozen=True)
class BlockQuantizer(Gathering):
    """Base of methods whose codes are fractions of the largest magnitude of their block.

    With error feedback, residuals stay small, because the error of an element is at most the distance between two
    codes.

    Attributes:
        block: number of consecutive elements that share a scale. The last block may be shorter.
        rounding: "nearest" or "stochastic". "nearest" gives the same result in every run. "stochastic" rounds at random
            to one of the two neighbors, so that the expectation is the element itself.
    """

    block: Count = 128
    rounding: Rounding = "nearest"

    bits: ClassVar[int] = 8

    def lay_out(self, bucket: Bucket) -> MultiplesLayout:
        return MultiplesLayout(bucket, self.block)

    def _blocks(self, xp: ArrayFunctions, x: Array) -> tuple[Array, Array]:
        """The blocks, as in `in_runs`, and their scales (blocks, 1)."""
        blocks = in_runs(xp, x, self.block)
        return blocks, xp.row_largest(blocks)

    def _encode_bucket(self, bucket: Bucket, mantissa: int = 0) -> None:
        """Calls the encoding kernel. `mantissa` is the number of mantissa bits if codes are floats; 0 if codes are
        integers."""
        nearest = self.rounding == "nearest"
        encode_multiples_of_bucket(bucket, "blocks_encode", bucket.layout.length, mantissa, nearest)


class _WholeNumbers(BlockQuantizer, Multiples):
    """Base of methods whose codes are integers from -s to s, with s = 2**(bits - 1) - 1. The unit is scale / s."""

    @property
    def run(self) -> int:
        return self.block

    def encode(self, xp: ArrayFunctions, x: Array, context: Context) -> tuple[Array, Array]:
        """Encodes x as round(s x / scale) + s. The scale of a block is its largest magnitude."""
        size = number_of_elements(tuple(x.shape))
        blocks, scales = self._blocks(xp, x)
        if self.rounding == "stochastic":
            return encode_multiples(xp, size, blocks, scales, self.bits, self.name, context)
        s = steps_of(self.bits) // 2
        values = xp.flatten(blocks * (xp.reciprocal_or_zero(scales, SMALLEST_SCALE) * s))[:size]
        values = values.clip(-s, s)
        values += _TO_WHOLE
        codes = (xp.bitcast(values, "int32") + s) & 0xFF
        return pack(xp, xp.astype(codes, "uint8"), self.bits), scales


@dataclass(frozen=True)
class Int8(_WholeNumbers):
    """Sends each element as an integer from -127 to 127, in units of 1/127 of its block's largest magnitude. The error
    is at most 1/254 of this magnitude.

    As in a cast, rounding to nearest does not count as bias.

    Example:
        >>> Int8().payload_bytes((1000, 1000))
        1031252
    """

    name: ClassVar[str] = "int8"
    examples: ClassVar[tuple[str, ...]] = ("int8",)
    sends: ClassVar[str] = "one byte per element, and the largest magnitude of each block"
    reference: ClassVar[str] = "Dettmers et al. 2022, arXiv:2110.02861 (the blocks)"

    def encode_bucket(self, bucket: Bucket) -> None:
        self._encode_bucket(bucket)


@dataclass(frozen=True)
class Int4(_WholeNumbers):
    """Sends each element as an integer from -7 to 7, in units of 1/7 of its block's largest magnitude. The error is at
    most 1/14 of this magnitude.

    Many elements are smaller than this error and become zero. Therefore rounding to nearest is used with error
    feedback. Rounding to nearest is a contraction: |x - C(x)|^2 <= (b - 1) / (b - 1 + 196) |x|^2 with blocks of b
    elements. For the default block, this bound is 0.4 |x|^2. Stochastic rounding is unbiased, and is used without error
    feedback.

    Example:
        >>> Int4().payload_bytes((1000, 1000))
        531252
    """

    name: ClassVar[str] = "int4"
    examples: ClassVar[tuple[str, ...]] = ("int4", "int4:rounding=stochastic")
    bits: ClassVar[int] = 4
    sends: ClassVar[str] = "4 bits per element, and the largest magnitude of each block"
    reference: ClassVar[str] = "Wang et al. 2023, arXiv:2306.10209; Dettmers et al. 2022, arXiv:2110.02861 (the blocks)"

    @property
    def biased(self) -> bool:  # type: ignore[override]
        """True unless rounding is stochastic."""
        return self.rounding == "nearest"

    def encode_bucket(self, bucket: Bucket) -> None:
        self._encode_bucket(bucket)


@dataclass(frozen=True)
class FP8(BlockQuantizer):
    """Sends each element as an 8-bit float, relative to its block's largest magnitude (Micikevicius et al. 2022,
    section 3).

    Let m be the largest magnitude of the block. The relative error of `e4m3` is at most 1/16 for magnitudes above
    2**-14 m. The relative error of `e5m2` is at most 1/8 for magnitudes above 2**-29 m. The paper uses e5m2 for
    gradients, with one scale for each tensor. With a scale for each block, the range of e4m3 is enough, and its error
    is half as large. As in a cast, rounding to nearest does not count as bias. PyTorch reads the codes as
    `float8_e4m3fn` and `float8_e5m2`.

    Attributes:
        format: "e4m3" (4 bits of exponent and 3 bits of mantissa) or "e5m2" (5 and 2).
        block: number of consecutive elements that share a scale. Blocks may be long, because floats keep their relative
            precision over many magnitudes.

    Example:
        >>> FP8().payload_bytes((1000, 1000))
        1003908
    """

    block: Count = 1024
    format: Annotated[str, _FORMAT] = "e4m3"

    name: ClassVar[str] = "fp8"
    examples: ClassVar[tuple[str, ...]] = ("fp8", "fp8:rounding=stochastic,format=e5m2")
    sends: ClassVar[str] = "one byte per element, and the largest magnitude of each block"
    reference: ClassVar[str] = "Micikevicius et al. 2022, arXiv:2209.05433"

    @property
    def mantissa(self) -> int:
        """The number of bits of the mantissa."""
        return {"e4m3": 3, "e5m2": 2}[self.format]

    @property
    def _largest(self) -> float:
        """The largest finite number."""
        return {"e4m3": 448.0, "e5m2": 57344.0}[self.format]

    @property
    def _least(self) -> int:
        """The float32 bits of the smallest normal number."""
        return {"e4m3": 127 - 6, "e5m2": 127 - 14}[self.format] << 23

    def encode(self, xp: ArrayFunctions, x: Array, context: Context) -> tuple[Array, Array]:
        """Computes the codes and the scales with the bits of float32 numbers.

        `kernels/src/float8.h` does the same in C. Between two powers of two, and below the smallest normal number,
        codes are equally spaced. So the distance of a magnitude from the power of two below it is divided by the
        spacing, rounded, and added to the code of this power of two.
        """
        size = number_of_elements(tuple(x.shape))
        blocks, scales = self._blocks(xp, x)
        values = xp.flatten(blocks * (xp.reciprocal_or_zero(scales, SMALLEST_SCALE) * self._largest))[:size]
        magnitudes = abs(values).clip(0, self._largest)
        powers = (xp.bitcast(magnitudes, "int32") & 0x7F800000).clip(self._least, 254 << 23)
        if self.rounding == "nearest":
            # The last bit of this sum is worth one spacing. Ties go to even.
            powers_of_sum = powers + ((23 - self.mantissa) << 23)
            codes = xp.bitcast(magnitudes + xp.bitcast(powers_of_sum, "float32"), "int32") - powers_of_sum
        else:
            # The exact number of spacings times 2**23, plus 23 random bits.
            factors = xp.bitcast(((277 + self.mantissa) << 23) - self._least - (powers - self._least), "float32")
            codes = xp.astype(magnitudes * factors, "int32")
            codes += (random_words(xp, rank_key(context, self.name), size, like=values) >> 9) & 0x7FFFFF
            codes = codes >> 23
        codes += (powers - self._least) >> (23 - self.mantissa)
        codes |= (xp.bitcast(values, "int32") >> 24) & 0x80
        return xp.astype(codes, "uint8"), scales

    def decode(self, xp: ArrayFunctions, parts: Sequence[Array], shape: tuple[int, ...]) -> Array:
        size = number_of_elements(shape)
        packed, scales = parts
        codes = xp.astype(pad(xp, packed, min(self.block, size)), "int32")
        magnitudes = codes & 0x7F
        small = xp.astype(magnitudes, "float32") * (2.0 ** ((self._least >> 23) - 127 - self.mantissa))
        whole = xp.bitcast((magnitudes << (23 - self.mantissa)) + (self._least - (1 << 23)), "float32")
        values = xp.where(magnitudes < (1 << self.mantissa), small, whole)
        values = xp.where(codes > 127, -values, values)
        values = xp.reshape(values, (-1, min(self.block, size))) * (scales * (1 / self._largest))
        return xp.flatten(values)[:size]

    def encode_bucket(self, bucket: Bucket) -> None:
        self._encode_bucket(bucket, self.mantissa)

    def decode_bucket(self, bucket: Bucket, first: Array, ranks: int, stride: int) -> bool | Array:
        return bucket.call("float8_decode", bucket.layout.length, self.mantissa, first, ranks, stride)
