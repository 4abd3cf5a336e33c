"""Factors of PowerSGD: kernels that orthonormalize the columns of the factors, and keep the factors for the next step.

A tensor's `count` is the rank of its matrix approximation. One array contains the factors P of all tensors of the
bucket, and a tensor's P begins at the index `p_factor`. Another array contains all factors Q, and a tensor's Q begins
at the index `q_factor`. `columns` is the number of columns of the matrix. Factors are stored column by column. Kernels
work on tiles, so that several programs share a long column. The method is Cholesky-QR: it computes the orthonormal
columns from the products of all pairs of columns. It computes in double precision, so its columns are closer to
orthonormal than columns from modified Gram-Schmidt in single precision. The other implementations of PowerSGD use this
second method.
"""

import numpy as np

from hvdcomp.kernels import limits
from hvdcomp.kernels.cuda.language import tl, triton
from hvdcomp.kernels.cuda.x import COLUMNS, COUNT, INFINITE, P_FACTOR, Q_FACTOR, entry, magnitude, pointer, size_of

SMALLEST = tl.constexpr(limits.SMALLEST_NORM)
LARGEST = tl.constexpr(1 / limits.SMALLEST_NORM)  # a column with a larger norm is not kept
DEPENDENT = tl.constexpr(1e-10)  # a smaller squared remainder of a column is only rounding error
# 2**-44: a smaller remainder has an error of a few percent in double precision, so it counts as rounding error
NOISE = tl.constexpr(5.684341886080802e-14)

_WIDE_AT_A_TIME = 4096  # number of products
_SUMS_AT_A_TIME = 1024
_TILES_OF_FACTOR = 512, 64  # smallest number of elements of a column in a tile; largest number of tiles of a factor


@triton.jit
def shape_of(table, segments, segment):
    """The rows and columns of a tensor's matrix, and the rank of its factors."""
    columns = entry(table, segments, segment, COLUMNS).to(tl.int32)
    return size_of(table, segments, segment) // columns, columns, entry(table, segments, segment, COUNT).to(tl.int32)


@triton.jit
def _tile_of_factor(table, segments, tiles, OF_ROWS: tl.constexpr):
    """Finds this program's tile of a factor. Returns the start of the factor in the vector of all factors; the length
    and the number of the factor's columns; the start and the end of the tile in each column; the factor's first tile;
    and the factor's number of tiles."""
    tile = pointer(tiles, tl.int64) + 5 * tl.program_id(0)
    segment = tl.load(tile)
    rows, columns, rank = shape_of(table, segments, segment)
    begin = entry(table, segments, segment, P_FACTOR if OF_ROWS else Q_FACTOR)
    first, end = tl.load(tile + 1).to(tl.int32), tl.load(tile + 2).to(tl.int32)
    return begin, rows if OF_ROWS else columns, rank, first, end, tl.load(tile + 3), tl.load(tile + 4).to(tl.int32)


@triton.jit
def gram(table, segments, tiles, factors, grams, OF_ROWS: tl.constexpr, RANK: tl.constexpr, TALL: tl.constexpr):
    """Computes the products of all pairs of columns in a tile of a factor, which are RANK x RANK numbers. In double
    precision, products of float32 numbers are exact, and they neither overflow nor underflow to zero. TALL: number of
    elements of each column that are read at a time."""
    begin, length, rank, first, end, _, _ = _tile_of_factor(table, segments, tiles, OF_ROWS)
    factor = pointer(factors, tl.float32) + begin
    k = tl.arange(0, RANK)
    sums = tl.zeros((TALL, RANK, RANK), tl.float64)
    for start in range(first, end, TALL):
        i = start + tl.arange(0, TALL)
        valid = (i < end)[:, None] & (k < rank)[None, :]
        columns = tl.load(factor + k[None, :] * length + i[:, None], mask=valid, other=0.0).to(tl.float64)
        sums += columns[:, :, None] * columns[:, None, :]
    out = pointer(grams, tl.float64) + tl.program_id(0).to(tl.int64) * RANK * RANK
    tl.store(out + k[:, None] * RANK + k[None, :], tl.sum(sums, 0))


@triton.jit
def _inverse_root(products, rank, RANK: tl.constexpr):
    """The matrix T for which F T has orthonormal columns, computed from the products of the columns of a factor F. T is
    the inverse of the Cholesky factor. A column of T is zero if the column of F is zero or depends linearly on earlier
    columns."""
    i = tl.arange(0, RANK)
    of_row = tl.sqrt(tl.sum(tl.where(i[:, None] == i[None, :], products, 0.0), 1))
    of_column = tl.sqrt(tl.sum(tl.where(i[:, None] == i[None, :], products, 0.0), 0))
    by_row = _reciprocal(of_row)
    by_column = _reciprocal(of_column)
    products = products * by_row[:, None] * by_column[None, :]
    inverse = tl.zeros((RANK, RANK), tl.float64)
    for k in range(0, rank):
        # Gram-Schmidt on the coefficients. `products` defines the inner product of coefficients, so that it equals the
        # inner product of the columns.
        column = tl.sum(tl.where(i[None, :] == k, products, 0.0), 1)
        along = tl.sum(inverse * column[:, None], 0)
        remaining = tl.sum(tl.where(i == k, column, 0.0), 0) - tl.sum(along * along, 0)
        direction = tl.where(i == k, 1.0, 0.0) - tl.sum(inverse * along[None, :], 1)
        independent = (remaining > DEPENDENT) & (remaining > tl.sum(direction * direction, 0) * NOISE)  # False for NaN
        direction = tl.where(independent, direction / tl.sqrt(tl.where(independent, remaining, 1.0)), 0.0)
        inverse = tl.where(i[None, :] == k, direction[:, None], inverse)
    return inverse * by_row[:, None]


@triton.jit
def _reciprocal(norm):
    """The reciprocals of norms; zero for a norm that counts as zero or is too large for float32."""
    narrow = norm.to(tl.float32)
    holds = (narrow > SMALLEST) & (magnitude(narrow) < INFINITE)
    return tl.where(holds, 1.0 / tl.where(holds, norm, 1.0), 0.0)


@triton.jit
def orthogonalize(
    table, segments, tiles, grams, factors, unit,
    OF_ROWS: tl.constexpr, RANK: tl.constexpr, TALL: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Orthonormalizes the columns in a tile of a factor. The orthonormal columns have the same span as the factor's
    columns, and are computed from the products of all tiles. Dependent columns become zero. TOGETHER: number of tiles
    whose products are added at a time."""
    begin, length, rank, first, end, first_tile, count = _tile_of_factor(table, segments, tiles, OF_ROWS)
    k = tl.arange(0, RANK)
    products = tl.zeros((RANK, RANK), tl.float64)
    parts = pointer(grams, tl.float64) + first_tile * RANK * RANK
    # Each program adds up all products and computes the inverse root itself, so that no program waits for another
    # program.
    for tile in range(0, count, TOGETHER):
        number = tile + tl.arange(0, TOGETHER)
        at = number[:, None, None] * (RANK * RANK) + k[None, :, None] * RANK + k[None, None, :]
        products += tl.sum(tl.load(parts + at, mask=(number < count)[:, None, None], other=0.0), 0)
    inverse = _inverse_root(products, rank, RANK)
    for start in range(first, end, TALL):
        i = start + tl.arange(0, TALL)
        valid = (i < end)[:, None] & (k < rank)[None, :]
        at = begin + k[None, :] * length + i[:, None]
        columns = tl.load(pointer(factors, tl.float32) + at, mask=valid, other=0.0).to(tl.float64)
        orthonormal = tl.sum(columns[:, :, None] * inverse[None, :, :], 1)
        tl.store(pointer(unit, tl.float32) + at, orthonormal.to(tl.float32), mask=valid)


@triton.jit
def lowrank_keep(
    table, segments, tiles, grams, fresh, old, following,
    OF_ROWS: tl.constexpr, RANK: tl.constexpr, TALL: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Writes a tile of the columns of P (if OF_ROWS) or Q for the next step. Each column is the fresh column, or the
    old column if the fresh column is zero or too large. grams: products of the fresh columns."""
    begin, length, rank, first, end, first_tile, count = _tile_of_factor(table, segments, tiles, OF_ROWS)
    k = tl.arange(0, RANK)
    squares = tl.zeros((RANK,), tl.float64)
    parts = pointer(grams, tl.float64) + first_tile * RANK * RANK
    for tile in range(0, count, TOGETHER):
        number = tile + tl.arange(0, TOGETHER)
        at = number[:, None] * (RANK * RANK) + k[None, :] * (RANK + 1)
        squares += tl.sum(tl.load(parts + at, mask=(number < count)[:, None], other=0.0), 0)
    norm = tl.sqrt(squares).to(tl.float32)
    usable = (norm > SMALLEST) & (norm < LARGEST)
    for start in range(first, end, TALL):
        i = start + tl.arange(0, TALL)
        valid = (i < end)[:, None] & (k < rank)[None, :]
        at = begin + k[None, :] * length + i[:, None]
        new = tl.load(pointer(fresh, tl.float32) + at, mask=valid & usable[None, :], other=0.0)
        kept = tl.load(pointer(old, tl.float32) + at, mask=valid & (usable == 0)[None, :], other=0.0)
        tl.store(pointer(following, tl.float32) + at, tl.where(usable[None, :], new, kept), mask=valid)


def rank_of(on):
    """The highest rank of the bucket, rounded up to a power of two."""
    if "rank" not in on.plans:
        on.plans["rank"] = 1 << (int(on.segments["count"].max()) - 1).bit_length()
    return on.plans["rank"]


def shapes_of(on):
    """Rows and columns of the matrices."""
    columns = on.segments["columns"]
    return np.stack([on.segments["size"] // columns, columns], axis=1).tolist()


def _tiles(on, of_rows):
    """The tiles of the factors of all tensors: of P if `of_rows`, otherwise of Q."""
    least, most = _TILES_OF_FACTOR
    tiles: list[tuple[int, ...]] = []
    for number, shape in enumerate(shapes_of(on)):
        length = shape[0 if of_rows else 1]
        step = max(least, -(-length // most))
        begin, starts = len(tiles), range(0, length, step)
        tiles += [(number, first, min(first + step, length), begin, len(starts)) for first in starts]
    return np.array(tiles, np.int64)


def _products(on, factors, of_rows):
    """Launches `gram` for the factors P of all tensors if `of_rows`, otherwise for all factors Q. Returns the number of
    programs, and the first arguments and the constants that other launches on the same tiles need."""
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
    """Launches `orthogonalize`, which writes to `unit`. It reads the factors P of all tensors if `of_rows`, otherwise
    all Q."""
    programs, common, constants = _products(on, factors, of_rows)
    on.launch(orthogonalize, programs, *common, factors, unit, **constants)


def keep(on, fresh, old, following, of_rows):
    """Launches `lowrank_keep` for P if `of_rows`, otherwise for Q."""
    programs, common, constants = _products(on, fresh, of_rows)
    on.launch(lowrank_keep, programs, *common, fresh, old, following, **constants)
