"""The exchange of a step: rounds of collectives and their bytes, as hvdcomp carries them out.

The plan gives each tensor a compressor, and the compressor determines the rounds. Payloads share collectives by the
rule of `hvdcomp.exchange.fusion`. Scattered tensors of one element type are counted as one bucket if they can be in a
bucket. Otherwise each tensor is counted alone, padded to whole units for each rank. Tensors with a two-level exchange
are counted in the same way, and each rank sends an equal share of the bytes between nodes.
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
    """One fused collective.

    Attributes:
        kind: a key of `network.ALGORITHMS`.
        bytes: bytes that each rank contributes.
        dtype: element type of an allreduce or a reduce-scatter; empty for other kinds, which carry bytes.
        among: the group of ranks.
    """

    kind: str
    bytes: float
    dtype: str = ""
    among: Group = "all"


_FLAG = SentPayload("allgather", 4.0)
"""The engine's flag, sent with an allreduce or allgather of the first round, or alone if there is none."""

_Key = tuple[str, str, Group]  # kind, reduction and ranks (`among`) of payloads that share a collective
_Rounds = list[dict[_Key, float]]  # bytes

Round = tuple[Collective, ...]
"""Collectives that start together. The next round needs the results of all of them."""


@dataclass(frozen=True)
class Exchange:
    """The bytes that one rank contributes to the collectives in one step.

    Attributes:
        rounds: the rounds in order.
        overlapped: whether Horovod exchanges all gradients itself, in buckets during the backward pass, because they
            are only cast. Other exchanges are after the backward pass.
        dense_bytes: bytes of the gradients.
        ranks_per_node: number of ranks of a node; matters for collectives within and between nodes.
        weights_bytes: bytes of the whole model's weights if the model is sharded (FSDP2); 0 if it is not. FSDP2 gathers
            the weights in both passes, and the rounds reduce gradients to shards during the backward pass.
    """

    rounds: tuple[Round, ...]
    overlapped: bool
    dense_bytes: float
    ranks_per_node: int = 1
    weights_bytes: float = 0.0

    @property
    def bytes(self) -> float:
        """Bytes of all collectives together."""
        return sum(collective.bytes for collectives in self.rounds for collective in collectives)

    @property
    def is_dense(self) -> bool:
        """Whether the exchange has at least as many bytes as the gradients."""
        return self.bytes >= self.dense_bytes

    @property
    def bytes_in_node(self) -> float:
        """Bytes of collectives within nodes, if there are several nodes."""
        every = [collective for collectives in self.rounds for collective in collectives]
        if not any(collective.among == "across" for collective in every):
            return 0.0
        return sum(collective.bytes for collective in every if collective.among == "node")

    @property
    def compression_factor(self) -> float:
        """The dense bytes divided by the bytes of the collectives that may leave the node."""
        return self.dense_bytes / (self.bytes - self.bytes_in_node)

    @property
    def encodes_first(self) -> bool:
        """Whether encoding precedes the first collective, and not a collective within the node precedes encoding."""
        return not any(collective.among == "node" for collective in self.rounds[0])

    def gathered(self, ranks: Array) -> Array:
        """Bytes of all ranks' payloads that a rank gathers in the first round.

        Args:
            ranks: number of ranks of the exchange.
        """
        first = [one for one in self.rounds[0] if (one.kind, one.among) == ("allgather", "all")]
        return np.asarray(ranks) * sum(collective.bytes for collective in first)

    def decoded(self, ranks: Array) -> Array:
        """The ratio of the bytes that a rank decodes to those that it encodes.

        For gathered payloads, the ratio is the number of ranks. For scattered payloads it is 2 - 1 / ranks: a rank
        decodes the other ranks' payloads of its own chunk, and the means of all chunks. It encodes the other ranks'
        chunks and the mean of its own chunk. A mean has as many elements as a chunk. Therefore the ratio counts
        as many bytes for it, even if a compressor sends means at another level: the times depend on the number of
        elements. In two levels, nodes replace ranks.

        Args:
            ranks: number of ranks of the exchange; any if nothing is scattered.
        """
        ranks = np.asarray(ranks, float)
        encoded: Array = 0.0
        decoded: Array = 0.0
        for among, senders in (("all", ranks), ("across", np.ceil(ranks / self.ranks_per_node))):
            received = 0.0
            for collectives in self.rounds:
                sizes = {collective.kind: collective.bytes for collective in collectives if collective.among == among}
                gathered = 0.0 if received else sizes.get("allgather", 0.0)  # after an alltoall, they are means
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
    """The exchange of one step of a model, without pending residuals.

    Some bytes are not counted: the flag of four bytes, unless it is sent alone; the room for the flag and up to seven
    bytes of padding in each bucket; up to seven bytes of padding in each collective (for each rank, if payloads are
    scattered); and the presence check of eight bytes for each tensor under Horovod.

    Args:
        compressor: the compressor; `Chooser` gives each tensor its own.
        tensors: all tensors with a gradient.
        ranks: number of ranks; matters if chunks are scattered, and in two levels.
        ranks_per_node: number of ranks of a node; None if unknown. All nodes except the last are assumed to be full.
        min_numel, min_ndim: as in `Chooser`.

    Raises:
        ValueError: if there is nothing to exchange.
        SpecError: for two levels without a known number of ranks of a node.
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

    Without compression, gradients are reduced in float32, or in the 16 bits of a cast. Other methods reduce them
    exactly within a node, and between nodes by an alltoall: as the first half of a scattered exchange in two levels. On
    a single node nothing is compressed.

    Args:
        compressor: a cast, or a method whose payloads can be scattered.
        tensors, ranks, ranks_per_node: as in `exchange_of`.
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
        tensors: all tensors with a gradient, sorted by name.
        plan: the compressor of each tensor.
        overlapped: as in `Exchange`.
        ranks, ranks_per_node: as in `exchange_of`.

    Raises:
        SpecError: as in `exchange_of`.
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
    """One rank's payloads of a bucket in two levels.

    Between nodes they are the mean over the node's ranks, whose shards are of different tensors.
    """
    # Means of a node have 32 bits at least.
    inside = [(replace(tensor, dtype=wide_dtype(tensor.dtype)), levels.compressor) for tensor, levels in bucket]
    whole = None  # tensors are cut
    if inside[0][1].of_matrices:
        whole = [state_elements(compressor, tensor.shape) for tensor, compressor in inside]
    local = min(ranks, ranks_per_node)
    before, after = payloads_in_node([tensor for tensor, _ in inside], whole, local)
    nodes = -(-ranks // ranks_per_node)
    between = [] if nodes == 1 else _rounds_of(inside, nodes, 1)
    return [before, *(_part(payloads, local) for payloads in between), after]


def _part(payloads: Mapping[_Key, float], ranks: int) -> SentPayload:
    """The share of one of `ranks` ranks in the only payload of a round between nodes."""
    (((kind, reduction, _), size),) = payloads.items()
    return SentPayload(kind, size / ranks, reduction, "across")


def _add(rounds: _Rounds, payloads: Iterable[SentPayload]) -> None:
    """Adds payloads to the rounds, one to each."""
    for number, payload in enumerate(payloads):
        if number == len(rounds):
            rounds.append({})
        key = payload.kind, payload.reduction, payload.among
        rounds[number][key] = rounds[number].get(key, 0) + payload.bytes


def _dtype_of(reduction: str) -> str:
    """The element type in the reduction of a payload, such as "mean float32"."""
    return reduction.rpartition(" ")[2]
