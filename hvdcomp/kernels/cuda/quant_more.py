"""Natural compression, which rounds elements to powers of two, and Global-QSGD, in which all ranks share a scale."""

from hvdcomp.kernels.cuda.codes import bytes_of, field_of, packed_bytes, reciprocal_of
from hvdcomp.kernels.cuda.language import tl, triton
from hvdcomp.kernels.cuda.x import (
    CODES,
    COUNT,
    EXPONENTS,
    FIRST_TASK,
    INFINITE,
    KEY,
    RESULT,
    SIGNS,
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
    word,
)


@triton.jit
def _power(exponent, negative):
    """The signed power of two that the byte of an exponent stands for."""
    return ((exponent << 23) | (negative << 31)).to(tl.float32, bitcast=True)


@triton.jit
def natural_encode(
    table, segments, tasks, flag, factor, decay, momentum, payload,
    KEEPS: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, FROM: tl.constexpr,
    PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes x. Packs the signs of x at `signs`, and the exponents of x, one byte each, at `exponents`. Exponents are
    rounded at random: random bits are added to the bits below the exponent, and a carry increases the exponent by 1."""
    segment, start, end = piece(table, segments, tasks, PIECE)
    size = size_of(table, segments, segment)
    key = entry(table, segments, segment, KEY)
    exponents = pointer(payload + entry(table, segments, segment, EXPONENTS), tl.uint8)
    signs = pointer(payload + entry(table, segments, segment, SIGNS), tl.uint8)
    bytes_: tl.constexpr = BLOCK // 8
    largest = tl.zeros((bytes_,), tl.int32)
    for block in range(start // 8, bytes_of(end, 1), bytes_):
        begin, count, of_group, first = packed_bytes(block, size, 1, bytes_)
        packed = tl.zeros((bytes_,), tl.int32)
        for field in tl.static_range(0, 8):
            i, valid = field_of(begin, count, of_group, first, end, field)
            x = make_x(table, segments, segment, i, valid, factor, decay, momentum, KEEPS, MOMENTUM, NESTEROV, FROM)
            largest = tl.maximum(largest, magnitude(x))
            negative = (x < 0).to(tl.int32)
            exponent = tl.minimum((magnitude(x).to(tl.uint32) + (word(i, key) >> 9)) >> 23, 254).to(tl.int32)
            exponent |= (magnitude(x) >= INFINITE).to(tl.int32)  # 255
            tl.store(exponents + i, exponent.to(tl.uint8), mask=valid)
            packed |= tl.where(valid, negative, 0) << field
            if KEEPS:
                kept = floats(table, segments, segment, X) + i
                if FROM == SOURCED:
                    x = tl.load(kept, mask=valid, other=0.0)
                tl.store(kept, left_of(x, _power(exponent, negative)), mask=valid)
        byte = block + tl.arange(0, bytes_)
        tl.store(signs + byte, packed.to(tl.uint8), mask=byte < bytes_of(end, 1))
    report(flag, largest)


@triton.jit
def natural_decode(
    table, segments, tasks, flag, payloads, ranks, row: tl.int64, share, PIECE: tl.constexpr, BLOCK: tl.constexpr
):
    """Computes the mean of the ranks' powers of two, which are added in rank order."""
    segment, start, end = piece(table, segments, tasks, PIECE)
    size = size_of(table, segments, segment)
    place = entry(table, segments, segment, EXPONENTS)
    signs_at = entry(table, segments, segment, SIGNS)
    result = floats(table, segments, segment, RESULT)
    bytes_: tl.constexpr = BLOCK // 8
    largest = tl.zeros((bytes_,), tl.int32)
    for block in range(start // 8, bytes_of(end, 1), bytes_):
        begin, count, of_group, first = packed_bytes(block, size, 1, bytes_)
        byte = block + tl.arange(0, bytes_)
        for field in tl.static_range(0, 8):
            i, valid = field_of(begin, count, of_group, first, end, field)
            total = no_sum(bytes_)
            for rank in range(0, ranks):
                payload = payload_of(payloads, rank, row)
                exponent = tl.load(pointer(payload + place, tl.uint8) + i, mask=valid, other=0).to(tl.int32)
                packed = tl.load(pointer(payload + signs_at, tl.uint8) + byte, mask=valid, other=0).to(tl.int32)
                total += _power(exponent, (packed >> field) & 1)
            total *= share
            largest = tl.maximum(largest, magnitude(total))
            tl.store(result + i, total, mask=valid)
    report(flag, largest)


@triton.jit
def global_measure(
    table, segments, tasks, flag, factor, decay, momentum, maxima,
    KEEPS: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, FROM: tl.constexpr,
    PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes x, and the bits of the largest magnitude of each piece."""
    segment, start, end = piece(table, segments, tasks, PIECE)
    largest = tl.zeros((BLOCK,), tl.int32)
    for block in range(start, end, BLOCK):
        i = block + tl.arange(0, BLOCK)
        inside = i < end
        x = make_x(table, segments, segment, i, inside, factor, decay, momentum, KEEPS, MOMENTUM, NESTEROV, FROM)
        largest = tl.maximum(largest, magnitude(x))
    tl.store(pointer(maxima, tl.int32) + tl.program_id(0), tl.max(largest, 0))
    report(flag, largest)


@triton.jit
def global_maxima(table, segments, maxima, scales, BLOCK: tl.constexpr):
    """Computes the largest magnitude of each tensor."""
    segment = tl.program_id(0)
    first = entry(table, segments, segment, FIRST_TASK)
    tasks = entry(table, segments, segment, TASKS)
    largest = tl.zeros((BLOCK,), tl.int32)
    for block in range(0, tasks, BLOCK):
        i = block + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, tl.load(pointer(maxima, tl.int32) + first + i, mask=i < tasks, other=0))
    tl.store(pointer(scales, tl.int32) + segment, tl.max(largest, 0))


@triton.jit
def _digits(table, segments, segment, start, end, ranks):
    """Returns six numbers: the bits of a digit; the digits in a word; the words of the tensor; the index of the piece's
    first word; the index after the piece's last word; and the number of levels of one rank."""
    bits = entry(table, segments, segment, COUNT).to(tl.int32)
    size = size_of(table, segments, segment)
    fields = 32 // bits
    words = (size + fields - 1) // fields
    last = tl.where(end == size, words, end // fields)
    levels = ((1 << bits) - 1) // (2 * ranks)
    return bits, fields, words, start // fields, last, levels


@triton.jit
def global_encode(
    table, segments, tasks, flag, scales, ranks, digits,
    KEEPS: tl.constexpr, FROM: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Packs digits into words. NaN becomes the lowest digit. Word i of n words contains the digits of the elements i,
    i + n, i + 2 n, ..."""
    segment, start, end = piece(table, segments, tasks, PIECE)
    size = size_of(table, segments, segment)
    key = entry(table, segments, segment, KEY)
    bits, fields, words, first, last, levels = _digits(table, segments, segment, start, end, ranks)
    out = pointer(digits, tl.int32) + entry(table, segments, segment, CODES)
    scale = tl.load(pointer(scales, tl.float32) + segment)
    highest = levels.to(tl.float32)
    factor = reciprocal_of(scale) * highest
    unit = scale * tl.div_rn(highest * 0 + 1.0, highest)
    for block in range(first, last, BLOCK):
        number = block + tl.arange(0, BLOCK)
        total = tl.zeros((BLOCK,), tl.int32)
        for field in range(0, fields):
            i = number + field * words
            inside = (number < last) & (i < size)
            x = made(table, segments, segment, i, inside, KEEPS, FROM)
            value = x * factor + (word(i, key) >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08
            value = tl.where(value > -highest, value, -highest)
            value = tl.floor(tl.where(value < highest, value, highest))
            total += tl.where(inside, value.to(tl.int32), 0) << (field * bits).to(tl.int32)
            if KEEPS:
                kept = floats(table, segments, segment, X) + i
                tl.store(kept, left_of(tl.load(kept, mask=inside, other=0.0), value * unit), mask=inside)
        tl.store(out + number, total, mask=number < last)


@triton.jit
def global_decode(table, segments, tasks, flag, scales, ranks, digits, PIECE: tl.constexpr, BLOCK: tl.constexpr):
    """Computes the means from the sums of the ranks' words."""
    segment, start, end = piece(table, segments, tasks, PIECE)
    size = size_of(table, segments, segment)
    bits, fields, words, first, last, levels = _digits(table, segments, segment, start, end, ranks)
    sums = pointer(digits, tl.int32) + entry(table, segments, segment, CODES)
    largest_sum = (levels * ranks).to(tl.int32)
    of_all = largest_sum.to(tl.float32)
    unit = tl.load(pointer(scales, tl.float32) + segment) * tl.div_rn(of_all * 0 + 1.0, of_all)
    # The largest possible sum is added to each digit. After this, no digit is negative, so each digit has its own bits
    # in the word.
    offset = tl.zeros((), tl.int32)
    for field in range(0, fields):
        offset += largest_sum << (field * bits).to(tl.int32)
    largest = tl.zeros((BLOCK,), tl.int32)
    for block in range(first, last, BLOCK):
        number = block + tl.arange(0, BLOCK)
        word_ = (tl.load(sums + number, mask=number < last, other=0) + offset).to(tl.uint32, bitcast=True)
        for field in range(0, fields):
            i = number + field * words
            inside = (number < last) & (i < size)
            digit = ((word_ >> (field * bits).to(tl.uint32)) & ((1 << bits) - 1).to(tl.uint32)).to(tl.int32)
            mean = (digit - largest_sum).to(tl.float32) * unit
            largest = tl.maximum(largest, tl.where(inside, magnitude(mean), 0))
            tl.store(floats(table, segments, segment, RESULT) + i, mean, mask=inside)
    report(flag, largest)


def _measure(on, scales):
    maxima = on.scratch("maxima", on.tasks, "int32")
    on.pieces(global_measure, maxima, x=True)
    on.tensors(global_maxima, maxima, scales, BLOCK=1024)


KERNELS = {
    "natural_encode": lambda on, payload: on.pieces(natural_encode, payload, x=True),
    "natural_decode": lambda on, first, ranks, row: on.pieces(natural_decode, first, ranks, row, 1 / ranks),
    "globalqsgd_measure": _measure,
    "globalqsgd_encode": lambda on, scales, ranks, words: on.pieces(
        global_encode, scales, ranks, words, **on.constants_of_made()
    ),
    "globalqsgd_decode": lambda on, scales, ranks, words: on.pieces(global_decode, scales, ranks, words),
}
"""For each operation, by name, the function that launches its kernels."""
