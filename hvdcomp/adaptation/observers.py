"""All observers of one training run."""

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
    """Predictions that are made before training and do not change.

    Args:
        exchange_seconds: the predicted times of exchanges, as in `Statistics`; None if the policy does not request
            them.
    """

    measures: ClassVar[frozenset[Statistic]] = frozenset({Statistic.EXCHANGE_SECONDS})

    def __init__(self, exchange_seconds: Mapping[int, float] | None) -> None:
        self._exchange_seconds = exchange_seconds

    def statistics(self, request: Request, batches: int) -> dict[str, Any]:
        return {"exchange_seconds": self._exchange_seconds}


class Observers:
    """All observers of one rank. They measure the statistics that the policy requests.

    Args:
        plans: object that creates plans, and has the names of the tensors whose level the policy decides.
        measuring: whether this rank measures statistics. Only rank 0 measures statistics.
        clock: the clock that times steps.
        exchange_seconds: the predicted times of exchanges, as in `Predicted`.

    Attributes:
        sums: the observer that accumulates gradients.
        times: the observer that measures the times of steps.
        gains: the observer that the current decision needs during the exchange; None if it needs none.
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

        Every rank needs this observer, because the result that is sent may have been compressed twice.
        """
        return CompressionGains(self._plans, decision, self._measuring, self._clock)

    @property
    def all(self) -> tuple[Observer, ...]:
        """All observers. Observers that wait for the device are first, because times are known only after this wait."""
        return (*([] if self.gains is None else [self.gains]), self.sums, self.times, self._predicted)

    def begin_step(self, period_ends: bool) -> None:
        """Begins a step. `period_ends` is True if the step is the last of a period."""
        for observer in self.all:
            observer.begin_step(period_ends)

    def end_step(self, ever: Set[Statistic]) -> None:
        """Ends a step. `ever` has all statistics that the policy may request at any time."""
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
