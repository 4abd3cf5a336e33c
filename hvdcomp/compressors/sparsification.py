"""Sparsifiers: a few elements are sent as they are, the rest stays in the memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar

from hvdcomp.collectives import (
    AllGather,
    AllReduce,
    Array,
    Context,
    Exchange,
    Outcome,
    SparseVector,
    TensorInfo,
    allreduce_dtype,
    dtype_bytes,
    number_of_elements,
)
from hvdcomp.compressors.base import Compressor, Level, require_ratio
from hvdcomp.compressors.casts import NoCompression
from hvdcomp.errors import SpecError
from hvdcomp.randomness import distinct_indices, shared_generator


def elements_kept(ratio: Level, size: int) -> int:
    """k = max(1, ceil(ratio d)), and never more than d."""
    return min(size, max(1, math.ceil(ratio * size)))


def index_bytes(size: int) -> int:
    """Bytes of one index into `size` elements."""
    return 4 if size < 2**31 else 8


@dataclass(frozen=True)
class TopK(Compressor):
    """The k elements of largest magnitude, values and indices (Aji & Heafield 2017; Stich et al. 2018).

    Attributes:
        ratio: share of the elements that is sent; k = max(1, ceil(ratio d)).
    """

    ratio: float

    name: ClassVar[str] = "topk"
    level_name: ClassVar[str | None] = "ratio"
    collective: ClassVar[str] = "allgather"
    biased: ClassVar[bool] = True
    reference: ClassVar[str] = "Aji and Heafield 2017, arXiv:1704.05021; Stich et al. 2018, arXiv:1809.07599"

    def __post_init__(self) -> None:
        require_ratio(self.name, self.ratio)

    def exchange(self, xp: ModuleType, x: Array, state: tuple[Array, ...], context: Context) -> Exchange:
        vector = xp.flatten(x)
        indices = xp.top_k_indices(vector, elements_kept(self.ratio, vector.shape[0]))
        values = xp.take(vector, indices)
        ranks = yield AllGather((values, indices))
        mean = mean_of_sparse(xp, ranks, vector, context)
        return Outcome(xp.reshape(mean, x.shape), SparseVector(indices, values))

    def payload_bytes(self, shape: tuple[int, ...], level: Level | None = None, dtype: str = "float32") -> int:
        size = number_of_elements(shape)
        return elements_kept(self.ratio if level is None else level, size) * (dtype_bytes(dtype) + index_bytes(size))

    def payload_floats(self, shape: tuple[int, ...], level: Level | None = None) -> float:
        return elements_kept(self.ratio if level is None else level, number_of_elements(shape))

    def level_for(self, compression_factor: float, shape: tuple[int, ...]) -> Level | None:
        super().level_for(compression_factor, shape)
        return ratio_for(compression_factor, number_of_elements(shape), 4 + index_bytes(number_of_elements(shape)))

    def route(self, tensor: TensorInfo) -> Compressor:
        return self if tensor.size else NoCompression()


@dataclass(frozen=True)
class RandomK(Compressor):
    """k elements at random places that every rank draws alike, so that only values travel and can be allreduced
    (Stich et al. 2018, arXiv:1809.07599, section 2; Wangni et al. 2018 for the unbiased form).

    Attributes:
        ratio: share of the elements that is sent; k = max(1, ceil(ratio d)).
        unbiased: scale by d / k, so that the expectation is the gradient itself (and no error feedback is needed).
    """

    ratio: float
    unbiased: bool = False

    name: ClassVar[str] = "randomk"
    level_name: ClassVar[str | None] = "ratio"
    collective: ClassVar[str] = "allreduce"
    reference: ClassVar[str] = "Stich et al. 2018, arXiv:1809.07599; Wangni et al. 2018, arXiv:1710.09854"

    def __post_init__(self) -> None:
        require_ratio(self.name, self.ratio)
        if not isinstance(self.unbiased, bool):
            raise SpecError(f"randomk: unbiased={self.unbiased} is not allowed; it is true or false")

    @property
    def biased(self) -> bool:  # type: ignore[override]
        """Biased unless scaled by d / k."""
        return not self.unbiased

    def exchange(self, xp: ModuleType, x: Array, state: tuple[Array, ...], context: Context) -> Exchange:
        vector = xp.flatten(x)
        size = vector.shape[0]
        count = elements_kept(self.ratio, size)
        drawn = distinct_indices(shared_generator(context, "randomk"), count, size)
        indices = xp.from_numpy(drawn, like=x)
        values = xp.take(vector, indices)
        if self.unbiased:
            values = xp.scale(values, size / count)
        mean = yield AllReduce(xp.astype(values, allreduce_dtype(xp.dtype_name(x))))
        dense = xp.add_at(xp.zeros((size,), like=x), indices, xp.astype(mean, xp.dtype_name(x)))
        return Outcome(xp.reshape(dense, x.shape), SparseVector(indices, values))

    def payload_bytes(self, shape: tuple[int, ...], level: Level | None = None, dtype: str = "float32") -> int:
        return elements_kept(self.ratio if level is None else level, number_of_elements(shape)) * dtype_bytes(
            allreduce_dtype(dtype)
        )

    def level_for(self, compression_factor: float, shape: tuple[int, ...]) -> Level | None:
        super().level_for(compression_factor, shape)
        return ratio_for(compression_factor, number_of_elements(shape), 4)

    def route(self, tensor: TensorInfo) -> Compressor:
        return self if tensor.size else NoCompression()


def mean_of_sparse(xp: ModuleType, ranks: list[tuple[Array, Array]], like: Array, context: Context) -> Array:
    """Adds every rank's (values, indices) into one dense vector, in rank order, and divides by their number.

    Half-precision values are added in float32.
    """
    wide = "float32" if xp.item_size(like) < 4 else xp.dtype_name(like)
    total = xp.zeros(like.shape, like=xp.astype(like[:0], wide))
    for values, indices in ranks:
        total = xp.add_at(total, indices, xp.astype(values, wide))
    return xp.scale(total, 1 / context.size)


def ratio_for(compression_factor: float, size: int, bytes_per_element: int) -> float:
    """The share of elements whose payload is 1 / `compression_factor` of `size` floats."""
    return min(1.0, max(1, math.floor(4 * size / (compression_factor * bytes_per_element))) / size)
