"""Accordion compresses weakly in critical regimes of a training run, and strongly in all other phases.

A regime is critical if the norm of the gradient, accumulated over an epoch, has changed a lot since the last
comparison. The regime is also critical if the learning rate falls. Each tensor has its own regime.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from hvdcomp.errors import SpecError
from hvdcomp.policies.base import AccumulatedGradientPolicy, SomeLevel, State
from hvdcomp.policies.decisions import Levels
from hvdcomp.policies.request import Request, Statistic, Statistics
from hvdcomp.policies.schedules import Levelled
from hvdcomp.specs.described import at_least, number

Eta = Annotated[float, number(lambda eta: eta > 0, "a number above 0")]


def finite(norm: float) -> float | None:
    """Returns a norm for a later comparison, or None if the norm is not finite."""
    return float(norm) if math.isfinite(norm) else None


def is_critical(previous: float | None, current: float, eta: float) -> bool:
    """Whether |previous - current| / previous >= eta (Agarwal et al. 2021, section 4.1).

    If norms cannot be compared, the regime counts as critical, because this costs bytes but no accuracy. Norms cannot
    be compared if there is no previous norm, if the previous norm is zero, or if a norm is not finite.
    """
    if previous is None or not previous > 0 or not math.isfinite(current):
        return True
    return abs(previous - current) / previous >= eta


@dataclass(frozen=True, kw_only=True)
class CriticalRegimes(AccumulatedGradientPolicy[State]):
    """Base of the two policies that use Accordion's detector of critical regimes.

    Attributes:
        eta: a regime is critical if the norm changes by at least this share.
        interval: number of epochs from one comparison of norms to the next. The gradients of the last epoch before the
            comparison are accumulated.
        steps: number of steps from one comparison of norms to the next, instead of `interval`. The gradients of these
            steps are accumulated. With `steps`, a fall of the learning rate is also noticed only at these times.
    """

    eta: Eta = 0.5
    interval: Annotated[int, at_least(1)] = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_interval(self.interval, CriticalRegimes.interval)

    def compares_at(self, end: int) -> bool:
        """Whether norms are compared at the end of period number `end`. Periods are counted from 1."""
        return bool(self.steps) or end % self.interval == 0


@dataclass(frozen=True)
class AccordionState:
    """The state that `Accordion` keeps from one decision to the next.

    Attributes:
        critical: whether the regime of each tensor is critical, by tensor name.
        previous: the norm of each tensor's accumulated gradient at the last comparison, by tensor name; None before the
            first comparison.
        ends: the number of epochs (or windows of steps) that have ended.
    """

    critical: Mapping[str, bool]
    previous: Mapping[str, float | None] = field(default_factory=dict)
    ends: int = 0


@dataclass(frozen=True, kw_only=True)
class Accordion(CriticalRegimes[AccordionState]):
    """Accordion for gradient compression (Agarwal et al. 2021, arXiv:2010.16248, algorithm 1).

    A tensor has level `low` while its regime is critical, and level `high` otherwise. Every regime is critical until
    its norm has been compared for the first time. If the learning rate falls at the end of an epoch, all regimes are
    critical until the next comparison of norms. A rising learning rate changes nothing.

    Attributes:
        low: the level (ratio, rank, bits) of weak compression. `low` is the larger number.
        high: the level of strong compression.

    Example:
        >>> str(Accordion(low=4, high=1))
        'accordion:low=4,high=1'
    """

    low: SomeLevel
    high: SomeLevel

    name: ClassVar[str] = "accordion"
    examples: ClassVar[tuple[str, ...]] = ("accordion:low=4,high=1",)
    state_type: ClassVar[type] = AccordionState

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.low > self.high:
            raise SpecError(
                f"{self.name}: low={self.low},high={self.high} is not allowed: low is the level of low compression, so "
                "it must be larger than high (a larger ratio, rank or number of bits compresses less)"
            )

    def check(self, steps_per_epoch: int | None, compressor: Levelled) -> None:
        super().check(steps_per_epoch, compressor)
        for name, level in (("low", self.low), ("high", self.high)):
            try:
                compressor.at_level(level)
            except SpecError as error:
                raise SpecError(f"{self.name}: {name}={level} is not a level of the compressor: {error}") from None

    def initial_state(self, tensors: Sequence[str]) -> AccordionState:
        return AccordionState(critical=dict.fromkeys(tensors, True), previous=dict.fromkeys(tensors))

    def request(self, state: AccordionState) -> Request:
        norms = {Statistic.NORMS} if self.compares_at(state.ends + 1) else set()
        # There is a request in every epoch, because learning rates may fall.
        return self.request_after(1, {Statistic.LEARNING_RATES} | norms, ever={Statistic.NORMS})

    def decision(self, state: AccordionState) -> Levels:
        return Levels({name: self.low if critical else self.high for name, critical in state.critical.items()})

    def update(self, state: AccordionState, statistics: Statistics) -> AccordionState:
        critical, previous = state.critical, state.previous
        ends = state.ends + 1
        if self.compares_at(ends):
            assert statistics.norms is not None
            norms = self.of_tensors(statistics.norms, critical, "norms")
            critical = {name: is_critical(previous[name], norms[name], self.eta) for name in critical}
            previous = {name: finite(norms[name]) for name in critical}
        assert statistics.learning_rates is not None
        if statistics.learning_rates.fall:
            critical = dict.fromkeys(critical, True)
        return AccordionState(critical, previous, ends)
