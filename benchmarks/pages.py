"""Parts that the pages of several benchmarks share: confidence intervals, commits, and hand-written text."""

from __future__ import annotations

import math
import statistics
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.trainings import ROOT, Run
from hvdcomp.files import commits_in_words
from hvdcomp.tools.train.spread import estimate

MEASURED = ROOT / "benchmarks/measured"
"""Default folder for training runs. Git ignores the folders of the runs, but not the files of records."""


def mean_and_interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and half of its 95 % confidence interval. For a single value, the interval is NaN."""
    interval = estimate(values)
    assert interval is not None
    return interval.mean, math.nan if interval.half is None else interval.half


def with_interval(values: Sequence[float], form: str) -> str:
    """The mean and half of its 95 % confidence interval, as text in a given format; "-" if there is no value."""
    if not values:
        return "-"
    mean, half = mean_and_interval(values)
    return format(mean, form) + ("" if math.isnan(half) else f" ± {format(half, form.lstrip('+'))}")


def verdict(gains: Sequence[float]) -> str:
    """Whether the mean of paired differences is better or worse than zero, judged by its 95 % confidence interval."""
    if len(gains) < 2:
        return "one seed says nothing"
    mean, half = mean_and_interval(gains)
    if abs(mean) <= half:
        return "no difference shown"
    return "**better**" if mean > 0 else "worse"


def seeds_to_show(effect: float, differences: Sequence[float]) -> int:
    """How many seeds an experiment needs to show a true mean difference, in four of five such experiments.

    The number is computed from the standard deviation of the differences: the sample size of a two-sided, paired t-test
    with a level of 5 % and a power of 80 % (Guenther 1981, The American Statistician 35, 243 to 244).

    Args:
        effect: the true mean difference.
        differences: the differences that were measured, one for each seed.

    Example:
        >>> seeds_to_show(0.5, [0.0, 2.0])
        65
    """
    normal = statistics.NormalDist()
    level, power = normal.inv_cdf(0.975), normal.inv_cdf(0.8)
    spread = statistics.stdev(differences) / abs(effect)
    return math.ceil(((level + power) * spread) ** 2 + level**2 / 2)


def commits_of(runs: Iterable[Run]) -> str:
    """The commits at which runs were trained, for a page."""
    return commits_in_words(record["commit"] for run in runs if (record := run.record) is not None)


def formerly(command: str) -> str:
    """A sentence for a page with figures from older commits. It names the command that was used at those commits.

    Example:
        >>> formerly("hvdcomp reproduce NAME")
        'Before commit `b3ab40979f`, the command was `hvdcomp reproduce NAME`.'
    """
    return f"Before commit `b3ab40979f`, the command was `{command}`."


def filled(text: str, bullet: bool = False) -> str:
    """A paragraph, or an item of a list, wrapped to lines of at most 120 characters."""
    first, others = ("- ", "  ") if bullet else ("", "")
    return textwrap.fill(
        " ".join(text.split()), 120, initial_indent=first, subsequent_indent=others,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def end_if_failed(failed: Sequence[Run], console: Any) -> None:
    """If any runs failed, prints their names, and ends the process with status 1."""
    if failed:
        console.print(f"{len(failed)} failed: {', '.join(map(str, failed))}")
        sys.exit(1)


FINDINGS, END_OF_FINDINGS = "<!-- findings: written by hand, and kept -->", "<!-- end of findings -->"


def findings_of(page: Path) -> str:
    """The hand-written part of an existing page, with its marks; empty for a new page."""
    before = page.read_text() if page.exists() else ""
    findings = before.partition(FINDINGS)[2].partition(END_OF_FINDINGS)[0].strip()
    return f"{FINDINGS}\n{findings}\n{END_OF_FINDINGS}"


def parse_seeds(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    try:
        seeds = tuple(dict.fromkeys(int(seed) for seed in value.split(",")))
    except ValueError:
        seeds = (-1,)
    if min(seeds) < 0:
        raise click.BadParameter(f"{value!r} is not a list of seeds; give whole numbers of at least 0, such as 0,1,2")
    return seeds


def options_of_trainings(
    workloads: Iterable[str], name: str, seeds: str
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator that adds the common options of benchmarks that train workloads over seeds and write a page.

    Args:
        workloads: names of the workloads that a user may choose.
        name: name of the folder of training runs in `MEASURED`, and of the page in docs.
        seeds: default of the option --seeds.
    """
    path = click.Path(path_type=Path)
    options = (
        click.option(
            "--workload",
            "workloads",
            multiple=True,
            type=click.Choice(list(workloads)),
            help="Workload; repeatable. Default: all.",
        ),
        click.option("--seeds", default=seeds, show_default=True, callback=parse_seeds, metavar="SEED,..."),
        click.option("--workers", type=click.IntRange(1), help="Parallel trainings. Default: the number of cores."),
        click.option("--runs", type=path, default=MEASURED / name, show_default=True),
        click.option("--table", type=path, default=Path(f"docs/{name}.md"), show_default=True),
        click.option("--dry-run", is_flag=True, help="Only list the first trainings."),
        click.option("--page-only", is_flag=True, help="Only write the page, without any training."),
    )

    def add(command: Callable[..., None]) -> Callable[..., None]:
        for option in reversed(options):
            command = option(command)
        return command

    return add
