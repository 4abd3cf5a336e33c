"""The bucket form of random-k: kernels draw the places, and the values of all tensors are one vector."""

from __future__ import annotations

import math

import numpy as np

from hvdcomp.compressors.bucket import Bucket, BucketAggregation
from hvdcomp.compressors.protocol import AllReduce
from hvdcomp.compressors.randomness import rotations
from hvdcomp.compressors.sparse_payload import carried_dtype, elements_kept
from hvdcomp.kernels.limits import LARGEST


class _Layout:
    """The offsets of each tensor's values, and storage for the places drawn.

    Args:
        bucket: the bucket; sets `count`, `values` and `ends` in its table.
        half: whether the payload is in half precision.

    Attributes:
        payload: the values, tensor by tensor, and in a tensor task by task.
        sent: the decoded values (values,).
        places: the place of each value in its task (values,).
        ends: for each task the end of its values among its tensor's values (tasks,).
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
            # Kernels compute the places again instead of storing them.
            scales = np.array([size / count for size, count in zip(sizes, counts, strict=True)], np.float32)
            self.scales = bucket.xp.from_numpy(scales, like=self.sent)
            return
        self.drawn = np.zeros(total, np.uint64)
        self.places = np.zeros(total, np.uint16)
        self.ends = np.zeros(len(bucket.table.tasks), np.int64)

    def keep(self, bucket: Bucket) -> None:
        """Subtracts from x what this rank sent; with masking, also clears the velocity there."""
        if bucket.device is None:
            bucket.call("random_keep", self.sent, self.places, self.ends, bucket.masks)
        else:
            bucket.call("random_take_off", self.sent, bucket.masks, aside=True)


def aggregate_at_random(bucket: Bucket, values: str, unbiased: bool) -> BucketAggregation:
    """A bucket's step of random-k.

    Args:
        bucket: the bucket.
        values: "same" or "fp16", as in `sparse_payload`.
        unbiased: whether values are scaled by d / k.
    """
    half = carried_dtype(values, bucket.dtype) == "float16"
    if bucket.layout is None:
        bucket.layout = _Layout(bucket, half)
    layout, context = bucket.layout, bucket.context
    bound = 0.0
    if values == "fp16":
        bound = LARGEST["float16"] / (2 * context.world_size)
    elif half:  # the memory, if any, keeps the excess
        bound = math.inf if unbiased else LARGEST["float16"]
    keys = bucket.draw_keys(shared=True)
    bucket.segments["shift"] = rotations(keys, bucket.segments["size"])
    payload, sent = layout.payload, layout.sent
    if bucket.device is None:
        scratch = layout.drawn, layout.places, layout.ends
        bucket.found_inf = bucket.call("random_encode", payload.vector, sent, *scratch, bound, unbiased)
    else:
        bucket.found_inf = bucket.call("random_take", payload.vector, sent, layout.scales, bound, unbiased)
    if bucket.keeps:
        layout.keep(bucket)
    mean = yield AllReduce(payload.vector, with_room=payload.with_room)
    if bucket.device is None:
        return bucket.call("random_decode", mean, layout.places, layout.ends, half)
    return bucket.call("random_put", mean, half)
