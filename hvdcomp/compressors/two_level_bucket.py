"""Two-level exchange of a bucket: its tensors are divided among the ranks of a node, either cut as one vector, or
tensor by tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from hvdcomp.arrays.types import Array
from hvdcomp.compressors.bucket import Bucket, BucketAggregation, BucketStates, address_of
from hvdcomp.compressors.memory import ErrorFeedback, NoMemory
from hvdcomp.compressors.protocol import AllGather, Context, NodePlaces, Place, ReduceScatter, TensorInfo, across
from hvdcomp.compressors.scatter_bucket import take_off
from hvdcomp.compressors.sizes import SentPayload
from hvdcomp.kernels import cuda

UNIT = 8
"""The length of a shard is a multiple of this number of elements."""

STAND_IN = (1, 1)
"""The shape of the zero matrix that a rank without a part of a tensor or bucket compresses."""

ALONE = NodePlaces(Place(0, 1), Place(0, 1))


def between(context: Context, places: NodePlaces) -> Context:
    """The context of the same step in the group "across"."""
    return dataclasses.replace(context, rank=places.across.rank, world_size=places.across.size, node_places=None)


def deal(sizes: Sequence[int], ranks: int) -> list[int]:
    """The rank that gets each tensor: the largest tensor first, always to the rank with the least elements.

    Example:
        >>> deal([2, 9, 3, 3], 2)
        [1, 0, 1, 1]
    """
    loads, owners = [0] * ranks, [0] * len(sizes)
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        owners[place] = loads.index(min(loads))
        loads[owners[place]] += sizes[place]
    return owners


def aggregate_two_levels(bucket: Bucket, places: NodePlaces) -> BucketAggregation:
    """Runs a two-level step for all tensors of a bucket.

    One reduce-scatter with rows of equal length distributes the shards, or whole tensors. The rows are as long as the
    largest share, so that their length depends only on the bucket.
    """
    if bucket.layout is None:
        bucket.layout = _Layout(bucket, places.node)
    layout: _Layout = bucket.layout
    shard, states, xp = layout.shard, layout.states, bucket.xp
    (own, ranks), nodes = places.node, places.across.size
    whole = layout.begin(bucket)
    bucket.found_inf = bucket.call("dense_encode", whole)
    rows = xp.reshape(whole, (ranks, -1))
    mean = rows[own]
    if ranks > 1:
        mean = yield ReduceScatter(rows, group="node")
    if states is not None:
        states.read(bucket)
    exchange = shard.aggregate(between(bucket.context, places), mean, layout.result)
    yield from exchange if ranks == 1 else across(exchange, nodes)
    parts: tuple[Array, ...] = (layout.result,) if states is None else (layout.result, states.updated())
    gathered: list[tuple[Array, ...]] = [parts]
    if ranks > 1:
        gathered = yield AllGather(parts, group="node")
    if states is not None:
        states.write(bucket, [state for _, state in gathered])
    if bucket.keeps:  # before decoding, which adds to residuals what rounding to 16 bits takes off the means
        # The loss of this rank's shard times the number of the node's ranks, and zeros elsewhere.
        whole[:] = 0
        with np.errstate(over="ignore"):
            rows[own] = xp.finite_or_zero(shard.lost * ranks)  # as in `memory.without`
        bucket.call("dense_keep", whole)
    found_inf = bucket.call("dense_decode", xp.concatenate([result for result, *_ in gathered]))
    layout.end(bucket, whole)
    return found_inf


class _Shard:
    """The shard that this rank exchanges with other nodes: a bucket of tensors, or of pieces of tensors.

    Args:
        whole: the bucket that the node's ranks share.
        pieces: the place in the whole bucket, the name and the shape of each piece.
        length: elements of the shard, padding included.

    Attributes:
        bucket: the bucket of pieces.
        lost: x - C(x) of the shard, float32 (length,), if the memory keeps it; on a device, within a step.
    """

    lost: Array

    def __init__(self, whole: Bucket, pieces: Sequence[tuple[int, TensorInfo]], length: int) -> None:
        self.bucket = Bucket(
            [tensor for _, tensor in pieces],
            [whole.compressors[place].compressor for place, _ in pieces],
            ErrorFeedback() if whole.keeps else NoMemory(),
            whole.device,
            whole.xp,
        )
        sizes = self.bucket.segments["size"]
        self._offsets = (4 * (np.cumsum(sizes) - sizes)).astype(np.uint64)
        self._zeros = np.zeros(int(sizes.max()) if whole.device is None else 0, np.float32)
        self._x: np.ndarray | None = None  # in place of `lost`
        if whole.device is None:
            self.lost = np.zeros(length, np.float32)
            if self.bucket.compressors[0].keeps_state:
                self._x = np.zeros(length, np.float32)

    def aggregate(self, context: Context, mean: Array, result: Array) -> BucketAggregation:
        """The compressor's step between nodes; writes x - C(x) to `lost`."""
        bucket = self.bucket
        bucket.begin(context)
        segments = bucket.segments
        segments["gradient"] = address_of(mean) + self._offsets
        segments["result"] = address_of(result) + self._offsets
        segments["kept"] = segments["rule"] = 0
        lost = None
        segments["x"] = 0
        if bucket.keeps:
            lost = address_of(self.lost) + self._offsets
            segments["x"] = lost if self._x is None else address_of(self._x) + self._offsets
        found_inf = yield from bucket.compressors[0].aggregate_bucket(bucket)
        take_off(bucket, self._zeros, lost)
        return found_inf


class _States:
    """Copies a method's states of uncut tensors between the bucket, which has those of all tensors, and the shard.

    Args:
        whole: the bucket, with its states.
        shard: the bucket of this rank's tensors, or of a stand-in.
        dealt: for each rank of the node, the places in the bucket of its tensors.
        own: this rank's number in the node.
    """

    def __init__(self, whole: Bucket, shard: Bucket, dealt: Sequence[Sequence[int]], own: int) -> None:
        assert whole.states is not None
        xp = whole.xp
        zero = xp.reshape(whole.zeros(1, "float32"), STAND_IN)
        stand_in = shard.compressors[0].prepare(xp, zero, (), whole.context)
        self._shard_states = BucketStates([whole.states.arrays(place) for place in dealt[own]] or [stand_in], xp)
        shard.states = self._shard_states
        self._places = [
            [xp.from_numpy(kind, like=zero) for kind in whole.states.places(places)] for places in dealt
        ]
        self._own = own
        lengths = [sum(map(len, kinds)) for kinds in self._places]
        self._sent = whole.zeros(max(lengths), "float32")

    def read(self, whole: Bucket) -> None:
        """Copies the states of this rank's tensors to the shard; to be called before a step."""
        assert whole.states is not None
        own_places = self._places[self._own]
        for state, kept, places in zip(self._shard_states.kept, whole.states.kept, own_places, strict=True):
            if len(places):
                state[:] = kept[places]

    def updated(self) -> Array:
        """The new states of this rank's tensors, padded to the length of the largest rank's."""
        start = 0
        for state, places in zip(self._shard_states.next, self._places[self._own], strict=True):
            self._sent[start : start + len(places)] = state[: len(places)]
            start += len(places)
        return self._sent

    def write(self, whole: Bucket, parts: Sequence[Array]) -> None:
        """Writes the new states of the node's ranks to the bucket."""
        assert whole.states is not None
        for part, kinds in zip(parts, self._places, strict=True):
            start = 0
            for state, places in zip(whole.states.next, kinds, strict=True):
                state[places] = part[start : start + len(places)]
                start += len(places)


class _Layout:
    """The division of a bucket among the ranks of a node, and its storage.

    Attributes:
        result: the mean of this rank's shard; on a device, within a step.
        shard: this rank's shard; a zero if it has none, so that all ranks send the same requests.
        states: the states of uncut tensors, or None if the method keeps none.
    """

    result: Array

    def __init__(self, bucket: Bucket, node: Place) -> None:
        sizes = bucket.segments["size"].tolist()
        own, ranks = node
        dealt: list[list[int]] = []
        if bucket.compressors[0].of_matrices or ranks == 1:
            dealt = _dealt(sizes, ranks)
            length = _whole_units(_most(sizes, dealt))
            starts = np.zeros(len(sizes), np.int64)
            for rank, places in enumerate(dealt):
                dealt_sizes = np.array([sizes[place] for place in places], np.int64)
                starts[places] = rank * length + np.cumsum(dealt_sizes) - dealt_sizes
            pieces = [(place, bucket.tensors[place]) for place in dealt[own]]
        else:
            length = _whole_units(-(-sum(sizes) // ranks))
            starts = np.cumsum(sizes) - sizes
            pieces = list(_pieces(bucket.tensors, own, length))
        self._elements, self._length = ranks * length, length
        if bucket.device is None:
            self._whole = bucket.zeros(self._elements, "float32")
            self.result = bucket.zeros(length, "float32")
        bucket.segments["values"] = starts
        self.shard = _Shard(bucket, pieces or [(0, TensorInfo(f"@{own}", STAND_IN))], length)
        keeps = bucket.compressors[0].keeps_state
        self.states = _States(bucket, self.shard.bucket, dealt, own) if keeps else None

    def begin(self, bucket: Bucket) -> Array:
        """Storage for x of all tensors, float32: for each rank of the node its shard, padded with zeros.

        On a device nothing stays from step to step, so that the bucket's memory is that of what it keeps.
        """
        if bucket.device is None:
            return self._whole
        self.result = bucket.kernels.passing(self._length, "float32")
        if bucket.keeps:
            self.shard.lost = bucket.kernels.passing(self._length, "float32")
        return bucket.zeros(self._elements, "float32")

    def end(self, bucket: Bucket, whole: Array) -> None:
        """Lets go of a step's storage on a device."""
        if bucket.device is None:
            return
        for array in (whole, self.result, *([self.shard.lost] if bucket.keeps else [])):
            cuda.let_go(array)
        self.result = self.shard.lost = None


def payloads_in_node(
    tensors: Sequence[TensorInfo], states: Sequence[int] | None, ranks: int
) -> tuple[SentPayload, SentPayload]:
    """One rank's payloads within its node in a bucket's step: the payload before the exchange between nodes, and the
    payload after it.

    Args:
        tensors: the tensors of the bucket.
        states: elements of the method's state of each tensor, if tensors are not cut; else None.
        ranks: ranks of the node, 2 or more.

    Example:
        >>> [payload.bytes for payload in payloads_in_node([TensorInfo("x", (10, 10))], None, 2)]  # rows of 56 elements
        [448, 224]
    """
    sizes = [tensor.size for tensor in tensors]
    if states is None:
        length = kept = _whole_units(-(-sum(sizes) // ranks))
    else:
        dealt = _dealt(sizes, ranks)
        length = _whole_units(_most(sizes, dealt))
        kept = length + _most(states, dealt)
    before = SentPayload("reducescatter", 4 * ranks * length, "mean float32", "node")
    return before, SentPayload("allgather", 4 * kept, among="node")


def largest_share(sizes: Sequence[int], ranks: int) -> float:
    """The largest share of elements that a rank of a node has if tensors are not cut."""
    return _most(sizes, _dealt(sizes, ranks)) / sum(sizes)


def _dealt(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """For each rank the places of its tensors, if tensors are not cut."""
    owners = deal(sizes, ranks)
    return [[place for place, owner in enumerate(owners) if owner == rank] for rank in range(ranks)]


def _most(sizes: Sequence[int], dealt: Sequence[Sequence[int]]) -> int:
    """The elements of the rank with most elements."""
    return max(sum(sizes[place] for place in places) for places in dealt)


def _whole_units(elements: int) -> int:
    return -(-elements // UNIT) * UNIT


def _pieces(tensors: Sequence[TensorInfo], own: int, length: int) -> Iterator[tuple[int, TensorInfo]]:
    """The pieces in a rank's shard of the concatenated tensors, each with its tensor's place."""
    place = 0
    for number, tensor in enumerate(tensors):
        inside = min((own + 1) * length, place + tensor.size) - max(own * length, place)
        if inside > 0:
            yield number, TensorInfo(f"{tensor.name}@{own}", (inside,))
        place += tensor.size
