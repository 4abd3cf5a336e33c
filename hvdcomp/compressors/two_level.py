"""Two-level exchange. Ranks of the same node exchange uncompressed gradients over fast links. Nodes exchange compressed
gradients over slow links.

A reduce-scatter within each node gives each rank one shard of the node's mean gradient. The ranks with the same shard,
one on each node, exchange the shard through a compressor. Then an all-gather within each node reassembles the shards.
With n ranks per node, each rank encodes, decodes and sends only 1/n of the model between nodes. So the link of a node
transfers one compressed model in total.

Methods for matrices need whole matrices. For such methods, each tensor has an owner among the ranks of a node, chosen
by size, and only the owner compresses the tensor. Meanwhile, the other ranks of the node exchange a 1 x 1 zero matrix,
so that all ranks make the same requests.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from hvdcomp.arrays.types import AnyArray, Array, ArrayFunctions, number_of_elements, wide_dtype
from hvdcomp.compressors import checked, node_shares
from hvdcomp.compressors.base import Compressor
from hvdcomp.compressors.bucket import Bucket, BucketAggregation, BucketStates, address_of, take_off
from hvdcomp.compressors.memory import ErrorFeedback, NoMemory
from hvdcomp.compressors.node_shares import UNIT, between
from hvdcomp.compressors.packing import cut, outcome_like, pad
from hvdcomp.compressors.protocol import (
    Aggregation,
    AllGather,
    AllReduce,
    Context,
    NodePlaces,
    Outcome,
    Place,
    ReduceScatter,
    SparseVector,
    TensorInfo,
    across,
    run_alone,
)
from hvdcomp.compressors.routing import Router
from hvdcomp.errors import SpecError
from hvdcomp.kernels import cuda
from hvdcomp.specs.levels import Level

_STAND_IN = (1, 1)
"""The shape of the zero matrix that a rank without a part of a tensor or bucket compresses."""

_ALONE = NodePlaces(Place(0, 1), Place(0, 1))


def _of_compressor(name: str) -> Any:
    """A property that returns the attribute or method with this name of the inner compressor."""
    return property(operator.attrgetter(f"compressor.{name}"))


@dataclass(frozen=True)
class TwoLevel(Compressor):
    """Exchanges the mean of each node through a compressor. Each rank of a node exchanges one shard, or whole matrices.

    The residual of a rank is x - C(x) of its shard of the node's mean, multiplied by the number of ranks of the node.
    The rank adds this residual to its gradient in the next step. Averaging over the ranks of the node divides by the
    same number, so x - C(x) itself enters the next mean of the node. Therefore the compressor can use its own memory,
    and the values of C(x) on all ranks add up to the result. The state of the compressor, such as PowerSGD's Q, is sent
    to all ranks of the node together with the result. All ranks then have the same state, and any rank may own the
    matrix in the next step.

    Attributes:
        compressor: the compressor of the shards, which are sent between nodes. A compressor with its own momentum, such
            as DGC, is not allowed.

    Example:
        >>> from hvdcomp import TopK
        >>> str(TwoLevel(TopK(ratio=0.01)))
        'two_level(topk:ratio=0.01)'
    """

    compressor: Compressor

    name: ClassVar[str] = "two_level"
    examples: ClassVar[tuple[str, ...]] = (
        "two_level(topk:ratio=0.01)",
        "two_level(qsgd:bits=8)",
        "two_level(efsignsgd:exchange=scatter)",
        "two_level(powersgd:rank=4)",
    )
    sends: ClassVar[str] = "all elements within a node; between nodes, the payload of the inner compressor"
    sent_is_own: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.compressor, Compressor):
            raise SpecError(
                f"two_level: {self.compressor!r} is not a compressor; give a compressor, such as TopK(ratio=0.01)"
            )
        for leaf in self.compressor.leaves():
            if isinstance(leaf, TwoLevel):
                raise SpecError(f"two_level: {leaf} inside two_level is not allowed, because there are only two levels")
            if leaf.keeps_state and not leaf.of_matrices:
                raise SpecError(
                    f"two_level: {leaf} is not allowed, because it keeps a number for each element from step to step, "
                    "but two_level cuts tensors into shards. Use a method that keeps nothing, or this method without "
                    "two_level"
                )
            if leaf.default_memory.is_momentum:
                raise SpecError(
                    f"two_level: {leaf} is not allowed, because it corrects the momentum of each rank's own gradient, "
                    "but two_level compresses the mean gradient of a node. Use a compression method without momentum, "
                    "such as topk, qsgd or powersgd"
                )

    def __str__(self) -> str:
        return f"{self.name}({self.compressor})"

    # Properties that the inner compressor determines.

    biased = _of_compressor("biased")
    variance = _of_compressor("variance")
    known_error = _of_compressor("known_error")
    in_units = _of_compressor("in_units")
    level_name = _of_compressor("level_name")
    period = _of_compressor("period")
    keeps_state = _of_compressor("keeps_state")
    of_matrices = _of_compressor("of_matrices")
    level = _of_compressor("level")
    level_for = _of_compressor("level_for")
    level_for_elements = _of_compressor("level_for_elements")
    least_level = _of_compressor("least_level")
    default_memory = _of_compressor("default_memory")
    name_patterns = _of_compressor("name_patterns")
    payload_floats = _of_compressor("payload_floats")  # the sum over all ranks of a node
    scatters = _of_compressor("scatters")
    prepare = _of_compressor("prepare")
    has_bucket_form = _of_compressor("has_bucket_form")

    def at_level(self, level: Level | None) -> Compressor:
        return TwoLevel(self.compressor.at_level(level))

    def route(self, tensor: TensorInfo) -> Compressor:
        """The compressor for a tensor. Tensors that the compressor sends uncompressed use a single allreduce among all
        ranks."""
        inside = self.compressor.route(tensor)
        return inside if inside.lossless else TwoLevel(inside)

    def method_for(self, tensor: TensorInfo) -> Compressor:
        return TwoLevel(self.compressor.method_for(tensor)) if isinstance(self.compressor, Router) else self

    def leaves(self) -> Iterator[Compressor]:
        if isinstance(self.compressor, Router):
            yield from map(TwoLevel, self.compressor.leaves())
        else:
            yield self

    def bytes_in_bucket(self, tensor: TensorInfo, context: Context) -> tuple[float, float]:
        """Divides the tensor's bytes equally among the ranks of a node. The real share of a rank differs between
        tensors, and may be zero."""
        ranks, nodes = (group.size for group in _node_places(context)[:2])
        wide = dataclasses.replace(tensor, dtype=wide_dtype(tensor.dtype))
        sent, _ = self.compressor.bytes_in_bucket(wide, dataclasses.replace(context, world_size=nodes))
        crossing = sent / ranks if nodes > 1 or ranks == 1 else 0
        in_node = 4 * tensor.size * (1 + 1 / ranks) if ranks > 1 else 0
        return crossing + in_node, in_node if nodes > 1 else 0

    # A step.

    def aggregate(self, xp: ArrayFunctions, x: Array, state: tuple[Array, ...], context: Context) -> Aggregation:
        """Averages within the node, and exchanges the mean with other nodes through the compressor. Each rank of the
        node exchanges one shard, or one rank exchanges the whole tensor."""
        places = _node_places(context)
        if places.node.size == 1:
            wide = xp.astype(x, wide_dtype(xp.dtype_name(x)))  # the same element type as in a node with several ranks
            among = dataclasses.replace(context, node_places=None)
            return (yield from checked.aggregate(self.compressor, xp, wide, state, among))
        if self.compressor.of_matrices:
            return (yield from self._whole(xp, x, state, context, places))
        return (yield from self._shards(xp, x, context, places))

    def _shards(self, xp: ArrayFunctions, x: Array, context: Context, places: NodePlaces) -> Aggregation:
        """Runs a step of a tensor that is cut into shards."""
        own, ranks = places.node
        vector = xp.flatten(xp.astype(x, wide_dtype(xp.dtype_name(x))))
        size = vector.shape[0]
        length = -(-size // (ranks * UNIT)) * UNIT
        whole = pad(xp, vector, ranks * length)
        # Computes this rank's shard of the node's mean, exchanges it with other nodes, and gathers the shards of the
        # node's ranks.
        mean = yield ReduceScatter(xp.reshape(whole, (ranks, length)), group="node")
        shard = dataclasses.replace(between(context, places), name=f"{context.name}@{own}")
        outcome = yield from across(checked.aggregate(self.compressor, xp, mean, (), shard), places.across.size)
        result = xp.astype(xp.flatten(outcome.mean), xp.dtype_name(vector))
        shards = yield AllGather((result,), group="node")
        # C(x) is x minus n times the part of this rank's shard that the exchange lost, with n ranks on the node.
        before, own_part, after = whole[: own * length], whole[own * length :][:length], whole[(own + 1) * length :]
        sent = xp.concatenate([before, own_part - _lost(xp, mean, outcome) * ranks, after])
        return outcome_like(xp, x, xp.concatenate([part for (part,) in shards])[:size], sent[:size])

    def _whole(
        self, xp: ArrayFunctions, x: Array, state: tuple[Array, ...], context: Context, places: NodePlaces
    ) -> Aggregation:
        """Runs a step of a tensor that is not cut.

        A first allreduce gives the node's mean to its owner. In a second allreduce, the owner adds the result and the
        other ranks add zeros, so that all ranks get the result. A reduce-scatter would need a row of the matrix's size
        for each rank, and all rows but one would be empty.
        """
        own, ranks = places.node
        dtype = wide_dtype(xp.dtype_name(x))
        whole = xp.astype(x, dtype)
        mean = yield AllReduce(xp.flatten(whole), group="node")
        among = between(context, places)
        lost = xp.zeros(mean.shape, like=mean)
        if own == places.owner:
            matrix = xp.reshape(mean, x.shape)
            inside = checked.aggregate(self.compressor, xp, matrix, state, among)
            outcome = yield from across(inside, places.across.size)
            lost = _lost(xp, mean, outcome)
            parts = [xp.astype(xp.flatten(array), dtype) for array in (outcome.mean, *outcome.state)]
        else:
            stand_in = xp.zeros(_STAND_IN, like=mean)
            start = checked.prepare(self.compressor, xp, stand_in, (), among)
            inside = checked.aggregate(self.compressor, xp, stand_in, start, among)
            yield from across(inside, places.across.size)
            parts = [xp.zeros((number_of_elements(tuple(array.shape)),), like=mean) for array in (x, *state)]
        answer = yield AllReduce(xp.concatenate(parts), "sum", group="node")
        result, *kept = cut(xp, answer, [tuple(array.shape) for array in (x, *state)])
        sent = xp.flatten(whole) - lost * ranks
        return outcome_like(xp, x, xp.flatten(result), sent)._replace(state=tuple(array + 0 for array in kept))

    @property
    def bucket_family(self) -> Hashable:
        return self.name, self.compressor.bucket_family

    def aggregate_bucket(self, bucket: Bucket) -> BucketAggregation:
        return (yield from aggregate_two_levels(bucket, _node_places(bucket.context)))

    def preview_bucket(self, bucket: Bucket) -> None:
        run_alone(aggregate_two_levels(bucket, _ALONE))

    def preview(self, xp: ArrayFunctions, x: Array, state: tuple[Array, ...], context: Context) -> Array | SparseVector:
        alone = dataclasses.replace(context, rank=0, world_size=1, node_places=None)
        return self.compressor.preview(xp, x, state, alone)


def aggregate_two_levels(bucket: Bucket, places: NodePlaces) -> BucketAggregation:
    """Like `TwoLevel.aggregate`, but in passes over all tensors of the bucket:

    1. `dense_encode` computes x. One reduce-scatter with rows of equal length distributes the shards, or whole tensors.
       The rows are as long as the largest share, so that their length depends only on the bucket.
    2. This rank's shard is also a bucket. The bucket form of the compressor exchanges this bucket with other nodes.
    3. `dense_keep` writes the residuals. `dense_decode` writes the shards of the node's ranks to the results.
    """
    if bucket.layout is None:
        bucket.layout = _Layout(bucket, places.node)
    layout: _Layout = bucket.layout
    shard, states, xp = layout.shard, layout.states, bucket.xp
    (own, ranks), nodes = places.node, places.across.size
    whole = layout.begin(bucket)
    bucket.found_inf = bucket.call("dense_encode", whole)
    rows: AnyArray = xp.reshape(whole, (ranks, -1))
    mean = rows[own]
    if ranks > 1:
        mean = yield ReduceScatter(rows, group="node")
    if states is not None:
        states.read(bucket)
    exchange = shard.aggregate(between(bucket.context, places), mean, layout.result)
    yield from exchange if ranks == 1 else across(exchange, nodes)
    parts: tuple[AnyArray, ...] = (layout.result,) if states is None else (layout.result, states.updated())
    gathered: list[tuple[AnyArray, ...]] = [parts]
    if ranks > 1:
        gathered = yield AllGather(parts, group="node")
    if states is not None:
        states.write(bucket, [state for _, state in gathered])
    if bucket.keeps:  # before decoding, because decoding adds the rounding error of 16-bit means to the residuals
        # `whole` becomes the part that this rank's shard lost, times the number of ranks of the node, and zero
        # elsewhere.
        whole[:] = 0
        with np.errstate(over="ignore"):
            rows[own] = xp.finite_or_zero(shard.lost * ranks)  # as in `memory.without`
        bucket.call("dense_keep", whole)
    found_inf = bucket.call("dense_decode", xp.concatenate([result for result, *_ in gathered]))
    layout.end(bucket, whole)
    return found_inf


class _Shard:
    """The shard that this rank exchanges with other nodes. A shard is a bucket of tensors, or of pieces of tensors.

    Args:
        whole: the bucket that the ranks of a node cut into shards.
        pieces: for each piece of a tensor in this shard, the position of the tensor in the whole bucket, and the name
            and shape of the piece.
        length: the number of elements of the shard, including padding.

    Attributes:
        bucket: the bucket whose tensors are the pieces.
        lost: x - C(x) of the shard, float32 (length,), if the memory keeps residuals. On a device `lost` exists only
            during a step.
    """

    lost: AnyArray

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
        self._x: np.ndarray | None = None  # x, if `lost` is not needed
        if whole.device is None:
            self.lost = np.zeros(length, np.float32)
            if self.bucket.compressors[0].keeps_state:
                self._x = np.zeros(length, np.float32)

    def aggregate(self, context: Context, mean: AnyArray, result: AnyArray) -> BucketAggregation:
        """Runs the compressor's step between nodes, and writes x - C(x) to `lost`."""
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
    """Copies a method's states between a bucket and a shard, if tensors are not cut. The bucket contains the states of
    all tensors, and the shard contains the states of this rank's tensors.

    Args:
        whole: the bucket of all tensors, with their states.
        shard: the bucket of the tensors that this rank owns. If this rank owns no tensors, the bucket has one tensor
            with a single zero.
        dealt: for each rank of the node, the positions in the whole bucket of the tensors that the rank owns.
        own: number of this rank in its node.
    """

    def __init__(self, whole: Bucket, shard: Bucket, dealt: Sequence[Sequence[int]], own: int) -> None:
        assert whole.states is not None
        xp = whole.xp
        zero = xp.reshape(whole.zeros(1, "float32"), _STAND_IN)
        stand_in = shard.compressors[0].prepare(xp, zero, (), whole.context)
        self._shard_states = BucketStates([whole.states.arrays(place) for place in dealt[own]] or [stand_in], xp)
        shard.states = self._shard_states
        self._places: list[list[AnyArray]] = [
            [xp.from_numpy(kind, like=zero) for kind in whole.states.places(places)] for places in dealt
        ]
        self._own = own
        lengths = [sum(map(len, kinds)) for kinds in self._places]
        self._sent = whole.zeros(max(lengths), "float32")

    def read(self, whole: Bucket) -> None:
        """Copies the states of this rank's tensors to the shard. Call this before a step."""
        assert whole.states is not None
        own_places = self._places[self._own]
        for state, kept, places in zip(self._shard_states.kept, whole.states.kept, own_places, strict=True):
            if len(places):
                state[:] = kept[places]

    def updated(self) -> AnyArray:
        """The new states of this rank's tensors, padded to the length of the longest states on any rank."""
        start = 0
        for state, places in zip(self._shard_states.next, self._places[self._own], strict=True):
            self._sent[start : start + len(places)] = state[: len(places)]
            start += len(places)
        return self._sent

    def write(self, whole: Bucket, parts: Sequence[AnyArray]) -> None:
        """Writes the new states of the node's ranks to the bucket."""
        assert whole.states is not None
        for part, kinds in zip(parts, self._places, strict=True):
            start = 0
            for state, places in zip(whole.states.next, kinds, strict=True):
                state[places] = part[start : start + len(places)]
                start += len(places)


class _Layout:
    """The shards into which the ranks of a node divide a bucket, and the storage for a step.

    Attributes:
        result: the mean of this rank's shard. On a device `result` exists only during a step.
        shard: this rank's shard. If the rank has no shard, `shard` is a single zero, so that all ranks send the same
            requests.
        states: the states of tensors that are not cut, or None if the method has no state.
    """

    result: AnyArray

    def __init__(self, bucket: Bucket, node: Place) -> None:
        sizes = bucket.segments["size"].tolist()
        own, ranks = node
        dealt: list[list[int]] = []
        if bucket.compressors[0].of_matrices or ranks == 1:
            dealt = node_shares.tensors_of_ranks(sizes, ranks)
            length = node_shares.whole_units(node_shares.most_elements(sizes, dealt))
            starts = np.zeros(len(sizes), np.int64)
            for rank, places in enumerate(dealt):
                dealt_sizes = np.array([sizes[place] for place in places], np.int64)
                starts[places] = rank * length + np.cumsum(dealt_sizes) - dealt_sizes
            pieces = [(place, bucket.tensors[place]) for place in dealt[own]]
        else:
            length = node_shares.whole_units(-(-sum(sizes) // ranks))
            starts = np.cumsum(sizes) - sizes
            pieces = list(node_shares.pieces_of_rank(bucket.tensors, own, length))
        self._elements, self._length = ranks * length, length
        if bucket.device is None:
            self._whole = bucket.zeros(self._elements, "float32")
            self.result = bucket.zeros(length, "float32")
        bucket.segments["values"] = starts
        self.shard = _Shard(bucket, pieces or [(0, TensorInfo(f"@{own}", _STAND_IN))], length)
        keeps = bucket.compressors[0].keeps_state
        self.states = _States(bucket, self.shard.bucket, dealt, own) if keeps else None

    def begin(self, bucket: Bucket) -> AnyArray:
        """Storage for x of all tensors, float32.

        The storage contains the shard of each rank of the node, padded with zeros. On a device this storage is freed
        after each step, so that between steps a bucket uses memory only for residuals and states.
        """
        if bucket.device is None:
            return self._whole
        self.result = bucket.kernels.passing(self._length, "float32")
        if bucket.keeps:
            self.shard.lost = bucket.kernels.passing(self._length, "float32")
        return bucket.zeros(self._elements, "float32")

    def end(self, bucket: Bucket, whole: AnyArray) -> None:
        """Frees a step's storage on a device."""
        if bucket.device is None:
            return
        for array in (whole, self.result, *([self.shard.lost] if bucket.keeps else [])):
            cuda.let_go(array)
        self.result = self.shard.lost = None


def needs_nodes(compressor: Compressor) -> bool:
    """Whether a method is two-level. Such a method depends on the number of ranks per node."""
    return any(isinstance(leaf, TwoLevel) for leaf in compressor.leaves())


def within(compressor: Compressor) -> Compressor:
    """The inner compressor of a two-level compressor. Any other compressor is returned unchanged."""
    return compressor.compressor if isinstance(compressor, TwoLevel) else compressor


def _node_places(context: Context) -> NodePlaces:
    """This rank's `NodePlaces`. Without information about nodes, every rank is treated as a node of its own."""
    if context.node_places is None:
        return NodePlaces(Place(0, 1), Place(context.rank, context.world_size))
    return context.node_places(context.name)


def _lost(xp: ArrayFunctions, x: Array, outcome: Outcome) -> Array:
    """x - C(x) as a vector."""
    sent = outcome.sent
    if isinstance(sent, SparseVector):
        return xp.add_at(x + 0, sent.indices, -xp.astype(sent.values, xp.dtype_name(x)))
    return x - xp.astype(xp.flatten(sent), xp.dtype_name(x))
