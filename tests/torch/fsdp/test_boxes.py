"""What replicas of sharded models had left to be sent, on another mesh: what the mean lacks stays the same."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from hvdcomp import ConfigurationError
from hvdcomp.bindings.state_check import FORMAT
from hvdcomp.torch.fsdp.boxes import Box, on_other_mesh

WHOLES = {"a": (7, 5), "b": (3,), "c": (4, 6, 2)}
Cuts = tuple[int, ...]  # the number of pieces of each dimension of a parameter


def boxes_of(cuts: Cuts) -> list[dict[str, Box]]:
    """The boxes of each rank of a replica; a rank may have no elements of a parameter, and no box then."""
    ranks = []
    for places in itertools.product(*map(range, cuts)):
        boxes = {}
        for name, whole in WHOLES.items():
            start, shape = [0] * len(whole), list(whole)
            for dimension, (place, pieces) in enumerate(zip(places, cuts, strict=True)):
                if dimension < len(whole):
                    length = -(-whole[dimension] // pieces)
                    start[dimension] = min(place * length, whole[dimension])
                    shape[dimension] = min(length, whole[dimension] - start[dimension])
            if all(shape):
                boxes[name] = Box(whole, tuple(start), tuple(shape))
        ranks.append(boxes)
    return ranks


def saved(replicas: int, cuts: Cuts, memory: str = "error_feedback", arrays: int = 1) -> list[dict[str, Any]]:
    generator, states = np.random.default_rng(0), []
    for replica in range(replicas):
        for boxes in boxes_of(cuts):
            kept = {
                name: {"memory": memory, "arrays": [torch.from_numpy(generator.normal(size=box.shape))] * arrays}
                for name, box in boxes.items()
                if name != "b"  # too small to be compressed
            }
            shared = {
                "format": FORMAT, "compressor": "int4", "tensors": {}, "step": 3, "level": None,
                "warm_starts": {"a": {"method": "powersgd", "arrays": []}}, "coordinator": None,
            }  # fmt: skip
            own = {
                "rank": replica, "size": replicas, "residuals": kept, "coordinator": None, "totals": {}, "steps": 3,
                "divided_by": dict.fromkeys(boxes, 2.0), "boxes": {name: list(box) for name, box in boxes.items()},
            }  # fmt: skip
            states.append({"shared": shared, "own": own})
    return states


def lacking(states: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """What the mean lacks of each parameter."""
    wholes = {name: np.zeros(whole) for name, whole in WHOLES.items()}
    for own in (state["own"] for state in states):
        for name, kept in own["residuals"].items():
            _, start, shape = own["boxes"][name]
            place = tuple(slice(first, first + size) for first, size in zip(start, shape, strict=True))
            wholes[name][place] += kept["arrays"][-1].numpy() / own["size"]
    return wholes


def new_states(states: list[dict[str, Any]], replicas: int, cuts: Cuts) -> Iterator[dict[str, Any]]:
    for replica in range(replicas):
        for boxes in boxes_of(cuts):
            state = on_other_mesh(iter(states), states[0]["own"], boxes, replica, replicas)
            assert state["shared"]["tensors"] == {name: list(box.shape) for name, box in boxes.items()}
            state["own"]["boxes"] = boxes
            yield state


@pytest.mark.parametrize("new", [(1, (1,)), (2, (2,)), (3, (4,)), (5, (1, 2)), (2, (2, 3))])
@pytest.mark.parametrize("old", [(2, (2,)), (4, (1,)), (1, (3,)), (2, (2, 2))])
def test_what_the_mean_lacks_stays(old: tuple[int, Cuts], new: tuple[int, Cuts]) -> None:
    states = saved(*old)
    after = list(new_states(states, *new))
    for name, whole in lacking(states).items():
        np.testing.assert_allclose(lacking(after)[name], whole, rtol=1e-6, atol=1e-9)
    for own in (state["own"] for state in after):  # all ranks have residuals of the same parameters
        assert own["residuals"].keys() == own["boxes"].keys() - {"b"}
        assert own["divided_by"] == dict.fromkeys(own["boxes"], 2.0)


def test_what_several_ranks_of_a_replica_have_is_taken_over_once() -> None:
    states = saved(2, (1,))
    twice = [states[0], states[0], states[1], states[1]]  # as beside tensor parallelism
    for name, whole in lacking(list(new_states(twice, 2, (1,)))).items():
        np.testing.assert_array_equal(whole, lacking(states)[name])


def test_warm_starts_and_measurements_begin_anew() -> None:
    states = saved(2, (2,), memory="dgc:momentum=0.9", arrays=2)
    policy = {"policy": "accordion", "state": {}, "progress": [3, 0, 3], "ended": [1, 0], "period_rates": None}
    states[0]["shared"]["coordinator"] = policy
    state = next(new_states(states, 1, (1,)))
    assert not state["shared"]["warm_starts"]
    assert state["shared"]["coordinator"] == {**policy, "ended": None, "partial": True}
    assert state["own"]["coordinator"] is None
    assert [len(kept["arrays"]) for kept in state["own"]["residuals"].values()] == [2, 2]


def refused(states: list[dict[str, Any]], boxes: Mapping[str, Box]) -> str:
    with pytest.raises(ConfigurationError) as caught:
        on_other_mesh(states, states[0]["own"], boxes, 0, 1)
    return str(caught.value)


def test_states_of_another_model_are_refused() -> None:
    (boxes,) = boxes_of((1,))
    larger = boxes["a"]._replace(whole=(8, 5))
    assert "these parameters differ: a" in refused(saved(2, (2,)), {**boxes, "a": larger})
    assert "without the parameters d" in refused(saved(2, (2,)), {**boxes, "d": boxes["a"]})


def test_residuals_of_several_memories_are_refused() -> None:
    states = [*saved(2, (2,))[:2], *saved(2, (2,), memory="error_feedback:decay=0.5")[2:]]
    assert "error_feedback:decay=0.5 on others" in refused(states, boxes_of((1,))[0])
