"""Elements as multiples of a fraction of a scale: QSGD, whose scales are norms of `length` neighbouring elements each,
and TernGrad, with one scale for a tensor.

Of each tensor, codes of `count` bits lie at place 0 of a payload, packed as `hvdcomp/compressors/packing.py` says, and
float scales at place 1.
"""

import numpy as np

from hvdcomp.kernels.cuda.language import tl, triton
from hvdcomp.kernels.cuda.x import (
    COUNT,
    FIRST_TASK,
    KEY,
    PLACE0,
    PLACE1,
    RESULT,
    TASKS,
    X,
    entry,
    floats,
    left_of,
    made,
    magnitude,
    make_x,
    no_sum,
    piece,
    pointer,
    report,
    size_of,
    word,
)

GROUP = tl.constexpr(512)  # codes that are packed together

_NORMS = 8192  # elements of a program that finds norms


@triton.jit
def reciprocal_of(scale):
    """Of a scale, or 0 where it counts as zero: 2**-96 and below."""
    one = scale * 0 + 1.0
    return tl.where(scale > 1.262177448353618888658e-29, tl.div_rn(one, tl.where(scale > 0, scale, 1.0)), 0.0)


@triton.jit
def bytes_of(count, WIDTH: tl.constexpr):
    """Of packed codes, without a product that may overflow."""
    return count // 8 * WIDTH + (count % 8 * WIDTH + 7) // 8


@triton.jit
def half_steps(bits):
    """Half the steps from the lowest code to the highest, and 1 / that."""
    steps = tl.where(bits > 1, (1 << bits) - 2, 1).to(tl.float32)
    return steps * 0.5, tl.div_rn(steps * 0 + 2.0, steps)


@triton.jit
def _scale_of(scales, i, inside, length, BITS: tl.constexpr):
    """The scales of elements i, `length` or 2**BITS of which share one."""
    number = i >> BITS if BITS >= 0 else i // length
    return tl.load(scales + number, mask=inside, other=0.0)


@triton.jit
def _code(x, i, scale, half, key):
    """Elements rounded at random. NaN is taken as the lowest code."""
    highest = half * 8388608.0
    value = x * (reciprocal_of(scale) * highest)
    value = tl.where(value > -highest, value, -highest)
    value = tl.where(value < highest, value, highest)
    noise = (word(i, key) >> 9).to(tl.int32)
    return (value.to(tl.int32) + highest.to(tl.int32) + noise) >> 23


@triton.jit
def group_of(i, size):
    """Of codes i of a tensor: where their group begins, and how many codes it has."""
    begin = i // GROUP * GROUP
    return begin, tl.minimum(size - begin, GROUP)


@triton.jit
def _code_in_plane(code, shift, payload, place, size, bits, i, inside, WIDTH: tl.constexpr):
    """Codes i with what a plane holds of them, if there is a plane of this width, and where the next one begins."""
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
    """Codes i of a tensor's packed ones, int32."""
    code = i * 0
    shift = tl.zeros((), tl.int32)
    code, shift, place = _code_in_plane(code, shift, payload, place, size, bits, i, inside, 8)
    code, shift, place = _code_in_plane(code, shift, payload, place, size, bits, i, inside, 4)
    code, shift, place = _code_in_plane(code, shift, payload, place, size, bits, i, inside, 2)
    code, shift, place = _code_in_plane(code, shift, payload, place, size, bits, i, inside, 1)
    return code


@triton.jit
def tile_of(block, size, FIELDS: tl.constexpr, BYTES: tl.constexpr):
    """The codes of packed bytes: of byte numbers from `block` on, the codes (fields, bytes) in them, whether there are
    such, and how far each is shifted."""
    width: tl.constexpr = 8 // FIELDS
    byte = block + tl.arange(0, BYTES)
    begin = byte // (64 * width) * GROUP
    length = tl.minimum(size - begin, GROUP)
    bytes_ = bytes_of(length, width)
    first = byte - begin // 8 * width
    field = tl.arange(0, FIELDS)
    place = first[None, :] + field[:, None] * bytes_[None, :]
    there = (first < bytes_)[None, :] & (place < length[None, :])
    return begin[None, :] + place, there, field[:, None] * width


@triton.jit
def qsgd_norms(
    table, segments, flag, factor, decay, momentum, tasks, payload, length,
    KEEPS: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, SOURCED: tl.constexpr,
    NORMS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """x, and the norms of `length` elements each. A task is a tensor, a first norm and a number of norms; NORMS of them
    are found at a time, WIDE elements at a time."""
    task = pointer(tasks, tl.int64) + 3 * tl.program_id(0)
    segment = tl.load(task)
    first = tl.load(task + 1).to(tl.int32)
    count = tl.load(task + 2).to(tl.int32)
    size = size_of(table, segments, segment)
    scales = pointer(payload + entry(table, segments, segment, PLACE1), tl.float32)
    largest = tl.zeros((NORMS, WIDE), tl.int32)
    for number in range(0, count, NORMS):
        norm = number + tl.arange(0, NORMS)
        begin = (first + norm) * length
        squares = tl.zeros((NORMS,), tl.float64)
        for column in range(0, length, WIDE):
            across = column + tl.arange(0, WIDE)
            i = begin[:, None] + across[None, :]
            inside = (norm < count)[:, None] & (across < length)[None, :] & (i < size)
            x = make_x(table, segments, segment, i, inside, factor, decay, momentum, KEEPS, MOMENTUM, NESTEROV, SOURCED)
            largest = tl.maximum(largest, magnitude(x))
            wide = x.to(tl.float64)
            squares += tl.sum(wide * wide, 1)
        tl.store(scales + first + norm, tl.sqrt(squares).to(tl.float32), mask=norm < count)
    report(flag, tl.max(largest, 1))


@triton.jit
def terngrad_measure(
    table, segments, tasks, flag, factor, decay, momentum, squares, maxima,
    KEEPS: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, SOURCED: tl.constexpr,
    PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x; of each piece, the sum of its squares and the bits of its largest magnitude."""
    segment, start, end = piece(table, segments, tasks, PIECE)
    largest = tl.zeros((BLOCK,), tl.int32)
    total = tl.zeros((), tl.float64)
    for block in range(start, end, BLOCK):
        i = block + tl.arange(0, BLOCK)
        inside = i < end
        x = make_x(table, segments, segment, i, inside, factor, decay, momentum, KEEPS, MOMENTUM, NESTEROV, SOURCED)
        largest = tl.maximum(largest, magnitude(x))
        wide = x.to(tl.float64)
        total += tl.sum(wide * wide, 0)
    tl.store(pointer(squares, tl.float64) + tl.program_id(0), total)
    tl.store(pointer(maxima, tl.int32) + tl.program_id(0), tl.max(largest, 0))
    report(flag, largest)


@triton.jit
def terngrad_scale(table, segments, payload, squares, maxima, clip, CLIPS: tl.constexpr, BLOCK: tl.constexpr):
    """The scale of each tensor: its largest magnitude, or less.

    clip: in standard deviations, an array of one double.
    """
    segment = tl.program_id(0)
    first = entry(table, segments, segment, FIRST_TASK)
    tasks = entry(table, segments, segment, TASKS)
    total = tl.zeros((), tl.float64)
    largest = tl.zeros((BLOCK,), tl.int32)
    for block in range(0, tasks, BLOCK):
        i = block + tl.arange(0, BLOCK)
        inside = i < tasks
        total += tl.sum(tl.load(pointer(squares, tl.float64) + first + i, mask=inside, other=0.0), 0)
        largest = tl.maximum(largest, tl.load(pointer(maxima, tl.int32) + first + i, mask=inside, other=0))
    scale = tl.max(largest, 0).to(tl.float32, bitcast=True)
    if CLIPS:
        size = size_of(table, segments, segment).to(tl.float64)
        bound = tl.sqrt(total).to(tl.float32) * (tl.load(pointer(clip, tl.float64)) / tl.sqrt(size)).to(tl.float32)
        scale = tl.where(bound < scale, bound, scale)
    tl.store(pointer(payload + entry(table, segments, segment, PLACE1), tl.float32), scale)


@triton.jit
def _pack_plane(
    table, segments, segment, start, end, shift, place, payload, length,
    WIDTH: tl.constexpr, BITS: tl.constexpr, KEEPS: tl.constexpr, SOURCED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Packs a plane of a piece's codes, if their bits have one of this width; returns where the next plane begins."""
    bits = entry(table, segments, segment, COUNT).to(tl.int32)
    if bits & WIDTH != 0:
        size = size_of(table, segments, segment)
        key = entry(table, segments, segment, KEY)
        scales = pointer(payload + entry(table, segments, segment, PLACE1), tl.float32)
        half, _ = half_steps(bits)
        bytes_: tl.constexpr = BLOCK * WIDTH // 8
        ended = bytes_of(end, WIDTH)
        for block in range(start // 8 * WIDTH, ended, bytes_):
            i, there, at = tile_of(block, size, 8 // WIDTH, bytes_)
            there &= i < end
            scale = _scale_of(scales, i, there, length, BITS)
            code = _code(made(table, segments, segment, i, there, KEEPS, SOURCED), i, scale, half, key)
            code = tl.where(there, (code >> shift) & ((1 << WIDTH) - 1), 0)
            byte = block + tl.arange(0, bytes_)
            packed = tl.sum(code << at, 0).to(tl.uint8)
            tl.store(pointer(payload, tl.uint8) + place + byte, packed, mask=byte < ended)
        shift += WIDTH
        place += bytes_of(size, WIDTH)
    return shift, place


@triton.jit
def codes_encode(
    table, segments, tasks, flag, payload, length,
    BITS: tl.constexpr, KEEPS: tl.constexpr, SOURCED: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Packs codes of x, which is made, by scales, which are known; and takes what they stand for off x."""
    segment, start, end = piece(table, segments, tasks, PIECE)
    shift = tl.zeros((), tl.int32)
    place = entry(table, segments, segment, PLACE0)
    shift, place = _pack_plane(
        table, segments, segment, start, end, shift, place, payload, length, 8, BITS, KEEPS, SOURCED, BLOCK
    )
    shift, place = _pack_plane(
        table, segments, segment, start, end, shift, place, payload, length, 4, BITS, KEEPS, SOURCED, BLOCK
    )
    shift, place = _pack_plane(
        table, segments, segment, start, end, shift, place, payload, length, 2, BITS, KEEPS, SOURCED, BLOCK
    )
    shift, place = _pack_plane(
        table, segments, segment, start, end, shift, place, payload, length, 1, BITS, KEEPS, SOURCED, BLOCK
    )
    if KEEPS:
        tl.debug_barrier()  # others of this program may still read x
        key = entry(table, segments, segment, KEY)
        scales = pointer(payload + entry(table, segments, segment, PLACE1), tl.float32)
        half, unit = half_steps(entry(table, segments, segment, COUNT))
        for block in range(start, end, BLOCK):
            i = block + tl.arange(0, BLOCK)
            inside = i < end
            scale = _scale_of(scales, i, inside, length, BITS)
            code = _code(made(table, segments, segment, i, inside, KEEPS, SOURCED), i, scale, half, key)
            kept = floats(table, segments, segment, X) + i
            sent = (code.to(tl.float32) - half) * (scale * unit)
            tl.store(kept, left_of(tl.load(kept, mask=inside, other=0.0), sent), mask=inside)


@triton.jit
def multiples_decode(
    table, segments, tasks, flag, payloads, ranks, row, share, length,
    BITS: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The mean of what the ranks' codes stand for, in rank order."""
    segment, start, end = piece(table, segments, tasks, PIECE)
    size = size_of(table, segments, segment)
    bits = entry(table, segments, segment, COUNT).to(tl.int32)
    place = entry(table, segments, segment, PLACE0)
    scales_at = entry(table, segments, segment, PLACE1)
    half, unit = half_steps(bits)
    largest = tl.zeros((BLOCK,), tl.int32)
    for block in range(start, end, BLOCK):
        i = block + tl.arange(0, BLOCK)
        inside = i < end
        total = no_sum(BLOCK)
        for rank in range(0, ranks):
            payload = payloads + rank * row
            code = packed_code(payload, place, size, bits, i, inside)
            scale = _scale_of(pointer(payload + scales_at, tl.float32), i, inside, length, BITS)
            total += (code.to(tl.float32) - half) * (scale * unit)
        total *= share
        largest = tl.maximum(largest, magnitude(total))
        tl.store(floats(table, segments, segment, RESULT) + i, total, mask=inside)
    report(flag, largest)


def _bits(on, length):
    """Where a shift says which scale is an element's: its bits; else -1."""
    if length >= int(on.segments["size"].max()):
        return 31
    return length.bit_length() - 1 if length & (length - 1) == 0 else -1


def _encode_codes(on, payload, length):
    on.pieces(codes_encode, payload, length, BITS=_bits(on, length), KEEPS=on.keeps, SOURCED=on.sourced)


def _encode_qsgd(on, length, payload):
    wide = min(triton.next_power_of_2(length), _NORMS if on.interpreting else 1024)
    together = max(1, (_NORMS if on.interpreting else 1024) // wide)

    def tasks():
        each = max(1, _NORMS // length)
        found = [
            (number, first, min(each, norms - first))
            for number, norms in enumerate((-(-on.segments["size"] // length)).tolist())
            for first in range(0, norms, each)
        ]
        return np.array(found, np.int64)

    found = on.static(f"norms of {length}", tasks)
    constants = on.constants_of_x() | {"NORMS": together, "WIDE": wide}
    on.launch(
        qsgd_norms, found.shape[0], on.rows, len(on.segments), on.flag, *on.arguments_of_x(), found, payload, length,
        **constants,
    )  # fmt: skip
    _encode_codes(on, payload, length)


def _encode_terngrad(on, clip, payload):
    squares, maxima = on.scratch("squares", on.tasks, "float64"), on.scratch("maxima", on.tasks, "int32")
    on.pieces(terngrad_measure, squares, maxima, x=True)
    clips = 0 < clip < float("inf")
    number = on.static(f"clip at {clip}", lambda: np.array([clip]))
    on.tensors(terngrad_scale, payload, squares, maxima, number, CLIPS=clips, BLOCK=1024)
    _encode_codes(on, payload, int(on.segments["size"].max()))


KERNELS = {
    "qsgd_encode": _encode_qsgd,
    "terngrad_encode": _encode_terngrad,
    "multiples_decode": lambda on, length, first, ranks, row: on.pieces(
        multiples_decode, first, ranks, row, 1 / ranks, length, BITS=_bits(on, length), BLOCK=on.block // 2
    ),
}
"""How each is launched, by its name."""
