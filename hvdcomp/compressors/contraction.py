"""Refuses pairs of compressor and memory whose residuals would grow without end.

Error feedback sends later what was not sent at once. It is for contractions: what a step leaves over must have less
energy than what was to be sent, E|x - C(x)|^2 < |x|^2 (Karimireddy et al. 2019, arXiv:1901.09847, assumption A). Else
the next step has more to send and leaves over still more. Some unbiased methods have such an error, their variance;
they need no error feedback.
"""

from __future__ import annotations

from collections.abc import Iterable

from hvdcomp.compressors.base import Compressor
from hvdcomp.compressors.memory import Memory
from hvdcomp.errors import SpecError


def require_bounded_residuals(compressor: Compressor, memory: Memory | None) -> None:
    """Raises SpecError if residuals would grow without end.

    Args:
        compressor: also a router, whose compressors are all looked at.
        memory: as the user gave it; None for each compressor's own. A momentum correction that is one compressor's own
            is that of all tensors.
    """
    methods = list(compressor.leaves())
    if memory is None:
        memory = next((each.default_memory for each in methods if each.default_memory.is_momentum), None)
    if memory is None:
        return
    for method in methods:
        if _grows(method, memory):
            raise SpecError(
                f"{method} does not go with memory={memory}: the method is unbiased, and its error can have "
                f"{method.variance:.3g} times the energy of what is to be sent, so that residuals would grow without "
                "end. Leave memory at its default (an unbiased method needs none, memory=none), raise the level until "
                "that number is below 1, or use a biased method (randomk without unbiased, topk, powersgd)"
            )


def require_bounded_turns(compressors: Iterable[Compressor]) -> None:
    """Raises SpecError if residuals would grow without end where compressors with their own memories take turns.

    What one method has kept is still to be sent when another one follows, and what that one does not send of it is kept
    as well. So error feedback, once begun, goes on whatever follows.
    """
    methods = [method for compressor in compressors for method in compressor.leaves()]
    for keeper in methods:
        for method in methods:
            if _grows(method, keeper.default_memory):
                raise SpecError(
                    f"{method} and {keeper} cannot take turns: what {keeper} has not sent is sent later, also when "
                    f"{method} follows, whose error can have {method.variance:.3g} times the energy of what is to be "
                    "sent, so that residuals would grow without end. Leave out one of the two, or raise the level of "
                    f"{method.name} until that number is below 1"
                )


def can_take_turns(compressors: Iterable[Compressor]) -> bool:
    """Whether `require_bounded_turns` allows it."""
    try:
        require_bounded_turns(compressors)
    except SpecError:
        return False
    return True


def _grows(method: Compressor, memory: Memory) -> bool:
    return method.variance * memory.keeps**2 >= 1
