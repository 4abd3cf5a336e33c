"""Which methods are known to let an optimizer learn badly, by measured trainings (`hvdcomp.compressors.evidence`)."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from hvdcomp.compressors import Compressor
from hvdcomp.compressors.evidence import lost_with, measured_specs
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.compressors.two_level import within
from hvdcomp.specs.levels import Level

HARMFUL = 0.05
"""The loss of quality, as in `Evidence`, from which on a method is said to let an optimizer learn badly."""


class Measured(NamedTuple):
    """A measured setting of a method, and its loss as in `Evidence`."""

    spec: str
    lost: float


def harm_with(compressor: Compressor, optimizer: str, keeps: bool) -> Measured | None:
    """The measurement by which a method is said to let an optimizer learn badly; None if it is not.

    A setting that was not measured is judged by measured settings of its method. Those that compress no harder lose no
    more: the mildest of them must lose `HARMFUL`. If all of them compress harder, the mildest must lose twice as much.

    Args:
        compressor: the method.
        optimizer: as in `Evidence`.
        keeps: whether the method is used with error feedback: only settings that were measured so count.
    """
    own = within(compressor)
    settings = {spec: lost for spec, lost in _settings(own.name, optimizer).items() if _uses_memory(spec) == keeps}
    if str(own) in settings:
        settings = {str(own): settings[str(own)]}
    no_harder = [Measured(*item) for item in settings.items() if _is_no_harder(parse_compressor(item[0]).level, own)]
    candidates = no_harder or [Measured(*item) for item in settings.items()]
    mildest = min(candidates, key=lambda measured: measured.lost, default=None)
    least = HARMFUL if no_harder else 2 * HARMFUL
    return mildest if mildest is not None and mildest.lost >= least else None


@cache
def _settings(method: str, optimizer: str) -> dict[str, float]:
    """The losses of a method's measured settings, by spec."""
    losses = {
        spec: lost_with(parse_compressor(spec), optimizer)
        for spec in measured_specs()
        if spec.partition(":")[0] == method
    }
    return {spec: lost for spec, lost in losses.items() if lost is not None}


def _uses_memory(spec: str) -> bool:
    return parse_compressor(spec).default_memory.keeps > 0


def _is_no_harder(level: Level | None, than: Compressor) -> bool:
    return level is None or than.level is None or level >= than.level
