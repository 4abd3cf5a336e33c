"""Counts the steps and epochs of a training run, even if batches grow, and measures step times."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from hvdcomp.adaptation.observer import Observer
from hvdcomp.policies.request import Period, Request, Statistic

Rates = tuple[float, ...]
"""The learning rate of each parameter group."""


@dataclass
class Progress:
    """Counts the steps and epochs that have ended.

    An epoch has `steps_per_epoch` batches. A batch always has the batch size from the start of training. A step that
    accumulates several batches counts as several batches. If the last batches of an epoch are too few for a step, they
    are dropped, as in data loaders.

    Attributes:
        steps_per_epoch: the number of batches of an epoch; None if epochs are not counted.
        step, epoch: the numbers of steps and epochs that have ended.
        taken: the number of batches that the steps of the current epoch have used so far.
    """

    steps_per_epoch: int | None
    step: int = 0
    epoch: int = 0
    taken: int = 0

    @property
    def epoch_or_none(self) -> int | None:
        """The number of epochs that have ended; None if epochs are not counted."""
        return self.epoch if self.steps_per_epoch else None

    def advance(self, accumulation: int) -> bool:
        """Counts a step of `accumulation` batches. Returns whether an epoch ends with this step."""
        self.step += 1
        if not self.steps_per_epoch:
            return False
        self.taken += accumulation
        if self.steps_per_epoch - self.taken >= accumulation:
            return False
        self.epoch += 1
        self.taken = 0
        return True

    def grow(self, accumulation: int) -> None:
        """Changes to steps of `accumulation` batches. If the remaining batches of the epoch do not fill such a step,
        the epoch ends.

        No decision is made at this end of an epoch, because a decision was made one step earlier.
        """
        if self.steps_per_epoch and self.taken and self.steps_per_epoch - self.taken < accumulation:
            self.epoch += 1
            self.taken = 0

    def continue_after(self, steps_per_epoch: int | None, accumulation: int) -> None:
        """Converts `taken` after a change of the number of steps per epoch, so that it is the same share of an epoch.

        Args:
            steps_per_epoch: the previous number of steps per epoch; None if unknown.
            accumulation: the number of accumulated batches per step, as in `grow`.
        """
        if steps_per_epoch and self.steps_per_epoch and steps_per_epoch != self.steps_per_epoch:
            self.taken = self.taken * self.steps_per_epoch // steps_per_epoch
            self.grow(accumulation)

    def ends(self, period: Period, epoch_ended: bool) -> bool:
        """Whether a period ends with the step that just ended."""
        if period.until:
            return self.step == period.until
        if period.steps:
            return self.step % period.steps == 0
        return epoch_ended and self.epoch % period.epochs == 0

    def accumulates(self, period: Period | None) -> bool:
        """Whether the gradients of the current step are accumulated for the period. Between two steps, the current step
        is the step that follows."""
        return period is None or not period.last or self.step % period.steps >= period.steps - period.last

    def next_ends(self, period: Period | None) -> bool:
        """Whether a period of steps ends with the next step."""
        return period is not None and period.steps > 0 and (self.step + 1) % period.steps == 0


class StepClock:
    """Measures the time from the end of one step to the end of the next, without the time during pauses.

    Args:
        clock: function that returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ended: float | None = None
        self._pauses = 0  # number of current pauses, which may be nested

    def lap(self) -> float:
        """Ends a step. Returns the seconds since the end of the previous step, or NaN for the first step."""
        end, before = self._clock(), self._ended
        self._ended = end
        return float("nan") if before is None else end - before

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context manager. The time inside the context does not count toward the time of the next step."""
        start = self._clock()
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            if self._ended is not None and not self._pauses:
                self._ended += self._clock() - start


class StepTimes(Observer):
    """The time of each step of a period, measured with the host's clock. On an accelerator, only the average over
    several steps is correct, because the device may run behind the host."""

    measures: ClassVar[frozenset[Statistic]] = frozenset({Statistic.STEP_TIMES})

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock
        self._seconds: list[float] = []

    def end_step(self) -> None:
        """Records the time of the step that ends."""
        self._seconds.append(self._clock.lap())

    def statistics(self, request: Request, batches: int) -> dict[str, Any]:
        return {"step_times": tuple(self._seconds)}

    def clear(self) -> None:
        self._seconds = []

    def state(self) -> list[float]:
        """The measurements of this period so far, for a checkpoint."""
        return list(self._seconds)

    def restore(self, state: Sequence[float]) -> None:
        """Restores the result of `state`."""
        self._seconds = list(state)
