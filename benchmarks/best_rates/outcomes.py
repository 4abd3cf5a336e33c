"""What the trainings of best learning rates say of a method: its figures if its row is complete, or what it lacks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.best_rates.rows import DENSE, RateRun, is_accuracy, lost_beside, methods_of, rate_of
from benchmarks.best_rates.search import FARTHEST, HELD_OUT, Grid, grid_of, start_of
from benchmarks.pages import mean_and_interval, with_interval

FORGIVING = 1.0
"""A rate counts as good if it loses at most so much, in percent of the loss or points, beside the best rate."""


@dataclass(frozen=True)
class Row:
    """A method at a rate, over its seeds.

    Attributes:
        qualities: by seed, as `RateRun.quality`.
    """

    workload: str
    spec: str
    doublings: int
    factor: float
    qualities: Mapping[int, float]

    def lost_beside(self, other: Row) -> list[float]:
        """What it is worse by, for each seed that both have; empty if any of these diverged."""
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
    """The trainings that are there; None if there are none."""
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
    """A method in a workload.

    Attributes:
        grid: of the search.
        own: at its own best rate; None if that is not trained with any held-out seed.
        same: at dense training's best rate; None if that is not trained.
        lacks: what the row lacks, in words; empty if it is complete. Only figures of complete rows are shown.
    """

    workload: str
    spec: str
    grid: Grid
    own: Row | None
    same: Row | None
    lacks: tuple[str, ...]

    @property
    def complete(self) -> Row:
        """The row at its own best rate, of an outcome that lacks nothing."""
        assert self.own is not None
        assert not self.lacks
        return self.own

    @property
    def is_begun(self) -> bool:
        return bool(self.grid.lost)

    @property
    def good(self) -> tuple[float, float]:
        """The lowest and the highest rate of the search that lose little beside the best (`FORGIVING`)."""
        rates = [rate_of(self.workload, at) for at, lost in self.grid.lost.items() if lost <= FORGIVING]
        return min(rates), max(rates)


def outcome_of(workload: str, spec: str, runs: Path, seeds: Sequence[int]) -> Outcome:
    """What is trained of a method. Its row also lacks what dense training of the same workload lacks."""
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
    if not grid.lost:
        return ("every training",)
    lacks = []
    if grid.next:
        lacks.append(f"a worse learning rate on either side of the best of {len(grid.lost)} rates")
    elif not grid.is_inside:
        lacks.append(f"a best learning rate inside the grid, within {FARTHEST} factors of two")
    there, needed = 0 if own is None else len(own.qualities), max(len(HELD_OUT), len(seeds))
    if there < needed:
        lacks.append(f"{needed - there} of {needed} held-out seeds")
    return tuple(lacks)


def outcomes_of(
    workload: str, runs: Path, seeds: Sequence[int], methods: Sequence[str] | None = None
) -> dict[str, Outcome]:
    """By spec, the methods of a workload, or some of them; dense training is the first."""
    chosen = methods_of(workload) if methods is None else methods
    return {spec: outcome_of(workload, spec, runs, seeds) for spec in dict.fromkeys([DENSE, *chosen])}


def interval_of(values: Sequence[float]) -> tuple[float, float] | None:
    """The mean, and half of its 95 % interval; None without two values."""
    return mean_and_interval(values) if len(values) > 1 else None
