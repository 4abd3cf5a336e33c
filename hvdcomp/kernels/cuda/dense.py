"""Kernels that do not compress. They compute x, copy uncompressed gradients, compute sums of squares, and end a step.

Sums of squares are in double precision. The squares within each piece are added first. Then the sums of a tensor's
pieces are added, in the order of the pieces.
"""

from hvdcomp.kernels.cuda.language import tl, triton
from hvdcomp.kernels.cuda.x import (
    FIRST_TASK,
    FLOAT,
    GRADIENT,
    NARROWED,
    NEXT_VELOCITY,
    NOTHING,
    RESULT,
    ROUNDED,
    SENT_RULE,
    SOURCE,
    SOURCED,
    TASKS,
    TOTAL,
    VALUES,
    VELOCITY,
    X_SENT,
    X,
    entry,
    floats,
    from_bits,
    held,
    is_address,
    load_as,
    magnitude,
    make_x,
    piece,
    pointer,
    report,
    residual,
    to_bits,
    unsent,
)


@triton.jit
def dense_encode(
    table, segments, tasks, flag, factor, decay, momentum, wire,
    KEEPS: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, FROM: tl.constexpr,
    COPIES: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes x and, if COPIES, copies x to `wire`. In `wire`, a tensor begins at the index that is in the tensor's
    field `values`."""
    segment, start, end = piece(table, segments, tasks, PIECE)
    largest = tl.zeros((BLOCK,), tl.int32)
    for block in range(start, end, BLOCK):
        i = block + tl.arange(0, BLOCK)
        inside = i < end
        x = make_x(table, segments, segment, i, inside, factor, decay, momentum, KEEPS, MOMENTUM, NESTEROV, FROM)
        largest = tl.maximum(largest, magnitude(x))
        if COPIES:
            tl.store(pointer(wire, tl.float32) + entry(table, segments, segment, VALUES) + i, x, mask=inside)
    report(flag, largest)


@triton.jit
def dense_decode(table, segments, tasks, flag, mean, PIECE: tl.constexpr, BLOCK: tl.constexpr):
    """Copies means to the results. `mean` has the layout of `wire` in `dense_encode`."""
    segment, start, end = piece(table, segments, tasks, PIECE)
    largest = tl.zeros((BLOCK,), tl.int32)
    for block in range(start, end, BLOCK):
        i = block + tl.arange(0, BLOCK)
        inside = i < end
        place = entry(table, segments, segment, VALUES)
        x = tl.load(pointer(mean, tl.float32) + place + i, mask=inside, other=0.0)
        largest = tl.maximum(largest, magnitude(x))
        tl.store(floats(table, segments, segment, RESULT) + i, x, mask=inside)
    report(flag, largest)


@triton.jit
def dense_keep(table, segments, tasks, flag, residuals, FROM: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr):
    """Sets x to `residuals`. If a source was compressed instead of x, adds the difference between x and the source.
    `residuals` has the layout of `wire` in `dense_encode`."""
    segment, start, end = piece(table, segments, tasks, PIECE)
    place = entry(table, segments, segment, VALUES)
    for block in range(start, end, BLOCK):
        i = block + tl.arange(0, BLOCK)
        inside = i < end
        residual_now = tl.load(pointer(residuals, tl.float32) + place + i, mask=inside, other=0.0)
        x = floats(table, segments, segment, X) + i
        if FROM == SOURCED:
            source = tl.load(floats(table, segments, segment, SOURCE) + i, mask=inside, other=0.0)
            residual_now += tl.load(x, mask=inside, other=0.0) - source
        tl.store(x, residual_now, mask=inside)


@triton.jit
def take_off(table, segments, tasks, flag, PIECE: tl.constexpr, BLOCK: tl.constexpr):
    """Subtracts the sent values from x, unless an earlier kernel has already subtracted them."""
    segment, start, end = piece(table, segments, tasks, PIECE)
    sent = floats(table, segments, segment, X_SENT)
    for block in range(start, end, BLOCK):
        i = block + tl.arange(0, BLOCK)
        inside = i < end
        x = floats(table, segments, segment, X) + i
        rule = i * 0 + entry(table, segments, segment, SENT_RULE).to(tl.int32)
        tl.store(x, unsent(tl.load(x, mask=inside, other=0.0), rule, sent, inside), mask=inside)


@triton.jit
def make_and_measure(
    table, segments, tasks, flag, factor, decay, momentum, parts,
    KEEPS: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, FROM: tl.constexpr,
    PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes x, and the sum of squares of each piece of x."""
    segment, start, end = piece(table, segments, tasks, PIECE)
    largest = tl.zeros((BLOCK,), tl.int32)
    squares = tl.zeros((BLOCK,), tl.float64)
    for block in range(start, end, BLOCK):
        i = block + tl.arange(0, BLOCK)
        inside = i < end
        x = make_x(table, segments, segment, i, inside, factor, decay, momentum, KEEPS, MOMENTUM, NESTEROV, FROM)
        largest = tl.maximum(largest, magnitude(x))
        wide = x.to(tl.float64)
        squares += wide * wide
    tl.store(pointer(parts, tl.float64) + tl.program_id(0), tl.sum(squares, 0))
    report(flag, largest)


@triton.jit
def measure_left(table, segments, tasks, flag, parts, PIECE: tl.constexpr, BLOCK: tl.constexpr):
    """Computes the sum of squares of each piece of the residual, which is x minus the values that this rank sent."""
    segment, start, end = piece(table, segments, tasks, PIECE)
    sent = floats(table, segments, segment, X_SENT)
    squares = tl.zeros((BLOCK,), tl.float64)
    for block in range(start, end, BLOCK):
        i = block + tl.arange(0, BLOCK)
        inside = i < end
        x = tl.load(floats(table, segments, segment, X) + i, mask=inside, other=0.0)
        rule = i * 0 + entry(table, segments, segment, SENT_RULE).to(tl.int32)
        wide = unsent(x, rule, sent, inside).to(tl.float64)
        squares += wide * wide
    tl.store(pointer(parts, tl.float64) + tl.program_id(0), tl.sum(squares, 0))


@triton.jit
def add_parts(table, segments, parts, sums, BLOCK: tl.constexpr):
    """Adds the sums of all pieces of each tensor."""
    segment = tl.program_id(0)
    tensor_parts = pointer(parts, tl.float64) + entry(table, segments, segment, FIRST_TASK)
    tasks = entry(table, segments, segment, TASKS)
    total = tl.zeros((BLOCK,), tl.float64)
    for block in range(0, tasks, BLOCK):
        i = block + tl.arange(0, BLOCK)
        total += tl.load(tensor_parts + i, mask=i < tasks, other=0.0)
    tl.store(pointer(sums, tl.float64) + segment, tl.sum(total, 0))


@triton.jit
def _results(table, segments, segment, TYPE: tl.constexpr):
    """The address of a tensor's results at the end of a step."""
    return entry(table, segments, segment, RESULT if TYPE == FLOAT else NARROWED)


@triton.jit
def _store_as(address, i, x, mask, TYPE: tl.constexpr):
    if TYPE == FLOAT:
        tl.store(pointer(address, tl.float32) + i, x, mask=mask)
    else:
        tl.store(pointer(address, tl.uint16) + i, to_bits(x, TYPE).to(tl.uint16), mask=mask)


@triton.jit
def narrow_results(
    table, segments, tasks, flag,
    KEEPS: tl.constexpr, TYPE: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rounds results to the gradients' 16-bit type. If KEEPS, sets x to the residual plus the rounding error of the
    means."""
    segment, start, end = piece(table, segments, tasks, PIECE)
    largest = tl.zeros((BLOCK,), tl.int32)
    for block in range(start, end, BLOCK):
        i = block + tl.arange(0, BLOCK)
        inside = i < end
        mean = tl.load(floats(table, segments, segment, RESULT) + i, mask=inside, other=0.0)
        bits = to_bits(mean, TYPE)
        result = from_bits(bits, TYPE)
        largest = tl.maximum(largest, magnitude(result))
        tl.store(pointer(entry(table, segments, segment, NARROWED), tl.uint16) + i, bits.to(tl.uint16), mask=inside)
        if KEEPS:
            x = floats(table, segments, segment, X) + i
            rule = i * 0 + entry(table, segments, segment, SENT_RULE).to(tl.int32)
            sent = floats(table, segments, segment, X_SENT)
            left = unsent(tl.load(x, mask=inside, other=0.0), rule, sent, inside)
            tl.store(x, left + (mean - result), mask=inside)
    report(flag, largest)


@triton.jit
def _round_left(table, segments, segment, start, end, fails, KEEPS: tl.constexpr, BLOCK: tl.constexpr):
    """Rounds the residual of a piece to 16 bits. If the step does not count (`fails`), rounds the old residual."""
    sent = floats(table, segments, segment, X_SENT)
    for block in range(start, end, BLOCK):
        i = block + tl.arange(0, BLOCK)
        inside = i < end
        rule = i * 0 + entry(table, segments, segment, SENT_RULE).to(tl.int32)
        x = tl.load(floats(table, segments, segment, X) + i, mask=inside, other=0.0)
        before, _ = residual(table, segments, segment, i, inside, KEEPS)
        failing = i * 0 + fails.to(tl.int32)
        left = tl.where(failing != 0, before, held(unsent(x, rule, sent, inside), KEEPS - 1))
        bits = to_bits(left, KEEPS - 1).to(tl.uint16)
        tl.store(pointer(entry(table, segments, segment, ROUNDED), tl.uint16) + i, bits, mask=inside)


@triton.jit
def settle(
    table, segments, tasks, flag, found_inf, share,
    KEEPS: tl.constexpr, MOMENTUM: tl.constexpr, ADDS: tl.constexpr, PUTS: tl.constexpr, TYPE: tl.constexpr,
    PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Ends a step.

    Records the values of x that were sent, or rounds the residual if residuals are kept in 16 bits. If ADDS, adds the
    gradients to their totals.

    If the step does not count, the kernel does not add anything. Instead, it copies the old residual and velocity to
    where the next step reads them, and writes NaN to each result. The host continues as if the step counted, because it
    does not wait for this information.

    PUTS: whether the results are in separate memory, and are copied from there to the memory of the gradients. share:
    the factor by which added gradients are multiplied.
    """
    segment, start, end = piece(table, segments, tasks, PIECE)
    fails = tl.load(pointer(found_inf, tl.float32)) != 0
    if KEEPS == 1:
        if start == 0:
            rule = tl.where(fails, NOTHING, entry(table, segments, segment, SENT_RULE)).to(tl.float32)
            tl.store(floats(table, segments, segment, X_SENT), rule)
    if KEEPS > 1:
        _round_left(table, segments, segment, start, end, fails, KEEPS, BLOCK)
    if ADDS or PUTS:
        for block in range(start, end, BLOCK):
            i = block + tl.arange(0, BLOCK)
            inside = i < end
            failing = i * 0 + fails.to(tl.int32)
            gradient = entry(table, segments, segment, GRADIENT)
            if ADDS:
                total = floats(table, segments, segment, TOTAL) + i
                counts = inside & (failing == 0)
                added = load_as(gradient, i, counts, TYPE) * share
                tl.store(total, tl.load(total, mask=counts, other=0.0) + added, mask=counts)
            if PUTS:
                result = load_as(_results(table, segments, segment, TYPE), i, inside, TYPE)
                _store_as(gradient, i, tl.where((failing != 0) & (i == 0), float("nan"), result), inside, TYPE)
    if fails:
        if not PUTS:
            if start == 0:
                first = tl.arange(0, 1)
                nan = tl.full((1,), float("nan"), tl.float32)
                _store_as(_results(table, segments, segment, TYPE), first, nan, first == 0, TYPE)
        if KEEPS == 1:
            for block in range(start, end, BLOCK):
                i = block + tl.arange(0, BLOCK)
                inside = i < end
                left, _ = residual(table, segments, segment, i, inside, KEEPS)
                tl.store(floats(table, segments, segment, X) + i, left, mask=inside)
                if MOMENTUM:
                    address = entry(table, segments, segment, VELOCITY)
                    moving = inside & is_address(address, i)
                    velocity = tl.load(pointer(address, tl.float32) + i, mask=moving, other=0.0)
                    tl.store(floats(table, segments, segment, NEXT_VELOCITY) + i, velocity, mask=inside)


def _make_x(on, sums=None):
    """Launches a kernel that computes x. sums: None, or a float64 array (tensors,) that receives the sums of
    squares."""
    if sums is None:
        on.pieces(dense_encode, 0, x=True, COPIES=False)
        return
    parts = on.scratch("sums of pieces", on.tasks, "float64")
    on.pieces(make_and_measure, parts, x=True)
    on.tensors(add_parts, parts, sums, BLOCK=1024)


def _measure_left(on, sums):
    parts = on.scratch("sums of pieces", on.tasks, "float64")
    on.pieces(measure_left, parts)
    on.tensors(add_parts, parts, sums, BLOCK=1024)


def _settle(on, found_inf, adds, puts):
    share = on.table.bucket.share
    constants = {"KEEPS": on.keeps, "MOMENTUM": on.moves, "TYPE": on.narrow}
    on.pieces(settle, found_inf, share, ADDS=bool(adds), PUTS=bool(puts), **constants)


KERNELS = {
    "make_x": _make_x,
    "measure_left": _measure_left,
    "dense_encode": lambda on, wire: on.pieces(dense_encode, wire, x=True, COPIES=True),
    "dense_decode": lambda on, mean: on.pieces(dense_decode, mean),
    "dense_keep": lambda on, left: on.pieces(dense_keep, left, FROM=on.constants_of_made()["FROM"]),
    "take_off": lambda on: on.pieces(take_off),
    "narrow_results": lambda on: on.pieces(narrow_results, KEEPS=on.keeps > 0, TYPE=on.narrow),
    "settle": _settle,
}
"""For each operation, by name, the function that launches its kernels."""
