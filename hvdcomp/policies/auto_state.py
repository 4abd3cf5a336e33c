"""The state of `auto`: candidates, the times of their steps, and which trial is under way."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from hvdcomp.policies.median import median_with_error
from hvdcomp.policies.request import Candidate

PATIENCE = 4
"""Looks in a row that have to find another time, before all is open again for the first time."""

SETTLING = 2
"""Steps after a change that are not counted. The first sends what compression had kept back, and Horovod learns the
names and sizes of what it exchanges anew."""

LEAST = 2  # steps to judge a candidate by
_CLOCK_S = 1e-9  # no clock tells less: a step time below that is an error of the clock, and does not count
DOUBT = 0.1  # share by which a prediction may be too high; what is within that is tried at no price
_PRIOR = 2  # steps that a prediction weighs as much as, with DOUBT as its standard error
_AGREES = 2  # standard errors within which it does: what a trial contradicts does not count
SURE = 3  # standard errors that a change must exceed: else restless steps would always open all again
NOTICEABLE = 0.01  # differences of step times that are looked for


@dataclass(frozen=True)
class Measured:
    """The time of a candidate's steps.

    Attributes:
        seconds: their median.
        error: standard error of it.
        steps: how many were counted.
        at: the step from which on the latest of them were; None where that is not known.
    """

    seconds: float
    error: float
    steps: int
    at: int | None = None

    later: ClassVar[tuple[str, ...]] = ("at",)

    @classmethod
    def of(cls, times: Sequence[float]) -> Measured:
        """The measurement of some times, at least one."""
        return cls(*median_with_error(times), len(times))

    def scaled(self, factor: float) -> Measured:
        """The same measurement for steps that take `factor` times as long."""
        return Measured(factor * self.seconds, factor * self.error, self.steps, self.at)

    def contradicts(self, other: Measured, errors: float) -> bool:
        """Whether the difference is more than so many standard errors."""
        return abs(self.seconds - other.seconds) > errors * math.hypot(self.error, other.error)

    def with_more(self, other: Measured, most: int) -> Measured:
        """Both together, each by its number of steps; of what was known before, no more than `most` weigh."""
        old = min(self.steps, most)
        steps = old + other.steps
        seconds = (old * self.seconds + other.steps * other.seconds) / steps
        error = math.hypot(old * self.error, other.steps * other.error) / steps
        return Measured(seconds, error, steps, other.at)


@dataclass(frozen=True)
class Trial:
    """The trial under way, or the latest trial.

    Attributes:
        trying: whether the chosen candidate is being tried; else it stays until something speaks against it.
        rival: the candidate that is compared with what is being tried; "" for none, as of the first of all.
        tried: the candidate whose trial is over, while the steps that follow it are measured; "" for none.
        latest: of the rival, or else of the chosen candidate, its latest steps; None where those are too few.
        times: seconds of the steps of this trial that count, or of the one that has just ended.
    """

    trying: bool = False
    rival: str = ""
    tried: str = ""
    latest: Measured | None = None
    times: tuple[float, ...] = ()

    @property
    def of_rival(self) -> Measured:
        """The latest steps of the rival."""
        assert self.latest is not None  # nothing is tried before
        return self.latest


@dataclass(frozen=True)
class AutoState:
    """The state of `Auto`.

    Attributes:
        order: names of the tensors, those first that are most worth compressing.
        candidates: by name, with predicted times; none before they are told.
        chosen: the candidate in force.
        why: the reason for that, in words.
        since: the first step, counted from 0, that obeys it and does not belong to the training's warm-up.
        until: the next decision is made when this number of steps have ended.
        trial: under way.
        measured: by name, what was measured since all candidates were last open. A trial counts in proportion to the
            rival: by how much longer its steps took than those of the rival before and after it. The first trial counts
            together with the prediction, as if that were two steps more, unless they contradict each other.
        before: by name, medians that were measured earlier.
        usual: by name, seconds of a step when the candidate began to stay, by which a drift is noticed.
        drifted: looks in a row that found another time.
        patience: number of such looks that opens all candidates again.
        reopened: the candidate that was in force when all was opened again; "" where trials have to be affordable.
        elapsed: seconds of all steps so far.
        spent: seconds of these that trials and changes took beyond steps of the best.
    """

    order: tuple[str, ...]
    candidates: Mapping[str, Candidate] = field(default_factory=dict)
    chosen: str = ""
    why: str = ""
    since: int = 0
    until: int = 0
    trial: Trial = Trial()
    measured: Mapping[str, Measured] = field(default_factory=dict)
    before: Mapping[str, float] = field(default_factory=dict)
    usual: Mapping[str, float] = field(default_factory=dict)
    drifted: int = 0
    patience: int = PATIENCE
    reopened: str = ""
    elapsed: float = 0.0
    spent: float = 0.0

    def with_times(self, times: Sequence[float], step: int) -> tuple[AutoState, list[float]]:
        """The state with the times in its accounts, and those times that say how long the chosen candidate takes."""
        known = [(number, time) for number, time in enumerate(times, step - len(times)) if _CLOCK_S <= time < math.inf]
        settled = self.since + SETTLING
        trying, latest = self.trial.trying, self.trial.latest
        others = [name for name in self.measured if not (trying and name == self.chosen)]
        best = min((self.measured[name].seconds for name in others), default=math.inf)
        if trying and latest is not None:
            best = latest.seconds
        beyond = sum(time - best for number, time in known if trying or number < settled)
        elapsed = self.elapsed + sum(time for _, time in known)
        state = dataclasses.replace(self, elapsed=elapsed, spent=self.spent + max(0.0, beyond))
        return state, [time for number, time in known if number >= settled]

    def trying(self, name: str, step: int, why: str) -> AutoState:
        """The state in which another candidate is tried, from a step on, against the one in force."""
        return dataclasses.replace(
            self,
            chosen=name,
            why=why,
            since=step,
            until=step + SETTLING + LEAST,
            trial=Trial(trying=True, rival=self.chosen, latest=self.trial.latest),
            drifted=0,
        )

    def opened_again(self, now: Measured) -> AutoState:
        """The state in which all candidates are open: only how fast the chosen one is, is still known."""
        before = {**self.before, **{name: measured.seconds for name, measured in self.measured.items()}}
        return dataclasses.replace(
            self, measured={self.chosen: now}, before=before, drifted=0,
            usual={self.chosen: now.seconds}, reopened=self.chosen,
        )  # fmt: skip

    def best(self) -> str:
        """The fastest by measurement. What stays is not left for a difference that may be chance."""
        best = min(self.measured, key=lambda name: self.measured[name].seconds)
        fastest, ours = self.measured[best], self.measured[self.chosen]
        doubt = max(fastest.error, NOTICEABLE * fastest.seconds)
        return best if ours.seconds - fastest.seconds > doubt else self.chosen

    def longest_ago(self, best: str, before: int) -> str:
        """The candidate but the best that was tried longest ago, or never; "" if that is not before a step.

        What it takes may have changed without a sign in the steps of the best.
        """
        at = {name: self.measured[name].at or 0 if name in self.measured else -1 for name in self.candidates}
        name = min(at.keys() - {best}, key=lambda candidate: (at[candidate], candidate), default="")
        return name if name and at[name] <= before else ""

    def expected(self, best: str, name: str) -> float:
        """Seconds of a step as measured, or as predicted, corrected by what the best takes instead of predicted."""
        if name in self.measured:
            return self.measured[name].seconds
        correction = self.measured[best].seconds / self.candidates[best].seconds
        return self.candidates[name].seconds * correction

    def is_near(self, best: str, name: str, margin: float) -> bool:
        """Whether a candidate is within the margin: as predicted, as once measured, or relative to the best's time."""
        least = min(self.expected(best, name), self.before.get(name, self.candidates[name].seconds))
        return least <= (1 + margin) * self.measured[best].seconds


def known_before(measured: Measured | None, predicted: float, now: Measured) -> Measured | None:
    """The time measured before a trial or, without that, the prediction as if it were measured: a first trial may be as
    far off. None if the trial contradicts it."""
    if measured is not None:
        return None if measured.contradicts(now, SURE) else measured  # it would be of another time
    prior = Measured(predicted, DOUBT * predicted, _PRIOR)
    return None if prior.contradicts(now, _AGREES) else prior
