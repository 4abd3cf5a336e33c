"""Low-rank approximation of gradient matrices."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from hvdcomp.arrays.types import AnyArray, Array, ArrayFunctions, matrix_shape, wide_dtype
from hvdcomp.compressors.base import Compressor, Count, Rounds
from hvdcomp.compressors.bucket import Bucket, BucketAggregation, Payload
from hvdcomp.compressors.casts import NoCompression
from hvdcomp.compressors.protocol import Aggregation, AllReduce, Context, Outcome, TensorInfo
from hvdcomp.compressors.randomness import drawn, shared_generator
from hvdcomp.errors import SpecError
from hvdcomp.kernels.limits import SMALLEST_NORM
from hvdcomp.kernels.tables import FACTORS, PRODUCT, Tasks
from hvdcomp.specs.described import Rule, Truth
from hvdcomp.specs.levels import Level

# If less than this fraction of a column's norm is left after the projection, the column was a combination of earlier
# columns. Only rounding error is then left, whose direction has no meaning.
_DEPENDENT = 1e-5

# Two factors and the state for the next step.
_Factors = Generator[AllReduce, Array, tuple[Array, Array, tuple[Array, ...]]]

_PIECE = 1 << 16  # number of elements of a task that processes rows
_WIDTHS = 256, 1024  # fewest and most columns of a task that processes columns
_COLUMN_PIECE = 1 << 18  # number of elements of a task that processes columns, as far as `_WIDTHS` allows


@dataclass(frozen=True)
class PowerSGD(Compressor):
    """Runs one warm-started power iteration per training step (Vogels et al. 2019, arXiv:1905.13727, algorithm 1).

    The gradient is viewed as a matrix M with shape[0] rows. P = M Q is averaged and orthogonalized, Q = M' P is
    averaged, and the result is P Q'. Q is kept for the next step.

    With `alternating`, each step does half of this iteration, with a single allreduce (Vogels et al. 2020,
    arXiv:2008.01425). Even steps average P = M Q with the orthogonalized Q of the previous step. Odd steps average Q =
    M' P with the orthogonalized P of the previous step. The result is again P Q'. Even steps send rows x rank values,
    and odd steps send columns x rank values. `payload_bytes` and `payload_floats` then return the mean over an even and
    an odd step. The ledger records the bytes of each step.

    Attributes:
        rank: the number of columns of the factors P and Q. The rank is reduced if the gradient matrix has fewer rows or
            columns.
        min_rate: a tensor is sent uncompressed unless its factors P and Q together have fewer than rows * columns /
            min_rate elements.
        iterations: number of power iterations per step, at most 100. Each iteration needs two allreduces and sends both
            factors.
        alternating: whether to send only one factor per step. This requires iterations=1.

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
        "the factors P (rows x rank) and Q (columns x rank); only one of the two per step if alternating"
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

    def prepare(self, xp: ArrayFunctions, x: Array, state: tuple[Array, ...], context: Context) -> tuple[Array, ...]:
        rows, columns = matrix_shape(tuple(x.shape))
        rank = min(self.rank, rows, columns)
        q = fit_columns(xp, x, state[0] if state else None, columns, rank, context, "powersgd")
        if not self.alternating:
            return (q,)
        return q, fit_columns(xp, x, state[1] if len(state) > 1 else None, rows, rank, context, "powersgd rows")

    def aggregate(self, xp: ArrayFunctions, x: Array, state: tuple[Array, ...], context: Context) -> Aggregation:
        """Runs algorithm 1, lines 3 to 11. Q is orthogonalized as well, so that the values of P have the magnitude of M
        rather than of its square."""
        m = as_matrix(xp, x)
        if self.alternating:
            p, q, state = yield from self._alternate(xp, m, state, context.step)
        else:
            (start,) = state
            q = start
            for _ in range(self.iterations):
                p = yield AllReduce(m @ orthogonalize(xp, q))  # lines 3 and 4: P = the mean of M Q
                p = orthogonalize(xp, p)  # line 5
                q = yield AllReduce(m.T @ p)  # lines 6 and 7: Q = the mean of M' P
            state = (nonzero_columns(xp, q, start),)
        approximation = xp.astype(xp.reshape(p @ q.T, x.shape), xp.dtype_name(x))  # line 11: P Q'
        return Outcome(approximation, approximation, state)

    def _alternate(self, xp: ArrayFunctions, m: Array, state: tuple[Array, ...], step: int) -> _Factors:
        """Runs half a power iteration, which computes one factor and keeps the other. Returns P, Q, and the state (Q,
        P)."""
        kept_q, kept_p = state
        if step % 2 == 0:
            q = orthogonalize(xp, kept_q)
            p = yield AllReduce(m @ q)
            return p, q, (kept_q, nonzero_columns(xp, p, kept_p))
        p = orthogonalize(xp, kept_p)
        q = yield AllReduce(m.T @ p)
        return p, q, (nonzero_columns(xp, q, kept_q), kept_p)

    def aggregate_bucket(self, bucket: Bucket) -> BucketAggregation:
        """Like `aggregate`, but in passes over all matrices of the bucket:

        1. `lowrank_p` computes x, orthogonalizes Q, and computes P = M Q.
        2. `lowrank_q` orthogonalizes the mean of P, and computes Q = M' P.
        3. `lowrank_decode` writes P Q' to the results, and `lowrank_keep` writes the new state.

        An alternating step runs the third pass and only one of the first two passes. Whichever of these two passes runs
        also computes x.
        """
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


class LowRankBucket:
    """The bucket form of PowerSGD. The object contains the shapes of a bucket's matrices and the storage of their
    factors. It is created once for each bucket.

    One vector contains all factors P of a bucket, and another vector all factors Q. Each factor is stored column by
    column, as in `isa_lowrank.c`.

    Args:
        bucket: the bucket. Its method is `PowerSGD`.
        shapes: the numbers of rows and columns of each matrix.
    """

    def __init__(self, bucket: Bucket, shapes: Sequence[tuple[int, int]]) -> None:
        ranks = [min(compressor.rank, *shape) for compressor, shape in zip(bucket.compressors, shapes, strict=True)]
        ends = np.cumsum(np.array(shapes) * np.array(ranks)[:, None], axis=0)
        segments = bucket.segments
        segments["count"] = ranks
        segments["p_factor"][1:], segments["q_factor"][1:] = ends[:-1].T
        segments["columns"] = [columns for _, columns in shapes]
        self._bucket = bucket
        self._p, self._q = (bucket.payload(int(end), "float32") for end in ends[-1])
        self._unit_p, self._unit_q = (bucket.zeros(int(end), "float32") for end in ends[-1])
        self._sent_factors: _SentFactors | None = None  # on a device, decoding subtracts P Q' from x,
        self._rows: tuple[int, ...] = ()  # and kernels divide the work themselves
        self._columns: tuple[int, ...] = ()
        if bucket.device is None:
            self._sent_factors = _SentFactors(segments, int(ends[-1, 0]), int(ends[-1, 1])) if bucket.keeps else None
            self._of_rows = Tasks([(rows, max(1, _PIECE // columns)) for rows, columns in shapes])
            self._of_columns = Tasks([(columns, _width(rows)) for rows, columns in shapes])
            self._rows, self._columns = self._of_rows.passed, self._of_columns.passed

    def iterate(self, iterations: int) -> BucketAggregation:
        """Runs whole power iterations."""
        states = self._bucket.states
        assert states is not None
        (q,) = states.kept
        for iteration in range(iterations):
            p = yield self._send_p(q, first=iteration == 0)
            q = yield self._send_q(p, first=False)
        found_inf = self._decode(self._unit_p, q)
        self._keep(0, q)
        return found_inf

    def half(self, even: bool) -> BucketAggregation:
        """Computes one new factor: P in even steps, and Q in odd steps."""
        states = self._bucket.states
        assert states is not None
        q, p = states.kept
        if even:
            new = yield self._send_p(q, first=True)
            found_inf = self._decode(new, self._unit_q)
        else:
            new = yield self._send_q(p, first=True)
            found_inf = self._decode(self._unit_p, new)
        self._keep(int(even), new)
        states.next[1 - even][:] = states.kept[1 - even]
        return found_inf

    def _send_p(self, q: AnyArray, first: bool) -> AllReduce:
        """Orthogonalizes Q, computes P = M Q, and requests the mean of P."""
        return self._send("lowrank_p", self._rows, q, self._unit_q, self._p, first)

    def _send_q(self, p: AnyArray, first: bool) -> AllReduce:
        """Orthogonalizes P, computes Q = M' P, and requests the mean of Q."""
        return self._send("lowrank_q", self._columns, p, self._unit_p, self._q, first)

    def _send(
        self, kernel: str, tasks: tuple[int, ...], other: AnyArray, unit: AnyArray, sent: Payload, first: bool
    ) -> AllReduce:
        """Orthogonalizes the factor `other` into `unit`, multiplies M by `unit`, and requests the mean of the product.
        If `first` is true, the same pass computes x."""
        found_inf = self._bucket.call(kernel, *tasks, other, unit, sent.vector, first)
        if first:
            self._bucket.found_inf = found_inf
        return sent.mean

    def _decode(self, p: AnyArray, q: AnyArray) -> bool | AnyArray:
        if self._sent_factors is not None:
            self._sent_factors.write(self._bucket, p, q)
        return self._bucket.call("lowrank_decode", *self._rows, p, q)

    def _keep(self, kind: int, new: AnyArray) -> None:
        states = self._bucket.states
        assert states is not None
        self._bucket.call("lowrank_keep", new, states.kept[kind], states.next[kind], kind)


class _SentFactors:
    """The factors P and Q of the last step that was not skipped, and storage for the next P and Q. The next step
    subtracts the product P Q' of the stored factors from x."""

    def __init__(self, segments: np.ndarray, p: int, q: int) -> None:
        self._factors = [(np.empty(p, np.float32), np.empty(q, np.float32)) for _ in range(2)]
        self._products = [np.zeros(len(segments), FACTORS) for _ in range(2)]
        self._turn = 0  # index of the pair (P, Q) that a step writes
        for product, factors in zip(self._products, self._factors, strict=True):
            for name, factor in zip("pq", factors, strict=True):
                product[name] = factor.ctypes.data + factor.itemsize * segments[f"{name}_factor"]
            product["rank"], product["columns"] = segments["count"], segments["columns"]

    def write(self, bucket: Bucket, p: np.ndarray, q: np.ndarray) -> None:
        """Records in the bucket's table that P Q' is the sent part of x."""
        for kept, factor in zip(self._factors[self._turn], (p, q), strict=True):
            np.copyto(kept, factor)
        bucket.segments["sent_rule"] = PRODUCT
        bucket.segments["sent_product"] = self._products[self._turn]
        bucket.factors = self

    def commit(self) -> None:
        """Keeps this step's factors. The next step writes its factors to the other pair of arrays."""
        self._turn ^= 1


def _width(rows: int) -> int:
    least, most = _WIDTHS
    return min(most, max(least, _COLUMN_PIECE // rows // 16 * 16))


def as_matrix(xp: ArrayFunctions, x: Array) -> Array:
    """The tensor, viewed as a matrix with the shape `matrix_shape`, in float32 or a wider type."""
    return xp.reshape(xp.astype(x, wide_dtype(xp.dtype_name(x))), matrix_shape(tuple(x.shape)))


def rank_for(compression_factor: float, shape: tuple[int, ...]) -> int:
    """The highest rank for which both factors together have at most 1 / `compression_factor` of the matrix's elements;
    at least 1."""
    rows, columns = matrix_shape(shape)
    rank = math.floor(rows * columns / (compression_factor * (rows + columns)))
    return max(1, min(rank, rows, columns))


def fit_columns(
    xp: ArrayFunctions, x: Array, kept: Array | None, length: int, rank: int, context: Context, purpose: str
) -> Array:
    """Returns `rank` columns, made from the kept columns (length, any). Surplus columns are dropped, and missing
    columns are drawn at random.

    If the kept columns have a different length (for example because an older checkpoint has a different shape), all
    columns are drawn at random.
    """
    if kept is None or kept.shape[0] != length:
        return random_columns(xp, x, length, rank, context, purpose)
    have = kept.shape[1]
    if have >= rank:
        return kept[:, :rank]
    return xp.concatenate([kept, random_columns(xp, x, length, rank, context, purpose)[:, have:]], axis=1)


def random_columns(xp: ArrayFunctions, x: Array, length: int, count: int, context: Context, purpose: str) -> Array:
    """Standard normal columns (length, count), the same on every rank and at every step.

    With a higher count, the first columns are the same as with a lower count.
    """
    start = Context(context.name, 0, context.seed, 0, context.world_size)
    dtype = wide_dtype(xp.dtype_name(x))

    def draw() -> np.ndarray:
        return shared_generator(start, purpose).standard_normal((count, length), dtype=np.dtype(dtype).type)

    return drawn(xp, draw, (count, length), dtype, like=x).T


def nonzero_columns(xp: ArrayFunctions, new: Array, old: Array) -> Array:
    """The new columns.

    If `orthogonalize` would treat a new column as zero, the old column is used. Columns become zero if the gradient is
    zero. From a zero column, the power iteration would compute zero in all later steps.
    """
    norms = wide_norms(xp, new)
    return xp.where((norms > SMALLEST_NORM) & (norms < 1 / SMALLEST_NORM), new, old)


def wide_norms(xp: ArrayFunctions, matrix: Array) -> Array:
    """The 2-norms (1, c) of a matrix's columns. Sums are float64, so that squares neither overflow nor become zero."""
    return xp.reshape(xp.row_norms(matrix.T), (1, -1))


def orthogonalize(xp: ArrayFunctions, matrix: Array) -> Array:
    """Orthonormal columns with the same span as the columns of `matrix`, by modified Gram-Schmidt, in new storage.

    A column becomes zero if it is (nearly) zero, depends on earlier columns, or has a norm that overflows. Otherwise
    such a column would become noise or NaN.
    """
    # Columns are normalized first, so that no later square overflows or becomes zero.
    columns = matrix * xp.reciprocal_or_zero(wide_norms(xp, matrix), SMALLEST_NORM)
    done = [columns[:, :1]]
    for _ in range(matrix.shape[1] - 1):
        unit, columns = done[-1], columns[:, 1:]
        columns = columns - unit @ (unit.T @ columns)
        first = columns[:, :1]
        done.append(first * xp.reciprocal_or_zero(wide_norms(xp, first), _DEPENDENT))
    return xp.concatenate(done, axis=1)
