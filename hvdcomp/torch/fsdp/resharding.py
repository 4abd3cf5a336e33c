"""Converts residuals of shards to a different number of ranks or nodes.

The pending part of a mean is the part that was not sent yet. With N nodes, the pending part of a row's mean is 1/N of
the sum of the row's residuals on all nodes. The pending part is cut into the rows of the new ranks. With N' new nodes,
N' - 1 ranks send a row to the owner of the row: one rank on each other node. The pending part of the row is divided
equally among these ranks. The next mean divides residuals by N', so each of these ranks gets N' / (N' - 1) times the
pending part as its residual.

With R replicas, the pending part of the mean is 1/R of the sum of the replicas' pending parts. The pending parts of the
old replicas are distributed over the R' new replicas. Each new replica adds up the parts that it gets, and multiplies
the sum by R'/R.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from hvdcomp.bindings.state_check import parts_of
from hvdcomp.errors import ConfigurationError
from hvdcomp.torch.parameters import plain_names

FlatLayout = Sequence[tuple[str, Sequence[int]]]
"""The names and shapes of the parameters of a flat gradient, in the order of the flat gradient."""


class OwnedRows(NamedTuple):
    """The rows for which a rank has residuals.

    Attributes:
        owners: the ranks that own the rows, in order.
        ranks, nodes: number of ranks of a replica, and number of nodes of a replica.
        replica, replicas: the number of the replica, and the number of replicas.
    """

    owners: Sequence[int]
    ranks: int
    nodes: int
    replica: int = 0
    replicas: int = 1


def replica_of(own: Mapping[str, Any]) -> tuple[int, int]:
    """Two numbers from the `own` part of a rank's state: the number of the replica, and the number of replicas. In
    states of earlier versions, there is one replica."""
    return own.get("replica", 0), own.get("replicas", 1)


def length_of(layout: FlatLayout, ranks: int) -> int:
    """The number of elements of a row of a flat gradient. FSDP cuts the first dimension of each parameter into parts of
    equal length."""
    return sum(part_of(shape, ranks) for _, shape in layout)


def resharded(
    states: Iterable[Mapping[str, Any]], layouts: Mapping[str, FlatLayout], new: OwnedRows
) -> dict[str, tuple[torch.Tensor, ...]]:
    """Computes the residual of a new rank for each flat gradient, as a float32 tensor of shape (rows, length).

    Args:
        states: the states of all old ranks. The states are read one after another.
        layouts: the current layout of each flat gradient, by name.
        new: the rows that the new rank owns.

    Raises:
        ConfigurationError: if the states belong to other flat gradients.
    """
    residuals: dict[str, torch.Tensor] = {}
    for state in states:
        shared, own = parts_of(state)
        old = OwnedRows(own["owners"], own["size"], shared["nodes"], *replica_of(own))
        if old.replica % new.replicas != new.replica:
            continue
        factor = new.nodes / (new.nodes - 1) / old.nodes * (new.replicas / old.replicas)
        for name, kept in own["residuals"].items():
            (array,) = kept["arrays"]
            layout = layouts.get(name, ())
            is_same = with_plain_names(shared["layouts"].get(name, ())) == with_plain_names(layout)
            if not is_same or array.shape[1] != length_of(layout, old.ranks):
                raise ConfigurationError(
                    f"the residual of module {name} cannot be cut to {new.ranks} ranks: its parameters differ from "
                    "those in the checkpoint, are not sharded along the first dimension, or did not all have "
                    "gradients. Continue with the same number of ranks and nodes as before, or load no state on any "
                    "rank: then the residuals are lost"
                )
            residuals.setdefault(name, torch.zeros(len(new.owners), length_of(layout, new.ranks)))
            for new_cut, old_cut in _overlaps(layout, old, new):
                residuals[name][new_cut] += array[old_cut] * factor
    return {name: (residual,) for name, residual in residuals.items()}


def with_plain_names(layout: FlatLayout) -> list[tuple[str, list[int]]]:
    """A saved layout, without the parts that wrappers add to names. Earlier versions saved names with these parts."""
    names = plain_names([name for name, _ in layout])
    return [(name, list(shape)) for name, (_, shape) in zip(names, layout, strict=True)]


_Cut = tuple[int, slice]  # a row, and a slice of its elements


def _overlaps(layout: FlatLayout, old: OwnedRows, new: OwnedRows) -> Iterator[tuple[_Cut, _Cut]]:
    """Yields the elements that a new row and an old row have in common, as a slice of the new row and a slice of the
    old row."""
    old_start = new_start = 0
    for _, shape in layout:
        size = torch.Size(shape).numel()
        old_part, new_part = part_of(shape, old.ranks), part_of(shape, new.ranks)
        for new_row, owner in enumerate(new.owners):
            for old_row, old_owner in enumerate(old.owners):
                start = max(owner * new_part, old_owner * old_part)
                length = min((owner + 1) * new_part, (old_owner + 1) * old_part, size) - start
                if length > 0:
                    old_place = old_start + start - old_owner * old_part
                    new_place = new_start + start - owner * new_part
                    new_cut = new_row, slice(new_place, new_place + length)
                    yield new_cut, (old_row, slice(old_place, old_place + length))
        old_start, new_start = old_start + old_part, new_start + new_part


def part_of(shape: Sequence[int], ranks: int) -> int:
    """The number of elements of a parameter on each rank, including padding."""
    first, *inner = shape
    return -(-first // ranks) * torch.Size(inner).numel()
