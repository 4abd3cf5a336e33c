"""Divides the tensors of a bucket among the ranks of a node. Either all tensors are cut as one vector, or each tensor
goes whole to one rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from hvdcomp.compressors.protocol import Context, NodePlaces, TensorInfo
from hvdcomp.compressors.sizes import SentPayload

UNIT = 8
"""The length of a shard is a multiple of this number of elements."""


def between(context: Context, places: NodePlaces) -> Context:
    """The context of the same step, for the group "across" (one rank on each node)."""
    return dataclasses.replace(context, rank=places.across.rank, world_size=places.across.size, node_places=None)


def deal(sizes: Sequence[int], ranks: int) -> list[int]:
    """Chooses a rank for each tensor. The tensors are assigned from the largest to the smallest, and each tensor goes
    to the rank that has the fewest elements so far.

    Example:
        >>> deal([2, 9, 3, 3], 2)
        [1, 0, 1, 1]
    """
    loads, owners = [0] * ranks, [0] * len(sizes)
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        owners[place] = loads.index(min(loads))
        loads[owners[place]] += sizes[place]
    return owners


def payloads_in_node(
    tensors: Sequence[TensorInfo], states: Sequence[int] | None, ranks: int
) -> tuple[SentPayload, SentPayload]:
    """What one rank sends to the other ranks of its node in a step of a bucket. Returns two payloads: the payload sent
    before the exchange between nodes, and the payload sent after this exchange.

    Args:
        tensors: the tensors of the bucket.
        states: the number of elements of the method's state for each tensor, if tensors are not cut; otherwise None.
        ranks: the number of ranks of the node, 2 or more.

    Example:
        >>> [payload.bytes for payload in payloads_in_node([TensorInfo("x", (10, 10))], None, 2)]  # rows of 56 elements
        [448, 224]
    """
    sizes = [tensor.size for tensor in tensors]
    if states is None:
        length = kept = whole_units(-(-sum(sizes) // ranks))
    else:
        dealt = tensors_of_ranks(sizes, ranks)
        length = whole_units(most_elements(sizes, dealt))
        kept = length + most_elements(states, dealt)
    before = SentPayload("reducescatter", 4 * ranks * length, "mean float32", "node")
    return before, SentPayload("allgather", 4 * kept, among="node")


def largest_share(sizes: Sequence[int], ranks: int) -> float:
    """The largest share of all elements that one rank of a node gets, if tensors are not cut."""
    return most_elements(sizes, tensors_of_ranks(sizes, ranks)) / sum(sizes)


def tensors_of_ranks(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """For each rank, the positions in the bucket of the tensors that this rank gets, if tensors are not cut."""
    owners = deal(sizes, ranks)
    return [[place for place, owner in enumerate(owners) if owner == rank] for rank in range(ranks)]


def most_elements(sizes: Sequence[int], dealt: Sequence[Sequence[int]]) -> int:
    """The largest number of elements that one rank has. `dealt` is the result of `tensors_of_ranks`."""
    return max(sum(sizes[place] for place in places) for places in dealt)


def whole_units(elements: int) -> int:
    """The number of elements, rounded up to a multiple of `UNIT`."""
    return -(-elements // UNIT) * UNIT


def pieces_of_rank(tensors: Sequence[TensorInfo], own: int, length: int) -> Iterator[tuple[int, TensorInfo]]:
    """Yields the pieces of tensors in one rank's shard. The shards are equal parts of all tensors, joined end to end.
    Each piece comes with the position of its tensor in the bucket."""
    place = 0
    for number, tensor in enumerate(tensors):
        inside = min((own + 1) * length, place + tensor.size) - max(own * length, place)
        if inside > 0:
            yield number, TensorInfo(f"{tensor.name}@{own}", (inside,))
        place += tensor.size
