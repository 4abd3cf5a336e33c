"""EDEN rotates each block at random, and then sends one of a few levels for each element.

After a random rotation, the elements of any block have nearly a normal distribution. The levels are the best levels for
this distribution (Lloyd-Max), and a scale for each block makes the result unbiased. So the relative error is the same
for every gradient and known in advance, and no error feedback is needed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from hvdcomp.arrays.types import Array, ArrayFunctions, number_of_elements
from hvdcomp.compressors.base import most_level_for
from hvdcomp.compressors.bucket import Bucket, BucketAggregation, address_of
from hvdcomp.compressors.gathering import Gathering
from hvdcomp.compressors.packing import outcome_like, pack, packed_bytes, pad, unpack
from hvdcomp.compressors.protocol import Aggregation, Context
from hvdcomp.compressors.randomness import random_words, shared_key
from hvdcomp.errors import SpecError
from hvdcomp.kernels.limits import LARGEST_SQUARED, MOST_HALVINGS, SMALLEST_SCALE, SQUARES_ADDED, SQUARES_KEPT
from hvdcomp.specs.described import Rule, Truth, between, is_whole, or_none
from hvdcomp.specs.levels import Level

LEVELS = {
    1: (0.7979,),
    2: (0.4528, 1.5104),
    3: (0.2451, 0.7560, 1.3439, 2.1520),
    4: (0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0690, 2.7326),
}
"""The magnitudes of the levels of a standard normal number, by bits (Max 1960, doi:10.1109/TIT.1960.1057548)."""

ERRORS = {1: 0.571, 2: 0.133, 3: 0.036, 4: 0.0095}
"""The expectation of |x - C(x)|^2 / |x|^2, by bits, for normal x. For any other x with many elements, the expectation
is close to this value."""

_BITS = between(1, 4)
_BLOCK = Rule(lambda value: is_whole(value, 1) and value in (512, 1024), "512 or 1024")


@dataclass(frozen=True)
class EDEN(Gathering):
    """Rotates each block at random, and sends the nearest of 2**bits levels for each element (Vargaftik et al. 2022;
    with one bit, this is DRIVE, Vargaftik et al. 2021).

    The rotation of a block x of n elements is z = H D x. H is the Walsh-Hadamard matrix of n rows, and D is a diagonal
    of random signs. q are the levels that are nearest to z / rms(z). The result is D H (s q) with s = |z|^2 / (n <z,
    q>). All ranks draw the same signs, so the decoded payloads are averaged first, and a single inverse rotation
    follows.

    Attributes:
        bits: bits per element, 1 to 4. The squared error is 57, 13, 3.6 or 0.95 % of |x|^2 for 1, 2, 3 or 4 bits.
        block: number of elements that are rotated together, 512 or 1024. The last block of a tensor is padded with
            zeros.
        back: bits per element, 1 to 4, for the means that exchange "scatter" compresses again. Default: `bits` + 1, but
            at most 4. The error of the means is not averaged over ranks. Therefore an additional bit for the means
            reduces the error of the result more than an additional bit for the chunks.
        scaled: whether to divide each element by its own scale before the rotation, and to multiply the result by it.
            The scale is a power of two near the root of a running mean of the element's squares. The running mean
            follows the mean over the ranks, so all ranks have the same scales. Without scales, the rotation gives all
            elements of a block the same error. Adam divides by the size of each element, so this error is large for
            elements that are usually small. With scales, the error of an element is in proportion to its usual size.
            Scales need 8 bytes per element on each rank.

    Example:
        >>> EDEN(bits=2).payload_bytes((1024, 1024))
        266240
    """

    bits: Annotated[int, _BITS] = 2
    block: Annotated[int, _BLOCK] = 1024
    back: Annotated[int | None, or_none(_BITS)] = None
    scaled: Truth = False

    name: ClassVar[str] = "eden"
    examples: ClassVar[tuple[str, ...]] = ("eden", "eden:bits=1", "eden:block=512", "eden:bits=1,scaled=True")
    level_name: ClassVar[str | None] = "bits"
    sends: ClassVar[str] = "a few bits per element, and a scale per block"
    reference: ClassVar[str] = "Vargaftik et al. 2022, arXiv:2108.08842; Vargaftik et al. 2021, arXiv:2105.08339"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.back is not None and self.exchange == "gather":
            raise SpecError(
                f"eden: back={self.back} with exchange=gather is not allowed, because back is the number of bits of "
                "the averaged gradients, which only exchange=scatter compresses; set exchange=scatter, or omit back"
            )

    @property
    def unit(self) -> int:  # type: ignore[override]
        """The number of elements in a block."""
        return self.block

    @property
    def of_means(self) -> EDEN:
        bits = min(self.bits + 1, max(LEVELS)) if self.back is None else self.back
        return self if bits == self.bits else dataclasses.replace(self, bits=bits)

    def with_exchange(self, exchange: str) -> EDEN:
        """The same method with a different `exchange`. With "gather", `back` is dropped."""
        return dataclasses.replace(self, exchange=exchange, back=None if exchange == "gather" else self.back)

    @property
    def known_error(self) -> float:  # type: ignore[override]
        """The known error of the method: the entry of `ERRORS` for this number of bits. With `scaled`, it is only a
        rough estimate, because the error then also depends on how well the scales fit."""
        return ERRORS[self.bits]

    @property
    def keeps_state(self) -> bool:  # type: ignore[override]
        """Whether there are scales to keep."""
        return self.scaled

    def prepare(self, xp: ArrayFunctions, x: Array, state: tuple[Array, ...], context: Context) -> tuple[Array, ...]:
        """With `scaled`, the state is the running mean of squares of each element (elements, 1), at first zeros."""
        if not self.scaled:
            return ()
        shape = number_of_elements(tuple(x.shape)), 1
        if state and tuple(state[0].shape) == shape:
            return state
        return (xp.astype(xp.zeros(shape, like=x), "float32"),)

    def aggregate(self, xp: ArrayFunctions, x: Array, state: tuple[Array, ...], context: Context) -> Aggregation:
        """Like `Gathering.aggregate`. With `scaled`, the elements are divided by their scales, and the scales follow
        the mean over the ranks."""
        if not self.scaled:
            return (yield from super().aggregate(xp, x, state, context))
        squares = xp.flatten(state[0])
        scales = xp.reshape(_scales(xp, squares, self.block), x.shape)
        outcome = yield from super().aggregate(xp, xp.astype(x, "float32") / scales, (), context)
        mean = outcome.mean * scales
        limited = xp.flatten(mean).clip(-LARGEST_SQUARED, LARGEST_SQUARED)
        squares = squares * SQUARES_KEPT + limited * limited * SQUARES_ADDED
        return outcome_like(xp, x, mean, outcome.sent * scales)._replace(state=(xp.reshape(squares, (-1, 1)),))

    def encode(self, xp: ArrayFunctions, x: Array, context: Context) -> tuple[Array, Array]:
        """Computes the packed levels and the scales.

        A block whose norm is at most 2**-96 is sent as zeros. Here H has no factor 1 / sqrt(n). So the rms of z is the
        norm of x, and s = |x|^2 / <z, q>.
        """
        vector = pad(xp, xp.flatten(xp.astype(x, "float32")), self.block)
        blocks = xp.reshape(vector, (-1, self.block))
        # z = H D x
        z = xp.hadamard(blocks * xp.reshape(self._signs(xp, vector, context), blocks.shape))
        squares, magnitudes = xp.row_dots(blocks, blocks), abs(z)
        norms = xp.astype(squares**0.5, "float32")
        # q: the levels nearest to z / rms(z). The lowest bit of a code is the sign.
        levels = LEVELS[self.bits]
        q, codes = magnitudes * 0 + levels[0], xp.astype(z < 0, "uint8")
        for level, border in zip(levels[1:], _borders(self.bits), strict=True):
            above = magnitudes > norms * border
            q = xp.where(above, level, q)
            codes = codes + xp.astype(above, "uint8") * 2
        # s = |x|^2 / <z, q>
        products = _dots(xp, magnitudes, q)
        scales = squares * xp.reciprocal_or_zero(products, 0) * (1 + 0 * products)  # NaN if a product is infinite
        scales = xp.where(norms <= SMALLEST_SCALE, norms * 0, xp.astype(scales, "float32"))
        return pack(xp, xp.flatten(codes), self.bits), scales

    def decode(self, xp: ArrayFunctions, parts: Sequence[Array], shape: tuple[int, ...]) -> Array:
        """Computes s q, the rotated elements (blocks, block)."""
        packed, scales = parts
        codes = unpack(xp, packed, self.bits, scales.shape[0] * self.block)
        codes = xp.reshape(codes, (-1, self.block))
        levels = LEVELS[self.bits]
        q = xp.astype(codes, "float32") * 0 + levels[0]
        for place, level in enumerate(levels[1:], start=1):
            q = xp.where(codes >= 2 * place, level, q)
        return xp.where(codes & 1 == 1, -q, q) * scales

    def restore(self, xp: ArrayFunctions, decoded: Array, shape: tuple[int, ...], context: Context) -> Array:
        """Computes D H (s q), the inverse rotation. `decoded` is s q of one rank, or the mean of the ranks' s q."""
        vector = xp.flatten(xp.hadamard(decoded))
        return (vector * self._signs(xp, vector, context))[: number_of_elements(shape)]

    def _signs(self, xp: ArrayFunctions, like: Array, context: Context) -> Array:
        """The diagonal of D, as a float32 vector of 1 and -1 with the length of `like`. One random word gives the signs
        of 32 elements."""
        words = random_words(xp, shared_key(context, self.name), like.shape[0] // 32, like)
        bits = (xp.reshape(words, (-1, 1)) >> xp.arange(32, like=words)) & 1
        return xp.flatten(xp.astype(1 - 2 * bits, "float32"))

    def aggregate_bucket(self, bucket: Bucket) -> BucketAggregation:
        _find_squares(bucket)
        return super().aggregate_bucket(bucket)

    def preview_bucket(self, bucket: Bucket) -> None:
        _find_squares(bucket)
        super().preview_bucket(bucket)

    def lay_out(self, bucket: Bucket) -> _RotatedLayout:
        return _RotatedLayout(bucket, self.block)

    def encode_bucket(self, bucket: Bucket) -> None:
        layout = bucket.layout
        bucket.draw_keys(shared=True)
        bucket.found_inf = bucket.call("eden_encode", layout.levels, self.block, layout.payload.vector)

    def decode_bucket(self, bucket: Bucket, first: Array, ranks: int, stride: int) -> bool | Array:
        bucket.draw_keys(shared=True)  # the keys in the table may be missing, or belong to another chunk
        return bucket.call("eden_decode", bucket.layout.levels, self.block, first, ranks, stride)

    def level_for(self, compression_factor: float, shape: tuple[int, ...]) -> Level | None:
        super().level_for(compression_factor, shape)
        return most_level_for(self, compression_factor, shape, range(1, 5))


def _find_squares(bucket: Bucket) -> None:
    """Writes the addresses of the running means of squares to the table, if elements have scales."""
    if bucket.states is None:
        return
    sizes = bucket.segments["size"]
    offsets = 4 * (np.cumsum(sizes) - sizes)
    for name, vectors in (("squares", bucket.states.kept), ("next_squares", bucket.states.next)):
        bucket.segments[name] = address_of(vectors[0]) + offsets


def _scales(xp: ArrayFunctions, squares: Array, block: int) -> Array:
    """The scale of each element (elements,) from the running means of squares: 1 for the largest in each block, and
    powers of two for all others.

    All ranks must have the same scales, bit for bit, also on different processors. A root may be rounded differently,
    but exponents are exact. Because the scales are powers of two, multiplying by them is exact, too.
    """
    blocks = xp.reshape(pad(xp, squares, block), (-1, block))
    exponents, largest = (xp.bitcast(x, "int32") >> 23 for x in (blocks, xp.row_largest(blocks)))  # there are no signs
    below = (largest - exponents + 1) >> 1
    return xp.flatten(xp.bitcast((127 - below.clip(0, MOST_HALVINGS)) << 23, "float32"))[: squares.shape[0]]


def _dots(xp: ArrayFunctions, x: Array, y: Array) -> Array:
    """The dot products (blocks, 1), float64, of the rows of two matrices. The length of a row is a multiple of 512.

    The products of eight elements that are 64 apart are first added as float32. Otherwise the C kernels would convert
    every product to float64, which would take longer than everything else.
    """
    parts = xp.reshape(x * y, (x.shape[0], -1, 8, 64))
    for half in (4, 2, 1):
        parts = parts[:, :, :half] + parts[:, :, half:]
    sums = xp.reshape(parts, (x.shape[0], -1))
    return xp.row_dots(sums, sums * 0 + 1)


def _borders(bits: int) -> list[float]:
    """The magnitudes halfway between two neighboring levels, rounded to float32 like the levels."""
    levels = np.array(LEVELS[bits], np.float32).astype(np.float64)
    return [float(border) for border in ((levels[1:] + levels[:-1]) / 2).astype(np.float32)]


class _RotatedLayout:
    """The layout of a bucket's payload: first all scales, and then the codes of each tensor, padded to whole blocks.

    Attributes:
        levels: the table for kernels, float32 (2, 5, 8): the levels for each number of bits, and then the borders
            between levels.
    """

    def __init__(self, bucket: Bucket, block: int) -> None:
        blocks = -(-bucket.segments["size"] // block)
        bits = np.array([compressor.bits for compressor in bucket.compressors])
        bucket.segments["count"] = bits
        places, count = bucket.places(4 * blocks, packed_bytes(bits, blocks * block))
        bucket.segments["scales"], bucket.segments["codes"] = places
        self.payload = bucket.payload(count)
        levels = np.zeros((2, 5, 8), np.float32)
        for number, magnitudes in LEVELS.items():
            levels[0, number, : len(magnitudes)] = magnitudes
            levels[1, number, : len(magnitudes) - 1] = _borders(number)
        self.levels = bucket.xp.from_numpy(levels, like=self.payload.vector)
