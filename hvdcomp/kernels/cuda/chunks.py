"""Encodes the largest elements of each chunk, and decodes their mean over the ranks. A chunk is a run of neighboring
elements.

`sent_of_chunk` elements of each full chunk are sent, and `count` elements of each tensor. `src/isa_sparse_chunked.c`
describes the payload. Two arrays contain the values and the places of the sent elements of all tensors before they are
packed. The field `found` of a tensor is the index at which its part of these arrays begins. Depending on the kernel, a
program works on a run of chunks (a single chunk, unless chunks are short), on the means of one tensor, on a part of a
tensor's values, or on a group of codes that are packed together.
"""

import numpy as np

from hvdcomp.kernels import tables
from hvdcomp.kernels.cuda.codes import GROUP, bytes_of, field_of, packed_bytes, packed_code
from hvdcomp.kernels.cuda.language import tl, triton
from hvdcomp.kernels.cuda.sparse_select import MOST_BITS, bits_of
from hvdcomp.kernels.cuda.x import (
    COUNT,
    FOUND,
    HALF,
    INDICES,
    NEXT_VELOCITY,
    RESULT,
    SENT_OF_CHUNK,
    VALUES,
    X,
    entry,
    floats,
    held,
    left_of,
    made,
    magnitude,
    make_x,
    payload_of,
    pointer,
    report,
    size_of,
)

FOUR_MEANS = tl.constexpr(tables.FOUR_MEANS)
IN_HALF = tl.constexpr(tables.IN_HALF)
IN_SIGN = tl.constexpr(tables.IN_SIGN)

SHORT = 256
"""If chunks have at most this number of elements, a program works on several chunks."""


@triton.jit
def _run(table, segments, runs, run, chunk):
    """Returns this program's tensor; the start and the end of the program's run of chunks; the first sent element of
    the run; and the number of sent elements. run: the number of chunks in a run."""
    run_entry = pointer(runs, tl.int64) + 2 * tl.program_id(0)
    segment = tl.load(run_entry)
    number = tl.load(run_entry + 1)
    k = entry(table, segments, segment, SENT_OF_CHUNK)
    start = number * chunk
    end = tl.minimum(start + run * chunk, size_of(table, segments, segment))
    count = (end - start) // chunk * k + ((end - start) % chunk * k + chunk - 1) // chunk
    return segment, start.to(tl.int32), end.to(tl.int32), (number * k).to(tl.int32), count.to(tl.int32)


@triton.jit
def chunks_choose_short(
    table, segments, flag, factor, decay, momentum, runs, run, chunk, values, places,
    KEEPS: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, FROM: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Does the work of `chunks_choose` for a run of short chunks (at most WIDTH elements each), ROWS chunks at a
    time."""
    segment, start, end, first, _ = _run(table, segments, runs, run, chunk)
    k = entry(table, segments, segment, SENT_OF_CHUNK).to(tl.int32)
    at = entry(table, segments, segment, FOUND) + first
    largest = tl.zeros((ROWS, WIDTH), tl.int32)
    for block in range(start, end, ROWS * chunk):
        begin = block + tl.arange(0, ROWS)[:, None] * chunk
        i = begin + tl.arange(0, WIDTH)[None, :]
        inside = i < tl.minimum(begin + chunk, end)
        x = make_x(table, segments, segment, i, inside, factor, decay, momentum, KEEPS, MOMENTUM, NESTEROV, FROM)
        largest = tl.maximum(largest, magnitude(x))
        bits = tl.where(inside, bits_of(x), -1)
        length = tl.maximum(tl.minimum(end - begin, chunk), 0)
        count = (k * length + chunk - 1) // chunk
        # In each chunk, at least `count` elements reach `low`. `above` elements reach `high`, and `above` < `count`.
        low = length * 0
        high = low + MOST_BITS + 1
        above = low
        for _ in range(31):  # magnitudes have 31 bits, so after 31 halvings high is low + 1
            middle = low + (high - low) // 2
            reaching = tl.expand_dims(tl.sum((bits >= middle).to(tl.int32), 1), 1)
            above = tl.where(reaching < count, reaching, above)
            high = tl.where(reaching < count, middle, high)
            low = tl.where(reaching < count, low, middle)
        ties = (bits == low).to(tl.int32)
        sends = (bits > low) | ((ties != 0) & (tl.cumsum(ties, 1) <= count - above))
        sends = sends & inside
        sent_counts = sends.to(tl.int32)
        to = at + (begin - start) // chunk * k + tl.cumsum(sent_counts, 1) - sent_counts
        tl.store(pointer(values, tl.float32) + to, x, mask=sends)
        tl.store(pointer(places, tl.int16) + to, (i - begin).to(tl.int16), mask=sends)
    report(flag, tl.max(largest, 1))


@triton.jit
def chunks_choose(
    table, segments, flag, factor, decay, momentum, runs, run, chunk, values, places,
    KEEPS: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, FROM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes x for one chunk, and stores its largest elements in index order. Among equal elements, the first ones
    are stored."""
    segment, start, end, first, count = _run(table, segments, runs, run, chunk)
    largest = tl.zeros((BLOCK,), tl.int32)
    for block in range(start, end, BLOCK):
        i = block + tl.arange(0, BLOCK)
        x = make_x(table, segments, segment, i, i < end, factor, decay, momentum, KEEPS, MOMENTUM, NESTEROV, FROM)
        largest = tl.maximum(largest, magnitude(x))
    report(flag, largest)
    tl.debug_barrier()  # the next reads need values that other threads of this program have written
    # At least `count` elements reach `low`. `above` elements reach `high`, and `above` < `count`.
    low = tl.zeros((), tl.int32)
    high = low + MOST_BITS + 1
    above = low
    while high - low > 1:
        middle = low + (high - low) // 2
        reaching = tl.zeros((BLOCK,), tl.int32)
        for block in range(start, end, BLOCK):
            i = block + tl.arange(0, BLOCK)
            x = made(table, segments, segment, i, i < end, KEEPS, FROM)
            reaching += ((i < end) & (bits_of(x) >= middle)).to(tl.int32)
        total = tl.sum(reaching, 0)
        above = tl.where(total < count, total, above)
        high = tl.where(total < count, middle, high)
        low = tl.where(total < count, low, middle)
    at = entry(table, segments, segment, FOUND) + first
    equal = tl.zeros((), tl.int32)
    for block in range(start, end, BLOCK):
        i = block + tl.arange(0, BLOCK)
        x = made(table, segments, segment, i, i < end, KEEPS, FROM)
        bits = bits_of(x)
        ties = ((i < end) & (bits == low)).to(tl.int32)
        sends = (i < end) & ((bits > low) | ((ties != 0) & (equal + tl.cumsum(ties, 0) <= count - above)))
        sent_counts = sends.to(tl.int32)
        to = at + tl.cumsum(sent_counts, 0) - sent_counts
        tl.store(pointer(values, tl.float32) + to, x, mask=sends)
        tl.store(pointer(places, tl.int16) + to, (i - start).to(tl.int16), mask=sends)
        equal += tl.sum(ties, 0)
        at += tl.sum(sent_counts, 0)


@triton.jit
def chunks_means(table, segments, values, bins, payload, BLOCK: tl.constexpr):
    """Computes four means of a tensor's values, and for each value the number of the mean that replaces it."""
    segment = tl.program_id(0)
    count = entry(table, segments, segment, COUNT).to(tl.int32)
    at = entry(table, segments, segment, FOUND)
    tensor_values = pointer(values, tl.float32) + at
    total = tl.zeros((BLOCK,), tl.float64)
    for block in range(0, count, BLOCK):
        i = block + tl.arange(0, BLOCK)
        total += tl.load(tensor_values + i, mask=i < count, other=0.0).to(tl.float64)
    number = count.to(tl.float64)
    mean = tl.sum(total, 0) / number
    squares = tl.zeros((BLOCK,), tl.float64)
    for block in range(0, count, BLOCK):
        i = block + tl.arange(0, BLOCK)
        centered = tl.load(tensor_values + i, mask=i < count, other=0.0).to(tl.float64) - mean
        squares += tl.where(i < count, centered * centered, 0.0)
    sigma = tl.sqrt(tl.sum(squares, 0)) / tl.sqrt(number)
    bin_numbers = tl.arange(0, 4)
    sums = tl.zeros((4, BLOCK), tl.float64)
    numbers = tl.zeros((4, BLOCK), tl.float64)
    for block in range(0, count, BLOCK):
        i = block + tl.arange(0, BLOCK)
        value = tl.load(tensor_values + i, mask=i < count, other=0.0).to(tl.float64)
        centered = value - mean
        bin = (centered >= -2.25 * sigma).to(tl.int32) + (centered >= -0.75 * sigma).to(tl.int32)
        bin += (centered >= 0.75 * sigma).to(tl.int32)
        tl.store(pointer(bins, tl.uint8) + at + i, bin.to(tl.uint8), mask=i < count)
        in_bin = (bin[None, :] == bin_numbers[:, None]) & (i < count)[None, :]
        sums += tl.where(in_bin, value[None, :], 0.0)
        numbers += in_bin.to(tl.float64)
    of_bin = tl.sum(numbers, 1)
    means = tl.where(of_bin > 0, tl.sum(sums, 1) * (1 / tl.where(of_bin > 0, of_bin, 1.0)), 0.0)
    to = pointer(payload + entry(table, segments, segment, VALUES), tl.float32)
    tl.store(to + bin_numbers, means.to(tl.float32))


@triton.jit
def chunks_signs(table, segments, parts, values, signs, sums, PIECE: tl.constexpr, BLOCK: tl.constexpr):
    """Computes the signs of a part of a tensor's values (1 for plus), and the sum of their magnitudes."""
    part = pointer(parts, tl.int64) + 2 * tl.program_id(0)
    segment = tl.load(part)
    start = tl.load(part + 1).to(tl.int32)
    end = tl.minimum(start + PIECE, entry(table, segments, segment, COUNT).to(tl.int32))
    at = entry(table, segments, segment, FOUND)
    total = tl.zeros((BLOCK,), tl.float64)
    for block in range(start, end, BLOCK):
        i = block + tl.arange(0, BLOCK)
        value = tl.load(pointer(values, tl.float32) + at + i, mask=i < end, other=0.0)
        tl.store(pointer(signs, tl.uint8) + at + i, (value >= 0).to(tl.uint8), mask=i < end)
        total += tl.abs(value).to(tl.float64)
    tl.store(pointer(sums, tl.float64) + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def chunks_magnitude(table, segments, ends, sums, payload, BLOCK: tl.constexpr):
    """Computes the mean magnitude of a tensor's values. ends: for each tensor, the number of its first part and the
    number after its last part."""
    segment = tl.program_id(0)
    start = tl.load(pointer(ends, tl.int64) + segment)
    end = tl.load(pointer(ends, tl.int64) + segment + 1)
    total = tl.zeros((BLOCK,), tl.float64)
    for block in range(start, end, BLOCK):
        i = block + tl.arange(0, BLOCK)
        total += tl.load(pointer(sums, tl.float64) + i, mask=i < end, other=0.0)
    mean = tl.sum(total, 0) * (1 / entry(table, segments, segment, COUNT).to(tl.float64))
    tl.store(pointer(payload + entry(table, segments, segment, VALUES), tl.float32), mean.to(tl.float32))


@triton.jit
def _mean_of(wire, code, valid, HOW: tl.constexpr):
    """The value that a code stands for: one of four means, or the mean magnitude with a sign."""
    if HOW == FOUR_MEANS:
        return tl.load(pointer(wire, tl.float32) + code, mask=valid, other=0.0)
    else:  # noqa: RET505 - Triton compiles one branch of the two
        mean = tl.load(pointer(wire, tl.float32))
        return tl.where(code != 0, mean, mean * -1.0)  # Triton computes -x as 0 - x, which never gives -0.0


@triton.jit
def place_bits(table, segments, segment, chunk):
    """The number of bits that encode the place of an element in its chunk."""
    most = tl.minimum(chunk, size_of(table, segments, segment)) - 1
    bits = tl.zeros((), tl.int32) + 1
    while (most >> bits) > 0:
        bits += 1
    return bits


@triton.jit
def _pack_plane(codes, CODE: tl.constexpr, count, start, shift, place, bits, payload, WIDTH: tl.constexpr):
    """Packs one plane of a group of codes. A plane has `WIDTH` neighboring bits of each code. If the codes have no
    plane of this width, packs nothing. Returns `shift` and `place` for the next plane."""
    if bits & WIDTH != 0:
        block = start // 8 * WIDTH
        begin, length, of_group, first = packed_bytes(block, count, WIDTH, 64 * WIDTH)
        packed = tl.zeros((64 * WIDTH,), tl.int32)
        for field in tl.static_range(0, 8 // WIDTH):
            i, valid = field_of(begin, length, of_group, first, count, field)
            code = tl.load(pointer(codes, CODE) + i, mask=valid, other=0).to(tl.int32)
            packed |= ((code >> shift) & ((1 << WIDTH) - 1)) << (field * WIDTH)
        byte = block + tl.arange(0, 64 * WIDTH)
        tl.store(pointer(payload, tl.uint8) + place + byte, packed.to(tl.uint8), mask=first < of_group)
        shift += WIDTH
        place += bytes_of(count, WIDTH)
    return shift, place


@triton.jit
def chunks_pack(
    table, segments, groups, values, places, bins, payload, chunk,
    HOW: tl.constexpr, CODE_BITS: tl.constexpr, MASKING: tl.constexpr, KEEPS: tl.constexpr,
):  # fmt: skip
    """Packs a group of values and places, and subtracts the sent values from x. MASKING: whether to set the velocity of
    these elements to zero."""
    group_entry = pointer(groups, tl.int64) + 2 * tl.program_id(0)
    segment = tl.load(group_entry)
    start = tl.load(group_entry + 1).to(tl.int32)
    count = entry(table, segments, segment, COUNT).to(tl.int32)
    at = entry(table, segments, segment, FOUND)
    i = start + tl.arange(0, GROUP)
    valid = i < count
    value = tl.load(pointer(values, tl.float32) + at + i, mask=valid, other=0.0)
    wire = payload + entry(table, segments, segment, VALUES)
    if CODE_BITS > 0:
        bin = tl.load(pointer(bins, tl.uint8) + at + i, mask=valid, other=0).to(tl.int32)
        value = _mean_of(wire, bin, valid, HOW)
    elif HOW == IN_HALF:
        half = held(value, HALF).to(tl.float16)
        tl.store(pointer(wire, tl.float16) + i, half, mask=valid)
        value = half.to(tl.float32)
    else:
        tl.store(pointer(wire, tl.float32) + i, value, mask=valid)
    if KEEPS:
        place = tl.load(pointer(places, tl.int16) + at + i, mask=valid, other=0).to(tl.int32) & 0xFFFF
        element = i // entry(table, segments, segment, SENT_OF_CHUNK).to(tl.int32) * chunk + place
        kept = floats(table, segments, segment, X) + element
        tl.store(kept, left_of(tl.load(kept, mask=valid, other=0.0), value), mask=valid)
        if MASKING:
            velocity = floats(table, segments, segment, NEXT_VELOCITY) + element
            tl.store(velocity, tl.zeros((GROUP,), tl.float32), mask=valid)
    bits = place_bits(table, segments, segment, chunk)
    codes = places + 2 * at
    shift = tl.zeros((), tl.int32)
    to = entry(table, segments, segment, INDICES)
    shift, to = _pack_plane(codes, tl.int16, count, start, shift, to, tl.where(bits >= 8, 8, 0), payload, 8)
    bits = tl.where(bits >= 8, bits - 8, bits)
    shift, to = _pack_plane(codes, tl.int16, count, start, shift, to, bits, payload, 8)
    shift, to = _pack_plane(codes, tl.int16, count, start, shift, to, bits, payload, 4)
    shift, to = _pack_plane(codes, tl.int16, count, start, shift, to, bits, payload, 2)
    shift, to = _pack_plane(codes, tl.int16, count, start, shift, to, bits, payload, 1)
    if CODE_BITS > 0:
        _pack_plane(bins + at, tl.uint8, count, start, shift * 0, to, CODE_BITS, payload, CODE_BITS)


@triton.jit
def chunks_decode(
    table, segments, flag, runs, run, chunk, payloads, ranks, row: tl.int64, share,
    HOW: tl.constexpr, CODE_BITS: tl.constexpr, SENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes the mean of a run of chunks over the ranks, which are added in rank order. SENT: number of elements of
    one rank that are added at a time."""
    segment, start, end, first, sent = _run(table, segments, runs, run, chunk)
    k = entry(table, segments, segment, SENT_OF_CHUNK).to(tl.int32)
    count = entry(table, segments, segment, COUNT).to(tl.int32)
    result = floats(table, segments, segment, RESULT)
    for block in range(start, end, BLOCK):
        i = block + tl.arange(0, BLOCK)
        tl.store(result + i, tl.zeros((BLOCK,), tl.float32), mask=i < end)
    bits = place_bits(table, segments, segment, chunk)
    low = entry(table, segments, segment, INDICES)
    high = low + _bytes_of_codes(count, tl.minimum(bits, 8))
    bins_at = high + _bytes_of_codes(count, tl.maximum(bits - 8, 0))
    largest = tl.zeros((SENT,), tl.int32)
    for rank in range(0, ranks):
        tl.debug_barrier()  # the next reads need values that other threads of this program have written
        payload = payload_of(payloads, rank, row)
        wire = payload + entry(table, segments, segment, VALUES)
        for block in range(0, sent, SENT):
            valid = block + tl.arange(0, SENT) < sent
            i = first + block + tl.arange(0, SENT)
            place = packed_code(payload, low, count, tl.minimum(bits, 8), i, valid)
            place |= packed_code(payload, high, count, tl.maximum(bits - 8, 0), i, valid) << 8
            if CODE_BITS > 0:
                value = _mean_of(wire, packed_code(payload, bins_at, count, CODE_BITS, i, valid), valid, HOW)
            elif HOW == IN_HALF:
                value = tl.load(pointer(wire, tl.float16) + i, mask=valid, other=0.0).to(tl.float32)
            else:
                value = tl.load(pointer(wire, tl.float32) + i, mask=valid, other=0.0)
            to = result + i // k * chunk + place
            total = tl.load(to, mask=valid, other=0.0) + value * share
            tl.store(to, total, mask=valid)
            largest = tl.maximum(largest, tl.where(valid, magnitude(total), 0))
    report(flag, largest)


@triton.jit
def _bytes_of_codes(count, bits):
    """The number of bytes of packed codes."""
    size = tl.where(bits & 8 != 0, count, 0) + tl.where(bits & 4 != 0, bytes_of(count, 4), 0)
    return size + tl.where(bits & 2 != 0, bytes_of(count, 2), 0) + tl.where(bits & 1 != 0, bytes_of(count, 1), 0)


def _parts(on, name, counts, step):
    """Pairs (tensor, start) as int64 of shape (parts, 2). The starts for a tensor are 0, step, 2 step and so on, as
    long as they are below its count."""

    def make():
        pairs = [(tensor, at) for tensor, count in enumerate(counts.tolist()) for at in range(0, count, step)]
        return np.array(pairs, np.int64)

    return on.static(name, make)


def _runs(on, chunk):
    """The runs of chunks, and the number of chunks in a run."""
    run = on.piece // chunk if chunk <= SHORT else 1
    return _parts(on, "runs", -(-on.segments["size"] // chunk), run), run


def _encode(on, chunk, how, masks, values, places, payload):
    runs, run = _runs(on, chunk)
    groups = _parts(on, "groups", on.segments["count"], GROUP.value)
    bins = on.scratch("bins", values.shape[0], "uint8")
    kernel, constants = chunks_choose, {"BLOCK": on.block}
    if chunk <= SHORT:
        width = triton.next_power_of_2(chunk)
        kernel, constants = chunks_choose_short, {"ROWS": on.block // width, "WIDTH": width}
    on.launch(
        kernel, runs.shape[0], on.rows, len(on.segments), on.flag, *on.arguments_of_x(), runs, run, chunk,
        values, places, **constants, **on.constants_of_x(),
    )  # fmt: skip
    if how == tables.FOUR_MEANS:
        on.tensors(chunks_means, values, bins, payload, BLOCK=on.block // 2)
    elif how == tables.IN_SIGN:
        _find_magnitudes(on, values, bins, payload)
    on.launch(
        chunks_pack, groups.shape[0], on.rows, len(on.segments), groups, values, places, bins, payload, chunk,
        HOW=how, CODE_BITS=tables.CODE_BITS.get(how, 0), MASKING=bool(masks), KEEPS=on.keeps > 0,
    )  # fmt: skip


def _find_magnitudes(on, values, signs, payload):
    counts = on.segments["count"]
    parts = _parts(on, "parts", counts, on.piece)
    ends = on.static("ends of parts", lambda: np.append(0, np.cumsum(-(-counts // on.piece))))
    sums = on.scratch("sums", parts.shape[0], "float64")
    on.launch(
        chunks_signs, parts.shape[0], on.rows, len(on.segments), parts, values, signs, sums,
        PIECE=on.piece, BLOCK=on.block,
    )  # fmt: skip
    on.tensors(chunks_magnitude, ends, sums, payload, BLOCK=on.block)


def _decode(on, chunk, how, first, ranks, row):
    runs, run = _runs(on, chunk)
    sent = min(on.block // 2, triton.next_power_of_2(run * int(on.segments["sent_of_chunk"].max())))
    on.launch(
        chunks_decode, runs.shape[0], on.rows, len(on.segments), on.flag, runs, run, chunk, first, ranks, row,
        1 / ranks, HOW=how, CODE_BITS=tables.CODE_BITS.get(how, 0), SENT=sent, BLOCK=on.block,
    )  # fmt: skip


KERNELS = {"chunks_encode": _encode, "chunks_decode": _decode}
"""For each operation, by name, the function that launches its kernels."""
