"""Random-k sends elements at random positions. All ranks draw the same positions, so an allreduce adds up the
values."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from hvdcomp.arrays.types import Array, ArrayFunctions, allreduce_dtype, wide_dtype
from hvdcomp.compressors import sparse_payload
from hvdcomp.compressors.bucket import Bucket, BucketAggregation
from hvdcomp.compressors.protocol import Aggregation, AllReduce, Context, Outcome, SparseVector
from hvdcomp.compressors.randomness import distinct_indices, rotations, shared_key
from hvdcomp.compressors.sparse_payload import carried_dtype, elements_kept
from hvdcomp.compressors.sparsification import ByRatio
from hvdcomp.kernels.limits import LARGEST
from hvdcomp.specs.described import Truth


@dataclass(frozen=True)
class RandomK(ByRatio):
    """Sends k elements at random positions. All ranks draw the same positions, so only values are sent, and an
    allreduce adds them up (Stich et al. 2018, arXiv:1809.07599, section 2; Wangni et al. 2018 for the unbiased form).

    Attributes:
        unbiased: whether values are multiplied by d / k, if k of d elements are sent. The expectation is then the
            gradient itself, and no error feedback is needed.
        values: the element type of the values that are sent. "same" means the type of the gradient. The alternative is
            "fp16". With "fp16", sums are in half precision. Values are clipped to half the largest half-precision
            number divided by the number of ranks, so that sums cannot overflow in any order. If `unbiased`, a value
            beyond this limit is treated as infinite, unless the memory of a bucket keeps the excess.

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
        """Whether the expectation of the decoded values differs from the gradient. The value is True, unless `unbiased`
        multiplies the values by d / k (d: number of elements, k: number of sent elements)."""
        return not self.unbiased

    @property
    def variance(self) -> float:  # type: ignore[override]
        """The variance is d / k - 1 if values are multiplied by d / k, otherwise 0."""
        return 1 / self.ratio - 1 if self.unbiased else 0.0

    def aggregate(self, xp: ArrayFunctions, x: Array, state: tuple[Array, ...], context: Context) -> Aggregation:
        vector, dtype = xp.flatten(x), xp.dtype_name(x)
        d = vector.shape[0]
        k = elements_kept(self.ratio, d)
        # A random choice of k of the d elements, the same on all ranks.
        indices = distinct_indices(xp, shared_key(context, "randomk"), k, d, like=x)
        values = xp.take(vector, indices)
        if self.unbiased:
            values *= d / k
        bound = LARGEST["float16"] / (2 * context.world_size)
        sent = sparse_payload.round_values(xp, values, self.values, bound)
        # clipping would make the result biased, because usually no memory keeps the excess
        if self.unbiased and self.values == "fp16":
            sent = xp.where(abs(values) > bound, math.inf, sent)
        carried = "float16" if self.values == "fp16" else allreduce_dtype(dtype)
        mean = yield AllReduce(xp.astype(sent, carried))
        # The mean at the k places, and zeros elsewhere.
        wide = wide_dtype(dtype)
        dense = xp.add_at(xp.zeros((d,), like=xp.astype(vector[:0], wide)), indices, xp.astype(mean, wide))
        return Outcome(xp.reshape(dense, x.shape), SparseVector(indices, xp.astype(sent, dtype)))

    def aggregate_bucket(self, bucket: Bucket) -> BucketAggregation:
        """Like `aggregate`, but in passes over all tensors of the bucket. The names in parentheses are the kernels on a
        device. Instead of storing the random positions, these kernels compute them again in each pass.

        1. `random_encode` (`random_take`) draws the positions, computes x, and writes the values of x at these
           positions to the payload.
        2. `random_keep` (`random_take_off`) subtracts the sent values from x.
        3. `random_decode` (`random_put`) writes the means to the drawn positions in the results, and zeros elsewhere.
        """
        on_host, half = bucket.device is None, carried_dtype(self.values, bucket.dtype) == "float16"
        if bucket.layout is None:
            bucket.layout = _Layout(bucket, half)
        layout, context = bucket.layout, bucket.context
        bound = 0.0
        if self.values == "fp16":
            bound = LARGEST["float16"] / (2 * context.world_size)
        elif half:  # the memory, if any, keeps the excess
            bound = math.inf if self.unbiased else LARGEST["float16"]
        keys = bucket.draw_keys(shared=True)
        bucket.segments["shift"] = rotations(keys, bucket.segments["size"])
        payload, sent = layout.payload, layout.sent
        if on_host:
            scratch = layout.drawn, layout.places, layout.ends
            bucket.found_inf = bucket.call("random_encode", payload.vector, sent, *scratch, bound, self.unbiased)
        else:
            bucket.found_inf = bucket.call("random_take", payload.vector, sent, layout.scales, bound, self.unbiased)
        if bucket.keeps:
            layout.keep(bucket)
        mean = yield payload.mean
        if on_host:
            return bucket.call("random_decode", mean, layout.places, layout.ends, half)
        return bucket.call("random_put", mean, half)

    def most_elements(self, budget: float, size: int) -> int:
        return min(size, max(1, int(budget / sparse_payload.value_bytes(self.values))))


class _Layout:
    """The offsets of each tensor's values in the payload, and storage for the drawn positions.

    Args:
        bucket: the bucket. The constructor writes the columns `count`, `values` and `ends` of its table.
        half: whether the payload is in half precision.

    Attributes:
        payload: the sent values of all tensors. The values are in the order of tensors, and the values of a tensor are
            in the order of tasks.
        sent: the sent values, as receivers decode them, (values,).
        places: for each sent value, the index of its element within its task, (values,).
        ends: for each task, the end of its values among the values of its tensor (tasks,).
    """

    def __init__(self, bucket: Bucket, half: bool) -> None:
        segments = bucket.segments
        sizes = segments["size"].tolist()
        counts = [
            elements_kept(compressor.ratio, size) for compressor, size in zip(bucket.compressors, sizes, strict=True)
        ]
        segments["count"] = counts
        segments["values"] = np.cumsum(counts) - counts
        tasks = np.bincount(bucket.table.tasks["segment"], minlength=len(segments))
        segments["ends"] = np.cumsum(tasks) - tasks
        total = sum(counts)
        self.payload = bucket.payload(total, "float16" if half else "float32")
        self.sent = bucket.zeros(total, "float32")
        if bucket.device is not None:
            # Kernels compute the positions again instead of storing them.
            scales = np.array([size / count for size, count in zip(sizes, counts, strict=True)], np.float32)
            self.scales = bucket.xp.from_numpy(scales, like=self.sent)
            return
        self.drawn = np.zeros(total, np.uint64)
        self.places = np.zeros(total, np.uint16)
        self.ends = np.zeros(len(bucket.table.tasks), np.int64)

    def keep(self, bucket: Bucket) -> None:
        """Subtracts the sent values from x. With masking, also sets the velocity of the sent elements to zero."""
        if bucket.device is None:
            bucket.call("random_keep", self.sent, self.places, self.ends, bucket.masks)
        else:
            bucket.call("random_take_off", self.sent, bucket.masks, aside=True)
