"""The k largest elements of each tensor, exactly, of equal ones the first; and the mean of what the ranks sent.

`src/sparse.h` says where things lie in a payload. Magnitudes are compared by their bits. The k-th largest is found
digit by digit, from the highest: a histogram of a digit's values says which of them it has, and only elements of that
digit go into the next histogram. The first histogram is made with x. The second pass notes the places of all elements
that can still matter (about twice k), and everything after it looks at these alone. No guess is made that might have
to be made good: whatever the numbers, the same kernels run.
"""

import numpy as np

from hvdcomp.kernels.cuda.language import tl, triton
from hvdcomp.kernels.cuda.x import (
    COUNT,
    FIRST_TASK,
    NEXT_VELOCITY,
    PLACE0,
    PLACE1,
    PLACE2,
    PLACE3,
    RESULT,
    TASKS,
    X,
    entry,
    floats,
    made,
    magnitude,
    make_x,
    piece,
    pointer,
    report,
    size_of,
)

BINS = tl.constexpr(2048)  # values of a digit: bits 20 to 30, 9 to 19, 0 to 8
COUNTED = tl.constexpr(65536)  # elements of a block of `sparse_payload`

CHUNK = 1024
"""Elements of a payload that a program takes."""


@triton.jit
def _add_histogram(histograms, segment, counts):
    bins = tl.arange(0, BINS)
    tl.atomic_add(pointer(histograms, tl.int32) + segment * BINS + bins, counts, mask=counts > 0)


@triton.jit
def first_digits(
    table, segments, tasks, flag, factor, decay, momentum, histograms,
    KEEPS: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, SOURCED: tl.constexpr,
    PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x, and the histogram of its first digit."""
    segment, start, end = piece(table, segments, tasks, PIECE)
    largest = tl.zeros((BLOCK,), tl.int32)
    counts = tl.zeros((BINS,), tl.int32)
    for block in range(start, end, BLOCK):
        i = block + tl.arange(0, BLOCK)
        inside = i < end
        x = make_x(table, segments, segment, i, inside, factor, decay, momentum, KEEPS, MOMENTUM, NESTEROV, SOURCED)
        bits = magnitude(x)
        largest = tl.maximum(largest, bits)
        counts += tl.histogram(bits >> 20, BINS, mask=inside)
    _add_histogram(histograms, segment, counts)
    report(flag, largest)


@triton.jit
def choose_digit(table, segments, histograms, found, FIRST: tl.constexpr, BITS: tl.constexpr):
    """The next digit of each tensor's k-th largest magnitude. found: of each tensor its digits so far, and how many
    elements of these digits are to be sent."""
    segment = tl.program_id(0)
    bins = tl.arange(0, BINS)
    counts = tl.load(pointer(histograms, tl.int32) + segment * BINS + bins)
    state = pointer(found, tl.int32) + 2 * segment
    if FIRST:
        digits = tl.zeros((), tl.int32)
        wanted = entry(table, segments, segment, COUNT).to(tl.int32)
    else:
        digits = tl.load(state)
        wanted = tl.load(state + 1)
    reaching = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
    digit = tl.max(tl.where(reaching >= wanted, bins, 0), 0)
    above = tl.sum(tl.where(bins > digit, counts, 0), 0)
    tl.store(state, (digits << BITS) | digit)
    tl.store(state + 1, wanted - above)


@triton.jit
def note_places(
    table, segments, tasks, flag, histograms, found, places, counts,
    KEEPS: tl.constexpr, SOURCED: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The places, in each piece, of elements whose first digit is that of the k-th largest or above, and how many they
    are; and the histogram of the second digit."""
    segment, start, end = piece(table, segments, tasks, PIECE)
    task = tl.program_id(0)
    first = tl.load(pointer(found, tl.int32) + 2 * segment)
    own = pointer(places, tl.int16) + task.to(tl.int64) * PIECE
    seconds = tl.zeros((BINS,), tl.int32)
    noted = tl.zeros((), tl.int32)
    for block in range(start, end, BLOCK):
        i = block + tl.arange(0, BLOCK)
        inside = i < end
        bits = magnitude(made(table, segments, segment, i, inside, KEEPS, SOURCED))
        digit = bits >> 20
        candidate = inside & (digit >= first)
        ones = candidate.to(tl.int32)
        tl.store(own + noted + tl.cumsum(ones, 0) - ones, (i - start).to(tl.int16), mask=candidate)
        noted += tl.sum(ones, 0)
        seconds += tl.histogram((bits >> 9) & 2047, BINS, mask=candidate & (digit == first))
    _add_histogram(histograms, segment, seconds)
    tl.store(pointer(counts, tl.int32) + task, noted)


@triton.jit
def _noted(places, task, number, there, PIECE: tl.constexpr):
    """Where in their piece the noted elements are."""
    own = pointer(places, tl.int16) + task.to(tl.int64) * PIECE
    return tl.load(own + number, mask=there, other=0).to(tl.int32)


@triton.jit
def last_digits(
    table, segments, tasks, flag, histograms, found, places, counts,
    KEEPS: tl.constexpr, SOURCED: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The histogram of the third digit."""
    segment, start, _ = piece(table, segments, tasks, PIECE)
    task = tl.program_id(0)
    digits = tl.load(pointer(found, tl.int32) + 2 * segment)
    noted = tl.load(pointer(counts, tl.int32) + task)
    thirds = tl.zeros((BINS,), tl.int32)
    for first in range(0, noted, BLOCK):
        number = first + tl.arange(0, BLOCK)
        there = number < noted
        i = start + _noted(places, task, number, there, PIECE)
        bits = magnitude(made(table, segments, segment, i, there, KEEPS, SOURCED))
        thirds += tl.histogram(bits & 511, BINS, mask=there & ((bits >> 9) == digits))
    _add_histogram(histograms, segment, thirds)


@triton.jit
def count_chosen(
    table, segments, tasks, flag, found, places, counts, chosen,
    KEEPS: tl.constexpr, SOURCED: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of each piece, how many elements are larger than the k-th largest, and how many equal to it."""
    segment, start, _ = piece(table, segments, tasks, PIECE)
    task = tl.program_id(0)
    least = tl.load(pointer(found, tl.int32) + 2 * segment)
    noted = tl.load(pointer(counts, tl.int32) + task)
    larger = tl.zeros((), tl.int32)
    equal = tl.zeros((), tl.int32)
    for first in range(0, noted, BLOCK):
        number = first + tl.arange(0, BLOCK)
        there = number < noted
        i = start + _noted(places, task, number, there, PIECE)
        bits = magnitude(made(table, segments, segment, i, there, KEEPS, SOURCED))
        larger += tl.sum((there & (bits > least)).to(tl.int32), 0)
        equal += tl.sum((there & (bits == least)).to(tl.int32), 0)
    tl.store(pointer(chosen, tl.int32) + 2 * task, larger)
    tl.store(pointer(chosen, tl.int32) + 2 * task + 1, equal)


@triton.jit
def add_up_chosen(table, segments, chosen, BLOCK: tl.constexpr):
    """The same of all pieces before each piece of a tensor, in place of what the piece itself has."""
    segment = tl.program_id(0)
    own = pointer(chosen, tl.int32) + 2 * entry(table, segments, segment, FIRST_TASK)
    tasks = entry(table, segments, segment, TASKS)
    larger = tl.zeros((), tl.int32)
    equal = tl.zeros((), tl.int32)
    for block in range(0, tasks, BLOCK):
        i = block + tl.arange(0, BLOCK)
        inside = i < tasks
        larger_here = tl.load(own + 2 * i, mask=inside, other=0)
        equal_here = tl.load(own + 2 * i + 1, mask=inside, other=0)
        tl.store(own + 2 * i, larger + tl.cumsum(larger_here, 0) - larger_here, mask=inside)
        tl.store(own + 2 * i + 1, equal + tl.cumsum(equal_here, 0) - equal_here, mask=inside)
        larger += tl.sum(larger_here, 0)
        equal += tl.sum(equal_here, 0)


@triton.jit
def _packed_before(chosen, task, ties):
    """How many elements of pieces before `task` are sent, and how many of them equal the k-th largest."""
    larger = tl.load(pointer(chosen, tl.int32) + 2 * task)
    equal = tl.minimum(tl.load(pointer(chosen, tl.int32) + 2 * task + 1), ties)
    return larger + equal, equal


@triton.jit
def pack_chosen(
    table, segments, tasks, flag, found, places, counts, chosen, payload,
    KEEPS: tl.constexpr, SOURCED: tl.constexpr, HALF: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Packs values, indices and the counts of blocks."""
    segment, start, _ = piece(table, segments, tasks, PIECE)
    task = tl.program_id(0)
    least = tl.load(pointer(found, tl.int32) + 2 * segment)
    ties = tl.load(pointer(found, tl.int32) + 2 * segment + 1)
    noted = tl.load(pointer(counts, tl.int32) + task)
    packed, equal = _packed_before(chosen, task, ties)
    counts_at = entry(table, segments, segment, PLACE1)
    if counts_at >= 0:
        if start % COUNTED == 0:
            size = size_of(table, segments, segment)
            ended = entry(table, segments, segment, COUNT).to(tl.int32)
            if start + COUNTED < size:
                ended, _ = _packed_before(chosen, task + COUNTED // PIECE, ties)
            tl.store(pointer(payload + counts_at, tl.int32) + start // COUNTED, ended - packed)
    values = payload + entry(table, segments, segment, PLACE0)
    indices = payload + entry(table, segments, segment, PLACE2)
    width = entry(table, segments, segment, PLACE3)
    for first in range(0, noted, BLOCK):
        number = first + tl.arange(0, BLOCK)
        there = number < noted
        i = start + _noted(places, task, number, there, PIECE)
        x = made(table, segments, segment, i, there, KEEPS, SOURCED)
        bits = magnitude(x)
        tied = (there & (bits == least)).to(tl.int32)
        sends = there & ((bits > least) | ((tied != 0) & (equal + tl.cumsum(tied, 0) <= ties)))
        ones = sends.to(tl.int32)
        at = packed + tl.cumsum(ones, 0) - ones
        if HALF:
            bounded = tl.where(x > 65504.0, 65504.0, tl.where(x < -65504.0, -65504.0, x))
            tl.store(pointer(values, tl.float16) + at, bounded.to(tl.float16), mask=sends)
        else:
            tl.store(pointer(values, tl.float32) + at, x, mask=sends)
        if width == 2:
            tl.store(pointer(indices, tl.int16) + at, i.to(tl.int16), mask=sends)
        else:
            tl.store(pointer(indices, tl.int32) + at, i, mask=sends)
        packed += tl.sum(ones, 0)
        equal += tl.sum(tied, 0)


@triton.jit
def _sent(table, segments, segment, first, payload, HALF: tl.constexpr, CHUNK: tl.constexpr):
    """Elements from number `first` on of a payload: their indices and values, and whether there are such."""
    number = first.to(tl.int32) + tl.arange(0, CHUNK)
    there = number < entry(table, segments, segment, COUNT).to(tl.int32)
    values = payload + entry(table, segments, segment, PLACE0)
    counts_at = entry(table, segments, segment, PLACE1)
    indices = payload + entry(table, segments, segment, PLACE2)
    width = entry(table, segments, segment, PLACE3)
    if HALF:
        value = tl.load(pointer(values, tl.float16) + number, mask=there, other=0.0).to(tl.float32)
    else:
        value = tl.load(pointer(values, tl.float32) + number, mask=there, other=0.0)
    i = number
    if width == 2:
        i = tl.load(pointer(indices, tl.int16) + number, mask=there, other=0).to(tl.int32) & 0xFFFF
        if counts_at >= 0:
            ended = tl.zeros((), tl.int32)
            for block in range(0, (size_of(table, segments, segment) - 1) // COUNTED):
                ended += tl.load(pointer(payload + counts_at, tl.int32) + block)
                i += (number >= ended).to(tl.int32) * COUNTED
    else:
        i = tl.load(pointer(indices, tl.int32) + number, mask=there, other=0)
    return i, value, there


@triton.jit
def zero_results(table, segments, tasks, flag, PIECE: tl.constexpr, BLOCK: tl.constexpr):
    """Before the ranks' elements are added."""
    segment, start, end = piece(table, segments, tasks, PIECE)
    for block in range(start, end, BLOCK):
        i = block + tl.arange(0, BLOCK)
        tl.store(floats(table, segments, segment, RESULT) + i, tl.zeros((BLOCK,), tl.float32), mask=i < end)


@triton.jit
def sparse_keep(table, segments, flag, chunks, payload, HALF: tl.constexpr, MASKING: tl.constexpr, CHUNK: tl.constexpr):
    """Takes what this rank sent off x; MASKING: ends the momentum of these elements."""
    chunk = pointer(chunks, tl.int64) + 3 * tl.program_id(0)
    segment = tl.load(chunk)
    i, value, there = _sent(table, segments, segment, tl.load(chunk + 1), payload, HALF, CHUNK)
    x = floats(table, segments, segment, X) + i
    tl.store(x, tl.load(x, mask=there, other=0.0) - value, mask=there)
    if MASKING:
        tl.store(floats(table, segments, segment, NEXT_VELOCITY) + i, value * 0.0, mask=there)


def chunks_of(on, what=lambda tensor: 0):
    """Parts of a payload that programs take: their tensor, the number of their first element, and what else is asked of
    the tensor."""

    def make():
        counts = on.segments["count"].tolist()
        chunks = [(n, first, what(n)) for n, count in enumerate(counts) for first in range(0, count, CHUNK)]
        return np.array(chunks, np.int64)

    return on.static("chunks of a payload", make)


def _encode(on, half, payload):
    tensors = len(on.segments)
    histograms = on.scratch("histograms", 3 * 2048 * tensors, "int32").zero_()
    of = [histograms[2048 * tensors * digit :] for digit in range(3)]
    found = on.scratch("found", 2 * tensors, "int32")
    places = on.scratch("places", on.tasks * on.piece, "int16")
    counts, chosen = on.scratch("noted", on.tasks, "int32"), on.scratch("chosen", 2 * on.tasks, "int32")
    read = {"KEEPS": on.keeps, "SOURCED": on.sourced}
    on.pieces(first_digits, of[0], x=True)
    on.tensors(choose_digit, of[0], found, FIRST=True, BITS=11)
    on.pieces(note_places, of[1], found, places, counts, **read)
    on.tensors(choose_digit, of[1], found, FIRST=False, BITS=11)
    on.pieces(last_digits, of[2], found, places, counts, **read)
    on.tensors(choose_digit, of[2], found, FIRST=False, BITS=9)
    on.pieces(count_chosen, found, places, counts, chosen, **read)
    on.tensors(add_up_chosen, chosen, BLOCK=1024)
    on.pieces(pack_chosen, found, places, counts, chosen, payload, HALF=bool(half), **read)


def _keep(on, payload, half, masking):
    chunks = chunks_of(on)
    on.launch(
        sparse_keep, chunks.shape[0], on.rows, len(on.segments), on.flag, chunks, payload, HALF=bool(half),
        MASKING=bool(masking), CHUNK=CHUNK,
    )  # fmt: skip


KERNELS = {"sparse_encode": _encode, "sparse_keep": _keep}
"""How each is launched, by its name."""
