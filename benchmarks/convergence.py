"""What every compressor does to accuracy: trains the reference models with each, at two levels, over three seeds.

    horovodrun -np 2 python benchmarks/convergence.py            # both data sets; about 40 minutes on two cores
    horovodrun -np 2 python benchmarks/convergence.py --data digits --only topk --only powersgd

Each run goes to a folder of its own below --runs and is skipped when it is there already, so that an interrupted
benchmark goes on where it stopped. At the end rank 0 writes the table of all runs found there to --table.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Method:
    """A compressor at two levels, and what its training needs beside it."""

    specs: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)


METHODS = (
    Method(("none",)),
    Method(("fp16",)),
    Method(("bf16",)),
    Method(("topk:ratio=0.01", "topk:ratio=0.001")),
    Method(("randomk:ratio=0.1", "randomk:ratio=0.01")),
    Method(("mstopk:ratio=0.01", "mstopk:ratio=0.001")),
    # Momentum is DGC's own; the optimizer's must be 0.
    Method(("dgc:ratio=0.01", "dgc:ratio=0.001"), {"momentum": 0.0}),
    Method(("redsync:ratio=0.01", "redsync:ratio=0.001")),
    Method(("sidco:ratio=0.01", "sidco:ratio=0.001")),
    Method(("signsgd",), {"lr_factor": 0.01}),
    Method(("onebit", "onebit:per_row=True")),
    Method(("efsignsgd",)),
    Method(("qsgd:bits=4", "qsgd:bits=2")),
    Method(("terngrad",)),
    Method(("natural",)),
    Method(("globalqsgd:bits=8", "globalqsgd:bits=4")),
    Method(("powersgd:rank=2", "powersgd:rank=1")),
    Method(("powersgd:rank=2,alternating=True", "powersgd:rank=1,alternating=True")),
    Method(("atomo:rank=4", "atomo:rank=2")),
)

DATA: dict[str, dict[str, Any]] = {
    "digits": {"model": "cnn", "data": "digits", "epochs": 15},
    "stdlib-text": {
        "model": "lstm",
        "data": "stdlib-text",
        "epochs": 6,
        "batch_size": 16,
        "sequence_length": 32,
        "text_size": 50_000,
    },
}


def folder_of(runs: Path, data: str, spec: str, seed: int) -> Path:
    """Where a run is written; a spec string becomes a file name."""
    return runs / data / spec.replace(":", "-").replace(",", "-").replace("=", "") / f"seed{seed}"


def run_all(runs: Path, chosen: tuple[str, ...], only: tuple[str, ...]) -> None:
    """Trains what is not there yet, on every rank together."""
    import horovod.torch as hvd

    from hvdcomp.train.options import TrainingOptions
    from hvdcomp.train.trainer import train

    todo = [
        (data, spec, seed, method.options)
        for data in chosen
        for method in METHODS
        for spec in method.specs
        for seed in SEEDS
        if not only or spec.partition(":")[0] in only
    ]
    for number, (data, spec, seed, options) in enumerate(todo):
        folder = folder_of(runs, data, spec, seed)
        if hvd.broadcast_object((folder / "summary.json").exists(), name="convergence.exists"):
            continue
        if hvd.rank() == 0:
            print(f"[{number + 1}/{len(todo)}] {data} {spec} seed {seed}", flush=True)
        extra = dict(options)
        factor = extra.pop("lr_factor", None)
        settings = TrainingOptions(
            **DATA[data], **extra, compression=spec, seed=seed, output=folder, overwrite=True, progress=False
        )
        if factor is not None:
            settings = TrainingOptions(**{**vars(settings), "lr": factor * settings.resolved().lr})
        train(settings)


def table(runs: Path) -> str:
    """The table of all finished runs, in Markdown: mean over the seeds, and the range in brackets."""
    lines = []
    for data in DATA:
        groups = {
            spec: [
                json.loads(file.read_text())
                for seed in SEEDS
                if (file := folder_of(runs, data, spec, seed) / "summary.json").exists()
            ]
            for method in METHODS
            for spec in method.specs
        }
        groups = {spec: group for spec, group in groups.items() if group}
        if not groups:
            continue
        metric = "accuracy" if data == "digits" else "perplexity"
        settings = ", ".join(f"{key} {value}" for key, value in DATA[data].items())
        lines += [
            "",
            f"## {data}",
            "",
            f"{settings}; 2 ranks, seeds {', '.join(map(str, SEEDS))}.",
            "",
            f"| compressor | {metric} | bytes per step | compression factor | converged |",
            "|---|---|---|---|---|",
        ]
        dense = [run[metric] for run in groups.get("none", []) if run.get(metric) is not None]
        lines += [_row(spec, group, metric, dense) for spec, group in groups.items()]
    return "\n".join(lines) + "\n"


def _row(spec: str, group: list[dict[str, Any]], metric: str, dense: list[float]) -> str:
    values = [run[metric] for run in group if run["status"] == "finished" and run.get(metric) is not None]
    scale = 100 if metric == "accuracy" else 1
    shown = "-"
    verdict = "no: diverged"
    if values:
        shown = f"{scale * statistics.mean(values):.2f} ({scale * min(values):.2f} to {scale * max(values):.2f})"
        verdict = _verdict(statistics.mean(values), statistics.mean(dense) if dense else None, metric)
        if len(values) < len(group):
            verdict = f"{len(group) - len(values)} of {len(group)} runs diverged"
    sent = statistics.mean(run["bytes_sent_per_step"] for run in group)
    factor = statistics.mean(run["compression_factor"] for run in group)
    return f"| `{spec}` | {shown} | {sent:,.0f} | {factor:.1f} | {verdict} |"


def _verdict(value: float, dense: float | None, metric: str) -> str:
    """Whether a method reached the dense result: within one point of accuracy, or 10 % of perplexity."""
    if dense is None:
        return "-"
    if metric == "accuracy":
        lost = 100 * (dense - value)
        return "yes" if lost <= 1 else f"{lost:.1f} points below dense"
    worse = value / dense - 1
    return "yes" if worse <= 0.1 else f"{100 * worse:.0f} % above dense"


INTRODUCTION = """# What every compressor does to accuracy

Made by `horovodrun -np 2 python benchmarks/convergence.py`, which trains the reference models of `hvdcomp train` with
the options named below, and defaults for the rest. Only the compressor differs (and, for `dgc`, momentum is left to the
compressor; for `signsgd`, whose result is a sign instead of a gradient, the learning rate is a hundredth). "converged"
says whether the mean over the seeds is within one point of dense accuracy, or within 10 % of dense perplexity. Bytes
are what one rank hands to the collectives in a step; the compression factor is dense bytes over sent bytes.

The text model is trained for 258 steps only, with the learning rate that suits dense training: methods that hold much
back are still catching up when it ends, and the table shows that as it is.

The models are small: small tensors go dense, and with the numbers that ride along they bound the factor that a model of
this size can reach.
"""


@click.command()
@click.option("--data", "chosen", multiple=True, type=click.Choice(list(DATA)), help="Which data; all by default.")
@click.option("--only", multiple=True, help="Which compressors, by name; all by default.")
@click.option("--runs", type=click.Path(path_type=Path), default=Path("runs/convergence"), show_default=True)
@click.option("--table", "file", type=click.Path(path_type=Path), default=Path("docs/convergence.md"))
def main(chosen: tuple[str, ...], only: tuple[str, ...], runs: Path, file: Path) -> None:
    """Trains with every compressor and writes the table."""
    import horovod.torch as hvd

    hvd.init()
    run_all(runs, chosen or tuple(DATA), only)
    if hvd.rank() == 0:
        file.write_text(INTRODUCTION + table(runs))
        print(f"wrote {file}")


if __name__ == "__main__":
    main()
