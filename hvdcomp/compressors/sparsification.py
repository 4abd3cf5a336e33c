"""Sparsifiers: a few elements are sent, and the memory keeps the others."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import ModuleType
from typing import Annotated, ClassVar

from hvdcomp.arrays.magnitudes import Magnitudes
from hvdcomp.arrays.types import Array, allreduce_dtype, number_of_elements, wide_dtype
from hvdcomp.compressors import sparse_payload
from hvdcomp.compressors.base import Compressor
from hvdcomp.compressors.bucket import Bucket, BucketAggregation
from hvdcomp.compressors.protocol import Aggregation, AllGather, AllReduce, Context, Outcome, SparseVector
from hvdcomp.compressors.randomness import distinct_indices, shared_key
from hvdcomp.compressors.sparse_bucket import aggregate_by_magnitude
from hvdcomp.compressors.sparse_payload import elements_kept
from hvdcomp.compressors.sparse_random import aggregate_at_random
from hvdcomp.kernels.limits import LARGEST
from hvdcomp.kernels.tables import KTH_LARGEST
from hvdcomp.specs.described import SHARE, Rule, Truth
from hvdcomp.specs.levels import Level


@dataclass(frozen=True)
class WithRatio(Compressor):
    """Base class of the methods that send a share of the elements. The share is the level.

    Attributes:
        ratio: share of the elements that is sent: k = max(1, ceil(ratio * d)) of d elements.
    """

    ratio: Annotated[float, Rule(SHARE.allows, "a share above 0 and at most 1 (0.01 sends one element in a hundred)")]

    level_name: ClassVar[str | None] = "ratio"

    def level_for_elements(self, compression_factor: float, shape: tuple[int, ...]) -> Level | None:
        Compressor.level_for(self, compression_factor, shape)
        size = number_of_elements(shape)
        return max(1, math.floor(size / compression_factor)) / size if size else self.ratio


@dataclass(frozen=True)
class ByRatio(WithRatio):
    """Base class of methods that send k elements of a tensor of any shape."""

    def most_elements(self, budget: float, size: int) -> int:
        """The most elements of a tensor of `size` whose payload is within `budget` bytes; 1 if no payload is."""
        raise NotImplementedError

    def payload_floats(self, shape: tuple[int, ...], level: Level | None = None) -> float:
        return elements_kept(self.ratio if level is None else level, number_of_elements(shape))

    def level_for(self, compression_factor: float, shape: tuple[int, ...]) -> Level | None:
        super().level_for(compression_factor, shape)
        size = number_of_elements(shape)
        return self.most_elements(4 * size / compression_factor, size) / size if size else self.ratio


@dataclass(frozen=True)
class Sparsifier(ByRatio):
    """Base class of the sparsifiers in which each rank chooses its own elements, and the ranks gather values and
    indices.

    An index takes two bytes if this makes the payload smaller (`sparse_payload`).

    Attributes:
        values: element type of the values that are sent: "same" as the gradient, or "fp16". The memory keeps the
            rounding error, and the excess above the largest half-precision number.
    """

    values: sparse_payload.How = field(default="same", kw_only=True)

    sends: ClassVar[str] = "k values, k indices"
    biased: ClassVar[bool] = True

    def choose(self, xp: ModuleType, vector: Array, k: int) -> Array:
        """Indices (k,), each at most once, of the elements of the vector (d,) to send."""
        raise NotImplementedError

    def aggregate(self, xp: ModuleType, x: Array, state: tuple[Array, ...], context: Context) -> Aggregation:
        vector = xp.flatten(x)
        parts, sent = self._encode(xp, vector, context)
        ranks = yield AllGather(parts)
        mean = sparse_payload.mean_of_sparse(xp, ranks, vector, context)
        return Outcome(xp.reshape(mean, x.shape), sent)

    def preview(self, xp: ModuleType, x: Array, state: tuple[Array, ...], context: Context) -> SparseVector:
        return self._encode(xp, xp.flatten(x), context)[1]  # needs no unpacking

    def _encode(self, xp: ModuleType, vector: Array, context: Context) -> tuple[tuple[Array, ...], SparseVector]:
        count = elements_kept(self.ratio, vector.shape[0])
        return sparse_payload.encode(xp, vector, self.choose(xp, vector, count), self.values)

    def most_elements(self, budget: float, size: int) -> int:
        return sparse_payload.most_elements(budget, size, sparse_payload.value_bytes(self.values))


@dataclass(frozen=True)
class TopK(Sparsifier):
    """Sends the k elements of largest magnitude (Aji & Heafield 2017; Stich et al. 2018).

    Example:
        >>> TopK(ratio=0.01).payload_bytes((1000, 1000))
        60064
    """

    name: ClassVar[str] = "topk"
    examples: ClassVar[tuple[str, ...]] = ("topk:ratio=0.01", "topk:ratio=0.01,values=fp16")
    nested: ClassVar[bool] = True
    reference: ClassVar[str] = "Aji and Heafield 2017, arXiv:1704.05021; Stich et al. 2018, arXiv:1809.07599"

    def choose(self, xp: ModuleType, vector: Array, k: int) -> Array:
        return Magnitudes(xp, vector, k).top(k)

    def aggregate_bucket(self, bucket: Bucket) -> BucketAggregation:
        return aggregate_by_magnitude(bucket, self.values, KTH_LARGEST)


@dataclass(frozen=True)
class RandomK(ByRatio):
    """Sends k elements at random positions. All ranks draw the same positions, so only values are sent, and an
    allreduce adds them up (Stich et al. 2018, arXiv:1809.07599, section 2; Wangni et al. 2018 for the unbiased form).

    Attributes:
        unbiased: whether values are multiplied by d / k (d elements, of which k are sent), so that the expectation is
            the gradient itself and no error feedback is needed.
        values: element type of the values that are sent: "same" as the gradient, or "fp16". With "fp16", sums are in
            half precision, and values are clipped to half the largest half-precision number divided by the number of
            ranks, so that no order of additions overflows. If `unbiased`, a larger value counts as not finite, unless a
            bucket's memory keeps the excess.

    Example:
        >>> RandomK(ratio=0.01).payload_bytes((1000, 1000))
        40000
    """

    unbiased: Truth = False
    values: sparse_payload.How = field(default="same", kw_only=True)

    name: ClassVar[str] = "randomk"
    examples: ClassVar[tuple[str, ...]] = ("randomk:ratio=0.01", "randomk:ratio=0.01,unbiased=True")
    sends: ClassVar[str] = "k values"
    reference: ClassVar[str] = "Stich et al. 2018, arXiv:1809.07599; Wangni et al. 2018, arXiv:1710.09854"

    @property
    def biased(self) -> bool:  # type: ignore[override]
        """Whether the mean of the decoded values differs from the gradient: True, unless `unbiased` scales the values
        by d / k (d: number of elements, k: number of sent elements)."""
        return not self.unbiased

    @property
    def variance(self) -> float:  # type: ignore[override]
        """d / k - 1 if scaled by d / k."""
        return 1 / self.ratio - 1 if self.unbiased else 0.0

    def aggregate(self, xp: ModuleType, x: Array, state: tuple[Array, ...], context: Context) -> Aggregation:
        vector = xp.flatten(x)
        size = vector.shape[0]
        count = elements_kept(self.ratio, size)
        dtype = xp.dtype_name(x)
        indices = distinct_indices(xp, shared_key(context, "randomk"), count, size, like=x)
        values = xp.take(vector, indices)
        if self.unbiased:
            values *= size / count
        bound = LARGEST["float16"] / (2 * context.world_size)
        sent = sparse_payload.round_values(xp, values, self.values, bound)
        if self.unbiased and self.values == "fp16":  # clipped, it would be biased, as mostly nothing is kept
            sent = xp.where(abs(values) > bound, math.inf, sent)
        carried = "float16" if self.values == "fp16" else allreduce_dtype(dtype)
        mean = yield AllReduce(xp.astype(sent, carried))
        wide = wide_dtype(dtype)
        dense = xp.add_at(xp.zeros((size,), like=xp.astype(vector[:0], wide)), indices, xp.astype(mean, wide))
        return Outcome(xp.reshape(dense, x.shape), SparseVector(indices, xp.astype(sent, dtype)))

    def aggregate_bucket(self, bucket: Bucket) -> BucketAggregation:
        return aggregate_at_random(bucket, self.values, self.unbiased)

    def most_elements(self, budget: float, size: int) -> int:
        return min(size, max(1, int(budget / sparse_payload.value_bytes(self.values))))
