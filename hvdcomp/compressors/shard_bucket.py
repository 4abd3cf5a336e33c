"""Reduce-scatter between nodes with compiled kernels, on the host or a device. Results are the same as with the
functions of `exchange.shards`, bit for bit.

A rank has a row for each node, and each row is a bucket of one tensor. The rows of other nodes are encoded and sent;
the payloads received for this rank's own row are decoded and added up.
"""

from __future__ import annotations

from collections.abc import Generator
from types import ModuleType
from typing import Any

import numpy as np

from hvdcomp.arrays import numpy_arrays
from hvdcomp.arrays.types import Array, number_of_elements
from hvdcomp.compressors.bucket import Bucket, address_of
from hvdcomp.compressors.memory import Memory
from hvdcomp.compressors.protocol import AllToAll, Context, Request, TensorInfo
from hvdcomp.compressors.scatter_bucket import CodesBuckets, take_off
from hvdcomp.kernels.tables import NOTHING


class ShardKernels:
    """The rows of one flat gradient, step by step, on the host or on a device.

    Args:
        method: the method that encodes rows, with a bucket form.
        memory: the memory of all rows, from `KNOWN_TO_KERNELS`.
        length: elements of a row.
        context: context of the first step, in the group of ranks that exchange rows.
        device: the device of the rows, if there are kernels for it; None for the host.
        xp: the array functions of the rows: NumPy's on the host.
    """

    def __init__(
        self,
        method: CodesBuckets,
        memory: Memory,
        length: int,
        context: Context,
        device: Any = None,
        xp: ModuleType = numpy_arrays,
    ) -> None:
        self.method, self.length, self._xp = method, length, xp
        self._rows = [
            Bucket([TensorInfo(f"{context.name}#{node}", (length,))], [method], memory, device, xp)
            for node in range(context.world_size)
        ]
        for bucket in self._rows:
            bucket.begin(context)
        payloads = [method.payload(bucket).vector for bucket in self._rows]
        shape = len(payloads), number_of_elements(payloads[0].shape)
        self._sent = xp.reshape(self._rows[0].zeros(shape[0] * shape[1]), shape)
        self._decoded = self._rows[0].zeros(length, "float32")
        # `take_off` subtracts sent signs at once, by a pass with zeros as the gradient.
        self._zeros = np.zeros(length if self._rows[0].keeps and device is None else 0, np.float32)

    def reduce_scatter(
        self, rows: Array, residual: Array | None, context: Context
    ) -> Generator[Request, list[tuple[Array]], Array]:
        """This rank's row of the mean, float32 (length,), in fresh storage.

        Args:
            rows: this rank's gradient, float32 (nodes, length).
            residual: residuals of the other nodes' rows, in their order, float32 (nodes - 1, length); updated in place.
                None without a memory.
            context: context of the step.
        """
        method, xp = self.method, self._xp
        other_nodes = [node for node in range(context.world_size) if node != context.rank]
        for place, node in enumerate(other_nodes):
            bucket = self._rows[node]
            bucket.begin(context)
            segments = bucket.segments
            segments["gradient"], segments["rule"] = address_of(rows[node]), NOTHING
            if residual is not None:
                segments["kept"] = segments["x"] = address_of(residual[place])
            method.encode_bucket(bucket)
            self._sent[node] = method.payload(bucket).vector
            if residual is not None:
                take_off(bucket, self._zeros)
                # Else an inf or NaN would stay in all later steps. The host does not wait for a device to say so.
                if bucket.device is not None or bucket.found_inf:
                    residual[place] = xp.finite_or_zero(residual[place])
        received = yield AllToAll((self._sent,))
        bucket, own = self._rows[context.rank], xp.concatenate([rows[context.rank]])  # a copy
        bucket.begin(context)
        bucket.segments["result"] = address_of(self._decoded)
        for node in other_nodes:
            method.decode_bucket(bucket, received[node][0], 1, 0)
            own += self._decoded
        own *= 1 / context.world_size
        return own
