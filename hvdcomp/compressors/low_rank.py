"""Low-rank approximation of gradient matrices."""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass
from types import ModuleType
from typing import Annotated, ClassVar

import numpy as np

from hvdcomp.arrays.types import Array, number_of_elements, wide_dtype
from hvdcomp.compressors.base import Compressor, Count, Rounds
from hvdcomp.compressors.bucket import Bucket, BucketAggregation
from hvdcomp.compressors.casts import NoCompression
from hvdcomp.compressors.low_rank_bucket import LowRankBucket
from hvdcomp.compressors.protocol import Aggregation, AllReduce, Context, Outcome, TensorInfo
from hvdcomp.compressors.randomness import drawn, shared_generator
from hvdcomp.errors import SpecError
from hvdcomp.kernels.limits import SMALLEST_NORM
from hvdcomp.specs.described import Rule, Truth
from hvdcomp.specs.levels import Level

# A column that keeps less than this share of its norm after projection was a combination of the columns before it; the
# remainder is rounding error without a meaningful direction.
_DEPENDENT = 1e-5

# Two factors and the state for the next step.
_Factors = Generator[AllReduce, Array, tuple[Array, Array, tuple[Array, ...]]]


@dataclass(frozen=True)
class PowerSGD(Compressor):
    """One power iteration per training step, warm-started (Vogels et al. 2019, arXiv:1905.13727, algorithm 1).

    The gradient is viewed as the matrix M of shape[0] rows. P = M Q is averaged and orthogonalised, Q = M' P is
    averaged, and the result is P Q'. Q is kept for the next step.

    With `alternating`, a step does half of this iteration with one allreduce (Vogels et al. 2020, arXiv:2008.01425):
    even steps average P = M Q with the orthogonalised Q of the step before, odd steps average Q = M' P with the
    orthogonalised P; the result is again P Q'. Even steps send rows x rank values and odd steps columns x rank:
    `payload_bytes` and `payload_floats` then return the mean of both, and a ledger has the bytes of each step.

    Attributes:
        rank: number of columns of the factors P and Q, at most the number of rows and of columns of the gradient
            matrix.
        min_rate: a tensor is sent uncompressed unless its factors P and Q together have fewer than rows * columns /
            min_rate elements.
        iterations: power iterations per step, at most 100. Each iteration needs two allreduces and sends both factors.
        alternating: whether to send one factor per step. Requires iterations=1.

    Example:
        >>> PowerSGD(rank=4).payload_bytes((1000, 1000))
        32000
    """

    rank: Count
    min_rate: Annotated[float, Rule(lambda rate: rate > 0, "positive (1 is usual)")] = 1.0
    iterations: Rounds = 1
    alternating: Truth = False

    name: ClassVar[str] = "powersgd"
    examples: ClassVar[tuple[str, ...]] = (
        "powersgd:rank=4",
        "powersgd:rank=4,alternating=True",
        "powersgd:rank=2,iterations=2",
    )
    level_name: ClassVar[str | None] = "rank"
    sends: ClassVar[str] = (
        "the factors P (rows x rank) and Q (columns x rank); only one of them per step if alternating"
    )
    biased: ClassVar[bool] = True
    sent_is_own: ClassVar[bool] = False  # P and Q are means over the ranks
    keeps_state: ClassVar[bool] = True
    of_matrices: ClassVar[bool] = True
    reference: ClassVar[str] = "Vogels et al. 2019, arXiv:1905.13727"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alternating and self.iterations > 1:
            raise SpecError(
                f"powersgd: iterations={self.iterations} does not work with alternating, which makes half an iteration "
                "in each step; leave out one of the two"
            )

    def prepare(self, xp: ModuleType, x: Array, state: tuple[Array, ...], context: Context) -> tuple[Array, ...]:
        rows, columns = matrix_shape(tuple(x.shape))
        rank = min(self.rank, rows, columns)
        q = fit_columns(xp, x, state[0] if state else None, columns, rank, context, "powersgd")
        if not self.alternating:
            return (q,)
        return q, fit_columns(xp, x, state[1] if len(state) > 1 else None, rows, rank, context, "powersgd rows")

    def aggregate(self, xp: ModuleType, x: Array, state: tuple[Array, ...], context: Context) -> Aggregation:
        matrix = as_matrix(xp, x)
        if not self.alternating:
            p, q, state = yield from self._iterate(xp, matrix, state)
        elif context.step % 2 == 0:
            p, q, state = yield from self._half(xp, matrix, state)
        else:
            q, p, (rows, columns) = yield from self._half(xp, matrix.T, state[::-1])
            state = columns, rows
        approximation = xp.astype(xp.reshape(p @ q.T, x.shape), xp.dtype_name(x))
        return Outcome(approximation, approximation, state)

    def _iterate(self, xp: ModuleType, matrix: Array, state: tuple[Array, ...]) -> _Factors:
        (start,) = state
        q = start
        for _ in range(self.iterations):
            p = yield AllReduce(matrix @ orthogonalize(xp, q))
            p = orthogonalize(xp, p)
            q = yield AllReduce(matrix.T @ p)
        return p, q, (nonzero_columns(xp, q, start),)

    def _half(self, xp: ModuleType, matrix: Array, state: tuple[Array, ...]) -> _Factors:
        """One half of a power iteration: the new factor, the orthogonalised kept factor, and the state."""
        start, old = state
        unit = orthogonalize(xp, start)
        new = yield AllReduce(matrix @ unit)
        return new, unit, (start, nonzero_columns(xp, new, old))

    def aggregate_bucket(self, bucket: Bucket) -> BucketAggregation:
        if bucket.layout is None:
            bucket.layout = LowRankBucket(bucket, [matrix_shape(tensor.shape) for tensor in bucket.tensors])
        if not self.alternating:
            return bucket.layout.iterate(self.iterations)
        return bucket.layout.half(even=bucket.context.step % 2 == 0)

    @property
    def period(self) -> int:  # type: ignore[override]
        """The number of steps after which payload sizes repeat: 2 if alternating, else 1."""
        return 2 if self.alternating else 1

    def level_for(self, compression_factor: float, shape: tuple[int, ...]) -> Level | None:
        super().level_for(compression_factor, shape)
        return rank_for(compression_factor * (0.5 if self.alternating else self.iterations), shape)

    def route(self, tensor: TensorInfo) -> Compressor:
        if tensor.size and self.payload_floats(tensor.shape) < tensor.size / self.min_rate:
            return self
        return NoCompression()


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """The shape of a tensor viewed as a matrix: the first dimension by the product of the others."""
    rows = shape[0] if shape else 1
    return rows, number_of_elements(shape[1:])


def as_matrix(xp: ModuleType, x: Array) -> Array:
    """The tensor as a matrix of `matrix_shape`, in float32 at least."""
    return xp.reshape(xp.astype(x, wide_dtype(xp.dtype_name(x))), matrix_shape(tuple(x.shape)))


def rank_for(compression_factor: float, shape: tuple[int, ...]) -> int:
    """The highest rank with which the two factors are no larger than 1 / `compression_factor` of the matrix; at least
    1."""
    rows, columns = matrix_shape(shape)
    rank = math.floor(rows * columns / (compression_factor * (rows + columns)))
    return max(1, min(rank, rows, columns))


def fit_columns(
    xp: ModuleType, x: Array, kept: Array | None, length: int, rank: int, context: Context, purpose: str
) -> Array:
    """The kept columns (length, any), cut to `rank` columns or filled up with random columns.

    All columns are drawn again if the kept columns have another length, for example from an older checkpoint with
    another shape.
    """
    if kept is None or kept.shape[0] != length:
        return random_columns(xp, x, length, rank, context, purpose)
    have = kept.shape[1]
    if have >= rank:
        return kept[:, :rank]
    return xp.concatenate([kept, random_columns(xp, x, length, rank, context, purpose)[:, have:]], axis=1)


def random_columns(xp: ModuleType, x: Array, length: int, count: int, context: Context, purpose: str) -> Array:
    """Standard normal columns (length, count), the same on every rank and at every step.

    A higher count begins with the columns of a lower one.
    """
    start = Context(context.name, 0, context.seed, 0, context.world_size)
    dtype = wide_dtype(xp.dtype_name(x))

    def draw() -> np.ndarray:
        return shared_generator(start, purpose).standard_normal((count, length), dtype=np.dtype(dtype).type)

    return drawn(xp, draw, (count, length), dtype, like=x).T


def nonzero_columns(xp: ModuleType, new: Array, old: Array) -> Array:
    """The new columns, with the old column where `orthogonalize` would treat the new one as zero.

    A zero gradient empties columns, and from zeros the power iteration would never start again.
    """
    norms = wide_norms(xp, new)
    return xp.where((norms > SMALLEST_NORM) & (norms < 1 / SMALLEST_NORM), new, old)


def wide_norms(xp: ModuleType, matrix: Array) -> Array:
    """2-norms (1, c) of a matrix's columns; sums are float64, so that squares neither overflow nor vanish."""
    return xp.reshape(xp.row_norms(matrix.T), (1, -1))


def orthogonalize(xp: ModuleType, matrix: Array) -> Array:
    """Orthonormal columns spanning those of `matrix`, by modified Gram-Schmidt, in fresh storage.

    A column that is (nearly) zero, or depends on the columns before it, becomes zero instead of noise or NaN; so does
    one whose norm overflows.
    """
    # Columns are normalised first, so that no later square overflows or vanishes.
    columns = matrix * xp.reciprocal_or_zero(wide_norms(xp, matrix), SMALLEST_NORM)
    done = [columns[:, :1]]
    for _ in range(matrix.shape[1] - 1):
        unit, columns = done[-1], columns[:, 1:]
        columns = columns - unit @ (unit.T @ columns)
        first = columns[:, :1]
        done.append(first * xp.reciprocal_or_zero(wide_norms(xp, first), _DEPENDENT))
    return xp.concatenate(done, axis=1)
