"""How far a training is, in steps and epochs, when batches may grow; its learning rates; how long its steps take."""

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
    """Counts steps and epochs that ended.

    An epoch is `steps_per_epoch` batches of the starting size. A step that accumulates several batches takes as many;
    the rest of an epoch that does not fill a step is dropped, as data loaders do it.

    Attributes:
        steps_per_epoch: None if epochs are not counted.
        step, epoch: that ended.
        taken: batches of the starting size that the present epoch's steps took.
    """

    steps_per_epoch: int | None
    step: int = 0
    epoch: int = 0
    taken: int = 0

    @property
    def epoch_or_none(self) -> int | None:
        """Epochs that ended; None if they are not counted."""
        return self.epoch if self.steps_per_epoch else None

    def advance(self, accumulation: int) -> bool:
        """Notes the end of a step of `accumulation` batches; returns whether an epoch ended with it."""
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
        """Notes that each step that follows takes `accumulation` batches, which the rest of an epoch may not have.

        The epoch is then over without a decision at its end: there was one a step ago.
        """
        if self.steps_per_epoch and self.taken and self.steps_per_epoch - self.taken < accumulation:
            self.epoch += 1
            self.taken = 0

    def go_on_after(self, steps_per_epoch: int | None, accumulation: int) -> None:
        """Notes that `taken` was counted where an epoch had another number of steps, as on other ranks it has: the same
        share of the epoch is over, or a part of a step less.

        Args:
            steps_per_epoch: of then; None if that is not known.
            accumulation: as of `grow`.
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
        """Whether the step that comes next, or is under way, is one of its period whose gradients are accumulated."""
        return period is None or not period.last or self.step % period.steps >= period.steps - period.last

    def next_ends(self, period: Period | None) -> bool:
        """Whether a period of steps ends with the step that comes next."""
        return period is not None and period.steps > 0 and (self.step + 1) % period.steps == 0


class StepClock:
    """Times steps from end to end, without what a training does between them.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ended: float | None = None

    def lap(self) -> float:
        """Ends a step; returns the seconds since the end of the step before, NaN if there was none."""
        now, before = self._clock(), self._ended
        self._ended = now
        return float("nan") if before is None else now - before

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves the time that passes inside out of the step that follows."""
        start = self._clock()
        try:
            yield
        finally:
            if self._ended is not None:
                self._ended += self._clock() - start


class StepTimes(Observer):
    """How long each step of a period took. By the host's clock: on an accelerator true on average."""

    tells: ClassVar[frozenset[Statistic]] = frozenset({Statistic.STEP_TIMES})

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock
        self._seconds: list[float] = []

    def end_step(self) -> None:
        """Notes how long the step that ends took."""
        self._seconds.append(self._clock.lap())

    def statistics(self, request: Request, batches: int) -> dict[str, Any]:
        return {"step_times": tuple(self._seconds)}

    def clear(self) -> None:
        self._seconds = []

    def state(self) -> list[float]:
        """The measurements of this period so far, for a checkpoint."""
        return list(self._seconds)

    def restore(self, state: Sequence[float]) -> None:
        """Goes on from what `state` returned."""
        self._seconds = list(state)
