"""What shards had left to be sent, for another number of ranks or nodes.

With N nodes, a row of the mean lacks 1/N of what the ranks of all nodes keep of it. What is lacking is added up, cut as
the new ranks have the parameters, and dealt out alike to the ranks that have a row's place in other nodes: N' - 1 of
N' then, so that each keeps N' / (N' - 1) of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from hvdcomp.bindings.state_check import parts_of
from hvdcomp.errors import ConfigurationError

Layout = Sequence[tuple[str, Sequence[int]]]
"""The parameters of a flat gradient, in its order: names and shapes."""


class Rows(NamedTuple):
    """The rows that a rank keeps something of.

    Attributes:
        owners: the ranks that get the mean of them, in order.
        ranks, nodes: of the training.
    """

    owners: Sequence[int]
    ranks: int
    nodes: int


def length_of(layout: Layout, ranks: int) -> int:
    """Elements of a row of a flat gradient: FSDP cuts the first dimension, in parts of the same length."""
    return sum(_part(shape, ranks) for _, shape in layout)


def resharded(
    states: Iterable[Mapping[str, Any]], layouts: Mapping[str, Layout], new: Rows
) -> dict[str, tuple[torch.Tensor, ...]]:
    """What a rank is to keep of each flat gradient, float32 (rows, length).

    Args:
        states: of all ranks that there were, read one by one.
        layouts: of the flat gradients, by name.
        new: what the rank has rows of.

    Raises:
        ConfigurationError: if the states are of other flat gradients.
    """
    made: dict[str, torch.Tensor] = {}
    for state in states:
        shared, own = parts_of(state)
        old = Rows(own["owners"], own["size"], shared["nodes"])
        factor = new.nodes / (new.nodes - 1) / old.nodes
        for name, kept in own["residuals"].items():
            (array,) = kept["arrays"]
            layout = layouts.get(name, ())
            same = _as_lists(shared["layouts"].get(name, ())) == _as_lists(layout)
            if not same or array.shape[1] != length_of(layout, old.ranks):
                raise ConfigurationError(
                    f"what was left to be sent of module {name} cannot be cut anew for {new.ranks} ranks: its "
                    "parameters are others than in the checkpoint, are cut along another dimension than the first, or "
                    "did not all have gradients. Go on with as many ranks and nodes as before, or without a state on "
                    "all ranks: what was left to be sent is lost then"
                )
            made.setdefault(name, torch.zeros(len(new.owners), length_of(layout, new.ranks)))
            for mine, theirs in _overlaps(layout, old, new):
                made[name][mine] += array[theirs] * factor
    return {name: (one,) for name, one in made.items()}


def _as_lists(layout: Layout) -> list[tuple[str, list[int]]]:
    return [(name, list(shape)) for name, shape in layout]


_Cut = tuple[int, slice]  # of the elements of a row


def _overlaps(layout: Layout, old: Rows, new: Rows) -> Iterator[tuple[_Cut, _Cut]]:
    """Where the same elements of parameters lie in new rows and in old ones."""
    old_start = new_start = 0
    for _, shape in layout:
        size = torch.Size(shape).numel()
        old_part, new_part = _part(shape, old.ranks), _part(shape, new.ranks)
        for mine, owner in enumerate(new.owners):
            for row, before in enumerate(old.owners):
                start = max(owner * new_part, before * old_part)
                length = min((owner + 1) * new_part, (before + 1) * old_part, size) - start
                if length > 0:
                    there = old_start + start - before * old_part
                    here = new_start + start - owner * new_part
                    yield (mine, slice(here, here + length)), (row, slice(there, there + length))
        old_start, new_start = old_start + old_part, new_start + new_part


def _part(shape: Sequence[int], ranks: int) -> int:
    """Elements of a parameter that each rank has, what fills up the last included."""
    first, *others = shape
    return -(-first // ranks) * torch.Size(others).numel()
