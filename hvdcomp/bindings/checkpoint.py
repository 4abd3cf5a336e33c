"""Checkpoints: the state of a training run that later steps need.

A checkpoint has two parts. The `shared` part is the same on all ranks: the step, the levels, the state of the policy
and the warm starts of methods. The `own` part belongs to one rank: its residuals, and on rank 0 the statistics for the
next decision of the policy. Both parts contain only plain values and arrays of the framework, so that the framework's
own functions can save them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from hvdcomp.adaptation.coordinator import Coordinator
from hvdcomp.arrays import arrays_for
from hvdcomp.arrays.types import AnyArray, wide_dtype
from hvdcomp.bindings.state_check import FORMAT, parts_of, require_fit
from hvdcomp.compressors.parsing import parse_memory
from hvdcomp.errors import warn_alone
from hvdcomp.exchange.engine import Engine
from hvdcomp.exchange.ledger import Cost
from hvdcomp.exchange.tensor_state import TensorState

Place = Callable[[AnyArray, str], AnyArray]  # a function that moves an array to the device of the tensor with this name


def state_of(engine: Engine, coordinator: Coordinator | None, copy: Callable[[AnyArray], AnyArray]) -> dict[str, Any]:
    """Creates the checkpoint of this rank. Call this function between two steps.

    Args:
        engine: the engine that compresses the gradients of the training run.
        coordinator: the coordinator of the policy; None if there is no policy.
        copy: function that returns a copy of an array, which no later step changes.
    """
    if coordinator is not None:
        coordinator.receive()
    states = engine.states.items()
    warm_starts = {
        name: {"method": state.method, "arrays": [copy(array) for array in state.compressor]}
        for name, state in states
        if state.compressor
    }
    residuals = {
        # Residuals are saved in 32 bits at least. If a different number of ranks continues from the checkpoint,
        # residuals are added up, and sums of 16-bit residuals would be rounded.
        name: {"memory": str(state.keeper), "arrays": [copy(_widened(array)) for array in state.memory]}
        for name, state in states
        if state.memory
    }
    shared = {
        "format": FORMAT,
        "compressor": str(engine.compressor),
        "tensors": {name: list(tensor.own_shape) for name, tensor in engine.tensors.items()},
        "step": engine.step_number,
        "level": engine.planner.level,
        "warm_starts": warm_starts,
        "coordinator": None if coordinator is None else coordinator.shared_state(),
    }
    own = {
        "rank": engine.communicator.rank,
        "size": engine.communicator.world_size,
        "residuals": residuals,
        "coordinator": None if coordinator is None else coordinator.own_state(copy),
        "totals": _totals(engine.ledger.totals),
        "steps": engine.ledger.steps,
    }
    return {"shared": shared, "own": own}


def _totals(totals: Cost) -> dict[str, Any]:
    """The fields of the totals. `bytes_in_node` is omitted if it is 0, because earlier versions of hvdcomp do not
    accept this field."""
    return {name: value for name, value in dataclasses.asdict(totals).items() if value or name != "bytes_in_node"}


def restore(
    state: Mapping[str, Any],
    engine: Engine,
    coordinator: Coordinator | None,
    place: Place,
) -> None:
    """Restores a checkpoint before the first step. Every rank calls this function, with its own checkpoint or with the
    checkpoint of rank 0.

    If the number of ranks has changed, or if the checkpoint comes from another rank, residuals start at zero, with a
    warning.

    Args:
        state: the checkpoint, as returned by `state_of`.
        engine: the engine that compresses the gradients of the training run.
        coordinator: the coordinator of the policy; None if there is no policy.
        place: function that moves an array to the device of the tensor with this name.

    Raises:
        ConfigurationError: if the checkpoint is damaged, or comes from other tensors, another compressor or another
            policy. In these cases, nothing is changed.
    """
    shared, own = parts_of(state)
    require_fit(shared, own, engine, coordinator)
    engine.step_number = shared["step"]
    engine.set_level(shared["level"])
    for name in engine.states:
        warm = shared["warm_starts"].get(name, {"method": "", "arrays": ()})
        engine.states[name] = TensorState(
            method=warm["method"], compressor=tuple(place(array, name) for array in warm["arrays"])
        )
    communicator = engine.communicator
    if own["size"] != communicator.world_size:
        if communicator.rank == 0:
            warn_alone(
                f"the checkpoint was written by {own['size']} ranks, but this run has {communicator.world_size}, so "
                "all residuals start at zero: the parts of gradients that were not sent yet are lost. To keep the "
                "residuals, load the states that hvdcomp.state_for returns"
            )
    else:
        if lost := own["rank"] != communicator.rank:
            warn_alone(
                f"rank {communicator.rank} was given the checkpoint of rank {own['rank']}, so the residuals of this "
                "rank start at zero: the parts of gradients that this rank had not sent yet are lost. To keep the "
                "residuals, save compression.state_dict() on every rank, and on each rank load the state that this "
                "rank saved."
            )
        for name, kept in own["residuals"].items():
            # Lost residuals become zeros, because the exchange of a step depends on whether ranks have residuals.
            dtype = wide_dtype(engine.tensors[name].dtype)  # earlier versions saved residuals in 16 bits
            arrays = (_astype(place(array, name), dtype) for array in kept["arrays"])
            engine.states[name].memory = tuple(zeros_like(array) if lost else array for array in arrays)
            engine.states[name].keeper = parse_memory(kept["memory"])
    if coordinator is not None:
        coordinator.restore(shared["coordinator"], own["coordinator"] if own["rank"] == 0 else None, place)
    engine.ledger.continue_from(Cost(**own["totals"]), own["steps"])


def _astype(array: AnyArray, dtype: str) -> AnyArray:
    return arrays_for(array).astype(array, dtype)


def _widened(array: AnyArray) -> AnyArray:
    return _astype(array, wide_dtype(arrays_for(array).dtype_name(array)))


def zeros_like(array: AnyArray) -> AnyArray:
    """An array of zeros with the framework, shape, element type and device of the given array."""
    zeros: AnyArray = arrays_for(array).zeros(tuple(array.shape), like=array)
    return zeros
