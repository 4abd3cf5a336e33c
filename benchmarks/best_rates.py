"""What methods cost at their own best learning rates: searches each one's rate, and then trains it over five seeds.

    python benchmarks/best_rates.py --dry-run                   # lists the first trainings
    python benchmarks/best_rates.py                             # all trainings; many hours of each core
    python benchmarks/best_rates.py --workload gpt --only eden:bits=1 --only terngrad
    python benchmarks/best_rates.py --page-only                 # only the page, from the existing trainings

The search of a method trains rates that differ by factors of two, and continues until the best rate is between two
others. It trains each rate with one seed, and the rates that are close to the best with two more: near the highest
rates that work, one seed may train well and the next one badly. The search begins around the best rate of dense
training, whose own search comes first. The best rate is then trained with other seeds, which the search has not seen;
so is the best rate of dense training. Each training is a separate process, is kept below --runs, and is not repeated;
trainings.csv there has the figures of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
from best_rates_page import write_page
from best_rates_rows import DENSE, WORKLOADS, RateRun, methods_of, name_of
from best_rates_search import FARTHEST, HELD_OUT, SEARCHED, at_best_rates, at_rate_of_dense, grid_of, search
from pages import end_if_failed, options_of_trainings

from hvdcomp.tools.reproduce.trainings import Run, keep_records, seeds_there, train_missing
from hvdcomp.tools.terminal import make_console


def trained(runs: Path) -> list[RateRun]:
    """All trainings of workloads and methods that are in a folder or in its file of records."""
    seeds = seeds_there(runs)
    return [
        RateRun(workload, seed, runs, spec, doublings)
        for workload in WORKLOADS
        for spec in methods_of(workload)
        for doublings in range(-FARTHEST, FARTHEST + 1)
        for seed in seeds
    ]


@click.command()
@options_of_trainings(WORKLOADS, "best-rates", seeds=",".join(map(str, HELD_OUT)))
@click.option("--only", multiple=True, metavar="METHOD", help="A row, or a compressor; repeatable; default: all.")
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
    if seen := sorted(set(SEARCHED) & set(seeds)):
        shown = ", ".join(map(str, seen))
        raise click.BadParameter(f"the search sees {shown}; give others, from 101 on", param_hint="--seeds")
    console = make_console(soft_wrap=True)
    chosen = {
        name: [spec for spec in methods_of(name) if not only or spec in only or name_of(spec) in only]
        for name in workloads or WORKLOADS
    }
    if not any(chosen.values()):
        rows = ", ".join(dict.fromkeys(spec for name in workloads or WORKLOADS for spec in methods_of(name)))
        raise click.BadParameter(f"{', '.join(only)} is no row; choose from {rows}", param_hint="--only")

    if dry_run:
        first = [run for name in chosen for run in grid_of(name, DENSE, runs, 0).next]
        train_missing(first, console, dry_run=True)
        return

    def train(todo: Sequence[RateRun]) -> list[Run]:
        return train_missing(todo, console, workers=workers)

    failed: list[Run] = []
    try:
        if not page_only:
            for name, specs in chosen.items():
                failed += search(name, specs, runs, train)
                failed += train(at_best_rates(name, specs, runs, seeds))
            for name, specs in chosen.items():
                failed += train(at_rate_of_dense(name, specs, runs, seeds))
    finally:
        keep_records(trained(runs), runs)
    if write_page(table, runs, seeds):
        console.print(f"wrote {table}, and a CSV beside it")
    else:
        console.print(f"there is no finished training in {runs}")
    end_if_failed(failed, console)


if __name__ == "__main__":
    main()
