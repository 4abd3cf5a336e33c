"""Half precision and bfloat16. Of each tensor, 16-bit numbers begin at place 0 (numbers) of what travels."""

from hvdcomp.kernels.cuda.language import tl, triton
from hvdcomp.kernels.cuda.x import (
    INFINITE,
    PLACE0,
    RESULT,
    X,
    entry,
    floats,
    left_of,
    magnitude,
    make_x,
    no_sum,
    payload_of,
    piece,
    pointer,
    report,
)


@triton.jit
def _to_wire(x, HALF: tl.constexpr):
    """16 bits of each number, rounded to nearest, ties to even."""
    if HALF:
        return x.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.int32)
    else:  # noqa: RET505
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(magnitude(x) > INFINITE, (bits >> 16) | 0x40, rounded).to(tl.int32)


@triton.jit
def _from_wire(bits, HALF: tl.constexpr):
    if HALF:
        return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    else:  # noqa: RET505
        return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def cast_encode(
    table, segments, tasks, flag, factor, decay, momentum, wire,
    KEEPS: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, SOURCED: tl.constexpr,
    HALF: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Makes x and its numbers of 16 bits, and leaves at x what they do not say."""
    segment, start, end = piece(table, segments, tasks, PIECE)
    largest = tl.zeros((BLOCK,), tl.int32)
    for block in range(start, end, BLOCK):
        i = block + tl.arange(0, BLOCK)
        inside = i < end
        x = make_x(table, segments, segment, i, inside, factor, decay, momentum, KEEPS, MOMENTUM, NESTEROV, SOURCED)
        bits = _to_wire(x, HALF)
        sent = _from_wire(bits, HALF)
        largest = tl.maximum(largest, tl.maximum(magnitude(x), magnitude(sent)))
        place = entry(table, segments, segment, PLACE0)
        tl.store(pointer(wire, tl.uint16) + place + i, bits.to(tl.uint16), mask=inside)
        if KEEPS:
            kept = floats(table, segments, segment, X) + i
            if SOURCED:
                x = tl.load(kept, mask=inside, other=0.0)
            tl.store(kept, left_of(x, sent), mask=inside)
    report(flag, largest)


@triton.jit
def cast_decode(
    table, segments, tasks, flag, payloads, ranks, row: tl.int64, share,
    HALF: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The mean of what the ranks sent, in rank order. row: bytes from one rank's numbers to the next one's."""
    segment, start, end = piece(table, segments, tasks, PIECE)
    largest = tl.zeros((BLOCK,), tl.int32)
    for block in range(start, end, BLOCK):
        i = block + tl.arange(0, BLOCK)
        inside = i < end
        place = entry(table, segments, segment, PLACE0)
        total = no_sum(BLOCK)
        for rank in range(0, ranks):
            numbers = pointer(payload_of(payloads, rank, row), tl.uint16)
            total += _from_wire(tl.load(numbers + place + i, mask=inside, other=0).to(tl.int32), HALF)
        total *= share
        largest = tl.maximum(largest, magnitude(total))
        tl.store(floats(table, segments, segment, RESULT) + i, total, mask=inside)
    report(flag, largest)


KERNELS = {
    "half_encode": lambda on, wire: on.pieces(cast_encode, wire, x=True, HALF=True),
    "half_decode": lambda on, mean: on.pieces(cast_decode, mean, 1, 0, 1.0, HALF=True),
    "bfloat16_encode": lambda on, wire: on.pieces(cast_encode, wire, x=True, HALF=False),
    "bfloat16_decode": lambda on, first, ranks, row: on.pieces(cast_decode, first, ranks, row, 1 / ranks, HALF=False),
}
"""How each is launched, by its name."""
