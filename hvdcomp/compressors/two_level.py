"""Two levels: dense among the ranks of a node, whose link is fast, and compressed between nodes, whose link is not.

The ranks of a node add their gradients up and deal the sum out (reduce-scatter), so that each has a shard of the node's
mean. The ranks that hold the same shard, one on each node, exchange it through a compressor. Then the ranks of a node
put the shards together (allgather). Encoding, decoding and the bytes of each rank between nodes fall by the number of
ranks a node, and over a node's link goes one compressed model in all.

What works on matrices gets whole ones: each tensor belongs to one rank of a node, and tensors are dealt by size. The
node's other ranks exchange a matrix of one zero meanwhile, so that all ranks ask for the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Sequence, Set
from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar

from hvdcomp.arrays.types import Array, number_of_elements, wide_dtype
from hvdcomp.compressors.base import Compressor
from hvdcomp.compressors.bucket import Bucket, BucketAggregation
from hvdcomp.compressors.memory import Memory
from hvdcomp.compressors.packing import outcome_like, pad
from hvdcomp.compressors.protocol import (
    Aggregation,
    AllGather,
    AllReduce,
    Context,
    Levels,
    Outcome,
    Place,
    ReduceScatter,
    SparseVector,
    TensorInfo,
    across,
    run_alone,
)
from hvdcomp.compressors.routing import Router
from hvdcomp.compressors.two_level_bucket import ALONE, STAND_IN, UNIT, aggregate_levels, between
from hvdcomp.errors import SpecError
from hvdcomp.specs.levels import Level


@dataclass(frozen=True)
class TwoLevel(Compressor):
    """Exchanges the mean of each node through a compressor, shard by shard, or matrix by matrix.

    A rank keeps what its shard of the node's mean has lost, as often as the node has ranks: added to its gradient it
    counts in the mean of the next step as it is. So the memory is that of the compressor, and what all ranks send adds
    up to what all get. What the compressor carries from step to step, such as PowerSGD's Q, travels back with the
    result, so that all ranks hold the same of it, and any rank may get the matrix next.

    Attributes:
        compressor: of the shards. It must not come with momentum of its own, as DGC does.

    Example:
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
    sends: ClassVar[str] = "all elements within a node, what the compressor sends between nodes"
    sent_is_own: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.compressor, Compressor):
            raise SpecError(f"two_level: {self.compressor!r} is not a compressor; give one, such as TopK(ratio=0.01)")
        for leaf in self.compressor.leaves():
            if isinstance(leaf, TwoLevel):
                raise SpecError(f"two_level: {leaf} within two_level is not allowed; there are two levels, not more")
            if leaf.default_memory.is_momentum:
                raise SpecError(
                    f"two_level: {leaf} is not allowed: it corrects the momentum of each rank's own gradient, and "
                    "compresses the node's mean here; take a method without momentum, such as topk, qsgd or powersgd"
                )

    def __str__(self) -> str:
        return f"{self.name}({self.compressor})"

    # What it is, its compressor says.

    @property
    def biased(self) -> bool:  # type: ignore[override]
        return self.compressor.biased

    @property
    def variance(self) -> float:  # type: ignore[override]
        return self.compressor.variance

    @property
    def bucket_dtypes(self) -> Set[str]:
        """Float32 alone: what a node's ranks exchange is of the gradient's type elsewhere."""
        return {"float32"}

    @property
    def level_name(self) -> str | None:  # type: ignore[override]
        return self.compressor.level_name

    @property
    def period(self) -> int:  # type: ignore[override]
        return self.compressor.period

    @property
    def keeps_state(self) -> bool:  # type: ignore[override]
        return self.compressor.keeps_state

    @property
    def of_matrices(self) -> bool:  # type: ignore[override]
        return self.compressor.of_matrices

    @property
    def level(self) -> Level | None:
        return self.compressor.level

    def at_level(self, level: Level | None) -> Compressor:
        return TwoLevel(self.compressor.at_level(level))

    def level_for(self, compression_factor: float, shape: tuple[int, ...]) -> Level | None:
        return self.compressor.level_for(compression_factor, shape)

    def level_for_elements(self, compression_factor: float, shape: tuple[int, ...]) -> Level | None:
        return self.compressor.level_for_elements(compression_factor, shape)

    def least_level(self, ranks: int) -> Level | None:
        return self.compressor.least_level(ranks)

    @property
    def default_memory(self) -> Memory:
        return self.compressor.default_memory

    def route(self, tensor: TensorInfo) -> Compressor:
        """A tensor that the compressor sends dense goes in one level, by Horovod's own allreduce."""
        inside = self.compressor.route(tensor)
        return inside if inside.lossless else TwoLevel(inside)

    def method_for(self, tensor: TensorInfo) -> Compressor:
        return TwoLevel(self.compressor.method_for(tensor)) if isinstance(self.compressor, Router) else self

    def leaves(self) -> Iterator[Compressor]:
        if isinstance(self.compressor, Router):
            yield from map(TwoLevel, self.compressor.leaves())
        else:
            yield self

    def name_patterns(self) -> Iterator[str]:
        return self.compressor.name_patterns()

    def payload_floats(self, shape: tuple[int, ...], level: Level | None = None) -> float:
        """Numbers that all ranks of a node together send to other nodes."""
        return self.compressor.payload_floats(shape, level)

    def payloads_sent(self, ranks: int) -> float:
        return self.compressor.payloads_sent(ranks)

    def bytes_in_bucket(self, tensor: TensorInfo, context: Context) -> tuple[float, float]:
        """The share of a tensor, of which this rank may have any part or none, that each rank of a node has."""
        node, others, _ = _levels(context)
        sent, _ = self.compressor.bytes_in_bucket(tensor, dataclasses.replace(context, world_size=others.size))
        crossing = sent / node.size if others.size > 1 or node.size == 1 else 0
        within = 4 * tensor.size * (1 + 1 / node.size) if node.size > 1 else 0
        return crossing + within, within if others.size > 1 else 0

    # A step.

    def prepare(self, xp: ModuleType, x: Array, state: tuple[Array, ...], context: Context) -> tuple[Array, ...]:
        return self.compressor.prepare(xp, x, state, context)

    def aggregate(self, xp: ModuleType, x: Array, state: tuple[Array, ...], context: Context) -> Aggregation:
        levels = _levels(context)
        if levels.node.size == 1:
            return (yield from self.compressor.aggregate(xp, x, state, dataclasses.replace(context, levels=None)))
        if self.compressor.of_matrices:
            return (yield from self._whole(xp, x, state, context, levels))
        return (yield from self._shards(xp, x, context, levels))

    def _shards(self, xp: ModuleType, x: Array, context: Context, levels: Levels) -> Aggregation:
        own, ranks = levels.node
        vector = xp.flatten(xp.astype(x, wide_dtype(xp.dtype_name(x))))
        size = vector.shape[0]
        length = -(-size // (ranks * UNIT)) * UNIT
        whole = pad(xp, vector, ranks * length)
        mean = yield ReduceScatter(xp.reshape(whole, (ranks, length)), group="node")
        shard = dataclasses.replace(between(context, levels), name=f"{context.name}@{own}")
        outcome = yield from across(self.compressor.aggregate(xp, mean, (), shard), levels.across.size)
        result = xp.astype(xp.flatten(outcome.mean), xp.dtype_name(vector))
        shards = yield AllGather((result,), group="node")
        before, own_part, after = whole[: own * length], whole[own * length :][:length], whole[(own + 1) * length :]
        sent = xp.concatenate([before, own_part - _lost(xp, mean, outcome) * ranks, after])
        return outcome_like(xp, x, xp.concatenate([part for (part,) in shards])[:size], sent[:size])

    def _whole(
        self, xp: ModuleType, x: Array, state: tuple[Array, ...], context: Context, levels: Levels
    ) -> Aggregation:
        """A step of a tensor that is not cut.

        An allreduce takes it to its owner, and another one takes the result to the others, who add zeros: a
        reduce-scatter of one matrix alone would have a row of its size for each rank, all but one of them empty.
        """
        own, ranks = levels.node
        dtype = wide_dtype(xp.dtype_name(x))
        whole = xp.astype(x, dtype)
        mean = yield AllReduce(xp.flatten(whole), group="node")
        among = between(context, levels)
        lost = xp.zeros(mean.shape, like=mean)
        if own == levels.owner:
            matrix = xp.reshape(mean, x.shape)
            outcome = yield from across(self.compressor.aggregate(xp, matrix, state, among), levels.across.size)
            lost = _lost(xp, mean, outcome)
            given = [xp.astype(xp.flatten(array), dtype) for array in (outcome.mean, *outcome.state)]
        else:
            nothing = xp.zeros(STAND_IN, like=mean)
            start = self.compressor.prepare(xp, nothing, (), among)
            yield from across(self.compressor.aggregate(xp, nothing, start, among), levels.across.size)
            given = [xp.zeros((number_of_elements(tuple(array.shape)),), like=mean) for array in (x, *state)]
        answer = yield AllReduce(xp.concatenate(given), "sum", group="node")
        result, *kept = _cut(xp, answer, [tuple(array.shape) for array in (x, *state)])
        sent = xp.flatten(whole) - lost * ranks
        return outcome_like(xp, x, xp.flatten(result), sent)._replace(state=tuple(array + 0 for array in kept))

    @property
    def has_bucket_form(self) -> bool:
        return self.compressor.has_bucket_form

    @property
    def bucket_family(self) -> Hashable:
        return self.name, self.compressor.bucket_family

    def aggregate_bucket(self, bucket: Bucket) -> BucketAggregation:
        return (yield from aggregate_levels(bucket, _levels(bucket.context)))

    def preview_bucket(self, bucket: Bucket) -> None:
        run_alone(aggregate_levels(bucket, ALONE))

    def preview(
        self, xp: ModuleType, x: Array, state: tuple[Array, ...], context: Context
    ) -> Array | SparseVector:
        return self.compressor.preview(xp, x, state, dataclasses.replace(context, rank=0, world_size=1, levels=None))


def needs_nodes(compressor: Compressor) -> bool:
    """Whether a method has two levels, and so is another one only where a node has several ranks."""
    return any(isinstance(leaf, TwoLevel) for leaf in compressor.leaves())


def within(compressor: Compressor) -> Compressor:
    """The method between the nodes; the compressor itself where it has no levels."""
    return compressor.compressor if isinstance(compressor, TwoLevel) else compressor


def _levels(context: Context) -> Levels:
    """Where this rank is; without levels every rank is a node."""
    if context.levels is None:
        return Levels(Place(0, 1), Place(context.rank, context.world_size))
    return context.levels(context.name)


def _lost(xp: ModuleType, x: Array, outcome: Outcome) -> Array:
    """x - C(x), vectors."""
    sent = outcome.sent
    if isinstance(sent, SparseVector):
        return xp.add_at(x + 0, sent.indices, -xp.astype(sent.values, xp.dtype_name(x)))
    return x - xp.astype(xp.flatten(sent), xp.dtype_name(x))


def _cut(xp: ModuleType, vector: Array, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    """The arrays of these shapes that lie behind each other in a vector."""
    arrays, start = [], 0
    for shape in shapes:
        end = start + number_of_elements(shape)
        arrays.append(xp.reshape(vector[start:end], shape))
        start = end
    return arrays
