"""Methods whose payloads cannot be summed: each payload is decoded, and the decoded values are averaged.

There are two ways to exchange such payloads. With "gather", every rank receives and decodes the payloads of all ranks,
so the work grows with the number of ranks. With "scatter", each rank averages one chunk of the tensor: it receives this
chunk from every rank, decodes and averages the chunks, compresses the mean again, and sends the compressed mean to all
ranks. A rank then receives and decodes two payloads with any number of ranks, and each element is rounded twice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Annotated, Any, ClassVar

from hvdcomp.arrays.types import Array, number_of_elements
from hvdcomp.compressors.base import Compressor
from hvdcomp.compressors.bucket import Bucket, BucketAggregation, Payload, gathered
from hvdcomp.compressors.packing import average_decoded, outcome_like, pad
from hvdcomp.compressors.protocol import (
    Aggregation,
    AllGather,
    AllToAll,
    Context,
    Request,
    SparseVector,
    TensorInfo,
    run_alone,
)
from hvdcomp.compressors.scatter_bucket import aggregate_chunks, residual_bound
from hvdcomp.specs.described import Rule

LEAST_RANKS = 4
"""The number of ranks from which `exchange="auto"` scatters. Scattering takes one more round, and with four ranks sends
half the bytes of gathering; with two ranks it would send as many, with three two thirds."""

EXCHANGE = Rule(
    lambda value: value in ("gather", "scatter", "auto"), '"gather", "scatter" or "auto" (scatter from four ranks)'
)

Rounding = Annotated[
    str, Rule(lambda value: value in ("nearest", "stochastic"), '"nearest" or "stochastic" (unbiased)')
]


@dataclass(frozen=True)
class Gathering(Compressor):
    """Base class of methods that encode each tensor separately, and can decode the payload of any rank.

    Attributes:
        exchange: "gather": every rank receives and decodes the payloads of all ranks. "scatter": each rank averages one
            chunk of the tensor, and compresses the mean again. "auto": "scatter" with four or more ranks, or the faster
            of the two if the policy `Auto` is used.
    """

    exchange: Annotated[str, EXCHANGE] = field(default="gather", kw_only=True)

    unit: ClassVar[int] = 8
    """Chunks begin at multiples of this number of elements."""

    def encode(self, xp: ModuleType, x: Array, context: Context) -> tuple[Array, ...]:
        """Encodes a tensor, and returns its payload. The shapes and types of the payload depend only on the shape and
        type of `x`; arguments as in `aggregate`."""
        raise NotImplementedError

    def decode(self, xp: ModuleType, parts: Sequence[Array], shape: tuple[int, ...]) -> Array:
        """The decoded elements, float32, in order, in any shape and in new storage; or numbers from which `restore`
        computes the elements.

        Args:
            xp: array functions.
            parts: the payload from `encode`.
            shape: shape of the encoded tensor.
        """
        raise NotImplementedError

    def restore(self, xp: ModuleType, decoded: Array, shape: tuple[int, ...], context: Context) -> Array:
        """Computes the elements from the result of `decode`, or from the mean of these results over the ranks.

        This function must be linear: it is the last step of a method that averages payloads before its last step.
        """
        return decoded

    def decoded(self, xp: ModuleType, parts: Sequence[Array], shape: tuple[int, ...], context: Context) -> Array:
        """Decodes one payload, and returns its elements, a vector; `context` is the context of `encode`."""
        return xp.flatten(self.restore(xp, self.decode(xp, parts, shape), shape, context))

    @property
    def of_means(self) -> Gathering:
        """The compressor that compresses the mean of a chunk again: this compressor, or the same compressor at another
        level, with the same chunks."""
        return self

    def with_exchange(self, exchange: str) -> Gathering:
        """The same method with another `exchange`."""
        return dataclasses.replace(self, exchange=exchange)

    def scatters(self, ranks: int) -> bool:
        return ranks > 1 and (self.exchange == "scatter" or (self.exchange == "auto" and ranks >= LEAST_RANKS))

    form: ClassVar[str] = "encode_bucket"

    def lay_out(self, bucket: Bucket) -> Any:
        """The layout of a bucket, made once: an object with the `payload` that `encode_bucket` fills."""
        raise NotImplementedError

    def encode_bucket(self, bucket: Bucket) -> None:
        """Writes the bucket's payload and sets its `found_inf`."""
        raise NotImplementedError

    def decode_bucket(self, bucket: Bucket, first: Array, ranks: int, stride: int) -> bool | Array:
        """Writes the mean of payloads (`gathered`) to the results; returns as `Bucket.call` does."""
        raise NotImplementedError

    def payload(self, bucket: Bucket) -> Payload:
        """Storage of a bucket's payload; makes the bucket's layout if it has none."""
        if bucket.layout is None:
            bucket.layout = self.lay_out(bucket)
        payload: Payload = bucket.layout.payload
        return payload

    def aggregate_bucket(self, bucket: Bucket) -> BucketAggregation:
        if self.scatters(bucket.context.world_size):
            return (yield from aggregate_chunks(self, bucket))
        return (yield from self._gather_bucket(bucket))

    def _gather_bucket(self, bucket: Bucket) -> BucketAggregation:
        payload = self.payload(bucket)
        self.encode_bucket(bucket)
        ranks = yield AllGather((payload.vector,), payload.with_room)
        return self.decode_bucket(bucket, *gathered(ranks))

    @property
    def sent_is_own(self) -> bool:  # type: ignore[override]
        """False with exchange "scatter", because C(x) then also depends on the mean of the chunk, which is compressed
        again."""
        return self.exchange not in ("scatter", "auto")

    def preview(
        self, xp: ModuleType, x: Array, state: tuple[Array, ...], context: Context
    ) -> Array | SparseVector:
        return super().preview(xp, x, state, dataclasses.replace(context, world_size=1))

    def preview_bucket(self, bucket: Bucket) -> None:
        run_alone(self._gather_bucket(bucket))

    def bytes_in_bucket(self, tensor: TensorInfo, context: Context) -> tuple[float, float]:
        sent, in_node = super().bytes_in_bucket(tensor, context)
        if self.scatters(context.world_size):
            sent += self.of_means.payload_bytes(tensor.shape, dtype=tensor.dtype) / context.world_size
        return sent, in_node

    def aggregate(self, xp: ModuleType, x: Array, state: tuple[Array, ...], context: Context) -> Aggregation:
        if self.scatters(context.world_size):
            return (yield from self._scatter(xp, x, context))
        ranks = yield AllGather(self.encode(xp, x, context))
        shape = tuple(x.shape)
        mean, sent = average_decoded(ranks, lambda *parts: self.decode(xp, parts, shape), context)
        own = self.restore(xp, sent, shape, context)
        return outcome_like(xp, x, own if mean is sent else self.restore(xp, mean, shape, context), own)

    def reduce_scatter(
        self, xp: ModuleType, chunks: Sequence[Array], context: Context
    ) -> Generator[Request, Any, tuple[Array, list[tuple[Array, ...]]]]:
        """The first half of a step with exchange "scatter": computes the mean of this rank's chunk. This rank's own x
        is not compressed for this mean.

        Args:
            xp: array functions.
            chunks: this rank's x in chunks, float32 (length,), in the order of the ranks that average them.
            context: the tensor's context.

        Returns:
            The mean (length,), and the payload of each chunk.
        """
        ranks, own, shape = context.world_size, context.rank, tuple(chunks[0].shape)
        encoded = [self.encode(xp, chunk, _of_chunk(context, place)) for place, chunk in enumerate(chunks)]
        received = yield AllToAll(tuple(_stacked(xp, parts) for parts in zip(*encoded, strict=True)))
        mean = chunks[own]
        for rank, parts in enumerate(received):
            if rank != own:
                mean = mean + self.decoded(xp, parts, shape, _of_chunk(context, own))
        return mean * (1 / ranks), encoded

    def counted(
        self, xp: ModuleType, chunks: Sequence[Array], encoded: Sequence[Sequence[Array]], context: Context
    ) -> list[Array]:
        """This rank's contribution to the mean of each chunk in `reduce_scatter`: decoded, or x of its own chunk."""
        pairs = enumerate(zip(chunks, encoded, strict=True))
        return [
            chunk
            if place == context.rank
            else self.decoded(xp, parts, tuple(chunk.shape), _of_chunk(context, place))
            for place, (chunk, parts) in pairs
        ]

    def _scatter(self, xp: ModuleType, x: Array, context: Context) -> Aggregation:
        """A scattered step.

        The owner of a chunk adds its own x without rounding. With N ranks, C(x) is the decoded payload in the other
        chunks, and in the owner's chunk x less N times the rounding error of the mean. The ranks' C(x) then add up to
        N times the result, and one residual serves both roundings. That residual may overflow where the mean does not;
        so large a mean becomes NaN, which all ranks see.
        """
        ranks, own = context.world_size, context.rank
        vector = xp.flatten(xp.astype(x, "float32"))
        length = -(-vector.shape[0] // (ranks * self.unit)) * self.unit
        chunks = pad(xp, vector, ranks * length)
        chunks = [chunks[start : start + length] for start in range(0, ranks * length, length)]
        mean, encoded = yield from self.reduce_scatter(xp, chunks, context)
        largest = xp.reshape(xp.row_largest(xp.reshape(mean, (1, length))), (1,))
        mean = mean * (1 + 0 * (largest * residual_bound(length, ranks)))  # times 1, or NaN
        method, of_mean = self.of_means, _of_chunk(context, "mean")
        gathered = yield AllGather(method.encode(xp, mean, of_mean))
        means = [method.decoded(xp, parts, (length,), of_mean) for parts in gathered]
        sent = self.counted(xp, chunks, encoded, context)
        sent[own] = chunks[own] - (mean - means[own]) * ranks
        size = number_of_elements(tuple(x.shape))
        return outcome_like(xp, x, xp.concatenate(means)[:size], xp.concatenate(sent)[:size])


def _of_chunk(context: Context, chunk: int | str) -> Context:
    """The context of one of a tensor's chunks."""
    return dataclasses.replace(context, name=f"{context.name}#{chunk}")


def _stacked(xp: ModuleType, parts: Sequence[Array]) -> Array:
    """Arrays of one shape as the rows of one array."""
    return xp.concatenate([xp.reshape(part, (1, *part.shape)) for part in parts])
