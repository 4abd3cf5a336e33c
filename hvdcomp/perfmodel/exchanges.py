"""What is to be exchanged in a step: rounds of collectives and their bytes, as hvdcomp carries them out.

Nothing is decided here: the plan says which compressor each tensor has, the compressor says its rounds, and what shares
a collective follows the rule of `hvdcomp.exchange.fusion`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hvdcomp.arrays.types import dtype_bytes
from hvdcomp.compressors import Compressor, TensorInfo
from hvdcomp.compressors.choice import Chooser, Plan


class Collective(NamedTuple):
    """One fused collective: its kind, "allreduce" or "allgather", and the bytes that each rank hands to it.

    `dtype` is the element type that an allreduce adds up; empty for an allgather, which carries bytes.
    """

    kind: str
    bytes: float
    dtype: str = ""


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


def exchange_of(
    compressor: Compressor, tensors: Sequence[TensorInfo], min_numel: int = 1024, min_ndim: int = 2
) -> Exchange:
    """The exchange of one step of a model, without residuals that are still to be sent.

    Left out are a flag of four bytes and at most seven bytes of padding in the first round of a step, and the eight
    bytes a tensor that Horovod allreduces during the backward pass to keep ranks in step.

    Args:
        compressor: what the user asks for; each tensor gets what `Chooser` gives it.
        tensors: all that have a gradient.
        min_numel, min_ndim: as for `Chooser`.

    Raises:
        ValueError: if there is nothing to exchange.
    """
    tensors = [tensor for tensor in tensors if tensor.size]
    if not tensors:
        raise ValueError("there are no tensors with elements, so there is nothing to exchange")
    chooser = Chooser(tensors, compressor, min_numel=min_numel, min_ndim=min_ndim)
    plan = chooser.plan_for(compressor)
    return exchange_of_plan(chooser.tensors.values(), plan, chooser.casts(plan))


def exchange_of_plan(tensors: Iterable[TensorInfo], plan: Plan, overlapped: bool) -> Exchange:
    """The exchange of one step at a plan; what is left out is the same as of `exchange_of`.

    Args:
        tensors: all that have a gradient, sorted by name.
        plan: the compressor of each of them.
        overlapped: as in `Exchange`.
    """
    rounds: list[dict[tuple[str, str], float]] = []
    dense_bytes = 0
    for tensor in tensors:
        if not tensor.size:
            continue
        dense_bytes += tensor.size * dtype_bytes(tensor.dtype)
        for number, payload in enumerate(plan[tensor.name].payloads(tensor.shape, tensor.dtype)):
            if number == len(rounds):
                rounds.append({})
            key = (payload.kind, payload.group)
            rounds[number][key] = rounds[number].get(key, 0) + payload.bytes
    collectives = tuple(
        tuple(Collective(kind, size, _dtype_of(group)) for (kind, group), size in one.items()) for one in rounds
    )
    return Exchange(collectives, overlapped, dense_bytes)


def _dtype_of(group: str) -> str:
    """The element type in the group of a payload, such as "mean float32"."""
    return group.rpartition(" ")[2]
