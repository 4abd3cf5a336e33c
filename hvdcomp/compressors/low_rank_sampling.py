"""Spectral ATOMO sends a random choice of singular triplets. The triplets are scaled so that the expectation is the
gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from hvdcomp.arrays.types import Array, ArrayFunctions
from hvdcomp.compressors.base import Compressor, Count
from hvdcomp.compressors.casts import NoCompression
from hvdcomp.compressors.low_rank import as_matrix, rank_for
from hvdcomp.compressors.protocol import Aggregation, AllGather, Context, Outcome, TensorInfo
from hvdcomp.compressors.randomness import rank_generator
from hvdcomp.specs.levels import Level


@dataclass(frozen=True)
class ATOMO(Compressor):
    """Sends randomly chosen singular triplets of the gradient matrix, each divided by its probability (Wang et al.
    2018, arXiv:1806.04090, algorithm 1).

    The gradient is viewed as a matrix with shape[0] rows, M = sum of sigma_i u_i v_i'. Triplet i is sent with the
    probability p_i = min(1, c sigma_i). The factor c is chosen so that the probabilities add up to `rank`.

    The paper draws each triplet independently, so the number of triplets varies. This class uses systematic sampling,
    which draws exactly `rank` triplets. The p_i are the lengths of segments that lie end to end on a line of length
    `rank`. The line is divided into intervals of length 1. One random offset between 0 and 1 is drawn. In each
    interval, the segment at this offset determines which triplet is sent. The probability of a triplet is still p_i, so
    the result is unbiased. Because triplets are orthogonal, the variance is the sum of sigma_i^2 (1 / p_i - 1). The
    variance depends only on the p_i, so it is the same as in the paper.

    For speed, the method decomposes M M' (or M' M, if it is smaller) instead of M. ATOMO is still by far the slowest
    compressor, and an accelerator waits for the decomposition.

    Attributes:
        rank: number of singular triplets that are sent, at most the smaller of rows and columns. With this maximum, the
            gradient is sent exactly.

    Example:
        >>> ATOMO(rank=4).payload_bytes((1000, 1000))
        32000
    """

    rank: Count

    name: ClassVar[str] = "atomo"
    examples: ClassVar[tuple[str, ...]] = ("atomo:rank=4",)
    level_name: ClassVar[str | None] = "rank"
    sends: ClassVar[str] = "pairs of vectors u (rows) and v (columns), scaled by sigma / p; rank is their number"
    variance: ClassVar[float] = math.inf  # min(rows, columns) / rank - 1 if singular values are equal
    of_matrices: ClassVar[bool] = True
    reference: ClassVar[str] = "Wang et al. 2018, arXiv:1806.04090"

    def aggregate(self, xp: ArrayFunctions, x: Array, state: tuple[Array, ...], context: Context) -> Aggregation:
        # aligned, because the last bits of a product may depend on the addresses of its factors
        matrix = xp.aligned(as_matrix(xp, x))
        # M = sum of u_i (sigma_i v_i)'. If M has more rows than columns, the sum is M' instead.
        tall = matrix.shape[0] > matrix.shape[1]
        short, long = atoms(xp, matrix.T if tall else matrix)
        sigma = xp.flatten(xp.row_norms(long))
        # Algorithm 1 gives p_i. A sampled triplet is sent as u_i and (sigma_i / p_i) v_i.
        offset = rank_generator(context, "atomo").random()
        chosen, weights = sampled_triplets(xp, sigma, min(self.rank, sigma.shape[0]), offset)
        short = xp.take(short, chosen)
        long = xp.take(long, chosen) * xp.reshape(xp.astype(weights, xp.dtype_name(long)), (-1, 1))
        left, right = (long, short) if tall else (short, long)
        ranks = yield AllGather((left, right))
        # The mean over ranks of the sums of u_i (sigma_i / p_i) v_i', as one product of all ranks' vectors.
        lefts = xp.concatenate([left for left, _ in ranks])
        rights = xp.concatenate([right for _, right in ranks])
        mean = lefts.T @ rights
        mean *= 1 / context.world_size
        sent = left.T @ right
        return Outcome(xp.reshape(mean, x.shape), xp.reshape(sent, x.shape))

    def level_for(self, compression_factor: float, shape: tuple[int, ...]) -> Level | None:
        super().level_for(compression_factor, shape)
        return rank_for(compression_factor, shape)

    def route(self, tensor: TensorInfo) -> Compressor:
        return self if tensor.size and self.payload_floats(tensor.shape) < tensor.size else NoCompression()


def atoms(xp: ArrayFunctions, matrix: Array) -> tuple[Array, Array]:
    """Splits a matrix M (m, n), m <= n, into a sum of m atoms u_i (sigma_i v_i)', in descending order of sigma_i.

    The u_i are eigenvectors of M M'. The u_i need not be accurate, because the atoms u_i (M' u_i)' add up to M for any
    orthonormal basis. So the result is unbiased even if rounding changes small singular values, or if M M' overflows.
    (Elements of M M' that overflow are set to zero, because LAPACK needs finite numbers.)

    Returns:
        u_i as rows (m, m), and sigma_i v_i = M' u_i as rows (m, n).
    """
    gram = matrix @ matrix.T
    basis = xp.eigenvectors(xp.finite_or_zero(gram))
    return basis, basis @ matrix


def sampled_triplets(xp: ArrayFunctions, sigma: Array, count: int, offset: float) -> tuple[Array, Array]:
    """Chooses `count` singular triplets by systematic sampling (`ATOMO`).

    Args:
        sigma: the singular values of the matrix, (r,), in descending order.
        count: number of triplets to draw, at most r.
        offset: a number drawn uniformly from [0, 1).

    Returns:
        The triplets' indices (count,) and their weights 1 / p (count,), float64. If fewer than `count` triplets have a
        sigma above 0, the other returned triplets have sigma 0.
    """
    sigma = xp.astype(sigma, "float64")
    cumulative = sigma.cumsum(0)
    tails = cumulative[-1:] - cumulative + sigma
    budgets = xp.from_numpy(count - np.arange(sigma.shape[0], dtype=np.float64), like=sigma)
    # Algorithm 1 sets p = 1 for one triplet after another, until the rest of the budget can be divided in proportion to
    # sigma. Once this division is possible, it stays possible after every later triplet. So the test can be made for
    # all triplets at once.
    certain = sigma * budgets > tails
    budget = count - xp.astype(certain, "float64").cumsum(0)[-1:]
    tail = xp.where(certain, 0.0, sigma).cumsum(0)[-1:]
    probabilities = xp.where(certain, 1.0, sigma * budget * xp.reciprocal_or_zero(tail, 0.0))
    points = xp.from_numpy(offset + np.arange(count, dtype=np.float64), like=sigma)
    chosen = xp.interval_index(probabilities.cumsum(0), points)
    return chosen, xp.reciprocal_or_zero(xp.take(probabilities, chosen), 0.0)
