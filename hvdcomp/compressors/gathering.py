"""Methods whose payloads cannot be summed. Each payload is decoded, and the decoded values are averaged.

There are two ways to exchange such payloads. With "gather", every rank receives and decodes the payloads of all ranks,
so the work grows with the number of ranks. With "scatter", each rank averages one chunk of the tensor. It receives its
chunk from every rank, decodes and averages what it received, compresses the mean again, and sends the compressed mean
to all ranks. So a rank receives and decodes as much as two payloads, however many ranks there are. But each element is
rounded twice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from hvdcomp.arrays.types import Array, ArrayFunctions
from hvdcomp.compressors.base import Compressor
from hvdcomp.compressors.bucket import Bucket, BucketAggregation, Payload, gathered
from hvdcomp.compressors.packing import average_decoded, outcome_like
from hvdcomp.compressors.protocol import (
    Aggregation,
    AllGather,
    Context,
    SparseVector,
    TensorInfo,
    run_alone,
)
from hvdcomp.compressors.scattering import scatter, scatter_bucket
from hvdcomp.specs.described import Rule

LEAST_RANKS = 4
"""With at least this number of ranks, `exchange="auto"` scatters. Scattering takes one more round of communication than
gathering. With four ranks, scattering sends half the bytes of gathering. With two ranks, both would send the same
number of bytes. With three ranks, scattering would send two thirds of the bytes of gathering."""

WAYS = ("gather", "scatter")
"""The two exchanges that `exchange="auto"` chooses from."""

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
        exchange: with "gather", every rank receives and decodes the payloads of all ranks. With "scatter", each rank
            averages one chunk of the tensor, and compresses the mean again. "auto" means "scatter" with four or more
            ranks, and otherwise "gather". With the policy `Auto`, "auto" means the faster of the two.
    """

    exchange: Annotated[str, EXCHANGE] = field(default="gather", kw_only=True)

    unit: ClassVar[int] = 8
    """Chunks begin at multiples of this number of elements."""

    def encode(self, xp: ArrayFunctions, x: Array, context: Context) -> tuple[Array, ...]:
        """Encodes a tensor, and returns its payload. The shapes and types of the payload depend only on the shape and
        type of `x`. The arguments are those of `aggregate`."""
        raise NotImplementedError

    def decode(self, xp: ArrayFunctions, parts: Sequence[Array], shape: tuple[int, ...]) -> Array:
        """Decodes a payload. Returns the elements, float32, in their order, in any shape and in new storage; or numbers
        from which `restore` computes the elements.

        Args:
            xp: array functions.
            parts: the payload of one rank, as returned by `encode`.
            shape: shape of the tensor that was encoded.
        """
        raise NotImplementedError

    def restore(self, xp: ArrayFunctions, decoded: Array, shape: tuple[int, ...], context: Context) -> Array:
        """Computes the elements from the result of `decode`, or from the mean of these results over the ranks.

        This function must be linear, because ranks may average the results of `decode` and call this function on the
        mean.
        """
        return decoded

    def decoded(self, xp: ArrayFunctions, parts: Sequence[Array], shape: tuple[int, ...], context: Context) -> Array:
        """Decodes one payload, and returns its elements as a vector. `context` is the context that `encode` got."""
        return xp.flatten(self.restore(xp, self.decode(xp, parts, shape), shape, context))

    @property
    def of_means(self) -> Gathering:
        """The compressor that compresses the mean of a chunk again. This compressor is the same method with the same
        chunks, possibly at a different level."""
        return self

    def with_exchange(self, exchange: str) -> Gathering:
        """A copy of this method with a different value of `exchange`."""
        return dataclasses.replace(self, exchange=exchange)

    def scatters(self, ranks: int) -> bool:
        return ranks > 1 and (self.exchange == "scatter" or (self.exchange == "auto" and ranks >= LEAST_RANKS))

    form: ClassVar[str] = "encode_bucket"

    def lay_out(self, bucket: Bucket) -> Any:
        """Makes the layout of a bucket. This method is called once for each bucket. The layout is an object with the
        `payload` that `encode_bucket` fills."""
        raise NotImplementedError

    def encode_bucket(self, bucket: Bucket) -> None:
        """Writes the bucket's payload, and sets the attribute `found_inf` of the bucket."""
        raise NotImplementedError

    def decode_bucket(self, bucket: Bucket, first: Array, ranks: int, stride: int) -> bool | Array:
        """Writes the mean of the ranks' payloads to the results. The arguments come from `gathered`. Returns whether a
        kernel found an inf or NaN, like `Bucket.call`."""
        raise NotImplementedError

    def payload(self, bucket: Bucket) -> Payload:
        """Returns the storage of a bucket's payload. The bucket's layout is made first if there is none yet."""
        if bucket.layout is None:
            bucket.layout = self.lay_out(bucket)
        payload: Payload = bucket.layout.payload
        return payload

    def aggregate(self, xp: ArrayFunctions, x: Array, state: tuple[Array, ...], context: Context) -> Aggregation:
        """Encodes x, exchanges the payloads, and decodes them. C(x) is this rank's decoded payload, and the result is
        the mean of C(x) over the ranks."""
        if self.scatters(context.world_size):
            return (yield from scatter(self, xp, x, context))
        ranks = yield AllGather(self.encode(xp, x, context))
        shape = tuple(x.shape)
        mean, sent = average_decoded(ranks, lambda *parts: self.decode(xp, parts, shape), context)
        own = self.restore(xp, sent, shape, context)
        return outcome_like(xp, x, own if mean is sent else self.restore(xp, mean, shape, context), own)

    def aggregate_bucket(self, bucket: Bucket) -> BucketAggregation:
        """Like `aggregate`, but in passes over all tensors of the bucket. `encode_bucket` computes x and its payload,
        and `decode_bucket` writes the mean of all ranks' payloads to the results."""
        if self.scatters(bucket.context.world_size):
            return (yield from scatter_bucket(self, bucket))
        return (yield from self._gather_bucket(bucket))

    def _gather_bucket(self, bucket: Bucket) -> BucketAggregation:
        payload = self.payload(bucket)
        self.encode_bucket(bucket)
        rows = yield payload.gather
        return self.decode_bucket(bucket, *gathered(rows))

    @property
    def sent_is_own(self) -> bool:  # type: ignore[override]
        """False if the exchange is "scatter", or "auto", which may become "scatter". C(x) then also depends on the mean
        over all ranks, which is compressed again."""
        return self.exchange not in ("scatter", "auto")

    def preview(self, xp: ArrayFunctions, x: Array, state: tuple[Array, ...], context: Context) -> Array | SparseVector:
        return super().preview(xp, x, state, dataclasses.replace(context, world_size=1))

    def preview_bucket(self, bucket: Bucket) -> None:
        run_alone(self._gather_bucket(bucket))

    def bytes_in_bucket(self, tensor: TensorInfo, context: Context) -> tuple[float, float]:
        sent, in_node = super().bytes_in_bucket(tensor, context)
        if self.scatters(context.world_size):
            sent += self.of_means.payload_bytes(tensor.shape, dtype=tensor.dtype) / context.world_size
        return sent, in_node
