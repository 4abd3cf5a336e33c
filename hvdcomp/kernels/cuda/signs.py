"""Two kinds of signs: signs that are decoded to one of two values, and signs that are votes.

The sign of element i of a tensor is bit i % 8 of byte i / 8. In a payload, a tensor's bits begin at byte `signs`.
"""

from hvdcomp.kernels.cuda.language import tl, triton
from hvdcomp.kernels.cuda.x import (
    COUNT,
    FIRST_TASK,
    RESULT,
    ROW_VOTES,
    SCALES,
    SIGNS,
    TASKS,
    VOTES,
    X_SENT,
    X,
    entry,
    floats,
    magnitude,
    make_x,
    no_sum,
    payload_of,
    piece,
    pointer,
    report,
    size_of,
)
from hvdcomp.kernels.tables import POSITIVE


@triton.jit
def _store_bits(payload, place, block, end, bits, BLOCK: tl.constexpr):
    """Packs the bits of a block, which must begin at a multiple of 8."""
    bytes_ = tl.sum(tl.reshape(bits.to(tl.int32), (BLOCK // 8, 8)) << tl.arange(0, 8)[None, :], 1)
    i = tl.arange(0, BLOCK // 8)
    tl.store(pointer(payload, tl.uint8) + place + block // 8 + i, bytes_.to(tl.uint8), mask=block + 8 * i < end)


@triton.jit
def _bits(payload, place, i, inside):
    """Reads bits i from packed bits."""
    return (tl.load(pointer(payload, tl.uint8) + place + i // 8, mask=inside, other=0).to(tl.int32) >> (i % 8)) & 1


@triton.jit
def two_values_encode(
    table, segments, tasks, flag, factor, decay, momentum, payload, sums, counts,
    KEEPS: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, FROM: tl.constexpr,
    STRICTLY: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes x and packs its signs. For each piece, also computes three numbers: how much the elements above zero
    contribute to the tensor's mean magnitude, how much the elements below zero contribute, and the number of elements
    above zero. Magnitudes are divided by the tensor's size before they are added, so that no sum overflows."""
    segment, start, end = piece(table, segments, tasks, PIECE)
    size = size_of(table, segments, segment)
    share = tl.div_rn(tl.full((), 1.0, tl.float32), size.to(tl.float32))
    largest = tl.zeros((BLOCK,), tl.int32)
    upper = tl.zeros((), tl.float64)
    lower = tl.zeros((), tl.float64)
    above = tl.zeros((), tl.int32)
    for block in range(start, end, BLOCK):
        i = block + tl.arange(0, BLOCK)
        inside = i < end
        x = make_x(table, segments, segment, i, inside, factor, decay, momentum, KEEPS, MOMENTUM, NESTEROV, FROM)
        largest = tl.maximum(largest, magnitude(x))
        positive = (x > 0 if STRICTLY else x >= 0) & inside
        _store_bits(payload, entry(table, segments, segment, SIGNS), block, end, positive, BLOCK)
        part = tl.abs(x) * share
        upper += tl.sum(tl.where(positive, part, 0.0), 0).to(tl.float64)
        lower += tl.sum(tl.where(positive, 0.0, part), 0).to(tl.float64)
        above += tl.sum(positive.to(tl.int32), 0)
    task = tl.program_id(0)
    tl.store(pointer(sums, tl.float64) + 2 * task, upper)
    tl.store(pointer(sums, tl.float64) + 2 * task + 1, lower)
    tl.store(pointer(counts, tl.int32) + task, above)
    report(flag, largest)


@triton.jit
def two_values(table, segments, payload, sums, counts, STRICTLY: tl.constexpr, BLOCK: tl.constexpr):
    """Computes the two values of each tensor from the sums of its pieces."""
    segment = tl.program_id(0)
    first = entry(table, segments, segment, FIRST_TASK)
    tasks = entry(table, segments, segment, TASKS)
    upper = tl.zeros((), tl.float64)
    lower = tl.zeros((), tl.float64)
    above = tl.zeros((), tl.int64)
    for block in range(0, tasks, BLOCK):
        i = block + tl.arange(0, BLOCK)
        inside = i < tasks
        upper += tl.sum(tl.load(pointer(sums, tl.float64) + 2 * (first + i), mask=inside, other=0.0), 0)
        lower += tl.sum(tl.load(pointer(sums, tl.float64) + 2 * (first + i) + 1, mask=inside, other=0.0), 0)
        above += tl.sum(tl.load(pointer(counts, tl.int32) + first + i, mask=inside, other=0).to(tl.int64), 0)
    values = pointer(payload + entry(table, segments, segment, SCALES), tl.float32)
    sent = floats(table, segments, segment, X_SENT)
    if STRICTLY:
        size = size_of(table, segments, segment)
        below = size - above
        sent_above = (upper * (size.to(tl.float64) / tl.maximum(above, 1).to(tl.float64))).to(tl.float32)
        sent_below = (lower * (size.to(tl.float64) / tl.maximum(below, 1).to(tl.float64))).to(tl.float32)
        sent_below = tl.where(below > 0, sent_below * -1.0, 0.0)  # Triton computes -x as 0 - x, which never gives -0.0
        tl.store(values + 1, sent_below)
    else:
        sent_above = (upper + lower).to(tl.float32)
        sent_below = sent_above * -1.0
    tl.store(values, sent_above)
    tl.store(sent + 1, sent_above)
    tl.store(sent + 2, sent_below)


@triton.jit
def two_values_decode(
    table, segments, tasks, flag, payloads, ranks, row: tl.int64, share,
    STRICTLY: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes the mean of the values that the ranks' bits stand for. The values are added in rank order."""
    segment, start, end = piece(table, segments, tasks, PIECE)
    place = entry(table, segments, segment, SIGNS)
    values_at = entry(table, segments, segment, SCALES)
    largest = tl.zeros((BLOCK,), tl.int32)
    for block in range(start, end, BLOCK):
        i = block + tl.arange(0, BLOCK)
        inside = i < end
        total = no_sum(BLOCK)
        for rank in range(0, ranks):
            payload = payload_of(payloads, rank, row)
            values = pointer(payload + values_at, tl.float32)
            above = tl.load(values)
            below = tl.load(values + 1) if STRICTLY else above * -1.0
            total += tl.where(_bits(payload, place, i, inside) != 0, above, below)
        total *= share
        largest = tl.maximum(largest, magnitude(total))
        tl.store(floats(table, segments, segment, RESULT) + i, total, mask=inside)
    report(flag, largest)


# Votes. A tensor is a matrix with `count` columns. Each row either votes or does not vote. From the offset `row_votes`
# on, a payload has one bit for each row. From the offset `votes` on, the scratch memory has one byte for each row.


@triton.jit
def votes_encode(
    table, segments, tasks, flag, factor, decay, momentum, payload, votes,
    KEEPS: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, FROM: tl.constexpr,
    STRICTLY: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes x and packs its signs. Writes a byte of 1 for each row that has a nonzero element."""
    segment, start, end = piece(table, segments, tasks, PIECE)
    columns = entry(table, segments, segment, COUNT).to(tl.int32)
    rows = pointer(votes, tl.uint8) + entry(table, segments, segment, VOTES)
    largest = tl.zeros((BLOCK,), tl.int32)
    for block in range(start, end, BLOCK):
        i = block + tl.arange(0, BLOCK)
        inside = i < end
        x = make_x(table, segments, segment, i, inside, factor, decay, momentum, KEEPS, MOMENTUM, NESTEROV, FROM)
        largest = tl.maximum(largest, magnitude(x))
        positive = (x > 0 if STRICTLY else x >= 0) & inside
        _store_bits(payload, entry(table, segments, segment, SIGNS), block, end, positive, BLOCK)
        # Several programs may write a row's vote, but all write the same value.
        tl.store(rows + i // columns, tl.full((BLOCK,), 1, tl.uint8), mask=inside & (x != 0))
    report(flag, largest)


@triton.jit
def votes_close(table, segments, tasks, flag, payload, votes, PIECE: tl.constexpr, BLOCK: tl.constexpr):
    """Packs the rows' votes, and clears the sign bits of rows that do not vote. A row does not vote if all its elements
    are zero."""
    segment, start, end = piece(table, segments, tasks, PIECE)
    columns = entry(table, segments, segment, COUNT).to(tl.int32)
    rows = size_of(table, segments, segment) // columns
    row_votes = pointer(votes, tl.uint8) + entry(table, segments, segment, VOTES)
    bits_at = entry(table, segments, segment, SIGNS)
    votes_at = entry(table, segments, segment, ROW_VOTES)
    last_row = (end - 1) // columns
    all_vote = tl.full((BLOCK,), 1, tl.uint8)  # usually all rows vote, and there is nothing to clear
    for first_row in range(start // columns, last_row + 1, BLOCK):
        row = first_row + tl.arange(0, BLOCK)
        all_vote = tl.minimum(all_vote, tl.load(row_votes + row, mask=row <= last_row, other=1))
    if tl.min(all_vote.to(tl.int32), 0) == 0:
        for block in range(start, end, BLOCK):
            i = block + tl.arange(0, BLOCK)
            inside = i < end
            voting = tl.load(row_votes + i // columns, mask=inside, other=0) != 0
            positive = (_bits(payload, bits_at, i, inside) != 0) & voting
            _store_bits(payload, bits_at, block, end, positive, BLOCK)
    # The program for the elements from start to end also packs the votes of the rows from start to end.
    for block in range(start, tl.minimum(end, rows), BLOCK):
        i = block + tl.arange(0, BLOCK)
        cast = tl.load(row_votes + i, mask=(i < end) & (i < rows), other=0) != 0
        _store_bits(payload, votes_at, block, tl.minimum(end, rows), cast, BLOCK)


@triton.jit
def votes_decode(
    table, segments, tasks, flag, payloads, ranks, row: tl.int64, PIECE: tl.constexpr, BLOCK: tl.constexpr
):
    """Computes the sign for which most ranks voted; 0 if there is a tie."""
    segment, start, end = piece(table, segments, tasks, PIECE)
    columns = entry(table, segments, segment, COUNT).to(tl.int32)
    for block in range(start, end, BLOCK):
        i = block + tl.arange(0, BLOCK)
        inside = i < end
        balance = tl.zeros((BLOCK,), tl.int32)
        for rank in range(0, ranks):
            payload = payload_of(payloads, rank, row)
            balance += 2 * _bits(payload, entry(table, segments, segment, SIGNS), i, inside)
            balance -= _bits(payload, entry(table, segments, segment, ROW_VOTES), i // columns, inside)
        mean = (balance > 0).to(tl.float32) - (balance < 0).to(tl.float32)
        tl.store(floats(table, segments, segment, RESULT) + i, mean, mask=inside)


@triton.jit
def votes_keep(table, segments, tasks, flag, payload, PIECE: tl.constexpr, BLOCK: tl.constexpr):
    """Subtracts from x the signs that this rank voted for."""
    segment, start, end = piece(table, segments, tasks, PIECE)
    columns = entry(table, segments, segment, COUNT).to(tl.int32)
    for block in range(start, end, BLOCK):
        i = block + tl.arange(0, BLOCK)
        inside = i < end
        sent = 2 * _bits(payload, entry(table, segments, segment, SIGNS), i, inside)
        sent -= _bits(payload, entry(table, segments, segment, ROW_VOTES), i // columns, inside)
        x = floats(table, segments, segment, X) + i
        tl.store(x, tl.load(x, mask=inside, other=0.0) - sent.to(tl.float32), mask=inside)


def _encode_two_values(on, rule, payload):
    strictly = rule == POSITIVE
    sums, counts = on.scratch("sums", 2 * on.tasks, "float64"), on.scratch("counts", on.tasks, "int32")
    on.pieces(two_values_encode, payload, sums, counts, x=True, STRICTLY=strictly)
    on.tensors(two_values, payload, sums, counts, STRICTLY=strictly, BLOCK=1024)


def _encode_votes(on, zero_is_positive, payload, votes, rows):
    votes.zero_()
    on.pieces(votes_encode, payload, votes, x=True, STRICTLY=not zero_is_positive)
    on.pieces(votes_close, payload, votes)


KERNELS = {
    "two_values_encode": _encode_two_values,
    "two_values_decode": lambda on, rule, first, ranks, row: on.pieces(
        two_values_decode, first, ranks, row, 1 / ranks, STRICTLY=rule == POSITIVE
    ),
    "votes_encode": _encode_votes,
    "votes_decode": lambda on, first, ranks, row: on.pieces(votes_decode, first, ranks, row),
    "votes_keep": lambda on, payload: on.pieces(votes_keep, payload),
}
"""For each operation, by name, the function that launches its kernels."""
