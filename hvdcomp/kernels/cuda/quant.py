"""Codes that are fractions of a scale. In QSGD, a scale is the norm of `length` neighboring elements. In block
quantizers, a scale is the largest magnitude of `length` elements. TernGrad has one scale for each tensor.

In a payload, a tensor's codes of `count` bits begin at `codes` (`codes.py`), and its float scales begin at `scales`.
"""

import numpy as np

from hvdcomp.kernels.cuda.codes import (
    bytes_of,
    code_of,
    codes_of,
    decoded,
    field_of,
    packed_bytes,
    packed_code,
    scale_of,
)
from hvdcomp.kernels.cuda.language import tl, triton
from hvdcomp.kernels.cuda.x import (
    CODES,
    COUNT,
    FIRST_TASK,
    KEY,
    RESULT,
    SCALES,
    SOURCED,
    TASKS,
    X,
    entry,
    floats,
    left_of,
    made,
    magnitude,
    make_x,
    no_sum,
    payload_of,
    piece,
    pointer,
    report,
    size_of,
)

_RUNS = 8192  # number of elements that one program of `find_scales` reads
# On an H200, reading 512 elements of several scales at a time is a sixth faster than reading 128 elements of one scale.
_LEAST = 512


@triton.jit
def find_scales(
    table, segments, flag, factor, decay, momentum, tasks, payload, length,
    KEEPS: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, FROM: tl.constexpr,
    NORMS: tl.constexpr, TOGETHER: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Computes x, and a scale for each run of `length` elements: their norm if NORMS, otherwise their largest
    magnitude. A task is a tensor, a first scale and a number of scales. A program computes TOGETHER scales at a time,
    and reads WIDE elements of each scale at a time."""
    task = pointer(tasks, tl.int64) + 3 * tl.program_id(0)
    segment = tl.load(task)
    first = tl.load(task + 1).to(tl.int32)
    count = tl.load(task + 2).to(tl.int32)
    size = size_of(table, segments, segment)
    scales = pointer(payload + entry(table, segments, segment, SCALES), tl.float32)
    largest_of_all = tl.zeros((TOGETHER,), tl.int32)
    for number in range(0, count, TOGETHER):
        run = number + tl.arange(0, TOGETHER)
        begin = (first + run) * length
        long = tl.where(run < count, tl.minimum(size - begin, length), 0)  # begin + length could exceed 2**31
        squares = tl.zeros((TOGETHER,), tl.float64)
        largest = tl.zeros((TOGETHER, WIDE), tl.int32)
        for column in range(0, length, WIDE):
            across = column + tl.arange(0, WIDE)
            i = begin[:, None] + across[None, :]
            inside = across[None, :] < long[:, None]
            x = make_x(table, segments, segment, i, inside, factor, decay, momentum, KEEPS, MOMENTUM, NESTEROV, FROM)
            largest = tl.maximum(largest, magnitude(x))
            if NORMS:
                wide = x.to(tl.float64)
                squares += tl.sum(wide * wide, 1)
        largest_of_runs = tl.max(largest, 1)
        largest_of_all = tl.maximum(largest_of_all, largest_of_runs)
        scale = tl.sqrt(squares).to(tl.float32) if NORMS else largest_of_runs.to(tl.float32, bitcast=True)
        tl.store(scales + first + run, scale, mask=run < count)
    report(flag, largest_of_all)


@triton.jit
def terngrad_measure(
    table, segments, tasks, flag, factor, decay, momentum, squares, maxima,
    KEEPS: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, FROM: tl.constexpr,
    PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes x and, for each piece, the sum of squares and the bits of the largest magnitude."""
    segment, start, end = piece(table, segments, tasks, PIECE)
    largest = tl.zeros((BLOCK,), tl.int32)
    total = tl.zeros((), tl.float64)
    for block in range(start, end, BLOCK):
        i = block + tl.arange(0, BLOCK)
        inside = i < end
        x = make_x(table, segments, segment, i, inside, factor, decay, momentum, KEEPS, MOMENTUM, NESTEROV, FROM)
        largest = tl.maximum(largest, magnitude(x))
        wide = x.to(tl.float64)
        total += tl.sum(wide * wide, 0)
    tl.store(pointer(squares, tl.float64) + tl.program_id(0), total)
    tl.store(pointer(maxima, tl.int32) + tl.program_id(0), tl.max(largest, 0))
    report(flag, largest)


@triton.jit
def terngrad_scale(table, segments, payload, squares, maxima, clip, CLIPS: tl.constexpr, BLOCK: tl.constexpr):
    """Computes the scale of each tensor: its largest magnitude or the clipping bound, whichever is smaller.

    clip: the clipping bound in standard deviations, an array of one double.
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
    tl.store(pointer(payload + entry(table, segments, segment, SCALES), tl.float32), scale)


@triton.jit
def _pack_plane(
    table, segments, segment, start, end, shift, place, payload, length,
    WIDTH: tl.constexpr, BITS: tl.constexpr, MANTISSA: tl.constexpr, NEAREST: tl.constexpr, KEEPS: tl.constexpr,
    FROM: tl.constexpr, LEAVES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Packs one plane of a piece's codes. A plane has `WIDTH` neighboring bits of each code. If the codes have no plane
    of this width, packs nothing. Returns `shift` and `place` for the next plane. LEAVES: whether to subtract the values
    of the codes from x; allowed only if there is no other plane."""
    bits = entry(table, segments, segment, COUNT).to(tl.int32)
    if bits & WIDTH != 0:
        size = size_of(table, segments, segment)
        key = entry(table, segments, segment, KEY)
        scales = pointer(payload + entry(table, segments, segment, SCALES), tl.float32)
        half, unit = codes_of(bits, MANTISSA)
        kept = floats(table, segments, segment, X)
        bytes_: tl.constexpr = BLOCK * WIDTH // 8
        ended = bytes_of(end, WIDTH)
        for block in range(start // 8 * WIDTH, ended, bytes_):
            begin, count, of_group, first = packed_bytes(block, size, WIDTH, bytes_)
            packed = tl.zeros((bytes_,), tl.int32)
            for field in tl.static_range(0, 8 // WIDTH):
                i, valid = field_of(begin, count, of_group, first, end, field)
                scale = scale_of(scales, i, block // WIDTH * 8, valid, length, BITS, BLOCK)
                x = made(table, segments, segment, i, valid, KEEPS, FROM)
                code = code_of(x, i, scale, half, key, MANTISSA, NEAREST)
                packed |= tl.where(valid, (code >> shift) & ((1 << WIDTH) - 1), 0) << (field * WIDTH)
                if LEAVES:
                    if FROM == SOURCED:
                        x = tl.load(kept + i, mask=valid, other=0.0)
                    tl.store(kept + i, left_of(x, decoded(code, half, MANTISSA) * (scale * unit)), mask=valid)
            byte = block + tl.arange(0, bytes_)
            tl.store(pointer(payload, tl.uint8) + place + byte, packed.to(tl.uint8), mask=byte < ended)
        shift += WIDTH
        place += bytes_of(size, WIDTH)
    return shift, place


@triton.jit
def codes_encode(
    table, segments, tasks, flag, payload, length,
    PLANE: tl.constexpr, BITS: tl.constexpr, MANTISSA: tl.constexpr, NEAREST: tl.constexpr, KEEPS: tl.constexpr,
    FROM: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Packs the codes of x, and subtracts the values of the codes from x. Earlier kernels have computed x and the
    scales. PLANE: the width of the plane if all codes have a single plane; 0 if some codes have several planes."""
    segment, start, end = piece(table, segments, tasks, PIECE)
    shift = tl.zeros((), tl.int32)
    place = entry(table, segments, segment, CODES)
    if PLANE > 0:
        _pack_plane(
            table, segments, segment, start, end, shift, place, payload, length,
            PLANE, BITS, MANTISSA, NEAREST, KEEPS, FROM, KEEPS, BLOCK,
        )  # fmt: skip
    else:
        shift, place = _pack_plane(
            table, segments, segment, start, end, shift, place, payload, length,
            8, BITS, MANTISSA, NEAREST, KEEPS, FROM, False, BLOCK,
        )  # fmt: skip
        shift, place = _pack_plane(
            table, segments, segment, start, end, shift, place, payload, length,
            4, BITS, MANTISSA, NEAREST, KEEPS, FROM, False, BLOCK,
        )  # fmt: skip
        shift, place = _pack_plane(
            table, segments, segment, start, end, shift, place, payload, length,
            2, BITS, MANTISSA, NEAREST, KEEPS, FROM, False, BLOCK,
        )  # fmt: skip
        shift, place = _pack_plane(
            table, segments, segment, start, end, shift, place, payload, length,
            1, BITS, MANTISSA, NEAREST, KEEPS, FROM, False, BLOCK,
        )  # fmt: skip
    if KEEPS and PLANE == 0:
        tl.debug_barrier()  # other threads of this program may still be reading x
        key = entry(table, segments, segment, KEY)
        scales = pointer(payload + entry(table, segments, segment, SCALES), tl.float32)
        half, unit = codes_of(entry(table, segments, segment, COUNT), MANTISSA)
        for block in range(start, end, BLOCK):
            i = block + tl.arange(0, BLOCK)
            inside = i < end
            scale = scale_of(scales, i, block, inside, length, BITS, BLOCK)
            x = made(table, segments, segment, i, inside, KEEPS, FROM)
            code = code_of(x, i, scale, half, key, MANTISSA, NEAREST)
            kept = floats(table, segments, segment, X) + i
            sent = decoded(code, half, MANTISSA) * (scale * unit)
            tl.store(kept, left_of(tl.load(kept, mask=inside, other=0.0), sent), mask=inside)


@triton.jit
def codes_decode(
    table, segments, tasks, flag, payloads, ranks, row: tl.int64, share, length,
    BITS: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Decodes the codes of all ranks, and computes the mean of their values. The values are added in rank order. Codes
    may have any number of bits."""
    segment, start, end = piece(table, segments, tasks, PIECE)
    size = size_of(table, segments, segment)
    bits = entry(table, segments, segment, COUNT).to(tl.int32)
    place = entry(table, segments, segment, CODES)
    scales_at = entry(table, segments, segment, SCALES)
    result = floats(table, segments, segment, RESULT)
    half, unit = codes_of(bits, 0)
    largest = tl.zeros((BLOCK,), tl.int32)
    for block in range(start, end, BLOCK):
        i = block + tl.arange(0, BLOCK)
        inside = i < end
        total = no_sum(BLOCK)
        for rank in range(0, ranks):
            payload = payload_of(payloads, rank, row)
            code = packed_code(payload, place, size, bits, i, inside)
            scale = scale_of(pointer(payload + scales_at, tl.float32), i, block, inside, length, BITS, BLOCK)
            total += decoded(code, half, 0) * (scale * unit)
        total *= share
        largest = tl.maximum(largest, magnitude(total))
        tl.store(result + i, total, mask=inside)
    report(flag, largest)


@triton.jit
def plane_decode(
    table, segments, tasks, flag, payloads, ranks, row: tl.int64, share, length,
    PLANE: tl.constexpr, BITS: tl.constexpr, MANTISSA: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Decodes codes as `codes_decode` does, but only codes with a single plane of width PLANE. This kernel works byte
    by byte, which needs fewer operations."""
    segment, start, end = piece(table, segments, tasks, PIECE)
    size = size_of(table, segments, segment)
    place = entry(table, segments, segment, CODES)
    scales_at = entry(table, segments, segment, SCALES)
    result = floats(table, segments, segment, RESULT)
    half, unit = codes_of(entry(table, segments, segment, COUNT).to(tl.int32), MANTISSA)
    bytes_: tl.constexpr = BLOCK * PLANE // 8
    largest = tl.zeros((bytes_,), tl.int32)
    for block in range(start // 8 * PLANE, bytes_of(end, PLANE), bytes_):
        begin, count, of_group, first = packed_bytes(block, size, PLANE, bytes_)
        byte = block + tl.arange(0, bytes_)
        for field in tl.static_range(0, 8 // PLANE):
            i, valid = field_of(begin, count, of_group, first, end, field)
            total = no_sum(bytes_)
            for rank in range(0, ranks):
                payload = payload_of(payloads, rank, row)
                packed = tl.load(pointer(payload + place, tl.uint8) + byte, mask=valid, other=0).to(tl.int32)
                code = (packed >> (field * PLANE)) & ((1 << PLANE) - 1)
                scales = pointer(payload + scales_at, tl.float32)
                scale = scale_of(scales, i, block // PLANE * 8, valid, length, BITS, BLOCK)
                total += decoded(code, half, MANTISSA) * (scale * unit)
            total *= share
            largest = tl.maximum(largest, magnitude(total))
            tl.store(result + i, total, mask=valid)
    report(flag, largest)


def _plane(on, mantissa):
    """The width of the plane if the codes of all tensors have a single plane; 0 if some codes have several planes."""
    if mantissa:
        return 8
    bits = np.unique(on.segments["count"])
    return int(bits[0]) if bits.size == 1 and bits[0] in (1, 2, 4, 8) else 0


def _bits(on, length):
    """The number of bits by which to shift an element's number to get the number of its scale; -1 if this needs a
    division."""
    if length >= int(on.segments["size"].max()):
        return 31
    return length.bit_length() - 1 if length & (length - 1) == 0 else -1


def _block(most, plane, bits):
    """The number of elements that a program works on at a time. This is the number of elements of one scale, but at
    most `most`. If the elements of one scale are too few to keep the program's threads busy, it is `most`."""
    enough = plane and bits >= 0 and 1 << bits >= max(_LEAST, 1024 // plane)
    return min(most, 1 << bits) if enough else most


def _encode_codes(on, payload, length, mantissa=0, nearest=False):
    plane, bits = _plane(on, mantissa), _bits(on, length)
    constants = {"PLANE": plane, "BITS": bits, "MANTISSA": mantissa, "NEAREST": nearest}
    block = _block(on.block, plane, bits)
    on.pieces(codes_encode, payload, length, BLOCK=block, **on.constants_of_made(), **constants)


def _encode_runs(on, length, payload, norms, mantissa=0, nearest=False):
    length = find_runs(on, length, payload, norms)
    _encode_codes(on, payload, length, mantissa, nearest)


def find_runs(on, length, payload, norms):
    """Launches `find_scales` for runs of `length` elements. Returns `length` or the size of the largest tensor,
    whichever is smaller."""
    length = min(length, int(on.segments["size"].max()))
    at_once = _RUNS if on.interpreting else 1024
    wide = min(triton.next_power_of_2(length), at_once)

    def tasks():
        runs_per_task = max(1, _RUNS // length)
        task_table = [
            (number, first, min(runs_per_task, runs - first))
            for number, runs in enumerate((-(-on.segments["size"] // length)).tolist())
            for first in range(0, runs, runs_per_task)
        ]
        return np.array(task_table, np.int64)

    task_table = on.static(f"runs of {length}", tasks)
    constants = on.constants_of_x() | {"NORMS": norms, "TOGETHER": at_once // wide, "WIDE": wide}
    on.launch(
        find_scales, task_table.shape[0], on.rows, len(on.segments), on.flag, *on.arguments_of_x(), task_table, payload,
        length, **constants,
    )  # fmt: skip
    return length


def _encode_terngrad(on, clip, payload):
    squares, maxima = on.scratch("squares", on.tasks, "float64"), on.scratch("maxima", on.tasks, "int32")
    on.pieces(terngrad_measure, squares, maxima, x=True)
    clips = 0 < clip < float("inf")
    number = on.static(f"clip at {clip}", lambda: np.array([clip]))
    on.tensors(terngrad_scale, payload, squares, maxima, number, CLIPS=clips, BLOCK=1024)
    _encode_codes(on, payload, int(on.segments["size"].max()))


def _decode_codes(on, length, mantissa, first, ranks, row):
    plane, bits = _plane(on, mantissa), _bits(on, length)
    arguments = first, ranks, row, 1 / ranks, length
    if plane:  # with fewer bytes at a time, more programs fit into the registers
        block = _block(on.block // 2 if plane == 8 else on.block, plane, bits)
        on.pieces(plane_decode, *arguments, PLANE=plane, BITS=bits, MANTISSA=mantissa, BLOCK=block)
    else:
        on.pieces(codes_decode, *arguments, BITS=bits, BLOCK=on.block // 2)


KERNELS = {
    "qsgd_encode": lambda on, length, payload: _encode_runs(on, length, payload, True),
    "blocks_encode": lambda on, length, mantissa, nearest, payload: _encode_runs(
        on, length, payload, False, mantissa, nearest
    ),
    "terngrad_encode": _encode_terngrad,
    "multiples_decode": lambda on, length, first, ranks, row: _decode_codes(on, length, 0, first, ranks, row),
    "float8_decode": _decode_codes,
}
"""For each operation, by name, the function that launches its kernels."""
