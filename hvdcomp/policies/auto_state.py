"""What `auto` knows while it chooses: candidates, what their steps took, and which trial is under way."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hvdcomp.policies.median import median_with_error
from hvdcomp.policies.request import Candidate

PATIENCE = 4
"""Looks in a row that have to find another time, before all is open again for the first time."""


@dataclass(frozen=True)
class Measured:
    """What steps of a candidate took.

    Attributes:
        seconds: their median.
        error: standard error of it.
        steps: how many were counted.
    """

    seconds: float
    error: float
    steps: int

    @classmethod
    def of(cls, times: Sequence[float]) -> Measured:
        """Of at least one time."""
        return cls(*median_with_error(times), len(times))

    def scaled(self, factor: float) -> Measured:
        """The same of steps that take `factor` times as long."""
        return Measured(factor * self.seconds, factor * self.error, self.steps)

    def with_more(self, other: Measured, most: int) -> Measured:
        """Both together, each by its number of steps; of what was known before, no more than `most` weigh."""
        old = min(self.steps, most)
        steps = old + other.steps
        seconds = (old * self.seconds + other.steps * other.seconds) / steps
        return Measured(seconds, math.hypot(old * self.error, other.steps * other.error) / steps, steps)


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
        trying: whether it is being tried; else it stays until something speaks against it.
        rival: the candidate that is compared with what is being tried; "" for none, as of the first of all.
        tried: the candidate whose trial is over, while the steps that follow it are measured; "" for none.
        latest: of the rival, or else of the chosen candidate, its latest steps; None where those are too few.
        times: seconds of the steps of this trial that count, or of the one that has just ended.
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
    trying: bool = False
    rival: str = ""
    tried: str = ""
    latest: Measured | None = None
    times: tuple[float, ...] = ()
    measured: Mapping[str, Measured] = field(default_factory=dict)
    before: Mapping[str, float] = field(default_factory=dict)
    usual: Mapping[str, float] = field(default_factory=dict)
    drifted: int = 0
    patience: int = PATIENCE
    reopened: str = ""
    elapsed: float = 0.0
    spent: float = 0.0
