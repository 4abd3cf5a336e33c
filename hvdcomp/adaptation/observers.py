"""All observers of one training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any, ClassVar

from hvdcomp.adaptation.gains import CompressionGains
from hvdcomp.adaptation.gradient_sums import AccumulatedGradients
from hvdcomp.adaptation.level_errors import LevelErrors
from hvdcomp.adaptation.look import observe
from hvdcomp.adaptation.observer import Observer
from hvdcomp.adaptation.plans import Plans
from hvdcomp.adaptation.step_counter import StepClock, StepTimes
from hvdcomp.arrays.types import Array
from hvdcomp.policies.decisions import Decision, MultiLevel
from hvdcomp.policies.request import Request, Statistic


class Predicted(Observer):
    """Predictions made before the training, which do not change.

    Args:
        exchange_seconds: as in `Statistics`; None if the policy does not ask for it.
    """

    measures: ClassVar[frozenset[Statistic]] = frozenset({Statistic.EXCHANGE_SECONDS})

    def __init__(self, exchange_seconds: Mapping[int, float] | None) -> None:
        self._exchange_seconds = exchange_seconds

    def statistics(self, request: Request, batches: int) -> dict[str, Any]:
        return {"exchange_seconds": self._exchange_seconds}


class Observers:
    """The observers of one rank.

    Args:
        plans: the plans, with the tensors whose level is decided.
        measuring: whether this rank measures statistics, as rank 0 does.
        clock: clock of the steps.
        exchange_seconds: as in `Predicted`.

    Attributes:
        sums: observer of sums of gradients.
        times: observer of step times.
        gains: observer of the engine for the decision in force, or None.
    """

    def __init__(
        self,
        plans: Plans,
        measuring: bool,
        clock: StepClock,
        exchange_seconds: Mapping[int, float] | None = None,
    ) -> None:
        self._plans = plans
        self._measuring = measuring
        self._clock = clock
        self.sums = AccumulatedGradients(plans.names, LevelErrors(plans))
        self.times = StepTimes(clock)
        self._predicted = Predicted(exchange_seconds)
        self.gains: Observer | None = None

    def follow(self, decision: Decision) -> None:
        """Sets the engine's observer for a decision."""
        self.gains = decision.observer(self)
        observe(self._plans.engine, None if self.gains is None else self.gains.before_compress)

    def two_levels(self, decision: MultiLevel) -> Observer:
        """The observer that compresses the whole model twice and measures the gains.

        Every rank has it, because the result sent may be that of two compressions.
        """
        return CompressionGains(self._plans, decision, self._measuring, self._clock)

    @property
    def all(self) -> tuple[Observer, ...]:
        """All observers, those that wait for the device first, after which times are known too."""
        return (*([] if self.gains is None else [self.gains]), self.sums, self.times, self._predicted)

    def begin_step(self, period_ends: bool) -> None:
        """Begins a step; `period_ends` is whether it is the last of a period."""
        for observer in self.all:
            observer.begin_step(period_ends)

    def end_step(self, ever: Set[Statistic]) -> None:
        """Ends a step; `ever` are the statistics that the policy may request."""
        if self._measuring and self.times.measures & ever:
            self.times.end_step()

    def statistics(self, request: Request, batches: int) -> dict[str, Any]:
        """The measurements of all observers, as in `Observer.statistics`."""
        values: dict[str, Any] = {}
        for observer in self.all:
            if observer.measures & request.statistics:
                values |= observer.statistics(request, batches)
        return values

    def clear(self) -> None:
        """Begins a new period."""
        for observer in self.all:
            observer.clear()

    def state(self, copy: Callable[[Array], Array]) -> dict[str, Any]:
        """The measurements of this period so far, for `restore`."""
        return {"sums": self.sums.state(copy), "step_times": self.times.state()}

    def restore(self, state: Mapping[str, Any], place: Callable[[Array, str], Array]) -> None:
        """Restores the result of `state`."""
        self.sums.restore(state["sums"], place)
        self.times.restore(state["step_times"])
