"""Codes of the quantizers on CUDA devices: the value of each code, and how codes are packed.

`hvdcomp/compressors/packing.py` describes the packing. 8-bit floats are computed from the bits of float32 numbers, as
in `src/float8.h`, because devices below compute capability 8.9 have no 8-bit floats.
"""

from hvdcomp.kernels import limits
from hvdcomp.kernels.cuda.language import tl, triton
from hvdcomp.kernels.cuda.x import INFINITE, magnitude, pointer, word

SMALLEST_SCALE = tl.constexpr(limits.SMALLEST_SCALE)
GROUP = tl.constexpr(512)  # number of codes that are packed together


@triton.constexpr_function
def _largest_float8(mantissa):
    return 448.0 if mantissa == 3 else 57344.0


@triton.constexpr_function
def _least_float8(mantissa):
    """The float32 bits of the smallest normal number in an 8-bit float format."""
    return (127 - 6 if mantissa == 3 else 127 - 14) << 23


@triton.constexpr_function
def _small_unit(mantissa):
    """The distance between two neighboring subnormal numbers in an 8-bit float format."""
    return 2.0 ** (-6 - 3 if mantissa == 3 else -14 - 2)


@triton.jit
def reciprocal_of(scale):
    """The reciprocal of a scale, or 0 for a scale that counts as zero."""
    unit = scale * 0 + 1.0
    return tl.where(scale > SMALLEST_SCALE, tl.div_rn(unit, tl.where(scale > 0, scale, 1.0)), 0.0)


@triton.jit
def scale_of(scales, i, first, inside, length, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """The scales of elements i in a block of BLOCK elements. The block begins at `first`, a multiple of BLOCK. A scale
    is shared by 2**BITS elements if BITS >= 0, otherwise by `length` elements. The result is a single number if the
    whole block shares one scale."""
    if BITS >= 0 and 1 << BITS >= BLOCK:
        return tl.load(scales + (first >> BITS))
    else:  # noqa: RET505 - Triton compiles one branch of the two
        number = i >> BITS if BITS >= 0 else i // length
        return tl.load(scales + number, mask=inside, other=0.0)


@triton.jit
def codes_of(bits, MANTISSA: tl.constexpr):
    """Two numbers: half the number of steps from the lowest to the highest code, and the unit of the codes as a
    fraction of their scale.

    MANTISSA: the number of mantissa bits if codes are floats; 0 if codes are integers. If codes are floats, the first
    number is not used.
    """
    if MANTISSA > 0:
        return 0.0, 1 / _largest_float8(MANTISSA)
    else:  # noqa: RET505 - Triton compiles one branch of the two
        steps = tl.where(bits > 1, (1 << bits) - 2, 1).to(tl.float32)
        return steps * 0.5, tl.div_rn(steps * 0 + 2.0, steps)


@triton.jit
def _to_float8(value, noise, MANTISSA: tl.constexpr, NEAREST: tl.constexpr):
    """The 8-bit float codes of numbers. NaN, and numbers beyond the largest 8-bit float, get the code of the largest
    8-bit float. noise: 23 random bits."""
    largest: tl.constexpr = _largest_float8(MANTISSA)
    least: tl.constexpr = _least_float8(MANTISSA)
    absolute = magnitude(value).to(tl.float32, bitcast=True)
    absolute = tl.where(absolute < largest, absolute, largest)
    power = tl.maximum(magnitude(absolute) & INFINITE, least)
    # If NEAREST, one unit in the last place of the sum is the distance between two codes, and a number halfway between
    # two codes gets the even code. Otherwise, the noise is added to 2**23 times the number of distances, and the lowest
    # 23 bits are dropped.
    if NEAREST:
        of_sum = power + ((23 - MANTISSA) << 23)
        code = (absolute + of_sum.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True) - of_sum
    else:
        factor = ((254 << 23) - (power - ((23 + MANTISSA) << 23))).to(tl.float32, bitcast=True)
        code = ((absolute * factor).to(tl.int32) + noise) >> 23
    code += (power - least) >> (23 - MANTISSA)
    return code | ((value.to(tl.int32, bitcast=True) >> 24) & 0x80)


@triton.jit
def _from_float8(code, MANTISSA: tl.constexpr):
    least: tl.constexpr = _least_float8(MANTISSA)
    absolute = code & 0x7F
    small = absolute.to(tl.float32) * _small_unit(MANTISSA)
    whole = ((absolute << (23 - MANTISSA)) + (least - (1 << 23))).to(tl.float32, bitcast=True)
    value = tl.where(absolute < (1 << MANTISSA), small, whole)
    return (value.to(tl.int32, bitcast=True) | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def code_of(x, i, scale, half, key, MANTISSA: tl.constexpr, NEAREST: tl.constexpr):
    """The codes of elements: the nearest code if NEAREST, otherwise one of the two neighboring codes at random.

    NaN gets the code of the lowest integer, or of the largest float.
    """
    noise = i * 0 if NEAREST else (word(i, key) >> 9).to(tl.int32)
    if MANTISSA > 0:
        code = _to_float8(x * (reciprocal_of(scale) * _largest_float8(MANTISSA)), noise, MANTISSA, NEAREST)
    else:
        highest = half if NEAREST else half * 8388608.0
        value = x * (reciprocal_of(scale) * highest)
        value = tl.where(value > -highest, value, -highest)
        value = tl.where(value < highest, value, highest)
        if NEAREST:  # the lowest bits of this sum contain the nearest integer
            code = ((value + 12582912.0).to(tl.int32, bitcast=True) + highest.to(tl.int32)) & 0xFF
        else:
            code = (value.to(tl.int32) + highest.to(tl.int32) + noise) >> 23
    return code


@triton.jit
def decoded(code, half, MANTISSA: tl.constexpr):
    """The values of codes, as multiples of the unit."""
    if MANTISSA > 0:
        return _from_float8(code, MANTISSA)
    else:  # noqa: RET505 - Triton compiles one branch of the two
        return code.to(tl.float32) - half


@triton.jit
def bytes_of(count, WIDTH: tl.constexpr):
    """The number of bytes of packed codes. It is computed without a product that could overflow."""
    return count if WIDTH == 8 else count // 8 * WIDTH + (count % 8 * WIDTH + 7) // 8


@triton.jit
def group_of(i, size):
    """The start and the number of codes of the groups that contain the codes with indices i of a tensor."""
    begin = i // GROUP * GROUP
    return begin, tl.minimum(size - begin, GROUP)


@triton.jit
def _code_in_plane(code, shift, payload, place, size, bits, i, inside, WIDTH: tl.constexpr):
    """Reads one plane, and adds its bits to the codes with indices i. A plane has `WIDTH` neighboring bits of each
    code. If the codes have no plane of this width, adds nothing. Returns the codes, and the shift and the start of the
    next plane."""
    if bits & WIDTH != 0:
        begin, length = group_of(i, size)
        bytes_ = bytes_of(length, WIDTH)
        field = i * 0
        for number in tl.static_range(1, 8 // WIDTH):  # a few comparisons instead of a division
            field += (i - begin >= number * bytes_).to(tl.int32)
        at = place + begin // 8 * WIDTH + (i - begin) - field * bytes_
        packed = tl.load(pointer(payload, tl.uint8) + at, mask=inside, other=0).to(tl.int32)
        code |= ((packed >> (field * WIDTH)) & ((1 << WIDTH) - 1)) << shift
        shift += WIDTH
        place += bytes_of(size, WIDTH)
    return code, shift, place


@triton.jit
def packed_code(payload, place, size, bits, i, inside):
    """Reads the codes with indices i from the packed codes of a tensor, as int32."""
    code = i * 0
    shift = tl.zeros((), tl.int32)
    code, shift, place = _code_in_plane(code, shift, payload, place, size, bits, i, inside, 8)
    code, shift, place = _code_in_plane(code, shift, payload, place, size, bits, i, inside, 4)
    code, shift, place = _code_in_plane(code, shift, payload, place, size, bits, i, inside, 2)
    code, shift, place = _code_in_plane(code, shift, payload, place, size, bits, i, inside, 1)
    return code


@triton.jit
def packed_bytes(block, size, WIDTH: tl.constexpr, BYTES: tl.constexpr):
    """Returns four numbers for each of BYTES packed bytes, beginning with byte `block`: the start of the byte's group
    in the tensor, the group's number of codes, the group's number of bytes, and the byte's number in the group."""
    byte = block + tl.arange(0, BYTES)
    begin = byte // (64 * WIDTH) * GROUP
    length = tl.minimum(size - begin, GROUP)
    return begin, length, bytes_of(length, WIDTH), byte - begin // 8 * WIDTH


@triton.jit
def field_of(begin, length, bytes_, first, end, FIELD: tl.constexpr):
    """For each byte of `packed_bytes`, the index of the code in one field of the byte, and whether there is such a code
    below `end`."""
    place = first + FIELD * bytes_
    return begin + place, (first < bytes_) & (place < length) & (begin + place < end)
