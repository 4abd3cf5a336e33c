"""The exchange of a step, for predictions: the rounds of collectives that hvdcomp would run, and their bytes.

The plan gives each tensor a compressor, and the compressor determines the rounds. Payloads share collectives according
to the rule in `hvdcomp.exchange.fusion`. With a compressed reduce-scatter, all tensors of one element type that can be
in a bucket are counted as one bucket. Every other tensor is counted alone, and its chunks are padded to whole units of
the compressor. Tensors with a two-level exchange are counted in the same way, and each rank sends an equal share of the
bytes between nodes.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from hvdcomp.arrays.types import dtype_bytes, wide_dtype
from hvdcomp.compressors import Compressor, TensorInfo
from hvdcomp.compressors.choice import MIN_NDIM, MIN_NUMEL, Chooser, Plan
from hvdcomp.compressors.gathering import Gathering
from hvdcomp.compressors.node_shares import payloads_in_node
from hvdcomp.compressors.protocol import Group
from hvdcomp.compressors.scattering import payloads_of_chunks
from hvdcomp.compressors.sizes import SentPayload, state_elements
from hvdcomp.compressors.two_level import TwoLevel
from hvdcomp.errors import SpecError
from hvdcomp.kernels.tables import NARROW

Array = Any


class Collective(NamedTuple):
    """One collective, which may carry the payloads of many tensors.

    Attributes:
        kind: kind of collective, a key of `network.ALGORITHMS`.
        bytes: bytes that each rank contributes.
        dtype: element type of an allreduce or a reduce-scatter; empty for other collectives, which move bytes of any
            type.
        among: the ranks that take part: "all", "node" (the ranks of a node) or "across" (ranks of different nodes).
    """

    kind: str
    bytes: float
    dtype: str = ""
    among: Group = "all"


_FLAG = SentPayload("allgather", 4.0)
"""The flag with which ranks tell each other whether the values of a step are finite. The engine sends the flag with an
allreduce or allgather of the first round. If the first round has neither, the engine sends the flag alone."""

_Key = tuple[str, str, Group]  # kind, reduction and ranks (`among`) of payloads that share a collective
_Rounds = list[dict[_Key, float]]  # for each round, the bytes that a rank contributes to each collective

Round = tuple[Collective, ...]
"""Collectives that start together. The next round starts only when all of them have ended."""


@dataclass(frozen=True)
class Exchange:
    """The collectives of one step, and the bytes that one rank contributes to them.

    Attributes:
        rounds: the rounds of collectives, in order.
        overlapped: whether the framework exchanges all gradients during the backward pass. Horovod or
            DistributedDataParallel does so if gradients are only cast, and FSDP2 does so for sharded models. All other
            exchanges are made by hvdcomp's engine, after the backward pass.
        dense_bytes: bytes of the uncompressed gradients.
        ranks_per_node: number of ranks per node. It matters for collectives within and between nodes.
        weights_bytes: bytes of the weights of the whole model if the model is sharded (FSDP2); 0 if it is not. FSDP2
            gathers the weights in both passes, and the rounds reduce gradients to shards during the backward pass.
    """

    rounds: tuple[Round, ...]
    overlapped: bool
    dense_bytes: float
    ranks_per_node: int = 1
    weights_bytes: float = 0.0

    @property
    def bytes(self) -> float:
        """Bytes that a rank contributes to all collectives together."""
        return sum(collective.bytes for collectives in self.rounds for collective in collectives)

    @property
    def is_dense(self) -> bool:
        """Whether a rank contributes at least the bytes of its uncompressed gradients."""
        return self.bytes >= self.dense_bytes

    @property
    def bytes_in_node(self) -> float:
        """Bytes that a rank contributes to collectives within its node; 0 if there is only one node."""
        every = [collective for collectives in self.rounds for collective in collectives]
        if not any(collective.among == "across" for collective in every):
            return 0.0
        return sum(collective.bytes for collective in every if collective.among == "node")

    @property
    def compression_factor(self) -> float:
        """The bytes of the uncompressed gradients divided by the bytes that may leave the node."""
        return self.dense_bytes / (self.bytes - self.bytes_in_node)

    @property
    def encodes_first(self) -> bool:
        """Whether encoding precedes all collectives. In a two-level exchange, encoding comes later, because the ranks
        of a node first average their gradients."""
        return not any(collective.among == "node" for collective in self.rounds[0])

    def gathered(self, ranks: Array) -> Array:
        """Bytes of the payloads of all ranks that a rank gathers in the first round.

        Args:
            ranks: number of ranks of the exchange.
        """
        first = [one for one in self.rounds[0] if (one.kind, one.among) == ("allgather", "all")]
        return np.asarray(ranks) * sum(collective.bytes for collective in first)

    def decoded(self, ranks: Array) -> Array:
        """The bytes that a rank decodes, divided by the bytes that the rank encodes.

        For gathered payloads, the ratio is the number of ranks. For scattered payloads it is 2 - 1 / ranks: a rank
        decodes the other ranks' payloads of its own chunk, and the means of all chunks. The rank encodes the other
        ranks' chunks and the mean of its own chunk. A mean has the same number of elements as a chunk. Therefore the
        ratio counts the same number of bytes for a mean and for a chunk, even if a compressor sends means at a
        different level. This is right because the times depend on the number of elements. In a two-level exchange,
        nodes replace ranks.

        Args:
            ranks: number of ranks of the exchange. If nothing is scattered, the number does not matter.
        """
        ranks = np.asarray(ranks, float)
        encoded: Array = 0.0
        decoded: Array = 0.0
        for among, senders in (("all", ranks), ("across", np.ceil(ranks / self.ranks_per_node))):
            received = 0.0
            for collectives in self.rounds:
                sizes = {collective.kind: collective.bytes for collective in collectives if collective.among == among}
                # An allgather that follows an alltoall gathers means, not payloads.
                gathered = 0.0 if received else sizes.get("allgather", 0.0)
                received += sizes.get("alltoall", 0.0)
                encoded = encoded + gathered
                decoded = decoded + gathered * senders
            encoded = encoded + received
            decoded = decoded + received * (2 - 1 / senders)
        return np.where(encoded > 0, decoded / np.where(encoded > 0, encoded, 1), ranks)


def exchange_of(
    compressor: Compressor,
    tensors: Sequence[TensorInfo],
    ranks: int,
    ranks_per_node: int | None = None,
    min_numel: int = MIN_NUMEL,
    min_ndim: int = MIN_NDIM,
) -> Exchange:
    """The exchange of one step of a model, if no residual of an earlier compressor remains to be sent.

    Some bytes are not counted: the flag of four bytes, unless it is sent alone; the room for the flag and up to seven
    bytes of padding in each bucket; up to seven bytes of padding in each collective (for each rank, if payloads are
    scattered); and the presence check of eight bytes for each tensor under Horovod.

    Args:
        compressor: the compressor of the training. `Chooser` chooses the compressor of each tensor from it.
        tensors: all tensors that have a gradient.
        ranks: number of ranks. It matters for scattered chunks and for two-level exchanges.
        ranks_per_node: number of ranks per node; None if unknown. All nodes except the last are assumed to be full.
        min_numel, min_ndim: the smallest number of elements, and of dimensions, that a compressed tensor may have, as
            in `Chooser`.

    Raises:
        ValueError: if no tensor has elements.
        SpecError: if the exchange has two levels and the number of ranks per node is unknown.
    """
    tensors = [tensor for tensor in tensors if tensor.size]
    if not tensors:
        raise ValueError("there are no tensors with elements, so there is nothing to exchange")
    chooser = Chooser(tensors, compressor, min_numel=min_numel, min_ndim=min_ndim)
    plan = chooser.plan_for(compressor)
    return exchange_of_plan(chooser.tensors.values(), plan, chooser.casts(plan), ranks, ranks_per_node)


def sharded_exchange_of(
    compressor: Compressor, tensors: Sequence[TensorInfo], ranks: int, ranks_per_node: int | None = None
) -> Exchange:
    """The exchange of one step of a model that is sharded over all ranks, as `hvdcomp.fsdp` carries it out.

    Without compression, ranks reduce gradients in float32, or in the 16-bit type of a cast. With other methods, the
    ranks of a node first reduce their gradients uncompressed. Then ranks of different nodes send each other compressed
    chunks in an alltoall. These are the first steps of a two-level exchange with `exchange=scatter`. On a single node,
    nothing is compressed.

    Args:
        compressor: a cast, or a method whose payloads can be scattered.
        tensors: all tensors that have a gradient.
        ranks: number of ranks.
        ranks_per_node: number of ranks per node; None if unknown. All nodes except the last are assumed to be full.
    """
    elements = sum(tensor.size for tensor in tensors)
    dense_bytes, weights_bytes = 4.0 * elements, 2.0 * elements
    per_node = ranks_per_node or 1
    wire = compressor.wire_dtype("float32")
    if wire is not None or ranks <= per_node:
        dtype = wire or "float32"
        reduced = Collective("reducescatter", elements * dtype_bytes(dtype), dtype)
        return Exchange(((reduced,),), True, dense_bytes, per_node, weights_bytes)
    scattered = compressor.with_exchange("scatter") if isinstance(compressor, Gathering) else compressor
    between = TwoLevel(scattered) if per_node > 1 else scattered
    rounds = exchange_of(between, tensors, ranks, ranks_per_node, min_numel=0, min_ndim=0).rounds
    upto = 1 + next(number for number, one in enumerate(rounds) if any(each.kind == "alltoall" for each in one))
    return Exchange(rounds[:upto], True, dense_bytes, per_node, weights_bytes)


def exchange_of_plan(
    tensors: Iterable[TensorInfo], plan: Plan, overlapped: bool, ranks: int, ranks_per_node: int | None = None
) -> Exchange:
    """The exchange of one step under a plan. As in `exchange_of`, some bytes are not counted.

    Args:
        tensors: all tensors that have a gradient, sorted by name.
        plan: the compressor of each tensor, by name.
        overlapped: whether the framework exchanges all gradients during the backward pass, as in `Exchange`.
        ranks: number of ranks. It matters for scattered chunks and for two-level exchanges.
        ranks_per_node: number of ranks per node; None if unknown. All nodes except the last are assumed to be full.

    Raises:
        SpecError: if the exchange has two levels and the number of ranks per node is unknown.
    """
    members = [(tensor, plan[tensor.name]) for tensor in tensors if tensor.size]
    two_level = [compressor for _, compressor in members if isinstance(compressor, TwoLevel)]
    if ranks_per_node is None and two_level:
        raise SpecError(
            f"{two_level[0]} needs the number of ranks on each node, but the calibration does not contain this number; "
            "calibrate with several ranks on each node, or leave this compressor out"
        )
    rounds = _rounds_of(members, ranks, ranks_per_node or 1)
    # The flag is sent with allreduces and allgathers of all ranks, but not with an alltoall.
    if rounds and not any(kind in ("allreduce", "allgather") and among == "all" for kind, _, among in rounds[0]):
        _add(rounds, [_FLAG])
    collectives = tuple(
        tuple(Collective(kind, size, _dtype_of(reduction), among) for (kind, reduction, among), size in sizes.items())
        for sizes in rounds
    )
    dense_bytes = sum(tensor.size * dtype_bytes(tensor.dtype) for tensor, _ in members)
    return Exchange(collectives, overlapped, dense_bytes, ranks_per_node or 1)


def _rounds_of(members: Iterable[tuple[TensorInfo, Compressor]], ranks: int, ranks_per_node: int) -> _Rounds:
    rounds: _Rounds = []
    buckets: dict[Hashable, list[tuple[TensorInfo, Any]]] = {}
    for tensor, compressor in members:
        if isinstance(compressor, TwoLevel) and ranks_per_node == 1:
            compressor = compressor.compressor
        in_bucket = compressor.has_bucket_form and tensor.dtype in NARROW
        if isinstance(compressor, TwoLevel) or (in_bucket and compressor.scatters(ranks)):
            kind = (compressor.bucket_family, tensor.dtype) if in_bucket else tensor.name
            buckets.setdefault(kind, []).append((tensor, compressor))
        else:
            _add(rounds, compressor.payloads(tensor.shape, tensor.dtype, ranks))
    for bucket in buckets.values():
        in_levels = isinstance(bucket[0][1], TwoLevel)
        _add(rounds, _in_levels(bucket, ranks, ranks_per_node) if in_levels else payloads_of_chunks(bucket, ranks))
    return rounds


def _in_levels(bucket: Sequence[tuple[TensorInfo, TwoLevel]], ranks: int, ranks_per_node: int) -> list[SentPayload]:
    """The payloads of one rank for a bucket in a two-level exchange: before, during and after the exchange between
    nodes.

    Between nodes, a rank sends its shard of the mean over its node. The shards contain different tensors, so their
    payloads differ in size. The payload between nodes is therefore the mean size over the ranks of the node.
    """
    # The mean over the ranks of a node has at least 32 bits per element.
    inside = [(replace(tensor, dtype=wide_dtype(tensor.dtype)), levels.compressor) for tensor, levels in bucket]
    whole = None  # a shard may contain a part of a tensor
    if inside[0][1].of_matrices:
        whole = [state_elements(compressor, tensor.shape) for tensor, compressor in inside]
    local = min(ranks, ranks_per_node)
    before, after = payloads_in_node([tensor for tensor, _ in inside], whole, local)
    nodes = -(-ranks // ranks_per_node)
    between = [] if nodes == 1 else _rounds_of(inside, nodes, 1)
    return [before, *(_part(payloads, local) for payloads in between), after]


def _part(payloads: Mapping[_Key, float], ranks: int) -> SentPayload:
    """The payload of one rank in a round between nodes: one of `ranks` equal shares of the round's only payload."""
    (((kind, reduction, _), size),) = payloads.items()
    return SentPayload(kind, size / ranks, reduction, "across")


def _add(rounds: _Rounds, payloads: Iterable[SentPayload]) -> None:
    """Adds the payloads of a tensor or bucket to the rounds: the first payload to the first round, and so on."""
    for number, payload in enumerate(payloads):
        if number == len(rounds):
            rounds.append({})
        key = payload.kind, payload.reduction, payload.among
        rounds[number][key] = rounds[number].get(key, 0) + payload.bytes


def _dtype_of(reduction: str) -> str:
    """The element type in the text of a reduction: "float32" for "mean float32"."""
    return reduction.rpartition(" ")[2]
