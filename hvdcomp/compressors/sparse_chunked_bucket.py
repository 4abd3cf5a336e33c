"""The bucket form of chunked top-k. The payload has the values of all tensors, and then all packed codes."""

from __future__ import annotations

import numpy as np

from hvdcomp.compressors.bucket import Bucket, BucketAggregation, gathered
from hvdcomp.compressors.low_rank_bucket import Tasks
from hvdcomp.compressors.packing import packed_bytes
from hvdcomp.compressors.protocol import AllGather
from hvdcomp.kernels.tables import CHUNK_PIECE, CODE_BITS, FOUR_MEANS, IN_FLOAT, IN_HALF, IN_SIGN

VALUES = {"2bit": FOUR_MEANS, "sign": IN_SIGN, "fp16": IN_HALF, "float32": IN_FLOAT}
"""Encodings of values, as numbers for kernels."""

_SHARED_BYTES = {FOUR_MEANS: 16, IN_SIGN: 4}  # of a tensor's means
_VALUE_BYTES = {IN_HALF: 2, IN_FLOAT: 4}


class _Layout:
    """The offsets of the tensors' parts in the payload, as in `isa_sparse_chunked.c`, and scratch memory."""

    def __init__(self, bucket: Bucket, chunk: int, encoding: int) -> None:
        sizes = bucket.segments["size"].tolist()
        pairs = list(zip(bucket.compressors, sizes, strict=True))
        counts = np.array([method.count(size) for method, size in pairs])
        bits = np.array([method.place_bits(size) for method, size in pairs])
        values = counts * _VALUE_BYTES.get(encoding, 0) + _SHARED_BYTES.get(encoding, 0)
        codes = packed_bytes(np.minimum(bits, 8), counts) + packed_bytes(np.maximum(bits - 8, 0), counts)
        codes += packed_bytes(CODE_BITS.get(encoding, 0), counts)
        segments = bucket.segments
        segments["count"], segments["found"] = counts, np.cumsum(counts) - counts
        segments["sent_of_chunk"] = [compressor.k for compressor in bucket.compressors]
        segments["values"] = np.cumsum(values) - values
        segments["indices"] = values.sum() + np.cumsum(codes) - codes
        self.payload = bucket.payload(int(values.sum() + codes.sum()))
        self.scratch = [bucket.zeros(int(counts.sum()), dtype) for dtype in ("float32", "int16")]
        self.passed: tuple[int, ...] = chunk, encoding
        if bucket.device is None:
            self._tasks = Tasks([(-(-size // chunk), max(1, CHUNK_PIECE // chunk)) for size in sizes])
            self.passed = *self._tasks.passed, chunk, encoding


def aggregate_chunks(bucket: Bucket, chunk: int, encoding: int) -> BucketAggregation:
    """Runs a step for all tensors of a bucket.

    Args:
        bucket: the bucket.
        chunk: number of elements in a chunk.
        encoding: the values' encoding, of `VALUES`.
    """
    if bucket.layout is None:
        bucket.layout = _Layout(bucket, chunk, encoding)
    layout = bucket.layout
    payload = layout.payload
    bucket.found_inf = bucket.call("chunks_encode", *layout.passed, bucket.masks, *layout.scratch, payload.vector)
    ranks = yield AllGather((payload.vector,), payload.with_room)
    return bucket.call("chunks_decode", *layout.passed, *gathered(ranks))
