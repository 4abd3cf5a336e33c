"""Finds two magnitudes for each tensor. A sparsifier sends all elements above the upper magnitude, and no elements
below the lower magnitude.

A sample of x gives a floor, which is a magnitude. The elements that reach the floor are the candidates. There are
somewhat more candidates than sent elements: about 2 % of all elements are candidates if 1 % are sent. The pass that
computes x records the places of the candidates, and all later passes read only the candidates. If the sample was
misleading, all elements of the tensor are candidates. The launches do not depend on the data.

Magnitudes are compared by their bits. The magnitude that k elements reach is found digit by digit, beginning with the
highest digit. In each pass, a histogram counts the values of the next digit among the elements that begin with the
digits found so far. A method may search for a threshold that at least k and at most `most` elements reach. To test a
threshold, it is enough to compare it with two magnitudes: the magnitude that k elements reach, and the magnitude that
`most` + 1 elements reach. Therefore the search (`decide`) does not count elements itself.
"""

from hvdcomp.kernels import tables
from hvdcomp.kernels.cuda.language import tl, triton
from hvdcomp.kernels.cuda.x import (
    COUNT,
    FIRST_TASK,
    INFINITE,
    TASKS,
    entry,
    made,
    magnitude,
    make_x,
    piece,
    pointer,
    report,
    size_of,
)

BISECT = tl.constexpr(tables.BISECT)
FROM_SAMPLE = tl.constexpr(tables.SAMPLED)
KTH_LARGEST = tl.constexpr(tables.KTH_LARGEST)

# Rows of `sparse._choices`, with one number for each tensor.
NEED = tl.constexpr(0)
MOST = tl.constexpr(1)
REACHING = tl.constexpr(2)
STRIDE = tl.constexpr(3)
LINES = tl.constexpr(4)
RANK = tl.constexpr(5)

# Slots of the state of each tensor, int32, which the kernels fill.
NOTED = tl.constexpr(0)  # number of candidates
SAMPLED = tl.constexpr(1)  # number of candidates in the method's own sample
FLOOR = tl.constexpr(2)  # the bits of the floor; 0 if all elements are candidates
LOW = tl.constexpr(3)  # the bits of the lower magnitude; all sent elements reach this magnitude
HIGH = tl.constexpr(4)  # the bits of the upper magnitude; all elements that reach this magnitude are sent
WHOLE = tl.constexpr(5)  # whether the kernels must look at all elements
# Two words for each query and number of digits: the digits found so far, and the rank that is still wanted among the
# elements that begin with these digits.
DIGITS = tl.constexpr(8)
STATE = tl.constexpr(8 + 2 * 4 * 4)

# Each query asks for the magnitude that a certain number of elements reach. A method uses the first one, two or three
# queries. The last query chooses among eligible elements.
QUERIES = tl.constexpr(4)
ELIGIBLE = tl.constexpr(3)

LINE = tl.constexpr(16)  # number of adjacent elements in the sample
BINS = tl.constexpr(256)  # number of values of a digit; the digits are bits 23 to 30, 15 to 22, 7 to 14, 0 to 6
SPAN = tl.constexpr(512)  # number of pieces of a tensor whose numbers a program adds up at a time
MOST_BITS = tl.constexpr(0x7FFFFFFE)


@triton.jit
def bits_of(x):
    """The bits of magnitudes, limited so that the next larger integer still fits into int32."""
    return tl.minimum(magnitude(x), MOST_BITS)


@triton.jit
def load_state(state, segment, SLOT: tl.constexpr):
    """Reads a slot of a tensor's state."""
    return tl.load(pointer(state, tl.int32) + segment * STATE + SLOT)


@triton.jit
def store_state(state, segment, SLOT: tl.constexpr, value):
    """Writes a slot of a tensor's state."""
    tl.store(pointer(state, tl.int32) + segment * STATE + SLOT, value)


@triton.jit
def draw_floors(
    table, segments, factor, decay, momentum, choices, state, histograms,
    KEEPS: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, FROM: tl.constexpr,
    SAMPLE: tl.constexpr,
):  # fmt: skip
    """Finds the floor of each tensor in a sample, and sets the tensor's counters to zero.

    The tensor is divided into equal parts, and the sample has one cache line from each part. The places of these lines
    are chosen so that the sample does not always have the same rows or channels of the tensor.
    """
    segment = tl.program_id(0)
    counts = pointer(histograms, tl.int32) + segment.to(tl.int64) * (QUERIES * 4 * BINS)
    tl.store(counts + tl.arange(0, QUERIES * 4 * BINS), tl.zeros((QUERIES * 4 * BINS,), tl.int32))
    store_state(state, segment, NOTED, 0)
    store_state(state, segment, SAMPLED, 0)
    floor = tl.zeros((), tl.int32)
    rank = entry(choices, segments, segment, RANK)
    if rank > 0:
        lines = entry(choices, segments, segment, LINES).to(tl.int32)
        part = size_of(table, segments, segment) // LINE // lines
        number = tl.arange(0, SAMPLE)
        line = number // LINE
        inside = line < lines
        place = (((line + 1).to(tl.uint32) * 0x9E3779B9).to(tl.int64) * part >> 32).to(tl.int32)
        i = (line * part + place) * LINE + number % LINE
        x = make_x(table, segments, segment, i, inside, factor, decay, momentum, KEEPS, MOMENTUM, NESTEROV, FROM)
        bits = tl.where(inside, bits_of(x), -1)
        for step in range(0, 20):  # further bits would hardly reduce the number of candidates
            higher = floor | (1 << (30 - step))
            floor = tl.where(tl.sum((bits >= higher).to(tl.int32), 0) >= rank, higher, floor)
        floor = tl.maximum(floor, 1)  # if most elements are zero, all nonzero elements are candidates
    store_state(state, segment, FLOOR, floor)


@triton.jit
def note_candidates(
    table, segments, tasks, flag, factor, decay, momentum, choices, state, places, counts, sums, largest,
    KEEPS: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, FROM: tl.constexpr,
    METHOD: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes x, and records the number and the places of the candidates in each piece.

    sums, largest: the sum (float64) and the maximum (bits) of the magnitudes of each piece, written only if the method
    needs them.
    """
    segment, start, end = piece(table, segments, tasks, PIECE)
    task = tl.program_id(0)
    floor = load_state(state, segment, FLOOR)
    piece_places = pointer(places, tl.int16) + task.to(tl.int64) * PIECE
    stride = entry(choices, segments, segment, STRIDE).to(tl.int32)
    most = tl.zeros((BLOCK,), tl.int32)
    noted = tl.zeros((), tl.int32)
    sampled = tl.zeros((BLOCK,), tl.int32)
    magnitudes = tl.zeros((BLOCK,), tl.float64)
    for block in range(start, end, BLOCK):
        i = block + tl.arange(0, BLOCK)
        inside = i < end
        x = make_x(table, segments, segment, i, inside, factor, decay, momentum, KEEPS, MOMENTUM, NESTEROV, FROM)
        bits = tl.where(inside, bits_of(x), 0)
        most = tl.maximum(most, bits)
        if METHOD == BISECT:
            magnitudes += tl.where(inside, tl.abs(x), 0.0).to(tl.float64)
        if floor > 0:
            candidates = (bits >= floor).to(tl.int32)
            at = piece_places + noted + tl.cumsum(candidates, 0) - candidates
            tl.store(at, (i - start).to(tl.int16), mask=candidates != 0)
            noted += tl.sum(candidates, 0)
            if METHOD == FROM_SAMPLE:
                sampled += tl.where(i % stride == 0, candidates, 0)
    report(flag, most)
    tl.store(pointer(counts, tl.int32) + task, noted)
    tensor_state = pointer(state, tl.int32) + segment * STATE
    tl.atomic_add(tensor_state + NOTED, noted, sem="relaxed")
    if METHOD == FROM_SAMPLE:
        tl.atomic_add(tensor_state + SAMPLED, tl.sum(sampled, 0), sem="relaxed")
    if METHOD != KTH_LARGEST:
        tl.store(pointer(largest, tl.int32) + task, tl.max(most, 0))
    if METHOD == BISECT:
        tl.store(pointer(sums, tl.float64) + task, tl.sum(magnitudes, 0))


@triton.jit
def _misled(choices, segments, state, segment, METHOD: tl.constexpr):
    """1 if the kernels must look at all elements because the candidates are too few to answer all queries; otherwise
    0."""
    few = load_state(state, segment, NOTED) < entry(choices, segments, segment, NEED)
    if METHOD == FROM_SAMPLE:
        few = few | (load_state(state, segment, SAMPLED) < entry(choices, segments, segment, REACHING))
    return (few | (load_state(state, segment, FLOOR) == 0)).to(tl.int32)


@triton.jit
def looked_at(counts, start, end, whole):
    """The number of elements of this program's piece that the kernels look at."""
    noted = tl.load(pointer(counts, tl.int32) + tl.program_id(0))
    return tl.where(whole != 0, end - start, noted)


@triton.jit
def looked_at_where(places, start, number, entries, whole, PIECE: tl.constexpr):
    """The places in the tensor of the elements with these numbers, and a mask of the valid elements. The numbers count
    only the elements that the kernels look at."""
    valid = number < entries
    piece_places = pointer(places, tl.int16) + tl.program_id(0).to(tl.int64) * PIECE
    noted = tl.load(piece_places + number, mask=number < tl.where(whole != 0, 0, entries), other=0).to(tl.int32)
    return start + tl.where(number * 0 + whole != 0, number, noted), valid


@triton.jit
def digit_of(bits, DIGIT: tl.constexpr):
    """One digit of each magnitude, and a number that consists of all higher digits."""
    if DIGIT == 3:
        digit, higher = bits & 127, bits >> 7
    else:
        # both shifts together are at most 31: a longer shift is undefined
        digit, higher = (bits >> (23 - 8 * DIGIT)) & 255, bits >> (23 - 8 * DIGIT) >> 8
    return digit, higher


@triton.jit
def digits_of(state, histograms, segment, needed, stores, QUERY: tl.constexpr, DIGIT: tl.constexpr):
    """The first `DIGIT` digits of the magnitude that `needed` elements reach.

    The previous launch made the histogram of the last of these digits, and one of its programs stored the digits before
    it.
    stores: whether this program stores the digits for the next launch.
    """
    digits = tl.zeros((), tl.int32)
    if DIGIT > 0:
        histogram = (segment.to(tl.int64) * QUERIES + QUERY) * 4 + DIGIT - 1
        bins = tl.arange(0, BINS)
        counts = tl.load(pointer(histograms, tl.int32) + histogram * BINS + bins)
        if DIGIT > 1:
            digits = load_state(state, segment, DIGITS + 8 * QUERY + 2 * (DIGIT - 1))
            needed = load_state(state, segment, DIGITS + 8 * QUERY + 2 * (DIGIT - 1) + 1)
        reaching = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
        digit = tl.max(tl.where(reaching >= needed, bins, 0), 0)
        if DIGIT == 4:
            digits = (digits << 7) | digit
        else:
            digits = (digits << 8) | digit
            if stores:
                store_state(state, segment, DIGITS + 8 * QUERY + 2 * DIGIT, digits)
                still_needed = needed - tl.sum(tl.where(bins > digit, counts, 0), 0)
                store_state(state, segment, DIGITS + 8 * QUERY + 2 * DIGIT + 1, still_needed)
    return digits


@triton.jit
def add_histogram(histograms, segment, counts, QUERY: tl.constexpr, DIGIT: tl.constexpr):
    """Adds this program's counts to a histogram."""
    histogram = (segment.to(tl.int64) * QUERIES + QUERY) * 4 + DIGIT
    at = pointer(histograms, tl.int32) + histogram * BINS + tl.arange(0, BINS)
    # With any other memory order, all memory accesses would wait.
    tl.atomic_add(at, counts, mask=counts > 0, sem="relaxed")


@triton.jit
def _needed_by(table, choices, segments, segment, QUERY: tl.constexpr):
    """The number of elements that must reach the magnitude of a query. This is k, `most` + 1, or a share of the
    method's sample, depending on the query."""
    if QUERY == 0:
        needed = entry(table, segments, segment, COUNT)
    elif QUERY == 1:
        needed = entry(choices, segments, segment, MOST) + 1
    else:
        needed = entry(choices, segments, segment, REACHING)
    return needed.to(tl.int32)


@triton.jit
def count_digits(
    table, segments, tasks, flag, choices, state, histograms, places, counts,
    METHOD: tl.constexpr, DIGIT: tl.constexpr,
    KEEPS: tl.constexpr, FROM: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds up the histogram of one digit for each query of the method."""
    segment, start, end = piece(table, segments, tasks, PIECE)
    whole = _misled(choices, segments, state, segment, METHOD)
    entries = looked_at(counts, start, end, whole)
    stride = entry(choices, segments, segment, STRIDE).to(tl.int32)
    for query in tl.static_range(METHOD + 1):
        needed = _needed_by(table, choices, segments, segment, query)
        digits = digits_of(state, histograms, segment, needed, start == 0, query, DIGIT)
        histogram = tl.zeros((BINS,), tl.int32)
        for first in range(0, entries, BLOCK):
            number = first + tl.arange(0, BLOCK)
            i, valid = looked_at_where(places, start, number, entries, whole, PIECE)
            bits = bits_of(made(table, segments, segment, i, valid, KEEPS, FROM))
            digit, higher = digit_of(bits, DIGIT)
            counted = valid & (higher == digits)
            if query == 2:
                counted = counted & (i % stride == 0)
            histogram += tl.histogram(digit, BINS, mask=counted)
        add_histogram(histograms, segment, histogram, query, DIGIT)


@triton.jit
def _bits_of_threshold(threshold):
    return threshold.to(tl.float32).to(tl.int32, bitcast=True)


@triton.jit
def _narrowed(threshold, low, high, goes_on, least, beyond):
    """Tests a threshold in the same way as `Bracket` in `hvdcomp/compressors/thresholds.py`. Returns the nearest
    thresholds on either side, whether too few elements reach the threshold, and whether the search continues."""
    bits = _bits_of_threshold(threshold)
    too_few = bits > least
    too_many = bits <= beyond
    low = tl.where((goes_on != 0) & too_many & (threshold > low), threshold, low)
    high = tl.where((goes_on != 0) & (bits > beyond) & (threshold < high), threshold, high)
    return low, high, too_few, tl.where(too_few | too_many, goes_on, 0)


@triton.jit
def decide(table, segments, choices, state, histograms, sums, largest, rounds, METHOD: tl.constexpr):
    """Sets `LOW` and `HIGH` of each tensor. These two thresholds select exactly the k largest elements. If the search
    found no good threshold, `LOW` and `HIGH` are the nearest thresholds that select more and fewer than k elements."""
    segment = tl.program_id(0)
    least = digits_of(state, histograms, segment, 0, False, 0, 4)
    lowest = least
    highest = least + 1
    whole = _misled(choices, segments, state, segment, METHOD)
    if METHOD != KTH_LARGEST:
        first = entry(table, segments, segment, FIRST_TASK)
        tasks = entry(table, segments, segment, TASKS).to(tl.int32)
        most = tl.zeros((SPAN,), tl.int32)
        total = tl.zeros((SPAN,), tl.float64)
        for block in range(0, tasks, SPAN):
            number = block + tl.arange(0, SPAN)
            most = tl.maximum(most, tl.load(pointer(largest, tl.int32) + first + number, mask=number < tasks, other=0))
            if METHOD == BISECT:
                total += tl.load(pointer(sums, tl.float64) + first + number, mask=number < tasks, other=0.0)
        top = tl.max(most, 0)
        peak = top.to(tl.float32, bitcast=True).to(tl.float64)
        size = size_of(table, segments, segment)
        beyond = digits_of(state, histograms, segment, 0, False, 1, 4)
        # If `most` is at least the size of the tensor, the number of elements is never too large.
        beyond = tl.where(entry(choices, segments, segment, MOST) >= size, -1, beyond)
        low = tl.zeros((), tl.float64)
        high = low + float("inf")
        goes_on = tl.full((), 1, tl.int32)
        if METHOD == BISECT:
            mean = tl.sum(total, 0) / size.to(tl.float64)
            lower = tl.zeros((), tl.float64)
            upper = lower + 1.0
            for _ in range(0, rounds):
                middle = (lower + upper) * 0.5
                threshold = mean + middle * (peak - mean)
                low, high, too_few, goes_on = _narrowed(threshold, low, high, goes_on, least, beyond)
                lower = tl.where(too_few, lower, middle)
                upper = tl.where(too_few, middle, upper)
        else:
            sample = digits_of(state, histograms, segment, 0, False, 2, 4)
            threshold = sample.to(tl.float32, bitcast=True).to(tl.float64)
            for _ in range(0, rounds):
                low, high, too_few, goes_on = _narrowed(threshold, low, high, goes_on, least, beyond)
                following = tl.where(too_few, threshold * 0.8, threshold * 1.3)
                tried = tl.minimum(high, peak)
                untried = (following > low) & (following <= tried)
                threshold = tl.where(untried, following, (low + tried) * 0.5)
        # A threshold that at least k elements reach, but not too many, is as good as the k-th largest magnitude: k of
        # these elements are sent.
        missed = (_bits_of_threshold(high) > least) & (top < INFINITE)
        lowest = tl.where(missed, _bits_of_threshold(low), least)
        highest = tl.where(missed, _bits_of_threshold(high), highest)
        whole = tl.where(lowest < load_state(state, segment, FLOOR), 1, whole)
    store_state(state, segment, LOW, lowest)
    store_state(state, segment, HIGH, highest)
    store_state(state, segment, WHOLE, whole)
