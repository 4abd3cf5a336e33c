"""Converts residuals to a different mesh. A box is the part of a parameter that a rank has on a mesh.

The part of a mean that was not sent yet is the sum of the replicas' residuals, divided by the number of replicas. This
part must stay the same on the new mesh. Let there be N old and M new replicas. The new replica j gets the sum of the
residuals of the old replicas j, j + M, j + 2M, and so on, times M / N. Each rank gets only the elements that are in its
box. `hvdcomp.state_for` redistributes whole residuals in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch.distributed.tensor import DTensor

from hvdcomp.bindings.state_check import parts_of
from hvdcomp.errors import ConfigurationError, listed


class Cut(NamedTuple):
    """How one dimension of the mesh cuts a parameter.

    Attributes:
        place: number of the piece that this rank has, from 0.
        pieces: number of pieces into which a dimension of the mesh cuts the parameter; 1 if this dimension does not cut
            the parameter.
    """

    place: int
    pieces: int


class Box(NamedTuple):
    """The elements of a parameter that a rank has.

    Attributes:
        whole: the shape of the parameter.
        start: in each dimension, the index of the first element that this rank has.
        shape: in each dimension, the number of elements that this rank has.
    """

    whole: tuple[int, ...]
    start: tuple[int, ...]
    shape: tuple[int, ...]

    def place_of(self, other: Box) -> tuple[slice, ...]:
        """The slices of this box that contain the elements that it has in common with another box of the same
        parameter."""
        places = []
        for start, size, other_start, other_size in zip(self.start, self.shape, other.start, other.shape, strict=True):
            first = max(start, other_start)
            last = max(first, min(start + size, other_start + other_size))
            places.append(slice(first - start, last - start))
        return tuple(places)


def cuts_of(parameter: DTensor) -> list[Cut]:
    """How each dimension of the device mesh shards the parameter."""
    places, sizes = parameter.device_mesh.get_coordinate(), parameter.device_mesh.mesh.shape
    assert places is not None  # this rank is in the mesh
    dimensions = zip(places, sizes, parameter.placements, strict=True)
    return [Cut(0, 1) if placement.is_replicate() else Cut(place, size) for place, size, placement in dimensions]


def number_of_boxes(parameter: DTensor) -> int:
    """The number of boxes into which a mesh cuts a parameter."""
    return math.prod(cut.pieces for cut in cuts_of(parameter))


def shared_in_replica(parameters: Mapping[str, DTensor]) -> set[str]:
    """The names of the parameters for which several ranks of a replica have the same box, as with tensor parallelism.

    Each rank with the same box exchanges gradients with a different group of ranks. The means of the box must still be
    the same on all these ranks, although the ranks have different boxes of other parameters.
    """
    most = max(map(number_of_boxes, parameters.values()), default=1)
    return {name for name, parameter in parameters.items() if number_of_boxes(parameter) < most}


def box_of(parameter: DTensor) -> Box:
    """The box of a parameter that this rank has."""
    (chunk,) = parameter.__create_chunk_list__()  # torch.distributed.checkpoint uses the same method
    return Box(tuple(parameter.shape), tuple(chunk.offsets), tuple(chunk.sizes))


def boxes_in(own: Mapping[str, Any]) -> dict[str, Box]:
    """The boxes in the `own` part of a rank's state, by parameter name. States of earlier versions have no boxes."""
    return {name: Box(*map(tuple, box)) for name, box in own.get("boxes", {}).items()}


def on_other_mesh(
    states: Iterable[Mapping[str, Any]], own: Mapping[str, Any], boxes: Mapping[str, Box], rank: int, ranks: int
) -> dict[str, Any]:
    """Makes the state of a rank whose boxes, or whose number of replicas, have changed.

    Methods with warm starts begin without their saved start values. A policy continues, but loses its measurements
    since its latest decision.

    Args:
        states: the states that all ranks saved. The states are read one after another.
        own: the `own` part of any of these states. The counts in this part, such as the number of steps, continue.
        boxes: the boxes that this rank has now, by parameter name.
        rank, ranks: this rank's number among the replicas, and the number of replicas.

    Raises:
        ConfigurationError: if the states belong to other parameters, or if the residuals in the states come from
            different memories.
    """
    shared: Mapping[str, Any] = {}
    known: set[str] = set()
    divided_by: dict[str, float | None] = {}
    residuals: dict[str, dict[str, Any]] = {}
    added: set[tuple[str, int, Box]] = set()  # several ranks of a replica may have the same box
    for state in states:
        its_shared, its_own = parts_of(state)
        its_boxes = {name: box for name, box in boxes_in(its_own).items() if name in boxes}
        if wrong := [name for name, box in its_boxes.items() if box.whole != boxes[name].whole]:
            raise ConfigurationError(
                f"the checkpoint is from a different model; these parameters differ: {listed(wrong)}"
            )
        if its_boxes and not shared:
            shared = its_shared
        known |= its_boxes.keys()
        divided_by |= {name: factor for name, factor in its_own["divided_by"].items() if name in boxes}
        replica, factor = its_own["rank"], ranks / its_own["size"]
        for name, box in its_boxes.items():
            kept = its_own["residuals"].get(name)
            if kept is None:
                continue
            new = residuals.setdefault(name, _nothing_left(kept, boxes[name]))
            if new["memory"] != kept["memory"]:
                raise ConfigurationError(
                    f"the residual of {name} comes from memory {new['memory']} on some ranks and from memory "
                    f"{kept['memory']} on others, so these residuals cannot be added up. To drop all residuals, pass "
                    'residuals="drop" to hvdcomp.dcp.load'
                )
            if replica % ranks == rank and (name, replica, box) not in added:
                added.add((name, replica, box))
                for total, array in zip(new["arrays"], kept["arrays"], strict=True):
                    total[boxes[name].place_of(box)] += array[box.place_of(boxes[name])] * factor
    if missing := sorted(boxes.keys() - known):
        raise ConfigurationError(f"the checkpoint is from a different model, without the parameters {listed(missing)}")
    policy = shared["coordinator"] and {**shared["coordinator"], "ended": None, "partial": True}
    shapes = {name: list(box.shape) for name, box in boxes.items()}
    kept_here = {"residuals": residuals, "divided_by": divided_by, "coordinator": None}
    return {
        "shared": {**shared, "tensors": shapes, "warm_starts": {}, "coordinator": policy},
        "own": {**own, "rank": rank, "size": ranks, **kept_here},
    }


def _nothing_left(kept: Mapping[str, Any], box: Box) -> dict[str, Any]:
    """A residual of zeros for a box, with the memory and the number of arrays of the residual `kept`. All ranks must
    have a residual, because the exchange of a step depends on whether there are residuals."""
    return {"memory": kept["memory"], "arrays": [array.new_zeros(box.shape) for array in kept["arrays"]]}
