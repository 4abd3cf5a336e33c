"""All that is measured in one training, on behalf of its policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any, ClassVar

from hvdcomp.adaptation.gains import TwoLevels
from hvdcomp.adaptation.gradient_sums import AccumulatedGradients
from hvdcomp.adaptation.level_errors import LevelErrors
from hvdcomp.adaptation.observer import Observer
from hvdcomp.adaptation.plans import Plans
from hvdcomp.adaptation.step_counter import StepClock, StepTimes
from hvdcomp.arrays.types import Array
from hvdcomp.policies.decisions import Decision, MultiLevel
from hvdcomp.policies.request import Request, Statistic


class Predicted(Observer):
    """Predictions that were made before the training, and stay the same.

    Args:
        exchange_seconds: as in `Statistics`; None if the policy does not ask for it.
    """

    tells: ClassVar[frozenset[Statistic]] = frozenset({Statistic.EXCHANGE_SECONDS})

    def __init__(self, exchange_seconds: Mapping[int, float] | None) -> None:
        self._exchange_seconds = exchange_seconds

    def statistics(self, request: Request, batches: int) -> dict[str, Any]:
        return {"exchange_seconds": self._exchange_seconds}


class Observers:
    """The observers of one rank.

    Args:
        plans: of the tensors whose level is decided.
        measuring: whether this rank, 0, is to learn statistics.
        clock: that times the steps.
        exchange_seconds: as of `Predicted`.

    Attributes:
        sums: of gradients.
        times: of steps.
        gains: observes the engine while the decision in force wants to be measured; else None.
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
        """Observes the engine as a decision wants it."""
        self.gains = decision.observer(self)
        self._plans.engine.before_compress = None if self.gains is None else self.gains.before_compress

    def two_levels(self, decision: MultiLevel) -> Observer:
        """Measures the gains of two compressions of the whole model, and sends as the decision says.

        On every rank, because the first compression is part of what is sent.
        """
        return TwoLevels(self._plans, decision, self._measuring, self._clock)

    @property
    def all(self) -> tuple[Observer, ...]:
        """All observers, those first that wait for the device: then the times that others tell are known too."""
        return (*([] if self.gains is None else [self.gains]), self.sums, self.times, self._predicted)

    def begin_step(self, period_ends: bool) -> None:
        """To be called when a step begins, which is the last of a period or not."""
        for observer in self.all:
            observer.begin_step(period_ends)

    def end_step(self, ever: Set[Statistic]) -> None:
        """To be called when a step ends; `ever` is what the policy may ask for."""
        if self._measuring and self.times.tells & ever:
            self.times.end_step()

    def statistics(self, request: Request, batches: int) -> dict[str, Any]:
        """The measurements of all observers, as in `Observer.statistics`."""
        values: dict[str, Any] = {}
        for observer in self.all:
            if observer.tells & request.statistics:
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
        """Goes on from what `state` returned."""
        self.sums.restore(state["sums"], place)
        self.times.restore(state["step_times"])
