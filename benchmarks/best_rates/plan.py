"""The order of the training runs, and the time that the missing runs take. The runs that README's table needs come
first."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.best_rates.outcomes import outcome_of
from benchmarks.best_rates.rows import (
    DENSE,
    FROZEN,
    LONG,
    LONGER,
    MANY_RANKS,
    METHODS_OF_MANY_RANKS,
    OTHER_OPTIMIZERS,
    SEEDS_OF_VARIANTS,
    TRAINED,
    WORKLOADS,
    WORKLOADS_OF_OTHERS,
    RateRun,
    methods_of,
)
from benchmarks.best_rates.rule import SITUATIONS, Situation, chosen, standings_of, undecided
from benchmarks.best_rates.search import HELD_OUT, best_of, grid_of, search_seeds_of, seeds_of, start_of
from benchmarks.trainings import kept_records

STAGES = (
    "what README's table needs",
    "the other rows",
    "three times as many steps",
    "all methods at dense training's best rate",
    "sixteen ranks",
    "optimizers of other packages",
)
OWN, SAME = "at its own best rate", "at dense training's best rate"

_RATES_OF_A_SEARCH = 4
"""Expected number of learning rates that a search trains. The searches of the GPT trained three to five."""
_SHARE_OF_OTHER_RATES = 0.5
"""Expected share of methods whose best rate differs from the best rate of dense training."""
_QUIET_SECONDS = {"gpt": 100.0, "lstm": 70.0, "mnist1d": 26.0, "sorting": 17.0, "shapes": 17.0, "heavy-tails": 10.0}
"""For workloads without records, the seconds of a training run on an otherwise idle core, extrapolated from the
processor time of 40 steps. The number for the LSTM comes from its quickest training run in docs/convergence.md. The
number for the GPT is a guess."""
_SLOW = 30.0
"""If a training run takes at least this number of seconds, the rows of its workload are trained one after the other,
because the result of one row may make the next row unnecessary."""


@dataclass(frozen=True)
class Item:
    """A row that must be trained.

    Attributes:
        stage: number of the row's stage in `STAGES`.
        kind: `OWN` to train at the method's own best rate, `SAME` to train at the best rate of dense training, or the
            end of a variant's name, such as "-long".
    """

    stage: int
    kind: str
    workload: str
    method: str

    @property
    def group(self) -> tuple[int, str, str]:
        return self.stage, self.kind, self.workload

    @property
    def key(self) -> tuple[str, str, str]:
        return self.kind, self.workload, self.method


def items(runs: Path) -> list[Item]:
    """All rows in the order in which they are trained, as far as the existing records determine the order."""
    found: dict[tuple[str, str, str], Item] = {}
    for item in _items(runs):
        found.setdefault(item.key, item)
    return list(found.values())


def _items(runs: Path) -> Iterator[Item]:
    for situation in SITUATIONS:
        needed = [standing.method for standing in undecided(standings_of(situation, runs))]
        for workload in situation.workloads:
            for method in _with_control(needed) if needed else ():
                yield Item(0, OWN, workload, method)
    by_time = sorted(WORKLOADS, key=_quiet_seconds)
    for workload in by_time:
        for method in methods_of(workload):
            yield Item(1, OWN, workload, method)
    for situation in SITUATIONS:
        for workload in situation.workloads:
            for method in _with_control(named_in(situation, runs)):
                yield Item(2, LONG, workload, method)
    for workload in by_time:
        for method in methods_of(workload)[1:]:
            yield Item(3, SAME, workload, method)
    for workload in (name for name in by_time if name + MANY_RANKS in TRAINED):
        for method in METHODS_OF_MANY_RANKS:
            yield Item(4, MANY_RANKS, workload, method)
    for workload in WORKLOADS_OF_OTHERS:
        for method in methods_of(workload):
            yield Item(5, OWN, workload, method)


def _with_control(methods: Sequence[str]) -> list[str]:
    """Dense training and the given methods. If any of the methods freezes the optimizer, the result also has the frozen
    optimizer without compression."""
    frozen = [name for name in FROZEN if name.endswith(f" {DENSE}")] if set(methods) & FROZEN.keys() else []
    return [DENSE, *methods, *frozen]


def named_in(situation: Situation, runs: Path) -> list[str]:
    """The methods that the rule chooses for README's table. If the rule cannot decide yet, these are the methods to
    measure first."""
    standings = standings_of(situation, runs)
    found = [standing.method for standing in chosen(standings).values()]
    return found or [standing.method for standing in undecided(standings)[:1]]


def next_items(plan: Sequence[Item], done: Collection[Item]) -> list[Item]:
    """The rows to train next. All these rows have the same workload and kind. The result is several quick rows, or a
    single slow row.

    Args:
        plan: the rows to choose from, in the order of their trainings.
        done: rows that are not trained again, because they are complete or have failed.
    """
    keys = {item.key for item in done}
    left = [item for item in plan if item.key not in keys]
    if not left:
        return []
    first = left[0]
    if first.stage == 0 and _quiet_seconds(first.workload) >= _SLOW:
        return [first]
    return [item for item in left if item.group == first.group]


def variant_runs(workload: str, kind: str, methods: Sequence[str], runs: Path) -> list[RateRun]:
    """The training runs of a variant. These runs use the best learning rates that were found on the workload itself, so
    only methods with a complete row have them.

    Args:
        kind: end of the variant's name, such as "-long".
    """
    complete = [method for method in methods if not outcome_of(workload, method, runs, HELD_OUT).lacks]
    return [
        RateRun(workload + kind, seed, runs, method, best_of(workload, method, runs))
        for seed in SEEDS_OF_VARIANTS
        for method in complete
    ]


# The time that training takes.


def missing_trainings(item: Item, runs: Path, seeds: Sequence[int] = HELD_OUT) -> float:
    """The expected number of training runs that a row still needs."""
    workload, method = item.workload, item.method
    grid = grid_of(workload, method, runs, start_of(workload, method, runs))
    seeds = seeds_of(workload, seeds)
    own = [RateRun(workload, seed, runs, method, grid.best) for seed in seeds]
    if item.kind == OWN:
        left = _RATES_OF_A_SEARCH * len(search_seeds_of(workload)) - grid.trained
        held_out = sum(run.record is None for run in own)
        return held_out + (max(len(grid.next), left) if grid.next else 0)
    if item.kind != SAME:
        variant = [RateRun(workload + item.kind, seed, runs, method, grid.best) for seed in SEEDS_OF_VARIANTS]
        return sum(run.record is None for run in variant)
    at = best_of(workload, DENSE, runs)
    same = [RateRun(workload, seed, runs, method, at) for seed in seeds]
    left = sum(run.record is None for run in same)
    if grid.next:
        return _SHARE_OF_OTHER_RATES * left
    return 0 if at == grid.best else left


def seconds_of(workload: str, runs: Path) -> tuple[float, float]:
    """The seconds that a training run takes: the smallest and the median number in the workload's records. If the
    workload has no records, the two numbers come from a similar workload."""
    own = [record["seconds"] for record in kept_records(runs).values() if record["workload"] == workload]
    known = [seconds for seconds in own if seconds is not None]
    if known:
        return min(known), statistics.median(known)
    for suffix, times in _SIMILAR.items():
        if suffix in workload:
            least, usual = seconds_of(workload.replace(suffix, ""), runs)
            return times * least, times * usual
    return _QUIET_SECONDS[workload], _QUIET_SECONDS[workload]


_SIMILAR = {LONG: float(LONGER), MANY_RANKS: 4.0, "-muon": 1.0, **{f"-{name}": 1.0 for name in OTHER_OPTIMIZERS}}
"""For each addition to a workload's name, such as "-long", the factor by which training takes longer than without this
addition."""


def _quiet_seconds(workload: str) -> float:
    for suffix, times in _SIMILAR.items():
        if suffix in workload:
            return times * _quiet_seconds(workload.replace(suffix, ""))
    return _QUIET_SECONDS[workload]


@dataclass(frozen=True)
class Estimate:
    """The work that a stage still needs.

    Attributes:
        rows: number of rows that are not complete.
        trainings: expected number of missing training runs.
        least, usual: hours of one core, computed from the quickest and from the median training run of each workload.
    """

    stage: str
    rows: int
    trainings: float
    least: float
    usual: float


def estimates(among: Sequence[Item], runs: Path) -> list[Estimate]:
    """The work that each stage still needs, if no result makes other rows unnecessary."""
    found = []
    for number, stage in enumerate(STAGES):
        left = [(item, missing_trainings(item, runs)) for item in among if item.stage == number]
        left = [(item, count) for item, count in left if count]
        hours = [0.0, 0.0]
        for item, count in left:
            workload = item.workload + (item.kind if item.kind in (LONG, MANY_RANKS) else "")
            for at, seconds in enumerate(seconds_of(workload, runs)):
                hours[at] += count * seconds / 3600
        found.append(Estimate(stage, len(left), sum(count for _, count in left), *hours))
    return found
