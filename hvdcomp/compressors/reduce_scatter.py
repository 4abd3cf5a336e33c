"""Reduce-scatter between nodes: each rank gets one row of the mean, and the rows are quantized on their way.

A rank has a row for each node. It encodes and sends the rows of other nodes; it decodes and adds up the payloads that
it receives for its own row. `reduce_scatter` does this in array functions, and `ShardKernels` in kernels, on the host
or a device, bit for bit the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Sequence
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from hvdcomp.arrays import numpy_arrays
from hvdcomp.arrays.types import Array, number_of_elements
from hvdcomp.compressors.bucket import Bucket, Payload, address_of, take_off
from hvdcomp.compressors.memory import Memory, NoMemory
from hvdcomp.compressors.protocol import AllToAll, Context, Request, TensorInfo, across
from hvdcomp.kernels.tables import NOTHING


class Codec(Protocol):
    """A method whose payloads are decoded one by one.

    Attributes:
        unit: chunks begin at multiples of this number of elements of a tensor.
        of_means: the method of the chunks' means: it encodes and decodes as this one does, at another level.
    """

    @property
    def unit(self) -> int: ...

    @property
    def of_means(self) -> Codec: ...

    def encode(self, xp: ModuleType, x: Array, context: Context) -> tuple[Array, ...]:
        """The payload of a tensor."""

    def decoded(self, xp: ModuleType, parts: Sequence[Array], shape: tuple[int, ...], context: Context) -> Array:
        """The elements of one payload, a vector; `context` is that of `encode`."""

    def payload(self, bucket: Bucket) -> Payload:
        """Storage of the bucket's payload."""

    def encode_bucket(self, bucket: Bucket) -> None:
        """Writes the bucket's payload and sets its `found_inf`."""

    def decode_bucket(self, bucket: Bucket, first: Any, ranks: int, stride: int) -> bool | Array:
        """Writes the mean of payloads (`gathered`) to the results; whether it holds an inf or NaN."""


def reduce_scatter(
    method: Codec, memory: Memory, xp: ModuleType, rows: Array, state: tuple[Array, ...], shard: Context
) -> Generator[Request, Any, tuple[Array, tuple[Array, ...]]]:
    """This rank's row of the mean over nodes: what `ShardKernels` does in kernels.

    Args:
        rows: float32 (nodes, length), of which this rank's own stays as it is.
        state: of the memory, which has the other rows: what this returned in the step before, or nothing.
        shard: of the step, among the ranks that have rows for each other.

    Returns:
        The row (length,), float32, and the memory's state, whose arrays are (nodes - 1, length).
    """
    nodes, own = rows.shape[0], shard.rank
    other_nodes = [node for node in range(nodes) if node != own]
    given = xp.concatenate([rows[node : node + 1] for node in other_nodes])
    x, kept = memory.compensate(xp, given, memory.prepare(xp, given, state))
    chunks = [*x[:own], rows[own], *x[own:]]
    mean, encoded = yield from across(reduce_chunks(method, xp, chunks, shard), nodes)
    if isinstance(memory, NoMemory):
        return mean, ()
    contributions = counted(method, xp, chunks, encoded, shard)
    sent = xp.concatenate([contributions[node] for node in other_nodes])
    return mean, memory.update(xp, x, xp.reshape(sent, given.shape), kept)


def reduce_chunks(
    method: Codec, xp: ModuleType, chunks: Sequence[Array], context: Context
) -> Generator[Request, Any, tuple[Array, list[tuple[Array, ...]]]]:
    """The first half of a step with exchange "scatter": computes the mean of this rank's chunk. This rank's own x is
    not compressed for this mean.

    Args:
        method: the method that encodes chunks.
        xp: array functions.
        chunks: this rank's x in chunks, float32 (length,), in the order of the ranks that average them.
        context: the tensor's context.

    Returns:
        The mean (length,), and the payload of each chunk.
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
    xp: ModuleType,
    chunks: Sequence[Array],
    encoded: Sequence[Sequence[Array]],
    context: Context,
) -> list[Array]:
    """This rank's contribution to the mean of each chunk in `reduce_chunks`: decoded, or x of its own chunk."""
    pairs = enumerate(zip(chunks, encoded, strict=True))
    return [
        chunk
        if place == context.rank
        else method.decoded(xp, parts, tuple(chunk.shape), of_chunk(context, place))
        for place, (chunk, parts) in pairs
    ]


def of_chunk(context: Context, chunk: int | str) -> Context:
    """The context of one of a tensor's chunks."""
    return dataclasses.replace(context, name=f"{context.name}#{chunk}")


def _stacked(xp: ModuleType, parts: Sequence[Array]) -> Array:
    """Arrays of one shape as the rows of one array."""
    return xp.concatenate([xp.reshape(part, (1, *part.shape)) for part in parts])


class ShardKernels:
    """The rows of one flat gradient, step by step, on the host or on a device; each row is a bucket of one tensor.

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
        method: Codec,
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
