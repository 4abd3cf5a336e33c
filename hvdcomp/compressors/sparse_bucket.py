"""The bucket form of the sparsifiers whose ranks choose elements by magnitude and send values and indices.

The payload of a bucket holds the values, the block counts and the indices of all tensors, as in `sparse_payload`; parts
of wider element types come first.
"""

from __future__ import annotations

import ctypes

import numpy as np

from hvdcomp.arrays.magnitudes import elements_of_sample, sample_stride
from hvdcomp.compressors import sparse_payload
from hvdcomp.compressors.bucket import Bucket, BucketAggregation, gathered
from hvdcomp.compressors.protocol import AllGather
from hvdcomp.kernels.tables import (
    CANDIDATES,
    CHOICE,
    FITTED,
    KTH_LARGEST,
    NARROW,
    SAMPLED,
    SLACK,
    SparseStruct,
)

_CANDIDATES_PER_NEEDED = 8  # about 2.3 are expected; a task with more is searched as a whole


class SparsePlaces:
    """The offsets of each tensor's values and indices in a bucket's payload.

    Args:
        bucket: the bucket; sets `count` and the places of the parts in its table.
        values: "same" or "fp16", as in `sparse_payload`.

    Attributes:
        payload: this rank's payload.
        type: element type of the values in the payload, a number of `NARROW`.
    """

    def __init__(self, bucket: Bucket, values: str) -> None:
        self.type = NARROW[sparse_payload.carried_dtype(values, bucket.dtype)]
        sizes = [tensor.size for tensor in bucket.tensors]
        counts = [
            sparse_payload.elements_kept(compressor.ratio, size)
            for compressor, size in zip(bucket.compressors, sizes, strict=True)
        ]
        value_bytes = sparse_payload.value_bytes(values, bucket.dtype)
        parts = []  # (bytes of an element, bytes of the part, its kind, tensor)
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
    """The parameters of a bucket's selection of elements.

    Args:
        bucket: the bucket, with `count` set in its table.

    Attributes:
        method: `KTH_LARGEST`, `BISECT`, `SAMPLED` or `FITTED`.
        rounds: rounds of the search.
        type: element type of the values in the payload, a number of `NARROW`.
        masks: whether an element's momentum is cleared when the element is sent.
        most: a threshold is good if `count` to this number of elements reach it, int64 (tensors,), like all below.
        limited: whether `most` may be larger than `count`.
        need: number of candidates that is enough for the search.
        stride: stride of the sample.
        sampled: number of elements in the sample.
        reaching: number of sampled elements that reach the first threshold.
        first, later: threshold of the first stage and of each later one, in mean excesses over the threshold before,
            floats (tensors,).
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
    """The offsets in a bucket's payload, and the kernels' storage for candidates."""

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
    """The layout on a device, where kernels have their own storage."""

    def __init__(self, bucket: Bucket, values: str, method: int, room: int, rounds: int) -> None:
        self.places = SparsePlaces(bucket, values)
        self.passed = Selection(bucket, self.places.type, method, room, rounds)


def stage_shares(ratio: float, stages: int) -> list[float]:
    """The share of the remaining elements that each stage of SIDCo aims at; the product of the shares is `ratio`."""
    if stages == 1:
        return [ratio]
    first = max(ratio, 0.25)
    return [first] + [(ratio / first) ** (1 / (stages - 1))] * (stages - 1)


def aggregate_by_magnitude(
    bucket: Bucket, values: str, method: int, room: int = 1, rounds: int = 0
) -> BucketAggregation:
    """A bucket's step of a sparsifier that sends the k largest elements, or approximately those.

    Args:
        bucket: the bucket.
        values: "same" or "fp16", as in `sparse_payload`.
        method: `KTH_LARGEST`, `BISECT`, `SAMPLED` or `FITTED`.
        room: a threshold is good if k to `room` k elements reach it.
        rounds: rounds of the search.
    """
    if bucket.layout is None:
        layout_of = _Layout if bucket.device is None else _DeviceLayout
        bucket.layout = layout_of(bucket, values, method, room, rounds)
    layout = bucket.layout
    places = layout.places
    payload = places.payload
    bucket.found_inf = bucket.call("sparse_encode", layout.passed, payload.vector)
    if bucket.keeps and bucket.device is None:  # on a device, encoding has subtracted it from x
        bucket.call("sparse_keep", payload.vector, places.type, bucket.masks)
    ranks = yield AllGather((payload.vector,), payload.with_room)
    return bucket.call("sparse_decode", *gathered(ranks), places.type)
