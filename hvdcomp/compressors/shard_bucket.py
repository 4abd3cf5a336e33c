"""Reduce-scatter between nodes in kernels, bit for bit the array functions of `exchange.shards`.

A rank has a row for each node, and each row is a bucket of one tensor. The rows of other nodes are encoded and sent;
the payloads received for this rank's own row are decoded and added up.
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
        method: the method that encodes rows, with a bucket form.
        memory: the memory of all rows, from `KNOWN_TO_KERNELS`.
        length: elements of a row.
        context: context of the first step, in the group of ranks that exchange rows.
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
        # `take_off` subtracts sent signs at once, by a pass with zeros as the gradient.
        self._zeros = np.zeros(length if self._rows[0].keeps else 0, np.float32)

    def reduce_scatter(
        self, rows: np.ndarray, residual: np.ndarray | None, context: Context
    ) -> Generator[Request, list[tuple[np.ndarray]], np.ndarray]:
        """This rank's row of the mean, float32 (length,), in fresh storage.

        Args:
            rows: this rank's gradient, float32 (nodes, length).
            residual: residuals of the other nodes' rows, in their order, float32 (nodes - 1, length); updated in place.
                None without a memory.
            context: context of the step.
        """
        method = self.method
        other_nodes = [node for node in range(context.world_size) if node != context.rank]
        for place, node in enumerate(other_nodes):
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
                if bucket.found_inf:  # else it would stay in all later steps
                    residual[place][~np.isfinite(residual[place])] = 0
        received = yield AllToAll((self._sent,))
        bucket, own = self._rows[context.rank], rows[context.rank].copy()
        bucket.begin(context)
        bucket.segments["result"] = self._decoded.ctypes.data
        for node in other_nodes:
            method.decode_bucket(bucket, received[node][0], 1, 0)
            own += self._decoded
        own *= np.float32(1 / context.world_size)
        return own
