"""The results of one method's training runs: its figures if all needed runs exist, otherwise what is missing."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.best_rates.rows import DENSE, RateRun, is_accuracy, lost_beside, methods_of, rate_of
from benchmarks.best_rates.search import FARTHEST, HELD_OUT, Grid, grid_of, seeds_of, start_of
from benchmarks.pages import mean_and_interval, with_interval

FORGIVING = 1.0
"""A learning rate counts as good if its quality is at most this much worse than the quality at the best rate: in
percent of the loss, or in points of accuracy."""


@dataclass(frozen=True)
class Row:
    """The training runs of a method at one learning rate, with several seeds.

    Attributes:
        qualities: the quality of each training run (`RateRun.quality`), by seed.
    """

    workload: str
    spec: str
    doublings: int
    factor: float
    qualities: Mapping[int, float]

    def lost_beside(self, other: Row) -> list[float]:
        """For each seed that both rows have, how much worse this row's quality is; empty if any of these training runs
        diverged."""
        seeds = sorted(self.qualities.keys() & other.qualities.keys())
        lost = [lost_beside(self.workload, self.qualities[seed], other.qualities[seed]) for seed in seeds]
        return [] if any(map(math.isnan, lost)) else lost

    @property
    def diverged(self) -> int:
        return sum(map(math.isnan, self.qualities.values()))

    @property
    def shown(self) -> str:
        if self.diverged:
            return f"{self.diverged} of {len(self.qualities)} diverged"
        return with_interval(list(self.qualities.values()), ".2f" if is_accuracy(self.workload) else ".4f")


def row_of(workload: str, spec: str, doublings: int, runs: Path, seeds: Iterable[int]) -> Row | None:
    """The row made of those training runs that have a record; None if no training run has a record."""
    factors, qualities = [], {}
    for seed in seeds:
        run = RateRun(workload, seed, runs, spec, doublings)
        record, quality = run.record, run.quality
        if record is not None and quality is not None:
            factors.append(record["factor"])
            qualities[seed] = quality
    return Row(workload, spec, doublings, statistics.mean(factors), qualities) if factors else None


@dataclass(frozen=True)
class Outcome:
    """The results of a method on a workload.

    Attributes:
        grid: the learning rates at which the search for the best learning rate has trained the method.
        own: the row at the method's own best learning rate; None if it was not trained with a held-out seed.
        same: the row at the best learning rate of dense training; None if it was not trained.
        lacks: a description of what is missing; empty if nothing is missing. Figures are shown only if nothing is
            missing.
    """

    workload: str
    spec: str
    grid: Grid
    own: Row | None
    same: Row | None
    lacks: tuple[str, ...]

    @property
    def complete(self) -> Row:
        """The row at the method's own best learning rate, if nothing is missing; otherwise None."""
        assert self.own is not None
        assert not self.lacks
        return self.own

    @property
    def is_begun(self) -> bool:
        return bool(self.grid.trained)

    @property
    def good(self) -> tuple[float, float]:
        """The lowest and the highest learning rate in the search whose loss compared with the best rate is small
        (`FORGIVING`)."""
        rates = [rate_of(self.workload, at) for at, lost in self.grid.lost.items() if lost <= FORGIVING]
        return min(rates), max(rates)


def outcome_of(workload: str, spec: str, runs: Path, seeds: Sequence[int]) -> Outcome:
    """The results of a method. If something is missing for dense training on the same workload, it counts as missing
    for all methods on this workload."""
    seeds = seeds_of(workload, seeds)
    grid = grid_of(workload, spec, runs, start_of(workload, spec, runs))
    own = row_of(workload, spec, grid.best, runs, seeds)
    lacks = _lacks_of(grid, own, seeds)
    if spec == DENSE:
        return Outcome(workload, spec, grid, own, None, lacks)
    of_dense = grid_of(workload, DENSE, runs, start_of(workload, DENSE, runs))
    if _lacks_of(of_dense, row_of(workload, DENSE, of_dense.best, runs, seeds), seeds):
        lacks += ("a complete row of dense training",)
    return Outcome(workload, spec, grid, own, row_of(workload, spec, of_dense.best, runs, seeds), lacks)


def _lacks_of(grid: Grid, own: Row | None, seeds: Sequence[int]) -> tuple[str, ...]:
    if not grid.trained:
        return ("every training",)
    if not grid.lost:
        return ("a learning rate that was trained with all seeds of the search",)
    lacks = []
    if grid.next:
        lacks.append(f"a worse learning rate on either side of the best of {len(grid.lost)} rates")
    elif not grid.is_inside:
        lacks.append(f"a best learning rate less than {FARTHEST} factors of two away from the first rate")
    there, needed = 0 if own is None else len(own.qualities), max(len(HELD_OUT), len(seeds))
    if there < needed:
        lacks.append(f"{needed - there} of {needed} held-out seeds")
    return tuple(lacks)


def outcomes_of(
    workload: str, runs: Path, seeds: Sequence[int], methods: Sequence[str] | None = None
) -> dict[str, Outcome]:
    """The results of the methods on a workload, by spec, with dense training first. `only` limits the methods."""
    chosen = methods_of(workload) if methods is None else methods
    return {spec: outcome_of(workload, spec, runs, seeds) for spec in dict.fromkeys([DENSE, *chosen])}


def interval_of(values: Sequence[float]) -> tuple[float, float] | None:
    """The mean, and half of its 95 % confidence interval; None if there are fewer than two values."""
    return mean_and_interval(values) if len(values) > 1 else None
