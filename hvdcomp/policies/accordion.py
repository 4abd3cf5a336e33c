"""Accordion: little compression in critical regimes of the training, much outside them.

A regime is critical when the norm of the gradient accumulated over an epoch has changed much since it was last looked
at, or when the learning rate falls. The choice is made for each tensor by itself.
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
    """A norm to be compared with later; None for one that cannot be, because some gradient was not finite."""
    return float(norm) if math.isfinite(norm) else None


def is_critical(previous: float | None, current: float, eta: float) -> bool:
    """Whether |previous - current| / previous >= eta (Agarwal et al. 2021, section 4.1).

    What cannot be compared counts as critical, which costs bytes but no accuracy: no previous norm, one of zero, and
    norms that are not finite.
    """
    if previous is None or not previous > 0 or not math.isfinite(current):
        return True
    return abs(previous - current) / previous >= eta


@dataclass(frozen=True, kw_only=True)
class CriticalRegimes(AccumulatedGradientPolicy[State]):
    """Base of the two uses of Accordion's detector.

    Attributes:
        eta: the relative change of the norm from which on a regime is critical.
        interval: norms are compared at the end of every `interval` epochs, of which only the last one's gradients are
            accumulated.
        steps: instead of `interval`: compare at the end of every `steps` steps, and accumulate over all of these.
            Falling learning rates are then noticed at the end of these steps too.
    """

    eta: Eta = 0.5
    interval: Annotated[int, at_least(1)] = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_interval(self.interval, CriticalRegimes.interval)

    def compares_at(self, end: int) -> bool:
        """Whether norms are compared at the end of a period, the first one being number 1."""
        return bool(self.steps) or end % self.interval == 0


@dataclass(frozen=True)
class AccordionState:
    """The state of `Accordion`.

    Attributes:
        critical: by tensor name, whether its regime is.
        previous: by tensor name, the accumulated gradient's norm when it was last compared; None if there is none.
        ends: epochs (or windows of steps) that ended.
    """

    critical: Mapping[str, bool]
    previous: Mapping[str, float | None] = field(default_factory=dict)
    ends: int = 0


@dataclass(frozen=True, kw_only=True)
class Accordion(CriticalRegimes[AccordionState]):
    """Accordion for gradient compression (Agarwal et al. 2021, arXiv:2010.16248, algorithm 1).

    A tensor is at level `low` while its regime is critical, else at `high`. Every regime is critical until its norm has
    been compared for the first time. A learning rate that falls at the end of any epoch makes all regimes critical
    until norms are compared the next time; one that rises does nothing.

    Attributes:
        low: the level (ratio, rank, bits) of low compression, the larger number.
        high: the level of high compression.
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
                f"{self.name}: low={self.low},high={self.high} is not allowed; low is the level of low compression, "
                "so it must be the larger ratio, rank or number of bits"
            )

    def check(self, steps_per_epoch: int | None, compressor: Levelled) -> None:
        super().check(steps_per_epoch, compressor)
        for level in (self.low, self.high):
            compressor.at_level(level)

    def initial_state(self, tensors: Sequence[str]) -> AccordionState:
        return AccordionState(critical=dict.fromkeys(tensors, True), previous=dict.fromkeys(tensors))

    def request(self, state: AccordionState) -> Request:
        norms = {Statistic.NORMS} if self.compares_at(state.ends + 1) else set()
        # Every epoch, because of the learning rates.
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
