"""Half precision and bfloat16. In the payload, the 16-bit numbers of a tensor begin at the index that is in the
tensor's field `values`."""

from hvdcomp.kernels import limits
from hvdcomp.kernels.cuda.language import tl, triton
from hvdcomp.kernels.cuda.x import (
    BFLOAT16,
    HALF,
    INFINITE,
    KEY,
    RESULT,
    SOURCED,
    VALUES,
    X,
    entry,
    floats,
    from_bits,
    held,
    left_of,
    magnitude,
    make_x,
    no_sum,
    payload_of,
    piece,
    pointer,
    report,
    to_bits,
    word,
)

# The float32 bits of the largest finite number, and of the smallest number that rounds to infinity.
LARGEST_HALF_BITS = tl.constexpr(limits.LARGEST_BITS["float16"])
INFINITE_HALF_BITS = tl.constexpr(limits.INFINITE_BITS["float16"])
LARGEST_BFLOAT16_BITS = tl.constexpr(limits.LARGEST_BITS["bfloat16"])
INFINITE_BFLOAT16_BITS = tl.constexpr(limits.INFINITE_BITS["bfloat16"])


@triton.jit
def _to_wire_at_random(x, i, key, TYPE: tl.constexpr):
    """Casts numbers to 16 bits as `to_bits` does, but rounds at random to one of the two neighboring numbers. The
    result is infinite only if rounding to nearest also gives infinity."""
    exact = magnitude(x).to(tl.uint32)
    sign = (x.to(tl.uint32, bitcast=True) >> 16) & 0x8000
    if TYPE == HALF:
        most = tl.minimum(exact, LARGEST_HALF_BITS)
        above = tl.maximum(most & INFINITE, 0x38800000) - 0x38800000
        factor = ((283 << 23) - 0x38800000 - above).to(tl.float32, bitcast=True)
        distances = (most.to(tl.float32, bitcast=True) * factor).to(tl.int32).to(tl.uint32)
        code = ((distances + (word(i, key) >> 13)) >> 19) + (above >> 13)
        finite = exact < INFINITE_HALF_BITS
    else:
        code = (tl.minimum(exact, LARGEST_BFLOAT16_BITS) + (word(i, key) >> 16)) >> 16
        finite = exact < INFINITE_BFLOAT16_BITS
    return tl.where(finite, (sign | code).to(tl.int32), to_bits(x, TYPE))


@triton.jit
def cast_encode(
    table, segments, tasks, flag, factor, decay, momentum, wire,
    KEEPS: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, FROM: tl.constexpr,
    TYPE: tl.constexpr, NEAREST: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes x and its 16-bit numbers, and then sets x to its rounding error."""
    segment, start, end = piece(table, segments, tasks, PIECE)
    largest = tl.zeros((BLOCK,), tl.int32)
    for block in range(start, end, BLOCK):
        i = block + tl.arange(0, BLOCK)
        inside = i < end
        x = make_x(table, segments, segment, i, inside, factor, decay, momentum, KEEPS, MOMENTUM, NESTEROV, FROM)
        if NEAREST:
            bits = to_bits(held(x, TYPE) if NEAREST > 1 else x, TYPE)
        else:
            bits = _to_wire_at_random(x, i, entry(table, segments, segment, KEY), TYPE)
        sent = from_bits(bits, TYPE)
        largest = tl.maximum(largest, tl.maximum(magnitude(x), magnitude(sent)))
        place = entry(table, segments, segment, VALUES)
        tl.store(pointer(wire, tl.uint16) + place + i, bits.to(tl.uint16), mask=inside)
        if KEEPS:
            kept = floats(table, segments, segment, X) + i
            if FROM == SOURCED:
                x = tl.load(kept, mask=inside, other=0.0)
            tl.store(kept, left_of(x, sent), mask=inside)
    report(flag, largest)


@triton.jit
def cast_decode(
    table, segments, tasks, flag, payloads, ranks, row: tl.int64, share,
    TYPE: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes the mean of the ranks' numbers, which are added in rank order. row: distance in bytes between the
    numbers of two consecutive ranks."""
    segment, start, end = piece(table, segments, tasks, PIECE)
    largest = tl.zeros((BLOCK,), tl.int32)
    for block in range(start, end, BLOCK):
        i = block + tl.arange(0, BLOCK)
        inside = i < end
        place = entry(table, segments, segment, VALUES)
        total = no_sum(BLOCK)
        for rank in range(0, ranks):
            numbers = pointer(payload_of(payloads, rank, row), tl.uint16)
            total += from_bits(tl.load(numbers + place + i, mask=inside, other=0).to(tl.int32), TYPE)
        total *= share
        largest = tl.maximum(largest, magnitude(total))
        tl.store(floats(table, segments, segment, RESULT) + i, total, mask=inside)
    report(flag, largest)


def _encode(on, wire, nearest, type):
    on.pieces(cast_encode, wire, x=True, TYPE=type, NEAREST=int(nearest))


def _decode(on, first, ranks, row, type):
    on.pieces(cast_decode, first, ranks, row, 1 / ranks, TYPE=type)


KERNELS = {
    "half_encode": lambda on, wire, nearest: _encode(on, wire, nearest, HALF.value),
    "half_decode": lambda on, first, ranks, row: _decode(on, first, ranks, row, HALF.value),
    "bfloat16_encode": lambda on, wire, nearest: _encode(on, wire, nearest, BFLOAT16.value),
    "bfloat16_decode": lambda on, first, ranks, row: _decode(on, first, ranks, row, BFLOAT16.value),
}
"""For each operation, by name, the function that launches its kernels."""
