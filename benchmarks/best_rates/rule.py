"""The rule for README's table "which method": for each optimizer, it chooses the method that sends the fewest bytes
among those that lose little on every task.

A method is within a bound if two conditions are met on every workload with the optimizer: the method's row is complete,
and the upper end of its 95 % interval is at most the bound. The interval describes the quality that the method loses
compared with dense training, in percent of the loss or points of accuracy. The method and dense training are each at
their own best rate. The first method for an optimizer is the one that sends the fewest bytes among the methods within
the first of `BOUNDS`. The second method is within the second bound, and is named only if it sends even fewer bytes. A
method that exceeds all bounds on one workload is excluded, so its other rows are not trained.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.best_rates.outcomes import Outcome, interval_of, outcome_of
from benchmarks.best_rates.rows import (
    CANDIDATES,
    DENSE,
    FROZEN,
    KINDS_OF_OTHERS,
    METHODS_OF_OTHERS,
    STEPS,
    TASKS_OF_OTHERS,
)
from benchmarks.best_rates.search import HELD_OUT

BOUNDS = (1.0, 3.0)
"""The bounds of the rule: how much worse than dense training a method may be, in percent of the loss or points of
accuracy."""


@dataclass(frozen=True)
class Situation:
    """A kind of training, such as training with Adam. README's table names methods for each of these situations.

    Attributes:
        name: the text in the first column of README's table.
        workloads: names of the workloads on which a method must be good, quickest first.
        methods: the methods to choose from, from the fewest bytes to the most.
        optimizer: kind of the optimizer, as in `hvdcomp.compressors.evidence`; None if the methods do not compress
            gradients.
    """

    name: str
    workloads: tuple[str, ...]
    methods: tuple[str, ...]
    optimizer: str | None


_ADAMW = ("heavy-tails", "sorting", "gpt")
_MUON = ("heavy-tails-muon", "sorting-muon", "gpt-muon")
SITUATIONS = (
    Situation("SGD with momentum", ("shapes", "mnist1d", "lstm"), CANDIDATES["sgd"], "SGD"),
    Situation("Adam or AdamW", _ADAMW, CANDIDATES["adamw"], "Adam"),
    Situation(
        "[`CompressedAdam`](docs/adam.md) in place of AdamW",
        _ADAMW,
        tuple(name for name in FROZEN if not name.endswith(f" {DENSE}")),
        "CompressedAdam",
    ),
    Situation("[Muon](docs/muon.md)", _MUON, CANDIDATES["muon"], "Muon"),
    Situation("Muon, with [compressed steps](docs/compressed-steps.md)", _MUON, tuple(STEPS), None),
)


OTHER_SITUATIONS = tuple(
    Situation(kind, tuple(f"{task}-{name}" for task in TASKS_OF_OTHERS), METHODS_OF_OTHERS, kind)
    for name, kind in KINDS_OF_OTHERS.items()
)
"""The situations that are in docs/optimizers.md but not in README's table."""


@dataclass(frozen=True)
class Standing:
    """The results of a method on the workloads of a situation.

    Attributes:
        lost: for each workload with a complete row, by name, the mean loss of quality and half of its confidence
            interval, as in `Row.lost_beside`; infinite if a training run diverged.
        factors: for each workload with a complete row, by name, the compression factor of its trainings.
        open: the names of the workloads without a complete row.
    """

    method: str
    lost: Mapping[str, tuple[float, float]]
    factors: Mapping[str, float]
    open: tuple[str, ...]

    @property
    def factor(self) -> float:
        """The geometric mean of the compression factors over the workloads."""
        return statistics.geometric_mean(self.factors.values())

    def _exceeds(self, bound: float) -> bool:
        return any(mean + half > bound for mean, half in self.lost.values())

    def is_within(self, bound: float) -> bool:
        return not self.open and not self._exceeds(bound)

    def may_be_within(self, bound: float) -> bool:
        """Whether it is still undecided if the method is within a bound, because rows are missing."""
        return bool(self.open) and not self._exceeds(bound)


def standings_of(situation: Situation, runs: Path) -> list[Standing]:
    """The results of all methods of a situation, from the fewest bytes to the most."""
    return [_standing(situation, method, runs) for method in situation.methods]


def _standing(situation: Situation, method: str, runs: Path) -> Standing:
    needed = [(name, outcome_of(name, method, runs, HELD_OUT)) for name in situation.workloads]
    complete = [(name, outcome) for name, outcome in needed if not outcome.lacks]
    return Standing(
        method,
        {name: _lost(outcome, outcome_of(name, DENSE, runs, HELD_OUT)) for name, outcome in complete},
        {name: outcome.complete.factor for name, outcome in complete},
        tuple(name for name, outcome in needed if outcome.lacks),
    )


def _lost(outcome: Outcome, dense: Outcome) -> tuple[float, float]:
    return interval_of(outcome.complete.lost_beside(dense.complete)) or (math.inf, 0.0)


def chosen(standings: Sequence[Standing]) -> dict[float, Standing]:
    """For each bound, the method within the bound that sends the fewest bytes. A method is chosen for the second bound
    only if it sends fewer bytes than the method of the first bound."""
    found: dict[float, Standing] = {}
    for bound in BOUNDS:
        within = [standing for standing in standings if standing.is_within(bound)]
        best = max(within, key=lambda standing: standing.factor, default=None)
        if best is not None and all(best.factor > other.factor for other in found.values()):
            found[bound] = best
    return found


def undecided(standings: Sequence[Standing]) -> list[Standing]:
    """The methods whose missing rows may change the choice: for one of the bounds, such a method sends fewer bytes than
    every method within the bound, and may itself be within the bound."""
    found = []
    for bound in BOUNDS:
        first = next((at for at, standing in enumerate(standings) if standing.is_within(bound)), len(standings))
        found += [standing for standing in standings[:first] if standing.may_be_within(bound)]
    return [standing for standing in standings if standing in found]
