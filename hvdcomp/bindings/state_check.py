"""Checks a state before it is restored: the state must be complete, have the right types, be finite, and fit the
training run.

Without these checks, a wrong residual would be noticed in the first step or never, and an inf or NaN would spoil all
later steps.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdcomp.adaptation.coordinator import Coordinator
from hvdcomp.arrays import arrays_for, shapes
from hvdcomp.arrays.types import FLOATING, AnyArray, dtype_bytes, wide_dtype
from hvdcomp.compressors import Compressor
from hvdcomp.compressors.parsing import parse_compressor, parse_memory
from hvdcomp.compressors.protocol import Context, TensorInfo
from hvdcomp.errors import ConfigurationError, SpecError
from hvdcomp.exchange.engine import Engine
from hvdcomp.exchange.ledger import Cost
from hvdcomp.policies import refuse_removed
from hvdcomp.policies.request import Statistics
from hvdcomp.specs.described import is_whole
from hvdcomp.specs.levels import DENSE
from hvdcomp.specs.typed import shortened, typed

FORMAT = 2  # version of the contents of states; increase it if the contents change


@dataclass
class _WarmStart:
    method: str
    arrays: Any


@dataclass
class _Residual:
    memory: str
    arrays: Any


@dataclass
class _SharedPolicyState:
    policy: str
    state: Mapping[str, Any]
    progress: tuple[int, ...]
    ended: tuple[Any, ...] | None
    period_rates: tuple[float, ...] | None
    steps_per_epoch: int | None = None
    partial: bool = False

    def __post_init__(self) -> None:
        if len(self.progress) != 3 or min(self.progress) < 0:
            raise ValueError(f"progress: {list(self.progress)} must be three whole numbers of at least 0")
        if self.ended is not None:
            step, epoch = self.ended if len(self.ended) == 2 else (None, None)
            if not is_whole(step, 0) or not (epoch is None or is_whole(epoch, 0)):
                raise ValueError(f"ended: {shortened(list(self.ended))} must be a step number and an epoch number")


@dataclass
class _OwnPolicyState:
    latest: Mapping[str, Any]
    ended: Mapping[str, Any] | None
    sums: Mapping[str, Any]
    step_times: tuple[float, ...]


@dataclass
class _Shared:
    compressor: str
    tensors: Mapping[str, tuple[int, ...]]
    step: int
    level: Any
    warm_starts: Mapping[str, _WarmStart]
    coordinator: Mapping[str, Any] | None

    def __post_init__(self) -> None:
        _require_count("step", self.step)
        if self.coordinator is not None:
            _read(_SharedPolicyState, self.coordinator, "coordinator")


@dataclass
class _Own:
    rank: int
    size: int
    residuals: Mapping[str, _Residual]
    coordinator: Mapping[str, Any] | None
    totals: Mapping[str, float | None]
    steps: int
    loss_scale: float | None = None
    op: str | None = None
    divided_by: Mapping[str, float | None] | None = None

    def __post_init__(self) -> None:
        _require_count("size", self.size, 1)
        _require_count("steps", self.steps)
        if not 0 <= self.rank < self.size and self.rank != -1:  # -1 means that the process was not in the process set
            raise ValueError(
                f"rank: {self.rank} must be from 0 to {self.size - 1}, because there were {self.size} ranks"
            )
        known = [field.name for field in dataclasses.fields(Cost)]
        for name, value in self.totals.items():
            if name not in known or not (value is None or 0 <= value < math.inf):
                raise ValueError(
                    f"totals: {name}={value} is not allowed; the names are {', '.join(known)}, and each value must be "
                    "at least 0"
                )
        if self.loss_scale is not None and not 0 < self.loss_scale < math.inf:
            raise ValueError(f"loss_scale: {self.loss_scale} must be a finite number above 0")
        for name, factor in (self.divided_by or {}).items():
            if factor is not None and (not math.isfinite(factor) or factor == 0):
                raise ValueError(f"divided_by: {name}={factor} must be a finite number other than 0")
        if self.coordinator is not None:
            _read(_OwnPolicyState, self.coordinator, "coordinator")


def checked(state: Mapping[str, Any]) -> dict[str, Any] | None:
    """Checks a state as in `parts_of`, and returns a copy of it. For an empty state, which was saved before the first
    step, the result is None."""
    if isinstance(state, Mapping) and not state:
        return None
    parts_of(state)
    return dict(state)


def parts_of(state: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Makes all checks of a state that do not need the engine, and returns the shared part and the rank's own part.

    Raises:
        ConfigurationError: if the value is not a state, or has a different version, or if a field is missing, has a
            wrong type or is not finite.
    """
    shared, own = (state.get("shared"), state.get("own")) if isinstance(state, Mapping) else (None, None)
    if not isinstance(shared, Mapping) or not isinstance(own, Mapping) or shared.get("format") != FORMAT:
        given = f"its keys are {shortened(list(state))}" if isinstance(state, Mapping) else shortened(state)
        raise ConfigurationError(
            f"the given value is not a state of hvdcomp.Compression, or another version of hvdcomp saved it ({given}); "
            "pass the state that compression.state_dict() returned"
        )
    try:
        known, own_state = _read(_Shared, shared, "shared"), _read(_Own, own, "own")
        for name, warm in known.warm_starts.items():
            _require_finite(warm.arrays, f"the warm start of {name}")
        for name, kept in own_state.residuals.items():
            _require_finite(kept.arrays, f"the residual of {name}")
    except ValueError as error:
        raise _damaged(error) from None
    return shared, own


def require_fit(
    shared: Mapping[str, Any], own: Mapping[str, Any], engine: Engine, coordinator: Coordinator | None
) -> None:
    """Raises ConfigurationError if a state does not fit the training run.

    Args:
        shared, own: the two parts of the state, as returned by `parts_of`.
        engine: the engine of the training run.
        coordinator: the coordinator of the training run's policy; None if there is no policy.
    """
    tensors = {name: list(tensor.own_shape) for name, tensor in engine.tensors.items()}
    saved_tensors = {name: list(shape) for name, shape in shared["tensors"].items()}
    if saved_tensors != tensors:
        wrong = sorted(name for name in {*tensors, *saved_tensors} if saved_tensors.get(name) != tensors.get(name))
        raise ConfigurationError(
            f"the checkpoint is from a different model: these parameters differ: {', '.join(wrong)}"
        )
    policy = shared["coordinator"] and shared["coordinator"]["policy"]
    if policy:
        try:
            refuse_removed(policy)
        except SpecError as error:
            raise ConfigurationError(
                f"the checkpoint was written with a policy that hvdcomp no longer has: {error}"
            ) from None
    for setting, saved, present in (
        ("compressor", shared["compressor"], str(engine.compressor)),
        ("policy", policy, coordinator and str(coordinator.policy)),
    ):
        if saved != present:
            raise ConfigurationError(
                f"the checkpoint was written with {setting} {saved or 'constant'}, but this run has "
                f"{present or 'constant'}; continue with the settings that the training was started with"
            )
    try:
        _check_level(shared["level"], engine.compressor)
        for name, warm in shared["warm_starts"].items():
            _check_warm_start(warm, _tensor(engine, name), engine)
        for name, kept in own["residuals"].items():
            _check_residual(kept, _tensor(engine, name))
            _require_memory(kept["memory"], name, engine, coordinator)
        if coordinator is not None:
            _require_policy_state(shared["coordinator"], own, coordinator)
            coordinator.policy.from_json(shared["coordinator"]["state"])
            if own["coordinator"] is not None:
                _check_own_policy_state(own["coordinator"], engine, coordinator)
    except ValueError as error:
        raise _damaged(error) from None


def _require_memory(saved: str, name: str, engine: Engine, coordinator: Coordinator | None) -> None:
    """Raises ConfigurationError if the residual of the tensor `name` comes from a kind of memory that this training run
    does not use. Without this check, the old memory would be restored together with the residual, and used for this
    tensor."""
    specs = () if coordinator is None else coordinator.policy.compressors
    methods = (engine.compressor, *map(parse_compressor, specs))
    kinds = {type(engine.planner.memory_for(leaf)) for method in methods for leaf in method.leaves()}
    if type(parse_memory(saved)) not in kinds:
        present = " or ".join(sorted(kind.name for kind in kinds))
        raise ConfigurationError(
            f"the checkpoint has a residual of {name} from memory {saved}, but this run has memory {present}. Use the "
            'same memory, or drop the residuals with hvdcomp.state_for(states, rank, ranks, residuals="drop")'
        )


def _require_policy_state(shared: Mapping[str, Any], own: Mapping[str, Any], coordinator: Coordinator) -> None:
    """Raises ConfigurationError on rank 0 if the state comes from another rank, because only rank 0's state contains
    the statistics of the policy."""
    partial = shared.get("partial", False)  # true if another rank, which has no such statistics, has become rank 0
    if coordinator.channel.decides and not partial and (own["rank"] != 0 or own["coordinator"] is None):
        raise ConfigurationError(
            "rank 0 was given the state of another rank, which does not include the state of the policy; on rank 0, "
            "load the state that rank 0 saved"
        )


def known_array(array: Any) -> AnyArray:
    """Converts an array to one that hvdcomp's array functions accept. States of earlier versions may contain tensors of
    other frameworks."""
    try:
        arrays_for(array)
    except TypeError:
        return np.array(array)
    return array


def _read(kind: Any, value: Mapping[str, Any], where: str) -> Any:
    """Reads a part of a state as the dataclass `kind`. Unknown fields, which later versions may write, are ignored."""
    names = {field.name for field in dataclasses.fields(kind)}
    return typed(kind, {name: item for name, item in value.items() if name in names}, where)


def _damaged(error: ValueError) -> ConfigurationError:
    return ConfigurationError(
        f"this state of hvdcomp.Compression is damaged: {error}. Pass the state that compression.state_dict() "
        "returned, unchanged. Or continue without a state: then the residuals (the parts of gradients that were not "
        "sent yet) are lost"
    )


def _require_count(name: str, value: int, least: int = 0) -> None:
    if value < least:
        raise ValueError(f"{name}: {value} must be a whole number of at least {least}")


def _listed(arrays: Any, where: str) -> list[AnyArray]:
    """Checks that a value is a list of arrays of floating-point numbers, and returns the arrays."""
    if not isinstance(arrays, list | tuple):
        raise ValueError(f"{where}: {shortened(arrays)} must be a list of arrays")
    known_arrays = list(map(known_array, arrays))
    for array in known_arrays:
        if (dtype := arrays_for(array).dtype_name(array)) not in FLOATING:
            raise ValueError(f"{where}: an array has type {dtype}, but its type must be one of {', '.join(FLOATING)}")
    return known_arrays


def _require_finite(arrays: Any, where: str) -> None:
    for array in _listed(arrays, where):
        if float(arrays_for(array).found_inf([array])[0]) != 0:
            raise ValueError(f"{where} contains an inf or NaN, which would spoil every later step")


def _tensor(engine: Engine, name: str) -> TensorInfo:
    if name not in engine.tensors:
        raise ValueError(f"the state has a residual or a warm start of {name!r}, but this model has no such parameter")
    return engine.tensors[name]


def _check_level(level: Any, compressor: Compressor) -> None:
    if isinstance(level, tuple | list):
        sizes: Any = typed(tuple[tuple[float | None, ...], ...], level, "level")
        if not sizes or any(len(size) != 2 or size[1] is None for size in sizes) or sizes[-1][0] is not None:
            raise ValueError(
                f"level: {level!r} must be a list of pairs (size, level), and the size of the last pair must be None"
            )
        for _, size_level in sizes:
            compressor.at_level(size_level)
    elif not isinstance(level, str):
        compressor.at_level(level)
    elif level != DENSE:
        raise ValueError(f"level: {level!r} must be a number, {DENSE!r} or None")


def _check_shapes(arrays: Sequence[AnyArray], tensor: TensorInfo, where: str) -> None:
    """Checks that arrays have the shape of a tensor, and that their element type is not wider than the type in which
    the state of this tensor is kept."""
    for array in arrays:
        shape = tuple(array.shape)
        if shape not in (tensor.shape, tensor.own_shape):
            raise ValueError(
                f"{where} has the shape {list(shape)}, but the parameter has the shape {list(tensor.own_shape)}"
            )
        if dtype_bytes(dtype := arrays_for(array).dtype_name(array)) > dtype_bytes(wide_dtype(tensor.dtype)):
            raise ValueError(f"{where} has type {dtype}, but the parameter has type {tensor.dtype}")


def _check_residual(kept: Mapping[str, Any], tensor: TensorInfo) -> None:
    where = f"the residual of {tensor.name}"
    memory, arrays = parse_memory(kept["memory"]), _listed(kept["arrays"], where)
    # The number of arrays that the memory needs is computed from shapes alone, not with NumPy arrays, because NumPy
    # supports bfloat16 only if ml_dtypes was imported.
    needed = len(memory.prepare(shapes, shapes.ShapeArray(tensor.shape, wide_dtype(tensor.dtype)), ()))
    if len(arrays) != needed:
        raise ValueError(f"{where} has {len(arrays)} arrays, but the memory {memory} needs {needed}")
    _check_shapes(arrays, tensor, where)


def _check_warm_start(warm: Mapping[str, Any], tensor: TensorInfo, engine: Engine) -> None:
    """Checks the warm start of a tensor. A warm start of a method other than the tensor's current method is not used,
    and is therefore not checked."""
    compressor = engine.planner.choose(engine.compressor, tensor)
    if compressor.name != warm["method"]:
        return
    where = f"the warm start of {tensor.name}"
    x = shapes.ShapeArray(tensor.shape, tensor.dtype)
    arrays = _listed(warm["arrays"], where)
    fresh = compressor.prepare(shapes, x, (), Context(tensor.name, 0, 0, 0, 1))
    # Only the number of dimensions is compared, because the method itself adapts the lengths of arrays. The lengths
    # depend on the level, and on the shape of the matrix. Earlier versions of hvdcomp used a different shape.
    if [len(array.shape) for array in arrays] != [len(array.shape) for array in fresh]:
        raise ValueError(
            f"{where} has arrays of shapes {[list(array.shape) for array in arrays]}, but {compressor} needs arrays of "
            f"shapes such as {[list(array.shape) for array in fresh]}"
        )


def _check_own_policy_state(own: Mapping[str, Any], engine: Engine, coordinator: Coordinator) -> None:
    coordinator.policy.from_json(own["latest"])
    known = [field.name for field in dataclasses.fields(Statistics)]
    if own["ended"] is not None and ("step" not in own["ended"] or not own["ended"].keys() <= set(known)):
        raise ValueError(
            f"ended: {shortened(list(own['ended']))} must contain step, and may contain only {', '.join(known)}"
        )
    if own["ended"] is not None:
        Statistics.of_plain(own["ended"])
    for name, total in own["sums"].items():
        where = f"the sum of the gradients of {name}"
        _check_shapes(_listed([total], where), _tensor(engine, name), where)
