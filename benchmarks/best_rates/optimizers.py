"""Writes docs/optimizers.md, which shows the methods that suit each optimizer, from the training runs at the best
learning rates.

    python -m benchmarks.best_rates.optimizers

It reads benchmarks/measured/best-rates/trainings.csv, and does not train anything. `python -m benchmarks.best_rates
--workload sorting-soap` adds the training runs of one optimizer on one task.
"""

from __future__ import annotations

from pathlib import Path

import click

from benchmarks.best_rates.outcomes import Outcome, outcome_of
from benchmarks.best_rates.page import in_one_sentence
from benchmarks.best_rates.rows import DENSE, METHODS_OF_OTHERS, TASKS_OF_OTHERS, is_accuracy, rate_of
from benchmarks.best_rates.rule import BOUNDS, OTHER_SITUATIONS, Situation, chosen, standings_of, undecided
from benchmarks.best_rates.search import HELD_OUT, MORE_SEEDS, SEARCH_SEEDS
from benchmarks.pages import MEASURED, filled, findings_of, with_interval
from benchmarks.trainings import kept_records
from hvdcomp.files import commits_in_words, provenance_last, replace_text

SITUATIONS = (
    Situation("AdamW", TASKS_OF_OTHERS, METHODS_OF_OTHERS, "Adam"),
    *OTHER_SITUATIONS,
    Situation("Muon", tuple(f"{task}-muon" for task in TASKS_OF_OTHERS), METHODS_OF_OTHERS, "Muon"),
)
"""The optimizers on the page. For each optimizer, there is a workload for each task."""
TASKS = {
    "heavy-tails": "The task is a regression with outliers. We trained a network with two hidden layers for 400 steps.",
    "sorting": "The task is to sort 16 numbers. We trained a transformer with two layers for 300 steps.",
}


def write_page(file: Path, runs: Path) -> None:
    """Writes the page from all records in the folder `runs`."""
    workloads = {name for situation in SITUATIONS for name in situation.workloads}
    records = [one for one in kept_records(runs).values() if one["workload"] in workloads]
    commits = commits_in_words(record["commit"] for record in records) if records else "none"
    lines = [
        "# Methods for other optimizers",
        "",
        filled(
            "This page helps you choose a compression method for optimizers other than SGD and AdamW. We trained with "
            "each method at its own best learning rate. We compare the results with uncompressed training with the "
            "same optimizer, also at its own best learning rate."
        ),
        "",
        "Made by `python -m benchmarks.best_rates.optimizers`,\nfrom training runs at commit " + commits + ".",
        "",
        findings_of(file),
        "",
        "<!-- made: tables -->",
        *_choices(runs),
        *(line for task in TASKS_OF_OTHERS for line in _section(task, runs)),
        *_method(),
        "<!-- end of tables -->",
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_text(file, provenance_last("\n".join(lines).rstrip() + "\n"))


def _choices(runs: Path) -> list[str]:
    lines = []
    for situation in SITUATIONS:
        if any(outcome_of(workload, DENSE, runs, HELD_OUT).lacks for workload in situation.workloads):
            continue
        standings = standings_of(situation, runs)
        found, missing = chosen(standings), undecided(standings)
        first, second = found.get(BOUNDS[0]), found.get(BOUNDS[1])
        best, next_best = (
            "-" if one is None else f"`{one.method}` ({one.factor:.0f} times fewer)" for one in (first, second)
        )
        still = in_one_sentence([f"`{standing.method}`" for standing in missing])
        lines.append(f"| {situation.name} | {best} | {next_best} | {still} |")
    return [
        "## What to use",
        "",
        filled(
            "For each optimizer, the table shows the method that sends the fewest bytes among the methods that lose "
            "little quality on both tasks. For the second column, a method may raise the loss by at most "
            f"{BOUNDS[0]:g} %, or lower the accuracy by at most {BOUNDS[0]:g} point, at the upper end of the 95 % "
            f"interval. For the third column, the limits are {BOUNDS[1]:g} % and {BOUNDS[1]:g} points. A method is in "
            "the third column only if it sends fewer bytes than the method in the second column."
        ),
        "",
        f"| optimizer | loses at most {BOUNDS[0]:g} | loses at most {BOUNDS[1]:g} | not measured yet |",
        "|---|---|---|---|",
        *lines,
        "",
    ]


def _section(task: str, runs: Path) -> list[str]:
    unit = "points of accuracy" if is_accuracy(task) else "% of the loss"
    quality = "accuracy (%)" if is_accuracy(task) else "validation loss"
    lines = []
    for situation in SITUATIONS:
        workload = situation.workloads[TASKS_OF_OTHERS.index(task)]
        dense = outcome_of(workload, DENSE, runs, HELD_OUT)
        if dense.lacks:
            continue
        own = dense.complete
        cells = [f"{rate_of(workload, own.doublings):g}", own.shown]
        cells += [_lost(outcome_of(workload, method, runs, HELD_OUT), dense) for method in METHODS_OF_OTHERS]
        lines.append(f"| {situation.name} | {' | '.join(cells)} |")
    head = ["optimizer", "best rate", f"uncompressed: {quality}", *(f"`{method}`" for method in METHODS_OF_OTHERS)]
    return [
        f"## {task}",
        "",
        filled(
            f"{TASKS[task]} The column of each method shows how much worse the method is than uncompressed training, "
            f"in {unit}."
        ),
        "",
        f"| {' | '.join(head)} |",
        f"|---|{'--:|' * (len(head) - 1)}",
        *(lines or ["| no complete row yet |" + " |" * (len(head) - 1)]),
        "",
    ]


def _lost(outcome: Outcome, dense: Outcome) -> str:
    if outcome.lacks:
        return "not measured"
    own = outcome.complete
    return f"{own.diverged} diverged" if own.diverged else with_interval(own.lost_beside(dense.complete), "+.1f")


def _method() -> list[str]:
    packages = ("pytorch-optimizer 4.1.0 (GaLore, Lion, schedule-free AdamW, SOAP)", "bitsandbytes 0.50.2 (AdamW8bit)")
    items = (
        "**Ranks and seeds**: We trained on four simulated ranks. The tables show means over the seeds "
        f"{in_one_sentence([str(seed) for seed in HELD_OUT])} with their 95 % intervals. With AdamW and with Muon, we "
        f"used {MORE_SEEDS['heavy-tails']} seeds for the regression, and {MORE_SEEDS['sorting']} for the transformer.",
        "**Learning rates**: We tried rates that differ by factors of two until the best rate was between two worse "
        "rates. We repeated this search for every method with every optimizer. With AdamW and with Muon, we trained "
        f"at each rate with {SEARCH_SEEDS['sorting']} seeds, and the best rate is the one with the best mean. With the "
        "other optimizers, we trained at each rate with a single seed, so their rates are less certain.",
        "**Other options** of an optimizer keep the defaults of its package. For GaLore, the rank of a projection is a "
        "quarter of the matrix's smaller side, and the projection changes every 50 steps. Schedule-free AdamW has a "
        "constant learning rate after the warm-up; all other optimizers have a cosine schedule. The weight decay is "
        "the same as in the training runs with AdamW: 0 for the regression, and 0.1 for the transformer.",
        f"**Packages**: {in_one_sentence(packages)}. Adafactor and Muon come from PyTorch.",
        "**Train with such an optimizer yourself**: `hvdcomp train` accepts the name of a class, for example "
        "`hvdcomp train --optimizer pytorch_optimizer.SOAP`.",
    )
    return ["## How this was measured", "", *(filled(item, bullet=True) for item in items), ""]


@click.command()
@click.option("--runs", type=click.Path(path_type=Path), default=MEASURED / "best-rates", show_default=True)
@click.option("--table", type=click.Path(path_type=Path), default=Path("docs/optimizers.md"), show_default=True)
def main(runs: Path, table: Path) -> None:
    """Writes the page of methods by optimizer, from the records of training runs."""
    write_page(table, runs)
    click.echo(f"wrote {table}")


if __name__ == "__main__":
    main()
