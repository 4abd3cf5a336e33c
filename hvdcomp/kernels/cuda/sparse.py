"""Encodes tensors for sparsifiers: packs k elements of each tensor in the order of their indices, and sets x to the
residual.

`src/sparse.h` describes the payload. `sparse_select` finds two magnitudes for each tensor. All elements that reach the
upper magnitude are sent. If fewer than k elements reach the upper magnitude, the first elements between the two
magnitudes, in index order, are also sent. With `LIMITED`, only a limited number of elements are eligible: the first
elements in index order. Then the largest eligible elements are sent and, among equal elements, the first ones.

In the functions below, elements that are sent in any case are *certain*. If only the first of some elements are sent,
these elements are *tied*.
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
    load_state,
    looked_at,
    looked_at_where,
    note_candidates,
)
from hvdcomp.kernels.cuda.x import (
    BLOCK_COUNTS,
    COUNT,
    FIRST_TASK,
    FLOAT,
    INDEX_BYTES,
    INDICES,
    NEXT_VELOCITY,
    SOURCED,
    TASKS,
    VALUES,
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

_SMALL = 512  # for tensors up to this size, no sample is drawn to find a floor
_SAMPLE = 2048  # largest number of elements in the sample for a tensor's floor
_LOOKED_AT = 512  # number of candidates that a program works on at a time


@triton.jit
def _counted(chosen, first, count):
    """The two counts of `count_chosen`, each summed over `count` pieces: the number of elements that are surely chosen,
    and the number of tied elements."""
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
    """Two numbers for a tensor: the number of tied elements that are sent, and the number of certain elements, which
    are all sent."""
    first = entry(table, segments, segment, FIRST_TASK)
    surely, _ = _counted(chosen, first, entry(table, segments, segment, TASKS).to(tl.int32))
    return entry(table, segments, segment, COUNT).to(tl.int32) - surely, surely


@triton.jit
def _limits(
    table, segments, segment, start, choices, state, histograms, between,
    LIMITED: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Returns three numbers about the elements between the two magnitudes: the number of these elements in earlier
    pieces, the number of eligible elements among them, and the smallest magnitude that is sent.

    All three are 0 without LIMITED. between: the counts from `count_chosen` without LIMITED.
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
        low = load_state(state, segment, LOW)
        least = tl.where(load_state(state, segment, HIGH) - low == 1, low, least)
    return before, eligible, least


@triton.jit
def _classes(bits, valid, low, high, before, eligible, least, LIMITED: tl.constexpr):
    """Returns two masks of 0 and 1: the first mask marks certain elements, and the second mask marks tied elements. The
    third result is `before` for the next block."""
    surely = (valid & (bits >= high)).to(tl.int32)
    between = (valid & (bits >= low)).to(tl.int32) - surely
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
    """Counts the certain elements and the tied elements in each piece. Certain elements are sent in any case, and of
    the tied elements only the first ones are sent."""
    segment, start, end = piece(table, segments, tasks, PIECE)
    whole = load_state(state, segment, WHOLE)
    low = load_state(state, segment, LOW)
    high = load_state(state, segment, HIGH)
    before, eligible, least = _limits(
        table, segments, segment, start, choices, state, histograms, between, LIMITED, PIECE
    )
    entries = looked_at(counts, start, end, whole)
    surely = tl.zeros((BLOCK,), tl.int32)
    tied = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, entries, BLOCK):
        number = first + tl.arange(0, BLOCK)
        i, valid = looked_at_where(places, start, number, entries, whole, PIECE)
        bits = bits_of(made(table, segments, segment, i, valid, KEEPS, FROM))
        surely_here, tied_here, before = _classes(bits, valid, low, high, before, eligible, least, LIMITED)
        surely += surely_here
        tied += tied_here
    piece_counts = pointer(chosen, tl.int32) + 2 * tl.program_id(0)
    tl.store(piece_counts, tl.sum(surely, 0))
    tl.store(piece_counts + 1, tl.sum(tied, 0))


@triton.jit
def count_eligible_digits(
    table, segments, tasks, flag, choices, state, histograms, places, counts, between,
    DIGIT: tl.constexpr, KEEPS: tl.constexpr, FROM: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds up the histogram of one digit of the eligible elements between the two magnitudes. Does nothing if no number
    lies between the two magnitudes."""
    segment, start, end = piece(table, segments, tasks, PIECE)
    low = load_state(state, segment, LOW)
    high = load_state(state, segment, HIGH)
    if high - low > 1:
        whole = load_state(state, segment, WHOLE)
        _, before = _counted(between, entry(table, segments, segment, FIRST_TASK), start // PIECE)
        missing, surely = _missing(table, segments, segment, between)
        eligible = entry(choices, segments, segment, MOST).to(tl.int32) - surely
        digits = digits_of(state, histograms, segment, missing, start == 0, ELIGIBLE, DIGIT)
        entries = looked_at(counts, start, end, whole)
        histogram = tl.zeros((BINS,), tl.int32)
        for first in range(0, entries, BLOCK):
            number = first + tl.arange(0, BLOCK)
            i, valid = looked_at_where(places, start, number, entries, whole, PIECE)
            bits = bits_of(made(table, segments, segment, i, valid, KEEPS, FROM))
            reaches = (valid & (bits >= low) & (bits < high)).to(tl.int32)
            counted = (reaches != 0) & (tl.cumsum(reaches, 0) + before <= eligible)
            before += tl.sum(reaches, 0)
            digit, higher = digit_of(bits, DIGIT)
            histogram += tl.histogram(digit, BINS, mask=counted & (higher == digits))
        add_histogram(histograms, segment, histogram, ELIGIBLE, DIGIT)


@triton.jit
def _packed(chosen, first, count, missing):
    """The number of elements that are sent from `count` pieces, and the number of tied elements among them."""
    surely, tied = _counted(chosen, first, count)
    tied = tl.minimum(tied, missing)
    return surely + tied, tied


@triton.jit
def pack_chosen(
    table, segments, tasks, flag, choices, state, histograms, places, counts, between, chosen, payload,
    TYPE: tl.constexpr, MASKING: tl.constexpr, LIMITED: tl.constexpr,
    KEEPS: tl.constexpr, FROM: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Packs values, indices and the counts of blocks, and subtracts the sent values from x. MASKING: whether to set the
    velocity of the sent elements to zero."""
    segment, start, end = piece(table, segments, tasks, PIECE)
    whole = load_state(state, segment, WHOLE)
    low = load_state(state, segment, LOW)
    high = load_state(state, segment, HIGH)
    before, eligible, least = _limits(
        table, segments, segment, start, choices, state, histograms, between, LIMITED, PIECE
    )
    missing, _ = _missing(table, segments, segment, chosen)
    first_task = entry(table, segments, segment, FIRST_TASK)
    packed, tied_sent = _packed(chosen, first_task, start // PIECE, missing)
    counts_at = entry(table, segments, segment, BLOCK_COUNTS)
    if counts_at >= 0:
        if start % COUNTED == 0:
            ended = entry(table, segments, segment, COUNT).to(tl.int32)
            if start + COUNTED < size_of(table, segments, segment):
                ended, _ = _packed(chosen, first_task, (start + COUNTED) // PIECE, missing)
            tl.store(pointer(payload + counts_at, tl.int32) + start // COUNTED, ended - packed)
    values = payload + entry(table, segments, segment, VALUES)
    indices = payload + entry(table, segments, segment, INDICES)
    width = entry(table, segments, segment, INDEX_BYTES)
    entries = looked_at(counts, start, end, whole)
    for first in range(0, entries, BLOCK):
        number = first + tl.arange(0, BLOCK)
        i, valid = looked_at_where(places, start, number, entries, whole, PIECE)
        x = made(table, segments, segment, i, valid, KEEPS, FROM)
        surely, selected, before = _classes(bits_of(x), valid, low, high, before, eligible, least, LIMITED)
        selected = surely + selected * (tied_sent + tl.cumsum(selected, 0) <= missing).to(tl.int32)
        tied_sent += tl.sum(selected - surely, 0)
        sends = selected != 0
        at = packed + tl.cumsum(selected, 0) - selected
        packed += tl.sum(selected, 0)
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
            x_pointer = floats(table, segments, segment, X) + i
            if FROM == SOURCED:
                x = tl.load(x_pointer, mask=sends, other=0.0)
            tl.store(x_pointer, x - sent, mask=sends)
        if MASKING:
            tl.store(floats(table, segments, segment, NEXT_VELOCITY) + i, tl.zeros((BLOCK,), tl.float32), mask=sends)


def _choices(on, selection):
    """The parameters of the selection for each tensor. `sparse_select` defines the numbers of the rows.

    The selection first finds a floor: a magnitude below which no element is a candidate. The floor is found in a random
    sample of the elements. Two parameters are the number of cache lines in this sample, and the place of the floor in
    the sorted sample. This place is several standard deviations beyond the expected place, so that the floor hardly
    ever leaves too few candidates. A tensor has no sample if it is small, or if nearly all its elements are sent.
    """
    sizes = on.segments["size"]
    lines = np.where(sizes > _SMALL, np.minimum(_SAMPLE, sizes // 4) // LINE.value, 0)
    expected = selection.need / sizes * lines * LINE.value
    rank = np.ceil(1.5 * expected + 4 * np.sqrt(expected) + 4).astype(np.int64)
    rank[3 * rank > lines * LINE.value] = 0
    return np.stack([selection.need, selection.most, selection.reaching, selection.stride, np.maximum(lines, 1), rank])


def _encode(on, selection, payload):
    tensors, tasks = len(on.segments), on.tasks
    method = {"METHOD": selection.method}
    choices = on.static("choices", lambda: _choices(on, selection))
    state = on.scratch("state", tensors * STATE.value, "int32")
    histograms = on.scratch("histograms", tensors * QUERIES.value * 4 * BINS.value, "int32")
    places, counts = on.passing(tasks * on.piece, "int16"), on.scratch("noted", tasks, "int32")
    sums, largest = on.scratch("magnitudes", tasks, "float64"), on.scratch("largest", tasks, "int32")
    between, chosen = on.scratch("between", 2 * tasks, "int32"), on.scratch("chosen", 2 * tasks, "int32")
    read = on.constants_of_made() | {"BLOCK": on.piece if on.interpreting else _LOOKED_AT}
    noted = choices, state, histograms, places, counts
    on.tensors(draw_floors, *on.arguments_of_x(), choices, state, histograms, SAMPLE=_SAMPLE, **on.constants_of_x())
    on.pieces(note_candidates, choices, state, places, counts, sums, largest, x=True, **method)
    for digit in range(4):
        on.pieces(count_digits, *noted, DIGIT=digit, **method, **read)
    on.tensors(decide, choices, state, histograms, sums, largest, selection.rounds, **method)
    if selection.limited:
        on.pieces(count_chosen, *noted, 0, between, LIMITED=False, **read)
        for digit in range(4):
            on.pieces(count_eligible_digits, *noted, between, DIGIT=digit, **read)
    on.pieces(count_chosen, *noted, between, chosen, LIMITED=selection.limited, **read)
    on.pieces(
        pack_chosen, *noted, between, chosen, payload, TYPE=selection.type, MASKING=bool(selection.masks),
        LIMITED=selection.limited, **read,
    )  # fmt: skip


KERNELS = {"sparse_encode": _encode}
"""For each operation, by name, the function that launches its kernels. `sparse_encode` also does the work of the C
kernel `sparse_keep`."""
