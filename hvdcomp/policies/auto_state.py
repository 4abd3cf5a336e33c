"""The state of `auto`: candidates, their step times, and the trial under way."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from hvdcomp.policies.median import median_with_error
from hvdcomp.policies.request import Candidate

PATIENCE = 4
"""Decisions in a row that must see another step time before all candidates are open again for the first time."""

SETTLING = 2
"""Steps after a change that are not counted: the first sends residuals, and Horovod negotiates new names and sizes."""

LEAST = 2  # steps to judge a candidate by
_CLOCK_S = 1e-9  # a shorter step time is an error of the clock and does not count
DOUBT = 0.1  # share by which a prediction may be too high; trials within it cost nothing
_PRIOR = 2  # weight of a prediction, in steps, with DOUBT as its standard error
_AGREES = 2  # standard errors within which trial and prediction agree; a contradicted prediction does not count
SURE = 3  # standard errors that a change must exceed, so that noisy steps do not reopen all candidates
NOTICEABLE = 0.01  # least relative difference of step times that matters


@dataclass(frozen=True)
class Measured:
    """The time of a candidate's steps.

    Attributes:
        seconds: median of the step times.
        error: standard error of the median.
        steps: number of steps.
        at: first step of the latest measurement; None if unknown.
    """

    seconds: float
    error: float
    steps: int
    at: int | None = None

    later: ClassVar[tuple[str, ...]] = ("at",)

    @classmethod
    def of(cls, times: Sequence[float]) -> Measured:
        """The measurement of one or more step times."""
        return cls(*median_with_error(times), len(times))

    def scaled(self, factor: float) -> Measured:
        """The measurement with all times multiplied by `factor`."""
        return Measured(factor * self.seconds, factor * self.error, self.steps, self.at)

    def contradicts(self, other: Measured, errors: float) -> bool:
        """Whether two measurements differ by more than `errors` standard errors."""
        return abs(self.seconds - other.seconds) > errors * math.hypot(self.error, other.error)

    def with_more(self, other: Measured, most: int) -> Measured:
        """The weighted mean of two measurements, by number of steps; the older one counts for at most `most` steps."""
        old = min(self.steps, most)
        steps = old + other.steps
        seconds = (old * self.seconds + other.steps * other.seconds) / steps
        error = math.hypot(old * self.error, other.steps * other.error) / steps
        return Measured(seconds, error, steps, other.at)


@dataclass(frozen=True)
class Trial:
    """The trial under way, or the latest trial.

    Attributes:
        trying: whether the chosen candidate is being tried; if not, it is the best so far.
        rival: the candidate that the tried one is compared with; "" for the first candidate of all.
        tried: the candidate whose trial is over, while the rival is measured again; "" for none.
        latest: latest measurement of the rival, or without a rival of the chosen candidate; None if too short.
        times: seconds of the counted steps of this trial, or of the trial that has just ended.
    """

    trying: bool = False
    rival: str = ""
    tried: str = ""
    latest: Measured | None = None
    times: tuple[float, ...] = ()

    @property
    def of_rival(self) -> Measured:
        """The latest measurement of the rival."""
        assert self.latest is not None  # no trial begins before
        return self.latest


@dataclass(frozen=True)
class AutoState:
    """The state of `Auto`.

    Attributes:
        order: names of the tensors, the most worth compressing first.
        candidates: candidates with predicted times, by name; empty before the first decision.
        chosen: the candidate in force.
        why: the reason for the choice, in words. Decision logs contain the words, and `hvdcomp replay` compares them.
            With other words, all logs of earlier versions would differ.
        since: the first step, counted from 0, with the chosen candidate after the training's warm-up.
        until: number of steps after which the next decision is made.
        trial: the trial under way.
        measured: measurements since all candidates were last open, by name. A trial is recorded as the ratio of its
            step time to the rival's before and after it, times the rival's. The first trial is averaged with the
            prediction, which counts as two steps, unless they contradict each other.
        before: earlier medians, by name.
        usual: seconds of a step when the candidate began to stay, by name; a drift is noticed by it.
        drifted: number of decisions in a row that saw another step time.
        patience: number of such decisions that opens all candidates again.
        reopened: the candidate in force when all were opened again; "" if trials must be affordable.
        elapsed: seconds of all steps so far.
        spent: seconds by which steps of trials and changes exceeded those of the best.
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
        """Accounts for step times; returns the new state, and the times that count for the chosen candidate."""
        valid = [(number, time) for number, time in enumerate(times, step - len(times)) if _CLOCK_S <= time < math.inf]
        settled = self.since + SETTLING
        trying, latest = self.trial.trying, self.trial.latest
        compared = [name for name in self.measured if not (trying and name == self.chosen)]
        best = min((self.measured[name].seconds for name in compared), default=math.inf)
        if trying and latest is not None:
            best = latest.seconds
        beyond = sum(time - best for number, time in valid if trying or number < settled)
        elapsed = self.elapsed + sum(time for _, time in valid)
        state = dataclasses.replace(self, elapsed=elapsed, spent=self.spent + max(0.0, beyond))
        return state, [time for number, time in valid if number >= settled]

    def trying(self, name: str, step: int, why: str) -> AutoState:
        """The state in which candidate `name` is tried from a step on, with the present candidate as its rival."""
        return dataclasses.replace(
            self,
            chosen=name,
            why=why,
            since=step,
            until=step + SETTLING + LEAST,
            trial=Trial(trying=True, rival=self.chosen, latest=self.trial.latest),
            drifted=0,
        )

    def opened_again(self, latest: Measured) -> AutoState:
        """The state in which all candidates are open, and only the chosen one has a measurement."""
        before = {**self.before, **{name: measured.seconds for name, measured in self.measured.items()}}
        return dataclasses.replace(
            self, measured={self.chosen: latest}, before=before, drifted=0,
            usual={self.chosen: latest.seconds}, reopened=self.chosen,
        )  # fmt: skip

    def best(self) -> str:
        """The fastest candidate by measurement; the chosen one unless another is faster by more than noise."""
        best = min(self.measured, key=lambda name: self.measured[name].seconds)
        fastest, present = self.measured[best], self.measured[self.chosen]
        doubt = max(fastest.error, NOTICEABLE * fastest.seconds)
        return best if present.seconds - fastest.seconds > doubt else self.chosen

    def longest_ago(self, best: str, before: int) -> str:
        """The candidate, other than the best, that was tried longest ago or never, before step `before`; "" for none.

        Its step time may have changed without a change in the best's.
        """
        at = {name: self.measured[name].at or 0 if name in self.measured else -1 for name in self.candidates}
        name = min(at.keys() - {best}, key=lambda candidate: (at[candidate], candidate), default="")
        return name if name and at[name] <= before else ""

    def expected(self, best: str, name: str) -> float:
        """Seconds of a step as measured; else as predicted, times the best's ratio of measured to predicted time."""
        if name in self.measured:
            return self.measured[name].seconds
        correction = self.measured[best].seconds / self.candidates[best].seconds
        return self.candidates[name].seconds * correction

    def is_near(self, best: str, name: str, margin: float) -> bool:
        """Whether a candidate may be within the margin of the best, by its expected time or an earlier measurement."""
        least = min(self.expected(best, name), self.before.get(name, self.candidates[name].seconds))
        return least <= (1 + margin) * self.measured[best].seconds


def known_before(measured: Measured | None, predicted: float, trial: Measured) -> Measured | None:
    """The measurement before a trial, or without it the prediction as a measurement; None if the trial contradicts."""
    if measured is not None:
        return None if measured.contradicts(trial, SURE) else measured  # the speed has changed since
    prior = Measured(predicted, DOUBT * predicted, _PRIOR)
    return None if prior.contradicts(trial, _AGREES) else prior
