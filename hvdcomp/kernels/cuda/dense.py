"""Kernels that change nothing of what is sent, and what ends a step."""

from hvdcomp.kernels.cuda.language import tl, triton
from hvdcomp.kernels.cuda.x import (
    NEXT_VELOCITY,
    PLACE0,
    RESULT,
    SENT_RULE,
    VELOCITY,
    X_SENT,
    X,
    entry,
    floats,
    is_address,
    magnitude,
    make_x,
    piece,
    pointer,
    report,
    residual,
)


@triton.jit
def dense_encode(
    table, segments, tasks, flag, factor, decay, momentum, wire,
    KEEPS: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, SOURCED: tl.constexpr,
    COPIES: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Makes x and, if COPIES, a copy of it in `wire`, where a tensor begins at place 0 (elements)."""
    segment, start, end = piece(table, segments, tasks, PIECE)
    largest = tl.zeros((BLOCK,), tl.int32)
    for block in range(start, end, BLOCK):
        i = block + tl.arange(0, BLOCK)
        inside = i < end
        x = make_x(table, segments, segment, i, inside, factor, decay, momentum, KEEPS, MOMENTUM, NESTEROV, SOURCED)
        largest = tl.maximum(largest, magnitude(x))
        if COPIES:
            tl.store(pointer(wire, tl.float32) + entry(table, segments, segment, PLACE0) + i, x, mask=inside)
    report(flag, largest)


@triton.jit
def dense_decode(table, segments, tasks, flag, mean, PIECE: tl.constexpr, BLOCK: tl.constexpr):
    """Copies means that lie so to where the results go."""
    segment, start, end = piece(table, segments, tasks, PIECE)
    largest = tl.zeros((BLOCK,), tl.int32)
    for block in range(start, end, BLOCK):
        i = block + tl.arange(0, BLOCK)
        inside = i < end
        place = entry(table, segments, segment, PLACE0)
        x = tl.load(pointer(mean, tl.float32) + place + i, mask=inside, other=0.0)
        largest = tl.maximum(largest, magnitude(x))
        tl.store(floats(table, segments, segment, RESULT) + i, x, mask=inside)
    report(flag, largest)


@triton.jit
def settle(
    table, segments, tasks, flag, found_inf,
    KEEPS: tl.constexpr, MOMENTUM: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Says what was sent of x. If the step does not count, puts what was kept where the next step looks for it, and a
    NaN into each result: the host does not know whether the step counts, and goes on as if it did.
    """
    segment, start, end = piece(table, segments, tasks, PIECE)
    fails = tl.load(pointer(found_inf, tl.float32)) != 0
    if KEEPS:
        if start == 0:
            rule = tl.where(fails, 0, entry(table, segments, segment, SENT_RULE)).to(tl.float32)
            tl.store(floats(table, segments, segment, X_SENT), rule)
    if fails:
        if start == 0:
            tl.store(floats(table, segments, segment, RESULT), float("nan"))
        if KEEPS:
            for block in range(start, end, BLOCK):
                i = block + tl.arange(0, BLOCK)
                inside = i < end
                left, _ = residual(table, segments, segment, i, inside)
                tl.store(floats(table, segments, segment, X) + i, left, mask=inside)
                if MOMENTUM:
                    address = entry(table, segments, segment, VELOCITY)
                    moving = inside & is_address(address, i)
                    velocity = tl.load(pointer(address, tl.float32) + i, mask=moving, other=0.0)
                    tl.store(floats(table, segments, segment, NEXT_VELOCITY) + i, velocity, mask=inside)


KERNELS = {
    "make_x": lambda on: on.pieces(dense_encode, 0, x=True, COPIES=False),
    "dense_encode": lambda on, wire: on.pieces(dense_encode, wire, x=True, COPIES=True),
    "dense_decode": lambda on, mean: on.pieces(dense_decode, mean),
    "settle": lambda on, found_inf: on.pieces(settle, found_inf, KEEPS=on.keeps, MOMENTUM=on.moves),
}
"""How each is launched, by its name."""
