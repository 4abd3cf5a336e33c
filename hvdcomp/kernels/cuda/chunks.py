"""The largest elements of each chunk of neighbours, and the mean of what all ranks sent.

Of a full chunk place 2 elements are sent, `count` of the tensor. `src/isa_sparse_chunked.c` says where they lie in the
payload; until it is packed, values and places of a tensor lie at place 3 of those of all tensors. Programs work on a
chunk, on a tensor's means, or on a group of codes that are packed together.
"""

import numpy as np

from hvdcomp.kernels.cuda.codes import GROUP, bytes_of, field_of, packed_bytes, packed_code
from hvdcomp.kernels.cuda.language import tl, triton
from hvdcomp.kernels.cuda.sparse_select import MOST_BITS, bits_of
from hvdcomp.kernels.cuda.x import (
    COUNT,
    HALF,
    NEXT_VELOCITY,
    PLACE0,
    PLACE1,
    PLACE2,
    PLACE3,
    RESULT,
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

FOUR_MEANS = tl.constexpr(0)  # how values travel
IN_HALF = tl.constexpr(1)


@triton.jit
def _chunk(table, segments, chunks, chunk):
    """This program's tensor; where its chunk begins and ends; and which of the tensor's sent elements are its own."""
    own = pointer(chunks, tl.int64) + 2 * tl.program_id(0)
    segment = tl.load(own)
    number = tl.load(own + 1)
    k = entry(table, segments, segment, PLACE2)
    start = number * chunk
    end = tl.minimum(start + chunk, size_of(table, segments, segment))
    count = (k * (end - start) + chunk - 1) // chunk
    return segment, start.to(tl.int32), end.to(tl.int32), (number * k).to(tl.int32), count.to(tl.int32)


@triton.jit
def chunks_choose(
    table, segments, flag, factor, decay, momentum, chunks, values, places, chunk,
    KEEPS: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, FROM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x of a chunk, and its largest elements, in their order; of equal ones the first."""
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
    low = tl.zeros((), tl.int32)  # `count` elements reach it; fewer reach high, and so many are above
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
    at = entry(table, segments, segment, PLACE3) + first
    equal = tl.zeros((), tl.int32)
    for block in range(start, end, BLOCK):
        i = block + tl.arange(0, BLOCK)
        x = made(table, segments, segment, i, i < end, KEEPS, FROM)
        bits = bits_of(x)
        ties = ((i < end) & (bits == low)).to(tl.int32)
        sends = (i < end) & ((bits > low) | ((ties != 0) & (equal + tl.cumsum(ties, 0) <= count - above)))
        ones = sends.to(tl.int32)
        to = at + tl.cumsum(ones, 0) - ones
        tl.store(pointer(values, tl.float32) + to, x, mask=sends)
        tl.store(pointer(places, tl.int16) + to, (i - start).to(tl.int16), mask=sends)
        equal += tl.sum(ties, 0)
        at += tl.sum(ones, 0)


@triton.jit
def chunks_means(table, segments, values, bins, payload, BLOCK: tl.constexpr):
    """Four means of a tensor's values, and which of them stands for each."""
    segment = tl.program_id(0)
    count = entry(table, segments, segment, COUNT).to(tl.int32)
    at = entry(table, segments, segment, PLACE3)
    own = pointer(values, tl.float32) + at
    total = tl.zeros((BLOCK,), tl.float64)
    for block in range(0, count, BLOCK):
        i = block + tl.arange(0, BLOCK)
        total += tl.load(own + i, mask=i < count, other=0.0).to(tl.float64)
    number = count.to(tl.float64)
    mean = tl.sum(total, 0) / number
    squares = tl.zeros((BLOCK,), tl.float64)
    for block in range(0, count, BLOCK):
        i = block + tl.arange(0, BLOCK)
        centred = tl.load(own + i, mask=i < count, other=0.0).to(tl.float64) - mean
        squares += tl.where(i < count, centred * centred, 0.0)
    sigma = tl.sqrt(tl.sum(squares, 0)) / tl.sqrt(number)
    which = tl.arange(0, 4)
    sums = tl.zeros((4, BLOCK), tl.float64)
    numbers = tl.zeros((4, BLOCK), tl.float64)
    for block in range(0, count, BLOCK):
        i = block + tl.arange(0, BLOCK)
        value = tl.load(own + i, mask=i < count, other=0.0).to(tl.float64)
        centred = value - mean
        bin = (centred >= -2.25 * sigma).to(tl.int32) + (centred >= -0.75 * sigma).to(tl.int32)
        bin += (centred >= 0.75 * sigma).to(tl.int32)
        tl.store(pointer(bins, tl.uint8) + at + i, bin.to(tl.uint8), mask=i < count)
        mine = (bin[None, :] == which[:, None]) & (i < count)[None, :]
        sums += tl.where(mine, value[None, :], 0.0)
        numbers += mine.to(tl.float64)
    of_bin = tl.sum(numbers, 1)
    means = tl.where(of_bin > 0, tl.sum(sums, 1) * (1 / tl.where(of_bin > 0, of_bin, 1.0)), 0.0)
    to = pointer(payload + entry(table, segments, segment, PLACE0), tl.float32)
    tl.store(to + which, means.to(tl.float32))


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
    """Packs a plane of a group of codes, if their bits have one of this width: what is left of the bits, and where the
    next plane begins."""
    if bits & WIDTH != 0:
        block = start // 8 * WIDTH
        begin, length, of_group, first = packed_bytes(block, count, WIDTH, 64 * WIDTH)
        packed = tl.zeros((64 * WIDTH,), tl.int32)
        for field in tl.static_range(0, 8 // WIDTH):
            i, there = field_of(begin, length, of_group, first, count, field)
            code = tl.load(pointer(codes, CODE) + i, mask=there, other=0).to(tl.int32)
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
    """Packs a group of values and places, and takes what is sent off x; MASKING: ends the momentum of these
    elements."""
    own = pointer(groups, tl.int64) + 2 * tl.program_id(0)
    segment = tl.load(own)
    start = tl.load(own + 1).to(tl.int32)
    count = entry(table, segments, segment, COUNT).to(tl.int32)
    at = entry(table, segments, segment, PLACE3)
    i = start + tl.arange(0, GROUP)
    there = i < count
    value = tl.load(pointer(values, tl.float32) + at + i, mask=there, other=0.0)
    wire = payload + entry(table, segments, segment, PLACE0)
    if HOW == FOUR_MEANS:
        bin = tl.load(pointer(bins, tl.uint8) + at + i, mask=there, other=0).to(tl.int32)
        value = tl.load(pointer(wire, tl.float32) + bin)
    elif HOW == IN_HALF:
        half = held(value, HALF).to(tl.float16)
        tl.store(pointer(wire, tl.float16) + i, half, mask=there)
        value = half.to(tl.float32)
    else:
        tl.store(pointer(wire, tl.float32) + i, value, mask=there)
    if KEEPS:
        place = tl.load(pointer(places, tl.int16) + at + i, mask=there, other=0).to(tl.int32) & 0xFFFF
        element = i // entry(table, segments, segment, PLACE2).to(tl.int32) * chunk + place
        kept = floats(table, segments, segment, X) + element
        tl.store(kept, left_of(tl.load(kept, mask=there, other=0.0), value), mask=there)
        if MASKING:
            velocity = floats(table, segments, segment, NEXT_VELOCITY) + element
            tl.store(velocity, tl.zeros((GROUP,), tl.float32), mask=there)
    bits = place_bits(table, segments, segment, chunk)
    codes = places + 2 * at
    shift = tl.zeros((), tl.int32)
    to = entry(table, segments, segment, PLACE1)
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
    """The mean of what `ranks` sent of a chunk, added up in their order. SENT: elements of a rank at a time."""
    segment, start, end, first, some = _chunk(table, segments, chunks, chunk)
    count = entry(table, segments, segment, COUNT).to(tl.int32)
    result = floats(table, segments, segment, RESULT)
    for block in range(start, end, BLOCK):
        i = block + tl.arange(0, BLOCK)
        tl.store(result + i, tl.zeros((BLOCK,), tl.float32), mask=i < end)
    bits = place_bits(table, segments, segment, chunk)
    low = entry(table, segments, segment, PLACE1)
    high = low + _bytes_of_codes(count, tl.minimum(bits, 8))
    behind = high + _bytes_of_codes(count, tl.maximum(bits - 8, 0))
    largest = tl.zeros((SENT,), tl.int32)
    for rank in range(0, ranks):
        tl.debug_barrier()  # what other threads of this program wrote is read next
        payload = payload_of(payloads, rank, row)
        wire = payload + entry(table, segments, segment, PLACE0)
        for block in range(0, some, SENT):
            there = block + tl.arange(0, SENT) < some
            i = first + block + tl.arange(0, SENT)
            place = packed_code(payload, low, count, tl.minimum(bits, 8), i, there)
            place |= packed_code(payload, high, count, tl.maximum(bits - 8, 0), i, there) << 8
            if HOW == FOUR_MEANS:
                bin = packed_code(payload, behind, count, 2, i, there)
                value = tl.load(pointer(wire, tl.float32) + bin, mask=there, other=0.0)
            elif HOW == IN_HALF:
                value = tl.load(pointer(wire, tl.float16) + i, mask=there, other=0.0).to(tl.float32)
            else:
                value = tl.load(pointer(wire, tl.float32) + i, mask=there, other=0.0)
            to = result + start + place
            total = tl.load(to, mask=there, other=0.0) + value * share
            tl.store(to, total, mask=there)
            largest = tl.maximum(largest, tl.where(there, magnitude(total), 0))
    report(flag, largest)


@triton.jit
def _bytes_of_codes(count, bits):
    """Of packed codes of some bits."""
    found = tl.where(bits & 8 != 0, count, 0) + tl.where(bits & 4 != 0, bytes_of(count, 4), 0)
    return found + tl.where(bits & 2 != 0, bytes_of(count, 2), 0) + tl.where(bits & 1 != 0, bytes_of(count, 1), 0)


def _parts(on, name, counts, step):
    """Of each tensor, the numbers 0, step, 2 step ... below a count; int64 (parts, 2), behind the tensor."""

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
    if how == FOUR_MEANS.value:
        on.tensors(chunks_means, values, bins, payload, BLOCK=on.block // 2)
    on.launch(
        chunks_pack, groups.shape[0], on.rows, tensors, groups, values, places, bins, payload, chunk,
        HOW=how, MASKING=bool(masks), KEEPS=on.keeps,
    )  # fmt: skip


def _decode(on, chunk, how, first, ranks, row):
    chunks = _chunks(on, chunk)
    sent = min(on.block, triton.next_power_of_2(int(on.segments["place"][:, 2].max())))
    on.launch(
        chunks_decode, chunks.shape[0], on.rows, len(on.segments), on.flag, chunks, first, ranks, row, 1 / ranks, chunk,
        HOW=how, SENT=sent, BLOCK=on.block,
    )  # fmt: skip


KERNELS = {"chunks_encode": _encode, "chunks_decode": _decode}
"""How each is launched, by its name."""
