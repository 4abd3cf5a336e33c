"""Scatter-reduce-allgather of a bucket: what `gathering` does with each tensor by itself, with all tensors at once.

The bucket's tensors are cut into as many chunks as there are ranks, of nearly as many elements each. A chunk is a
bucket too: its tensors are pieces of the bucket's. So a method encodes and decodes chunks as it does buckets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from hvdcomp.arrays.types import Array
from hvdcomp.compressors.bucket import Bucket, BucketAggregation, Payload, Rows, address_of, either
from hvdcomp.compressors.memory import ErrorFeedback, Memory, NoMemory
from hvdcomp.compressors.protocol import AllGather, AllToAll, TensorInfo
from hvdcomp.compressors.sizes import Payload as SentPayload
from hvdcomp.kernels import cuda
from hvdcomp.kernels.tables import PRODUCT

_ADDRESSES = ("gradient", "result", "source", "kept", "x", "velocity", "next_velocity")
_OF_KEPT = ("above", "below", "rule", "kept_type")


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

    def decode_bucket(self, bucket: Bucket, first: Any, ranks: int, stride: int) -> bool | Array:
        """Writes the mean of payloads, as of `gathered`, to where results go; whether it holds an inf or NaN."""


def aggregate_chunks(method: CodesBuckets, bucket: Bucket) -> BucketAggregation:
    """A bucket's step."""
    if bucket.layout is None:
        bucket.layout = _Layout(method, bucket)
    layout: _Layout = bucket.layout
    own, others = layout.own, layout.others
    whole = bucket.widens or np.any(bucket.segments["rule"] == PRODUCT)  # read as a whole, and not piece by piece
    if whole and not bucket.segments["source"].any():
        bucket.call("make_x")
        bucket.segments["source"] = bucket.segments["x"]
    bucket.found_inf = either(own.read(bucket), others.encode(method, bucket, layout.zeros))
    received = yield AllToAll((layout.rows,))
    found = own.average(method, bucket, [payload for (payload,) in received])
    own.encode_mean(method, bucket, layout.zeros)
    gathered = yield AllGather((layout.sent,))
    payloads = [payload for (payload,) in gathered]
    found = either(found, own.decode(method, bucket, payloads), others.decode(method, bucket, payloads))
    own.keep(bucket)
    if bucket.widens and bucket.device is None:  # on a device, `each_tensor.step_of` does so
        return either(bucket.call("narrow_results"), found)
    return found


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


class _Part:
    """Pieces of a bucket's tensors, as a bucket of their own.

    Args:
        whole: the bucket that is cut.
        pieces: each with the number of the rank that averages it.
        memory: of the bucket of pieces.
        rows: of its payload.
        suffix: of the names of the pieces.

    Attributes:
        bucket: of the pieces.
        elements: of all.
    """

    def __init__(
        self,
        whole: Bucket,
        pieces: Sequence[tuple[int, _Piece]],
        memory: Memory,
        rows: Rows | None = None,
        suffix: str = "",
    ) -> None:
        self.elements = sum(piece.length for _, piece in pieces)
        self._members = np.array([piece.tensor for _, piece in pieces], np.int64)
        self._starts = np.array([piece.start for _, piece in pieces], np.uint64)
        names = [f"{whole.tensors[piece.tensor].name}#{owner}{suffix}" for owner, piece in pieces]
        tensors = [TensorInfo(name, (piece.length,)) for name, (_, piece) in zip(names, pieces, strict=True)]
        compressors = [whole.compressors[piece.tensor] for _, piece in pieces]
        self.bucket = Bucket(tensors, compressors, memory, whole.device, whole.xp, rows=rows)
        self.bucket.context = whole.context

    def enter(self, whole: Bucket) -> None:
        """Begins a step: the pieces lie in the tensors."""
        bucket = self.bucket
        bucket.begin(whole.context, whole.factor)
        for name in _ADDRESSES:
            bucket.segments[name] = self.addresses(whole, name)
        for name in _OF_KEPT:
            bucket.segments[name] = whole.segments[name][self._members]
        if bucket.device is not None:
            bucket.kernels.sent[0] = whole.kernels.sent[0][self._members]

    def addresses(self, whole: Bucket, name: str) -> np.ndarray:
        """Where the pieces lie in what the table of the whole calls by a name."""
        found = whole.segments[name][self._members]
        width = 2 if name == "kept" and whole.memory.rounds_to else 4
        return np.where(found == 0, found, found + np.uint64(width) * self._starts)


class _Others(_Part):
    """The chunks of the other ranks."""

    def encode(self, method: CodesBuckets, whole: Bucket, zeros: np.ndarray) -> bool | Array:
        """Makes the payload; what was not sent is left as x. Returns whether it has found an inf or NaN."""
        if not self.elements:
            return False
        self.enter(whole)
        method.encode_bucket(self.bucket)
        take_off(self.bucket, zeros)
        return self.bucket.found_inf

    def decode(self, method: CodesBuckets, whole: Bucket, payloads: Sequence[Array]) -> bool | Array:
        """Writes what the ranks' payloads of means stand for to where the results go."""
        if not self.elements:
            return False
        first, second = payloads[:2]
        if address_of(second) - address_of(first) != first.shape[0]:  # of a round with other requests
            first = whole.xp.concatenate(payloads)
        self.bucket.segments["result"] = self.addresses(whole, "result")
        return method.decode_bucket(self.bucket, first, 1, 0)


class _Own:
    """The chunk that this rank averages: vectors in which its pieces lie behind each other.

    Args:
        method: that encodes it.
        whole: the bucket that is cut.
        pieces: as of `_Part`.

    Attributes:
        elements: of it.
        means: the chunk of the mean, as it is encoded.
    """

    means: Bucket
    _x: Array  # this rank's own part of it, and later what the payload of the mean lacks
    _mean: Array  # of all ranks

    def __init__(self, method: CodesBuckets, whole: Bucket, pieces: Sequence[tuple[int, _Piece]]) -> None:
        self._copies = _Part(whole, pieces, whole.memory)
        self._codes = _Part(whole, pieces, NoMemory())
        self.elements = self._copies.elements
        sizes = self._copies.bucket.segments["size"]
        places = np.cumsum(sizes) - sizes
        self._copies.bucket.segments["place"][:, 0] = places
        self._offsets = 4 * places.astype(np.uint64)
        if whole.device is None:
            self._x, self._mean = whole.zeros(self.elements, "float32"), whole.zeros(self.elements, "float32")

    def payload_bytes(self, method: CodesBuckets) -> int:
        """Of a rank's payload of the chunk."""
        return len(method.payload(self._codes.bucket).vector) if self.elements else 0

    def read(self, whole: Bucket) -> bool | Array:
        """Makes this rank's x of the chunk; returns whether it holds an inf or NaN."""
        if not self.elements:
            return False
        if whole.device is not None:  # where memory that was let go of comes back without being cleared
            self._x, self._mean = (whole.kernels.passing(self.elements, "float32") for _ in range(2))
        self._copies.enter(whole)
        return self._copies.bucket.call("dense_encode", self._x)

    def average(self, method: CodesBuckets, whole: Bucket, payloads: Sequence[Array]) -> bool | Array:
        """Averages x and the payloads of the other ranks; returns whether they stand for an inf or NaN."""
        if not self.elements:
            return False
        bucket, xp, ranks = self._codes.bucket, whole.xp, len(payloads)
        others = xp.concatenate([one for rank, one in enumerate(payloads) if rank != whole.context.rank])
        bucket.begin(whole.context)
        bucket.segments["result"] = address_of(self._mean) + self._offsets
        found = method.decode_bucket(bucket, others, ranks - 1, payloads[0].shape[0])
        self._mean *= (ranks - 1) / ranks
        self._x *= 1 / ranks
        self._mean += self._x
        with np.errstate(over="ignore", invalid="ignore"):
            largest = xp.flatten(xp.row_largest(xp.reshape(self._mean, (1, -1))))
            self._mean *= 1 + 0 * (largest * residual_bound(self.elements, ranks))  # times 1, or NaN
        return found

    def encode_mean(self, method: CodesBuckets, whole: Bucket, zeros: np.ndarray) -> None:
        """Makes the payload of the mean; what it lacks is left as x."""
        if not self.elements:
            return
        means = self.means
        means.begin(whole.context)
        means.segments["kept"] = 0
        means.segments["gradient"] = address_of(self._mean) + self._offsets
        means.segments["x"] = address_of(self._x) + self._offsets if means.keeps else 0
        method.encode_bucket(means)
        take_off(means, zeros)

    def decode(self, method: CodesBuckets, whole: Bucket, payloads: Sequence[Array]) -> bool | Array:
        """Writes what the payload of the mean stands for to where the results go."""
        if not self.elements:
            return False
        self._codes.bucket.segments["result"] = self._codes.addresses(whole, "result")
        return method.decode_bucket(self._codes.bucket, payloads[whole.context.rank], 1, 0)

    def keep(self, whole: Bucket) -> None:
        """Leaves as x of the chunk what the mean's payload lacks, as often as there are ranks."""
        if whole.keeps and self.elements:
            self._x *= whole.context.world_size
            self._copies.bucket.call("dense_keep", self._x)
        if whole.device is not None and self.elements:
            for vector in (self._x, self._mean):
                cuda.let_go(vector)
            self._x = self._mean = None


class _Layout:
    """How a bucket is cut, and storage for what is sent.

    Attributes:
        own: the chunk that this rank averages.
        others: those of the other ranks.
        rows: a payload for each rank, uint8 (ranks, length); this rank's own row says nothing.
        sent: the payload of the mean, uint8 (length,).
        zeros: on the host, as many as the longest piece has elements.
    """

    def __init__(self, method: CodesBuckets, bucket: Bucket) -> None:
        ranks, own = bucket.context.world_size, bucket.context.rank
        sizes = bucket.segments["size"]
        pieces = list(_pieces(sizes.tolist(), method.unit, ranks))
        mine, theirs = ([one for one in pieces if (one[0] == own) == is_own] for is_own in (True, False))
        self.own = _Own(method, bucket, mine)
        # Payloads' lengths follow from the pieces alone, and so are known to all ranks.
        rows = Rows(np.array([owner for owner, _ in theirs], np.int64), ranks, self.own.payload_bytes(method))
        self.others = _Others(bucket, theirs, bucket.memory, rows)
        self.rows = _rows_of(method, self.others.bucket, rows)
        rows = Rows(np.zeros(len(mine), np.int64), 1, self.rows.shape[1])
        memory = ErrorFeedback() if bucket.keeps else NoMemory()
        self.own.means = _Part(bucket, mine, memory, rows, "#mean").bucket
        self.sent = _rows_of(method, self.own.means, rows)[0]
        self.zeros = np.zeros(int(sizes.max()) if bucket.device is None else 0, np.float32)


def _rows_of(method: CodesBuckets, bucket: Bucket, rows: Rows) -> Array:
    """The rows of a bucket's payload, uint8 (ranks, length)."""
    if bucket.tensors:
        vector = method.payload(bucket).vector
    else:
        vector = bucket.zeros(bucket.places(bucket.segments["size"])[1])
    return bucket.xp.reshape(vector, (rows.ranks, -1))


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
        zeros: on the host, as many as the largest tensor has elements.
        x: addresses of what is left; None for those of x itself, where what was sent is not a product of factors.
    """
    segments = bucket.segments
    if not bucket.keeps or not segments["sent_rule"].any():
        return
    if bucket.device is not None:
        bucket.call("take_off")
        segments["sent_rule"] = 0
        return
    segments["kept"] = segments["x"]
    segments["x"] = segments["x"] if x is None else x
    segments["kept_type"] = 0
    for name in ("above", "below", "rule", "product"):
        segments[name] = segments[f"sent_{name}"]
    segments["gradient"] = zeros.ctypes.data
    for name in ("source", "velocity", "next_velocity", "sent_rule"):
        segments[name] = 0
    bucket.table.bucket.decay = 1.0
    bucket.call("make_x")
