"""Compares PyTorch's communication hooks for DistributedDataParallel with hvdcomp's hooks: the times and bytes of
steps.

    sudo .venv/bin/python -m benchmarks.times.ddp_hooks --output docs/ddp-hooks

The program creates emulated clusters (docs/emulated-cluster.md). On each cluster, it measures all methods, which take
turns. The ranks run `ddp_hooks_worker.py`. The results are ddp-hooks.json with the times of all steps, ddp-hooks.csv
with a row for each setting and method, and ddp-hooks.md with a summary.

Each setting first runs eight steps of each method. Then it measures for --seconds, and at least five more steps of each
method. With all methods, a rank needs 3 GB for ResNet-18.
"""

from __future__ import annotations

import itertools
import json
import shlex
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.pages import formerly
from benchmarks.steps.clusters import StepsError, check, earlier, environment_facts
from benchmarks.steps.places import Hosts, Place, parse_hosts, place_of
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.files import commit, commits_in_words, csv_of, provenance_last, replace_files
from hvdcomp.perfmodel.rates import parse_rate
from hvdcomp.tools.bench.cluster import Cluster, ClusterError
from hvdcomp.tools.bench.models import split_model
from hvdcomp.tools.bench.trainings import ratio

WORKER = "benchmarks.times.ddp_hooks_worker"
STEM = "ddp-hooks"
COMPUTE, DENSE = "compute", "DDP"  # the names of these methods in the worker

ALIKE: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "dense": ((DENSE,), ("none",)),
    "cast": (("fp16_compress_hook", "bf16_compress_hook"), ("fp16", "bf16")),
    "low rank": (("powerSGD_hook", "batched_powerSGD_hook"), ("powersgd",)),
    "8 bit": (("quantization_pertensor_hook", "quantization_perchannel_hook"), ("int8",)),
}
"""For each kind, the methods with similar accuracy: the names of PyTorch's methods, and of hvdcomp's compressors."""

THEIRS = tuple(method for theirs, _ in ALIKE.values() for method in theirs)
METHODS = (
    *("DDP", "none"),
    *("fp16_compress_hook", "bf16_compress_hook", "fp16", "bf16"),
    *("powerSGD_hook", "batched_powerSGD_hook", "powersgd:rank=4", "powersgd:rank=4,alternating=true"),
    *("quantization_pertensor_hook", "quantization_perchannel_hook", "int8"),
    *("topk:ratio=0.01", "int4", "efsignsgd"),
)

ABOUT = """All methods train the same model. On each rank, the methods alternate in one process, and use the same \
process group with Gloo. Training uses batch size {batch_size}, random data, SGD with momentum, and one thread. Each \
host has its own cores if the machine has enough cores. `compute` is training without any exchange, and `DDP` is \
training without a hook. Names that end in `_hook` are PyTorch's hooks, and all other methods are hvdcomp's. The step \
time is the time of the slowest rank. The page shows the median and the quartiles of all steps. The number of bytes is \
what one step sends over a host's link, including headers and acknowledgements, according to the counter of the host's \
network interface.

PyTorch's PowerSGD uses rank 4, error feedback and warm start. It starts to compress in the third step, before the \
measurement begins. It gets all gradients in one bucket, because with several buckets, Gloo's threads start the hook's \
collectives in a different order on each rank, and the run fails. All other methods use DDP's default buckets."""

ALTERNATING = """**`alternating=true` is less accurate** than PyTorch's PowerSGD hook, so we do not compare the two. \
In each step, `alternating=true` sends only one of the two factors, while PyTorch's hook and `powersgd:rank=4` send \
both. In [convergence.csv](../convergence.csv), the loss of an LSTM is 6 % higher with `powersgd:rank=4` than with \
dense training, and 15 % higher with `alternating=True`."""


@dataclass(frozen=True)
class Row(Place):
    """The measured step times of one method in one setting, in milliseconds per step.

    Attributes:
        method: name of the method in the worker.
        kind: the group of methods with similar accuracy, a key of `ALIKE`; empty if no other method has similar
            accuracy.
        theirs: whether the method is PyTorch's.
        median_ms, low_ms, high_ms: median and quartiles of the steps.
        wire_bytes: bytes that a step sends over the link.
        ledger_bytes: bytes that a step passes to collectives, according to hvdcomp's ledger.
        over_ddp: speedup over DDP without a hook, as the median over the rounds.
        over_ddp_error: standard error of `over_ddp`.
        hook: name of PyTorch's fastest method of the same kind; None if there is no such method, or if the row's own
            method is PyTorch's.
        over_hook, over_hook_error: speedup over the method `hook`, and its standard error.
    """

    method: str
    kind: str
    theirs: bool
    median_ms: float
    low_ms: float
    high_ms: float
    wire_bytes: float
    ledger_bytes: float | None
    over_ddp: float | None = None
    over_ddp_error: float | None = None
    hook: str | None = None
    over_hook: float | None = None
    over_hook_error: float | None = None


def kind_of(method: str) -> str:
    """The kind of a method; empty if it has none.

    PowerSGD with `alternating=True` has no kind, because it trains worse than PyTorch's hook.
    """
    compressor = None if method in (*THEIRS, COMPUTE) else parse_compressor(method)
    if getattr(compressor, "alternating", False):
        return ""
    name = "" if compressor is None else compressor.name
    return next((kind for kind, (theirs, ours) in ALIKE.items() if method in theirs or name in ours), "")


def rows_of(run: Mapping[str, Any]) -> list[Row]:
    """The rows of one setting, from the results of its ranks."""
    measured = {measurement["method"]: measurement for measurement in run["methods"]}

    def compared(name: str, method: str, reference: str | None) -> dict[str, Any]:
        if reference is None or method in (reference, COMPUTE):
            return {}
        value, error = ratio(measured[reference]["step_ms"], measured[method]["step_ms"])
        return {name: value, f"{name}_error": error}

    rows = []
    for method, measurement in measured.items():
        kind, theirs = kind_of(method), method in THEIRS
        hooks = [other for other in measured if other in THEIRS and kind_of(other) == kind]
        hook = None if theirs else min(hooks, key=lambda other: measured[other]["median_ms"], default=None)
        low, high = measurement["quartiles_ms"]
        rows.append(
            Row(
                **vars(place_of(run)),
                method=method,
                kind=kind,
                theirs=theirs,
                median_ms=measurement["median_ms"],
                low_ms=low,
                high_ms=high,
                wire_bytes=measurement["wire_bytes"],
                ledger_bytes=measurement["ledger_bytes"],
                **compared("over_ddp", method, DENSE if DENSE in measured else None),
                hook=hook,
                **compared("over_hook", method, hook),
            )
        )
    return rows


def best_of_kinds(rows: Sequence[Row]) -> list[Row]:
    """For each setting and kind, hvdcomp's fastest method, provided that PyTorch has a hook of this kind that runs in
    the setting."""
    compared = [row for row in rows if row.over_hook is not None]
    groups = dict.fromkeys((row.place, row.kind) for row in compared)
    return [
        min((row for row in compared if (row.place, row.kind) == group), key=lambda row: row.median_ms)
        for group in groups
    ]


def summary(rows: Sequence[Row]) -> str:
    """Sentences about how often hvdcomp is faster than every hook of the same kind, and about its smallest speedup."""
    best = best_of_kinds(rows)
    if not best:
        return "In no setting did both a hook of PyTorch and a compressor of hvdcomp with similar accuracy run."
    least = min(best, key=lambda row: row.over_hook or 0)
    faster = sum((row.over_hook or 0) > 1 for row in best)
    return (
        f"We compare PyTorch's hooks with hvdcomp's methods of the same kind. In {faster} of {len(best)} comparisons, "
        f"hvdcomp's fastest method is faster than PyTorch's fastest hook. The smallest speedup is "
        f"{least.over_hook:.2f}, of `{least.method}` over `{least.hook}` ({least.in_words()})."
    )


def markdown(runs: Sequence[Mapping[str, Any]], details: Mapping[str, Any]) -> str:
    """The page: what was measured, a line for each method, and the methods that did not run."""
    rows = [row for run in runs for row in rows_of(run)]
    commits = commits_in_words(run["commit"] for run in runs)
    rates = sorted(dict.fromkeys(row.rate for row in rows), key=parse_rate)
    methods = []
    for method in dict.fromkeys(row.method for row in rows if row.method not in (COMPUTE, DENSE)):
        of_method = [row for row in rows if row.method == method]
        over_ddp = [_bounds(row.over_ddp for row in of_method if row.rate == rate) for rate in rates]
        hooks = ", ".join(dict.fromkeys(row.hook for row in of_method if row.hook))
        methods.append((method, *over_ddp, hooks and f"{hooks}: {_bounds(row.over_hook for row in of_method)}"))
    lines = [
        "# PyTorch's communication hooks compared with hvdcomp",
        "",
        f"Made by `{details['command']}`, at commit {commits}, on {details['cores']} cores, with {_versions(runs)}. "
        f"{formerly('python ./benchmarks/ddp_hooks.py')}",
        "",
        summary(rows),
        "",
        ABOUT.format(**details),
        "",
        *([ALTERNATING, ""] if any("alternating" in row.method for row in rows) else []),
        "The table shows the speedup of each method over DDP without a hook, for each link rate. The last column shows "
        "the speedup over PyTorch's fastest hook with similar accuracy. A range in the table covers all models and "
        "numbers of hosts. The file "
        f"[{STEM}.csv]({STEM}.csv) contains the times, quartiles, bytes and standard errors of every setting.",
        "",
        *_table(("method", *rates, "over the hook"), methods),
        "",
        *_refused(runs),
    ]
    return provenance_last("\n".join(lines))


def _bounds(ratios: Iterable[float | None]) -> str:
    """The smallest and the largest ratio."""
    found = sorted(value for value in ratios if value is not None)
    return " to ".join(dict.fromkeys(f"{value:.2f}" for value in (found[0], found[-1]))) if found else ""


def _versions(runs: Sequence[Mapping[str, Any]]) -> str:
    versions = dict.fromkeys((name, version) for run in runs for name, version in run["versions"].items())
    return ", ".join(f"{name} {version}" for name, version in versions)


def _refused(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The methods that failed, with message and setting."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for run in runs:
        for method, reason in run["refused"].items():
            reasons.setdefault((method, reason.replace("`", "'")), []).append(place_of(run).in_words())
    if not reasons:
        return []
    lines = [
        f"- {method} ({'everywhere' if len(places) == len(runs) else '; '.join(places)}): `{reason}`"
        for (method, reason), places in reasons.items()
    ]
    return ["These hooks of PyTorch failed on the CPU with Gloo. Their errors were:", "", *lines, ""]


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (headings, ["---"] * len(headings), *rows)]


def write(folder: Path, runs: Sequence[Mapping[str, Any]], details: Mapping[str, Any]) -> None:
    """Writes the three files."""
    rows = [asdict(row) for run in runs for row in rows_of(run)]
    data = {**details, "alike": ALIKE, "rows": rows, "runs": runs}
    contents = {
        "json": json.dumps(data).encode() + b"\n",
        "csv": csv_of(rows),
        "md": markdown(runs, details).encode(),
    }
    replace_files({folder / f"{STEM}.{ending}": content for ending, content in contents.items()})


def measure(
    places: Sequence[Place], methods: Sequence[str], batch_size: int, seconds: float
) -> Iterator[dict[str, Any]]:
    """Measures one setting after the other. All settings with the same cluster are measured on one cluster, before the
    next cluster is created.

    Yields:
        The results of the ranks, with the fields of `Place`.

    Raises:
        StepsError: if a run failed. The ranks of this run have printed the reason.
    """
    for (hosts, rate), of_cluster in itertools.groupby(places, key=lambda place: (place.cluster, place.rate)):
        with Cluster(hosts.number, rate) as cluster, tempfile.TemporaryDirectory() as folder:
            for place in of_cluster:
                click.echo(f"{place.in_words()}: {len(methods)} methods", err=True)
                file = Path(folder) / "steps.json"
                words = [word for method in methods for word in ("--method", method)]
                words += ["--model", place.model, "--batch-size", str(batch_size), "--seconds", str(seconds)]
                code = cluster.run(
                    [sys.executable, "-m", WORKER, *words, "--output", str(file)],
                    ranks=hosts.number * hosts.ranks,
                    backend="torch",
                    # Emulated hosts have no names, and PyTorch would warn about this for each connection.
                    env={"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
                )
                if code != 0:
                    raise StepsError(f"the run of {place.in_words()} ended with code {code}; its output is above")
                yield asdict(place) | json.loads(file.read_text()) | {"commit": commit()}


def _list(_context: click.Context, _option: click.Parameter, value: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in value.split(",") if part.strip()))


def _methods(_context: click.Context, _option: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    """Checks that each method is one of PyTorch's, or the spec of a compressor."""
    for method in value:
        try:
            kind_of(method)
        except ValueError as error:
            raise click.BadParameter(f"{error}; or give a method of PyTorch: {', '.join(THEIRS)}") from None
    return tuple(dict.fromkeys(value))


@click.command(help=__doc__)
@click.option("--hosts", default="2,4", show_default=True, callback=_list, metavar="N[xRANKS],...")
@click.option("--rate", "rates", default="100mbit,1gbit,10gbit", show_default=True, callback=_list, metavar="RATE,...")
@click.option(
    "--model", "models", default="resnet18,lstm,mlp,resnet20", show_default=True, callback=_list, metavar="NAME,..."
)
@click.option(
    "--method", "methods", multiple=True, default=METHODS, show_default=True, callback=_methods, metavar="NAME",
    help="A compressor of hvdcomp, 'DDP', or a hook of PyTorch; repeatable.",
)  # fmt: skip
@click.option("--batch-size", type=click.IntRange(1), default=4, show_default=True, help="Batch size of one rank.")
@click.option(
    "--seconds", type=click.FloatRange(0), default=60.0, show_default=True,
    help="Seconds to measure each setting, after its first steps. At least five rounds of all methods are measured.",
)  # fmt: skip
@click.option("--output", type=click.Path(file_okay=False, path_type=Path), required=True, help="Results folder.")
@click.option(
    "--resume", is_flag=True,
    help="Continue an interrupted run of the same command: keep the settings that it has measured.",
)  # fmt: skip
def main(
    hosts: tuple[str, ...],
    rates: tuple[str, ...],
    models: tuple[str, ...],
    methods: tuple[str, ...],
    batch_size: int,
    seconds: float,
    output: Path,
    resume: bool,
) -> None:
    try:
        clusters: list[Hosts] = list(dict.fromkeys(map(parse_hosts, hosts)))
        for model in models:
            if ":" not in model:
                split_model(model)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    places = [
        Place(hosts.number, hosts.ranks, rate, model)
        for hosts, rate, model in itertools.product(clusters, rates, models)
    ]
    words = ["--hosts", ",".join(map(str, clusters)), "--rate", ",".join(rates), "--model", ",".join(models)]
    if methods != METHODS:
        words += [word for method in methods for word in ("--method", shlex.quote(method))]
    words += ["--batch-size", str(batch_size), "--seconds", f"{seconds:g}", "--output", str(output)]
    command = " ".join(["python -m benchmarks.times.ddp_hooks", *words])
    details = {"command": command, "batch_size": batch_size, **environment_facts()}
    try:
        output.mkdir(parents=True, exist_ok=True)
        runs = earlier(output / f"{STEM}.json", command) if resume else []
        measured = {place_of(run) for run in runs}
        remaining = [place for place in places if place not in measured]
        if remaining:
            check(clusters, rates)
        for run in measure(remaining, methods, batch_size, seconds):
            runs.append(run)
            write(output, runs, details)
            for row in rows_of(run):
                click.echo(f"  {row.method:34} {row.median_ms:9.1f} ms {row.wire_bytes:14,.0f} bytes")
        write(output, runs, details)
    except (StepsError, ClusterError, OSError) as error:
        raise click.ClickException(str(error)) from None
    click.echo(summary([row for run in runs for row in rows_of(run)]))
    click.echo(f"wrote {STEM}.json, .csv and .md to {output}")


if __name__ == "__main__":
    main()
