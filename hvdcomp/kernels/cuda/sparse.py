"""What a sparsifier sends: k elements of each tensor, in the order of their indices, and what is left of x.

`src/sparse.h` says where things lie in a payload, and `sparse_select` how the magnitudes are found between which what
is sent lies. All elements that reach the upper one are sent. The rest comes from those between the two: the first of
them, in index order, or, where the method allows more of them than it needs (`LIMITED`), the largest of these first
ones, of equal ones again the first.
"""

import numpy as np

from hvdcomp.kernels.cuda.language import tl, triton
from hvdcomp.kernels.cuda.sparse_decode import COUNTED
from hvdcomp.kernels.cuda.sparse_select import (
    BINS,
    ELIGIBLE,
    HIGH,
    LINE,
    LOW,
    MOST,
    QUERIES,
    SPAN,
    STATE,
    WHOLE,
    add_histogram,
    bits_of,
    count_digits,
    decide,
    digit_of,
    digits_of,
    draw_floors,
    known,
    looked_at,
    looked_at_where,
    note_candidates,
)
from hvdcomp.kernels.cuda.x import (
    COUNT,
    FIRST_TASK,
    FLOAT,
    NEXT_VELOCITY,
    PLACE0,
    PLACE1,
    PLACE2,
    PLACE3,
    SOURCED,
    TASKS,
    X,
    entry,
    floats,
    from_bits,
    held,
    made,
    piece,
    pointer,
    size_of,
    to_bits,
)

_SMALL = 512  # tensors up to this size have no sample for their floor
_SAMPLE = 2048  # elements of a tensor from which its floor comes, at most
_LOOKED_AT = 512  # candidates that a program works on at a time


@triton.jit
def _counted(chosen, first, count):
    """The sums of what `count_chosen` has counted in a number of pieces: surely sent, and eligible."""
    surely = tl.zeros((SPAN,), tl.int32)
    eligible = tl.zeros((SPAN,), tl.int32)
    for block in range(0, count, SPAN):
        number = block + tl.arange(0, SPAN)
        pair = pointer(chosen, tl.int32) + 2 * (first + number)
        surely += tl.load(pair, mask=number < count, other=0)
        eligible += tl.load(pair + 1, mask=number < count, other=0)
    return tl.sum(surely, 0), tl.sum(eligible, 0)


@triton.jit
def _missing(table, segments, segment, chosen):
    """How many elements of a tensor are to be sent beside those that surely are, and the number of these."""
    first = entry(table, segments, segment, FIRST_TASK)
    surely, _ = _counted(chosen, first, entry(table, segments, segment, TASKS).to(tl.int32))
    return entry(table, segments, segment, COUNT).to(tl.int32) - surely, surely


@triton.jit
def _limits(
    table, segments, segment, start, choices, state, histograms, between,
    LIMITED: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Of those between the two magnitudes: the number in pieces before, how many are eligible at all, in index order,
    and the least magnitude of those that are sent. Without LIMITED nobody asks.

    between: what `count_chosen` has counted, without LIMITED.
    """
    before = tl.zeros((), tl.int32)
    eligible = before
    least = before
    if LIMITED:
        first = entry(table, segments, segment, FIRST_TASK)
        _, before = _counted(between, first, start // PIECE)
        missing, surely = _missing(table, segments, segment, between)
        eligible = entry(choices, segments, segment, MOST).to(tl.int32) - surely
        least = digits_of(state, histograms, segment, missing, False, ELIGIBLE, 4)
        low = known(state, segment, LOW)
        least = tl.where(known(state, segment, HIGH) - low == 1, low, least)
    return before, eligible, least


@triton.jit
def _classes(bits, there, low, high, before, eligible, least, LIMITED: tl.constexpr):
    """1 for elements that are surely sent, and for those of which the first are, else 0; and `before` for those that
    follow."""
    surely = (there & (bits >= high)).to(tl.int32)
    between = (there & (bits >= low)).to(tl.int32) - surely
    if LIMITED:
        first = between * (tl.cumsum(between, 0) + before <= eligible).to(tl.int32)
        before += tl.sum(between, 0)
        surely += first * (bits > least).to(tl.int32)
        between = first * (bits == least).to(tl.int32)
    return surely, between, before


@triton.jit
def count_chosen(
    table, segments, tasks, flag, choices, state, histograms, places, counts, between, chosen,
    LIMITED: tl.constexpr, KEEPS: tl.constexpr, FROM: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of each piece, how many elements are surely sent, and of how many the first are."""
    segment, start, end = piece(table, segments, tasks, PIECE)
    whole = known(state, segment, WHOLE)
    low = known(state, segment, LOW)
    high = known(state, segment, HIGH)
    before, eligible, least = _limits(
        table, segments, segment, start, choices, state, histograms, between, LIMITED, PIECE
    )
    entries = looked_at(counts, start, end, whole)
    surely = tl.zeros((BLOCK,), tl.int32)
    rest = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, entries, BLOCK):
        number = first + tl.arange(0, BLOCK)
        i, there = looked_at_where(places, start, number, entries, whole, PIECE)
        bits = bits_of(made(table, segments, segment, i, there, KEEPS, FROM))
        surely_here, rest_here, before = _classes(bits, there, low, high, before, eligible, least, LIMITED)
        surely += surely_here
        rest += rest_here
    own = pointer(chosen, tl.int32) + 2 * tl.program_id(0)
    tl.store(own, tl.sum(surely, 0))
    tl.store(own + 1, tl.sum(rest, 0))


@triton.jit
def count_eligible_digits(
    table, segments, tasks, flag, choices, state, histograms, places, counts, between,
    DIGIT: tl.constexpr, KEEPS: tl.constexpr, FROM: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The histogram of a digit of what is eligible between the two magnitudes; nothing where these are neighbours."""
    segment, start, end = piece(table, segments, tasks, PIECE)
    low = known(state, segment, LOW)
    high = known(state, segment, HIGH)
    if high - low > 1:
        whole = known(state, segment, WHOLE)
        _, before = _counted(between, entry(table, segments, segment, FIRST_TASK), start // PIECE)
        missing, surely = _missing(table, segments, segment, between)
        eligible = entry(choices, segments, segment, MOST).to(tl.int32) - surely
        digits = digits_of(state, histograms, segment, missing, start == 0, ELIGIBLE, DIGIT)
        entries = looked_at(counts, start, end, whole)
        found = tl.zeros((BINS,), tl.int32)
        for first in range(0, entries, BLOCK):
            number = first + tl.arange(0, BLOCK)
            i, there = looked_at_where(places, start, number, entries, whole, PIECE)
            bits = bits_of(made(table, segments, segment, i, there, KEEPS, FROM))
            reaches = (there & (bits >= low) & (bits < high)).to(tl.int32)
            asked = (reaches != 0) & (tl.cumsum(reaches, 0) + before <= eligible)
            before += tl.sum(reaches, 0)
            digit, higher = digit_of(bits, DIGIT)
            found += tl.histogram(digit, BINS, mask=asked & (higher == digits))
        add_histogram(histograms, segment, found, ELIGIBLE, DIGIT)


@triton.jit
def _packed(chosen, first, count, missing):
    """How many elements of a number of pieces are sent, and how many of them beside those that surely are."""
    surely, rest = _counted(chosen, first, count)
    rest = tl.minimum(rest, missing)
    return surely + rest, rest


@triton.jit
def pack_chosen(
    table, segments, tasks, flag, choices, state, histograms, places, counts, between, chosen, payload,
    TYPE: tl.constexpr, MASKING: tl.constexpr, LIMITED: tl.constexpr,
    KEEPS: tl.constexpr, FROM: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Packs values, indices and the counts of blocks, and takes what is sent off x; MASKING: ends the momentum of these
    elements."""
    segment, start, end = piece(table, segments, tasks, PIECE)
    whole = known(state, segment, WHOLE)
    low = known(state, segment, LOW)
    high = known(state, segment, HIGH)
    before, eligible, least = _limits(
        table, segments, segment, start, choices, state, histograms, between, LIMITED, PIECE
    )
    missing, _ = _missing(table, segments, segment, chosen)
    first_task = entry(table, segments, segment, FIRST_TASK)
    packed, rest = _packed(chosen, first_task, start // PIECE, missing)
    counts_at = entry(table, segments, segment, PLACE1)
    if counts_at >= 0:
        if start % COUNTED == 0:
            ended = entry(table, segments, segment, COUNT).to(tl.int32)
            if start + COUNTED < size_of(table, segments, segment):
                ended, _ = _packed(chosen, first_task, (start + COUNTED) // PIECE, missing)
            tl.store(pointer(payload + counts_at, tl.int32) + start // COUNTED, ended - packed)
    values = payload + entry(table, segments, segment, PLACE0)
    indices = payload + entry(table, segments, segment, PLACE2)
    width = entry(table, segments, segment, PLACE3)
    entries = looked_at(counts, start, end, whole)
    for first in range(0, entries, BLOCK):
        number = first + tl.arange(0, BLOCK)
        i, there = looked_at_where(places, start, number, entries, whole, PIECE)
        x = made(table, segments, segment, i, there, KEEPS, FROM)
        surely, ones, before = _classes(bits_of(x), there, low, high, before, eligible, least, LIMITED)
        ones = surely + ones * (rest + tl.cumsum(ones, 0) <= missing).to(tl.int32)
        rest += tl.sum(ones - surely, 0)
        sends = ones != 0
        at = packed + tl.cumsum(ones, 0) - ones
        packed += tl.sum(ones, 0)
        sent = x
        if TYPE != FLOAT:
            bits = to_bits(held(x, TYPE), TYPE)
            tl.store(pointer(values, tl.uint16) + at, bits.to(tl.uint16), mask=sends)
            sent = from_bits(bits, TYPE)
        else:
            tl.store(pointer(values, tl.float32) + at, x, mask=sends)
        if width == 2:
            tl.store(pointer(indices, tl.int16) + at, i.to(tl.int16), mask=sends)
        else:
            tl.store(pointer(indices, tl.int32) + at, i, mask=sends)
        if KEEPS:
            left = floats(table, segments, segment, X) + i
            if FROM == SOURCED:
                x = tl.load(left, mask=sends, other=0.0)
            tl.store(left, x - sent, mask=sends)
        if MASKING:
            tl.store(floats(table, segments, segment, NEXT_VELOCITY) + i, tl.zeros((BLOCK,), tl.float32), mask=sends)


def _choices(on, asked):
    """What kernels are told of each tensor, as numbered in `sparse_select`; with lines and rank of the floor's sample.

    That rank is above the expected one by several standard deviations, so that hardly ever too few elements reach the
    floor. A tensor has no sample if it is small, or if nearly all of it is needed.
    """
    sizes = on.segments["size"]
    lines = np.where(sizes > _SMALL, np.minimum(_SAMPLE, sizes // 4) // LINE.value, 0)
    expected = asked.need / sizes * lines * LINE.value
    rank = np.ceil(1.5 * expected + 4 * np.sqrt(expected) + 4).astype(np.int64)
    rank[3 * rank > lines * LINE.value] = 0
    return np.stack([asked.need, asked.most, asked.reaching, asked.stride, np.maximum(lines, 1), rank])


def _encode(on, asked, payload):
    tensors, tasks = len(on.segments), on.tasks
    method = {"METHOD": asked.method}
    choices = on.static("choices", lambda: _choices(on, asked))
    state = on.scratch("state", tensors * STATE.value, "int32")
    histograms = on.scratch("histograms", tensors * QUERIES.value * 4 * BINS.value, "int32")
    places, counts = on.passing(tasks * on.piece, "int16"), on.scratch("noted", tasks, "int32")
    sums, largest = on.scratch("magnitudes", tasks, "float64"), on.scratch("largest", tasks, "int32")
    between, chosen = on.scratch("between", 2 * tasks, "int32"), on.scratch("chosen", 2 * tasks, "int32")
    read = {"KEEPS": on.keeps, "FROM": on.origin, "BLOCK": on.piece if on.interpreting else _LOOKED_AT}
    noted = choices, state, histograms, places, counts
    on.tensors(draw_floors, *on.arguments_of_x(), choices, state, histograms, SAMPLE=_SAMPLE, **on.constants_of_x())
    on.pieces(note_candidates, choices, state, places, counts, sums, largest, x=True, **method)
    for digit in range(4):
        on.pieces(count_digits, *noted, DIGIT=digit, **method, **read)
    on.tensors(decide, choices, state, histograms, sums, largest, asked.rounds, **method)
    if asked.limited:
        on.pieces(count_chosen, *noted, 0, between, LIMITED=False, **read)
        for digit in range(4):
            on.pieces(count_eligible_digits, *noted, between, DIGIT=digit, **read)
    on.pieces(count_chosen, *noted, between, chosen, LIMITED=asked.limited, **read)
    on.pieces(
        pack_chosen, *noted, between, chosen, payload, TYPE=asked.type, MASKING=bool(asked.masks),
        LIMITED=asked.limited, **read,
    )  # fmt: skip


KERNELS = {"sparse_encode": _encode}
"""How it is launched, by its name. What the kernels in C do after it in `sparse_keep`, it has done."""
