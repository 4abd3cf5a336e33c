"""Compares methods at their own best learning rates: searches for each method's best rate, and trains the method at
this rate with five seeds.

    python -m benchmarks.best_rates --dry-run                   # lists the next runs, and the hours of all missing runs
    python -m benchmarks.best_rates                             # all training runs; many hours on all cores
    python -m benchmarks.best_rates --workload gpt --only eden:bits=1 --only terngrad
    python -m benchmarks.best_rates --page-only                 # only the page, from the existing training runs

The search for a method trains at rates that differ by factors of two, and continues until the best rate is between two
worse rates. It trains at each rate with several seeds. The search for dense training comes first, and the other
searches begin around its best rate.

Then each method is trained at its best rate, and at the best rate of dense training, with seeds that the search has not
used. Each training run is a separate process and has a folder below --runs. A complete run is not repeated. The file
trainings.csv in --runs keeps the figures of all training runs.

The training runs that decide README's table come first (rule.py). A method that loses too much on a quick task is not
trained on slow tasks. You can stop the command at any time. To continue, start it again with the same arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.best_rates.page import write_page
from benchmarks.best_rates.plan import OWN, SAME, STAGES, Item, estimates, items, next_items, variant_runs
from benchmarks.best_rates.rows import TRAINED, WORKLOADS, WORKLOADS_OF_OTHERS, RateRun, methods_of, name_of
from benchmarks.best_rates.search import (
    FARTHEST,
    HELD_OUT,
    at_best_rates,
    at_rate_of_dense,
    grid_of,
    search,
    start_of,
)
from benchmarks.pages import end_if_failed, options_of_trainings
from benchmarks.trainings import Run, keep_records, kept_records, seeds_there, train_missing
from hvdcomp.tools.terminal import make_console

Train = Callable[[Sequence[RateRun]], list[Run]]


def trained(runs: Path) -> list[RateRun]:
    """All training runs of this benchmark that have results, either in their own folder below `runs` or in the file of
    records."""
    seeds = seeds_there(runs)
    return [
        RateRun(workload, seed, runs, spec, doublings)
        for workload in TRAINED
        for spec in methods_of(workload)
        for doublings in range(-FARTHEST, FARTHEST + 1)
        for seed in seeds
    ]


def train_items(group: Sequence[Item], runs: Path, seeds: Sequence[int], train: Train) -> list[Run]:
    """Trains rows that share a workload and a kind (`Item.kind`), and returns the training runs that failed."""
    workload, methods = group[0].workload, [item.method for item in group]
    if group[0].kind == SAME:
        return train(at_rate_of_dense(workload, methods, runs, seeds))
    if group[0].kind != OWN:
        return train(variant_runs(workload, group[0].kind, methods, runs))
    failed = search(workload, methods, runs, train)
    return failed + train(at_best_rates(workload, methods, runs, seeds))


def show_plan(plan: Sequence[Item], runs: Path, console: Any) -> None:
    """Prints the commands of the next training runs, and how long all missing training runs take."""
    first: list[RateRun] = []
    done: list[Item] = []
    while not first and (group := next_items(plan, done)):
        searches = [(one.workload, one.method, start_of(one.workload, one.method, runs)) for one in group]
        first = [run for workload, method, start in searches for run in grid_of(workload, method, runs, start).next]
        done += group
    train_missing(first, console, dry_run=True)
    least = usual = 0.0
    for number, estimate in enumerate(estimates(plan, runs), 1):
        least, usual = least + estimate.least, usual + estimate.usual
        console.print(
            f"{number}. {estimate.stage}: {estimate.rows} rows, about {estimate.trainings:.0f} trainings, "
            f"{estimate.least:.1f} to {estimate.usual:.1f} hours of a core"
        )
    console.print(
        f"All {len(STAGES)} stages together take {least:.1f} to {usual:.1f} hours of a core, if no row makes another "
        "row unnecessary. The first number assumes the quickest training of each workload so far, the second number "
        "the median training"
    )


@click.command()
@options_of_trainings({**WORKLOADS, **WORKLOADS_OF_OTHERS}, "best-rates", seeds=",".join(map(str, HELD_OUT)))
@click.option(
    "--only",
    multiple=True,
    metavar="METHOD",
    help="Train only this row, or the rows of this compressor. You can repeat the option. Default: all rows.",
)
def main(
    workloads: tuple[str, ...],
    only: tuple[str, ...],
    seeds: tuple[int, ...],
    workers: int | None,
    runs: Path,
    table: Path,
    dry_run: bool,
    page_only: bool,
) -> None:
    """Trains methods at their best learning rates on simulated ranks, and writes the page of all trainings."""
    if min(seeds) < HELD_OUT[0]:
        raise click.BadParameter(
            f"{min(seeds)} may be a seed of the search; give other seeds, from {HELD_OUT[0]} on", param_hint="--seeds"
        )
    console = make_console(soft_wrap=True)
    names = workloads or (*WORKLOADS, *WORKLOADS_OF_OTHERS)

    def plan() -> list[Item]:
        return [item for item in items(runs) if item.workload in names and _is_chosen(item.method, only)]

    if not plan():
        rows = ", ".join(dict.fromkeys(spec for name in names for spec in methods_of(name)))
        raise click.BadParameter(
            f"{', '.join(only)} is not a row of the benchmark; choose from {rows}", param_hint="--only"
        )
    if dry_run:
        show_plan(plan(), runs, console)
        return

    def train(todo: Sequence[RateRun]) -> list[Run]:
        missing = [run for run in todo if run.record is None]
        try:
            return train_missing(missing, console, workers=workers) if missing else []
        finally:
            keep_records(missing, runs)  # also if the command is stopped, so that no record is lost

    failed: list[Run] = []
    if page_only:
        keep_records(trained(runs), runs)
    else:
        order, done, count = plan(), list[Item](), 0
        while group := next_items(order, done):
            failed += train_items(group, runs, seeds, train)
            done += group
            if (now := len(kept_records(runs))) > count:  # a new record may change the order of the next runs
                order, count = plan(), now
    if write_page(table, runs, seeds):
        console.print(f"wrote {table}, and a CSV beside it")
    else:
        console.print(f"there is no finished training in {runs}")
    end_if_failed(failed, console)


def _is_chosen(method: str, only: Sequence[str]) -> bool:
    return not only or method in only or name_of(method) in only


if __name__ == "__main__":
    main()
