"""The search for a method's best learning rate. It tries rates that differ by factors of two, until the best rate is
between two worse rates.

The search trains with several seeds at each rate, and compares the means over these seeds (`SEARCH_SEEDS`). With a
single seed, the search would often find a rate that is the best by chance only.

A row is complete if two conditions are met. Its best rate is between two worse rates of the search, and the method was
trained at the best rate with five seeds that the search has not used. The row of dense training on the same workload
must meet these two conditions, too.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.best_rates.rows import DENSE, RAISED, RateRun, is_accuracy, lost_beside
from benchmarks.trainings import Run

SEARCH_SEEDS = {
    **dict.fromkeys(("heavy-tails", "heavy-tails-muon", "mnist1d", "shapes", "sorting", "sorting-muon"), 5),
    **dict.fromkeys(("gpt", "gpt-muon", "lstm"), 3),
}
"""Numbers of seeds of the search. With a single seed, a rate may seem better than another by chance. For example, the
accuracies of thirty uncompressed training runs on `shapes` at the same rate were between 71 and 93 %. One GPT reached
its lowest loss at a rate at which two of five other seeds ended 6 and 23 % above this loss."""
HELD_OUT = (101, 102, 103, 104, 105)
"""The seeds of the training runs from which the figures are computed. No choice depends on training runs with these
seeds."""
MORE_SEEDS = {"heavy-tails": 30, "heavy-tails-muon": 30, "shapes": 30, "sorting": 10, "sorting-muon": 10}
"""Numbers of held-out seeds of quick workloads. With only five seeds, these workloads cannot show a loss of quality of
a few percent or points, because the results differ too much between seeds."""
TIE = 0.1
"""If the mean quality at another rate is worse than at the best rate by at most this much, in percent of the loss or in
points of accuracy, both rates count as equally good. A few seeds cannot show such a small difference."""
FARTHEST = 8
"""Largest number of doublings or halvings of the workload's own learning rate. A search tries no rate beyond this
limit, even if it has not found a best rate between two worse rates."""


def search_seeds_of(workload: str) -> tuple[int, ...]:
    """The seeds of the search on a workload. They are never among the held-out seeds, which begin at 101."""
    return tuple(range(SEARCH_SEEDS.get(workload, 1)))


def seeds_of(workload: str, seeds: Sequence[int]) -> tuple[int, ...]:
    """The held-out seeds of a workload: the given seeds, and additional seeds if the workload is noisy."""
    further = range(HELD_OUT[0], HELD_OUT[0] + MORE_SEEDS.get(workload, 0))
    return tuple(dict.fromkeys((*seeds, *further)))


@dataclass(frozen=True)
class Grid:
    """The learning rates at which the search has trained a method.

    Attributes:
        lost: for each rate, by its doublings, how much worse the mean quality over the seeds of the search was than at
            the best rate: in percent of the loss, or in points of accuracy. Infinite if a training run diverged. A rate
            is missing if it was not trained with all these seeds.
        best: doublings of the best learning rate. If several rates are equally good (`TIE`), this is the lowest of
            them, because training runs at a higher rate are more likely to end badly.
        next: the training runs that the search needs next; empty if the best rates are between two other rates that
            were trained.
        trained: number of training runs of the search so far.
    """

    lost: Mapping[int, float]
    best: int
    next: tuple[RateRun, ...]
    trained: int = 0

    @property
    def is_inside(self) -> bool:
        """Whether no training run at the best rate diverged, and the rates that are equally good are between two worse
        rates."""
        equal = _equally_good(self.lost)
        return bool(equal) and {min(equal) - 1, max(equal) + 1} <= self.lost.keys()


def grid_of(workload: str, spec: str, runs: Path, start: int) -> Grid:
    """The learning rates at which a method has been trained so far.

    Args:
        start: the learning rate at which the search begins, as a number of doublings of the workload's own rate.
    """

    seeds = search_seeds_of(workload)

    def runs_at(place: int) -> list[RateRun]:
        return [RateRun(workload, seed, runs, spec, place) for seed in seeds]

    def untrained(*places: int) -> tuple[RateRun, ...]:
        every = [run for at in places if abs(at) <= FARTHEST for run in runs_at(at)]
        return tuple(run for run in every if run.quality is None)

    every = {
        at: [quality for run in runs_at(at) if (quality := run.quality) is not None]
        for at in range(-FARTHEST, FARTHEST + 1)
    }
    count = sum(map(len, every.values()))
    # The mean is NaN if a training run diverged.
    trained = {at: statistics.fmean(found) for at, found in every.items() if len(found) == len(seeds)}
    if not trained:
        return Grid({}, start, untrained(start - 1, start, start + 1), count)
    finished = [quality for quality in trained.values() if not math.isnan(quality)]
    if not finished:  # all rates were too high
        lower = min(trained) - 1
        return Grid(dict.fromkeys(trained, math.inf), lower, untrained(lower), count)
    best_quality = (max if is_accuracy(workload) else min)(finished)
    lost = {
        at: math.inf if math.isnan(quality) else lost_beside(workload, quality, best_quality)
        for at, quality in trained.items()
    }
    equal = _equally_good(lost)
    return Grid(lost, min(equal), untrained(min(equal) - 1, max(equal) + 1), count)


def _equally_good(lost: Mapping[int, float]) -> list[int]:
    """The rates that are as good as the best rate, as in `Grid.lost`."""
    return [at for at, worse in lost.items() if worse <= TIE]


_DENSE_STARTS = {"gpt": 2, "gpt-muon": 3}
"""For workloads whose own learning rate is far from the best rate: the number of doublings of the own rate with which
the search for dense training begins."""


def start_of(workload: str, spec: str, runs: Path) -> int:
    """The learning rate at which the search for a method begins, as a number of doublings of the workload's own rate.
    It is the best rate of dense training. If ranks exchange compressed steps, the search begins at twice the best rate
    of dense training, because the mean of the steps is shorter than each step."""
    start = _DENSE_STARTS.get(workload, 0)
    if spec == DENSE:
        return start
    return grid_of(workload, DENSE, runs, start).best + (spec in RAISED)


def search(
    workload: str, specs: Sequence[str], runs: Path, train: Callable[[Sequence[RateRun]], Sequence[Run]]
) -> list[Run]:
    """Trains first without compression and then with all methods, until each best rate is between two worse rates.

    Returns:
        the training runs that failed. A failed training run ends the search for its method.
    """
    failed: list[Run] = []
    for methods in ([DENSE], specs):
        starts = {spec: start_of(workload, spec, runs) for spec in methods}
        while True:
            todo = [run for spec, start in starts.items() for run in grid_of(workload, spec, runs, start).next]
            todo = [run for run in todo if run not in failed]
            if not todo:
                break
            failed += train(todo)
    return failed


def best_of(workload: str, spec: str, runs: Path) -> int:
    """The best learning rate of a method so far, as a number of doublings of the workload's own rate."""
    return grid_of(workload, spec, runs, start_of(workload, spec, runs)).best


def at_best_rates(workload: str, specs: Sequence[str], runs: Path, seeds: Sequence[int]) -> list[RateRun]:
    """Dense training and the methods, each at its own best learning rate."""
    best = {spec: best_of(workload, spec, runs) for spec in (DENSE, *specs)}
    every = seeds_of(workload, seeds)
    return [RateRun(workload, seed, runs, spec, doublings) for seed in every for spec, doublings in best.items()]


def at_rate_of_dense(workload: str, specs: Sequence[str], runs: Path, seeds: Sequence[int]) -> list[RateRun]:
    start = best_of(workload, DENSE, runs)
    return [RateRun(workload, seed, runs, spec, start) for seed in seeds_of(workload, seeds) for spec in specs]
