"""The bucket form of random-k: the places are drawn in compiled code, and the values of all tensors are one vector."""

from __future__ import annotations

import numpy as np

from hvdcomp.compressors.bucket import Bucket, BucketAggregation, Payload
from hvdcomp.compressors.protocol import AllReduce
from hvdcomp.compressors.randomness import rotations, step_keys
from hvdcomp.compressors.sparse_payload import LARGEST_HALF, elements_kept

_BLOCK_BITS = 16  # of an element's place in its task


class _Layout:
    """Where each tensor's values lie, and room for what was drawn.

    Args:
        bucket: its table gets `count` and `place`.
        values: how they travel, of `sparse_payload`.

    Attributes:
        payload: values, tensor by tensor, and in a tensor task by task.
        sent: (values,), what receivers make of them.
        places: (values,), where each is in its task.
        ends: (tasks,), of the values of each task among those of its tensor.
    """

    def __init__(self, bucket: Bucket, values: str) -> None:
        segments = bucket.segments
        sizes = segments["size"].tolist()
        counts = [elements_kept(one.ratio, size) for one, size in zip(bucket.compressors, sizes, strict=True)]
        segments["count"] = counts
        segments["place"][:, 0] = np.cumsum(counts) - counts
        tasks = np.bincount(bucket.table.tasks["segment"], minlength=len(segments))
        segments["place"][:, 1] = np.cumsum(tasks) - tasks
        total = sum(counts)
        self.payload = Payload(total, "float16" if values == "fp16" else "float32")
        self.sent = np.zeros(total, np.float32)
        self.drawn = np.zeros(total, np.uint64)
        self.places = np.zeros(total, np.uint16)
        self.ends = np.zeros(len(bucket.table.tasks), np.int64)
        self.keys = bucket.keys("randomk")


def aggregate_at_random(bucket: Bucket, values: str, unbiased: bool) -> BucketAggregation:
    """A bucket's step of random-k.

    Args:
        values: how they travel, of `sparse_payload`.
        unbiased: whether they are scaled by d / k.
    """
    if bucket.layout is None:
        bucket.layout = _Layout(bucket, values)
    layout, context = bucket.layout, bucket.context
    half = values == "fp16"
    bound = LARGEST_HALF / (2 * context.world_size) if half else 0.0
    keys = step_keys(layout.keys, context.step, None)
    bucket.segments["key"] = keys
    bucket.segments["place"][:, 2] = rotations(keys, bucket.segments["size"])
    payload, places, ends = layout.payload, layout.places, layout.ends
    bucket.found_inf = bucket.call(
        "random_encode", payload.vector, layout.sent, layout.drawn, places, ends, bound, unbiased
    )
    if bucket.keeps:
        bucket.call("random_keep", layout.sent, places, ends, bucket.masks)
    mean = yield AllReduce(payload.vector, with_room=payload.with_room)
    return bucket.call("random_decode", mean, places, ends, half)
