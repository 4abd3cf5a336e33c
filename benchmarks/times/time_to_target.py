"""Measures how long training on the emulated cluster takes to reach a target, with each method and each policy.

    sudo .venv/bin/python -m benchmarks.times.time_to_target              # about 45 minutes
    sudo .venv/bin/python -m benchmarks.times.time_to_target --rate 1gbit --method none --policy budget:factor=50
    .venv/bin/python -m benchmarks.times.time_to_target --page-only       # only the page, from the existing runs

The methods and policies train one after the other, with one rank on each host (docs/emulated-cluster.md). A training
run ends when it reaches the target on the validation data. The benchmark calibrates the hosts before the training runs
with `auto`, which gets no list of compressors. benchmarks/quality/convergence.py predicts these times for simulated
ranks.

A complete run with the same options is not trained again.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import click

from benchmarks.pages import MEASURED, commits_of, end_if_failed, findings_of, formerly, parse_seeds, with_interval
from benchmarks.quality import convergence
from benchmarks.trainings import Run, keep_records
from hvdcomp.files import commit, csv_of, provenance_last, replace_files
from hvdcomp.tools.bench.cluster import Cluster, ClusterError
from hvdcomp.tools.terminal import make_console

METHODS = ("none", "fp16", "terngrad", "powersgd:rank=4", "topk:ratio=0.01")
# For each policy, the compressor whose levels it chooses. `budget` sends about as many bytes as this compressor alone.
POLICIES = {
    "budget:factor=50": "topk:ratio=0.01",
    "lgreco:least=0.1,most=10,levels=13": "topk:ratio=0.01",
    "accordion:low=0.1,high=0.002,steps=40": "topk:ratio=0.002",
    "auto:loss=0.02": "none",  # `auto` proposes compressors itself
}
CALIBRATED = ("fp16", "terngrad", "int4", "int8", "natural", "efsignsgd", "powersgd:rank=4", "topk:ratio=0.01")
NETWORK = "benchmarks.times.time_to_target:network"
RATES = ("100mbit", "1gbit")
UNCOMPRESSED = convergence.UNCOMPRESSED


@dataclass(frozen=True)
class ClusterRun(Run):
    """A training run of a workload with a method, on hosts with links of a given rate.

    `policy` is "" if training uses no policy.
    """

    method: str
    hosts: int
    rate: str
    policy: str = ""

    @property
    def label(self) -> str:
        return f"{self.hosts} x {self.rate} {self.method} {self.policy}".strip()

    @cached_property
    def options(self) -> dict[str, Any]:
        workload = convergence.WORKLOADS[self.workload]
        listed = {method.spec: method for method in convergence.METHODS}
        method = listed.get(self.method) or convergence.Method(self.method)
        spec = self.policy.replace("auto:", f"auto:calibration={self.calibration},")
        policy = {"policy": spec} if spec else {}
        return {**method.options(workload, self.workload), **policy, "seed": self.seed, "until": workload.target}

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

    options = convergence.WORKLOADS[os.environ["WORKLOAD"]].options
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


def record_of(
    runs: Sequence[ClusterRun], best: Sequence[ClusterRun], fixed: Sequence[ClusterRun] = ()
) -> dict[str, Any]:
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
    """The results of each rate, method and policy, compared with the better uncompressed method."""
    finished = [run for run in runs if run.record is not None]
    records = []
    for rate in dict.fromkeys(run.rate for run in finished):
        of_rate = [run for run in finished if run.rate == rate]
        dense = [[run for run in of_rate if (run.method, run.policy) == (method, "")] for method in UNCOMPRESSED]
        means = [
            [evaluation["seconds_to_target"] for evaluation in _reached(method_runs).values()] for method_runs in dense
        ]
        reaching = [place for place, seconds in enumerate(means) if seconds]
        best = min(reaching, key=lambda place: sum(means[place]) / len(means[place]), default=0)
        for way in dict.fromkeys((run.method, run.policy) for run in of_rate):
            fixed = [run for run in of_rate if way[1] and (run.method, run.policy) == (way[0], "")]
            records.append(record_of([run for run in of_rate if (run.method, run.policy) == way], dense[best], fixed))
    return records


def write_page(file: Path, runs: Sequence[ClusterRun]) -> bool:
    """Writes the page of the existing runs, with a CSV file and a plot. Returns False if there are no runs."""
    records = records_of(runs)
    if not records:
        return False
    commits = commits_of(runs)
    first, lines = runs[0], []
    rates = list(dict.fromkeys(record["rate"] for record in records))
    chosen = "" if tuple(rates) == RATES else "".join(f" --rate {rate}" for rate in rates)
    options = ", ".join(f"{key} {value}" for key, value in convergence.WORKLOADS[first.workload].options.items())
    for record in records:
        cells = [
            record["rate"], f"`{_name(record, '` with `')}`", f"{record['reached']} of {record['seeds']}",
            "-" if record["steps"] is None else f"{record['steps']:.0f}",
            "-" if record["megabytes"] is None else f"{record['megabytes']:.2f}",
            record["seconds"], record["times_as_fast"], record["times_as_fast_as_fixed"],
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    older = formerly("python ./benchmarks/time_to_target.py")
    text = f"""# Time to a target, on the emulated cluster

Made by `sudo .venv/bin/python -m benchmarks.times.time_to_target{chosen}`, at commit {commits}. {older}

This page shows how long training takes with each method until it reaches a target. Each training run uses `hvdcomp
train` under Horovod on {first.hosts} [emulated hosts](emulated-cluster.md), with one rank on each host. The run ends
when it reaches {first.options["until"]} on the validation data. The options of `hvdcomp train` are: {options}.

All emulated hosts share the cores of one machine. So the computation of a step takes longer than on separate hosts, and
the network takes a smaller part of the step.

The table shows means over the seeds, with their 95 % confidence intervals (Student's t):

- **reached** is the number of seeds that reached the target.
- **seconds** is the time of training, without the evaluations.
- **speedup** compares a method with the faster of {" and ".join(f"`{one}`" for one in UNCOMPRESSED)}, seed by seed.
- **over fixed level** is the speedup over the same method at its fixed level, without the policy.

{findings_of(file)}

![Seconds to the target]({file.with_suffix(".png").name})

| rate | method | reached | steps | MB sent | seconds | speedup | over fixed level |
|---|---|--:|--:|--:|--:|--:|--:|
{chr(10).join(lines)}
"""
    replace_files(
        {
            file: provenance_last(text).encode(),
            file.with_suffix(".csv"): csv_of(records),
            file.with_suffix(".png"): draw(records),
        }
    )
    return True


def draw(records: Sequence[Mapping[str, Any]]) -> bytes:
    """Plots the seconds to the target, by rate and method, and returns a PNG. A bar is empty if no run reached the
    target."""
    from hvdcomp.perfmodel.figures import COLORS, INK, as_png, new_figure

    figure = new_figure(8, 0.32 * len(records) + 1.2)
    axes = figure.add_subplot()
    slowest_first = sorted(records, key=lambda record: (record["rate"], -_seconds(record)))
    axes.barh(
        [f"{_name(record)}, {record['rate']}" for record in slowest_first],
        [_seconds(record) for record in slowest_first],
        color=[INK if _name(record) in UNCOMPRESSED else COLORS[0] for record in slowest_first],
    )
    axes.set_xlabel("seconds of training to the target, mean over the seeds")
    axes.grid(axis="x", alpha=0.3)
    return as_png(figure)


def _name(record: Mapping[str, Any], between: str = " with ") -> str:
    """The method, with the policy if there is one."""
    return between.join(filter(None, (record["method"], record["policy"])))


def _seconds(record: Mapping[str, Any]) -> float:
    """The mean without its interval; 0 if the target was never reached."""
    return float(record["seconds"].split()[0]) if record["reached"] else 0.0


@click.command(help=__doc__)
@click.option(
    "--workload", default="mnist1d", show_default=True, type=click.Choice(list(convergence.WORKLOADS)), help="To train."
)
@click.option("--hosts", type=click.IntRange(2), default=4, show_default=True)
@click.option("--rate", "rates", multiple=True, default=RATES, show_default=True, metavar="RATE")
@click.option(
    "--method", "methods", multiple=True, default=METHODS, show_default=True,
    type=click.Choice([method.spec for method in convergence.METHODS]), metavar="SPEC",
)  # fmt: skip
@click.option(
    "--policy", "policies", multiple=True, default=tuple(POLICIES), show_default=True,
    type=click.Choice(list(POLICIES)), metavar="SPEC",
)  # fmt: skip
@click.option("--seeds", default="0,1,2,3,4", show_default=True, callback=parse_seeds, metavar="SEED,...")
@click.option("--runs", type=click.Path(path_type=Path), default=MEASURED / "time-to-target", show_default=True)
@click.option("--table", type=click.Path(path_type=Path), default=Path("docs/time-to-target.md"), show_default=True)
@click.option("--page-only", is_flag=True, help="Only write the page, without any training.")
def main(
    workload: str,
    hosts: int,
    rates: tuple[str, ...],
    methods: tuple[str, ...],
    policies: tuple[str, ...],
    seeds: tuple[int, ...],
    runs: Path,
    table: Path,
    page_only: bool,
) -> None:
    console, runs, table = make_console(soft_wrap=True), runs.resolve(), table.resolve()
    ways = [*((method, "") for method in methods), *((POLICIES[policy], policy) for policy in policies)]
    planned = [
        ClusterRun(workload, seed, runs, method, hosts, rate, policy)
        for rate in rates
        for seed in seeds
        for method, policy in ways
    ]
    try:
        failed = [] if page_only else train(planned, console)
    except ClusterError as error:
        raise click.ClickException(str(error)) from None
    keep_records(planned, runs)
    if write_page(table, planned):
        console.print(f"wrote {table}, and a CSV file and a plot beside it")
    else:
        console.print(f"there is no finished run in {runs}")
    end_if_failed(failed, console)


if __name__ == "__main__":
    main()
