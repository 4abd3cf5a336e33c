"""Measures the errors of compressing a mean gradient, at levels around each tensor's own level."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from hvdcomp.adaptation.plans import Plans
from hvdcomp.arrays import arrays_for
from hvdcomp.arrays.types import Array, dtype_bytes, number_of_elements
from hvdcomp.compressors import Compressor
from hvdcomp.compressors.contraction import require_bounded_residuals
from hvdcomp.errors import SpecError
from hvdcomp.exchange.engine import Engine
from hvdcomp.policies.request import LevelTable, Request
from hvdcomp.specs.levels import Level

# Significant digits of levels and of errors, which are in every line of the decision log.
_LEVEL_DIGITS, _ERROR_DIGITS = 4, 6


class LevelErrors:
    """Error and bytes of several levels of each tensor.

    Every tensor is compressed by its own method. Nothing is sent, and no state changes.

    Args:
        plans: the plans, with the tensors whose level is decided.
    """

    def __init__(self, plans: Plans) -> None:
        self._plans = plans
        self._engine = plans.engine
        self._names = plans.names
        self._around: tuple[float, ...] = ()
        # For `_around`, made once, because previews are fastest for compressors that they have seen.
        self._levels: list[dict[str, Level]] = []
        self._compressors: list[dict[str, Compressor]] = []
        self._bytes: dict[str, dict[Level, int]] = {}
        self._own_bytes: dict[str, int] = {}  # all tensors, those without a level included
        self._dense_bytes = 0

    def of_sums(self, sums: Mapping[str, Array], request: Request) -> LevelTable:
        """The table of errors and bytes. Waits for the device.

        Args:
            sums: sums of the gradients over the steps that `request.period` accumulates, by tensor name.
            request: the policy's request.
        """
        self._look_around(request.around)
        period = request.period
        steps = max(1, period.last or period.steps) if period else 1
        means = {name: sums[name] / steps for name in self._bytes if name in sums}
        errors: dict[str, dict[Level, float]] = {name: {} for name in means}
        units, norm = _root_mean_squares(means) if request.scaled else (dict.fromkeys(means, 1.0), None)
        if means:
            xp, context = arrays_for(next(iter(means.values()))), self._engine.context("")
            for levels, compressors in zip(self._levels, self._compressors, strict=True):
                xs = {name: means[name] for name in levels if name in means}
                lost = self._plans.previews.lost_alone(xp, xs, compressors, context).numbers()
                for name, energy in lost.items():
                    # Rounding may make a sum of differences negative. Non-finite energies become NaN.
                    error = math.sqrt(max(0.0, energy)) if math.isfinite(energy) else math.nan
                    errors[name][levels[name]] = _rounded(error / units[name])
        return LevelTable(
            errors,
            {name: self._bytes[name] for name in means},
            {name: self._levels[0][name] for name in means},
            other_bytes=sum(sent for name, sent in self._own_bytes.items() if name not in means),
            dense_bytes=self._dense_bytes,
            norm=norm,
        )

    def _look_around(self, around: tuple[float, ...]) -> None:
        """Makes the compressors of all levels, each level of a tensor once, and its own level first."""
        if around == self._around:
            return
        self._around, self._levels, self._compressors, self._bytes = around, [], [], {}
        self._dense_bytes = sum(tensor.size * dtype_bytes(tensor.dtype) for tensor in self._engine.tensors.values())
        own = self._plans.own()
        self._own_bytes = {name: bytes_of(self._engine, name, compressor) for name, compressor in own.items()}
        for levels in levels_around(self._engine, self._names, around):
            compressors: dict[str, Compressor] = {}
            for name, level in levels.items():
                tensor = self._engine.tensors[name]
                method = self._engine.compressor.method_for(tensor)
                compressors[name] = self._engine.planner.choose(method.at_level(level), tensor)
                self._bytes.setdefault(name, {})[level] = bytes_of(self._engine, name, compressors[name])
            self._levels.append(levels)
            self._compressors.append(compressors)


def _root_mean_squares(means: Mapping[str, Array]) -> tuple[dict[str, float], float]:
    """The root mean square of each tensor's elements, and the sum of the tensors' 2-norms in these units.

    It is 1 for a tensor of zeros, whose errors are 0 in any unit, and NaN where a norm is not finite, which single
    precision may exceed.
    """
    if not means:
        return {}, 0.0
    vector = arrays_for(next(iter(means.values()))).norms(list(means.values()))
    norms = {name: norm if math.isfinite(norm) else math.nan for name, norm in zip(means, vector.tolist(), strict=True)}
    units = {name: norm / math.sqrt(number_of_elements(means[name].shape)) or 1.0 for name, norm in norms.items()}
    return units, _rounded(math.fsum(norm / units[name] for name, norm in norms.items()))


def _rounded(error: float) -> float:
    return float(f"{error:.{_ERROR_DIGITS}g}")


def bytes_of(engine: Engine, name: str, compressor: Compressor) -> int:
    """Bytes that a rank sends for a tensor in a step."""
    tensor, ranks = engine.tensors[name], engine.communicator.world_size
    return compressor.payload_bytes(tensor.shape, dtype=tensor.dtype, ranks=ranks)


def levels_around(engine: Engine, names: Iterable[str], around: Iterable[float]) -> list[dict[str, Level]]:
    """The tensors' levels nearest to each of several factors of their own levels.

    Each level of a tensor is given once. Levels that its method does not have are left out.

    Args:
        engine: the engine.
        names: names of the tensors whose level is decided.
        around: the factors; in the result the own levels come first.
    """
    several: list[dict[str, Level]] = []
    for factor in (1.0, *(other for other in around if other != 1.0)):
        levels: dict[str, Level] = {}
        for name in names:
            level = _level_at(engine, engine.compressor.method_for(engine.tensors[name]), factor)
            if level is not None and not any(level == chosen.get(name) for chosen in several):
                levels[name] = level
        several.append(levels)
    return several


def _level_at(engine: Engine, method: Compressor, factor: float) -> Level | None:
    """The level of a method nearest to `factor` times its own; None if it has no such level.

    A level must work with this number of ranks and keep residuals bounded.
    """
    own = method.level
    if own is None or factor == 1.0:
        return own
    level = round(own * factor) if isinstance(own, int) else float(f"{own * factor:.{_LEVEL_DIGITS}g}")
    least = method.least_level(engine.communicator.world_size)
    if least is not None and level < least:
        return None
    try:
        require_bounded_residuals(method.at_level(level), engine.memory)
    except SpecError:
        return None
    return level
