"""Measures the effect of every compressor on accuracy: trains reference models on four simulated ranks.

    python -m benchmarks.quality.convergence --dry-run                 # lists the runs
    python -m benchmarks.quality.convergence                           # trains all runs; takes many hours on all cores
    python -m benchmarks.quality.convergence --workload mnist1d --only topk --only 'powersgd*' --seeds 0
    python -m benchmarks.quality.convergence --page-only               # writes the page from the complete runs

Each run is a separate process with one thread, and writes to its own folder below --runs. A complete run with the same
settings is not trained again, so an interrupted benchmark continues where it stopped. At the end, the benchmark writes
the page --table, a CSV file and a plot from all complete runs. It keeps the figures of all runs in trainings.csv in
--runs. A run in this file counts as complete. To train everything again, pass a new folder to --runs.

The training runs give the quality, the steps and the bytes. You can run them on any machine, even a busy one, or on a
GPU. The option --times measures the times of a step, in a few steps of each method. Use this option only on an idle
machine. It measures several links at once (docs/simulated-ranks.md). All rows of a workload use the same time for the
computation of a step, so that the rows can be compared. This time is the median over the methods, or --compute-ms. The
times of encoding, decoding and waiting for a link are measured for each method.

    python -m benchmarks.quality.convergence --times --workers 1       # half an hour
    python -m benchmarks.quality.convergence --page-only --evidence hvdcomp/compressors/evidence_one_rate.json
"""

from __future__ import annotations

import fnmatch
import json
import math
import re
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import click

from benchmarks.pages import commits_of, end_if_failed, formerly, mean_and_interval, options_of_trainings, with_interval
from benchmarks.trainings import Run, keep_records, seeds_there, train_missing
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.files import csv_of, replace_files, replace_text, with_block
from hvdcomp.tools.terminal import make_console
from hvdcomp.tools.train.options import NO_TIME, TrainingOptions
from hvdcomp.tools.train.target import Target

RANKS = 4
LINKS = {"100mbit": "100 Mb/s", "1gbit": "1 Gb/s"}
ALL_LINKS = ",".join((NO_TIME, *LINKS))  # with NO_TIME, only computation takes time
UNCOMPRESSED = ("none", "fp16")  # the baseline of speedups is the faster of the two; they do not need hvdcomp
NODES = {"HVDCOMP_RANKS_PER_NODE": "2"}  # for methods with two levels


@dataclass(frozen=True)
class Workload:
    """A model, and the options with which it is trained.

    Attributes:
        options: the options of `hvdcomp train`.
        target: a quality on the validation data. Steps, bytes and seconds are counted until a run reaches it.
        beside: name of the workload whose uncompressed runs are the baseline; None if this workload has its own
            baseline.
        only: the methods with which the workload is trained; empty for all methods.
        ranks: number of simulated ranks.
    """

    options: dict[str, Any]
    target: str
    beside: str | None = None
    only: tuple[str, ...] = ()
    ranks: int = RANKS

    @property
    def metric(self) -> str:
        return TrainingOptions(data=self.options["data"]).metric

    @property
    def lost(self) -> str:
        """The unit in which a method is compared with dense training.

        The unit is accuracy if the workload has an accuracy, because its loss varies much more by chance.
        """
        return "points of accuracy lost" if self.metric == "accuracy" else "loss above dense (%)"


_GPT = {
    "model": "gpt",
    "data": "text",
    "optimizer": "adamw",
    "lr": 2e-3,
    "schedule": "cosine",
    "warm_up": 0.1,
    "steps": 600,
    "evaluate_every": 25,
}
_LONG = {**_GPT, "steps": 6000, "evaluate_every": 300}
WORKLOADS = {
    "mnist1d": Workload(
        {
            "model": "cnn1d",
            "data": "mnist1d",
            "optimizer": "sgd",
            "lr": 0.1,  # with 0.2, the results of dense training vary by 20 % by chance
            "schedule": "cosine",
            "warm_up": 1.0,
            "steps": 800,
            "evaluate_every": 20,
        },
        "accuracy=0.9",
    ),
    "gpt": Workload(_GPT, "loss=2.15"),
    "gpt-frozen": Workload({**_GPT, "optimizer": "compressed-adam"}, "loss=2.15", beside="gpt"),
    # Each rank trains on its own for four steps, then the ranks exchange once.
    "gpt-local": Workload(
        {**_GPT, "optimizer": "compressed-adam", "local_steps": 4, "evaluate_every": 24},
        "loss=2.15",
        beside="gpt",
        only=("none", "efsignsgd", "onebit", "powersgd:rank=4", "int4"),
    ),
    # `gpt-rounds` exchanges 200 times. The other workloads compare it with an exchange in each step, and with a single
    # rank, which exchanges nothing.
    "gpt-long": Workload(_LONG, "loss=1.6", only=("none", "int4")),
    "gpt-rounds": Workload(
        {**_LONG, "local_steps": 30}, "loss=1.6", beside="gpt-long", only=("none", "int4", "chunkedtopk")
    ),
    "gpt-alone": Workload(_LONG, "loss=1.6", beside="gpt-long", only=("none",), ranks=1),
    "gpt-alone-rounds": Workload({**_LONG, "local_steps": 30}, "loss=1.6", beside="gpt-long", only=("none",), ranks=1),
    "lstm": Workload(
        {
            "model": "lstm",
            "data": "text",
            "optimizer": "sgd",
            "lr": 2.0,
            "schedule": "cosine",
            "steps": 500,
            "evaluate_every": 25,
        },
        "loss=2.55",
    ),
}


@dataclass(frozen=True)
class Method:
    """A way to send gradients.

    Attributes:
        changes: options that the method changes, by workload or optimizer. The value of `lr` is a factor by which the
            learning rate is multiplied.
        left_out: workloads that are not trained with this method, each with the reason.
    """

    spec: str
    changes: dict[str, dict[str, Any]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def options(self, workload: Workload, name: str) -> dict[str, Any]:
        changes = {**self.changes.get(workload.options["optimizer"], {}), **self.changes.get(name, {})}
        factor = changes.pop("lr", 1.0)
        return {**workload.options, **changes, "lr": workload.options["lr"] * factor, "compression": self.spec}

    @property
    def environment(self) -> dict[str, str]:
        return NODES if self.spec.startswith("two_level") else {}


def _methods(*specs: str, **attributes: Any) -> list[Method]:
    return [Method(spec, **attributes) for spec in specs]


# Methods with `_BEFORE_NOISE` are too noisy for error feedback, so they cannot send the residuals that int4 leaves.
_BEFORE_NOISE = {"compressed-adam": {"freeze_compression": "int8"}}
METHODS = (
    # By default, compressed-adam sends gradients as int4 until it freezes the second moment.
    Method("none", {"compressed-adam": {"freeze_compression": "none"}}),
    Method("fp16", {"compressed-adam": {"freeze_compression": "fp16"}}),
    Method("bf16", {"compressed-adam": {"freeze_compression": "bf16"}}),
    *_methods("topk:ratio=0.01", "topk:ratio=0.001", "randomk:ratio=0.1", "randomk:ratio=0.01"),
    *_methods("mstopk:ratio=0.01", "mstopk:ratio=0.001", "redsync:ratio=0.01", "redsync:ratio=0.001"),
    *_methods("sidco:ratio=0.01", "sidco:ratio=0.001", "stc:ratio=0.01", "stc:ratio=0.001"),
    *_methods("topkc:ratio=0.01", "topkc:ratio=0.05,chunk=16", "arctopk:ratio=0.02"),
    # These levels send the same number of bytes as `topkc` and `arctopk` on mnist1d; other models need other levels.
    *_methods(
        *("topk:ratio=0.0751", "topk:ratio=0.024", "topk:ratio=0.0175"),
        left_out=dict.fromkeys(("gpt", "gpt-frozen", "lstm"), "its level is for mnist1d"),
    ),
    *_methods("chunkedtopk:chunk=512,k=8"),  # the published share of 1 in 64, in chunks that small tensors can fill
    # The settings of `LocalSteps.sparseloco`.
    Method(
        "chunkedtopk",
        {"gpt-rounds": {"memory": "error_feedback:decay=0.95", "outer_lr": 1.0, "outer_momentum": 0.0}},
        left_out=dict.fromkeys(("mnist1d", "gpt", "gpt-frozen", "lstm"), "its chunks are for larger tensors"),
    ),
    # DGC applies the momentum, so the optimizer has none.
    *_methods(
        "dgc:ratio=0.01",
        "dgc:ratio=0.001",
        changes={"sgd": {"momentum": 0.0}, "adamw": {"betas": (0.0, 0.95)}},
        left_out={"gpt-frozen": "CompressedAdam already sends a momentum"},
    ),
    # Votes have no magnitude. SGD therefore needs a learning rate that suits signs. Clipping gives a step the norm of a
    # dense step.
    *_methods(
        "signsgd",
        changes={"mnist1d": {"lr": 0.02}, "lstm": {"lr": 0.1}},
        left_out={"gpt-frozen": "votes have no magnitude, but the frozen second moment has one"},
    ),
    *_methods("onebit", "onebit:per_row=True"),
    # `powersgd` sends only few bytes in the steps before freezing.
    *_methods("efsignsgd", changes={"gpt-local": {"freeze_compression": "powersgd:rank=4"}}),
    *_methods("qsgd:bits=4", "qsgd:bits=2", "qsgd:bits=4,exchange=scatter", changes=_BEFORE_NOISE),
    *_methods("terngrad", "natural", "globalqsgd:bits=8", "globalqsgd:bits=4"),
    *_methods("int8", "int4", "int4:rounding=stochastic", "fp8", "fp8:format=e5m2"),
    *_methods("eden", "eden:bits=1", "eden:exchange=scatter"),
    *_methods("powersgd:rank=4", "powersgd:rank=2", "powersgd:rank=1"),
    *_methods("powersgd:rank=4,alternating=True", "powersgd:rank=1,alternating=True"),
    *_methods("atomo:rank=4", "atomo:rank=2", changes=_BEFORE_NOISE),
    *_methods("fp16:exchange=scatter", "bf16:exchange=scatter", "int8:exchange=scatter", "int4:exchange=scatter"),
    *_methods("terngrad:exchange=scatter", "natural:exchange=scatter", "fp8:exchange=scatter"),
    *_methods("onebit:exchange=scatter", "efsignsgd:exchange=scatter"),
    *_methods("two_level(topk:ratio=0.01)", "two_level(topk:ratio=0.001)", "two_level(powersgd:rank=4)"),
    *_methods("two_level(int4)", "two_level(efsignsgd)"),
)


@dataclass(frozen=True)
class MethodRun(Run):
    """The training run of a workload with a method."""

    method: Method

    @property
    def label(self) -> str:
        return self.method.spec

    @cached_property
    def options(self) -> dict[str, Any]:
        own = self.method.options(WORKLOADS[self.workload], self.workload)
        return {**own, "simulate_ranks": WORKLOADS[self.workload].ranks, "link": ALL_LINKS, "seed": self.seed}

    @property
    def environment(self) -> dict[str, str]:
        return self.method.environment

    @property
    def target(self) -> str:
        return WORKLOADS[self.workload].target

    def figures(self) -> dict[str, Any]:
        """The fields of `Outcome`, and the seconds that the rank waits for each link until it reaches the target."""
        assert self.summary is not None
        metric = WORKLOADS[self.workload].metric
        evaluations = self.records("evaluations.jsonl")
        finite = [
            evaluation
            for evaluation in evaluations
            if evaluation["loss"] is not None and evaluation[metric] is not None
        ]
        ended = self.summary["status"] == "finished" and evaluations and finite[-1:] == evaluations[-1:]
        last = evaluations[-1] if ended else {"loss": None, metric: None}
        target = Target.parse(self.target)
        reached = next((one for one in finite if target.is_reached(one)), None)
        on_links = None if reached is None else reached["trained_seconds_on_links"]
        return {
            "factor": self.summary["compression_factor"],
            "loss": last["loss"],
            "quality": last[metric],
            "steps_to_target": None if reached is None else reached["step"],
            "bytes_to_target": None if reached is None else reached["bytes_sent"],
            **{f"waits_{link}": None if on_links is None else on_links[link] - on_links[NO_TIME] for link in LINKS},
        }


TIMED_STEPS = 24


@dataclass(frozen=True)
class TimedRun(MethodRun):
    """A few steps of a method on a workload, to measure the time of a step."""

    @cached_property
    def options(self) -> dict[str, Any]:
        every = WORKLOADS[self.workload].options.get("local_steps", 1)
        steps = -(-TIMED_STEPS // every) * every
        return {**super().options, "steps": steps, "evaluate_every": steps}

    @property
    def target(self) -> str:
        return ""

    def figures(self) -> dict[str, Any]:
        """Milliseconds of a step: computation, encoding and decoding together, and waiting for each link."""
        assert self.summary is not None
        steps, on_links = self.records("steps.jsonl"), self.summary["trained_seconds_on_links"]
        coding = [(step["encode_ms"] or 0.0) + (step["decode_ms"] or 0.0) for step in steps]
        alone = [step["ms"] - spent for step, spent in zip(steps, coding, strict=True)]
        # Only steps that encode are used. With local steps, these are the steps with an exchange.
        spent = [ms for ms in coding if ms > 0]
        return {
            "compute_ms": statistics.median(alone),
            "coding_ms": statistics.median(spent) * len(spent) / len(steps) if spent else 0.0,
            **{f"wait_ms_{link}": 1000 * (on_links[link] - on_links[NO_TIME]) / len(steps) for link in LINKS},
        }

    @classmethod
    def of(cls, run: MethodRun) -> TimedRun:
        return cls(run.workload, 0, run.runs / "times", run.method)


def planned(workloads: Iterable[str], seeds: Iterable[int], only: Sequence[str], runs: Path) -> list[MethodRun]:
    """The chosen runs, sorted by seed: all runs with one seed come before the next seed.

    Args:
        only: patterns of specs, or names of compressors, to which the runs are limited; empty for all.
    """

    def is_chosen(spec: str) -> bool:
        return not only or any(fnmatch.fnmatchcase(spec, one) or re.split("[:(]", spec)[0] == one for one in only)

    return [
        MethodRun(name, seed, runs, method)
        for seed in seeds
        for name in workloads
        for method in METHODS
        if is_chosen(method.spec) and name not in method.left_out
        if method.spec in (WORKLOADS[name].only or [method.spec])
    ]


# The results.


@dataclass(frozen=True)
class Outcome:
    """The results of a finished run.

    Attributes:
        factor: compression factor: dense bytes / sent bytes.
        loss, quality: the loss and the quality on the validation data at the end; None if the run diverged.
        steps_to_target, bytes_to_target: steps and bytes until the first evaluation that reached the target; None if no
            evaluation did.
        waits: for each link, by its rate, the seconds that the rank waited for the link until it reached the target.
    """

    run: MethodRun
    factor: float
    loss: float | None
    quality: float | None
    steps_to_target: int | None
    bytes_to_target: int | None
    waits: Mapping[str, float | None]

    def lost_beside(self, dense: Outcome) -> float:
        """The loss of quality compared with dense training, in the unit of `Workload.lost`."""
        assert self.loss is not None
        assert self.quality is not None
        assert dense.loss is not None
        assert dense.quality is not None
        if WORKLOADS[self.run.workload].metric == "accuracy":
            return 100 * (dense.quality - self.quality)
        return 100 * (self.loss / dense.loss - 1)

    @classmethod
    def of(cls, run: MethodRun) -> Outcome | None:
        """The outcome of a run; None if it is not finished."""
        record = run.record
        if record is None:
            return None
        names = [one.name for one in fields(cls) if one.name not in ("run", "waits")]
        waits = {link: record[f"waits_{link}"] for link in LINKS}
        return cls(run, **{name: record[name] for name in names}, waits=waits)

    def seconds(self, link: str, compute_ms: float) -> float | None:
        """Seconds until the target on a link; None if no steps of the method were timed.

        With overlap, the time that a step waits for a link depends on the machine. The timed steps of --times therefore
        give this waiting time. With CompressedAdam there is no overlap, but steps before freezing wait longer or
        shorter than steps after freezing. The waiting times of the whole training run are therefore used.

        Args:
            compute_ms: milliseconds of computation in each step.
        """
        waits, timed = self.waits[link], TimedRun.of(self.run).record
        assert self.steps_to_target is not None
        assert waits is not None
        if timed is None:
            return None
        if self.run.options["optimizer"] != "compressed-adam":
            waits = self.steps_to_target * timed[f"wait_ms_{link}"] / 1000
        return waits + self.steps_to_target * (compute_ms + timed["coding_ms"]) / 1000


@dataclass(frozen=True)
class Row:
    """All finished runs of a method on a workload.

    Attributes:
        dense: the outcome of uncompressed training, by seed.
        label: name of the method, with the workload if it is not the workload of the table.
    """

    label: str
    outcomes: tuple[Outcome, ...]
    dense: Mapping[int, Outcome]

    @property
    def factor(self) -> float:
        return statistics.mean(outcome.factor for outcome in self.outcomes)

    @property
    def difference(self) -> list[float]:
        """For each seed, the loss of quality compared with dense training, in the unit of `Workload.lost`.

        The list is empty if any run diverged.
        """
        if any(outcome.loss is None for outcome in self.outcomes):
            return []
        return [
            outcome.lost_beside(self.dense[outcome.run.seed])
            for outcome in self.outcomes
            if outcome.run.seed in self.dense
        ]

    @property
    def reached(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.steps_to_target is not None]

    @property
    def has_nodes(self) -> bool:
        """Whether several ranks share a node. An exchange within a node takes no time."""
        return self.outcomes[0].run.method.spec.startswith("two_level")

    @property
    def seeds(self) -> set[int]:
        return {outcome.run.seed for outcome in self.outcomes}

    def seconds(self, link: str, compute_ms: float, seeds: Collection[int] | None = None) -> float | None:
        """The mean seconds to the target over some seeds; None unless all of their runs reached the target.

        Args:
            seeds: None for all.
        """
        chosen = self.seeds if seeds is None else seeds
        reached = [one.seconds(link, compute_ms) for one in self.reached if one.run.seed in chosen]
        found = [seconds for seconds in reached if seconds is not None]
        return statistics.mean(found) if len(found) == len(chosen) else None


@dataclass(frozen=True)
class Table:
    """The rows of a workload.

    Attributes:
        compute_ms: milliseconds of computation in a step, the same for all rows.
        runs, failed: the finished runs and the failed runs of this workload.
    """

    name: str
    rows: list[Row]
    compute_ms: float
    runs: list[MethodRun]
    failed: list[MethodRun]

    @property
    def workload(self) -> Workload:
        return WORKLOADS[self.name]

    def times_as_fast(self, row: Row, link: str, beside: Sequence[str] = UNCOMPRESSED) -> float | None:
        """The speedup with which a row reaches the target, compared with the fastest of some methods, for the seeds of
        the row.

        It is None if the row, or all of these methods, missed the target. It is also None for methods with nodes,
        because with the other methods each rank has its own link.

        Args:
            beside: specs of the methods with which the row is compared.
        """
        plain = [row for row in self.rows if row.outcomes[0].run.method.spec in beside]
        if self.workload.beside is not None:
            plain = [row for row in plain if row.outcomes[0].run.workload == self.workload.beside] or plain
        seconds = row.seconds(link, self.compute_ms)
        theirs = [one for other in plain if (one := other.seconds(link, self.compute_ms, row.seeds)) is not None]
        return min(theirs) / seconds if theirs and seconds is not None and not row.has_nodes else None


def table_of(name: str, seeds: Sequence[int], runs: Path, compute_ms: float | None) -> Table | None:
    """The table of a workload; None if it has no finished run."""
    beside = WORKLOADS[name].beside
    everything = planned([name], seeds, (), runs)
    others = [] if beside is None else [run for run in planned([beside], seeds, (), runs) if run.label in UNCOMPRESSED]
    found = [one for run in [*others, *everything] if (one := Outcome.of(run)) is not None]
    own = [one for one in found if one.run.workload == name]
    if not own:
        return None
    in_others = {one.run.seed: one for one in found if (one.run.workload, one.run.method.spec) == (beside, "none")}
    in_own = {one.run.seed: one for one in own if one.run.method.spec == "none"}
    dense = {seed: in_other for seed, in_other in (in_others or in_own).items() if in_other.loss is not None}
    grouped: dict[tuple[str, str], list[Outcome]] = {}
    for one in found:
        grouped.setdefault((one.run.workload, one.run.method.spec), []).append(one)
    rows = [
        Row(f"`{spec}`" + ("" if workload == name else f" ({workload})"), tuple(outcomes), dense)
        for (workload, spec), outcomes in grouped.items()
    ]
    rows.sort(key=lambda row: row.factor)
    failed = [run for run in everything if run.record is None and run.about.get("error") is not None]
    timed = [record["compute_ms"] for run in everything if (record := TimedRun.of(run).record) is not None]
    chosen = compute_ms or (statistics.median(timed) if timed else math.nan)
    return Table(name, rows, chosen, [one.run for one in own], failed)


# The page, and the CSV of all rows.


def records_of(table: Table) -> list[dict[str, Any]]:
    """The rows of a workload for the CSV file: means over the seeds, and half of their 95 % intervals."""
    return [_record(table, row) for row in table.rows]


def _record(table: Table, row: Row) -> dict[str, Any]:
    run, runs = row.outcomes[0].run, len(row.outcomes)
    losses = [outcome.loss for outcome in row.outcomes if outcome.loss is not None]
    qualities = [outcome.quality for outcome in row.outcomes if outcome.quality is not None]
    steps = [outcome.steps_to_target for outcome in row.reached if outcome.steps_to_target is not None]
    sent = [outcome.bytes_to_target for outcome in row.reached if outcome.bytes_to_target is not None]
    seconds = {link: row.seconds(link, table.compute_ms) for link in LINKS if len(steps) == runs}
    return {
        "workload": table.name,
        "trained_in": run.workload,  # differs from the table's workload in baseline runs
        "method": run.method.spec,
        "ranks": table.workload.ranks,
        "seeds": runs,
        "diverged": runs - len(losses),
        "factor": _rounded(row.factor),
        **_mean("loss", losses),
        **_mean(table.workload.metric, qualities),
        **_mean("lost", row.difference),
        "reached": len(steps),
        "steps": _rounded(statistics.mean(steps)) if len(steps) == runs else None,
        "megabytes": _rounded(statistics.mean(sent) / 1e6) if len(steps) == runs else None,
        "compute_ms": _rounded(table.compute_ms),
        **{f"seconds_{link}": _rounded(seconds.get(link)) for link in LINKS},
        **{f"times_as_fast_{link}": _rounded(table.times_as_fast(row, link)) for link in LINKS},
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else float(f"{value:.5g}")


def _mean(name: str, values: Sequence[Any]) -> dict[str, float | None]:
    mean, half = mean_and_interval(values) if values else (math.nan, math.nan)
    return {name: _rounded(mean), f"{name}_half": _rounded(half)}


WELL_KNOWN = (
    *UNCOMPRESSED, "int8", "int4", "qsgd:bits=4", "terngrad", "powersgd:rank=4", "topk:ratio=0.01", "dgc:ratio=0.01",
    "efsignsgd",
)  # fmt: skip
LOSES_TOO_MUCH = 5.0  # points or percent; a method that loses at least this is never bold


def front_of(table: Table) -> list[Row]:
    """The rows that lose less than every row with fewer bytes, sorted by their bytes.

    Rows with one seed are left out. Rows with nodes are also left out, because only the bytes between nodes are counted
    for them.
    """
    front: list[Row] = []
    own = [row for row in table.rows if row.outcomes[0].run.workload == table.name]
    chosen = [row for row in own if len(row.difference) > 1 and not row.has_nodes]
    for row in sorted(chosen, key=lambda row: (-row.factor, statistics.mean(row.difference))):
        lost = statistics.mean(row.difference)
        if lost < min([LOSES_TOO_MUCH, *(statistics.mean(better.difference) for better in front)]):
            front.append(row)
    return front


def block_of(table: Table) -> str:
    """In Markdown, a table of a workload's well-known and best methods, and the options of its training runs."""
    workload, front = table.workload, front_of(table)
    options = ", ".join(f"{name} {value}" for name, value in workload.options.items())
    lines = [
        f"| method | times fewer bytes | {workload.lost} "
        f"| {' | '.join(f'seconds to the target at {shown}' for shown in LINKS.values())} |",
        f"|---|{'--:|' * (2 + len(LINKS))}",
    ]
    for row in table.rows:
        if row in front or row.outcomes[0].run.method.spec in WELL_KNOWN:
            label, record = f"**{row.label}**" if row in front else row.label, _record(table, row)
            lost = "diverged" if record["diverged"] else with_interval(row.difference, "+.1f")
            times = [_time(record[f"seconds_{link}"], record[f"times_as_fast_{link}"]) for link in LINKS]
            lines.append(f"| {' | '.join([label, f'{row.factor:.1f}', lost, *times])} |")
    seeds = ", ".join(map(str, sorted({run.seed for run in table.runs})))
    ends = f"The target is {workload.target}. Computing a step takes {table.compute_ms:.1f} ms."
    ranks = f"Each training run in this table used {workload.ranks} ranks. The seeds were {seeds}"
    lines += ["", f"{ranks}. The options of `hvdcomp train` are: {options}. {ends}"]
    for run in table.failed:
        lines += ["", f"Failed: `{run.method.spec}`, seed {run.seed}: {run.about['error']}"]
    return "\n".join(lines)


def _time(seconds: float | None, times: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f}" + ("" if times is None else f" ({times:.2f}x)")


def savings_of(tables: Sequence[Table]) -> str:
    """In Markdown, for each workload and link, the method that reaches the target with the largest speedup over
    uncompressed training.

    Workloads without any speedup are left out.
    """
    head = ["workload, optimizer", *(f"fastest method at {link}" for link in LINKS.values())]
    lines = [f"| {' | '.join(head)} |", f"|---|{'--:|' * len(LINKS)}"]
    for table in tables:
        cells = []
        for link in LINKS:
            times = [(found, row) for row in table.rows if (found := table.times_as_fast(row, link)) is not None]
            if not times:
                cells.append("-")
                continue
            best, row = max(times, key=lambda entry: entry[0])
            beside_none = table.times_as_fast(row, link, ["none"])
            cells.append(f"{row.label} {best:.2f}x" + ("" if beside_none is None else f" ({beside_none:.1f}x)"))
        if set(cells) == {"-"}:
            continue
        lines.append(f"| {table.name}, {OPTIMIZERS[table.workload.options['optimizer']]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def origin_of(tables: Sequence[Table]) -> str:
    """The command that made the page, and the commits of its runs."""
    commits = commits_of(run for table in tables for run in table.runs)
    seeds = sorted({run.seed for table in tables for run in table.runs})
    names = [table.name for table in tables]
    chosen = "" if names == list(WORKLOADS) else "".join(f" --workload {name}" for name in names)
    command = f"python -m benchmarks.quality.convergence{chosen} --seeds {','.join(map(str, seeds))}"
    return f"Made by `{command}`,\nat commit {commits}.\n{formerly('python ./benchmarks/convergence.py')}"


def marks_of(name: str) -> tuple[str, str]:
    """The marks before and after a block of the page."""
    return f"<!-- made: {name} -->", f"<!-- end of {name} -->"


def tables_of(runs: Path, seeds: Sequence[int], compute_ms: Mapping[str, float]) -> list[Table]:
    """The tables of all finished runs."""
    found = [table_of(name, seeds, runs, compute_ms.get(name)) for name in WORKLOADS]
    return [table for table in found if table is not None]


def write_page(file: Path, tables: Sequence[Table]) -> None:
    """Writes the tables between their marks on the page. Next to the page, writes the plot and the CSV file of all
    rows.

    The rest of the page is hand-written and is kept. A new page has the marks of all workloads.
    """
    own = {table.name: block_of(table) for table in tables}
    blocks = {"origin": origin_of(tables), **own, "savings": savings_of(tables)}
    marks = ["\n".join([f"## {name}\n", *marks_of(name)]) for name in blocks]
    new = ["# What every compressor does to accuracy", *marks]
    text = file.read_text() if file.exists() else "\n\n".join(new) + "\n"
    for name, block in blocks.items():
        text = with_block(text, *marks_of(name), block) or text
    records = [record for table in tables for record in records_of(table)]
    columns = {key: None for record in records for key in record}  # some rows have an accuracy, others a perplexity
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_files(
        {
            file: text.encode(),
            file.with_suffix(".csv"): csv_of([{**columns, **record} for record in records]),
            file.with_suffix(".png"): draw(tables),
        }
    )


_FAMILIES = {
    "sparse": ("topk", "randomk", "mstopk", "redsync", "sidco", "dgc", "stc", "topkc", "arctopk", "chunkedtopk"),
    "signs": ("signsgd", "onebit", "efsignsgd"),
    "low rank": ("powersgd", "atomo"),
    "quantized": ("qsgd", "terngrad", "natural", "globalqsgd", "int8", "int4", "fp8", "eden"),
    "cast": ("fp16", "bf16"),
}
_COLORS = dict(zip(_FAMILIES, ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#888888"), strict=True))
_MOST = 20.0  # points or percent; the largest loss in the plot


def family_of(spec: str) -> str | None:
    """The family of a spec's method; None for uncompressed training."""
    name = re.split("[:()]", spec.removeprefix("two_level("))[0]
    return next((family for family, names in _FAMILIES.items() if name in names), None)


def draw(tables: Sequence[Table]) -> bytes:
    """Plots the lost quality of all methods over the compression factor. Returns a PNG.

    A line joins the methods that no other method beats in both quality and compression factor. Well-known methods are
    labeled. Workloads with few methods are left out.
    """
    from matplotlib.lines import Line2D

    from hvdcomp.perfmodel.figures import INK, as_png, new_figure

    shown = [table for table in tables if len(table.rows) > 5] or list(tables)
    figure = new_figure(9.5, 4 * math.ceil(len(shown) / 2))
    for number, table in enumerate(shown, 1):
        axes = figure.add_subplot(math.ceil(len(shown) / 2), min(2, len(shown)), number)
        axes.set_title(f"{table.name}, {OPTIMIZERS[table.workload.options['optimizer']]}", fontsize=11)
        axes.set_xscale("log")
        axes.set_xticks(ticks := [2, 5, 10, 20, 50, 100], [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.set(xlabel="times fewer bytes", ylabel=table.workload.lost, xlim=(1.4, 240), ylim=(-5, _MOST * 1.05))
        axes.axhline(0, color=INK, linewidth=0.8)
        axes.grid(alpha=0.3)
        front = front_of(table)
        points = [(row.factor, statistics.mean(row.difference)) for row in front]
        axes.plot(*zip(*points, strict=True) if points else (), color=INK, alpha=0.6)
        for row in table.rows:
            run, family = row.outcomes[0].run, family_of(row.outcomes[0].run.method.spec)
            if family is None or not row.difference or run.workload != table.name:
                continue
            lost, known = statistics.mean(row.difference), run.method.spec in WELL_KNOWN
            large = known or row in front
            axes.plot(
                row.factor, min(lost, _MOST), "^" if lost > _MOST else "o", color=_COLORS[family],
                markersize=6 if large else 3, alpha=1 if large else 0.6,
            )  # fmt: skip
            if known and lost <= _MOST:
                name, place = run.method.spec.split(":")[0], (row.factor, lost)
                axes.annotate(
                    name, place, fontsize=8, color=_COLORS[family], rotation=40, xytext=(2, 4),
                    textcoords="offset points",
                )  # fmt: skip
    handles = [Line2D([], [], marker="o", linestyle="", color=color) for color in _COLORS.values()]
    figure.legend(handles, list(_COLORS), loc="outside lower center", ncols=len(_COLORS))
    return as_png(figure)


OPTIMIZERS = {"sgd": "SGD", "adamw": "Adam", "compressed-adam": "CompressedAdam"}
_OTHERWISE = (*UNCOMPRESSED, "bf16", "dgc", "signsgd")
"""Methods that are not used as evidence: casts, and methods that were trained with different settings."""


def evidence_of(tables: Iterable[Table]) -> list[dict[str, Any]]:
    """The records of `hvdcomp.compressors.evidence` that were measured at one learning rate, from training runs in
    which ranks exchange gradients in each step.

    A loss of None means that a run diverged.
    """
    records = []
    for table in tables:
        options = table.workload.options
        lost: dict[str, float | None] = {}
        for row in table.rows:
            run = row.outcomes[0].run
            if run.workload != table.name or re.split("[:(]", run.method.spec)[0] in _OTHERWISE:
                continue
            spec = str(parse_compressor(run.method.spec))
            if any(outcome.loss is None for outcome in row.outcomes):
                lost[spec] = None
            elif row.difference:
                lost[spec] = round(statistics.mean(row.difference) / 100, 4)
        if lost and "local_steps" not in options:
            metric = "accuracy" if table.workload.metric == "accuracy" else "loss"
            optimizer = OPTIMIZERS[options["optimizer"]]
            records.append({"optimizer": optimizer, "training": table.name, "metric": metric, "lost": lost})
    return records


# The command.


def _compute_ms(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, float]:
    found = {}
    for value in values:
        name, _, number = value.partition("=")
        if name not in WORKLOADS or not re.fullmatch(r"\d+(\.\d+)?", number) or float(number) == 0:
            raise click.BadParameter(f"{value!r}: give a workload of {', '.join(WORKLOADS)} and milliseconds: gpt=40")
        found[name] = float(number)
    return found


def _check(runs: Sequence[MethodRun]) -> None:
    """Refuses options that `hvdcomp train` would refuse, before the first training."""
    for run in runs:
        TrainingOptions(**run.options).resolved()


@click.command()
@options_of_trainings(WORKLOADS, "convergence", seeds="0,1,2")
@click.option("--only", multiple=True, metavar="PATTERN", help="Pattern of specs, or a compressor. Default: all.")
@click.option(
    "--compute-ms",
    multiple=True,
    callback=_compute_ms,
    metavar="WORKLOAD=MS",
    help="Milliseconds of computation in a step, for the times on the page. Default: the median of the timed steps.",
)
@click.option(
    "--evidence",
    type=click.Path(path_type=Path),
    help="Also write the lost quality of each method to this file, for the policy `auto`.",
)
@click.option("--times", is_flag=True, help="Time a few steps of each method, instead of training.")
def main(
    workloads: tuple[str, ...],
    only: tuple[str, ...],
    seeds: tuple[int, ...],
    workers: int | None,
    runs: Path,
    table: Path,
    compute_ms: dict[str, float],
    evidence: Path | None,
    times: bool,
    dry_run: bool,
    page_only: bool,
) -> None:
    """Train with every compressor on simulated ranks, and write the page of all complete runs."""
    chosen = planned(workloads or tuple(WORKLOADS), seeds, only, runs)
    for pattern in only:
        if not planned(WORKLOADS, [0], [pattern], runs):
            raise click.BadParameter(f"--only {pattern!r} matches no method; --dry-run lists all")
    _check(chosen)
    console = make_console(soft_wrap=True)
    todo = [TimedRun.of(run) for run in chosen if run.seed == seeds[0]] if times else chosen
    failed = [] if page_only else train_missing(todo, console, workers=workers, dry_run=dry_run)
    if dry_run:
        return
    # The page has all seeds with runs, not only those of this command.
    everywhere = seeds_there(runs)
    keep_records(planned(WORKLOADS, everywhere, (), runs), runs)
    keep_records([TimedRun.of(run) for run in planned(WORKLOADS, [0], (), runs)], runs / "times")
    tables = tables_of(runs, everywhere, compute_ms)
    if tables:
        write_page(table, tables)
        console.print(f"wrote {table}, and a CSV file and a plot beside it")
        if evidence is not None:
            replace_text(evidence, json.dumps(evidence_of(tables), indent=1) + "\n")
    else:
        console.print(f"there is no finished run in {runs}")
    end_if_failed(failed, console)


if __name__ == "__main__":
    main()
