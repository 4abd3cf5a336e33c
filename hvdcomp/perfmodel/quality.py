"""Which compressors the advice recommends, judged by the quality that they lost in hvdcomp's own trainings."""

from __future__ import annotations

from hvdcomp.compressors import OPTIMIZERS, Compressor, lost_with
from hvdcomp.compressors.evidence import DIVERGED
from hvdcomp.compressors.harm import HARMFUL

HARMLESS = 0.02
"""Largest relative loss of quality, in hvdcomp's own trainings, of a method that suits an optimizer."""

MUCH = 2 * HARMFUL
"""Relative loss of quality from which on a method is not recommended, if it loses as much with every one of
`OPTIMIZERS`."""


def is_harmless(compressor: Compressor, optimizer: str | None) -> bool:
    """Whether a method lost at most `HARMLESS` of quality in hvdcomp's own trainings; False if the method was not
    measured.

    Args:
        compressor: the method.
        optimizer: as in `hvdcomp.compressors.evidence.Evidence`; None for SGD and Adam.
    """
    lost = lost_with(compressor, optimizer)
    return lost is not None and lost <= HARMLESS


def why_not(compressor: Compressor, optimizer: str | None = None) -> str | None:
    """Why a method is not recommended, as a phrase; None if it may be recommended.

    With a known optimizer, a method may be recommended if it `is_harmless`. If the optimizer is unknown, a method may
    be recommended unless it was never trained, or lost `MUCH` with every one of the `OPTIMIZERS`: a method that works
    with only one of them may still work with the user's optimizer.

    Args:
        compressor: the method.
        optimizer: as in `hvdcomp.compressors.evidence.Evidence`; None if unknown.

    Example:
        >>> from hvdcomp.compressors.parsing import parse_compressor
        >>> why_not(parse_compressor("int4"), "Adam")
        >>> why_not(parse_compressor("powersgd:rank=3"))
        "not included in hvdcomp's own trainings"
    """
    asked = OPTIMIZERS if optimizer is None else (optimizer,)
    losses = {name: lost for name in asked if (lost := lost_with(compressor, name)) is not None}
    if not losses:
        return f"not included in hvdcomp's own trainings{'' if optimizer is None else f' with {optimizer}'}"
    if is_harmless(compressor, optimizer) if optimizer is not None else min(losses.values()) < MUCH:
        return None
    phrases = [f"{'diverged' if lost == DIVERGED else f'{lost:.1%}'} with {name}" for name, lost in losses.items()]
    return f"lost quality in hvdcomp's own trainings: {', '.join(phrases)}"
