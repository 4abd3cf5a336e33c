"""Measures what compression loses of a mean gradient, at levels around that which each tensor has by itself."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from hvdcomp.adaptation.plans import Plans
from hvdcomp.arrays import arrays_for
from hvdcomp.arrays.types import Array, dtype_bytes
from hvdcomp.compressors import Compressor
from hvdcomp.compressors.contraction import require_bounded_residuals
from hvdcomp.errors import SpecError
from hvdcomp.exchange.engine import Engine
from hvdcomp.policies.request import LevelTable, Request
from hvdcomp.specs.levels import Level

# Of a level, and of an error, which is none more exact in float32: each stands in every line of the decision log.
_LEVEL_DIGITS, _ERROR_DIGITS = 4, 6


class LevelErrors:
    """What each of several levels loses of each tensor, and how many bytes it sends.

    Every tensor is compressed by its own method, whatever the others have. Nothing is sent, and nothing changes.

    Args:
        plans: of the tensors whose level is decided.
    """

    def __init__(self, plans: Plans) -> None:
        self._plans = plans
        self._engine = plans.engine
        self._names = plans.names
        self._around: tuple[float, ...] = ()
        # Of `_around`, made when they are first asked for: previews are quickest for compressors that they know.
        self._levels: list[dict[str, Level]] = []
        self._compressors: list[dict[str, Compressor]] = []
        self._bytes: dict[str, dict[Level, int]] = {}
        self._own_bytes: dict[str, int] = {}  # of all tensors, also of those without a level
        self._dense_bytes = 0

    def of_sums(self, sums: Mapping[str, Array], request: Request) -> LevelTable:
        """Errors and bytes. Waits for the device.

        Args:
            sums: of the gradients of the steps that `request.period` accumulates, by tensor name.
        """
        self._look_around(request.around)
        period = request.period
        steps = max(1, period.last or period.steps) if period else 1
        means = {name: sums[name] / steps for name in self._bytes if name in sums}
        errors: dict[str, dict[Level, float]] = {name: {} for name in means}
        if means:
            xp, context = arrays_for(next(iter(means.values()))), self._engine.context("")
            for levels, compressors in zip(self._levels, self._compressors, strict=True):
                xs = {name: means[name] for name in levels if name in means}
                lost = self._plans.previews.lost_alone(xp, xs, compressors, context).numbers()
                for name, energy in lost.items():
                    # Rounding may make a sum of differences negative. What is not finite is told as NaN.
                    error = math.sqrt(max(0.0, energy)) if math.isfinite(energy) else math.nan
                    errors[name][levels[name]] = float(f"{error:.{_ERROR_DIGITS}g}")
        return LevelTable(
            errors,
            {name: self._bytes[name] for name in means},
            {name: self._levels[0][name] for name in means},
            other_bytes=sum(sent for name, sent in self._own_bytes.items() if name not in means),
            dense_bytes=self._dense_bytes,
        )

    def _look_around(self, around: tuple[float, ...]) -> None:
        """Makes the compressors of all levels, each level of a tensor once, its own first."""
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


def bytes_of(engine: Engine, name: str, compressor: Compressor) -> int:
    """The bytes that a rank sends of a tensor in a step."""
    tensor, ranks = engine.tensors[name], engine.communicator.world_size
    return compressor.payload_bytes(tensor.shape, dtype=tensor.dtype, ranks=ranks)


def levels_around(engine: Engine, names: Iterable[str], around: Iterable[float]) -> list[dict[str, Level]]:
    """For each of some factors the levels that are nearest to so many times the tensors' own.

    Each level of a tensor is there once. Levels that its method does not have are left out.

    Args:
        names: of the tensors whose level is decided.
        around: the factors; the own levels, those at 1.0, come first.
    """
    several: list[dict[str, Level]] = []
    for factor in (1.0, *(each for each in around if each != 1.0)):
        levels: dict[str, Level] = {}
        for name in names:
            level = _level_at(engine, engine.compressor.method_for(engine.tensors[name]), factor)
            if level is not None and not any(level == others.get(name) for others in several):
                levels[name] = level
        several.append(levels)
    return several


def _level_at(engine: Engine, method: Compressor, factor: float) -> Level | None:
    """The level of a method that is nearest to so many times its own; None where it has none there.

    A method has a level only if this number of ranks can use it, and residuals stay bounded with it.
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
