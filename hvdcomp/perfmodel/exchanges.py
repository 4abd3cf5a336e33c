"""What is to be exchanged in a step: rounds of collectives and their bytes, as hvdcomp carries them out.

Nothing is decided here: the plan says which compressor each tensor has, the compressor says its rounds, and what shares
a collective follows the rule of `hvdcomp.exchange.fusion`. Scattered float32 tensors are counted as a bucket cuts them,
all together; other scattered tensors go one by one, each filled up to whole units for each rank.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hvdcomp.arrays.types import dtype_bytes
from hvdcomp.compressors import Compressor, TensorInfo
from hvdcomp.compressors.choice import Chooser, Plan
from hvdcomp.compressors.gathering import Gathering
from hvdcomp.compressors.scatter_bucket import payloads_of_chunks
from hvdcomp.compressors.sizes import Payload
from hvdcomp.compressors.two_level import TwoLevel
from hvdcomp.errors import SpecError

Array = Any


class Collective(NamedTuple):
    """One fused collective: its kind, a key of `network.ALGORITHMS`, and the bytes that each rank hands to it.

    `dtype` is the element type that an allreduce or a reduce-scatter adds up; empty for the others, which carry bytes.
    """

    kind: str
    bytes: float
    dtype: str = ""


_FLAG = Payload("allgather", 4.0)
"""The engine's flag travels with an allreduce or an allgather of the first round. Where there is none it goes alone."""

Round = tuple[Collective, ...]
"""Collectives that are started together. The next round needs their answers."""


@dataclass(frozen=True)
class Exchange:
    """What one rank hands to the collectives in one step.

    Attributes:
        rounds: in order.
        overlapped: whether Horovod carries it itself, in buckets and during the backward pass, because it takes no
            more than casts. Everything else is exchanged after the backward pass.
        dense_bytes: of the gradients themselves.
    """

    rounds: tuple[Round, ...]
    overlapped: bool
    dense_bytes: float

    @property
    def bytes(self) -> float:
        """Of all collectives together."""
        return sum(collective.bytes for one in self.rounds for collective in one)

    @property
    def compression_factor(self) -> float:
        """Dense bytes / bytes handed to the collectives."""
        return self.dense_bytes / self.bytes

    def decoded(self, ranks: Array) -> Array:
        """What a rank decodes in a step, as a multiple of what it encodes of its gradients.

        Of what is gathered, that is the number of ranks. Of what is scattered it is 2 - 1 / ranks: the parts of a chunk
        that the other ranks sent, and the means of all chunks. What is encoded is the same both ways: of what is
        scattered, the chunks of the other ranks and the mean of the own one.

        Args:
            ranks: those that the exchange is of; any, if nothing is scattered.
        """
        of_kind = {"allgather": 0.0, "alltoall": 0.0}
        for one in self.rounds:
            for kind, size, _ in one:
                of_kind[kind] = of_kind.get(kind, 0.0) + size
        ranks = np.asarray(ranks, float)
        if not of_kind["alltoall"]:
            return ranks
        gathered, received = of_kind["allgather"], of_kind["alltoall"] * (1 - 1 / ranks)
        return (gathered * ranks + received) / (gathered + received)


def exchange_of(
    compressor: Compressor, tensors: Sequence[TensorInfo], ranks: int, min_numel: int = 1024, min_ndim: int = 2
) -> Exchange:
    """The exchange of one step of a model, without residuals that are still to be sent.

    Left out are a flag of four bytes, unless it goes alone, and at most seven bytes of padding (in what is scattered,
    for each rank) in the first round of a step, and the eight bytes a tensor that Horovod allreduces during the
    backward pass to keep ranks in step.

    Args:
        compressor: what the user asks for; each tensor gets what `Chooser` gives it.
        tensors: all that have a gradient.
        ranks: how many there are. It matters where chunks are scattered, and nowhere else.
        min_numel, min_ndim: as for `Chooser`.

    Raises:
        ValueError: if there is nothing to exchange.
        SpecError: for two levels, which the performance model does not know.
    """
    tensors = [tensor for tensor in tensors if tensor.size]
    if not tensors:
        raise ValueError("there are no tensors with elements, so there is nothing to exchange")
    chooser = Chooser(tensors, compressor, min_numel=min_numel, min_ndim=min_ndim)
    plan = chooser.plan_for(compressor)
    return exchange_of_plan(chooser.tensors.values(), plan, chooser.casts(plan), ranks)


def exchange_of_plan(tensors: Iterable[TensorInfo], plan: Plan, overlapped: bool, ranks: int) -> Exchange:
    """The exchange of one step at a plan; what is left out is the same as of `exchange_of`.

    Args:
        tensors: all that have a gradient, sorted by name.
        plan: the compressor of each of them.
        overlapped: as in `Exchange`.
        ranks: as for `exchange_of`.

    Raises:
        SpecError: as of `exchange_of`.
    """
    rounds: list[dict[tuple[str, str], float]] = []
    cut: dict[Hashable, list[tuple[TensorInfo, Compressor]]] = {}
    dense_bytes = 0

    def add(payloads: Iterable[Payload]) -> None:
        for number, payload in enumerate(payloads):
            if number == len(rounds):
                rounds.append({})
            key = (payload.kind, payload.group)
            rounds[number][key] = rounds[number].get(key, 0) + payload.bytes

    for tensor in tensors:
        if not tensor.size:
            continue
        dense_bytes += tensor.size * dtype_bytes(tensor.dtype)
        compressor = plan[tensor.name]
        if isinstance(compressor, TwoLevel):
            raise SpecError(f"the performance model knows no nodes of several ranks, so not {compressor}; leave it out")
        family = compressor.bucket_family
        scattered = isinstance(compressor, Gathering) and compressor.scatters(ranks)
        if scattered and family is not None and tensor.dtype == "float32":
            cut.setdefault(family, []).append((tensor, compressor))
        else:
            add(compressor.payloads(tensor.shape, tensor.dtype, ranks))
    for members in cut.values():
        add(payloads_of_chunks(members, ranks))
    if rounds and {kind for kind, _ in rounds[0]} == {"alltoall"}:
        add([_FLAG])
    collectives = tuple(
        tuple(Collective(kind, size, _dtype_of(group)) for (kind, group), size in one.items()) for one in rounds
    )
    return Exchange(collectives, overlapped, dense_bytes)


def _dtype_of(group: str) -> str:
    """The element type in the group of a payload, such as "mean float32"."""
    return group.rpartition(" ")[2]
