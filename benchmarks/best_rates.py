"""What methods cost at their own best learning rates: searches each one's rate, and then trains it over five seeds.

    python benchmarks/best_rates.py --dry-run                   # lists the first trainings
    python benchmarks/best_rates.py                             # all trainings; many hours of each core
    python benchmarks/best_rates.py --workload gpt --only eden --only none
    python benchmarks/best_rates.py --page-only                 # only the page, from the existing trainings

The search of a method trains rates that differ by factors of two, and continues until the best rate is between two
others. It trains each rate with one seed, and the rates that are close to the best with two more: near the highest
rates that work, one seed may train well and the next one badly. The search begins around the best rate of dense
training, whose own search comes first. The best rate is then trained with other seeds, which the search has not seen;
so is the best rate of dense training. Each training is a separate process, is kept below --runs, and is not repeated;
trainings.csv there has the figures of all.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import click
import convergence
from equal_bytes import payload_bytes
from pages import (
    commits_of,
    end_if_failed,
    findings_of,
    mean_and_interval,
    options_of_trainings,
    verdict,
    with_interval,
)

from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.files import csv_of, provenance_last, replace_files
from hvdcomp.tools.reproduce.trainings import Run, keep_records, seeds_there, train_missing
from hvdcomp.tools.terminal import make_console
from hvdcomp.tools.train.options import TrainingOptions

SEARCHED = (0, 1, 2)
"""The seeds of the search. Rates that are not close to the best are trained with the first seed only."""
CLOSE = 5.0
"""Percent of the loss, or points of accuracy, by which a rate that is close to the best is worse at most."""
FARTHEST = 8
"""Factors of two, from the workload's own rate, at which a search ends without a best rate inside the grid."""
FORGIVING = 1.0
"""A rate counts as good if it loses at most so much, in percent of the loss or points, beside the best rate."""


def _with(name: str, **changes: Any) -> dict[str, Any]:
    return {**convergence.WORKLOADS[name].options, "simulate_ranks": convergence.RANKS, **changes}


def _quick(model: str, data: str, optimizer: str, lr: float, steps: int, **changes: Any) -> dict[str, Any]:
    """The options of a training that takes some ten seconds of a core."""
    words = {"model": model, "data": data, "optimizer": optimizer, "lr": lr, "schedule": "cosine", "steps": steps}
    return {**words, "evaluate_every": 100, "simulate_ranks": convergence.RANKS, **changes}


_SORTING = _quick("encoder", "sorting", "adamw", 8e-3, 300, warm_up=0.06)
_HEAVY_TAILS = _quick("mlp", "heavy-tails", "adamw", 1.6e-2, 400, warm_up=0.1, weight_decay=0.0)
_SHAPES = _quick("resnet8", "shapes", "sgd", 0.2, 300, warm_up=0.2, weight_decay=5e-4)
WORKLOADS: dict[str, dict[str, Any]] = {
    "gpt": _with("gpt"),
    "gpt-muon": _with("gpt", optimizer="muon"),
    "mnist1d": _with("mnist1d"),
    "lstm": _with("lstm"),
    "sorting": _SORTING,
    "sorting-muon": {**_SORTING, "optimizer": "muon"},
    "heavy-tails": _HEAVY_TAILS,
    "heavy-tails-muon": {**_HEAVY_TAILS, "optimizer": "muon"},
    "shapes": _SHAPES,
    "gpt-16": _with("gpt", simulate_ranks=16),
    "gpt-muon-16": _with("gpt", optimizer="muon", simulate_ranks=16),
    "mnist1d-16": _with("mnist1d", simulate_ranks=16),
    "lstm-16": _with("lstm", simulate_ranks=16),
}
"""The options of `hvdcomp train`; the learning rate is that at which the first search begins."""

DENSE = "none"
PAIRS = {"eden": ("terngrad", "powersgd"), "eden:bits=1": ("powersgd",)}
"""The methods, and their rivals. PowerSGD has the lowest rank that sends at least as many bytes."""
QUICK_RANKS = {"sorting": 2, "heavy-tails": 4, "shapes": 2}
"""By data of the quick workloads, the rank at which PowerSGD sends about as few bytes as `terngrad`."""
FROZEN = {
    "compressed-adam none": {"optimizer": "compressed-adam", "compression": "none", "freeze_compression": "none"},
    "compressed-adam efsignsgd": {"optimizer": "compressed-adam", "compression": "efsignsgd"},
}
"""Methods that change AdamW, too. What that gains is no gain of a compressor, so one of them compresses nothing."""


def is_accuracy(workload: str) -> bool:
    return TrainingOptions(data=WORKLOADS[workload]["data"]).metric == "accuracy"


def rate_of(workload: str, doublings: int) -> float:
    rate: float = WORKLOADS[workload]["lr"] * 2.0**doublings
    return rate


def rivals_of(workload: str, spec: str) -> list[str]:
    """The rivals of a method, each as a spec."""
    return [_of_equal_bytes(workload, spec) if name == "powersgd" else name for name in PAIRS[spec]]


def _of_equal_bytes(workload: str, spec: str) -> str:
    options = WORKLOADS[workload]
    sent = payload_bytes(options, spec)
    return next(
        rival for rank in range(1, 65) if payload_bytes(options, rival := f"powersgd:rank={rank}") >= sent or rank == 64
    )


def methods_of(workload: str) -> list[str]:
    """The specs, and names of `FROZEN`, that a workload is trained with, dense training first."""
    options = WORKLOADS[workload]
    if options["data"] in QUICK_RANKS:
        powersgd = f"powersgd:rank={QUICK_RANKS[options['data']]}"
        specs = [DENSE, "int8", "int4", *PAIRS, "terngrad", powersgd, "topk:ratio=0.01"]
        return [*specs, *(FROZEN if options["optimizer"] == "adamw" else ())]
    specs = [DENSE]
    for spec in PAIRS:
        specs += [spec, *rivals_of(workload, spec)]
    return list(dict.fromkeys(specs))


@dataclass(frozen=True)
class RateRun(Run):
    """The training of a workload with a method at a learning rate.

    Attributes:
        spec: of the compressor, or a name of `FROZEN`.
        doublings: of the workload's own rate.
    """

    spec: str
    doublings: int

    @property
    def rate(self) -> float:
        return rate_of(self.workload, self.doublings)

    @property
    def label(self) -> str:
        return f"{self.spec} lr={self.rate:g}"

    @cached_property
    def options(self) -> dict[str, Any]:
        changes = FROZEN.get(self.spec, {"compression": self.spec})
        return {**WORKLOADS[self.workload], "lr": self.rate, **changes, "seed": self.seed}

    def figures(self) -> dict[str, Any]:
        """The factor, the bytes of a rank, and loss and accuracy of the validation part in the end; None if the
        training diverged."""
        assert self.summary is not None
        last = self.records("evaluations.jsonl")[-1] if self.summary["status"] == "finished" else {}
        return {
            "factor": self.summary["compression_factor"],
            "bytes_sent": self.summary["bytes_sent"],
            "loss": last.get("loss"),
            "accuracy": last.get("accuracy"),
        }

    @property
    def quality(self) -> float | None:
        """The accuracy in percent, or the loss; None if it is not trained, nan if it diverged."""
        record = self.record
        if record is None:
            return None
        value = record["accuracy" if is_accuracy(self.workload) else "loss"]
        return math.nan if value is None else value * (100 if is_accuracy(self.workload) else 1)


@dataclass(frozen=True)
class Grid:
    """The rates of a method that the search has trained, by the means over their seeds.

    Attributes:
        lost: by doublings, what the trainings lost beside the best: percent of the loss, or points of accuracy;
            infinite if one diverged.
        best: the doublings of the best rate.
        next: the trainings that come next; empty if the best rate is between two others.
    """

    lost: Mapping[int, float]
    best: int
    next: tuple[RateRun, ...]


def grid_of(workload: str, spec: str, runs: Path, start: int) -> Grid:
    """The grid of a method as far as it is trained.

    Args:
        start: the doublings around which it begins.
    """

    def untrained(places: Iterable[int], seeds: Sequence[int]) -> tuple[RateRun, ...]:
        every = (RateRun(workload, seed, runs, spec, at) for at in places if abs(at) <= FARTHEST for seed in seeds)
        return tuple(run for run in every if run.quality is None)

    trained = {}
    for at in range(-FARTHEST, FARTHEST + 1):
        qualities = [RateRun(workload, seed, runs, spec, at).quality for seed in SEARCHED]
        if (first := qualities[0]) is not None:
            known = [quality for quality in qualities if quality is not None]
            trained[at] = statistics.mean(known) if len(known) == len(SEARCHED) else first
    if not trained:
        return Grid({}, start, untrained((start - 1, start, start + 1), SEARCHED[:1]))
    finished = [quality for quality in trained.values() if not math.isnan(quality)]
    if not finished:  # too high, all of them
        lower = min(trained) - 1
        return Grid(dict.fromkeys(trained, math.inf), lower, untrained([lower], SEARCHED[:1]))
    best_quality = (max if is_accuracy(workload) else min)(finished)
    lost = {
        at: math.inf if math.isnan(quality) else lost_beside(workload, quality, best_quality)
        for at, quality in trained.items()
    }
    best = min(lost, key=lambda at: lost[at])
    close = [at for at in lost if lost[at] <= CLOSE]
    return Grid(lost, best, untrained((best - 1, best + 1), SEARCHED[:1]) or untrained(close, SEARCHED))


def lost_beside(workload: str, quality: float, reference: float) -> float:
    """What a quality is worse by: points of accuracy, or percent of the loss."""
    return reference - quality if is_accuracy(workload) else 100 * (quality / reference - 1)


def search(
    workload: str, specs: Sequence[str], runs: Path, train: Callable[[Sequence[RateRun]], Sequence[Run]]
) -> list[Run]:
    """Trains until every best rate is between two others: first of dense training, then of all methods.

    Returns:
        the trainings that failed, where the search of their method ended.
    """
    failed: list[Run] = []
    for methods in ([DENSE], specs):
        start = grid_of(workload, DENSE, runs, 0).best
        while True:
            todo = [run for spec in methods for run in grid_of(workload, spec, runs, start).next]
            todo = [run for run in todo if run not in failed]
            if not todo:
                break
            failed += train(todo)
    return failed


def at_best_rates(workload: str, specs: Sequence[str], runs: Path, seeds: Sequence[int]) -> list[RateRun]:
    """Dense training and methods, each at its own best rate."""
    start = grid_of(workload, DENSE, runs, 0).best
    best = {spec: grid_of(workload, spec, runs, start).best for spec in (DENSE, *specs)}
    return [RateRun(workload, seed, runs, spec, doublings) for seed in seeds for spec, doublings in best.items()]


def at_rate_of_dense(workload: str, specs: Sequence[str], runs: Path, seeds: Sequence[int]) -> list[RateRun]:
    start = grid_of(workload, DENSE, runs, 0).best
    return [RateRun(workload, seed, runs, spec, start) for seed in seeds for spec in specs]


# The page.


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
    def shown(self) -> str:
        diverged = sum(map(math.isnan, self.qualities.values()))
        if diverged:
            return f"{diverged} of {len(self.qualities)} diverged"
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
        own: at its own best rate.
        same: at dense training's best rate; None if that is not trained.
        good: the lowest and the highest rate of the search that lose little beside the best (`FORGIVING`).
    """

    own: Row
    same: Row | None
    good: tuple[float, float]


def outcomes_of(workload: str, runs: Path, seeds: Sequence[int]) -> dict[str, Outcome]:
    """By spec, the methods whose best rates are trained over the seeds; dense training is the first."""
    found = {}
    start = grid_of(workload, DENSE, runs, 0).best
    for spec in methods_of(workload):
        grid = grid_of(workload, spec, runs, start)
        own = row_of(workload, spec, grid.best, runs, seeds)
        if own is None or grid.next:
            continue
        rates = [rate_of(workload, doublings) for doublings, lost in grid.lost.items() if lost <= FORGIVING]
        found[spec] = Outcome(own, row_of(workload, spec, start, runs, seeds), (min(rates), max(rates)))
    return found if DENSE in found else {}


def section_of(workload: str, outcomes: Mapping[str, Outcome]) -> list[str]:
    accuracy = is_accuracy(workload)
    quality, unit = ("accuracy (%)", "points") if accuracy else ("validation loss", "%")
    options = ", ".join(f"{key} {value}" for key, value in WORKLOADS[workload].items() if key != "lr")
    dense = outcomes[DENSE].own
    lines = [
        f"## {workload}",
        "",
        f"{options}; seeds {_in_words(sorted(dense.qualities))}.",
        "",
        f"| method | times fewer bytes | best rate | {quality} | lost beside dense ({unit}) "
        f"| lost at dense's best rate | good rates |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for spec, outcome in outcomes.items():
        own, same = outcome.own, outcome.same
        cells = [
            f"`{spec}`",
            f"{own.factor:.1f}",
            f"{rate_of(workload, own.doublings):g}",
            own.shown,
            "" if spec == DENSE else with_interval(own.lost_beside(dense), "+.2f"),
            "" if spec == DENSE or same is None else with_interval(same.lost_beside(dense), "+.2f"),
            f"{outcome.good[0]:g} to {outcome.good[1]:g}" if outcome.good[0] < outcome.good[1] else "this one",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    pairs = [
        (spec, rival) for spec in PAIRS if spec in outcomes for rival in rivals_of(workload, spec) if rival in outcomes
    ]
    if pairs:
        lines += [
            "",
            f"| method | beside | bytes of the latter | lost ({unit}) | |",
            "|---|---|--:|--:|---|",
        ]
    for spec, rival in pairs:
        own, other = outcomes[spec].own, outcomes[rival].own
        lost = own.lost_beside(other)
        lines.append(
            f"| `{spec}` | `{rival}` | {own.factor / other.factor:.0%} | {with_interval(lost, '+.2f')} "
            f"| {verdict([-difference for difference in lost])} |"
        )
    return [*lines, ""]


def _in_words(seeds: Sequence[int]) -> str:
    return ", ".join(map(str, seeds))


def record_of(workload: str, spec: str, outcome: Outcome, dense: Row) -> dict[str, Any]:
    """A line of the CSV file."""

    def mean_and_half(values: Sequence[float]) -> tuple[float | None, float | None]:
        if not values:
            return None, None
        mean, half = mean_and_interval(values)
        return mean, None if math.isnan(half) else half

    own, same = outcome.own, outcome.same
    lost, half = mean_and_half(own.lost_beside(dense))
    lost_same, half_same = mean_and_half([] if same is None else same.lost_beside(dense))
    finished = [value for value in own.qualities.values() if not math.isnan(value)]
    return {
        "workload": workload,
        "method": spec,
        "ranks": WORKLOADS[workload]["simulate_ranks"],
        "factor": own.factor,
        "rate": rate_of(workload, own.doublings),
        "lowest_good_rate": outcome.good[0],
        "highest_good_rate": outcome.good[1],
        "seeds": len(own.qualities),
        "diverged": len(own.qualities) - len(finished),
        "metric": "accuracy in percent" if is_accuracy(workload) else "loss",
        "quality": statistics.mean(finished) if finished else None,
        "lost": lost,
        "half_interval": half,
        "lost_at_the_rate_of_dense": lost_same,
        "half_interval_there": half_same,
    }


def write_page(file: Path, runs: Path, seeds: Sequence[int]) -> bool:
    """Writes the page of all trainings that are there, and a CSV file beside it; False if there are none."""
    by_workload = {name: outcomes for name in WORKLOADS if (outcomes := outcomes_of(name, runs, seeds))}
    if not by_workload:
        return False
    shown = commits_of(
        run for name, outcomes in by_workload.items() for run in at_best_rates(name, list(outcomes), runs, seeds)
    )
    words = ["python", "benchmarks/best_rates.py"]
    if list(by_workload) != list(WORKLOADS):
        words += [word for name in by_workload for word in ("--workload", name)]
    lines = [
        "# Each method at its own best learning rate",
        "",
        f"""Made by `{" ".join(words)}`, at commit {shown}.
Each training is one of `hvdcomp train` on [simulated ranks](simulated-ranks.md). Of rates that differ by factors of
two, each method has the one that is best for seeds {_in_words(SEARCHED)}, with a worse rate on either side of it; the
figures are of other seeds. **Lost** is the mean of the differences seed by seed, at each one's own best rate, with its
95 % interval (Student's t). **Good rates** are those that lose at most {FORGIVING:g} % of the loss, or points of
accuracy, beside the best rate, for the seeds of the search. `powersgd` has the lowest rank that sends at least as many
bytes as the method that it is compared with. Rows of `compressed-adam` change AdamW, too, and are compared with dense
training of AdamW itself. The CSV file beside this page has the same figures.""",
        "",
        findings_of(file),
        "",
        "<!-- made: tables -->",
        *(line for name, outcomes in by_workload.items() for line in section_of(name, outcomes)),
        "<!-- end of tables -->",
    ]
    text = "\n".join(lines).rstrip() + "\n"
    file.parent.mkdir(parents=True, exist_ok=True)
    records = [
        record_of(name, spec, outcome, outcomes[DENSE].own)
        for name, outcomes in by_workload.items()
        for spec, outcome in outcomes.items()
    ]
    replace_files({file: provenance_last(text).encode(), file.with_suffix(".csv"): csv_of(records)})
    return True


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


def name_of(spec: str) -> str:
    """The name of a method for `--only`."""
    return "compressed-adam" if spec in FROZEN else parse_compressor(spec).name


@click.command()
@options_of_trainings(WORKLOADS, "best-rates", seeds="101,102,103,104,105")
@click.option("--only", multiple=True, metavar="NAME", help="Compressor, or compressed-adam; repeatable; default: all.")
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
        raise click.BadParameter(f"the search sees {_in_words(seen)}; give others, from 101 on", param_hint="--seeds")
    console = make_console(soft_wrap=True)
    chosen = {
        name: [spec for spec in methods_of(name) if not only or name_of(spec) in only]
        for name in workloads or WORKLOADS
    }

    if dry_run:
        first = [run for name in chosen for run in grid_of(name, DENSE, runs, 0).next]
        train_missing(first, console, dry_run=True)
        return

    def train(todo: Sequence[RateRun]) -> list[Run]:
        return train_missing(todo, console, workers=workers)

    failed: list[Run] = []
    if not page_only:
        for name, specs in chosen.items():
            failed += search(name, specs, runs, train)
            failed += train(at_best_rates(name, specs, runs, seeds))
        for name, specs in chosen.items():
            failed += train(at_rate_of_dense(name, specs, runs, seeds))
    keep_records(trained(runs), runs)
    if write_page(table, runs, seeds):
        console.print(f"wrote {table}, and a CSV beside it")
    else:
        console.print(f"there is no finished method in {runs}")
    end_if_failed(failed, console)


if __name__ == "__main__":
    main()
