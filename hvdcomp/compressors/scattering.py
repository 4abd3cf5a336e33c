"""Scatter-reduce-allgather, which a method uses if its parameter `exchange` is "scatter".

A tensor is cut into one chunk for each rank, and each rank averages one chunk. In a bucket, all tensors together are
cut into chunks of nearly equal length. A chunk is itself a bucket, and its tensors are pieces of the original tensors.
So a method encodes and decodes chunks in the same way as buckets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from hvdcomp.arrays.types import AnyArray, Array, ArrayFunctions, number_of_elements
from hvdcomp.compressors.bucket import Bucket, BucketAggregation, PayloadRows, address_of, any_found_inf, take_off
from hvdcomp.compressors.memory import ErrorFeedback, Memory, NoMemory
from hvdcomp.compressors.packing import outcome_like, pad
from hvdcomp.compressors.protocol import Aggregation, AllGather, AllToAll, Context, TensorInfo
from hvdcomp.compressors.reduce_scatter import Codec, counted, of_chunk, reduce_chunks
from hvdcomp.compressors.sizes import SentPayload
from hvdcomp.kernels import cuda
from hvdcomp.kernels.tables import PRODUCT

_ADDRESSES = ("gradient", "result", "source", "kept", "x", "velocity", "next_velocity")
_OF_STATES = ("squares", "next_squares")
_OF_MEANS = "#mean"  # makes the random numbers of means differ from those of chunks
_OF_KEPT = ("above", "below", "rule", "kept_type")


def scatter(method: Codec, xp: ArrayFunctions, x: Array, context: Context) -> Aggregation:
    """Runs a step with exchange "scatter" for one tensor.

    Each chunk has an owner, which is the rank that averages it. The owner adds its own x without rounding. In chunks of
    other ranks, C(x) is the decoded payload. In this rank's own chunk, C(x) is x minus N times the rounding error of
    the mean, with N ranks. With this definition, the sum of C(x) over all ranks is N times the result, and one residual
    accounts for both roundings. The residual of the owner may overflow even if the mean does not. If the mean is so
    large that this might happen, it is replaced with NaN, and all ranks receive the NaN.
    """
    ranks, own = context.world_size, context.rank
    vector = xp.flatten(xp.astype(x, "float32"))
    length = -(-vector.shape[0] // (ranks * method.unit)) * method.unit
    padded = pad(xp, vector, ranks * length)
    chunks = [padded[start : start + length] for start in range(0, ranks * length, length)]
    # Every rank computes the mean of its chunk.
    mean, encoded = yield from reduce_chunks(method, xp, chunks, context)
    largest = xp.reshape(xp.row_largest(xp.reshape(mean, (1, length))), (1,))
    mean = mean * (1 + 0 * (largest * residual_bound(length, ranks)))  # times 1, or NaN after an overflow
    # Every rank compresses this mean, and sends it to all ranks.
    of_means, of_mean = method.of_means, of_chunk(context, "mean")
    gathered = yield AllGather(of_means.encode(xp, mean, of_mean))
    means = [of_means.decoded(xp, parts, (length,), of_mean) for parts in gathered]
    sent = counted(method, xp, chunks, encoded, context)
    sent[own] = chunks[own] - (mean - means[own]) * ranks
    size = number_of_elements(tuple(x.shape))
    return outcome_like(xp, x, xp.concatenate(means)[:size], xp.concatenate(sent)[:size])


def scatter_bucket(method: Codec, bucket: Bucket) -> BucketAggregation:
    """Like `scatter`, but in passes over all tensors of the bucket:

    1. `encode_bucket` computes x and the payloads of the other ranks' chunks. `dense_encode` computes x of this rank's
       chunk.
    2. `decode_bucket` averages the payloads of this rank's chunk, and `encode_bucket` compresses the mean.
    3. `decode_bucket` writes the means of all chunks to the results. `dense_keep` writes the residual of this rank's
       chunk.
    """
    if bucket.layout is None:
        bucket.layout = _Layout(method, bucket)
    layout: _Layout = bucket.layout
    own_chunk, other_chunks = layout.own, layout.others
    if bucket.states is not None:
        layout.find_squares(bucket)
    # whether the next step reads tensors as a whole, and not piece by piece
    whole = bucket.widens or np.any(bucket.segments["rule"] == PRODUCT)
    if whole and not bucket.segments["source"].any():
        bucket.call("make_x")
        bucket.segments["source"] = bucket.segments["x"]
    bucket.found_inf = any_found_inf(own_chunk.read(bucket), other_chunks.encode(method, bucket, layout.zeros))
    received = yield AllToAll((layout.rows,), in_rows=True)
    found_inf = own_chunk.average(method, bucket, received)
    own_chunk.encode_mean(method, bucket, layout.zeros)
    payloads = yield AllGather((layout.sent,), in_rows=True)
    decoded = [chunks.decode(method, bucket, payloads) for chunks in layout.decoders]
    found_inf = any_found_inf(found_inf, *decoded)
    own_chunk.keep(bucket)
    if bucket.widens and bucket.device is None:  # on a device, `EngineBucket` does this
        return any_found_inf(bucket.call("narrow_results"), found_inf)
    return found_inf


def residual_bound(length: int, ranks: int) -> float:
    """The maximum ratio between an element of the owner's residual and the largest element of the chunk's mean.

    A rounding error is at most twice the scale, and the scale is at most the 2-norm of the chunk. The residual is the
    rounding error times the number of ranks.
    """
    return 2 * ranks * math.sqrt(length)


def payloads_of_chunks(members: Sequence[tuple[TensorInfo, Any]], ranks: int) -> tuple[SentPayload, SentPayload]:
    """One rank's payloads for the two collectives of a bucket's step, in the form of `Compressor.payloads`.

    Args:
        members: each tensor of the bucket with its compressor.
        ranks: number of ranks, 2 or more.
    """
    chunks, means = [0] * ranks, [0] * ranks
    for owner, piece in _pieces([tensor.size for tensor, _ in members], members[0][1].unit, ranks):
        _, compressor = members[piece.tensor]
        chunks[owner] += compressor.payload_bytes((piece.length,))  # one payload, as with exchange "gather"
        means[owner] += compressor.of_means.payload_bytes((piece.length,))
    return SentPayload("alltoall", ranks * max(chunks)), SentPayload("allgather", max(means))


class _Piece(NamedTuple):
    """A part of a tensor: the position of the tensor in the bucket, the index of the first element, and the number of
    elements."""

    tensor: int
    start: int
    length: int


class _Pieces:
    """Pieces of a bucket's tensors, which form a bucket of their own.

    Args:
        whole: the bucket that is cut.
        pieces: the pieces of tensors, each with the rank that averages it.
        memory: the memory of the bucket of pieces.
        rows: the rows of the payload.
        compressors: the compressor of each tensor of the whole bucket. Default: the compressors of the whole bucket.

    Attributes:
        bucket: the bucket whose tensors are the pieces.
        elements: number of elements of all pieces.
    """

    def __init__(
        self,
        whole: Bucket,
        pieces: Sequence[tuple[int, _Piece]],
        memory: Memory,
        rows: PayloadRows | None = None,
        compressors: Sequence[Any] | None = None,
    ) -> None:
        self.elements = sum(piece.length for _, piece in pieces)
        self._members = np.array([piece.tensor for _, piece in pieces], np.int64)
        self._starts = np.array([piece.start for _, piece in pieces], np.uint64)
        names = [f"{whole.tensors[piece.tensor].name}#{owner}" for owner, piece in pieces]
        tensors = [TensorInfo(name, (piece.length,)) for name, (_, piece) in zip(names, pieces, strict=True)]
        of_pieces = [(compressors or whole.compressors)[piece.tensor] for _, piece in pieces]
        self.bucket = Bucket(tensors, of_pieces, memory, whole.device, whole.xp, rows=rows)
        self.bucket.context = whole.context

    def enter(self, whole: Bucket) -> None:
        """Begins a step. The address of each piece is set to the address of its first element in the whole bucket's
        tensor."""
        bucket = self.bucket
        bucket.begin(whole.context, whole.factor)
        for name in _ADDRESSES:
            bucket.segments[name] = self.addresses(whole, name)
        for name in _OF_KEPT:
            bucket.segments[name] = whole.segments[name][self._members]
        if bucket.device is not None:
            bucket.kernels.sent[0] = whole.kernels.sent[0][self._members]

    def addresses(self, whole: Bucket, name: str) -> np.ndarray:
        """The addresses of the pieces in the storage that a column of the whole bucket's table points to."""
        tensors = whole.segments[name][self._members]
        width = 2 if name == "kept" and whole.memory.rounds_to else 4
        return np.where(tensors == 0, tensors, tensors + np.uint64(width) * self._starts)

    def find_squares(self, whole: Bucket, bucket: Bucket | None = None) -> None:
        """Writes the addresses of the running means of squares to the table of a bucket of these pieces. Default: the
        attribute `bucket`."""
        for name in _OF_STATES:
            (bucket or self.bucket).segments[name] = self.addresses(whole, name)

    def decode_means(self, method: Codec, whole: Bucket, payloads: AnyArray) -> bool | AnyArray:
        """Decodes payloads of means, and writes the means to the results. `payloads` contains the payloads of all
        ranks. The bucket reads only the rows of its own pieces."""
        self.bucket.suffix = _OF_MEANS
        self.bucket.segments["result"] = self.addresses(whole, "result")
        # `flatten` copies the rows only if payloads of other requests of the round are between them.
        return method.decode_bucket(self.bucket, whole.xp.flatten(payloads), 1, 0)


class _OtherChunks(_Pieces):
    """The chunks of the other ranks."""

    def encode(self, method: Codec, whole: Bucket, zeros: np.ndarray) -> bool | AnyArray:
        """Writes the payload, and leaves the residual in x. Returns whether a kernel found an inf or NaN."""
        if not self.elements:
            return False
        self.enter(whole)
        method.encode_bucket(self.bucket)
        take_off(self.bucket, zeros)
        return self.bucket.found_inf

    def decode(self, method: Codec, whole: Bucket, payloads: AnyArray) -> bool | AnyArray:
        """Decodes the other ranks' payloads of means, and writes the means to the results."""
        return self.decode_means(method, whole, payloads) if self.elements else False


class _AllChunks(_Pieces):
    """The chunks of all ranks, with the layout of the payloads of means. This layout is used if means are compressed at
    a different level."""

    def decode(self, method: Codec, whole: Bucket, payloads: AnyArray) -> bool | AnyArray:
        """Decodes all payloads of means, and writes the means to the results."""
        self.bucket.begin(whole.context)
        return self.decode_means(method, whole, payloads)


class _OwnChunk:
    """The chunk that this rank averages. The vectors of this object contain the chunk's pieces one after the other.

    Args:
        method: the method that encodes the chunk.
        whole: the bucket that is cut.
        pieces: the pieces of tensors in the chunk, as in `_Pieces`.

    Attributes:
        elements: number of elements of the chunk.
        means: the bucket that compresses the mean of the chunk.
    """

    means: Bucket
    _x: AnyArray  # this rank's x of the chunk, and later the rounding error of the mean
    _mean: AnyArray  # the mean over the ranks

    def __init__(self, method: Codec, whole: Bucket, pieces: Sequence[tuple[int, _Piece]]) -> None:
        self._copies = _Pieces(whole, pieces, whole.memory)
        self._codes = _Pieces(whole, pieces, NoMemory())
        self.elements = self._copies.elements
        sizes = self._copies.bucket.segments["size"]
        places = np.cumsum(sizes) - sizes
        self._copies.bucket.segments["values"] = places
        self._offsets = 4 * places.astype(np.uint64)
        if whole.device is None:
            self._x, self._mean = whole.zeros(self.elements, "float32"), whole.zeros(self.elements, "float32")

    def payload_bytes(self, method: Codec) -> int:
        """The number of bytes of one rank's payload for the chunk."""
        return len(method.payload(self._codes.bucket).vector) if self.elements else 0

    def find_squares(self, whole: Bucket) -> None:
        """As in `_Pieces`. The average of the chunk is decoded with the same table as the mean, which is decoded later
        and overwrites the next running means."""
        self._codes.find_squares(whole)
        self._codes.find_squares(whole, self.means)

    def read(self, whole: Bucket) -> bool | AnyArray:
        """Computes this rank's x of the chunk. Returns whether x contains an inf or NaN."""
        if not self.elements:
            return False
        if whole.device is not None:  # this storage was used before, so it is not zero
            self._x, self._mean = (whole.kernels.passing(self.elements, "float32") for _ in range(2))
        self._copies.enter(whole)
        return self._copies.bucket.call("dense_encode", self._x)

    def average(self, method: Codec, whole: Bucket, payloads: AnyArray) -> bool | AnyArray:
        """Averages x and the other ranks' payloads. Returns whether a decoded payload contains an inf or NaN."""
        if not self.elements:
            return False
        bucket, xp, ranks = self._codes.bucket, whole.xp, len(payloads)
        own = whole.context.rank
        received = xp.concatenate([payloads[:own], payloads[own + 1 :]])
        bucket.begin(whole.context)
        bucket.segments["result"] = address_of(self._mean) + self._offsets
        found_inf = method.decode_bucket(bucket, received, ranks - 1, payloads.shape[1])
        self._mean *= (ranks - 1) / ranks
        self._x *= 1 / ranks
        self._mean += self._x
        with np.errstate(over="ignore", invalid="ignore"):
            largest = xp.flatten(xp.row_largest(xp.reshape(self._mean, (1, -1))))
            self._mean *= 1 + 0 * (largest * residual_bound(self.elements, ranks))  # times 1, or NaN after an overflow
        return found_inf

    def encode_mean(self, method: Codec, whole: Bucket, zeros: np.ndarray) -> None:
        """Writes the payload of the mean, and leaves the rounding error of the mean in x."""
        if not self.elements:
            return
        means = self.means
        means.begin(whole.context, suffix=_OF_MEANS)
        means.segments["kept"] = 0
        means.segments["gradient"] = address_of(self._mean) + self._offsets
        means.segments["x"] = address_of(self._x) + self._offsets if means.keeps else 0
        method.encode_bucket(means)
        take_off(means, zeros)

    def decode(self, method: Codec, whole: Bucket, payloads: AnyArray) -> bool | AnyArray:
        """Decodes the payload of the mean, and writes the mean to the results."""
        if not self.elements:
            return False
        self._codes.bucket.suffix = _OF_MEANS
        self._codes.bucket.segments["result"] = self._codes.addresses(whole, "result")
        return method.decode_bucket(self._codes.bucket, payloads[whole.context.rank], 1, 0)

    def keep(self, whole: Bucket) -> None:
        """Writes the residual of the chunk to x: the rounding error of the mean, times the number of ranks."""
        if whole.keeps and self.elements:
            self._x *= whole.context.world_size
            self._copies.bucket.call("dense_keep", self._x)
        if whole.device is not None and self.elements:
            for vector in (self._x, self._mean):
                cuda.let_go(vector)
            self._x = self._mean = None


class _Layout:
    """The chunks of a bucket, and the storage of their payloads.

    Attributes:
        own: the chunk that this rank averages.
        others: the chunks that the other ranks average.
        decoders: the chunks that decode the payloads of means. The decoders are `own` and `others`, if means have the
            same layout as chunks.
        rows: one payload for each rank, uint8 (ranks, length). This rank's own row is unused.
        sent: the payload of the mean, uint8 (length,).
        zeros: a vector of zeros, as long as the longest piece. It is used only on the host.
    """

    def __init__(self, method: Codec, bucket: Bucket) -> None:
        ranks, own = bucket.context.world_size, bucket.context.rank
        sizes = bucket.segments["size"]
        pieces = list(_pieces(sizes.tolist(), method.unit, ranks))
        own_pieces = [(owner, piece) for owner, piece in pieces if owner == own]
        other_pieces = [(owner, piece) for owner, piece in pieces if owner != own]
        self.own = _OwnChunk(method, bucket, own_pieces)
        # All ranks compute the lengths of payloads from the pieces, so no exchange of lengths is needed.
        owners = np.array([owner for owner, _ in other_pieces], np.int64)
        rows = PayloadRows(owners, ranks, self.own.payload_bytes(method))
        self.others = _OtherChunks(bucket, other_pieces, bucket.memory, rows)
        self.rows = _rows_of(method, self.others.bucket, rows)
        self.decoders: Sequence[_OwnChunk | _OtherChunks | _AllChunks] = self.own, self.others
        length, of_means = self.rows.shape[1], [compressor.of_means for compressor in bucket.compressors]
        if any(one is not other for one, other in zip(of_means, bucket.compressors, strict=True)):
            rows = PayloadRows(np.array([owner for owner, _ in pieces], np.int64), ranks, 0)
            means = _AllChunks(bucket, pieces, NoMemory(), rows, of_means)
            length = _rows_of(method, means.bucket, rows).shape[1]
            # This bucket is only used to decode. A payload of its own would need as much memory as the received
            # payloads.
            means.bucket.layout.payload = None
            self.decoders = (means,)
        rows = PayloadRows(np.zeros(len(own_pieces), np.int64), 1, length)
        memory = ErrorFeedback() if bucket.keeps else NoMemory()
        self.own.means = _Pieces(bucket, own_pieces, memory, rows, of_means).bucket
        self.sent = _rows_of(method, self.own.means, rows)[0]
        self.zeros = np.zeros(int(sizes.max()) if bucket.device is None else 0, np.float32)

    def find_squares(self, whole: Bucket) -> None:
        """Writes the addresses of the running means of squares to the tables of all chunks, if elements have
        scales."""
        for chunks in {self.own, self.others, *self.decoders}:
            chunks.find_squares(whole)


def _rows_of(method: Codec, bucket: Bucket, rows: PayloadRows) -> AnyArray:
    """The rows of a bucket's payload, uint8 (ranks, length)."""
    if bucket.tensors:
        vector = method.payload(bucket).vector
    else:
        vector = bucket.zeros(bucket.places(bucket.segments["size"])[1])
    return bucket.xp.reshape(vector, (rows.ranks, -1))


def _pieces(sizes: Sequence[int], unit: int, ranks: int) -> Iterator[tuple[int, _Piece]]:
    """Cuts tensors at multiples of `unit` elements. Yields the pieces in order, each with the rank that averages it."""
    units = [-(-size // unit) for size in sizes]
    ends = [(owner + 1) * sum(units) // ranks for owner in range(ranks)]
    owner = passed = 0
    for tensor, (size, count) in enumerate(zip(sizes, units, strict=True)):
        start = 0
        while start < count:
            while passed == ends[owner]:
                owner += 1
            taken = min(count - start, ends[owner] - passed)
            yield owner, _Piece(tensor, start * unit, min(taken * unit, size - start * unit))
            start += taken
            passed += taken
