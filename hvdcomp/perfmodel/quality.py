"""Decides which compressors the advice may recommend, by the quality that they lost in hvdcomp's own training runs."""

from __future__ import annotations

from hvdcomp.compressors import OPTIMIZERS, Compressor, lost_with
from hvdcomp.compressors.evidence import DIVERGED
from hvdcomp.compressors.harm import HARMFUL

HARMLESS = 0.02
"""A method suits an optimizer if it lost at most this share of quality in hvdcomp's own training runs."""

MUCH = 2 * HARMFUL
"""A method is never recommended if it lost at least this share of quality with every one of the `OPTIMIZERS`."""


def is_harmless(compressor: Compressor, optimizer: str | None) -> bool:
    """Whether a method lost at most `HARMLESS` of quality in hvdcomp's own training runs; False if the method was not
    measured.

    Args:
        compressor: the method.
        optimizer: kind of the optimizer, as in `hvdcomp.compressors.evidence.Evidence`; None for the larger of the
            losses with SGD and with Adam.
    """
    lost = lost_with(compressor, optimizer)
    return lost is not None and lost <= HARMLESS


def why_not(compressor: Compressor, optimizer: str | None = None) -> str | None:
    """The reason why a method is not recommended, as a phrase; None if it may be recommended.

    If the optimizer is known, a method may be recommended if it suits this optimizer (`is_harmless`). If the optimizer
    is unknown, a method may be recommended if it lost less than `MUCH` with at least one of the `OPTIMIZERS`, because
    this method may also suit the user's optimizer.

    Args:
        compressor: the method.
        optimizer: kind of the optimizer, as in `hvdcomp.compressors.evidence.Evidence`; None if unknown.

    Example:
        >>> from hvdcomp.compressors.parsing import parse_compressor
        >>> why_not(parse_compressor("int4"), "Adam")
        >>> why_not(parse_compressor("powersgd:rank=3"))
        "not included in hvdcomp's own training runs"
    """
    asked = OPTIMIZERS if optimizer is None else (optimizer,)
    losses = {name: lost for name in asked if (lost := lost_with(compressor, name)) is not None}
    if not losses:
        return f"not included in hvdcomp's own training runs{'' if optimizer is None else f' with {optimizer}'}"
    if is_harmless(compressor, optimizer) if optimizer is not None else min(losses.values()) < MUCH:
        return None
    phrases = [f"{'diverged' if lost == DIVERGED else f'{lost:.1%}'} with {name}" for name, lost in losses.items()]
    return f"lost quality in hvdcomp's own training runs: {', '.join(phrases)}"
