"""The state of `auto`: the candidates, their step times, and the current trial."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from hvdcomp.policies.median import median_with_error
from hvdcomp.policies.request import Candidate

PATIENCE = 4
"""The number of decisions in a row that must see a changed step time before all candidates may be tried again for the
first time."""

SETTLING = 2
"""The number of steps that are not counted after a change. The first of them sends residuals, and Horovod negotiates
new names and sizes."""

LEAST = 2  # fewest measured steps that are enough to judge a candidate
_CLOCK_S = 1e-9  # a shorter step time is an error of the clock, and is ignored
DOUBT = 0.1  # a prediction may be too high by this share; a trial of a candidate within this share counts as free
_PRIOR = 2  # a prediction counts as this number of measured steps, with DOUBT as its standard error
# trial and prediction agree within this number of standard errors; if they do not agree, the prediction is ignored
_AGREES = 2
# a change must exceed this number of standard errors, so that noise does not start new trials of all candidates
SURE = 3
NOTICEABLE = 0.01  # smallest relative difference between step times that matters


@dataclass(frozen=True)
class Measured:
    """The measured step time of a candidate.

    Attributes:
        seconds: median of the measured step times, in seconds.
        error: standard error of the median, in seconds.
        steps: number of measured steps.
        at: number of the first step of the latest measurement; None if unknown.
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
        """This measurement with all times multiplied by `factor`."""
        return Measured(factor * self.seconds, factor * self.error, self.steps, self.at)

    def contradicts(self, other: Measured, errors: float) -> bool:
        """Whether two measurements differ by more than `errors` standard errors."""
        return abs(self.seconds - other.seconds) > errors * math.hypot(self.error, other.error)

    def with_more(self, other: Measured, most: int) -> Measured:
        """The mean of two measurements, weighted by their numbers of steps. The older measurement counts for at most
        `most` steps."""
        old = min(self.steps, most)
        steps = old + other.steps
        seconds = (old * self.seconds + other.steps * other.seconds) / steps
        error = math.hypot(old * self.error, other.steps * other.error) / steps
        return Measured(seconds, error, steps, other.at)


@dataclass(frozen=True)
class Trial:
    """The current trial, or the latest trial if none is running.

    Attributes:
        trying: whether the chosen candidate is being tried. If False, the chosen candidate is the best so far.
        rival: the candidate with which the tried candidate is compared; "" for the first candidate of a training run.
        tried: the candidate whose trial has just ended, while the rival is measured again; otherwise "".
        latest: the latest measurement of the rival, or of the chosen candidate if there is no rival; None if the
            measurement is too short.
        times: the seconds of each counted step of this trial, or of the trial that has just ended.
    """

    trying: bool = False
    rival: str = ""
    tried: str = ""
    latest: Measured | None = None
    times: tuple[float, ...] = ()

    @property
    def of_rival(self) -> Measured:
        """The latest measurement of the rival's steps, with which the trial is compared."""
        assert self.latest is not None  # no trial begins before the rival was measured
        return self.latest


@dataclass(frozen=True)
class AutoState:
    """The state that `Auto` keeps from one decision to the next.

    Attributes:
        order: the names of the tensors. The tensors for which compression is most worthwhile come first.
        candidates: the candidates with their predicted times, by name; empty before the first decision.
        chosen: name of the current candidate.
        why: the reason for the choice, in words. Decision logs contain these words, and `hvdcomp replay` compares them.
            If the words were changed, all logs of earlier versions would differ.
        since: the first step, counted from 0, that uses the chosen candidate. Steps of the warm-up are not considered.
        until: the number of steps after which the next decision is made.
        trial: the trial of a candidate that is under way.
        measured: the measurements of each candidate, by name, since the last time when all candidates could be tried
            again. A trial is recorded as a step time: the ratio between the trial and the rival before and after the
            trial, times the step time of the rival. The first trial is averaged with the prediction, which counts as
            two steps. If the first trial contradicts the prediction, the prediction is ignored.
        before: the median step time of each candidate in earlier measurements, by name.
        usual: the seconds of a step when the policy decided to stay with a candidate, by the candidate's name. A drift
            is noticed by comparison with this time.
        drifted: number of successive decisions at which the step time differed from `usual`.
        patience: after this number of such decisions, all candidates may be tried again.
        reopened: name of the candidate that was chosen when all candidates could be tried again. While it is "", the
            policy makes a trial only if the trial is cheap enough.
        elapsed: the seconds of all steps so far.
        spent: the seconds that trials and changes have cost, compared with steps of the best candidate.
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
        """Adds step times to the state. Returns the new state, and the times that count for the chosen candidate."""
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
        """The state in which candidate `name` is tried, beginning with step `step`. The current candidate is the rival
        of candidate `name`."""
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
        """The state in which all candidates may be tried again, and only the chosen candidate has a measurement."""
        before = {**self.before, **{name: measured.seconds for name, measured in self.measured.items()}}
        return dataclasses.replace(
            self, measured={self.chosen: latest}, before=before, drifted=0,
            usual={self.chosen: latest.seconds}, reopened=self.chosen,
        )  # fmt: skip

    def best(self) -> str:
        """The candidate that is fastest according to the measurements. This is the chosen candidate, unless another
        candidate is faster by more than the noise."""
        best = min(self.measured, key=lambda name: self.measured[name].seconds)
        fastest, present = self.measured[best], self.measured[self.chosen]
        doubt = max(fastest.error, NOTICEABLE * fastest.seconds)
        return best if present.seconds - fastest.seconds > doubt else self.chosen

    def longest_ago(self, best: str, before: int) -> str:
        """Among the candidates other than the best, the candidate whose trial was longest ago, or that was never tried.
        "" if all trials were after step `before`.

        The step time of such a candidate may have changed even if the step time of the best has not.
        """
        at = {name: self.measured[name].at or 0 if name in self.measured else -1 for name in self.candidates}
        name = min(at.keys() - {best}, key=lambda candidate: (at[candidate], candidate), default="")
        return name if name and at[name] <= before else ""

    def expected(self, best: str, name: str) -> float:
        """The measured seconds of a step with a candidate. If the candidate was not measured, the result is its
        predicted time, multiplied by the measured time / the predicted time of the best candidate."""
        if name in self.measured:
            return self.measured[name].seconds
        correction = self.measured[best].seconds / self.candidates[best].seconds
        return self.candidates[name].seconds * correction

    def is_near(self, best: str, name: str, margin: float) -> bool:
        """Whether a candidate may be slower than the best by at most the margin, according to its expected time or an
        earlier measurement."""
        least = min(self.expected(best, name), self.before.get(name, self.candidates[name].seconds))
        return least <= (1 + margin) * self.measured[best].seconds


def known_before(measured: Measured | None, predicted: float, trial: Measured) -> Measured | None:
    """The measurement before a trial, or, if there is none, the prediction in the form of a measurement. None if the
    trial contradicts this value."""
    if measured is not None:
        return None if measured.contradicts(trial, SURE) else measured  # None if the speed has changed since then
    prior = Measured(predicted, DOUBT * predicted, _PRIOR)
    return None if prior.contradicts(trial, _AGREES) else prior
