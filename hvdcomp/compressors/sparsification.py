"""Sparsifiers in which each rank chooses its own few elements. The memory keeps the other elements."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import numpy as np

from hvdcomp.arrays.magnitudes import Magnitudes, elements_of_sample, sample_stride
from hvdcomp.arrays.types import Array, ArrayFunctions, number_of_elements
from hvdcomp.compressors import sparse_payload
from hvdcomp.compressors.base import Compressor
from hvdcomp.compressors.bucket import Bucket, BucketAggregation, gathered
from hvdcomp.compressors.protocol import Aggregation, AllGather, Context, Outcome, SparseVector
from hvdcomp.compressors.signs import from_signs, to_signs
from hvdcomp.compressors.sparse_payload import elements_kept
from hvdcomp.kernels.tables import CANDIDATES, CHOICE, FITTED, KTH_LARGEST, NARROW, SAMPLED, SLACK, SparseStruct
from hvdcomp.specs.described import SHARE, Rule
from hvdcomp.specs.levels import Level

# The storage for candidates, per element that is needed. About 2.3 candidates per needed element are expected. If a
# task has more candidates than fit into its storage, the kernel searches all elements of the task.
_CANDIDATES_PER_NEEDED = 8


@dataclass(frozen=True)
class WithRatio(Compressor):
    """Base class of the methods that send a share of the elements. The share is the level.

    Attributes:
        ratio: the share of the elements that is sent. Of d elements, k = max(1, ceil(ratio * d)) are sent.
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
        """The largest number of elements, for a tensor with `size` elements, whose payload has at most `budget` bytes;
        1 if there is no such number."""
        raise NotImplementedError

    def payload_floats(self, shape: tuple[int, ...], level: Level | None = None) -> float:
        return elements_kept(self.ratio if level is None else level, number_of_elements(shape))

    def level_for(self, compression_factor: float, shape: tuple[int, ...]) -> Level | None:
        super().level_for(compression_factor, shape)
        size = number_of_elements(shape)
        return self.most_elements(4 * size / compression_factor, size) / size if size else self.ratio


@dataclass(frozen=True)
class Sparsifier(ByRatio):
    """Base class of sparsifiers in which each rank chooses its own elements. The ranks gather the values and the
    indices.

    `sparse_payload` describes the payload. An index takes two bytes if this makes the payload smaller.

    Attributes:
        values: the element type of the values that are sent. "same" means the type of the gradient. The alternative is
            "fp16". The memory keeps the rounding error, and the excess above the largest half-precision number.
    """

    values: sparse_payload.How = field(default="same", kw_only=True)

    sends: ClassVar[str] = "k values, k indices"
    biased: ClassVar[bool] = True

    def choose(self, xp: ArrayFunctions, vector: Array, k: int) -> Array:
        """Chooses k elements of the vector (d,) to send. Returns their indices (k,), without duplicates."""
        raise NotImplementedError

    def aggregate(self, xp: ArrayFunctions, x: Array, state: tuple[Array, ...], context: Context) -> Aggregation:
        """Sends the chosen elements. C(x) has these k elements, and zeros elsewhere. The result is the mean of C(x)
        over the ranks."""
        vector = xp.flatten(x)
        parts, sent = self._encode(xp, vector)
        ranks = yield AllGather(parts)
        mean = sparse_payload.mean_of_sparse(xp, ranks, vector, context)
        return Outcome(xp.reshape(mean, x.shape), sent)

    def preview(self, xp: ArrayFunctions, x: Array, state: tuple[Array, ...], context: Context) -> SparseVector:
        return self._encode(xp, xp.flatten(x))[1]  # C(x) is known without unpacking the payload

    def _encode(self, xp: ArrayFunctions, vector: Array) -> tuple[tuple[Array, ...], SparseVector]:
        """The payload (values and indices), and C(x)."""
        k = elements_kept(self.ratio, vector.shape[0])
        return sparse_payload.encode(xp, vector, self.choose(xp, vector, k), self.values)

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

    def choose(self, xp: ArrayFunctions, vector: Array, k: int) -> Array:
        return Magnitudes(xp, vector, k).top(k)

    def aggregate_bucket(self, bucket: Bucket) -> BucketAggregation:
        return aggregate_by_magnitude(bucket, self.values, KTH_LARGEST)


@dataclass(frozen=True)
class SparseTernary(ByRatio):
    """Sparse ternary compression (STC): sends the k elements of largest magnitude, each as plus or minus the mean
    magnitude of these k elements (Sattler et al. 2019, arXiv:1903.02891, algorithm 1).

        C(x)_i = mu sign(x_i) for the k largest |x_i|, else 0;  mu = the mean of these k magnitudes

    A zero among the k elements counts as positive. Indices are encoded as in `topk`. The paper's Golomb code is not
    used, because its length depends on the gradient, but the length of a payload must not depend on the gradient. A
    sign takes one bit, and mu is one float32.

    Example:
        >>> SparseTernary(ratio=0.01).payload_bytes((100, 100))  # 100 places, 100 bits in 13 bytes, one float32
        217
    """

    name: ClassVar[str] = "stc"
    examples: ClassVar[tuple[str, ...]] = ("stc:ratio=0.01",)
    sends: ClassVar[str] = "k indices, k sign bits, and one magnitude"
    biased: ClassVar[bool] = True
    reference: ClassVar[str] = "Sattler et al. 2019, arXiv:1903.02891"

    def aggregate(self, xp: ArrayFunctions, x: Array, state: tuple[Array, ...], context: Context) -> Aggregation:
        vector = xp.flatten(x)
        k = elements_kept(self.ratio, vector.shape[0])
        # The k elements of largest magnitude.
        chosen = Magnitudes(xp, vector, k).top(k)
        (values, *places), masked = sparse_payload.encode(xp, vector, chosen, "same")
        signs, mu = to_signs(xp, values, x)
        ranks = yield AllGather((signs, mu, *places))
        # The values mu sign(x) of each rank, at the positions that this rank chose. They are added in rank order.
        decoded = ((from_signs(xp, signs, mu, k), *places) for signs, mu, *places in ranks)
        mean = sparse_payload.mean_of_sparse(xp, decoded, vector, context)
        sent = xp.astype(from_signs(xp, signs, mu, k), xp.dtype_name(x))
        return Outcome(xp.reshape(mean, x.shape), SparseVector(masked.indices, sent))

    def payload_floats(self, shape: tuple[int, ...], level: Level | None = None) -> float:
        return 1 + super().payload_floats(shape, level) / 32

    def most_elements(self, budget: float, size: int) -> int:
        magnitude_and_last_byte = 4 + 1
        return sparse_payload.most_elements(budget - magnitude_and_last_byte, size, bytes_of_value=1 / 8)


class SparsePlaces:
    """The offsets of each tensor's values and indices in a bucket's payload.

    The payload contains the values, the counts of blocks and the indices of all tensors, as in `sparse_payload`. Parts
    with wider element types come first.

    Args:
        bucket: the bucket. The constructor writes `count` and the offsets of the parts to its table.
        values: the element type of the sent values, "same" or "fp16", as in `sparse_payload`.

    Attributes:
        payload: the payload that this rank sends.
        type: the element type of the values in the payload, as a number of `NARROW`.
    """

    def __init__(self, bucket: Bucket, values: str) -> None:
        self.type = NARROW[sparse_payload.carried_dtype(values, bucket.dtype)]
        sizes = [tensor.size for tensor in bucket.tensors]
        counts = [
            sparse_payload.elements_kept(compressor.ratio, size)
            for compressor, size in zip(bucket.compressors, sizes, strict=True)
        ]
        value_bytes = sparse_payload.value_bytes(values, bucket.dtype)
        parts = []  # (bytes of an element, bytes of the part, kind of the part, tensor)
        kinds = "values", "block_counts", "indices"
        widths = []
        for number, (size, count) in enumerate(zip(sizes, counts, strict=True)):
            width, blocks = sparse_payload.index_bytes(count, size), sparse_payload.counted_blocks(count, size)
            widths.append(width)
            parts.append((value_bytes, value_bytes * count, "values", number))
            parts.append((4, 4 * blocks, "block_counts", number))
            parts.append((width, width * count, "indices", number))
        parts.sort(key=lambda part: (-part[0], kinds.index(part[2])))
        segments = bucket.segments
        end = 0
        for _, length, kind, number in parts:
            segments[kind][number] = end if length else -1
            end += length
        segments["count"], segments["index_bytes"] = counts, widths
        self.payload = bucket.payload(end)


class Selection:
    """The parameters for the selection of elements in a bucket.

    Args:
        bucket: the bucket, with `count` set in its table.

    Attributes:
        method: how the threshold is found. The value is `KTH_LARGEST`, `BISECT`, `SAMPLED` or `FITTED`.
        rounds: the number of rounds of the search.
        type: the element type of the values in the payload, as a number of `NARROW`.
        masks: whether the velocity of an element is set to zero when the element is sent.
        most: a threshold is good if at least `count` and at most this number of elements reach it. `most`, `need`,
            `stride`, `sampled` and `reaching` are int64 (tensors,).
        limited: whether `most` may be larger than `count`.
        need: number of candidate elements that is enough for the search.
        stride: the distance between sampled elements.
        sampled: number of elements in the random sample.
        reaching: number of sampled elements that are at least as large as the first threshold.
        first, later: floats (tensors,). The threshold of the first stage, and the threshold of each later stage. A
            threshold is given as a distance from the previous threshold, in units of the mean excess over the previous
            threshold.
    """

    def __init__(self, bucket: Bucket, type: int, method: int, room: int, rounds: int) -> None:
        self.method, self.rounds, self.type, self.masks = method, rounds, type, bucket.masks
        sizes, counts = bucket.segments["size"], bucket.segments["count"]
        self.most = np.minimum(room * counts, sizes)
        self.limited = room > 1
        self.need = counts if method == KTH_LARGEST else np.minimum(self.most + 1, sizes)
        self.stride = self.sampled = self.reaching = np.zeros_like(sizes)
        self.first = self.later = np.zeros(len(sizes), np.float32)
        if method == FITTED:
            shares = [stage_shares(compressor.ratio, rounds) for compressor in bucket.compressors]
            self.first, self.later = (-np.log([share[at] for share in shares]) for at in (0, -1))
        if method == SAMPLED:
            self.stride = np.array([sample_stride(size) for size in sizes.tolist()])
            self.sampled = -(-sizes // self.stride)
            ratios = [compressor.ratio for compressor in bucket.compressors]
            self.reaching = np.array(
                [elements_of_sample(ratio, size) for ratio, size in zip(ratios, self.sampled.tolist(), strict=True)]
            )


class _Layout:
    """The offsets in a bucket's payload, and the storage in which kernels keep candidates."""

    def __init__(self, bucket: Bucket, values: str, method: int, room: int, rounds: int) -> None:
        self.places = SparsePlaces(bucket, values)
        selection = Selection(bucket, self.places.type, method, room, rounds)
        segments, tasks = bucket.segments, bucket.table.tasks
        self._choices = np.zeros(len(segments), CHOICE)
        choices = self._choices
        choices["first_task"] = np.searchsorted(tasks["segment"], np.arange(len(segments)))
        choices["tasks"] = np.bincount(tasks["segment"], minlength=len(segments))
        for name in ("most", "need", "stride", "sampled", "reaching", "first", "later"):
            choices[name] = getattr(selection, name)
        choices["sample"] = np.cumsum(selection.sampled) - selection.sampled
        self._candidates = np.zeros(len(tasks), CANDIDATES)
        shares = (selection.need / segments["size"])[tasks["segment"]] * tasks["length"]
        rooms = np.minimum(tasks["length"], (_CANDIDATES_PER_NEEDED * shares).astype(np.int64) + 1024)
        self._candidates["room"] = rooms
        self._candidates["place"] = np.cumsum(rooms + SLACK) - (rooms + SLACK)
        pool = int((rooms + SLACK).sum())
        self._values, self._places = np.empty(pool, np.float32), np.empty(pool, np.uint16)
        self._sample = np.empty(int(selection.sampled.sum()), np.float32)
        arrays: tuple[np.ndarray, ...] = (choices, self._candidates, self._values, self._places, self._sample)
        addresses = [array.ctypes.data for array in arrays]
        self._sparse = SparseStruct(*addresses, method, rounds, self.places.type, 0)
        self.passed = ctypes.addressof(self._sparse)


class _DeviceLayout:
    """The layout on a device. This layout has no storage for candidates, because kernels on a device have their own."""

    def __init__(self, bucket: Bucket, values: str, method: int, room: int, rounds: int) -> None:
        self.places = SparsePlaces(bucket, values)
        self.passed = Selection(bucket, self.places.type, method, room, rounds)


def stage_shares(ratio: float, stages: int) -> list[float]:
    """For each stage of SIDCo, the share of the remaining elements that its threshold should keep. The product of the
    shares is `ratio`."""
    if stages == 1:
        return [ratio]
    first = max(ratio, 0.25)
    return [first] + [(ratio / first) ** (1 / (stages - 1))] * (stages - 1)


def aggregate_by_magnitude(
    bucket: Bucket, values: str, method: int, room: int = 1, rounds: int = 0
) -> BucketAggregation:
    """Like `Sparsifier.aggregate`, but in passes over all tensors of the bucket:

    1. `sparse_encode` computes x, the sum of the gradient and the residual, and collects candidates for the selection.
       A lower limit is estimated from a sample, and the candidates are the few elements that reach this limit. Among
       the candidates, the kernel searches for the threshold, chooses k elements, and writes them to the payload.
    2. `sparse_keep` subtracts the sent elements from x, so that x becomes the residual.
    3. `sparse_decode` adds the elements of all ranks to the results.

    Args:
        bucket: the bucket that is compressed.
        values: the element type of the sent values, "same" or "fp16", as in `sparse_payload`.
        method: how the threshold is found. The value is `KTH_LARGEST`, `BISECT`, `SAMPLED` or `FITTED`.
        room: a threshold is good if at least k and at most `room` k elements reach it.
        rounds: number of rounds of the search for the threshold.
    """
    if bucket.layout is None:
        layout_of = _Layout if bucket.device is None else _DeviceLayout
        bucket.layout = layout_of(bucket, values, method, room, rounds)
    layout = bucket.layout
    places = layout.places
    payload = places.payload
    bucket.found_inf = bucket.call("sparse_encode", layout.passed, payload.vector)
    if bucket.keeps and bucket.device is None:  # on a device, encoding has already subtracted the sent part from x
        bucket.call("sparse_keep", payload.vector, places.type, bucket.masks)
    rows = yield payload.gather
    return bucket.call("sparse_decode", *gathered(rows), places.type)
