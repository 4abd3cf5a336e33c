"""Reduce-scatter between nodes in kernels: what `exchange.shards` states in array functions, with the same bits.

A rank has a row for each node. Each row is a bucket of one tensor: those of other nodes are encoded, and what arrives
of this rank's own is decoded and added up.
"""

from __future__ import annotations

from collections.abc import Generator

import numpy as np

from hvdcomp.compressors.bucket import Bucket
from hvdcomp.compressors.memory import Memory
from hvdcomp.compressors.protocol import AllToAll, Context, Request, TensorInfo
from hvdcomp.compressors.scatter_bucket import CodesBuckets, take_off
from hvdcomp.kernels.tables import NOTHING


class ShardKernels:
    """The rows of one flat gradient, step by step, on the host.

    Args:
        method: that encodes them, with a bucket form.
        memory: of all rows, that `KNOWN_TO_KERNELS` has.
        length: elements of a row.
        context: of the first step, among the ranks that have rows for each other.
    """

    def __init__(self, method: CodesBuckets, memory: Memory, length: int, context: Context) -> None:
        self.method, self.length = method, length
        self._rows = [
            Bucket([TensorInfo(f"{context.name}#{node}", (length,))], [method], memory)
            for node in range(context.world_size)
        ]
        for bucket in self._rows:
            bucket.begin(context)
        payloads = [method.payload(bucket).vector for bucket in self._rows]
        self._sent = np.zeros((len(payloads), len(payloads[0])), np.uint8)
        self._decoded = np.zeros(length, np.float32)
        # What a sign says was sent is taken off at once: zeros are the gradient then.
        self._zeros = np.zeros(length if self._rows[0].keeps else 0, np.float32)

    def reduce_scatter(
        self, rows: np.ndarray, residual: np.ndarray | None, context: Context
    ) -> Generator[Request, list[tuple[np.ndarray]], np.ndarray]:
        """This rank's row of the mean, float32 (length,), in fresh storage.

        Args:
            rows: this rank's gradient, float32 (nodes, length).
            residual: what was left to be sent of the other rows, in their order, float32 (nodes - 1, length); what is
                left now takes its place. None without a memory.
            context: of the step.
        """
        method = self.method
        others = [node for node in range(context.world_size) if node != context.rank]
        for place, node in enumerate(others):
            bucket = self._rows[node]
            bucket.begin(context)
            segments = bucket.segments
            segments["gradient"], segments["rule"] = rows[node].ctypes.data, NOTHING
            if residual is not None:
                segments["kept"] = segments["x"] = residual[place].ctypes.data
            method.encode_bucket(bucket)
            self._sent[node] = method.payload(bucket).vector
            if residual is not None:
                take_off(bucket, self._zeros)
                if bucket.found_inf:  # would be in every step from now on
                    residual[place][~np.isfinite(residual[place])] = 0
        received = yield AllToAll((self._sent,))
        bucket, own = self._rows[context.rank], rows[context.rank].copy()
        bucket.begin(context)
        bucket.segments["result"] = self._decoded.ctypes.data
        for node in others:
            method.decode_bucket(bucket, received[node][0], 1, 0)
            own += self._decoded
        own *= np.float32(1 / context.world_size)
        return own
