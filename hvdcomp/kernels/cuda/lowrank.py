"""PowerSGD: matrices M = P Q' of each tensor, M with place 2 columns.

A tensor's `count` is its rank; place 0 is where P begins among all P of the bucket, place 1 where Q begins among all Q.
Factors lie column by column. Sums over a matrix are over tiles, whose partial sums are added in their order: no atomic
addition, so that every run gives the same bits.
"""

import numpy as np

from hvdcomp.kernels.cuda.language import tl, triton
from hvdcomp.kernels.cuda.x import (
    COUNT,
    PLACE0,
    PLACE1,
    PLACE2,
    RESULT,
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

SMALLEST = tl.constexpr(7.703719777548943e-34)  # 2**-110: a column of a smaller norm is zero
DEPENDENT = tl.constexpr(1e-5)  # what is left of a column that was a combination of others is rounding error

_TILE_OF_P = 16, 1024  # rows and columns
_TILE_OF_Q = 256, 64
_AT_A_TIME = 8192  # products


@triton.jit
def _shape(table, segments, segment):
    """Rows, columns and rank."""
    columns = entry(table, segments, segment, PLACE2).to(tl.int32)
    return size_of(table, segments, segment) // columns, columns, entry(table, segments, segment, COUNT).to(tl.int32)


@triton.jit
def _product(a, b, length, BLOCK: tl.constexpr):
    """The product of two columns, in double precision, in which squares neither overflow nor vanish."""
    total = tl.zeros((BLOCK,), tl.float64)
    for block in range(0, length, BLOCK):
        i = block + tl.arange(0, BLOCK)
        left = tl.load(a + i, mask=i < length, other=0.0).to(tl.float64)
        right = tl.load(b + i, mask=i < length, other=0.0).to(tl.float64)
        total += left * right
    return tl.sum(total, 0)


@triton.jit
def _combine(to, a, by, b, less, length, BLOCK: tl.constexpr):
    """to = a * by - b * less, elementwise."""
    for block in range(0, length, BLOCK):
        i = block + tl.arange(0, BLOCK)
        inside = i < length
        left = tl.load(a + i, mask=inside, other=0.0) * by
        tl.store(to + i, left - tl.load(b + i, mask=inside, other=0.0) * less, mask=inside)
    tl.debug_barrier()  # other threads of this program read it next


@triton.jit
def orthogonalize(table, segments, columns, unit, OF_ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Orthonormal columns that span those of each tensor, by modified Gram-Schmidt; dependent ones become zero."""
    segment = tl.program_id(0)
    rows, length, rank = _shape(table, segments, segment)
    begin = entry(table, segments, segment, PLACE0 if OF_ROWS else PLACE1)
    if OF_ROWS:
        length = rows
    own = pointer(columns, tl.float32) + begin
    out = pointer(unit, tl.float32) + begin
    zero = tl.zeros((), tl.float32)
    for k in range(0, rank):
        column = own + k * length
        norm = tl.sqrt(_product(column, column, length, BLOCK)).to(tl.float32)
        scale = tl.where(norm > SMALLEST, tl.div_rn(zero + 1.0, tl.where(norm > SMALLEST, norm, 1.0)), 0.0)
        _combine(out + k * length, column, scale, column, zero, length, BLOCK)
    for k in range(1, rank):
        before = out + (k - 1) * length
        for later in range(k, rank):
            column = out + later * length
            along = _product(before, column, length, BLOCK).to(tl.float32)
            _combine(column, column, zero + 1.0, before, along, length, BLOCK)
        column = out + k * length
        norm = tl.sqrt(_product(column, column, length, BLOCK)).to(tl.float32)
        scale = tl.where(norm > DEPENDENT, tl.div_rn(zero + 1.0, tl.where(norm > DEPENDENT, norm, 1.0)), 0.0)
        _combine(column, column, scale, column, zero, length, BLOCK)


@triton.jit
def multiply(
    table, segments, flag, factor, decay, momentum, tiles, unit, partial,
    KEEPS: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, SOURCED: tl.constexpr,
    MAKES_X: tl.constexpr, OF_ROWS: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ACROSS: tl.constexpr,
):  # fmt: skip
    """What a tile of M gives of P = M Q, or of Q = M' P if OF_ROWS; x is made on the way if MAKES_X.

    A tile is a tensor, a first row, a first column, and where its partial sums go: element by element of the factor,
    RANK of them. ACROSS: elements of the tile that are worked on at a time, along what is summed up.
    """
    tile = pointer(tiles, tl.int64) + 4 * tl.program_id(0)
    segment = tl.load(tile)
    row = tl.load(tile + 1).to(tl.int32)
    column = tl.load(tile + 2).to(tl.int32)
    out = pointer(partial, tl.float32) + tl.load(tile + 3)
    rows, columns, rank = _shape(table, segments, segment)
    k = tl.arange(0, RANK)
    largest = tl.zeros((COLUMNS if OF_ROWS else ROWS,), tl.int32)
    if OF_ROWS:
        factors = pointer(unit, tl.float32) + entry(table, segments, segment, PLACE0)
        j = column + tl.arange(0, COLUMNS)
        sums = tl.zeros((COLUMNS, RANK), tl.float32)
        for start in range(row, tl.minimum(row + ROWS, rows), ACROSS):
            i = start + tl.arange(0, ACROSS)
            at = i[None, :] * columns + j[:, None]
            inside = (i < tl.minimum(row + ROWS, rows))[None, :] & (j < columns)[:, None]
            if MAKES_X:
                x = make_x(
                    table, segments, segment, at, inside, factor, decay, momentum, KEEPS, MOMENTUM, NESTEROV, SOURCED
                )
            else:
                x = made(table, segments, segment, at, inside, KEEPS, SOURCED)
            largest = tl.maximum(largest, tl.max(magnitude(x), 1))
            there = (i < rows)[:, None] & (k < rank)[None, :]
            factor_ = tl.load(factors + k[None, :] * rows + i[:, None], mask=there, other=0.0)
            sums += tl.sum(x[:, :, None] * factor_[None, :, :], 1)
        number = tl.arange(0, COLUMNS)
        tl.store(out + number[:, None] * RANK + k[None, :], sums)
    else:
        factors = pointer(unit, tl.float32) + entry(table, segments, segment, PLACE1)
        i = row + tl.arange(0, ROWS)
        sums = tl.zeros((ROWS, RANK), tl.float32)
        for start in range(column, tl.minimum(column + COLUMNS, columns), ACROSS):
            j = start + tl.arange(0, ACROSS)
            at = i[:, None] * columns + j[None, :]
            inside = (i < rows)[:, None] & (j < tl.minimum(column + COLUMNS, columns))[None, :]
            if MAKES_X:
                x = make_x(
                    table, segments, segment, at, inside, factor, decay, momentum, KEEPS, MOMENTUM, NESTEROV, SOURCED
                )
            else:
                x = made(table, segments, segment, at, inside, KEEPS, SOURCED)
            largest = tl.maximum(largest, tl.max(magnitude(x), 1))
            there = (j < columns)[:, None] & (k < rank)[None, :]
            factor_ = tl.load(factors + k[None, :] * columns + j[:, None], mask=there, other=0.0)
            sums += tl.sum(x[:, :, None] * factor_[None, :, :], 1)
        number = tl.arange(0, ROWS)
        tl.store(out + number[:, None] * RANK + k[None, :], sums)
    report(flag, largest)


@triton.jit
def add_tiles(
    table, segments, flag, strips, partial, product,
    OF_ROWS: tl.constexpr, RANK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Adds the partial sums of the tiles that lie in one strip of a matrix.

    A strip is a tensor, its first element of the factor, where its partial sums begin, and how many tiles it has.
    """
    strip = pointer(strips, tl.int64) + 4 * tl.program_id(0)
    segment = tl.load(strip)
    first = tl.load(strip + 1).to(tl.int32)
    begin = pointer(partial, tl.float32) + tl.load(strip + 2)
    tiles = tl.load(strip + 3)
    rows, columns, rank = _shape(table, segments, segment)
    number = tl.arange(0, WIDE)
    k = tl.arange(0, RANK)
    at = number[:, None] * RANK + k[None, :]
    sums = tl.zeros((WIDE, RANK), tl.float32)
    for tile in range(0, tiles):
        sums += tl.load(begin + tile * (WIDE * RANK) + at)
    length = columns if OF_ROWS else rows
    out = pointer(product, tl.float32) + entry(table, segments, segment, PLACE1 if OF_ROWS else PLACE0)
    inside = (first + number < length)[:, None] & (k < rank)[None, :]
    tl.store(out + k[None, :] * length + first + number[:, None], sums, mask=inside)
    report(flag, tl.max(tl.where(inside, magnitude(sums), 0), 1))


@triton.jit
def lowrank_decode(
    table, segments, tasks, flag, p, q, KEEPS: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr
):
    """Writes P Q' to the results, and takes it off x, if something is kept."""
    segment, start, end = piece(table, segments, tasks, PIECE)
    rows, columns, rank = _shape(table, segments, segment)
    left = pointer(p, tl.float32) + entry(table, segments, segment, PLACE0)
    right = pointer(q, tl.float32) + entry(table, segments, segment, PLACE1)
    largest = tl.zeros((BLOCK,), tl.int32)
    for block in range(start, end, BLOCK):
        i = block + tl.arange(0, BLOCK)
        inside = i < end
        row = i // columns
        column = i - row * columns
        total = tl.zeros((BLOCK,), tl.float32)
        for k in range(0, rank):
            factor = tl.load(left + k * rows + row, mask=inside, other=0.0)
            total += factor * tl.load(right + k * columns + column, mask=inside, other=0.0)
        largest = tl.maximum(largest, magnitude(total))
        tl.store(floats(table, segments, segment, RESULT) + i, total, mask=inside)
        if KEEPS:
            x = floats(table, segments, segment, X) + i
            tl.store(x, tl.load(x, mask=inside, other=0.0) - total, mask=inside)
    report(flag, largest)


@triton.jit
def lowrank_keep(table, segments, fresh, old, following, OF_ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The columns of P (OF_ROWS) or Q for the next step: the fresh ones, but the old one where that is zero or too
    large."""
    segment = tl.program_id(0)
    rows, length, rank = _shape(table, segments, segment)
    begin = entry(table, segments, segment, PLACE0 if OF_ROWS else PLACE1)
    if OF_ROWS:
        length = rows
    zero = tl.zeros((), tl.float32)
    for k in range(0, rank):
        column = pointer(fresh, tl.float32) + begin + k * length
        norm = tl.sqrt(_product(column, column, length, BLOCK)).to(tl.float32)
        out = pointer(following, tl.float32) + begin + k * length
        if (norm > SMALLEST) & (norm < 1.298074214633707e33):
            _combine(out, column, zero + 1.0, column, zero, length, BLOCK)
        else:
            kept = pointer(old, tl.float32) + begin + k * length
            _combine(out, kept, zero + 1.0, kept, zero, length, BLOCK)


def _rank(on):
    return 1 << (int(on.segments["count"].max()) - 1).bit_length()


def _tiles(on, of_rows, rank):
    """The tiles of all matrices, the strips that they lie in, and how many partial sums they have."""
    columns = on.segments["place"][:, 2]
    shapes = np.stack([on.segments["size"] // columns, columns], axis=1).tolist()

    # P has strips of rows, Q of columns. In a strip, one tile lies behind the other.
    tiles, strips, end = [], [], 0
    steps = _TILE_OF_Q[::-1] if of_rows else _TILE_OF_P
    for number, shape in enumerate(shapes):
        length, summed = shape[::-1] if of_rows else shape
        for first in range(0, length, steps[0]):
            others = range(0, summed, steps[1])
            strips.append((number, first, end, len(others)))
            for other in others:
                tiles.append((number, other, first, end) if of_rows else (number, first, other, end))
                end += steps[0] * rank
    return np.array(tiles, np.int64), np.array(strips, np.int64), end


def _multiply(on, factors, unit, product, makes_x, of_rows):
    rank = _rank(on)
    on.tensors(orthogonalize, factors, unit, OF_ROWS=of_rows, BLOCK=1024)
    name = f"{'rows' if of_rows else 'columns'} of {rank}"
    if name not in on.plans:
        tiles, strips, on.plans[name] = _tiles(on, of_rows, rank)
        on.static(f"tiles, {name}", lambda: tiles)
        on.static(f"strips, {name}", lambda: strips)
    tiles, strips = (on.static(f"{one}, {name}", np.array) for one in ("tiles", "strips"))
    partial = on.scratch("partial sums", on.plans[name], "float32")
    rows, columns = _TILE_OF_Q if of_rows else _TILE_OF_P
    wide = columns if of_rows else rows
    across = max(4, _AT_A_TIME // (wide * rank)) * (8 if on.interpreting else 1)
    on.launch(
        multiply, tiles.shape[0], on.rows, len(on.segments), on.flag, *on.arguments_of_x(), tiles, unit, partial,
        **on.constants_of_x(), MAKES_X=bool(makes_x), OF_ROWS=of_rows, RANK=rank, ROWS=rows, COLUMNS=columns,
        ACROSS=across,
    )  # fmt: skip
    on.launch(
        add_tiles, strips.shape[0], on.rows, len(on.segments), on.flag, strips, partial, product,
        OF_ROWS=of_rows, RANK=rank, WIDE=wide,
    )  # fmt: skip


KERNELS = {
    "lowrank_p": lambda on, q, unit, p, makes_x: _multiply(on, q, unit, p, makes_x, False),
    "lowrank_q": lambda on, p, unit, q, makes_x: _multiply(on, p, unit, q, makes_x, True),
    "lowrank_decode": lambda on, p, q: on.pieces(lowrank_decode, p, q, KEEPS=on.keeps),
    "lowrank_keep": lambda on, fresh, old, following, of_rows: on.tensors(
        lowrank_keep, fresh, old, following, OF_ROWS=bool(of_rows), BLOCK=1024
    ),
}
"""How each is launched, by its name."""
