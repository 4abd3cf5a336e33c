"""The exchange of a step: rounds of collectives and their bytes, as hvdcomp carries them out.

Nothing is decided here: the plan says which compressor each tensor has, the compressor says its rounds, and what shares
a collective follows the rule of `hvdcomp.exchange.fusion`. Scattered float32 tensors are counted as a bucket cuts them,
all together; other scattered tensors go one by one, each filled up to whole units for each rank. In two levels all
tensors are counted as a bucket deals them out, and each rank has an equal share of what goes between nodes.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hvdcomp.arrays import shapes
from hvdcomp.arrays.types import dtype_bytes, number_of_elements
from hvdcomp.compressors import Compressor, TensorInfo
from hvdcomp.compressors.choice import MIN_NDIM, MIN_NUMEL, Chooser, Plan
from hvdcomp.compressors.gathering import Gathering
from hvdcomp.compressors.protocol import Context, Group
from hvdcomp.compressors.scatter_bucket import payloads_of_chunks
from hvdcomp.compressors.sizes import Payload
from hvdcomp.compressors.two_level import TwoLevel
from hvdcomp.compressors.two_level_bucket import payloads_in_node
from hvdcomp.errors import SpecError

Array = Any


class Collective(NamedTuple):
    """One fused collective: its kind, a key of `network.ALGORITHMS`, and the bytes that each rank hands to it.

    `dtype` is the element type that an allreduce or a reduce-scatter adds up; empty for the others, which carry bytes.
    `among` says whose collective it is: that of all ranks, of the ranks of a node, or of those with the same place in
    each node.
    """

    kind: str
    bytes: float
    dtype: str = ""
    among: Group = "all"


_FLAG = Payload("allgather", 4.0)
"""The engine's flag travels with an allreduce or an allgather of the first round. Where there is none it goes alone."""

_Key = tuple[str, str, Group]  # kind, group and ranks of payloads that share a collective
_Rounds = list[dict[_Key, float]]  # bytes

Round = tuple[Collective, ...]
"""Collectives that are started together. The next round needs their answers."""


@dataclass(frozen=True)
class Exchange:
    """The bytes that one rank hands to the collectives in one step.

    Attributes:
        rounds: in order.
        overlapped: whether Horovod carries it itself, in buckets and during the backward pass, because it takes no
            more than casts. Everything else is exchanged after the backward pass.
        dense_bytes: of the gradients themselves.
        ranks_per_node: how many ranks share a node; it matters where some collectives are theirs.
    """

    rounds: tuple[Round, ...]
    overlapped: bool
    dense_bytes: float
    ranks_per_node: int = 1

    @property
    def bytes(self) -> float:
        """Bytes of all collectives together."""
        return sum(collective.bytes for collectives in self.rounds for collective in collectives)

    @property
    def is_dense(self) -> bool:
        """Whether it takes as many bytes as the gradients have, or more."""
        return self.bytes >= self.dense_bytes

    @property
    def bytes_in_node(self) -> float:
        """Bytes of the collectives of a node's ranks, where there are other nodes."""
        every = [collective for each in self.rounds for collective in each]
        if not any(collective.among == "across" for collective in every):
            return 0.0
        return sum(collective.bytes for collective in every if collective.among == "node")

    @property
    def compression_factor(self) -> float:
        """Dense bytes / bytes handed to the collectives that may leave the node."""
        return self.dense_bytes / (self.bytes - self.bytes_in_node)

    @property
    def encodes_first(self) -> bool:
        """Whether all that is encoded is so before the first collective, and not after one within the node."""
        return not any(collective.among == "node" for collective in self.rounds[0])

    def decoded(self, ranks: Array) -> Array:
        """The share that a rank decodes in a step, as a multiple of what it encodes of its gradients.

        Of what is gathered, that is the number of ranks. Of what is scattered it is 2 - 1 / ranks: the parts of a chunk
        that the other ranks sent, and the means of all chunks. What is encoded is the same both ways: of what is
        scattered, the chunks of the other ranks and the mean of the own one. In two levels nodes take
        the place of ranks.

        Args:
            ranks: those that the exchange is of; any, if nothing is scattered.
        """
        ranks = np.asarray(ranks, float)
        encoded: Array = 0.0
        decoded: Array = 0.0
        for among, senders in (("all", ranks), ("across", np.ceil(ranks / self.ranks_per_node))):
            gathered, received = (
                sum(
                    collective.bytes
                    for collectives in self.rounds
                    for collective in collectives
                    if (collective.kind, collective.among) == (kind, among)
                )
                for kind in ("allgather", "alltoall")
            )
            encoded = encoded + gathered + received * (1 - 1 / senders)
            decoded = decoded + gathered * senders + received * (1 - 1 / senders)
        return np.where(encoded > 0, decoded / np.where(encoded > 0, encoded, 1), ranks)


def exchange_of(
    compressor: Compressor,
    tensors: Sequence[TensorInfo],
    ranks: int,
    ranks_per_node: int | None = None,
    min_numel: int = MIN_NUMEL,
    min_ndim: int = MIN_NDIM,
) -> Exchange:
    """The exchange of one step of a model, without residuals that are still to be sent.

    Left out are a flag of four bytes, unless it goes alone, and at most seven bytes of padding (in what is scattered,
    for each rank) in the first round of a step, and the eight bytes a tensor that Horovod allreduces during the
    backward pass to keep ranks in step.

    Args:
        compressor: what the user asks for; each tensor gets what `Chooser` gives it.
        tensors: all that have a gradient.
        ranks: how many there are. It matters where chunks are scattered, and in two levels.
        ranks_per_node: how many share a node; None if that is not known. Nodes are taken to be full but for the last.
        min_numel, min_ndim: as for `Chooser`.

    Raises:
        ValueError: if there is nothing to exchange.
        SpecError: for two levels, where nothing is known of nodes.
    """
    tensors = [tensor for tensor in tensors if tensor.size]
    if not tensors:
        raise ValueError("there are no tensors with elements, so there is nothing to exchange")
    chooser = Chooser(tensors, compressor, min_numel=min_numel, min_ndim=min_ndim)
    plan = chooser.plan_for(compressor)
    return exchange_of_plan(chooser.tensors.values(), plan, chooser.casts(plan), ranks, ranks_per_node)


def exchange_of_plan(
    tensors: Iterable[TensorInfo], plan: Plan, overlapped: bool, ranks: int, ranks_per_node: int | None = None
) -> Exchange:
    """The exchange of one step at a plan; what is left out is the same as of `exchange_of`.

    Args:
        tensors: all that have a gradient, sorted by name.
        plan: the compressor of each of them.
        overlapped: as in `Exchange`.
        ranks, ranks_per_node: as for `exchange_of`.

    Raises:
        SpecError: as of `exchange_of`.
    """
    members = [(tensor, plan[tensor.name]) for tensor in tensors if tensor.size]
    two_level = [compressor for _, compressor in members if isinstance(compressor, TwoLevel)]
    if ranks_per_node is None and two_level:
        raise SpecError(
            f"nothing is known here of nodes with several ranks, so not what {two_level[0]} takes; calibrate with "
            "several ranks on each node, or leave it out"
        )
    rounds = _rounds_of(members, ranks, ranks_per_node or 1)
    # The flag goes along with what all ranks exchange, but not to one rank each.
    if rounds and not any(kind in ("allreduce", "allgather") and among == "all" for kind, _, among in rounds[0]):
        _add(rounds, [_FLAG])
    collectives = tuple(
        tuple(Collective(kind, size, _dtype_of(group), among) for (kind, group, among), size in sizes.items())
        for sizes in rounds
    )
    dense_bytes = sum(tensor.size * dtype_bytes(tensor.dtype) for tensor, _ in members)
    return Exchange(collectives, overlapped, dense_bytes, ranks_per_node or 1)


def _rounds_of(members: Iterable[tuple[TensorInfo, Compressor]], ranks: int, ranks_per_node: int) -> _Rounds:
    rounds: _Rounds = []
    together: dict[Hashable, list[tuple[TensorInfo, Any]]] = {}
    for tensor, compressor in members:
        if isinstance(compressor, TwoLevel) and ranks_per_node == 1:
            compressor = compressor.compressor
        family = compressor.bucket_family if tensor.dtype == "float32" and compressor.has_bucket_form else None
        scattered = isinstance(compressor, Gathering) and compressor.scatters(ranks)
        if isinstance(compressor, TwoLevel) or (scattered and family is not None):
            together.setdefault(tensor.name if family is None else family, []).append((tensor, compressor))
        else:
            _add(rounds, compressor.payloads(tensor.shape, tensor.dtype, ranks))
    for bucket in together.values():
        in_levels = isinstance(bucket[0][1], TwoLevel)
        _add(rounds, _in_levels(bucket, ranks, ranks_per_node) if in_levels else payloads_of_chunks(bucket, ranks))
    return rounds


def _in_levels(bucket: Sequence[tuple[TensorInfo, TwoLevel]], ranks: int, ranks_per_node: int) -> list[Payload]:
    """The bytes that one rank hands to the collectives of a bucket in two levels.

    Between nodes it is the mean of the node's ranks: their shards are of different tensors.
    """
    inside = [(tensor, compressor.compressor) for tensor, compressor in bucket]
    whole = [_kept(*member) for member in inside] if inside[0][1].of_matrices else None
    local = min(ranks, ranks_per_node)
    before, after = payloads_in_node([tensor for tensor, _ in inside], whole, local)
    nodes = -(-ranks // ranks_per_node)
    between = [] if nodes == 1 else _rounds_of(inside, nodes, 1)
    return [before, *(_part(payloads, local) for payloads in between), after]


def _part(payloads: Mapping[_Key, float], ranks: int) -> Payload:
    """One of this many equal parts of the only payload of a round, which goes between nodes."""
    (((kind, group, _), size),) = payloads.items()
    return Payload(kind, size / ranks, group, "across")


def _kept(tensor: TensorInfo, compressor: Compressor) -> int:
    """Elements that a method keeps of a tensor from step to step, which travel back with the result."""
    x = shapes.ShapeArray(tensor.shape, tensor.dtype)
    return sum(number_of_elements(array.shape) for array in compressor.prepare(shapes, x, (), Context("", 0, 0, 0, 1)))


def _add(rounds: _Rounds, payloads: Iterable[Payload]) -> None:
    """Adds payloads to the rounds, one to each."""
    for number, payload in enumerate(payloads):
        if number == len(rounds):
            rounds.append({})
        key = payload.kind, payload.group, payload.among
        rounds[number][key] = rounds[number].get(key, 0) + payload.bytes


def _dtype_of(group: str) -> str:
    """The element type in the group of a payload, such as "mean float32"."""
    return group.rpartition(" ")[2]
