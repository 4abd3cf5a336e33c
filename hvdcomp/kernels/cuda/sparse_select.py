"""Between which magnitudes lies what a sparsifier sends of each tensor: from a sample, candidates, and histograms.

A sample of x gives a floor that a little more elements reach than matter. The pass that makes x notes the places of
these candidates, about 2 in 100 elements where 1 in 100 is sent, and everything after it looks at the candidates alone.
Where the sample has misled, all elements of the tensor are candidates; the same kernels run, whatever the numbers are.

Magnitudes are compared by their bits. The magnitude that k elements reach is found digit by digit, from the highest: a
histogram of a digit's values among the elements with the digits found so far says which value comes next. A method that
searches for a threshold asks of each threshold whether less than k elements reach it, and whether more than `most` do.
The magnitudes that k and that `most` + 1 elements reach answer that for all thresholds at once, so nothing is counted
in the search itself (`decide`).
"""

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

# What `sparse._choices` says of each tensor.
NEED = tl.constexpr(0)
MOST = tl.constexpr(1)
REACHING = tl.constexpr(2)
STRIDE = tl.constexpr(3)
LINES = tl.constexpr(4)
RANK = tl.constexpr(5)

# What the kernels find out of each tensor, int32.
NOTED = tl.constexpr(0)  # number of candidates
SAMPLED = tl.constexpr(1)  # of these, the number in the sample of the method itself
FLOOR = tl.constexpr(2)  # bits; 0 if there are no candidates but all elements
LOW = tl.constexpr(3)  # bits that what is sent reaches
HIGH = tl.constexpr(4)  # bits; all elements that reach them are sent
WHOLE = tl.constexpr(5)  # whether all elements must be looked at
DIGITS = tl.constexpr(8)  # of each query and number of digits: the digits, and how many elements of them are asked for
STATE = tl.constexpr(8 + 2 * 4 * 4)

# The queries, of which a method asks the first ones; and last, what a choice among eligible elements asks.
QUERIES = tl.constexpr(4)
ELIGIBLE = tl.constexpr(3)

LINE = tl.constexpr(16)  # elements of the sample that lie behind each other
BINS = tl.constexpr(256)  # values of a digit: bits 23 to 30, 15 to 22, 7 to 14, 0 to 6
SPAN = tl.constexpr(512)  # pieces of a tensor whose numbers a program adds up at a time
MOST_BITS = tl.constexpr(0x7FFFFFFE)


@triton.jit
def bits_of(x):
    """The bits of magnitudes, of which there is always a next larger number."""
    return tl.minimum(magnitude(x), MOST_BITS)


@triton.jit
def known(state, segment, SLOT: tl.constexpr):
    """What was found out of a tensor."""
    return tl.load(pointer(state, tl.int32) + segment * STATE + SLOT)


@triton.jit
def tell(state, segment, SLOT: tl.constexpr, value):
    """Notes it."""
    tl.store(pointer(state, tl.int32) + segment * STATE + SLOT, value)


@triton.jit
def draw_floors(
    table, segments, factor, decay, momentum, choices, state, histograms,
    KEEPS: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, FROM: tl.constexpr,
    SAMPLE: tl.constexpr,
):  # fmt: skip
    """The floor of each tensor; and everything that is added up begins at zero.

    The sample is some lines, one out of each of equal parts of the tensor, at a place in it that follows no rows or
    channels.
    """
    segment = tl.program_id(0)
    counts = pointer(histograms, tl.int32) + segment.to(tl.int64) * (QUERIES * 4 * BINS)
    tl.store(counts + tl.arange(0, QUERIES * 4 * BINS), tl.zeros((QUERIES * 4 * BINS,), tl.int32))
    tell(state, segment, NOTED, 0)
    tell(state, segment, SAMPLED, 0)
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
        for step in range(0, 20):  # with the bits below, hardly fewer elements would be candidates
            higher = floor | (1 << (30 - step))
            floor = tl.where(tl.sum((bits >= higher).to(tl.int32), 0) >= rank, higher, floor)
        floor = tl.maximum(floor, 1)  # where most are zeros, all others are candidates
    tell(state, segment, FLOOR, floor)


@triton.jit
def note_candidates(
    table, segments, tasks, flag, factor, decay, momentum, choices, state, places, counts, sums, largest,
    KEEPS: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, FROM: tl.constexpr,
    METHOD: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Makes x, and notes the places, in each piece, of elements that reach the floor, and how many they are.

    sums, largest: of the magnitudes of each piece, float64, and bits; where the method asks for them.
    """
    segment, start, end = piece(table, segments, tasks, PIECE)
    task = tl.program_id(0)
    floor = known(state, segment, FLOOR)
    own = pointer(places, tl.int16) + task.to(tl.int64) * PIECE
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
        if METHOD == 1:
            magnitudes += tl.where(inside, tl.abs(x), 0.0).to(tl.float64)
        if floor > 0:
            ones = (bits >= floor).to(tl.int32)
            tl.store(own + noted + tl.cumsum(ones, 0) - ones, (i - start).to(tl.int16), mask=ones != 0)
            noted += tl.sum(ones, 0)
            if METHOD == 2:
                sampled += tl.where(i % stride == 0, ones, 0)
    report(flag, most)
    tl.store(pointer(counts, tl.int32) + task, noted)
    found = pointer(state, tl.int32) + segment * STATE
    tl.atomic_add(found + NOTED, noted, sem="relaxed")
    if METHOD == 2:
        tl.atomic_add(found + SAMPLED, tl.sum(sampled, 0), sem="relaxed")
    if METHOD != 0:
        tl.store(pointer(largest, tl.int32) + task, tl.max(most, 0))
    if METHOD == 1:
        tl.store(pointer(sums, tl.float64) + task, tl.sum(magnitudes, 0))


@triton.jit
def _misled(choices, segments, state, segment, METHOD: tl.constexpr):
    """1 if all elements must be looked at, because the candidates do not answer everything, else 0."""
    few = known(state, segment, NOTED) < entry(choices, segments, segment, NEED)
    if METHOD == 2:
        few = few | (known(state, segment, SAMPLED) < entry(choices, segments, segment, REACHING))
    return (few | (known(state, segment, FLOOR) == 0)).to(tl.int32)


@triton.jit
def looked_at(counts, start, end, whole):
    """How many elements of this program's piece are looked at."""
    noted = tl.load(pointer(counts, tl.int32) + tl.program_id(0))
    return tl.where(whole != 0, end - start, noted)


@triton.jit
def looked_at_where(places, start, number, entries, whole, PIECE: tl.constexpr):
    """Where these are in the tensor, by their numbers; and whether there are such."""
    there = number < entries
    own = pointer(places, tl.int16) + tl.program_id(0).to(tl.int64) * PIECE
    noted = tl.load(own + number, mask=number < tl.where(whole != 0, 0, entries), other=0).to(tl.int32)
    return start + tl.where(number * 0 + whole != 0, number, noted), there


@triton.jit
def digit_of(bits, DIGIT: tl.constexpr):
    """A digit of magnitudes, and all digits above it."""
    if DIGIT == 3:
        digit, higher = bits & 127, bits >> 7
    else:
        digit, higher = (bits >> (23 - 8 * DIGIT)) & 255, bits >> (23 - 8 * DIGIT) >> 8  # a shift by 31 is the most
    return digit, higher


@triton.jit
def digits_of(state, histograms, segment, wanted, stores, QUERY: tl.constexpr, DIGIT: tl.constexpr):
    """The first `DIGIT` digits of the least magnitude that `wanted` elements reach.

    The histogram of the last of these digits was made by the launch before; what came before it, a program of that
    launch has noted. stores: whether this program is to note it for the next.
    """
    digits = tl.zeros((), tl.int32)
    if DIGIT > 0:
        own = (segment.to(tl.int64) * QUERIES + QUERY) * 4 + DIGIT - 1
        bins = tl.arange(0, BINS)
        counts = tl.load(pointer(histograms, tl.int32) + own * BINS + bins)
        if DIGIT > 1:
            digits = known(state, segment, DIGITS + 8 * QUERY + 2 * (DIGIT - 1))
            wanted = known(state, segment, DIGITS + 8 * QUERY + 2 * (DIGIT - 1) + 1)
        reaching = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
        digit = tl.max(tl.where(reaching >= wanted, bins, 0), 0)
        if DIGIT == 4:
            digits = (digits << 7) | digit
        else:
            digits = (digits << 8) | digit
            if stores:
                tell(state, segment, DIGITS + 8 * QUERY + 2 * DIGIT, digits)
                left = wanted - tl.sum(tl.where(bins > digit, counts, 0), 0)
                tell(state, segment, DIGITS + 8 * QUERY + 2 * DIGIT + 1, left)
    return digits


@triton.jit
def add_histogram(histograms, segment, counts, QUERY: tl.constexpr, DIGIT: tl.constexpr):
    """Adds what this program has counted."""
    own = (segment.to(tl.int64) * QUERIES + QUERY) * 4 + DIGIT
    at = pointer(histograms, tl.int32) + own * BINS + tl.arange(0, BINS)
    tl.atomic_add(at, counts, mask=counts > 0, sem="relaxed")  # another order would make all memory wait


@triton.jit
def _asked_for(table, choices, segments, segment, QUERY: tl.constexpr):
    """How many elements shall reach the magnitude that a query asks for: k; one more than a threshold may let through;
    or a share of the method's sample."""
    if QUERY == 0:
        wanted = entry(table, segments, segment, COUNT)
    elif QUERY == 1:
        wanted = entry(choices, segments, segment, MOST) + 1
    else:
        wanted = entry(choices, segments, segment, REACHING)
    return wanted.to(tl.int32)


@triton.jit
def count_digits(
    table, segments, tasks, flag, choices, state, histograms, places, counts,
    METHOD: tl.constexpr, DIGIT: tl.constexpr,
    KEEPS: tl.constexpr, FROM: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The histogram of a digit, for each query of the method."""
    segment, start, end = piece(table, segments, tasks, PIECE)
    whole = _misled(choices, segments, state, segment, METHOD)
    entries = looked_at(counts, start, end, whole)
    stride = entry(choices, segments, segment, STRIDE).to(tl.int32)
    for query in tl.static_range(METHOD + 1):
        wanted = _asked_for(table, choices, segments, segment, query)
        digits = digits_of(state, histograms, segment, wanted, start == 0, query, DIGIT)
        found = tl.zeros((BINS,), tl.int32)
        for first in range(0, entries, BLOCK):
            number = first + tl.arange(0, BLOCK)
            i, there = looked_at_where(places, start, number, entries, whole, PIECE)
            bits = bits_of(made(table, segments, segment, i, there, KEEPS, FROM))
            digit, higher = digit_of(bits, DIGIT)
            asked = there & (higher == digits)
            if query == 2:
                asked = asked & (i % stride == 0)
            found += tl.histogram(digit, BINS, mask=asked)
        add_histogram(histograms, segment, found, query, DIGIT)


@triton.jit
def _bits_of_threshold(threshold):
    return threshold.to(tl.float32).to(tl.int32, bitcast=True)


@triton.jit
def _narrowed(threshold, low, high, goes_on, least, beyond):
    """A test of a threshold, as of `Bracket` in `hvdcomp/compressors/thresholds.py`: the nearest thresholds on either
    side, whether too few elements reach it, and whether the search goes on."""
    bits = _bits_of_threshold(threshold)
    too_few = bits > least
    too_many = bits <= beyond
    low = tl.where((goes_on != 0) & too_many & (threshold > low), threshold, low)
    high = tl.where((goes_on != 0) & (bits > beyond) & (threshold < high), threshold, high)
    return low, high, too_few, tl.where(too_few | too_many, goes_on, 0)


@triton.jit
def decide(table, segments, choices, state, histograms, sums, largest, rounds, METHOD: tl.constexpr):
    """Sets `LOW` and `HIGH` of each tensor: either so that exactly the k largest are meant, or, where the search found
    no good threshold, to the thresholds on either side."""
    segment = tl.program_id(0)
    least = digits_of(state, histograms, segment, 0, False, 0, 4)
    lowest = least
    highest = least + 1
    whole = _misled(choices, segments, state, segment, METHOD)
    if METHOD != 0:
        first = entry(table, segments, segment, FIRST_TASK)
        tasks = entry(table, segments, segment, TASKS).to(tl.int32)
        most = tl.zeros((SPAN,), tl.int32)
        total = tl.zeros((SPAN,), tl.float64)
        for block in range(0, tasks, SPAN):
            number = block + tl.arange(0, SPAN)
            most = tl.maximum(most, tl.load(pointer(largest, tl.int32) + first + number, mask=number < tasks, other=0))
            if METHOD == 1:
                total += tl.load(pointer(sums, tl.float64) + first + number, mask=number < tasks, other=0.0)
        top = tl.max(most, 0)
        peak = top.to(tl.float32, bitcast=True).to(tl.float64)
        size = size_of(table, segments, segment)
        beyond = digits_of(state, histograms, segment, 0, False, 1, 4)
        beyond = tl.where(entry(choices, segments, segment, MOST) >= size, -1, beyond)  # never too many
        low = tl.zeros((), tl.float64)
        high = low + float("inf")
        goes_on = tl.full((), 1, tl.int32)
        if METHOD == 1:
            mean = tl.sum(total, 0) / size.to(tl.float64)
            left = tl.zeros((), tl.float64)
            right = left + 1.0
            for _ in range(0, rounds):
                middle = (left + right) * 0.5
                threshold = mean + middle * (peak - mean)
                low, high, too_few, goes_on = _narrowed(threshold, low, high, goes_on, least, beyond)
                left = tl.where(too_few, left, middle)
                right = tl.where(too_few, middle, right)
        else:
            sample = digits_of(state, histograms, segment, 0, False, 2, 4)
            threshold = sample.to(tl.float32, bitcast=True).to(tl.float64)
            for _ in range(0, rounds):
                low, high, too_few, goes_on = _narrowed(threshold, low, high, goes_on, least, beyond)
                following = tl.where(too_few, threshold * 0.8, threshold * 1.3)
                tried = tl.minimum(high, peak)
                untried = (following > low) & (following <= tried)
                threshold = tl.where(untried, following, (low + tried) * 0.5)
        # A threshold that k elements reach, and not too many, is as good as the k-th largest: k of these are sent.
        missed = (_bits_of_threshold(high) > least) & (top < INFINITE)
        lowest = tl.where(missed, _bits_of_threshold(low), least)
        highest = tl.where(missed, _bits_of_threshold(high), highest)
        whole = tl.where(lowest < known(state, segment, FLOOR), 1, whole)
    tell(state, segment, LOW, lowest)
    tell(state, segment, HIGH, highest)
    tell(state, segment, WHOLE, whole)
