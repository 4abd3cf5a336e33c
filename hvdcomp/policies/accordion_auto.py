"""Accordion that finds its two levels by itself, and for each tensor other ones.

While the training begins, rank 0 compresses some gradients to several compression factors, to see how much each keeps
of each tensor and what it costs. From that the factors of low and high compression are chosen, once. No paper
describes this: that of Accordion names it as future work.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Annotated, ClassVar

from hvdcomp.errors import SpecError
from hvdcomp.policies.accordion import AccordionState, CriticalTensors
from hvdcomp.policies.base import LargestFactor, SmallestFactor
from hvdcomp.policies.decisions import Factors, Probe
from hvdcomp.policies.request import Request, Statistic, Statistics
from hvdcomp.specs.described import Share, at_least

Table = Mapping[str, Mapping[float, float]]
"""By tensor name and compression factor."""


@dataclass(frozen=True)
class AutoAccordionState(AccordionState):
    """The state of `AutoAccordion`: that of `Accordion`, and what was measured or chosen.

    Attributes:
        gains: by tensor name and factor, the finite gains of the probed periods so far; empty once factors are chosen.
        costs: by tensor name and factor, sent bytes / dense bytes; empty likewise.
        low, high: by tensor name, the chosen factors of low and high compression; empty before.
    """

    gains: Mapping[str, Mapping[float, tuple[float, ...]]] = field(default_factory=dict)
    costs: Mapping[str, Mapping[float, float]] = field(default_factory=dict)
    low: Mapping[str, float] = field(default_factory=dict)
    high: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class AutoAccordion(CriticalTensors[AutoAccordionState]):
    """`Accordion` with two compression factors for each tensor, chosen by how much of its gradient they keep.

    Of the candidate factors those count that send less than nothing compressed and than every smaller candidate. Low
    compression is the largest of these whose gain is at least `keep_low`, or else the smallest. High compression is
    the largest whose gain is at least `keep_high`, and at least the one after that of low compression, if there is
    one. A tensor for which no candidate sends less than its dense bytes gets factor 1, which is no compression. Gains
    of several periods are averaged; those that are not finite, or missing, keep nothing.

    Attributes:
        probe: number of epochs at the beginning (with `steps`: windows) in which levels are measured, while all tensors
            are sent at factor `smallest`.
        every: measure in the first step of these and in every `every`-th after it.
        keep_low, keep_high: the gains that low and high compression have to keep, above 0 and at most 1.
        smallest, largest: candidates are `smallest` and its doubles up to `largest`.
    """

    probe: Annotated[int, at_least(1)] = 1
    every: Annotated[int, at_least(1)] = 10
    keep_low: Share = 0.7
    keep_high: Share = 0.3
    smallest: SmallestFactor = 2.0
    largest: LargestFactor = 1024.0

    name: ClassVar[str] = "accordion:auto"
    examples: ClassVar[tuple[str, ...]] = ("accordion:auto",)
    state_type: ClassVar[type] = AutoAccordionState

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep_high > self.keep_low:
            raise SpecError(
                f"{self.name}: keep_low={self.keep_low},keep_high={self.keep_high} is not allowed; high compression "
                "keeps less, so keep_high must not be above keep_low"
            )
        if self.largest < 2 * self.smallest:
            raise SpecError(
                f"{self.name}: smallest={self.smallest},largest={self.largest} is not allowed; there must be at least "
                "two candidates, so largest must be at least twice smallest"
            )

    @property
    def candidates(self) -> tuple[float, ...]:
        """The compression factors to choose from, ascending."""
        found = [float(self.smallest)]
        while 2 * found[-1] <= self.largest:
            found.append(2 * found[-1])
        return tuple(found)

    def request(self, state: AutoAccordionState) -> Request:
        gains = frozenset({Statistic.LEVEL_GAINS})
        return super().request(state) | Request(gains if state.ends < self.probe else frozenset(), ever=gains)

    def decision(self, state: AutoAccordionState) -> Factors | Probe:
        if state.ends < self.probe:
            return Probe(self.candidates, self.every, send=self.candidates[0])
        chosen = {True: state.low, False: state.high}
        return Factors({name: chosen[critical][name] for name, critical in state.critical.items()})

    def update(self, state: AutoAccordionState, statistics: Statistics) -> AutoAccordionState:
        if state.ends < self.probe:
            state = self._measure(state, statistics)
        state = super().update(state, statistics)
        return self._choose(state) if state.ends == self.probe else state

    def _measure(self, state: AutoAccordionState, statistics: Statistics) -> AutoAccordionState:
        """Adds the gains and costs of one probed period."""
        assert statistics.level_gains is not None
        if statistics.level_costs is None:
            raise ValueError(f"{self.name} needs level_costs with level_gains, after step {statistics.step}")
        gains = self._of_all(statistics.level_gains, state, "level gains")
        costs = self._of_all(statistics.level_costs, state, "level costs")
        measured = {name: _with(state.gains.get(name, {}), new) for name, new in gains.items()}
        costs = {name: {**state.costs.get(name, {}), **new} for name, new in costs.items()}
        return dataclasses.replace(state, gains=measured, costs=costs)

    def _of_all(self, table: Table, state: AutoAccordionState, what: str) -> Table:
        """The table with an empty entry for each tensor that has none. Raises ValueError for tensors not known."""
        return self.of_tensors({**{name: {} for name in state.critical}, **table}, state.critical, what)

    def _choose(self, state: AutoAccordionState) -> AutoAccordionState:
        low, high = {}, {}
        for name, gains in state.gains.items():
            means = {cf: fmean(found) for cf, found in gains.items()}
            low[name], high[name] = self._factors(means, state.costs[name])
        return dataclasses.replace(state, gains={}, costs={}, low=low, high=high)

    def _factors(self, gains: Mapping[float, float], costs: Mapping[float, float]) -> tuple[float, float]:
        """The factors of low and high compression of one tensor."""
        useful: list[float] = []
        least = 1.0
        for cf in self.candidates:
            cost = costs.get(cf, 1 / cf)  # without a gradient nothing was sent, and the factor is what is aimed at
            if cost < least:
                useful.append(cf)
                least = cost
        if not useful:
            return 1.0, 1.0
        low = max(_keeping(self.keep_low, gains, useful), default=0)
        high = max([low + 1, *_keeping(self.keep_high, gains, useful)])
        return useful[low], useful[min(high, len(useful) - 1)]


def _with(gains: Mapping[float, tuple[float, ...]], new: Mapping[float, float]) -> dict[float, tuple[float, ...]]:
    """The gains of a tensor and those of one more period, without any that is not finite."""
    added = {cf: float(gain) for cf, gain in new.items() if math.isfinite(gain)}
    return {**gains, **{cf: (*gains.get(cf, ()), gain) for cf, gain in added.items()}}


def _keeping(share: float, gains: Mapping[float, float], factors: Sequence[float]) -> list[int]:
    """The places of the factors whose gain is known and at least `share`."""
    return [place for place, cf in enumerate(factors) if cf in gains and gains[cf] >= share]
