"""Factors of PowerSGD: their columns are made orthonormal, and kept for the next step.

A tensor's `count` is its rank; place 0 is where P begins among all P of the bucket, place 1 where Q begins among all Q;
place 2 is the number of the matrix's columns. Factors lie column by column. They are worked on in tiles, so that no
program has a long column alone, by Cholesky-QR: the products of all pairs of columns say which combinations of the
columns are orthonormal. In double precision these are more nearly so than what modified Gram-Schmidt gives in single
precision, as the other statements of the method have it.
"""

import numpy as np

from hvdcomp.kernels.cuda.language import tl, triton
from hvdcomp.kernels.cuda.x import COUNT, INFINITE, PLACE0, PLACE1, PLACE2, entry, magnitude, pointer, size_of

SMALLEST = tl.constexpr(7.703719777548943e-34)  # 2**-110: a column of a smaller norm is zero
LARGEST = tl.constexpr(1.298074214633707e33)  # 2**110: one of a larger norm is not kept
DEPENDENT = tl.constexpr(1e-10)  # a smaller square of what is left of a column is rounding error, of x or of the column
NOISE = tl.constexpr(5.684341886080802e-14)  # 2**-44: so is one whose error, in double precision, may be a few percent

_WIDE_AT_A_TIME = 4096  # products
_SUMS_AT_A_TIME = 1024
_TILES_OF_FACTOR = 512, 64  # elements of a column in a tile, at least, and tiles of a factor, at most


@triton.jit
def shape_of(table, segments, segment):
    """Rows, columns and rank."""
    columns = entry(table, segments, segment, PLACE2).to(tl.int32)
    return size_of(table, segments, segment) // columns, columns, entry(table, segments, segment, COUNT).to(tl.int32)


@triton.jit
def _tile_of_factor(table, segments, tiles, OF_ROWS: tl.constexpr):
    """This program's part of a factor: which element of the vector of all factors the factor begins with; the length of
    its columns and their number; where the part begins and ends in each column; and where the tensor's tiles begin, and
    how many they are."""
    tile = pointer(tiles, tl.int64) + 5 * tl.program_id(0)
    segment = tl.load(tile)
    rows, columns, rank = shape_of(table, segments, segment)
    begin = entry(table, segments, segment, PLACE0 if OF_ROWS else PLACE1)
    first, end = tl.load(tile + 1).to(tl.int32), tl.load(tile + 2).to(tl.int32)
    return begin, rows if OF_ROWS else columns, rank, first, end, tl.load(tile + 3), tl.load(tile + 4).to(tl.int32)


@triton.jit
def gram(table, segments, tiles, factors, grams, OF_ROWS: tl.constexpr, RANK: tl.constexpr, TALL: tl.constexpr):
    """The products of all pairs of columns over a tile of a factor, RANK x RANK, in double precision, in which products
    of float32 numbers are exact, and neither overflow nor vanish. TALL: elements of each column at a time."""
    begin, length, rank, first, end, _, _ = _tile_of_factor(table, segments, tiles, OF_ROWS)
    own = pointer(factors, tl.float32) + begin
    k = tl.arange(0, RANK)
    sums = tl.zeros((TALL, RANK, RANK), tl.float64)
    for start in range(first, end, TALL):
        i = start + tl.arange(0, TALL)
        there = (i < end)[:, None] & (k < rank)[None, :]
        columns = tl.load(own + k[None, :] * length + i[:, None], mask=there, other=0.0).to(tl.float64)
        sums += columns[:, :, None] * columns[:, None, :]
    out = pointer(grams, tl.float64) + tl.program_id(0) * RANK * RANK
    tl.store(out + k[:, None] * RANK + k[None, :], tl.sum(sums, 0))


@triton.jit
def _inverse_root(products, rank, RANK: tl.constexpr):
    """T so that F T has orthonormal columns, for a factor F whose columns have these products: the inverse of the
    Cholesky factor, column by column. T is zero where a column of F is zero or depends on those before it."""
    i = tl.arange(0, RANK)
    of_row = tl.sqrt(tl.sum(tl.where(i[:, None] == i[None, :], products, 0.0), 1))
    of_column = tl.sqrt(tl.sum(tl.where(i[:, None] == i[None, :], products, 0.0), 0))
    by_row = _reciprocal(of_row)
    by_column = _reciprocal(of_column)
    products = products * by_row[:, None] * by_column[None, :]
    inverse = tl.zeros((RANK, RANK), tl.float64)
    for k in range(0, rank):
        # Gram-Schmidt, in the product of coefficients that the columns' products make.
        column = tl.sum(tl.where(i[None, :] == k, products, 0.0), 1)
        along = tl.sum(inverse * column[:, None], 0)
        left = tl.sum(tl.where(i == k, column, 0.0), 0) - tl.sum(along * along, 0)
        rest = tl.where(i == k, 1.0, 0.0) - tl.sum(inverse * along[None, :], 1)
        stands = (left > DEPENDENT) & (left > tl.sum(rest * rest, 0) * NOISE)  # not so of NaN
        rest = tl.where(stands, rest / tl.sqrt(tl.where(stands, left, 1.0)), 0.0)
        inverse = tl.where(i[None, :] == k, rest[:, None], inverse)
    return inverse * by_row[:, None]


@triton.jit
def _reciprocal(norm):
    """Of norms; zero where a column of this norm counts as zero, in which one is that float32 cannot hold."""
    narrow = norm.to(tl.float32)
    holds = (narrow > SMALLEST) & (magnitude(narrow) < INFINITE)
    return tl.where(holds, 1.0 / tl.where(holds, norm, 1.0), 0.0)


@triton.jit
def orthogonalize(
    table, segments, tiles, grams, factors, unit,
    OF_ROWS: tl.constexpr, RANK: tl.constexpr, TALL: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """A tile of orthonormal columns that span those of a factor, from the products of all its tiles; dependent ones are
    zero. TOGETHER: tiles whose products are added at a time."""
    begin, length, rank, first, end, first_tile, count = _tile_of_factor(table, segments, tiles, OF_ROWS)
    k = tl.arange(0, RANK)
    products = tl.zeros((RANK, RANK), tl.float64)
    parts = pointer(grams, tl.float64) + first_tile * RANK * RANK
    # Each program adds them up and inverts their root by itself, so that none waits for another.
    for tile in range(0, count, TOGETHER):
        number = tile + tl.arange(0, TOGETHER)
        at = number[:, None, None] * (RANK * RANK) + k[None, :, None] * RANK + k[None, None, :]
        products += tl.sum(tl.load(parts + at, mask=(number < count)[:, None, None], other=0.0), 0)
    inverse = _inverse_root(products, rank, RANK)
    for start in range(first, end, TALL):
        i = start + tl.arange(0, TALL)
        there = (i < end)[:, None] & (k < rank)[None, :]
        at = begin + k[None, :] * length + i[:, None]
        columns = tl.load(pointer(factors, tl.float32) + at, mask=there, other=0.0).to(tl.float64)
        orthonormal = tl.sum(columns[:, :, None] * inverse[None, :, :], 1)
        tl.store(pointer(unit, tl.float32) + at, orthonormal.to(tl.float32), mask=there)


@triton.jit
def lowrank_keep(
    table, segments, tiles, grams, fresh, old, following,
    OF_ROWS: tl.constexpr, RANK: tl.constexpr, TALL: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """A tile of the columns of P (OF_ROWS) or Q for the next step: the fresh ones, but the old one where that is zero
    or too large. grams: of the fresh ones."""
    begin, length, rank, first, end, first_tile, count = _tile_of_factor(table, segments, tiles, OF_ROWS)
    k = tl.arange(0, RANK)
    squares = tl.zeros((RANK,), tl.float64)
    parts = pointer(grams, tl.float64) + first_tile * RANK * RANK
    for tile in range(0, count, TOGETHER):
        number = tile + tl.arange(0, TOGETHER)
        at = number[:, None] * (RANK * RANK) + k[None, :] * (RANK + 1)
        squares += tl.sum(tl.load(parts + at, mask=(number < count)[:, None], other=0.0), 0)
    norm = tl.sqrt(squares).to(tl.float32)
    stands = (norm > SMALLEST) & (norm < LARGEST)
    for start in range(first, end, TALL):
        i = start + tl.arange(0, TALL)
        there = (i < end)[:, None] & (k < rank)[None, :]
        at = begin + k[None, :] * length + i[:, None]
        new = tl.load(pointer(fresh, tl.float32) + at, mask=there & stands[None, :], other=0.0)
        kept = tl.load(pointer(old, tl.float32) + at, mask=there & (stands == 0)[None, :], other=0.0)
        tl.store(pointer(following, tl.float32) + at, tl.where(stands[None, :], new, kept), mask=there)


def rank_of(on):
    """The highest rank, as a power of two."""
    return 1 << (int(on.segments["count"].max()) - 1).bit_length()


def shapes_of(on):
    """Rows and columns of the matrices."""
    columns = on.segments["place"][:, 2]
    return np.stack([on.segments["size"] // columns, columns], axis=1).tolist()


def _tiles(on, of_rows):
    """The tiles of all P, or of all Q."""
    least, most = _TILES_OF_FACTOR
    found: list[tuple[int, ...]] = []
    for number, shape in enumerate(shapes_of(on)):
        length = shape[0 if of_rows else 1]
        step = max(least, -(-length // most))
        begin, starts = len(found), range(0, length, step)
        found += [(number, first, min(first + step, length), begin, len(starts)) for first in starts]
    return np.array(found, np.int64)


def _products(on, factors, of_rows):
    """Finds the products of columns of all P (of_rows) or all Q. Returns what launches on the same tiles take: the
    number of programs, the first arguments, and constants."""
    rank = rank_of(on)
    tiles = on.static(f"tiles of {'P' if of_rows else 'Q'}", lambda: _tiles(on, of_rows))
    programs = tiles.shape[0]
    tall = min(_TILES_OF_FACTOR[0], max(1, _WIDE_AT_A_TIME // rank**2))
    constants = {"OF_ROWS": bool(of_rows), "RANK": rank, "TALL": tall}
    grams = on.scratch("products of columns", programs * rank**2, "float64")
    common = on.rows, len(on.segments), tiles
    on.launch(gram, programs, *common, factors, grams, **constants)
    return programs, (*common, grams), constants | {"TOGETHER": max(1, _SUMS_AT_A_TIME // rank**2)}


def orthonormal(on, factors, unit, of_rows):
    """Launches what makes `unit` of all P (of_rows) or all Q."""
    programs, common, constants = _products(on, factors, of_rows)
    on.launch(orthogonalize, programs, *common, factors, unit, **constants)


def keep(on, fresh, old, following, of_rows):
    """Launches what makes P or Q for the next step."""
    programs, common, constants = _products(on, fresh, of_rows)
    on.launch(lowrank_keep, programs, *common, fresh, old, following, **constants)
