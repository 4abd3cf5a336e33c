"""Accordion: compresses little in critical regimes of the training, and more outside of critical regimes.

A regime is critical when the norm of the gradient accumulated over an epoch has changed much since the last comparison,
or when the learning rate falls. Each tensor has its own regime.
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
    """A norm for later comparison; None if it is not finite."""
    return float(norm) if math.isfinite(norm) else None


def is_critical(previous: float | None, current: float, eta: float) -> bool:
    """Whether |previous - current| / previous >= eta (Agarwal et al. 2021, section 4.1).

    If norms cannot be compared, the regime counts as critical, which costs bytes but no accuracy: without a previous
    norm, with a previous norm of zero, or with norms that are not finite.
    """
    if previous is None or not previous > 0 or not math.isfinite(current):
        return True
    return abs(previous - current) / previous >= eta


@dataclass(frozen=True, kw_only=True)
class CriticalRegimes(AccumulatedGradientPolicy[State]):
    """Base of the two uses of Accordion's detector.

    Attributes:
        eta: the relative change of the norm from which a regime is critical.
        interval: norms are compared at the end of every `interval` epochs; gradients of the last epoch are accumulated.
        steps: instead of `interval`: norms are compared at the end of every `steps` steps, over which gradients are
            accumulated. Falling learning rates are then noticed at the end of these steps too.
    """

    eta: Eta = 0.5
    interval: Annotated[int, at_least(1)] = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_interval(self.interval, CriticalRegimes.interval)

    def compares_at(self, end: int) -> bool:
        """Whether norms are compared at the end of period number `end`, counted from 1."""
        return bool(self.steps) or end % self.interval == 0


@dataclass(frozen=True)
class AccordionState:
    """The state of `Accordion`.

    Attributes:
        critical: whether the tensor's regime is critical, by tensor name.
        previous: norm of the accumulated gradient at the last comparison, by tensor name; None before the first.
        ends: number of epochs (or windows of steps) that ended.
    """

    critical: Mapping[str, bool]
    previous: Mapping[str, float | None] = field(default_factory=dict)
    ends: int = 0


@dataclass(frozen=True, kw_only=True)
class Accordion(CriticalRegimes[AccordionState]):
    """Accordion for gradient compression (Agarwal et al. 2021, arXiv:2010.16248, algorithm 1).

    A tensor has level `low` while its regime is critical, else `high`. Every regime is critical until its norm was
    compared for the first time. A learning rate that falls at the end of any epoch makes all regimes critical until the
    next comparison of norms; a rising one changes nothing.

    Attributes:
        low: the level (ratio, rank, bits) of low compression, the larger number.
        high: the level of high compression.

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
        # A request every epoch, because learning rates may fall.
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
