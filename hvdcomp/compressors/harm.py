"""Methods with which an optimizer learns badly, according to measured training runs
(`hvdcomp.compressors.evidence`)."""

from __future__ import annotations

from functools import cache

from hvdcomp.compressors import Compressor
from hvdcomp.compressors.evidence import Measured, measured_specs, worst_with
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.compressors.two_level import within
from hvdcomp.specs.levels import Level

HARMFUL = 0.05
"""An optimizer counts as learning badly with a method if the loss of quality, as in `Evidence`, is at least this
large."""


def is_measured(compressor: Compressor, optimizer: str) -> bool:
    """Whether any setting of a method was measured with an optimizer."""
    return bool(_settings(within(compressor).name, optimizer))


def harm_with(compressor: Compressor, optimizer: str, keeps: bool) -> Measured | None:
    """The measurement that shows that an optimizer learns badly with a method; None if there is no such measurement.

    A method with exchange "auto" is judged by the worse of the results with "gather" and "scatter", if both were
    measured. If this setting of the method was not measured, it is judged by the measured settings of the same method.
    Milder compression should lose no more quality than stronger compression. So the setting counts as harmful if all
    measured settings that compress at most as strongly as this setting lost at least `HARMFUL`. If all measured
    settings compress more strongly, each of them must have lost at least twice `HARMFUL`.

    Args:
        compressor: the method.
        optimizer: kind of the optimizer, as in `Evidence`.
        keeps: whether the method is used with error feedback. Measurements in which error feedback was used differently
            are ignored.
    """
    own = within(compressor)
    settings = [measured for measured in _settings(own.name, optimizer) if _uses_memory(measured.spec) == keeps]
    if (exact := worst_with(own, optimizer)) in settings:
        settings = [exact]
    no_harder = [measured for measured in settings if _is_no_harder(parse_compressor(measured.spec).level, own)]
    mildest = min(no_harder or settings, key=lambda measured: measured.lost, default=None)
    least = HARMFUL if no_harder else 2 * HARMFUL
    return mildest if mildest is not None and mildest.lost >= least else None


@cache
def _settings(method: str, optimizer: str) -> tuple[Measured, ...]:
    """A method's measured settings."""
    specs = [spec for spec in measured_specs() if spec.partition(":")[0] == method]
    found = (worst_with(parse_compressor(spec), optimizer) for spec in specs)
    return tuple(measured for measured in found if measured is not None)


def _uses_memory(spec: str) -> bool:
    return parse_compressor(spec).default_memory.keeps > 0


def _is_no_harder(level: Level | None, than: Compressor) -> bool:
    return level is None or than.level is None or level >= than.level
