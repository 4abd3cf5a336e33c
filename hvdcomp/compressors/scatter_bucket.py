"""Scatter-reduce-allgather of a bucket: what `gathering` does with each tensor by itself, with all tensors at once.

The bucket's tensors are cut into as many chunks as there are ranks, of nearly as many elements each. A chunk is a
bucket too: its tensors are pieces of the bucket's. So a method encodes and decodes chunks as it does buckets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from hvdcomp.compressors.bucket import Bucket, BucketAggregation, Payload
from hvdcomp.compressors.memory import ErrorFeedback, NoMemory
from hvdcomp.compressors.protocol import AllGather, AllToAll, TensorInfo
from hvdcomp.compressors.sizes import Payload as SentPayload
from hvdcomp.kernels.tables import PRODUCT

_ADDRESSES = ("gradient", "result", "source", "kept", "x", "velocity", "next_velocity")
_OF_KEPT = ("above", "below", "rule")


class CodesBuckets(Protocol):
    """A method whose payloads are decoded by themselves.

    Attributes:
        unit: chunks begin at multiples of this number of elements of a tensor.
    """

    @property
    def unit(self) -> int: ...

    def payload(self, bucket: Bucket) -> Payload:
        """Storage for what is sent of a bucket."""

    def encode_bucket(self, bucket: Bucket) -> None:
        """Writes to `payload` what is sent of a bucket, and sets the bucket's `found_inf`."""

    def decode_bucket(self, bucket: Bucket, first: Any, ranks: int, stride: int) -> bool:
        """Writes the mean of payloads, as of `gathered`, to where results go; whether it holds an inf or NaN."""


def aggregate_chunks(method: CodesBuckets, bucket: Bucket) -> BucketAggregation:
    """A bucket's step on the host."""
    if bucket.layout is None:
        bucket.layout = _Layout(method, bucket)
    layout: _Layout = bucket.layout
    own = bucket.context.rank
    whole = bucket.widens or np.any(bucket.segments["rule"] == PRODUCT)  # read as a whole, and not piece by piece
    if whole and not bucket.segments["source"].any():
        bucket.call("make_x")
        bucket.segments["source"] = bucket.segments["x"]
    for chunk in layout.chunks:
        chunk.enter(bucket)
    bucket.found_inf = layout.own.read(bucket)
    for place, chunk in enumerate(layout.chunks):
        if place != own:
            bucket.found_inf |= chunk.encode(method, layout.rows[place], layout.zeros)
    received = yield AllToAll((layout.rows,))
    found = layout.own.average(method, [part for (part,) in received])
    layout.own.encode_mean(method, bucket, layout.sent.vector, layout.zeros)
    gathered = yield AllGather((layout.sent.vector,))
    for chunk, (payload,) in zip(layout.chunks, gathered, strict=True):
        found |= chunk.decode(method, bucket, payload)
    layout.own.keep(bucket)
    return bucket.call("narrow_results") | found if bucket.widens else found


def residual_bound(length: int, ranks: int) -> float:
    """By how much the owner's residual of a chunk may be larger than the largest element of its mean.

    Methods round within twice a scale, which is no more than the chunk's 2-norm; and the residual counts for all ranks.
    """
    return 2 * ranks * math.sqrt(length)


def payloads_of_chunks(members: Sequence[tuple[TensorInfo, Any]], ranks: int) -> tuple[SentPayload, SentPayload]:
    """What one rank hands to the two collectives of a bucket's step, as of `Compressor.payloads`.

    Args:
        members: of the bucket: each tensor with its compressor.
        ranks: 2 or more.
    """
    chunks = [0] * ranks
    for owner, piece in _pieces([tensor.size for tensor, _ in members], members[0][1].unit, ranks):
        _, compressor = members[piece.tensor]
        chunks[owner] += compressor.payload_bytes((piece.length,))  # of one rank, as if it was gathered
    longest = max(chunks)
    return SentPayload("alltoall", ranks * longest), SentPayload("allgather", longest)


class _Piece(NamedTuple):
    """A part of a tensor: the tensor's place in the bucket, and elements."""

    tensor: int
    start: int
    length: int


class _Chunk:
    """The pieces of tensors that one rank averages.

    Args:
        bucket: that is cut.
        pieces: of which it is made.
        number: of the chunk.

    Attributes:
        bucket: the chunk's own.
    """

    def __init__(self, bucket: Bucket, pieces: Sequence[_Piece], number: int) -> None:
        self.size = sum(piece.length for piece in pieces)
        self._members = np.array([piece.tensor for piece in pieces], np.int64)
        self._bytes = 4 * np.array([piece.start for piece in pieces], np.uint64)
        self.bucket = Bucket(
            [TensorInfo(f"{bucket.tensors[one.tensor].name}#{number}", (one.length,)) for one in pieces],
            [bucket.compressors[piece.tensor] for piece in pieces],
            bucket.memory,
        )
        self.bucket.context = bucket.context

    def enter(self, whole: Bucket) -> None:
        """Begins a step: the pieces lie in the tensors."""
        self.bucket.begin(whole.context, whole.table.bucket.factor)
        mine, theirs = self.bucket.segments, whole.segments[self._members]
        for name in _ADDRESSES:
            mine[name] = self._within(theirs[name])
        for name in _OF_KEPT:
            mine[name] = theirs[name]

    def addresses(self, whole: Bucket, name: str) -> np.ndarray:
        """Where the pieces lie in what the table of the whole calls by a name."""
        return self._within(whole.segments[name][self._members])

    def _within(self, addresses: np.ndarray) -> np.ndarray:
        return np.where(addresses == 0, addresses, addresses + self._bytes)

    def encode(self, method: CodesBuckets, row: np.ndarray, zeros: np.ndarray) -> bool:
        """Writes its payload to a row; what was not sent is left as x. Returns whether it has found an inf or NaN."""
        if not self.size:
            return False
        payload = method.payload(self.bucket).vector
        method.encode_bucket(self.bucket)
        row[: len(payload)] = payload
        take_off(self.bucket, zeros)
        return bool(self.bucket.found_inf)

    def decode(self, method: CodesBuckets, whole: Bucket, payload: np.ndarray) -> bool:
        """Writes what the payload of its mean stands for to where the results go."""
        if not self.size:
            return False
        self.bucket.segments["result"] = self.addresses(whole, "result")
        return bool(method.decode_bucket(self.bucket, payload, 1, 0))


class _Own:
    """The chunk that this rank averages: three vectors in which its pieces lie behind each other.

    Args:
        chunk: as the other ranks encode it.

    Attributes:
        x: this rank's own part of it, and later what the payload of the mean lacks.
        mean: of all ranks.
    """

    def __init__(self, bucket: Bucket, chunk: _Chunk) -> None:
        self._chunk = chunk
        self._copies = Bucket(chunk.bucket.tensors, chunk.bucket.compressors, bucket.memory)
        self._means = Bucket(
            [TensorInfo(f"{tensor.name}#mean", tensor.shape) for tensor in chunk.bucket.tensors],
            chunk.bucket.compressors,
            ErrorFeedback() if bucket.keeps else NoMemory(),
        )
        self._means.context = bucket.context
        sizes = chunk.bucket.segments["size"]
        places = np.cumsum(sizes) - sizes
        self._copies.segments["place"][:, 0] = places
        self._offsets = 4 * places.astype(np.uint64)
        self.x = np.zeros(chunk.size, np.float32)
        self.mean = np.zeros(chunk.size, np.float32)

    def read(self, whole: Bucket) -> bool:
        """Makes this rank's x of the chunk; returns whether it holds an inf or NaN."""
        if not self._chunk.size:
            return False
        self._copies.begin(whole.context, whole.table.bucket.factor)
        for name in (*_ADDRESSES, *_OF_KEPT):
            self._copies.segments[name] = self._chunk.bucket.segments[name]
        return bool(self._copies.call("dense_encode", self.x))

    def average(self, method: CodesBuckets, payloads: Sequence[np.ndarray]) -> bool:
        """Averages x and the payloads of the other ranks; returns whether they stand for an inf or NaN."""
        if not self._chunk.size:
            return False
        bucket, ranks = self._chunk.bucket, len(payloads)
        others = np.stack([payload for rank, payload in enumerate(payloads) if rank != bucket.context.rank])
        bucket.segments["result"] = self.mean.ctypes.data + self._offsets
        found = method.decode_bucket(bucket, others, ranks - 1, others.shape[1])
        self.mean *= (ranks - 1) / ranks
        self.x *= 1 / ranks
        self.mean += self.x
        with np.errstate(over="ignore"):
            bound = max(self.mean.max(), -self.mean.min()) * np.float32(residual_bound(len(self.mean), ranks))
        if not np.isfinite(bound):
            self.mean[:] = np.nan
        return bool(found)

    def encode_mean(self, method: CodesBuckets, whole: Bucket, row: np.ndarray, zeros: np.ndarray) -> None:
        """Writes the payload of the mean to a row; what it lacks, to `x`."""
        if not self._chunk.size:
            return
        means = self._means
        means.begin(whole.context)
        means.segments["kept"] = 0
        means.segments["gradient"] = self.mean.ctypes.data + self._offsets
        means.segments["x"] = self.x.ctypes.data + self._offsets if means.keeps else 0
        payload = method.payload(means).vector
        method.encode_bucket(means)
        row[: len(payload)] = payload
        take_off(means, zeros)

    def keep(self, whole: Bucket) -> None:
        """Leaves as x of the chunk what the mean's payload lacks, as often as there are ranks."""
        if self._means.keeps and self._chunk.size:
            self.x *= whole.context.world_size
            self._copies.segments["result"] = self._chunk.addresses(whole, "x")
            self._copies.call("dense_decode", self.x)


class _Layout:
    """How a bucket is cut, and storage for what is sent.

    Attributes:
        chunks: by the rank that averages them.
        own: this rank's.
        rows: a payload for each rank, uint8 (ranks, length).
        sent: that of the mean.
        zeros: as many as the longest piece has elements.
    """

    def __init__(self, method: CodesBuckets, bucket: Bucket) -> None:
        ranks = bucket.context.world_size
        sizes = bucket.segments["size"]
        pieces: list[list[_Piece]] = [[] for _ in range(ranks)]
        for owner, piece in _pieces(sizes.tolist(), method.unit, ranks):
            pieces[owner].append(piece)
        self.chunks = [_Chunk(bucket, of_one, number) for number, of_one in enumerate(pieces)]
        self.zeros = np.zeros(int(sizes.max()), np.float32)
        self.own = _Own(bucket, self.chunks[bucket.context.rank])
        # Payloads' lengths follow from the pieces alone, and so are known to all ranks.
        length = max(len(method.payload(chunk.bucket).vector) for chunk in self.chunks if chunk.size)
        self.rows = np.zeros((ranks, length), np.uint8)
        self.sent = bucket.payload(length)


def _pieces(sizes: Sequence[int], unit: int, ranks: int) -> Iterator[tuple[int, _Piece]]:
    """Cuts tensors at multiples of a unit of elements: who averages each piece, and the piece, in order."""
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


def take_off(bucket: Bucket, zeros: np.ndarray, x: np.ndarray | None = None) -> None:
    """Takes off x what was sent of it, where a kernel has left that to the next step, which may cut it otherwise.

    Args:
        zeros: as many as the largest tensor has elements.
        x: addresses of what is left; None for those of x itself, where what was sent is not a product of factors.
    """
    segments = bucket.segments
    if not bucket.keeps or not segments["sent_rule"].any():
        return
    segments["kept"] = segments["x"]
    segments["x"] = segments["x"] if x is None else x
    for name in (*_OF_KEPT, "product"):
        segments[name] = segments[f"sent_{name}"]
    segments["gradient"] = zeros.ctypes.data
    for name in ("source", "velocity", "next_velocity", "sent_rule"):
        segments[name] = 0
    bucket.table.bucket.decay = 1.0
    bucket.call("make_x")
