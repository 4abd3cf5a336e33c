"""Low-rank approximation of gradient matrices."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar

import numpy as np

from hvdcomp.collectives import (
    AllReduce,
    Array,
    Context,
    Exchange,
    Outcome,
    TensorInfo,
    dtype_bytes,
    number_of_elements,
)
from hvdcomp.compressors.base import Compressor, Level, require_at_least_one
from hvdcomp.compressors.casts import NoCompression
from hvdcomp.errors import SpecError
from hvdcomp.randomness import shared_generator

# A column that loses all but this share of its norm to the columns before it was a combination of them; what is
# left is rounding error, whose direction means nothing.
_DEPENDENT = 1e-5


@dataclass(frozen=True)
class PowerSGD(Compressor):
    """One step of power iteration a training step, warm-started (Vogels et al. 2019, arXiv:1905.13727, algorithm 1).

    The gradient is viewed as the matrix M of shape[0] rows. P = M Q is averaged and orthogonalised, Q = M' P is
    averaged, and the result is P Q'. Q is kept for the next step.

    Attributes:
        rank: number of columns of P and Q; no more than rows or columns.
        min_rate: a tensor is sent dense unless (rows + columns) rank < rows columns / min_rate.
    """

    rank: int
    min_rate: float = 1.0

    name: ClassVar[str] = "powersgd"
    level_name: ClassVar[str | None] = "rank"
    collective: ClassVar[str] = "allreduce, allreduce"
    biased: ClassVar[bool] = True
    reference: ClassVar[str] = "Vogels et al. 2019, arXiv:1905.13727"

    def __post_init__(self) -> None:
        require_at_least_one(self.name, rank=self.rank)
        if not self.min_rate > 0:
            raise SpecError(f"powersgd: min_rate={self.min_rate} is not allowed; it must be positive (1 is usual)")

    def prepare(self, xp: ModuleType, x: Array, state: tuple[Array, ...], context: Context) -> tuple[Array, ...]:
        rows, columns = matrix_shape(x.shape)
        rank = min(self.rank, rows, columns)
        kept = state[0].shape[1] if state else 0
        if kept == rank:
            return state
        if kept > rank:
            return (state[0][:, :rank],)
        fresh = random_columns(xp, x, columns, rank, context)[:, kept:]
        return (xp.concatenate_columns([state[0], fresh]) if state else fresh,)

    def exchange(self, xp: ModuleType, x: Array, state: tuple[Array, ...], context: Context) -> Exchange:
        matrix = xp.reshape(xp.astype(x, "float32") if xp.item_size(x) < 4 else x, matrix_shape(x.shape))
        (start,) = state
        p = yield AllReduce(xp.matmul(matrix, orthogonalize(xp, start)))
        p = orthogonalize(xp, p)
        q = yield AllReduce(xp.matmul(xp.transpose(matrix), p))
        approximation = xp.astype(xp.reshape(xp.matmul(p, xp.transpose(q)), x.shape), xp.dtype_name(x))
        # A zero gradient empties columns of q, and from zeros the power iteration would never start again.
        kept = xp.where(xp.column_norms(q) > 0, q, start)
        return Outcome(approximation, approximation, (kept,))

    def payload_bytes(self, shape: tuple[int, ...], level: Level | None = None, dtype: str = "float32") -> int:
        return int(self.payload_floats(shape, level)) * max(4, dtype_bytes(dtype))

    def payload_floats(self, shape: tuple[int, ...], level: Level | None = None) -> float:
        rows, columns = matrix_shape(shape)
        return (rows + columns) * min(int(self.rank if level is None else level), rows, columns)

    def level_for(self, compression_factor: float, shape: tuple[int, ...]) -> Level | None:
        super().level_for(compression_factor, shape)
        rows, columns = matrix_shape(shape)
        rank = math.floor(rows * columns / (compression_factor * (rows + columns)))
        return min(max(1, rank), rows, columns)

    def route(self, tensor: TensorInfo) -> Compressor:
        if tensor.size and self.payload_floats(tensor.shape) < tensor.size / self.min_rate:
            return self
        return NoCompression()


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """The shape of the matrix that a tensor is viewed as: the first dimension by the product of the rest."""
    rows = shape[0] if shape else 1
    return rows, number_of_elements(tuple(shape[1:]))


def random_columns(xp: ModuleType, x: Array, length: int, count: int, context: Context) -> Array:
    """Standard normal columns (length, count), the same on every rank and at every step.

    A higher count begins with the columns of a lower one.
    """
    start = Context(context.name, 0, context.seed, 0, context.size)
    dtype = np.float64 if xp.item_size(x) == 8 else np.float32
    drawn = shared_generator(start, "powersgd").standard_normal((count, length), dtype=dtype)
    return xp.transpose(xp.from_numpy(drawn, like=x))


def orthogonalize(xp: ModuleType, matrix: Array) -> Array:
    """Orthonormal columns spanning those of `matrix`, by modified Gram-Schmidt, in fresh storage.

    A column that is zero, or depends on the columns before it, becomes zero instead of noise or NaN.
    """
    tolerance = _DEPENDENT * xp.column_norms(matrix)
    done = []
    rest = matrix
    for column in range(matrix.shape[1]):
        first, rest = rest[:, :1], rest[:, 1:]
        unit = first * xp.reciprocal_or_zero(xp.column_norms(first), tolerance[:, column : column + 1])
        done.append(unit)
        if column + 1 < matrix.shape[1]:
            rest = rest - xp.matmul(unit, xp.matmul(xp.transpose(unit), rest))
    return xp.concatenate_columns(done)
