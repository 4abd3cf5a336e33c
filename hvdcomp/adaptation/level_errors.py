"""The errors of compressing a mean gradient, at several levels around the own level of each tensor. The own level is
the level that the compressor of the training run has for this tensor.

If the relative error of a method is known in advance (`Compressor.known_error`), the error is computed from the norm of
the mean. For all other methods the error is measured by compressing the mean at every level.
"""

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

# Significant digits of levels and of errors; few, because every line of the decision log has them.
_LEVEL_DIGITS, _ERROR_DIGITS = 4, 6


class LevelErrors:
    """Measures the error and the bytes of several levels of each tensor, with the tensor's own method.

    Nothing is sent, and no state changes.

    Args:
        plans: object that creates plans, and has the names of the tensors whose level the policy decides.
    """

    def __init__(self, plans: Plans) -> None:
        self._plans = plans
        self._engine = plans.engine
        self._names = plans.names
        self._around: tuple[float, ...] = ()
        # The compressors for `_around`. They are made once, because previews are fastest with compressors that were
        # used before.
        self._levels: list[dict[str, Level]] = []
        self._known: list[dict[str, float]] = []  # the errors of tensors whose errors are known in advance
        self._compressors: list[dict[str, Compressor]] = []  # the compressors of all other tensors
        self._bytes: dict[str, dict[Level, int]] = {}
        self._own_bytes: dict[str, int] = {}  # the bytes of all tensors, including tensors without a level
        self._dense_bytes = 0

    def of_sums(self, sums: Mapping[str, Array], request: Request) -> LevelTable:
        """The table of errors and bytes. Waits for the device.

        Args:
            sums: the sums of the gradients over the steps that `request.period` accumulates, by tensor name.
            request: the policy's request.
        """
        self._make_levels(request.around)
        period = request.period
        steps = max(1, period.last or period.steps) if period else 1
        names = [name for name in self._bytes if name in sums]
        norms = _norms({name: sums[name] for name in names}, steps) if request.scaled or any(self._known) else {}
        units, norm = _root_mean_squares(norms, sums) if request.scaled else (dict.fromkeys(names, 1.0), None)
        measured = {name for compressors in self._compressors for name in compressors}
        means = {name: sums[name] / steps for name in names if name in measured}
        errors: dict[str, dict[Level, float]] = {name: {} for name in names}
        for levels, known, compressors in zip(self._levels, self._known, self._compressors, strict=True):
            energies = {name: share * norms[name] * norms[name] for name, share in known.items() if name in norms}
            energies |= self._lost({name: means[name] for name in compressors if name in means}, compressors)
            for name, energy in energies.items():
                # Rounding may make a sum of differences negative. Non-finite energies become NaN.
                error = math.sqrt(max(0.0, energy)) if math.isfinite(energy) else math.nan
                errors[name][levels[name]] = _rounded(error / units[name])
        return LevelTable(
            errors,
            {name: self._bytes[name] for name in names},
            {name: self._levels[0][name] for name in names},
            other_bytes=sum(sent for name, sent in self._own_bytes.items() if name not in errors),
            dense_bytes=self._dense_bytes,
            norm=norm,
        )

    def _lost(self, xs: Mapping[str, Array], compressors: Mapping[str, Compressor]) -> dict[str, float]:
        """The measured ||x - C(x)||^2 of each array, by name."""
        if not xs:
            return {}
        xp, context = arrays_for(next(iter(xs.values()))), self._engine.context("")
        return self._plans.previews.lost_alone(xp, xs, compressors, context).numbers()

    def _make_levels(self, around: tuple[float, ...]) -> None:
        """Makes the compressors of all levels. Each level of a tensor occurs once, and the tensor's own level is
        first."""
        if around == self._around:
            return
        self._around, self._levels, self._known, self._compressors, self._bytes = around, [], [], [], {}
        self._dense_bytes = sum(tensor.size * dtype_bytes(tensor.dtype) for tensor in self._engine.tensors.values())
        own = self._plans.own()
        self._own_bytes = {name: bytes_of(self._engine, name, compressor) for name, compressor in own.items()}
        for levels in levels_around(self._engine, self._names, around):
            known: dict[str, float] = {}
            compressors: dict[str, Compressor] = {}
            for name, level in levels.items():
                tensor = self._engine.tensors[name]
                method = self._engine.compressor.method_for(tensor)
                compressor = self._engine.planner.choose(method.at_level(level), tensor)
                self._bytes.setdefault(name, {})[level] = bytes_of(self._engine, name, compressor)
                if compressor.known_error is None:
                    compressors[name] = compressor
                else:
                    known[name] = compressor.known_error
            self._levels.append(levels)
            self._known.append(known)
            self._compressors.append(compressors)


def _norms(sums: Mapping[str, Array], steps: int) -> dict[str, float]:
    """The 2-norm of each tensor's mean over the steps; NaN if the norm is not finite or too large for single precision.
    Waits for the device."""
    if not sums:
        return {}
    vector = arrays_for(next(iter(sums.values()))).norms(list(sums.values()))
    norms = zip(sums, vector.tolist(), strict=True)
    return {name: norm / steps if math.isfinite(norm) else math.nan for name, norm in norms}


def _root_mean_squares(norms: Mapping[str, float], like: Mapping[str, Array]) -> tuple[dict[str, float], float]:
    """The root mean square of each tensor's elements; and the sum over all tensors of the 2-norm divided by the root
    mean square.

    For a tensor of zeros, 1 is returned as the root mean square, because errors are divided by this number. If the norm
    of a tensor is NaN, its root mean square is NaN too.

    Args:
        norms: the 2-norm of each tensor.
        like: for each tensor, an array of the same shape.
    """
    units = {name: norm / math.sqrt(number_of_elements(like[name].shape)) or 1.0 for name, norm in norms.items()}
    return units, _rounded(math.fsum(norm / units[name] for name, norm in norms.items()))


def _rounded(error: float) -> float:
    return float(f"{error:.{_ERROR_DIGITS}g}")


def bytes_of(engine: Engine, name: str, compressor: Compressor) -> int:
    """The number of bytes that a rank sends for a tensor in a step."""
    tensor, ranks = engine.tensors[name], engine.communicator.world_size
    return compressor.payload_bytes(tensor.shape, dtype=tensor.dtype, ranks=ranks)


def levels_around(engine: Engine, names: Iterable[str], around: Iterable[float]) -> list[dict[str, Level]]:
    """For each factor, the level of each tensor that is nearest to the factor times the tensor's own level.

    If several factors give a tensor the same level, only the first of these factors lists the tensor. A level that the
    tensor's method does not allow is omitted.

    Args:
        engine: the engine of the training run.
        names: names of the tensors whose level is decided.
        around: the factors by which the own levels are multiplied. The result begins with factor 1, and then has the
            other factors in the given order.
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
    """The level of a method that is nearest to `factor` times its own level; None if the method has no such level.

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
