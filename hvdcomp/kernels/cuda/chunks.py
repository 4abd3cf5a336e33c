"""Encoding of the largest elements of each chunk of neighbours, and decoding of their mean over ranks.

A full chunk sends `sent_of_chunk` elements, a tensor `count`. `src/isa_sparse_chunked.c` describes the payload. Before
they are packed, the values and places of a tensor begin at `found` of arrays for all tensors. A program works on a
chunk, on a tensor's means, or on a group of codes that are packed together.
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


@triton.jit
def _chunk(table, segments, chunks, chunk):
    """This program's tensor; begin and end of its chunk; first and number of the sent elements of the chunk."""
    chunk_entry = pointer(chunks, tl.int64) + 2 * tl.program_id(0)
    segment = tl.load(chunk_entry)
    number = tl.load(chunk_entry + 1)
    k = entry(table, segments, segment, SENT_OF_CHUNK)
    start = number * chunk
    end = tl.minimum(start + chunk, size_of(table, segments, segment))
    count = (k * (end - start) + chunk - 1) // chunk
    return segment, start.to(tl.int32), end.to(tl.int32), (number * k).to(tl.int32), count.to(tl.int32)


@triton.jit
def chunks_choose(
    table, segments, flag, factor, decay, momentum, chunks, values, places, chunk,
    KEEPS: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, FROM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Makes x of a chunk; stores its largest elements in index order, the first among equal ones."""
    segment, start, end, first, count = _chunk(table, segments, chunks, chunk)
    largest = tl.zeros((BLOCK,), tl.int32)
    for block in range(start, end, BLOCK):
        i = block + tl.arange(0, BLOCK)
        x = make_x(
            table, segments, segment, i, i < end, factor, decay, momentum, KEEPS, MOMENTUM, NESTEROV, FROM
        )
        largest = tl.maximum(largest, magnitude(x))
    report(flag, largest)
    tl.debug_barrier()  # what other threads of this program wrote is read next
    low = tl.zeros((), tl.int32)  # at least `count` elements reach low; fewer, `above`, reach high
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
    """Four means of a tensor's values, and the number of the mean that replaces each value."""
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
        centred = tl.load(tensor_values + i, mask=i < count, other=0.0).to(tl.float64) - mean
        squares += tl.where(i < count, centred * centred, 0.0)
    sigma = tl.sqrt(tl.sum(squares, 0)) / tl.sqrt(number)
    bin_numbers = tl.arange(0, 4)
    sums = tl.zeros((4, BLOCK), tl.float64)
    numbers = tl.zeros((4, BLOCK), tl.float64)
    for block in range(0, count, BLOCK):
        i = block + tl.arange(0, BLOCK)
        value = tl.load(tensor_values + i, mask=i < count, other=0.0).to(tl.float64)
        centred = value - mean
        bin = (centred >= -2.25 * sigma).to(tl.int32) + (centred >= -0.75 * sigma).to(tl.int32)
        bin += (centred >= 0.75 * sigma).to(tl.int32)
        tl.store(pointer(bins, tl.uint8) + at + i, bin.to(tl.uint8), mask=i < count)
        in_bin = (bin[None, :] == bin_numbers[:, None]) & (i < count)[None, :]
        sums += tl.where(in_bin, value[None, :], 0.0)
        numbers += in_bin.to(tl.float64)
    of_bin = tl.sum(numbers, 1)
    means = tl.where(of_bin > 0, tl.sum(sums, 1) * (1 / tl.where(of_bin > 0, of_bin, 1.0)), 0.0)
    to = pointer(payload + entry(table, segments, segment, VALUES), tl.float32)
    tl.store(to + bin_numbers, means.to(tl.float32))


@triton.jit
def place_bits(table, segments, segment, chunk):
    """Bits of a place in a chunk."""
    most = tl.minimum(chunk, size_of(table, segments, segment)) - 1
    bits = tl.zeros((), tl.int32) + 1
    while (most >> bits) > 0:
        bits += 1
    return bits


@triton.jit
def _pack_plane(codes, CODE: tl.constexpr, count, start, shift, place, bits, payload, WIDTH: tl.constexpr):
    """Packs a plane of a group of codes, if their bits have a plane of this width; returns the shift of the next plane
    and where it begins."""
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
    HOW: tl.constexpr, MASKING: tl.constexpr, KEEPS: tl.constexpr,
):  # fmt: skip
    """Packs a group of values and places, and subtracts the sent values from x. MASKING: ends the momentum of these
    elements."""
    group_entry = pointer(groups, tl.int64) + 2 * tl.program_id(0)
    segment = tl.load(group_entry)
    start = tl.load(group_entry + 1).to(tl.int32)
    count = entry(table, segments, segment, COUNT).to(tl.int32)
    at = entry(table, segments, segment, FOUND)
    i = start + tl.arange(0, GROUP)
    valid = i < count
    value = tl.load(pointer(values, tl.float32) + at + i, mask=valid, other=0.0)
    wire = payload + entry(table, segments, segment, VALUES)
    if HOW == FOUR_MEANS:
        bin = tl.load(pointer(bins, tl.uint8) + at + i, mask=valid, other=0).to(tl.int32)
        value = tl.load(pointer(wire, tl.float32) + bin)
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
    if HOW == FOUR_MEANS:
        _pack_plane(bins + at, tl.uint8, count, start, shift * 0, to, 2, payload, 2)


@triton.jit
def chunks_decode(
    table, segments, flag, chunks, payloads, ranks, row: tl.int64, share, chunk,
    HOW: tl.constexpr, SENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The mean of a chunk over ranks, added in rank order. SENT: elements of a rank that are added at a time."""
    segment, start, end, first, sent_of_chunk = _chunk(table, segments, chunks, chunk)
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
        tl.debug_barrier()  # what other threads of this program wrote is read next
        payload = payload_of(payloads, rank, row)
        wire = payload + entry(table, segments, segment, VALUES)
        for block in range(0, sent_of_chunk, SENT):
            valid = block + tl.arange(0, SENT) < sent_of_chunk
            i = first + block + tl.arange(0, SENT)
            place = packed_code(payload, low, count, tl.minimum(bits, 8), i, valid)
            place |= packed_code(payload, high, count, tl.maximum(bits - 8, 0), i, valid) << 8
            if HOW == FOUR_MEANS:
                bin = packed_code(payload, bins_at, count, 2, i, valid)
                value = tl.load(pointer(wire, tl.float32) + bin, mask=valid, other=0.0)
            elif HOW == IN_HALF:
                value = tl.load(pointer(wire, tl.float16) + i, mask=valid, other=0.0).to(tl.float32)
            else:
                value = tl.load(pointer(wire, tl.float32) + i, mask=valid, other=0.0)
            to = result + start + place
            total = tl.load(to, mask=valid, other=0.0) + value * share
            tl.store(to, total, mask=valid)
            largest = tl.maximum(largest, tl.where(valid, magnitude(total), 0))
    report(flag, largest)


@triton.jit
def _bytes_of_codes(count, bits):
    """Bytes of packed codes."""
    size = tl.where(bits & 8 != 0, count, 0) + tl.where(bits & 4 != 0, bytes_of(count, 4), 0)
    return size + tl.where(bits & 2 != 0, bytes_of(count, 2), 0) + tl.where(bits & 1 != 0, bytes_of(count, 1), 0)


def _parts(on, name, counts, step):
    """Pairs of a tensor and a start 0, step, 2 step ... below the tensor's count, int64 (parts, 2)."""

    def make():
        pairs = [(tensor, at) for tensor, count in enumerate(counts.tolist()) for at in range(0, count, step)]
        return np.array(pairs, np.int64)

    return on.static(name, make)


def _chunks(on, chunk):
    return _parts(on, "chunks", -(-on.segments["size"] // chunk), 1)


def _encode(on, chunk, how, masks, values, places, payload):
    chunks, tensors = _chunks(on, chunk), len(on.segments)
    groups = _parts(on, "groups", on.segments["count"], GROUP.value)
    bins = on.scratch("bins", values.shape[0], "uint8")
    on.launch(
        chunks_choose, chunks.shape[0], on.rows, tensors, on.flag, *on.arguments_of_x(), chunks, values, places, chunk,
        BLOCK=on.block, **on.constants_of_x(),
    )  # fmt: skip
    if how == tables.FOUR_MEANS:
        on.tensors(chunks_means, values, bins, payload, BLOCK=on.block // 2)
    on.launch(
        chunks_pack, groups.shape[0], on.rows, tensors, groups, values, places, bins, payload, chunk,
        HOW=how, MASKING=bool(masks), KEEPS=on.keeps > 0,
    )  # fmt: skip


def _decode(on, chunk, how, first, ranks, row):
    chunks = _chunks(on, chunk)
    sent = min(on.block, triton.next_power_of_2(int(on.segments["sent_of_chunk"].max())))
    on.launch(
        chunks_decode, chunks.shape[0], on.rows, len(on.segments), on.flag, chunks, first, ranks, row, 1 / ranks, chunk,
        HOW=how, SENT=sent, BLOCK=on.block,
    )  # fmt: skip


KERNELS = {"chunks_encode": _encode, "chunks_decode": _decode}
"""Launchers by kernel name."""
