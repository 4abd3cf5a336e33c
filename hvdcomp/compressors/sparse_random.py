"""The bucket form of random-k: the places are drawn in compiled code, and the values of all tensors are one vector."""

from __future__ import annotations

import math

import numpy as np

from hvdcomp.compressors.bucket import Bucket, BucketAggregation
from hvdcomp.compressors.protocol import AllReduce
from hvdcomp.compressors.randomness import rotations, step_keys
from hvdcomp.compressors.sparse_payload import LARGEST_HALF, carried_dtype, elements_kept

_BLOCK_BITS = 16  # of an element's place in its task


class _Layout:
    """Where each tensor's values lie, and room for what was drawn.

    Args:
        bucket: its table gets `count` and `place`.
        half: whether values travel in half precision.

    Attributes:
        payload: values, tensor by tensor, and in a tensor task by task.
        sent: (values,), what receivers make of them.
        places: (values,), where each is in its task.
        ends: (tasks,), of the values of each task among those of its tensor.
    """

    def __init__(self, bucket: Bucket, half: bool) -> None:
        segments = bucket.segments
        sizes = segments["size"].tolist()
        counts = [elements_kept(one.ratio, size) for one, size in zip(bucket.compressors, sizes, strict=True)]
        segments["count"] = counts
        segments["place"][:, 0] = np.cumsum(counts) - counts
        tasks = np.bincount(bucket.table.tasks["segment"], minlength=len(segments))
        segments["place"][:, 1] = np.cumsum(tasks) - tasks
        total = sum(counts)
        self.payload = bucket.payload(total, "float16" if half else "float32")
        self.sent = bucket.zeros(total, "float32")
        self.keys = bucket.keys("randomk")
        if bucket.device is not None:
            # Kernels work the places out again instead of keeping them.
            scales = np.array([size / count for size, count in zip(sizes, counts, strict=True)], np.float32)
            self.scales = bucket.xp.from_numpy(scales, like=self.sent)
            return
        self.drawn = np.zeros(total, np.uint64)
        self.places = np.zeros(total, np.uint16)
        self.ends = np.zeros(len(bucket.table.tasks), np.int64)

    def keep(self, bucket: Bucket) -> None:
        """Takes what this rank sent off x and, with masking, off the velocity."""
        if bucket.device is None:
            bucket.call("random_keep", self.sent, self.places, self.ends, bucket.masks)
        else:
            bucket.call("random_take_off", self.sent, bucket.masks, aside=True)


def aggregate_at_random(bucket: Bucket, values: str, unbiased: bool) -> BucketAggregation:
    """A bucket's step of random-k.

    Args:
        values: how they travel, of `sparse_payload`.
        unbiased: whether they are scaled by d / k.
    """
    half = carried_dtype(values, bucket.dtype) == "float16"
    if bucket.layout is None:
        bucket.layout = _Layout(bucket, half)
    layout, context = bucket.layout, bucket.context
    bound = 0.0
    if values == "fp16":
        bound = LARGEST_HALF / (2 * context.world_size)
    elif half:  # the rest is sent later, if anything is kept
        bound = math.inf if unbiased else LARGEST_HALF
    keys = step_keys(layout.keys, context.step, None)
    bucket.segments["key"] = keys
    bucket.segments["place"][:, 2] = rotations(keys, bucket.segments["size"])
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
