"""Computes the mean of the elements that the ranks sent, in a single launch for any number of ranks.

A program works on one piece of a tensor. A rank sends a tensor's elements in the order of their indices, so the
elements of one piece are adjacent. The program finds each rank's elements in its piece with a binary search, which runs
for all ranks at once. The program fills its piece with zeros, and then adds the elements of one rank after the other.
The C kernel does the same, so both give the same bits.
"""

from hvdcomp.kernels.cuda.language import tl, triton
from hvdcomp.kernels.cuda.x import (
    BLOCK_COUNTS,
    COUNT,
    INDEX_BYTES,
    INDICES,
    RESULT,
    VALUES,
    entry,
    floats,
    load_as,
    magnitude,
    payload_of,
    piece,
    pointer,
    report,
    size_of,
)

COUNTED = tl.constexpr(65536)  # number of elements in a block of `sparse_payload`
_COUNTS = 1024  # number of block counts, over all ranks, that a program adds up at a time
_CHUNK = 256  # number of elements of one rank that a program adds at a time


@triton.jit
def _indices(address, number, width, mask):
    """Reads sent indices, which count from the start of the tensor or of a block."""
    if width == 2:
        index = tl.load(pointer(address, tl.int16) + number, mask=mask, other=0).to(tl.int32) & 0xFFFF
    else:
        index = tl.load(pointer(address, tl.int32) + number, mask=mask, other=0)
    return index


@triton.jit
def _reaching(address, width, low, high, bound):
    """One step of a binary search for the first sent element whose index reaches the bound. Returns the next `low` and
    `high`."""
    middle = low + (high - low) // 2  # low + high could exceed 2**31
    searching = low < high
    below = searching & (_indices(address, middle, width, searching) < bound)
    return tl.where(below, middle + 1, low), tl.where(below, high, middle)


@triton.jit
def _ranges(table, segments, segment, start, origin, payloads, ranks, PIECE: tl.constexpr, COUNTS: tl.constexpr):
    """For each rank, which of its sent elements are in the piece that begins at `start`: the number of the first of
    these elements, and the number after the last of them.

    origin: the start of the block in the tensor; 0 if there are no blocks. payloads: addresses, at least one for each
    rank.
    """
    rank = tl.arange(0, payloads.shape[0])
    count = entry(table, segments, segment, COUNT).to(tl.int32)
    counts_at = entry(table, segments, segment, BLOCK_COUNTS)
    first = rank * 0
    last = tl.where(rank < ranks, count, 0)
    if counts_at >= 0:
        counts = pointer(payloads + counts_at, tl.int32)
        block = origin // COUNTED
        for number in range(0, block, COUNTS):
            before = number + tl.arange(0, COUNTS)
            mask = (rank < ranks)[:, None] & (before < block)[None, :]
            first += tl.sum(tl.load(counts[:, None] + before[None, :], mask=mask, other=0), 1)
        last = first + tl.load(counts + block, mask=rank < ranks, other=0)
    if size_of(table, segments, segment) > PIECE:
        indices = payloads + entry(table, segments, segment, INDICES)
        width = entry(table, segments, segment, INDEX_BYTES)
        low, high = first, last
        behind_low, behind_high = first, last
        steps = tl.minimum(count, COUNTED) if counts_at >= 0 else count
        while steps > 0:
            low, high = _reaching(indices, width, low, high, start - origin)
            behind_low, behind_high = _reaching(indices, width, behind_low, behind_high, start - origin + PIECE)
            steps = steps // 2
        first, last = low, behind_low
    return first, last


@triton.jit
def sparse_decode(
    table, segments, tasks, flag, payload, ranks, row: tl.int64, share,
    TYPE: tl.constexpr, RANKS: tl.constexpr, COUNTS: tl.constexpr, CHUNK: tl.constexpr,
    PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes the means of the ranks' sent elements. row: distance in bytes between the payloads of consecutive
    ranks."""
    segment, start, end = piece(table, segments, tasks, PIECE)
    result = floats(table, segments, segment, RESULT)
    for block in range(start, end, BLOCK):
        i = block + tl.arange(0, BLOCK)
        tl.store(result + i, tl.zeros((BLOCK,), tl.float32), mask=i < end)
    values_at = entry(table, segments, segment, VALUES)
    indices_at = entry(table, segments, segment, INDICES)
    width = entry(table, segments, segment, INDEX_BYTES)
    origin = start // COUNTED * COUNTED if entry(table, segments, segment, BLOCK_COUNTS) >= 0 else start * 0
    number_of_rank = tl.arange(0, RANKS)
    payloads = payload_of(payload, number_of_rank, row)
    firsts, lasts = _ranges(table, segments, segment, start, origin, payloads, ranks, PIECE, COUNTS)
    largest = tl.zeros((CHUNK,), tl.int32)
    rank_payload = payload
    for rank in range(0, ranks):
        tl.debug_barrier()  # the next reads need values that other threads of this program have written
        first = tl.sum(tl.where(number_of_rank == rank, firsts, 0), 0)
        last = tl.sum(tl.where(number_of_rank == rank, lasts, 0), 0)
        for chunk in range(first, last, CHUNK):
            number = chunk + tl.arange(0, CHUNK)
            valid = number < last
            i = origin + _indices(rank_payload + indices_at, number, width, valid)
            value = load_as(rank_payload + values_at, number, valid, TYPE)
            total = tl.load(result + i, mask=valid, other=0.0) + value * share
            tl.store(result + i, total, mask=valid)
            largest = tl.maximum(largest, tl.where(valid, magnitude(total), 0))
        rank_payload += row
    report(flag, largest)


def _decode(on, first, ranks, row, type):
    lanes = triton.next_power_of_2(ranks)
    counts = max(1, _COUNTS // lanes)
    on.pieces(sparse_decode, first, ranks, row, 1 / ranks, TYPE=type, RANKS=lanes, COUNTS=counts, CHUNK=_CHUNK)


KERNELS = {"sparse_decode": _decode}
"""For each operation, by name, the function that launches its kernels."""
