"""A quantized reduce-scatter between nodes: each rank gets one row of the mean, and ranks send quantized rows.

A rank has one row for each node. The rank encodes the rows of the other nodes and sends them. The rank receives
payloads for its own row, decodes them, and adds them up. `reduce_scatter` does this with array functions, and
`ShardKernels` does it with kernels, on the host or on a device. `reduce_scatter` and `ShardKernels` give the same bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Sequence
from typing import Any, Protocol

import numpy as np

from hvdcomp.arrays import numpy_arrays
from hvdcomp.arrays.types import AllFunctions, AnyArray, Array, ArrayFunctions, number_of_elements
from hvdcomp.compressors.bucket import Bucket, Payload, address_of, take_off
from hvdcomp.compressors.memory import Memory, NoMemory
from hvdcomp.compressors.protocol import AllToAll, Context, Request, TensorInfo, across
from hvdcomp.kernels.tables import NOTHING


class Codec(Protocol):
    """A method that can decode a payload without the payloads of other ranks.

    Attributes:
        unit: chunks begin at multiples of this number of elements of a tensor.
        of_means: the method that compresses the means of chunks. `of_means` is the same method, possibly at a different
            level.
    """

    @property
    def unit(self) -> int: ...

    @property
    def of_means(self) -> Codec: ...

    def encode(self, xp: ArrayFunctions, x: Array, context: Context) -> tuple[Array, ...]:
        """Encodes a tensor, and returns its payload."""

    def decoded(self, xp: ArrayFunctions, parts: Sequence[Array], shape: tuple[int, ...], context: Context) -> Array:
        """Decodes one payload, and returns its elements as a vector. `context` is the context that `encode` got."""

    def payload(self, bucket: Bucket) -> Payload:
        """The storage of the bucket's payload."""

    def encode_bucket(self, bucket: Bucket) -> None:
        """Writes the bucket's payload, and sets the attribute `found_inf` of the bucket."""

    def decode_bucket(self, bucket: Bucket, first: Any, ranks: int, stride: int) -> bool | Array:
        """Writes the mean of the ranks' payloads to the results. The arguments come from `gathered`. Returns whether
        the mean contains an inf or NaN."""


def reduce_scatter(
    method: Codec, memory: Memory, xp: ArrayFunctions, rows: Array, state: tuple[Array, ...], shard: Context
) -> Generator[Request, Any, tuple[Array, tuple[Array, ...]]]:
    """Computes this rank's row of the mean over nodes. `ShardKernels` does the same with kernels.

    Args:
        rows: this rank's gradient with one row for each node, float32 (nodes, length). This rank's own row is not
            compressed.
        state: the memory's state for the rows of the other nodes, as returned in the previous step; empty in the first
            step.
        shard: the context of the step. Its ranks are the ranks that exchange rows, one on each node.

    Returns:
        Two values. The first is this rank's row of the mean, float32 (length,). The second is the memory's state for
        the next step: arrays with one row for each other node, (nodes - 1, length).
    """
    nodes, own = rows.shape[0], shard.rank
    other_nodes = [node for node in range(nodes) if node != own]
    given = xp.concatenate([rows[node : node + 1] for node in other_nodes])
    x, kept = memory.compensate(xp, given, memory.prepare(xp, given, state))
    others = [x[place] for place in range(nodes - 1)]
    chunks = [*others[:own], rows[own], *others[own:]]
    mean, encoded = yield from across(reduce_chunks(method, xp, chunks, shard), nodes)
    if isinstance(memory, NoMemory):
        return mean, ()
    contributions = counted(method, xp, chunks, encoded, shard)
    sent = xp.concatenate([contributions[node] for node in other_nodes])
    return mean, memory.update(xp, x, xp.reshape(sent, given.shape), kept)


def reduce_chunks(
    method: Codec, xp: ArrayFunctions, chunks: Sequence[Array], context: Context
) -> Generator[Request, Any, tuple[Array, list[tuple[Array, ...]]]]:
    """Runs the first half of a step with exchange "scatter": computes the mean of this rank's chunk. This rank's own x
    enters the mean uncompressed.

    Args:
        method: the method that encodes chunks. It can decode a payload without the payloads of other ranks.
        xp: array functions.
        chunks: this rank's x, cut into one chunk for each rank, float32 (length,). Chunk r is averaged by rank r.
        context: the tensor's name, the step, the seed, the rank and the number of ranks.

    Returns:
        Two values. The first is the mean of this rank's chunk over the ranks, (length,). The second is a list with the
        payload of each chunk.
    """
    ranks, own, shape = context.world_size, context.rank, tuple(chunks[0].shape)
    encoded = [method.encode(xp, chunk, of_chunk(context, place)) for place, chunk in enumerate(chunks)]
    received = yield AllToAll(tuple(_stacked(xp, parts) for parts in zip(*encoded, strict=True)))
    mean = chunks[own]
    for rank, parts in enumerate(received):
        if rank != own:
            mean = mean + method.decoded(xp, parts, shape, of_chunk(context, own))
    return mean * (1 / ranks), encoded


def counted(
    method: Codec,
    xp: ArrayFunctions,
    chunks: Sequence[Array],
    encoded: Sequence[Sequence[Array]],
    context: Context,
) -> list[Array]:
    """This rank's contribution to the mean of each chunk in `reduce_chunks`. For other ranks' chunks, this is the
    decoded payload. For the rank's own chunk, the value is x."""
    pairs = enumerate(zip(chunks, encoded, strict=True))
    return [
        chunk if place == context.rank else method.decoded(xp, parts, tuple(chunk.shape), of_chunk(context, place))
        for place, (chunk, parts) in pairs
    ]


def of_chunk(context: Context, chunk: int | str) -> Context:
    """The context for one chunk of a tensor."""
    return dataclasses.replace(context, name=f"{context.name}#{chunk}")


def _stacked(xp: ArrayFunctions, parts: Sequence[Array]) -> Array:
    """Stacks arrays of the same shape as the rows of one array."""
    return xp.concatenate([xp.reshape(part, (1, *part.shape)) for part in parts])


class ShardKernels:
    """Does the same as the function `reduce_scatter`, but with kernels, for the rows of one flat gradient. Each row is
    a bucket of one tensor.

    Args:
        method: the method that encodes rows. It must have a bucket form.
        memory: the memory of all rows, whose class is in `KNOWN_TO_KERNELS`.
        length: number of elements of a row.
        context: the context of the first step. Its ranks are the ranks that exchange rows, one on each node.
        device: the device of the rows, if there are kernels for it; None for the host.
        xp: the array functions for the rows. On the host, these are NumPy's.
    """

    def __init__(
        self,
        method: Codec,
        memory: Memory,
        length: int,
        context: Context,
        device: Any = None,
        xp: AllFunctions = numpy_arrays,
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
        self._sent: AnyArray = xp.reshape(self._rows[0].zeros(shape[0] * shape[1]), shape)
        self._decoded = self._rows[0].zeros(length, "float32")
        # With these zeros as the gradient, `take_off` subtracts the sent signs in this step instead of the next one.
        self._zeros = np.zeros(length if self._rows[0].keeps and device is None else 0, np.float32)

    def reduce_scatter(
        self, rows: AnyArray, residual: AnyArray | None, context: Context
    ) -> Generator[Request, list[tuple[AnyArray]], AnyArray]:
        """Computes this rank's row of the mean, float32 (length,), in new storage.

        Args:
            rows: this rank's gradient with one row for each node, float32 (nodes, length).
            residual: the residuals of the rows of the other nodes, in the order of nodes, float32 (nodes - 1, length).
                The residuals are updated in place. `residual` is None if there is no memory.
            context: the context of the step.
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
                # An inf or NaN would remain in the residual for all later steps, so it is replaced with zero. On a
                # device this is always done, because the host does not wait for the device's flag.
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
