"""Measures how long training on the emulated cluster takes to reach a target, with each method and each policy.

    sudo .venv/bin/python -m benchmarks.times.time_to_target              # about an hour
    sudo .venv/bin/python -m benchmarks.times.time_to_target --workload sorting --rate 1gbit --only none --only int4
    .venv/bin/python -m benchmarks.times.time_to_target --page-only       # only the page, from the existing runs

The methods and policies train one after the other, with one rank on each host (docs/emulated-cluster.md). Each method
trains at its own best learning rate, which the training runs of benchmarks/best_rates have found. A training run ends
when it reaches the target on the validation data. The benchmark calibrates the hosts before the training runs with
`auto`, which gets no list of compressors.

A complete run with the same options is not trained again.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import click

from benchmarks.best_rates.rows import DENSE, WORKLOADS, changes_of, rate_of
from benchmarks.best_rates.search import FARTHEST, HELD_OUT, best_of
from benchmarks.pages import MEASURED, commits_of, end_if_failed, filled, findings_of, parse_seeds, with_interval
from benchmarks.trainings import Run, keep_records, seeds_there
from hvdcomp.files import commit, csv_of, provenance_last, replace_files
from hvdcomp.tools.bench.cluster import Cluster, ClusterError
from hvdcomp.tools.terminal import make_console

UNCOMPRESSED = (DENSE, "fp16")
"""The methods that need no hvdcomp. The faster of the two is the baseline of the speedups."""


@dataclass(frozen=True)
class Task:
    """What is trained, and how.

    Attributes:
        target: the quality on the validation data at which a training run ends.
        methods: the methods, in addition to `UNCOMPRESSED`, as in `best_rates.rows.methods_of`.
        policies: for each policy, the compressor whose levels it chooses.
    """

    target: str
    methods: tuple[str, ...]
    policies: Mapping[str, str] = field(default_factory=dict)

    @property
    def ways(self) -> list[tuple[str, str]]:
        """All rows of the task, as pairs of a method and a policy. The policy is "" if there is none."""
        methods = [(method, "") for method in (*UNCOMPRESSED, *self.methods)]
        return [*methods, *((method, policy) for policy, method in self.policies.items())]


TASKS = {
    # The policy `auto` proposes compressors itself.
    "mnist1d": Task("accuracy=0.9", ("eden:bits=1", "topk:ratio=0.01"), {"auto:loss=0.02": DENSE}),
    "sorting": Task("accuracy=0.75", ("int4", "eden")),
    "sorting-muon": Task("accuracy=0.75", ("int4", "local-steps=1 efsignsgd", "local-steps=4 efsignsgd")),
}
CALIBRATED = ("fp16", "terngrad", "int4", "int8", "natural", "efsignsgd", "powersgd:rank=4", "topk:ratio=0.01")
NETWORK = "benchmarks.times.time_to_target:network"
RATES = ("100mbit", "1gbit")
EVALUATE_EVERY = 20
"""Number of steps between two evaluations. Their time does not count. With local steps, the weights are equal after
this number of steps."""
BEST_RATES = MEASURED / "best-rates"


@dataclass(frozen=True)
class ClusterRun(Run):
    """A training run of a workload with a method, on hosts with links of a given rate.

    Attributes:
        hosts: number of hosts. Each host has one rank.
        rate: the rate of each host's link, such as "100mbit".
        policy: spec of the policy; "" if there is none.
        doublings: the learning rate, as the number of times that the workload's own learning rate is doubled.
    """

    method: str
    hosts: int
    rate: str
    policy: str
    doublings: int

    @property
    def label(self) -> str:
        way = f"{self.method} {self.policy}".strip()
        return f"{self.hosts} x {self.rate} {way} lr={rate_of(self.workload, self.doublings):g}"

    @cached_property
    def options(self) -> dict[str, Any]:
        given = {name: value for name, value in WORKLOADS[self.workload].items() if name != "simulate_ranks"}
        spec = self.policy.replace("auto:", f"auto:calibration={self.calibration},")
        return {
            **given,
            **changes_of(self.workload, self.method),
            "evaluate_every": EVALUATE_EVERY,
            "lr": rate_of(self.workload, self.doublings),
            **({"policy": spec} if spec else {}),
            "seed": self.seed,
            "until": TASKS[self.workload].target,
        }

    @property
    def calibration(self) -> str:
        """File name of the calibration of the hosts, in the folder of all trainings."""
        return f"{self.workload}-{self.hosts}x{self.rate}.json"

    def figures(self) -> dict[str, Any]:
        """The seconds, steps and bytes of training until the target was reached; each is None if the target was not
        reached."""
        assert self.summary is not None
        until = self.summary["until"]
        names = {"trained_seconds": "seconds_to_target", "step": "steps_to_target", "bytes_sent": "bytes_to_target"}
        return {shown: until[name] if until["reached"] else None for name, shown in names.items()}

    @property
    def reached(self) -> dict[str, Any] | None:
        """The record of the run if it reached the target; otherwise None."""
        record = self.record
        return None if record is None or record["seconds_to_target"] is None else record


def network(batch_size: int) -> tuple[Any, Any]:
    """Creates the model for `hvdcomp calibrate`, and a function that returns the loss of a batch. The model is that of
    the workload named in the environment variable WORKLOAD."""
    import torch

    from hvdcomp.tools.train.data import load_data
    from hvdcomp.tools.train.frameworks import build_model
    from hvdcomp.tools.train.options import TrainingOptions
    from hvdcomp.tools.train.torch_learner import loss_of

    options = WORKLOADS[os.environ["WORKLOAD"]]
    data = load_data(TrainingOptions(model=options["model"], data=options["data"]).resolved())
    model = build_model(options["model"], channels=data.channels, size=data.size, classes=data.classes)
    inputs, targets = (torch.as_tensor(part[:batch_size]) for part in (data.train_x, data.train_y))
    return model, lambda: loss_of(model(inputs), targets)


def calibrate(run: ClusterRun, cluster: Cluster, console: Any) -> None:
    """Calibrates the hosts of a run with `auto`, unless the calibration exists."""
    if not run.policy.startswith("auto") or (file := run.runs / run.calibration).exists():
        return
    console.print(f"calibrating {run.hosts} hosts at {run.rate}")
    compressors = [word for spec in CALIBRATED for word in ("--compressor", spec)]
    command = [sys.executable, "-m", "hvdcomp", "calibrate", "--model", NETWORK, *compressors]
    environment = {**run.variables, "WORKLOAD": run.workload}
    if cluster.run([*command, "--seconds", "60", "--output", str(file)], env=environment):
        raise ClusterError(f"the calibration for {run} failed")


def train(runs: Sequence[ClusterRun], console: Any) -> list[ClusterRun]:
    """Trains the missing runs, each on a new cluster, and returns the runs that failed."""
    todo = [run for run in runs if run.record is None]
    console.print(f"{len(runs) - len(todo)} of {len(runs)} runs are complete, {len(todo)} to train")
    failed, at_commit = [], commit()
    runs[0].runs.mkdir(parents=True, exist_ok=True)
    os.chdir(runs[0].runs)  # paths of calibrations in the options are relative to this folder
    for number, run in enumerate(todo, 1):
        run.begin()
        with Cluster(run.hosts, run.rate) as cluster, (run.folder / "log.txt").open("w") as log:
            calibrate(run, cluster, console)
            start = time.monotonic()
            command = [sys.executable, "-m", "hvdcomp", *run.words]
            code = cluster.run(command, env=run.variables, output=partial(print, file=log, end=""))
        about = run.end(at_commit, time.monotonic() - start, code)
        if about["error"] is not None:
            failed.append(run)
            outcome = f"failed: {about['error']}"
        else:
            evaluation = run.reached
            outcome = "missed the target" if evaluation is None else f"{evaluation['seconds_to_target']:.1f} s"
        console.print(f"[{number}/{len(todo)}] {run}: {outcome}")
    return failed


def record_of(runs: Sequence[ClusterRun], best: Sequence[ClusterRun], fixed: Sequence[ClusterRun]) -> dict[str, Any]:
    """The results of the runs of one method and policy.

    Args:
        best: for each seed, the run of the faster uncompressed method.
        fixed: for each seed, the run of the same method without the policy; empty for a method without a policy.
    """
    reached = _reached(runs)
    seconds = [evaluation["seconds_to_target"] for evaluation in reached.values()]
    bytes_to_target = _mean_of(reached, "bytes_to_target")
    return {
        "workload": runs[0].workload,
        "hosts": runs[0].hosts,
        "rate": runs[0].rate,
        "method": runs[0].method,
        "policy": runs[0].policy,
        "lr": rate_of(runs[0].workload, runs[0].doublings),
        "seeds": len(runs),
        "reached": len(reached),
        "steps": _mean_of(reached, "steps_to_target"),
        "megabytes": None if bytes_to_target is None else bytes_to_target / 1e6,
        "seconds": with_interval(seconds, ".1f"),
        "times_as_fast": with_interval(_times_as_fast(reached, best), ".2f"),
        "times_as_fast_as_fixed": with_interval(_times_as_fast(reached, fixed), ".2f"),
    }


def _reached(runs: Sequence[ClusterRun]) -> dict[int, dict[str, Any]]:
    """The record of each run that reached the target, by seed."""
    return {run.seed: evaluation for run in runs if (evaluation := run.reached) is not None}


def _times_as_fast(reached: Mapping[int, Mapping[str, Any]], others: Sequence[ClusterRun]) -> list[float]:
    """The speedup of the runs over other runs, for each seed with which both reached the target."""
    beside = _reached(others)
    pairs = [(beside[seed], evaluation) for seed, evaluation in reached.items() if seed in beside]
    return [other["seconds_to_target"] / evaluation["seconds_to_target"] for other, evaluation in pairs]


def _mean_of(evaluations: Mapping[int, Mapping[str, Any]], key: str) -> float | None:
    return sum(evaluation[key] for evaluation in evaluations.values()) / len(evaluations) if evaluations else None


def records_of(runs: Sequence[ClusterRun]) -> list[dict[str, Any]]:
    """The results of each workload, rate, method and policy, compared with the better uncompressed method."""
    records = []
    for workload, rate in dict.fromkeys((run.workload, run.rate) for run in runs):
        rows: dict[tuple[str, str, int], list[ClusterRun]] = {}
        for run in runs:
            if (run.workload, run.rate) == (workload, rate):
                rows.setdefault((run.method, run.policy, run.doublings), []).append(run)
        dense = [of_row for (method, policy, _), of_row in rows.items() if method in UNCOMPRESSED and not policy]
        best = min(dense, key=lambda of_row: _mean_of(_reached(of_row), "seconds_to_target") or math.inf, default=[])
        for (method, policy, doublings), of_row in rows.items():
            fixed = rows.get((method, "", doublings), []) if policy else []
            records.append(record_of(of_row, best, fixed))
    return records


def write_page(file: Path, runs: Sequence[ClusterRun]) -> bool:
    """Writes the page of runs that have a record, with a CSV file and a plot. Returns False if there are no runs."""
    records = records_of(runs)
    if not records:
        return False
    workloads = list(dict.fromkeys(run.workload for run in runs))
    chosen = "" if workloads == list(TASKS) else "".join(f" --workload {workload}" for workload in workloads)
    text = f"""# Time to a target, on the emulated cluster

Made by `sudo .venv/bin/python -m benchmarks.times.time_to_target{chosen}`, at commit {commits_of(runs)}.

This page shows how long training takes with each method until it reaches a target. Each training run uses `hvdcomp
train` under Horovod on {runs[0].hosts} [emulated hosts](emulated-cluster.md), with one rank on each host. Each
method trains at its own [best learning rate](best-rates.md). `fp16` and the policy `auto` train at the best learning
rate of uncompressed training, and the other policies at the rate of their compressor. The training runs use seeds that
the search for the learning rates did not use.

All emulated hosts share the cores of one machine. So the computation of a step takes longer than on separate hosts, and
the network takes a smaller part of the step.

The tables show means over the seeds, with their 95 % confidence intervals (Student's t):

- **reached** is the number of seeds that reached the target.
- **seconds** is the time of training, without the evaluations.
- **speedup** compares a method with the faster of {" and ".join(f"`{one}`" for one in UNCOMPRESSED)}, seed by seed.
- **over fixed level** is the speedup over the same method at its fixed level, without the policy.

{findings_of(file)}

![Seconds to the target]({file.with_suffix(".png").name})

{chr(10).join(section_of(workload, records) for workload in workloads)}"""
    replace_files(
        {
            file: provenance_last(text).encode(),
            file.with_suffix(".csv"): csv_of(records),
            file.with_suffix(".png"): draw(records),
        }
    )
    return True


def section_of(workload: str, records: Sequence[Mapping[str, Any]]) -> str:
    """The part of the page about a workload: its options, and a table."""
    shown = {name: value for name, value in WORKLOADS[workload].items() if name not in ("lr", "simulate_ranks")}
    options = ", ".join(f"{name} {value}" for name, value in {**shown, "evaluate_every": EVALUATE_EVERY}.items())
    lines = []
    for record in (one for one in records if one["workload"] == workload):
        cells = [
            record["rate"], f"`{_name(record, '` with `')}`", f"{record['lr']:g}",
            f"{record['reached']} of {record['seeds']}",
            "-" if record["steps"] is None else f"{record['steps']:.0f}",
            "-" if record["megabytes"] is None else f"{record['megabytes']:.2f}",
            record["seconds"], record["times_as_fast"], record["times_as_fast_as_fixed"],
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    heading = filled(
        f"A training run ends when it reaches {TASKS[workload].target} on the validation data. The options of `hvdcomp "
        f"train` are: {options}."
    )
    return f"""## {workload}

{heading}

| rate | method | learning rate | reached | steps | MB sent | seconds | speedup | over fixed level |
|---|---|--:|--:|--:|--:|--:|--:|--:|
{chr(10).join(lines)}
"""


def draw(records: Sequence[Mapping[str, Any]]) -> bytes:
    """Plots the seconds to the target, by workload, rate and method, and returns a PNG. A bar is empty if no run
    reached the target."""
    from hvdcomp.perfmodel.figures import COLORS, INK, as_png, new_figure

    groups: dict[str, list[Mapping[str, Any]]] = {}
    for record in sorted(records, key=lambda record: (record["rate"], -_seconds(record))):
        groups.setdefault(record["workload"], []).append(record)
    figure = new_figure(8, 0.32 * len(records) + 1.2 * len(groups))
    every_axes = figure.subplots(len(groups), squeeze=False, height_ratios=[len(group) for group in groups.values()])
    for axes, (workload, group) in zip(every_axes[:, 0], groups.items(), strict=True):
        axes.barh(
            [f"{_name(record)}, {record['rate']}" for record in group],
            [_seconds(record) for record in group],
            color=[INK if _name(record) in UNCOMPRESSED else COLORS[0] for record in group],
        )
        axes.set_title(workload)
        axes.set_xlabel("seconds of training to the target, mean over the seeds")
        axes.grid(axis="x", alpha=0.3)
    return as_png(figure)


def _name(record: Mapping[str, Any], between: str = " with ") -> str:
    """The method, with the policy if there is one."""
    return between.join(filter(None, (record["method"], record["policy"])))


def _seconds(record: Mapping[str, Any]) -> float:
    """The mean without its interval; 0 if the target was never reached."""
    return float(record["seconds"].split()[0]) if record["reached"] else 0.0


def planned(
    workloads: Collection[str],
    hosts: int,
    rates: Sequence[str],
    only: Collection[str],
    seeds: Sequence[int],
    runs: Path,
) -> Iterator[ClusterRun]:
    """The runs of the benchmark, each at the best learning rate that is known today."""
    for workload in workloads:
        for rate in rates:
            for seed in seeds:
                for method, policy in TASKS[workload].ways:
                    if not only or method in only or policy in only:
                        doublings = best_of(workload, DENSE if method == "fp16" else method, BEST_RATES)
                        yield ClusterRun(workload, seed, runs, method, hosts, rate, policy, doublings)


def existing(hosts: int, rates: Sequence[str], runs: Path) -> Iterator[ClusterRun]:
    """The runs of all workloads that have a record, at any learning rate."""
    seeds = seeds_there(runs)
    for workload, task in TASKS.items():
        for rate in rates:
            for method, policy in task.ways:
                for doublings in range(-FARTHEST, FARTHEST + 1):
                    for seed in seeds:
                        run = ClusterRun(workload, seed, runs, method, hosts, rate, policy, doublings)
                        if run.record is not None:
                            yield run


@click.command(help=__doc__)
@click.option("--workload", "workloads", multiple=True, default=tuple(TASKS), type=click.Choice(list(TASKS)))
@click.option("--hosts", type=click.IntRange(2), default=4, show_default=True)
@click.option("--rate", "rates", multiple=True, default=RATES, show_default=True, metavar="RATE")
@click.option(
    "--only", multiple=True, metavar="SPEC",
    help="Train only this method, or with this policy. You can repeat the option. Default: all methods and policies.",
)  # fmt: skip
@click.option(
    "--seeds", default=",".join(map(str, HELD_OUT)), show_default=True, callback=parse_seeds, metavar="SEED,..."
)
@click.option("--runs", type=click.Path(path_type=Path), default=MEASURED / "time-to-target", show_default=True)
@click.option("--table", type=click.Path(path_type=Path), default=Path("docs/time-to-target.md"), show_default=True)
@click.option("--page-only", is_flag=True, help="Only write the page, without any training.")
def main(
    workloads: tuple[str, ...],
    hosts: int,
    rates: tuple[str, ...],
    only: tuple[str, ...],
    seeds: tuple[int, ...],
    runs: Path,
    table: Path,
    page_only: bool,
) -> None:
    console, runs, table = make_console(soft_wrap=True), runs.resolve(), table.resolve()
    failed: list[ClusterRun] = []
    if not page_only:
        known = {word for workload in workloads for way in TASKS[workload].ways for word in way}
        if unknown := [spec for spec in only if spec not in known]:
            listed = ", ".join(sorted(known - {""}))
            raise click.BadParameter(
                f"{unknown[0]!r} is not a method or policy of this benchmark; choose from {listed}", param_hint="--only"
            )
        todo = list(planned(workloads, hosts, rates, only, seeds, runs))
        try:
            failed = train(todo, console)
        except ClusterError as error:
            raise click.ClickException(str(error)) from None
        finally:
            keep_records(todo, runs)  # also if the command is stopped, so that no record is lost
    if write_page(table, list(existing(hosts, tuple(dict.fromkeys((*RATES, *rates))), runs))):
        console.print(f"wrote {table}, and a CSV file and a plot beside it")
    else:
        console.print(f"there is no finished run in {runs}")
    end_if_failed(failed, console)


if __name__ == "__main__":
    main()
