"""What policies look at, gathered where the gradients are: sums of gradients.

Nothing here makes an accelerator wait but the functions that return numbers, once per decision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, ClassVar

from hvdcomp.adaptation.observer import Observer
from hvdcomp.arrays import arrays_for
from hvdcomp.arrays.types import Array, wide_dtype
from hvdcomp.exchange.bucket_step import Sums
from hvdcomp.policies.request import Statistic


class AccumulatedGradients(Observer):
    """Sums of the gradients of several steps, by tensor name, at least in single precision.

    Args:
        names: of the tensors that have norms and ratios of their own.

    Attributes:
        sums: by tensor name, of the tensors that had a gradient.
    """

    tells: ClassVar[frozenset[Statistic]] = frozenset({Statistic.NORMS, Statistic.MODEL_NORM, Statistic.MEAN_TO_STD})

    def __init__(self, names: Sequence[str] = ()) -> None:
        self._names = names
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

    def of_step(self, factor: float) -> Sums:
        """For the engine, which adds `factor` times the gradients of a step, where it has them in hand anyway."""
        return Sums(self._totals, lambda gradients, found_inf: self.add(gradients, factor, found_inf), factor)

    def _totals(self, gradients: Mapping[str, Array]) -> list[Array]:
        """The sums of tensors, made if they are not there."""
        if gradients.keys() - self.sums.keys():
            for name, gradient in gradients.items():  # in their order, which that of additions follows
                if name not in self.sums:
                    xp = arrays_for(gradient)
                    wide = wide_dtype(xp.dtype_name(gradient))
                    self.sums[name] = xp.astype(xp.zeros(gradient.shape, like=gradient), wide)
        return [self.sums[name] for name in gradients]

    def statistics(self, asked: Set[Statistic], batches: int) -> dict[str, Any]:
        measure = {
            Statistic.NORMS: lambda: self.norms(self._names),
            Statistic.MODEL_NORM: self.model_norm,
            Statistic.MEAN_TO_STD: lambda: self.mean_to_std(self._names),
        }
        return {each.value: tell() for each, tell in measure.items() if each in asked}

    def clear(self) -> None:
        self.sums.clear()

    def state(self, copy: Callable[[Array], Array]) -> dict[str, Array]:
        return {name: copy(array) for name, array in self.sums.items()}

    def restore(self, state: Mapping[str, Array], place: Callable[[Array, str], Array]) -> None:
        self.sums = {name: place(array, name) for name, array in state.items()}

    def norms(self, names: Sequence[str]) -> dict[str, float]:
        """The 2-norm of each sum; 0.0 for a tensor without one. Waits for the device."""
        return self._numbers("norms", names)

    def mean_to_std(self, names: Sequence[str]) -> dict[str, float]:
        """Of each sum, the magnitude of the mean over the standard deviation; NaN for a tensor without one."""
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
