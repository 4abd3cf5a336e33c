"""Refuses pairs of compressor and memory whose residuals would grow without end.

Error feedback sends later what was not sent at once. It is for contractions: what a step leaves over must have less
energy than what was to be sent, E|x - C(x)|^2 < |x|^2 (Karimireddy et al. 2019, arXiv:1901.09847, assumption A). Else
the next step has more to send and leaves over still more. Some unbiased methods have such an error, their variance;
they need no error feedback.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hvdcomp.compressors import Compressor, Level
from hvdcomp.compressors.routing import Router
from hvdcomp.errors import SpecError
from hvdcomp.memory import Memory
from hvdcomp.policies import LevelSchedule, Policy
from hvdcomp.policies.decisions import Factors, MultiLevel, Probe

# The hardest level is asked for with a factor and a tensor beyond all that is in use.
_HARDEST_FACTOR = 1e12
_LARGEST_TENSOR = (2**20, 2**20)


def require_bounded_residuals(compressor: Compressor, memory: Memory | None) -> None:
    """Raises SpecError if residuals would grow without end.

    Args:
        compressor: also a router, whose compressors are all looked at.
        memory: as the user gave it; None for each compressor's own. A momentum correction that is one compressor's own
            is that of all tensors.
    """
    methods = _methods(compressor)
    if memory is None:
        memory = next((each.default_memory for each in methods if each.default_memory.is_momentum), None)
    if memory is None:
        return
    for method in methods:
        if method.variance * memory.keeps**2 >= 1:
            raise SpecError(
                f"{method} does not go with memory={memory}: the method is unbiased, and its error can have "
                f"{method.variance:.3g} times the energy of what is to be sent, so that residuals would grow without "
                "end. Leave memory at its default (an unbiased method needs none, memory=none), raise the level until "
                "that number is below 1, or use a biased method (randomk without unbiased, topk, powersgd)"
            )


def check_policy(
    policy: LevelSchedule | Policy[Any], steps_per_epoch: int | None, compressor: Compressor, memory: Memory | None
) -> None:
    """The policy's own `check`, and `require_bounded_residuals` of all levels that it may set.

    Raises:
        SpecError: if the policy cannot work with this compressor, memory or run.
    """
    policy.check(steps_per_epoch, _Watched(compressor, memory))
    if isinstance(policy, Policy) and isinstance(
        policy.decision(policy.initial_state(())), Factors | MultiLevel | Probe
    ):  # any level may come of a compression factor
        for method in _methods(compressor):
            hardest = method.at_level(method.level_for(_HARDEST_FACTOR, _LARGEST_TENSOR))
            require_bounded_residuals(hardest, memory)


@dataclass(frozen=True)
class _Watched:
    """What a policy sees of a compressor; the levels that it asks for are looked at."""

    compressor: Compressor
    memory: Memory | None

    @property
    def level(self) -> Level | None:
        return self.compressor.level

    def at_level(self, level: Level | None) -> Compressor:
        chosen = self.compressor.at_level(level)
        require_bounded_residuals(chosen, self.memory)
        return chosen


def _methods(compressor: Compressor) -> list[Compressor]:
    leaves: Iterable[Compressor] = compressor.leaves() if isinstance(compressor, Router) else (compressor,)
    return list(leaves)
