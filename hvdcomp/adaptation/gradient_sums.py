"""Sums of gradients for policies, on the gradients' device.

Only the functions that return numbers wait for an accelerator. These functions are called once per decision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, ClassVar

from hvdcomp.adaptation.level_errors import LevelErrors
from hvdcomp.adaptation.observer import Observer
from hvdcomp.arrays import arrays_for
from hvdcomp.arrays.types import Array, number_of_elements, wide_dtype
from hvdcomp.exchange.engine_bucket import Sums
from hvdcomp.policies.request import Request, Statistic


class AccumulatedGradients(Observer):
    """Sums of the gradients of several steps, by tensor name. The sums have at least single precision.

    Args:
        names: the names of the tensors whose norms and ratios are measured.
        level_errors: object that measures the errors of compressing the mean gradients.

    Attributes:
        sums: the sum of the gradients of each tensor that had a gradient, by tensor name.
    """

    measures: ClassVar[frozenset[Statistic]] = frozenset(
        {Statistic.NORMS, Statistic.MODEL_NORM, Statistic.MEAN_TO_STD, Statistic.LEVEL_TABLE}
    )

    def __init__(self, names: Sequence[str] = (), level_errors: LevelErrors | None = None) -> None:
        self._names = names
        self._level_errors = level_errors
        self.sums: dict[str, Array] = {}

    def add(self, gradients: Mapping[str, Array], factor: float, found_inf: Array | None = None) -> None:
        """Adds `factor` times the gradients of a step, unless the element `found_inf` is NaN."""
        if not gradients:
            return
        arrays = list(gradients.values())
        xp = arrays_for(arrays[0])
        if found_inf is None:
            found_inf = xp.zeros((1,), like=arrays[0])
        totals = xp.add_scaled(self._totals(gradients), arrays, factor, found_inf)
        self.sums.update(zip(gradients, totals, strict=True))

    def of_step(self, factor: float, of_results: bool = False) -> Sums:
        """The sums that the engine must accumulate in its step. The engine adds this rank's gradients, multiplied by
        `factor`. If `of_results` is True, it adds the aggregated gradients instead, also multiplied by `factor`."""
        add = lambda gradients, found_inf: self.add(gradients, factor, found_inf)  # noqa: E731
        return Sums(self._totals, add, factor, of_results)

    def _totals(self, gradients: Mapping[str, Array]) -> list[Array]:
        """The sums of these tensors. A missing sum is created as zeros."""
        missing = {name: gradient for name, gradient in gradients.items() if name not in self.sums}
        if missing:
            zeros = _zeros_like(missing)
            self.sums.update((name, zeros[name]) for name in missing)  # `model_norm` adds up norms in this order
        return [self.sums[name] for name in gradients]

    def statistics(self, request: Request, batches: int) -> dict[str, Any]:
        measure = {
            Statistic.NORMS: lambda: self.norms(self._names),
            Statistic.MODEL_NORM: self.model_norm,
            Statistic.MEAN_TO_STD: lambda: self.mean_to_std(self._names),
        }
        values = {statistic.value: value() for statistic, value in measure.items() if statistic in request.statistics}
        if Statistic.LEVEL_TABLE in request.statistics and self._level_errors is not None:
            values[Statistic.LEVEL_TABLE.value] = self._level_errors.of_sums(self.sums, request)
        return values

    def clear(self) -> None:
        self.sums.clear()

    def state(self, copy: Callable[[Array], Array]) -> dict[str, Array]:
        """The sums of this period so far, for a checkpoint."""
        return {name: copy(array) for name, array in self.sums.items()}

    def restore(self, state: Mapping[str, Array], place: Callable[[Array, str], Array]) -> None:
        """Restores the result of `state`."""
        self.sums = {name: place(array, name) for name, array in state.items()}

    def norms(self, names: Sequence[str]) -> dict[str, float]:
        """The 2-norm of each sum; 0.0 for a tensor without a sum. Waits for the device."""
        return self._numbers("norms", names)

    def mean_to_std(self, names: Sequence[str]) -> dict[str, float]:
        """For each sum, |mean| / standard deviation of its elements; NaN for a tensor without a sum. Waits for the
        device."""
        return self._numbers("mean_to_std", names, float("nan"))

    def model_norm(self) -> float:
        """The 2-norm of all sums as one vector. Waits for the device."""
        return math.hypot(*self.norms(list(self.sums)).values())

    def _numbers(self, function: str, names: Sequence[str], missing: float = 0.0) -> dict[str, float]:
        known = [name for name in names if name in self.sums]
        numbers = dict.fromkeys(names, missing)
        if known:
            xp = arrays_for(self.sums[known[0]])
            vector = getattr(xp, function)([self.sums[name] for name in known])
            numbers.update(zip(known, vector.tolist(), strict=True))
        return numbers


def _zeros_like(gradients: Mapping[str, Array]) -> dict[str, Array]:
    """Arrays of zeros with the shapes of the gradients, in single precision or wider. The arrays are views of one
    vector for each element type and device."""
    kinds: dict[tuple[str, str], list[str]] = {}
    for name, gradient in gradients.items():
        xp = arrays_for(gradient)
        kinds.setdefault((xp.dtype_name(gradient), xp.device(gradient)), []).append(name)
    zeros = {}
    for (dtype, _), names in kinds.items():
        xp = arrays_for(gradients[names[0]])
        shapes = [tuple(gradients[name].shape) for name in names]
        ends = [0, *accumulate(map(number_of_elements, shapes))]
        flat = xp.astype(xp.zeros((ends[-1],), like=gradients[names[0]]), wide_dtype(dtype))
        for name, shape, start, end in zip(names, shapes, ends[:-1], ends[1:], strict=True):
            zeros[name] = xp.reshape(flat[start:end], shape)
    return zeros
