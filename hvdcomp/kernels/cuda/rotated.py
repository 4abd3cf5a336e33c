"""EDEN: rotates blocks of elements at random, and rounds each element to one of a few levels, as in
`src/isa_quant_rotated.c`.

The sums and differences of a rotation are computed in the same order as in this C file, so that both give the same
bits. The kernels do not use `tl.dot`, which gives zeros in float16 on devices of compute capability 7.0.
"""

from hvdcomp.kernels import limits
from hvdcomp.kernels.cuda.codes import SMALLEST_SCALE, packed_code
from hvdcomp.kernels.cuda.language import tl, triton
from hvdcomp.kernels.cuda.x import (
    CODES,
    COUNT,
    KEY,
    NEXT_SQUARES,
    RESULT,
    SCALES,
    SOURCED,
    SQUARES,
    X,
    entry,
    floats,
    is_address,
    left_of,
    magnitude,
    make_x,
    no_sum,
    payload_of,
    piece,
    pointer,
    report,
    size_of,
    word,
)

_ROW = tl.constexpr(8)  # length of a row in the array `levels`; a row has the levels for one number of bits
_BORDERS = tl.constexpr(40)  # index of the first border between two levels in the array `levels`
_ONE = tl.constexpr(127)  # exponent bits of 1
_MOST_HALVINGS = tl.constexpr(limits.MOST_HALVINGS)
_KEPT = tl.constexpr(limits.SQUARES_KEPT)
_ADDED = tl.constexpr(limits.SQUARES_ADDED)
_LARGEST_SQUARED = tl.constexpr(limits.LARGEST_SQUARED)


@triton.jit
def _pairs(x, APART: tl.constexpr, LENGTH: tl.constexpr):
    """Pairs of elements that are APART from each other: the lower and the upper half of each run of 2 * APART
    elements."""
    return tl.split(tl.permute(tl.reshape(x, (LENGTH // (2 * APART), 2, APART)), (0, 2, 1)))


@triton.jit
def _butterflies(x, APART: tl.constexpr, BLOCK: tl.constexpr):
    """The sums and differences of elements that are APART from each other."""
    a, b = _pairs(x, APART, BLOCK)
    return tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), (BLOCK,))


@triton.jit
def _rotate(x, LOG: tl.constexpr):
    """The Walsh-Hadamard transform of a block of 2**LOG elements."""
    for stage in tl.static_range(0, LOG):
        x = _butterflies(x, 1 << stage, 1 << LOG)
    return x


@triton.jit
def _flip(x, i, key):
    """Multiplies elements i of a tensor by their random signs."""
    sign = (word(i // 32, key) >> (i % 32).to(tl.uint32)) << 31
    return (x.to(tl.uint32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)


@triton.jit
def _halvings(squares):
    """How often 1 is halved to get the scale of each element of a block. squares: the running means of squares."""
    exponent = squares.to(tl.int32, bitcast=True) >> 23
    return tl.minimum((tl.max(exponent, 0) - exponent + 1) >> 1, _MOST_HALVINGS)


@triton.jit
def _times_power(x, exponent):
    """x times a power of two, which is exact unless the product is denormal."""
    return x * ((exponent + _ONE) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _next_squares(squares, mean):
    """The running means of squares after a step. A NaN stays NaN."""
    low = tl.where(mean < -_LARGEST_SQUARED, -_LARGEST_SQUARED, mean)
    limited = tl.where(low > _LARGEST_SQUARED, _LARGEST_SQUARED, low)
    return squares * _KEPT + limited * limited * _ADDED


@triton.jit
def _sums(x, APART: tl.constexpr, LENGTH: tl.constexpr):
    """The sums of elements that are APART from each other."""
    a, b = _pairs(x, APART, LENGTH)
    return tl.reshape(a + b, (LENGTH // 2,))


@triton.jit
def _sums_of_eight(x, BLOCK: tl.constexpr):
    """In each run of 512 elements, the sums of eight elements that are 64 apart."""
    return _sums(_sums(_sums(x, 256, BLOCK), 128, BLOCK // 2), 64, BLOCK // 4)


@triton.jit
def _value(code, levels, bits, scale):
    """The values of codes before the inverse rotation."""
    level = tl.load(levels + bits * _ROW + (code >> 1))
    signed = (level.to(tl.int32, bitcast=True) ^ (code << 31)).to(tl.float32, bitcast=True)
    return signed * scale


@triton.jit
def _pack_plane(code, bits, shift, place, first, padded, payload, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Packs one plane of a block's codes. A plane has `WIDTH` neighboring bits of each code. If the codes have no plane
    of this width, packs nothing. Returns `shift` and `place` for the next plane."""
    if bits & WIDTH != 0:
        fields: tl.constexpr = 8 // WIDTH
        row: tl.constexpr = 64 * WIDTH  # number of bytes of a group of 512 codes
        parts = tl.reshape((code >> shift) & ((1 << WIDTH) - 1), (BLOCK // 512, fields, row))
        packed = tl.sum(parts << (tl.arange(0, fields) * WIDTH)[None, :, None], 1)
        byte = first // 8 * WIDTH + tl.arange(0, BLOCK // 8 * WIDTH)
        tl.store(pointer(payload + place, tl.uint8) + byte, tl.reshape(packed, (BLOCK // 8 * WIDTH,)).to(tl.uint8))
        shift += WIDTH
        place += padded // 8 * WIDTH
    return shift, place


@triton.jit
def eden_encode(
    table, segments, tasks, flag, factor, decay, momentum, payload, levels,
    KEEPS: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, FROM: tl.constexpr,
    PIECE: tl.constexpr, BLOCK: tl.constexpr, LOG: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Computes x, its codes and the scales of blocks. If KEEPS, subtracts the sent values from x.

    SCALED: whether elements have scales of their own.
    levels: as in `hvdcomp/compressors/quantization_rotated.py`.
    """
    segment, start, end = piece(table, segments, tasks, PIECE)
    bits = entry(table, segments, segment, COUNT).to(tl.int32)
    key = entry(table, segments, segment, KEY)
    scales = pointer(payload + entry(table, segments, segment, SCALES), tl.float32)
    levels = pointer(levels, tl.float32)
    padded = (size_of(table, segments, segment) + BLOCK - 1) // BLOCK * BLOCK
    largest = tl.zeros((BLOCK,), tl.int32)
    for block in range(start, end, BLOCK):
        i = block + tl.arange(0, BLOCK)
        inside = i < end
        x = make_x(table, segments, segment, i, inside, factor, decay, momentum, KEEPS, MOMENTUM, NESTEROV, FROM)
        largest = tl.maximum(largest, magnitude(x))
        given = x
        if SCALED:
            halvings = _halvings(tl.load(floats(table, segments, segment, SQUARES) + i, mask=inside, other=0.0))
            given = _times_power(x, halvings)
        wide = given.to(tl.float64)
        squares = tl.sum(wide * wide, 0)
        norm = tl.sqrt(squares).to(tl.float32)
        z = _rotate(_flip(given, i, key), LOG)
        absolute = magnitude(z).to(tl.float32, bitcast=True)
        code = (z < 0).to(tl.int32)
        level = absolute * 0 + tl.load(levels + bits * _ROW)
        for above in range(1, 1 << (bits - 1)):
            larger = absolute > norm * tl.load(levels + _BORDERS + bits * _ROW + above - 1)
            level = tl.where(larger, tl.load(levels + bits * _ROW + above), level)
            code += 2 * larger.to(tl.int32)
        product = tl.sum(_sums_of_eight(absolute * level, BLOCK).to(tl.float64), 0)
        inverse = tl.where(product > 0, 1 / tl.where(product > 0, product, 1.0), 0.0)
        # The last factor is 1, or NaN if the product is infinite.
        scale = (squares * inverse * (1 + 0 * product)).to(tl.float32)
        scale = tl.where(norm <= SMALLEST_SCALE, 0.0, scale)
        tl.store(scales + block // BLOCK, scale)
        shift = tl.zeros((), tl.int32)
        place = entry(table, segments, segment, CODES)
        shift, place = _pack_plane(code, bits, shift, place, block, padded, payload, 4, BLOCK)
        shift, place = _pack_plane(code, bits, shift, place, block, padded, payload, 2, BLOCK)
        shift, place = _pack_plane(code, bits, shift, place, block, padded, payload, 1, BLOCK)
        if KEEPS:
            sent = _flip(_rotate(_value(code, levels, bits, scale), LOG), i, key)
            if SCALED:
                sent = _times_power(sent, -halvings)
            kept = floats(table, segments, segment, X) + i
            if FROM == SOURCED:
                x = tl.load(kept, mask=inside, other=0.0)
            tl.store(kept, left_of(x, sent), mask=inside)
    report(flag, largest)


@triton.jit
def eden_decode(
    table, segments, tasks, flag, payloads, ranks, row: tl.int64, share, levels,
    PIECE: tl.constexpr, BLOCK: tl.constexpr, LOG: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Computes the mean of the ranks' blocks, which are added in rank order. The inverse rotation is applied only once,
    to the mean. If SCALED, multiplies the mean by the scales of elements, and computes the next running means of
    squares."""
    segment, start, end = piece(table, segments, tasks, PIECE)
    bits = entry(table, segments, segment, COUNT).to(tl.int32)
    key = entry(table, segments, segment, KEY)
    place = entry(table, segments, segment, CODES)
    scales_at = entry(table, segments, segment, SCALES)
    result = floats(table, segments, segment, RESULT)
    levels = pointer(levels, tl.float32)
    padded = (size_of(table, segments, segment) + BLOCK - 1) // BLOCK * BLOCK
    largest = tl.zeros((BLOCK,), tl.int32)
    for block in range(start, end, BLOCK):
        i = block + tl.arange(0, BLOCK)
        total = no_sum(BLOCK)
        for rank in range(0, ranks):
            payload = payload_of(payloads, rank, row)
            code = packed_code(payload, place, padded, bits, i, i >= 0)
            scale = tl.load(pointer(payload + scales_at, tl.float32) + block // BLOCK)
            total += _value(code, levels, bits, scale)
        total = _flip(_rotate(total * share, LOG), i, key)
        inside = i < end
        if SCALED:
            squares = tl.load(floats(table, segments, segment, SQUARES) + i, mask=inside, other=0.0)
            total = _times_power(total, -_halvings(squares))
            after = entry(table, segments, segment, NEXT_SQUARES)
            changes = inside & is_address(after, i)
            tl.store(pointer(after, tl.float32) + i, _next_squares(squares, total), mask=changes)
        largest = tl.maximum(largest, tl.where(inside, magnitude(total), 0))
        tl.store(result + i, total, mask=inside)
    report(flag, largest)


def _constants(on, block):
    return {"BLOCK": block, "LOG": block.bit_length() - 1, "SCALED": bool(on.segments["squares"][0])}


def _encode(on, levels, block, payload):
    on.pieces(eden_encode, payload, levels, x=True, **_constants(on, block))


def _decode(on, levels, block, first, ranks, row):
    on.pieces(eden_decode, first, ranks, row, 1 / ranks, levels, **_constants(on, block))


KERNELS = {"eden_encode": _encode, "eden_decode": _decode}
"""For each operation, by name, the function that launches its kernels."""
