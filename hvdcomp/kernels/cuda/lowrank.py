"""Kernels of PowerSGD. PowerSGD views each tensor as a matrix M with `columns` columns, and approximates M by P Q'. The
module `factors` describes P and Q.

To sum over a matrix, kernels sum over tiles, and then add the sums of the tiles in a fixed order. The kernels use no
atomic additions, so that every run gives the same bits.
"""

import numpy as np

from hvdcomp.kernels.cuda.factors import keep, orthonormal, rank_of, shape_of, shapes_of
from hvdcomp.kernels.cuda.language import tl, triton
from hvdcomp.kernels.cuda.x import (
    P_FACTOR,
    Q_FACTOR,
    RESULT,
    X,
    entry,
    floats,
    left_of,
    made,
    magnitude,
    make_x,
    piece,
    pointer,
    report,
)

_TILE_OF_P = 16, 1024  # rows and columns
_TILE_OF_Q = 256, 64
# The smallest number of columns of a tile of P that are read at a time, and the smallest number of rows of a tile of Q.
# With 16 columns, loads read whole sectors of memory.
_LEAST_ACROSS = 16, 4
# The number of products that are computed at a time, if the tile is large enough. Their sums need most of the
# registers.
_AT_A_TIME = 2048
_SUMS_AT_A_TIME = 4096


@triton.jit
def multiply(
    table, segments, flag, factor, decay, momentum, tiles, unit, partial,
    KEEPS: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, FROM: tl.constexpr,
    MAKES_X: tl.constexpr, OF_ROWS: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ACROSS: tl.constexpr,
):  # fmt: skip
    """Computes the partial sums of a tile of M for P = M Q, or for Q = M' P if OF_ROWS.

    Also computes x if MAKES_X. A tile is described by a tensor, a first row, a first column, and the place of its
    partial sums (RANK sums for each element of the factor). ACROSS: number of elements of the tile that are read at a
    time along the summed dimension. The kernel keeps ACROSS separate sums and adds them only at the end, because
    threads must exchange data for this addition.
    """
    tile = pointer(tiles, tl.int64) + 4 * tl.program_id(0)
    segment = tl.load(tile)
    row = tl.load(tile + 1).to(tl.int32)
    column = tl.load(tile + 2).to(tl.int32)
    out = pointer(partial, tl.float32) + tl.load(tile + 3)
    rows, columns, rank = shape_of(table, segments, segment)
    k = tl.arange(0, RANK)
    largest = tl.zeros((COLUMNS if OF_ROWS else ROWS, ACROSS), tl.int32)
    if OF_ROWS:
        factors = pointer(unit, tl.float32) + entry(table, segments, segment, P_FACTOR)
        j = column + tl.arange(0, COLUMNS)
        sums = tl.zeros((COLUMNS, ACROSS, RANK), tl.float32)
        for start in range(row, tl.minimum(row + ROWS, rows), ACROSS):
            i = start + tl.arange(0, ACROSS)
            at = i[None, :] * columns + j[:, None]
            inside = (i < tl.minimum(row + ROWS, rows))[None, :] & (j < columns)[:, None]
            if MAKES_X:
                x = make_x(
                    table, segments, segment, at, inside, factor, decay, momentum, KEEPS, MOMENTUM, NESTEROV, FROM
                )
            else:
                x = made(table, segments, segment, at, inside, KEEPS, FROM)
            largest = tl.maximum(largest, magnitude(x))
            valid = (i < rows)[:, None] & (k < rank)[None, :]
            factor_ = tl.load(factors + k[None, :] * rows + i[:, None], mask=valid, other=0.0)
            sums += x[:, :, None] * factor_[None, :, :]
        number = tl.arange(0, COLUMNS)
        tl.store(out + number[:, None] * RANK + k[None, :], tl.sum(sums, 1))
    else:
        factors = pointer(unit, tl.float32) + entry(table, segments, segment, Q_FACTOR)
        i = row + tl.arange(0, ROWS)
        sums = tl.zeros((ROWS, ACROSS, RANK), tl.float32)
        for start in range(column, tl.minimum(column + COLUMNS, columns), ACROSS):
            j = start + tl.arange(0, ACROSS)
            at = i[:, None] * columns + j[None, :]
            inside = (i < rows)[:, None] & (j < tl.minimum(column + COLUMNS, columns))[None, :]
            if MAKES_X:
                x = make_x(
                    table, segments, segment, at, inside, factor, decay, momentum, KEEPS, MOMENTUM, NESTEROV, FROM
                )
            else:
                x = made(table, segments, segment, at, inside, KEEPS, FROM)
            largest = tl.maximum(largest, magnitude(x))
            valid = (j < columns)[:, None] & (k < rank)[None, :]
            factor_ = tl.load(factors + k[None, :] * columns + j[:, None], mask=valid, other=0.0)
            sums += x[:, :, None] * factor_[None, :, :]
        number = tl.arange(0, ROWS)
        tl.store(out + number[:, None] * RANK + k[None, :], tl.sum(sums, 1))
    report(flag, tl.max(largest, 1))


@triton.jit
def add_tiles(
    table, segments, flag, strips, partial, product,
    OF_ROWS: tl.constexpr, RANK: tl.constexpr, WIDE: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Adds the partial sums of the tiles in one strip of a matrix, TOGETHER tiles at a time.

    A strip is described by a tensor, a first element of the factor, the start of its partial sums, and its number of
    tiles.
    """
    strip = pointer(strips, tl.int64) + 4 * tl.program_id(0)
    segment = tl.load(strip)
    first = tl.load(strip + 1).to(tl.int32)
    begin = pointer(partial, tl.float32) + tl.load(strip + 2)
    tiles = tl.load(strip + 3).to(tl.int32)
    rows, columns, rank = shape_of(table, segments, segment)
    number = tl.arange(0, WIDE)
    k = tl.arange(0, RANK)
    at = number[:, None] * RANK + k[None, :]
    sums = tl.zeros((WIDE, RANK), tl.float32)
    for first_tile in range(0, tiles, TOGETHER):
        tile = first_tile + tl.arange(0, TOGETHER)
        part = begin + tile.to(tl.int64)[:, None, None] * (WIDE * RANK) + at[None, :, :]
        sums += tl.sum(tl.load(part, mask=(tile < tiles)[:, None, None], other=0.0), 0)
    length = columns if OF_ROWS else rows
    out = pointer(product, tl.float32) + entry(table, segments, segment, Q_FACTOR if OF_ROWS else P_FACTOR)
    inside = (first + number < length)[:, None] & (k < rank)[None, :]
    tl.store(out + k[None, :] * length + first + number[:, None], sums, mask=inside)
    report(flag, tl.max(tl.where(inside, magnitude(sums), 0), 1))


@triton.jit
def lowrank_decode(table, segments, tasks, flag, p, q, KEEPS: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr):
    """Writes P Q' to the results and, if KEEPS, subtracts it from x."""
    segment, start, end = piece(table, segments, tasks, PIECE)
    rows, columns, rank = shape_of(table, segments, segment)
    p_factor = pointer(p, tl.float32) + entry(table, segments, segment, P_FACTOR)
    q_factor = pointer(q, tl.float32) + entry(table, segments, segment, Q_FACTOR)
    largest = tl.zeros((BLOCK,), tl.int32)
    for block in range(start, end, BLOCK):
        i = block + tl.arange(0, BLOCK)
        inside = i < end
        row = i // columns
        column = i - row * columns
        total = tl.zeros((BLOCK,), tl.float32)
        for k in range(0, rank):
            factor = tl.load(p_factor + k * rows + row, mask=inside, other=0.0)
            total += factor * tl.load(q_factor + k * columns + column, mask=inside, other=0.0)
        largest = tl.maximum(largest, magnitude(total))
        tl.store(floats(table, segments, segment, RESULT) + i, total, mask=inside)
        if KEEPS:
            x = floats(table, segments, segment, X) + i
            tl.store(x, left_of(tl.load(x, mask=inside, other=0.0), total), mask=inside)
    report(flag, largest)


def _tiles(on, of_rows, rank):
    """The tiles of all matrices, their strips, and the number of partial sums."""
    # The strips of P consist of rows, and the strips of Q of columns. The partial sums of a strip's tiles are adjacent.
    tiles, strips, end = [], [], 0
    steps = _TILE_OF_Q[::-1] if of_rows else _TILE_OF_P
    for number, shape in enumerate(shapes_of(on)):
        length, summed = shape[::-1] if of_rows else shape
        for first in range(0, length, steps[0]):
            summed_starts = range(0, summed, steps[1])
            strips.append((number, first, end, len(summed_starts)))
            for summed_start in summed_starts:
                tiles.append((number, summed_start, first, end) if of_rows else (number, first, summed_start, end))
                end += steps[0] * rank
    return np.array(tiles, np.int64), np.array(strips, np.int64), end


def _multiply(on, factors, unit, product, makes_x, of_rows):
    orthonormal(on, factors, unit, of_rows)
    multiplied(on, unit, product, makes_x, of_rows)


def multiplied(on, factors, product, makes_x, of_rows):
    """Launches P = M Q for all tensors, or Q = M' P if `of_rows`. Also computes x if `makes_x`."""
    rank = rank_of(on)
    name = f"{'rows' if of_rows else 'columns'} of {rank}"
    if name not in on.plans:
        tiles, strips, sums = _tiles(on, of_rows, rank)
        on.plans[name] = on.static(f"tiles, {name}", lambda: tiles), on.static(f"strips, {name}", lambda: strips), sums
    tiles, strips, sums = on.plans[name]
    partial = on.scratch("partial sums", sums, "float32")
    rows, columns = _TILE_OF_Q if of_rows else _TILE_OF_P
    wide = columns if of_rows else rows
    across = max(_LEAST_ACROSS[of_rows], _AT_A_TIME // (wide * rank)) * (8 if on.interpreting else 1)
    on.launch(
        multiply, tiles.shape[0], on.rows, len(on.segments), on.flag, *on.arguments_of_x(), tiles, factors, partial,
        **on.constants_of_x(bool(makes_x)), MAKES_X=bool(makes_x), OF_ROWS=of_rows, RANK=rank, ROWS=rows,
        COLUMNS=columns, ACROSS=across,
    )  # fmt: skip
    on.launch(
        add_tiles, strips.shape[0], on.rows, len(on.segments), on.flag, strips, partial, product,
        OF_ROWS=of_rows, RANK=rank, WIDE=wide, TOGETHER=max(1, min(8, _SUMS_AT_A_TIME // (wide * rank))),
    )  # fmt: skip


KERNELS = {
    "lowrank_p": lambda on, q, unit, p, makes_x: _multiply(on, q, unit, p, makes_x, False),
    "lowrank_q": lambda on, p, unit, q, makes_x: _multiply(on, p, unit, q, makes_x, True),
    "lowrank_decode": lambda on, p, q: on.pieces(lowrank_decode, p, q, KEEPS=on.keeps > 0),
    "lowrank_keep": keep,
}
"""For each operation, by name, the function that launches its kernels."""
