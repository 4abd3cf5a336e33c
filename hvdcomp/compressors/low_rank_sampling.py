"""Spectral ATOMO: a random choice of singular triplets, scaled so that the expectation is the gradient itself."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar

import numpy as np

from hvdcomp.arrays.types import Array
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

    The gradient is viewed as the matrix of shape[0] rows, M = sum of sigma_i u_i v_i'. Triplet i is sent with the
    probability p_i = min(1, c sigma_i), where c makes the probabilities add up to `rank`.

    The paper draws each triplet independently, so that their number varies. Here systematic sampling draws exactly
    `rank` triplets: the p_i are laid end to end on a line of length `rank`, and in every unit interval the triplet at
    the same random offset is drawn. The probability of a triplet is still p_i, so the result is unbiased. As triplets
    are orthogonal, its variance, the sum of sigma_i^2 (1 / p_i - 1), depends on the p_i alone and equals the paper's.

    For speed, the method decomposes M M' (or M' M, if smaller) instead of M. Still, this is by far the slowest
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
    sends: ClassVar[str] = "rank pairs of vectors u (rows) and v (columns), scaled by sigma / p"
    variance: ClassVar[float] = math.inf  # min(rows, columns) / rank - 1 if singular values are equal
    of_matrices: ClassVar[bool] = True
    reference: ClassVar[str] = "Wang et al. 2018, arXiv:1806.04090"

    def aggregate(self, xp: ModuleType, x: Array, state: tuple[Array, ...], context: Context) -> Aggregation:
        matrix = xp.aligned(as_matrix(xp, x))  # as the last bits of a product may depend on where its factors lie
        # M = sum of u_i (sigma_i v_i)', or the same of M' if M has more rows than columns.
        tall = matrix.shape[0] > matrix.shape[1]
        short, long = atoms(xp, matrix.T if tall else matrix)
        sigma = xp.flatten(xp.row_norms(long))
        # Algorithm 1 gives p_i; a sampled triplet is sent as u_i and (sigma_i / p_i) v_i.
        offset = rank_generator(context, "atomo").random()
        chosen, weights = sampled_triplets(xp, sigma, min(self.rank, sigma.shape[0]), offset)
        short = xp.take(short, chosen)
        long = xp.take(long, chosen) * xp.reshape(xp.astype(weights, xp.dtype_name(long)), (-1, 1))
        left, right = (long, short) if tall else (short, long)
        ranks = yield AllGather((left, right))
        # The mean over ranks of sum u_i (sigma_i / p_i) v_i', as one product of all ranks' vectors.
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


def atoms(xp: ModuleType, matrix: Array) -> tuple[Array, Array]:
    """Splits a matrix (m, n), m <= n, into the sum of m atoms u_i (sigma_i v_i)', most of it in the first.

    The u_i are eigenvectors of M M'. They need not be accurate: with any orthonormal basis the atoms u_i (M' u_i)'
    add up to M. So neither small singular values lost in rounding nor an M M' that overflows (it is then cleared,
    which LAPACK needs) biases the result.

    Returns:
        u_i as rows (m, m), and sigma_i v_i = M' u_i as rows (m, n).
    """
    gram = matrix @ matrix.T
    basis = xp.eigenvectors(xp.finite_or_zero(gram))
    return basis, basis @ matrix


def sampled_triplets(xp: ModuleType, sigma: Array, count: int, offset: float) -> tuple[Array, Array]:
    """Chooses `count` singular triplets by systematic sampling.

    Args:
        sigma: singular values (r,), descending.
        count: number of triplets, at most r.
        offset: uniformly drawn from [0, 1).

    Returns:
        The triplets' indices (count,) and weights 1 / p (count,), float64. A triplet of sigma 0 may fill a place.
    """
    sigma = xp.astype(sigma, "float64")
    cumulative = sigma.cumsum(0)
    tails = cumulative[-1:] - cumulative + sigma
    budgets = xp.from_numpy(count - np.arange(sigma.shape[0], dtype=np.float64), like=sigma)
    # Algorithm 1 gives p = 1 to one triplet after another until the remaining budget can be shared in proportion to
    # sigma. Once that holds for a triplet it holds for all later ones, so that all can be tested at once.
    certain = sigma * budgets > tails
    budget = count - xp.astype(certain, "float64").cumsum(0)[-1:]
    tail = xp.where(certain, 0.0, sigma).cumsum(0)[-1:]
    probabilities = xp.where(certain, 1.0, sigma * budget * xp.reciprocal_or_zero(tail, 0.0))
    points = xp.from_numpy(offset + np.arange(count, dtype=np.float64), like=sigma)
    chosen = xp.interval_index(probabilities.cumsum(0), points)
    return chosen, xp.reciprocal_or_zero(xp.take(probabilities, chosen), 0.0)
