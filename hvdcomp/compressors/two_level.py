"""Two-level exchange: uncompressed within a node, where links are fast, and compressed between nodes, where links are
slow.

A reduce-scatter within each node gives each rank one shard of the node's mean gradient. The ranks with the same shard,
one on each node, exchange it through a compressor. Then an allgather within each node puts the shards together. With n
ranks per node, each rank encodes, decodes and sends only 1/n of the model between nodes, so the link of a node carries
one compressed model in all.

Methods for matrices get whole matrices: each tensor has an owner among the ranks of a node, chosen by size. The other
ranks of the node meanwhile exchange a matrix of one zero, so that all ranks make the same requests.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

from hvdcomp.arrays.types import Array, number_of_elements, wide_dtype
from hvdcomp.compressors import checked
from hvdcomp.compressors.base import Compressor
from hvdcomp.compressors.bucket import Bucket, BucketAggregation
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
from hvdcomp.compressors.two_level_bucket import ALONE, STAND_IN, UNIT, aggregate_two_levels, between
from hvdcomp.errors import SpecError
from hvdcomp.specs.levels import Level


def _of_compressor(name: str) -> Any:
    """A property that is the attribute or method of the compressor of this name."""
    return property(operator.attrgetter(f"compressor.{name}"))


@dataclass(frozen=True)
class TwoLevel(Compressor):
    """Exchanges the mean of each node through a compressor, shard by shard, or matrix by matrix.

    The residual of a rank is x - C(x) of its shard of the node's mean, times the number of ranks of the node: when the
    rank adds this residual to its gradient, it counts once in the node's mean of the next step. So the compressor can
    use its own memory, and the C(x) of the ranks add up to the result. The compressor's state, such as PowerSGD's Q, is
    sent back with the result, so that all ranks have the same state, and any rank may own the matrix in the next step.

    Attributes:
        compressor: the compressor of the shards. It must not have a momentum of its own, as DGC has.

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
            if leaf.default_memory.is_momentum:
                raise SpecError(
                    f"two_level: {leaf} is not allowed, because it corrects the momentum of each rank's own gradient, "
                    "but two_level compresses the mean gradient of a node; use a method without momentum, such as "
                    "topk, qsgd or powersgd"
                )

    def __str__(self) -> str:
        return f"{self.name}({self.compressor})"

    # Properties of the compressor between nodes.

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
    payload_floats = _of_compressor("payload_floats")  # of all ranks of a node together
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
        """An even share of the tensor's bytes for each rank of a node, as a rank's real part may be any or none."""
        ranks, nodes = (group.size for group in _node_places(context)[:2])
        wide = dataclasses.replace(tensor, dtype=wide_dtype(tensor.dtype))
        sent, _ = self.compressor.bytes_in_bucket(wide, dataclasses.replace(context, world_size=nodes))
        crossing = sent / ranks if nodes > 1 or ranks == 1 else 0
        in_node = 4 * tensor.size * (1 + 1 / ranks) if ranks > 1 else 0
        return crossing + in_node, in_node if nodes > 1 else 0

    # A step.

    def aggregate(self, xp: ModuleType, x: Array, state: tuple[Array, ...], context: Context) -> Aggregation:
        places = _node_places(context)
        if places.node.size == 1:
            wide = xp.astype(x, wide_dtype(xp.dtype_name(x)))  # as of larger nodes
            among = dataclasses.replace(context, node_places=None)
            return (yield from checked.aggregate(self.compressor, xp, wide, state, among))
        if self.compressor.of_matrices:
            return (yield from self._whole(xp, x, state, context, places))
        return (yield from self._shards(xp, x, context, places))

    def _shards(self, xp: ModuleType, x: Array, context: Context, places: NodePlaces) -> Aggregation:
        own, ranks = places.node
        vector = xp.flatten(xp.astype(x, wide_dtype(xp.dtype_name(x))))
        size = vector.shape[0]
        length = -(-size // (ranks * UNIT)) * UNIT
        whole = pad(xp, vector, ranks * length)
        mean = yield ReduceScatter(xp.reshape(whole, (ranks, length)), group="node")
        shard = dataclasses.replace(between(context, places), name=f"{context.name}@{own}")
        outcome = yield from across(checked.aggregate(self.compressor, xp, mean, (), shard), places.across.size)
        result = xp.astype(xp.flatten(outcome.mean), xp.dtype_name(vector))
        shards = yield AllGather((result,), group="node")
        before, own_part, after = whole[: own * length], whole[own * length :][:length], whole[(own + 1) * length :]
        sent = xp.concatenate([before, own_part - _lost(xp, mean, outcome) * ranks, after])
        return outcome_like(xp, x, xp.concatenate([part for (part,) in shards])[:size], sent[:size])

    def _whole(
        self, xp: ModuleType, x: Array, state: tuple[Array, ...], context: Context, places: NodePlaces
    ) -> Aggregation:
        """A step of an uncut tensor.

        An allreduce brings it to its owner, and another brings the result to the other ranks, who add zeros. A
        reduce-scatter would have a row of the matrix's size for each rank, and all rows but one would be empty.
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
            stand_in = xp.zeros(STAND_IN, like=mean)
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
        run_alone(aggregate_two_levels(bucket, ALONE))

    def preview(
        self, xp: ModuleType, x: Array, state: tuple[Array, ...], context: Context
    ) -> Array | SparseVector:
        alone = dataclasses.replace(context, rank=0, world_size=1, node_places=None)
        return self.compressor.preview(xp, x, state, alone)


def needs_nodes(compressor: Compressor) -> bool:
    """Whether a method is two-level, and therefore depends on the number of ranks per node."""
    return any(isinstance(leaf, TwoLevel) for leaf in compressor.leaves())


def within(compressor: Compressor) -> Compressor:
    """The compressor between nodes; for a compressor that is not two-level, the compressor itself."""
    return compressor.compressor if isinstance(compressor, TwoLevel) else compressor


def _node_places(context: Context) -> NodePlaces:
    """This rank's places; without nodes every rank is a node."""
    if context.node_places is None:
        return NodePlaces(Place(0, 1), Place(context.rank, context.world_size))
    return context.node_places(context.name)


def _lost(xp: ModuleType, x: Array, outcome: Outcome) -> Array:
    """x - C(x) as a vector."""
    sent = outcome.sent
    if isinstance(sent, SparseVector):
        return xp.add_at(x + 0, sent.indices, -xp.astype(sent.values, xp.dtype_name(x)))
    return x - xp.astype(xp.flatten(sent), xp.dtype_name(x))
