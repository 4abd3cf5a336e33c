"""Two levels for a bucket: its tensors are dealt out to the ranks of a node, as one vector that is cut, or whole."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from hvdcomp.arrays import numpy_arrays
from hvdcomp.compressors.bucket import Bucket, BucketAggregation, BucketStates
from hvdcomp.compressors.memory import ErrorFeedback, NoMemory
from hvdcomp.compressors.protocol import AllGather, Context, Levels, Place, ReduceScatter, TensorInfo, across
from hvdcomp.compressors.scatter_bucket import take_off
from hvdcomp.compressors.sizes import Payload

UNIT = 8
"""Elements, of which shards have whole numbers."""

STAND_IN = (1, 1)
"""The shape of what a rank compresses that has no part of a tensor, or of a bucket: a zero."""

ALONE = Levels(Place(0, 1), Place(0, 1))


def between(context: Context, levels: Levels) -> Context:
    """The same step among the ranks that have this rank's place in the other nodes."""
    return dataclasses.replace(context, rank=levels.across.rank, world_size=levels.across.size, levels=None)


def deal(sizes: Sequence[int], ranks: int) -> list[int]:
    """The rank that gets each thing: the largest first, always to the rank that has least.

    Example:
        >>> deal([2, 9, 3, 3], 2)
        [1, 0, 1, 1]
    """
    loads, owners = [0] * ranks, [0] * len(sizes)
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        owners[place] = loads.index(min(loads))
        loads[owners[place]] += sizes[place]
    return owners


def aggregate_levels(bucket: Bucket, levels: Levels) -> BucketAggregation:
    """A bucket's step on the host.

    A single collective of rows of one length deals everything out, whole tensors too: the rows are then as long as the
    largest share, and sizes follow from the bucket alone.
    """
    if bucket.layout is None:
        bucket.layout = _Layout(bucket, levels.node)
    layout: _Layout = bucket.layout
    shard, states = layout.shard, layout.states
    (own, ranks), others, _ = levels
    bucket.found_inf = bucket.call("dense_encode", layout.whole)
    mean = layout.rows[own]
    if ranks > 1:
        mean = yield ReduceScatter(layout.rows, group="node")
    if states is not None:
        states.take(bucket)
    exchange = shard.aggregate(between(bucket.context, levels), mean, layout.result)
    yield from exchange if ranks == 1 else across(exchange, others.size)
    given: tuple[np.ndarray, ...] = (layout.result,) if states is None else (layout.result, states.made())
    everyone: list[tuple[np.ndarray, ...]] = [given]
    if ranks > 1:
        everyone = yield AllGather(given, group="node")
    found = bucket.call("dense_decode", np.concatenate([one[0] for one in everyone]))
    if states is not None:
        states.put(bucket, [one[1] for one in everyone])
    if bucket.keeps:
        layout.keep(bucket, own)
    return found


class _Shard:
    """What this rank exchanges with other nodes: a bucket of tensors or of pieces of them, one behind the other.

    Args:
        pieces: place in the whole bucket, name and shape of each.
        length: elements of all, and of what is behind them.

    Attributes:
        bucket: of the pieces.
        lost: what the exchange has lost of them, float32 (length,).
    """

    def __init__(self, whole: Bucket, pieces: Sequence[tuple[int, TensorInfo]], length: int) -> None:
        self.bucket = Bucket(
            [tensor for _, tensor in pieces],
            [whole.compressors[place].compressor for place, _ in pieces],
            ErrorFeedback() if whole.keeps else NoMemory(),
        )
        sizes = self.bucket.segments["size"]
        self._offsets = (4 * (np.cumsum(sizes) - sizes)).astype(np.uint64)
        self._zeros = np.zeros(int(sizes.max()), np.float32)
        self.lost = np.zeros(length, np.float32)
        self._x = np.zeros(length, np.float32) if self.bucket.compressors[0].keeps_state else self.lost

    def aggregate(self, context: Context, mean: np.ndarray, result: np.ndarray) -> BucketAggregation:
        """The compressor's step between nodes; leaves what is lost in `lost`."""
        bucket = self.bucket
        bucket.begin(context)
        segments = bucket.segments
        segments["gradient"] = mean.ctypes.data + self._offsets
        segments["result"] = result.ctypes.data + self._offsets
        segments["kept"] = segments["rule"] = 0
        segments["x"] = self._x.ctypes.data + self._offsets if bucket.keeps else 0
        found = yield from bucket.compressors[0].aggregate_bucket(bucket)
        take_off(bucket, self._zeros, self.lost.ctypes.data + self._offsets)
        return found


class _States:
    """What a method keeps of tensors that are dealt out whole, between the bucket, which has all of it, and the shard.

    Args:
        whole: the bucket, with its states.
        shard: with this rank's tensors, or a stand-in.
        dealt: the tensors of each rank of the node, by their places in the bucket.
        own: which rank this is.
    """

    def __init__(self, whole: Bucket, shard: Bucket, dealt: Sequence[Sequence[int]], own: int) -> None:
        assert whole.states is not None
        zero = np.zeros(STAND_IN, np.float32)
        nothing = shard.compressors[0].prepare(numpy_arrays, zero, (), whole.context)
        self._mine = BucketStates([whole.states.arrays(place) for place in dealt[own]] or [nothing])
        shard.states = self._mine
        self._places = [whole.states.places(places) for places in dealt]
        self._own = own
        lengths = [sum(map(len, kinds)) for kinds in self._places]
        self._sent = np.zeros(max(lengths), np.float32)

    def take(self, whole: Bucket) -> None:
        """Before a step: this rank's part of what is kept."""
        assert whole.states is not None
        for mine, kept, places in zip(self._mine.kept, whole.states.kept, self._places[self._own], strict=True):
            if len(places):
                mine[:] = kept[places]

    def made(self) -> np.ndarray:
        """What this rank's part has become, in as much room as the largest takes."""
        start = 0
        for made, places in zip(self._mine.next, self._places[self._own], strict=True):
            self._sent[start : start + len(places)] = made[: len(places)]
            start += len(places)
        return self._sent

    def put(self, whole: Bucket, parts: Sequence[np.ndarray]) -> None:
        """What all of it has become, of the parts of the node's ranks."""
        assert whole.states is not None
        for part, kinds in zip(parts, self._places, strict=True):
            start = 0
            for made, places in zip(whole.states.next, kinds, strict=True):
                made[places] = part[start : start + len(places)]
                start += len(places)


class _Layout:
    """How a bucket is dealt out, and storage for it.

    Attributes:
        whole: x of all tensors, in rows, float32.
        rows: the same storage, a row for each rank of the node, and zeros behind what it gets.
        result: of this rank's part.
        shard: this rank's part; of a zero where it has none, so that all ranks ask for the same.
        states: of tensors that are dealt out whole, if the method keeps anything.
    """

    def __init__(self, bucket: Bucket, node: Place) -> None:
        sizes = bucket.segments["size"].tolist()
        own, ranks = node
        dealt: list[list[int]] = []
        if bucket.compressors[0].of_matrices or ranks == 1:
            dealt = _dealt(sizes, ranks)
            length = _longest(sizes, dealt)
            starts = np.zeros(len(sizes), np.int64)
            for rank, places in enumerate(dealt):
                mine = np.array([sizes[place] for place in places], np.int64)
                starts[places] = rank * length + np.cumsum(mine) - mine
            pieces = [(place, bucket.tensors[place]) for place in dealt[own]]
        else:
            length = _whole_units(-(-sum(sizes) // ranks))
            starts = np.cumsum(sizes) - sizes
            pieces = list(_pieces(bucket.tensors, own, length))
        self.whole = np.zeros(ranks * length, np.float32)
        self.rows = self.whole.reshape(ranks, length)
        self.result = np.zeros(length, np.float32)
        bucket.segments["place"][:, 0] = starts
        self.shard = _Shard(bucket, pieces or [(0, TensorInfo(f"@{own}", STAND_IN))], length)
        keeps = bucket.compressors[0].keeps_state
        self.states = _States(bucket, self.shard.bucket, dealt, own) if keeps else None

    def keep(self, bucket: Bucket, own: int) -> None:
        """Leaves as x what the own part has lost, as often as the node has ranks, and elsewhere nothing; but what was
        left out of x before it came here stays."""
        self.whole[:] = 0
        kept = self.rows[own]
        with np.errstate(over="ignore"):
            np.multiply(self.shard.lost, np.float32(len(self.rows)), out=kept)
        kept[~np.isfinite(kept)] = 0  # as in `memory.without`
        segments = bucket.segments
        replaced = (segments["source"] != 0) & (segments["source"] != segments["x"])
        for segment in segments[replaced]:
            start, size = int(segment["place"][0]), int(segment["size"])
            x, source = (_floats(int(segment[name]), size) for name in ("x", "source"))
            self.whole[start : start + size] += x - source
        results = segments["result"].copy()
        segments["result"] = segments["x"]
        bucket.call("dense_decode", self.whole)
        segments["result"] = results


def payloads_in_node(
    tensors: Sequence[TensorInfo], states: Sequence[int] | None, ranks: int
) -> tuple[Payload, Payload]:
    """What one rank hands to the collectives of its node in a bucket's step: before those between nodes, and after.

    Args:
        tensors: of the bucket.
        states: elements that the method keeps of each tensor, if tensors are dealt out whole; else None.
        ranks: of the node, 2 or more.

    Example:
        >>> [one.bytes for one in payloads_in_node([TensorInfo("x", (10, 10))], None, 2)]  # rows of 56 elements
        [448, 224]
    """
    sizes = [tensor.size for tensor in tensors]
    if states is None:
        length = kept = _whole_units(-(-sum(sizes) // ranks))
    else:
        dealt = _dealt(sizes, ranks)
        length = _longest(sizes, dealt)
        kept = length + _most(states, dealt)
    before = Payload("reducescatter", 4 * ranks * length, "mean float32", "node")
    return before, Payload("allgather", 4 * kept, among="node")


def largest_share(sizes: Sequence[int], ranks: int) -> float:
    """Of all elements, the part of the rank of a node that has most, where tensors are dealt out whole."""
    return _most(sizes, _dealt(sizes, ranks)) / sum(sizes)


def _dealt(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """The places of the tensors of each rank, where they are dealt out whole."""
    owners = deal(sizes, ranks)
    return [[place for place, owner in enumerate(owners) if owner == rank] for rank in range(ranks)]


def _longest(sizes: Sequence[int], dealt: Sequence[Sequence[int]]) -> int:
    """Elements of the row of each rank, where tensors are dealt out whole."""
    return _whole_units(_most(sizes, dealt))


def _most(sizes: Sequence[int], dealt: Sequence[Sequence[int]]) -> int:
    """What the rank has that has most."""
    return max(sum(sizes[place] for place in places) for places in dealt)


def _floats(address: int, count: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_float * count).from_address(address))


def _whole_units(elements: int) -> int:
    return -(-elements // UNIT) * UNIT


def _pieces(tensors: Sequence[TensorInfo], own: int, length: int) -> Iterator[tuple[int, TensorInfo]]:
    """The pieces of tensors that a rank gets of the vector of all, and the places of the tensors."""
    place = 0
    for number, tensor in enumerate(tensors):
        inside = min((own + 1) * length, place + tensor.size) - max(own * length, place)
        if inside > 0:
            yield number, TensorInfo(f"{tensor.name}@{own}", (inside,))
        place += tensor.size
