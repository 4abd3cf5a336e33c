"""`hvdcomp advise` shows, before any training, the predictions of the performance model (`hvdcomp.perfmodel`) for each
compressor."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
from click.core import ParameterSource
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hvdcomp.compressors import BUCKET_BYTES, Compressor, evidence_in_words, first_to_try, steps_in_words
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.errors import SpecError
from hvdcomp.files import csv_of, replace_files
from hvdcomp.perfmodel import CalibrationError, Setting, load, presets
from hvdcomp.perfmodel.advice import FREE, UNCOMPRESSED, Advice, Adviser, Method
from hvdcomp.perfmodel.calibration import OTHER
from hvdcomp.perfmodel.count import BATCHES, RATES, WORLD_SIZES, counts, setups
from hvdcomp.perfmodel.map import MAP_RANKS, MAP_RATES, cells, short
from hvdcomp.perfmodel.predict import passes as seconds_of_passes
from hvdcomp.perfmodel.quality import HARMLESS, MUCH, is_harmless
from hvdcomp.perfmodel.rates import GBPS, parse_gbps
from hvdcomp.perfmodel.sweep import AXES, Sweep, parse_axis, sweep
from hvdcomp.perfmodel.verdict import compared, lines_of, times, verdict
from hvdcomp.perfmodel.ways import in_each_way, in_two_levels
from hvdcomp.tools.terminal import fits, make_console, make_table, print_table

_PRESET = "h100x8"
_OPTIMIZERS = {"sgd": "SGD", "adam": "Adam", "adamw": "Adam", "compressedadam": "CompressedAdam", "muon": "Muon"}
_LISTED = 4  # maximum number of specs that are listed in a sentence
_LESS_NEEDED = ("kept", "dense", "latency", "compute", "limited", "network", "encode")
"""Columns that are left out on a narrow console. The first is left out first."""
_LIBRARIES = {"horovod": "Horovod", "ddp": "DistributedDataParallel", "fsdp": "FSDP2"}


def _axis(_context: click.Context, _option: click.Parameter, value: str | None) -> tuple[str, np.ndarray] | None:
    try:
        return None if value is None else parse_axis(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _gbps(_context: click.Context, _option: click.Parameter, value: str | None) -> float | None:
    try:
        return None if value is None else parse_gbps(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@click.command()
@click.option(
    "--calibration",
    metavar="FILE|PRESET",
    default=_PRESET,
    show_default=True,
    help=f"File that hvdcomp calibrate wrote on your machines, or one of the presets {', '.join(presets())}.",
)
@click.option("--model", help="Name of the model in the calibration. [default: the calibration's first model]")
@click.option("--world-size", type=click.IntRange(1), default=64, show_default=True, help="Number of ranks.")
@click.option(
    "--batch", type=click.IntRange(1), help="Batch size of one rank. [default: the batch size of the calibration]"
)
@click.option(
    "--bandwidth",
    callback=_gbps,
    metavar="RATE",
    help=(
        "Bandwidth of each rank's link: 100mbit, 1gbit, or a number in Gb/s. [default: the bandwidth of the "
        "calibration]"
    ),
)
@click.option(
    "--compressor",
    "compressors",
    multiple=True,
    metavar="SPEC",
    help="Compressor to compare; repeatable. [default: all compressors whose encode time is measured or estimated. A "
    "compressor is not recommended if hvdcomp's own training runs did not include it, or if it lost at least "
    f"{MUCH:.0%} of quality in them, both with SGD and with Adam]",
)
@click.option(
    "--sweep",
    "axis",
    callback=_axis,
    metavar="NAME=LOW..HIGH",
    help=f"Vary one of {', '.join(AXES)} (as a range NAME=LOW..HIGH, or as a list NAME=1,2,4), and plot the step times "
    "of all methods.",
)
@click.option(
    "--growth",
    type=click.FloatRange(0, min_open=True),
    help=(
        "With --sweep encode: assume that a compressor that encodes k times faster sends GROWTH x k times the bytes."
    ),
)
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="PNG file for the plot of --sweep or --map. [default: advise-NAME.png]",
)
@click.option(
    "--bucket-bytes",
    type=click.IntRange(0),
    help="Size in bytes of the smallest bucket of gradients that is sent during the backward pass. 0: send all "
    "gradients after the backward pass, as TensorFlow does. Needs a calibration that contains the times at which "
    f"gradients are ready.  [default: {BUCKET_BYTES}; with DistributedDataParallel, its own buckets]",
)
@click.option(
    "--local-steps",
    "every",
    type=click.IntRange(1),
    metavar="N",
    help="Also predict the mean step time if the ranks exchange only every N steps (LocalSteps, DiLoCo). With 1, the "
    "ranks exchange the changes of their weights after each step.",
)
@click.option(
    "--count",
    "listed",
    flag_value="count",
    help="Instead of a table, count the set-ups in which compression makes a step faster, and print the counts as CSV. "
    f"The set-ups combine {', '.join(map(str, WORLD_SIZES))} ranks with "
    f"{', '.join(f'{share:g}' for share in BATCHES)} times the calibration's batch size. They include every model of "
    "all presets (with --calibration: of that calibration), and every compressor that may be recommended (with "
    "--compressor: only the given compressors).",
)
@click.option(
    "--setups",
    "listed",
    flag_value="setups",
    help="Instead of a table, print a CSV row for each set-up and compressor of --count, at the calibration's "
    f"bandwidth and at {', '.join(map(str, RATES))} Gb/s: predicted times, gain, and whether the compressor is "
    "recommended.",
)
@click.option(
    "--map",
    "listed",
    flag_value="map",
    help="Instead of a table, draw a map. The map shows, for each model of the calibration and for links of "
    f"{', '.join(map(str, MAP_RATES))} Gb/s per node, the fastest compressor and its speedup over the better of dense "
    "and fp16 gradients. Writes a picture, and a CSV file with the same name that contains the numbers. The map is for "
    f"{', '.join(map(str, MAP_RANKS))} ranks, or for --world-size.",
)
@click.option(
    "--optimizer",
    type=click.Choice(list(_OPTIMIZERS), case_sensitive=False),
    help=(
        f"Recommend only compressors that lost at most {HARMLESS:.0%} of quality with this optimizer in hvdcomp's own "
        "training runs."
    ),
)
@click.option(
    "--accumulate",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help=(
        "Number of backward passes per optimizer step (gradient accumulation). Only the last backward pass overlaps "
        "with the exchange."
    ),
)
@click.option(
    "--recompute",
    is_flag=True,
    help="Predict training with activation checkpointing, which repeats the forward pass during the backward pass.",
)
@click.option(
    "--all",
    "shows_all",
    is_flag=True,
    help="Print the table of all methods, the reasons why some methods are not recommended, and all notes.",
)
@click.option("--json", "as_json", is_flag=True, help="Print all results as JSON.")
@click.pass_context
def command(
    context: click.Context,
    calibration: str,
    model: str | None,
    world_size: int,
    batch: int | None,
    bandwidth: float | None,
    compressors: tuple[str, ...],
    axis: tuple[str, np.ndarray] | None,
    growth: float | None,
    output: Path | None,
    bucket_bytes: int | None,
    every: int | None,
    listed: str | None,
    optimizer: str | None,
    accumulate: int,
    recompute: bool,
    shows_all: bool,
    as_json: bool,
) -> None:
    """Predict whether compression makes training faster, and with which compressor.

    A table shows, for dense (uncompressed) gradients and for each compressor, the predicted time of a training step,
    its bottleneck, and the bandwidth below which the compressor is faster than dense gradients. A compressor is
    recommended if it is faster than dense and fp16 gradients by more than the model's error. Horovod and PyTorch can
    send dense and fp16 gradients without hvdcomp. This command does not train or measure anything.
    """
    kind = None if optimizer is None else _OPTIMIZERS[optimizer.lower()]
    passes: dict[str, Any] = {"micro_batches": accumulate, "recompute": float(recompute)}
    if listed == "map":
        _map(context, calibration, compressors, world_size, kind, output, passes)
        return
    if listed is not None:
        _list(context, listed, calibration, compressors, kind)
        return
    if axis is None and (growth is not None or output is not None):
        raise click.UsageError(
            "--growth needs --sweep, and --output needs --sweep or --map; add --sweep NAME=LOW..HIGH, or leave them out"
        )
    try:
        setting = Setting(world_size, None if bandwidth is None else bandwidth * GBPS, batch, **passes)
        figures = load(calibration)
        adviser = Adviser(figures, model or next(iter(figures.models)), compressors or None, bucket_bytes, kind)
        advice = adviser.advise(setting)
        swept = None if axis is None else sweep(adviser, setting, *axis, growth)
    except (CalibrationError, SpecError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    notes = []
    if model is None and len(figures.models) > 1:
        other_models = ", ".join(list(figures.models)[1:])
        notes.append(
            f"You did not name a --model, so this advice is for the first model of the calibration, {adviser.model}. "
            f"The other models of the calibration are: {other_models}"
        )
    report = _report(adviser, setting, advice, swept, notes)
    if kind is not None:
        report |= {"optimizer": kind, "to_begin_with": _narrowed(adviser, kind)}
    if every is not None:
        notes += _add_local_steps(report, adviser, setting, every)
    if as_json:
        click.echo(json.dumps(report, indent=1, allow_nan=False))
    else:
        _print(report, shows_all, notes)
    if swept is not None:
        file = output or Path(f"advise-{swept.axis}.png")
        current = {key: report[key] for key in ("world_size",)}
        current |= {"bandwidth": report["bandwidth_gbps"], "batch": report["batch_size"]}
        _draw(lambda plot: plot.draw(swept, _title(report), current.get(swept.axis), file), file)
        click.echo(f"Wrote {file}", err=as_json)


def show_advice(adviser: Adviser, setting: Setting, advice: Advice) -> None:
    """Prints advice for a setting, as the command does."""
    _print(_report(adviser, setting, advice, None, []), shows_all=True, answers=[])


def _set_by_user(context: click.Context, listed: str, allowed: tuple[str, ...]) -> list[str]:
    """The names of the options that the user has set. Raises UsageError if one of them cannot be used with the option
    --`listed`."""
    given = [name for name in context.params if context.get_parameter_source(name) is not ParameterSource.DEFAULT]
    options = {param.name: param.opts[0] for param in context.command.params}
    if wrong := [options[name] for name in given if name not in ("listed", *allowed)]:
        raise click.UsageError(f"--{listed} uses a fixed list of set-ups: leave out {', '.join(wrong)}")
    return given


def _list(
    context: click.Context, listed: str, calibration: str, compressors: tuple[str, ...], optimizer: str | None
) -> None:
    """Prints the number of set-ups in which compression makes a step faster, or all set-ups, as CSV."""
    set_by_user = _set_by_user(context, listed, ("calibration", "compressors", "optimizer"))
    rows_of = counts if listed == "count" else setups
    try:
        sources = (calibration,) if "calibration" in set_by_user else presets()
        rows = [row for source in sources for row in rows_of(load(source), compressors or None, optimizer)]
    except (CalibrationError, SpecError) as error:
        raise click.ClickException(str(error)) from None
    if not rows:
        raise click.UsageError(
            f"no compressor except {' and '.join(FREE)} can be used: name other compressors with --compressor"
        )
    click.echo(csv_of(rows).decode(), nl=False)


def _map(
    context: click.Context,
    calibration: str,
    compressors: tuple[str, ...],
    world_size: int,
    optimizer: str | None,
    output: Path | None,
    passes: dict[str, Any],
) -> None:
    """Prints the map of one calibration, and also draws it and writes it to files."""
    allowed = ("calibration", "compressors", "world_size", "optimizer", "output", "accumulate", "recompute")
    given = _set_by_user(context, "map", allowed)
    ranks = (world_size,) if "world_size" in given else MAP_RANKS
    try:
        rows = list(cells(load(calibration), ranks, compressors or None, optimizer, **passes))
    except (CalibrationError, SpecError) as error:
        raise click.ClickException(str(error)) from None
    console = make_console()
    for number in ranks:
        headings = ["model", *(f"{rate} Gb/s" for rate in MAP_RATES)]
        table = make_table(*headings, whole=True)
        shown = [row for row in rows if row["ranks"] == number]
        for model in dict.fromkeys(row["model"] for row in shown):
            table.add_row(model, *(_in_map(row) for row in shown if row["model"] == model))
        print_table(console, table, f"{calibration}, {number} ranks: times faster than the better of dense and fp16")
    console.print("A dash means that no compressor is faster by more than the model's error.", soft_wrap=True)
    file = output or Path("advise-map.png")
    table_file = file.with_suffix(".csv")
    try:
        replace_files({table_file: csv_of(rows)})
    except OSError as error:
        raise click.ClickException(f"{table_file} cannot be written: {error.strerror or error}") from None
    click.echo(f"Wrote {table_file}")
    named = f" of the compressors that lost at most {HARMLESS:.0%} of quality with {optimizer}" if optimizer else ""
    title = f"{calibration}: times faster than the better of dense and fp16, with the fastest compressor{named}"
    _draw(lambda plot: plot.draw_map(rows, f"{title}\n(gray: within the model's error)", file), file)
    click.echo(f"Wrote {file}")


def _in_map(row: dict[str, Any]) -> str:
    return f"{times(1 + row['gain_percent'] / 100)} {short(row['method'])}" if row["pays"] else "-"


def _narrowed(adviser: Adviser, optimizer: str) -> list[str]:
    """Notes for the user that apply if the optimizer is known."""
    lost = f"lost at most {HARMLESS:.0%} of quality with {optimizer} in hvdcomp's own training runs"
    if set(adviser.recommended) <= set(FREE):
        return [f"None of the compressors that can be compared {lost}."]
    return [f"Only compressors that {lost} are recommended."]


def _report(
    adviser: Adviser, setting: Setting, advice: Advice, swept: Sweep | None, notes: list[str]
) -> dict[str, Any]:
    """The advice as plain data. Times are in ms, bandwidths in Gb/s, and missing values are None."""
    dense = advice.methods[UNCOMPRESSED]
    compute = adviser.facts.compute
    linear = float(seconds_of_passes(compute, setting)[0]) - compute.optimizer_s
    bytes_per_s = adviser.bytes_per_s if setting.bytes_per_s is None else setting.bytes_per_s
    backend = "fsdp" if adviser.facts.sharded else adviser.calibration.machine.get("backend")
    report: dict[str, Any] = {
        "calibration": adviser.calibration.name,
        "model": adviser.model,
        "world_size": setting.world_size,
        "batch_size": compute.batch_size if setting.batch_size is None else setting.batch_size,
        "micro_batches": setting.micro_batches,
        "bandwidth_gbps": float(np.asarray(bytes_per_s)) / GBPS,
        "one_rank_ms": 1e3 * linear,
        "forward_included": compute.forward_s is not None,
        "methods": {
            spec: {**_method(method, dense, linear), "kept_bytes_per_parameter": adviser.kept_bytes(spec)}
            for spec, method in advice.methods.items()
        },
        "winner": advice.winner,
        "free": advice.free,
        "take": advice.take,
        "alike": list(advice.alike),
        "gain_over_free_percent": None,
        "gain_over_dense_percent": None,
        "error_percent": 100 * advice.error,
        "beaten": [],
        "to_type": lines_to_type(advice.take, backend),
        "or_type": {},
        "optimizer": adviser.facts.optimizer,
        "to_begin_with": [],
        "least_compression_factor": advice.least_factor,
        "sharded": adviser.facts.sharded,
        "notes": notes + _notes(adviser, advice),
    }
    if advice.winner is not None and advice.free is not None:
        best, free = advice.methods[advice.winner].step_s, advice.methods[advice.free].step_s
        report["gain_over_free_percent"] = 100 * (free / best - 1)
        report["gain_over_dense_percent"] = 100 * (dense.step_s / best - 1)
        report["beaten"] = list(advice.beaten_by(advice.winner))
        if advice.take != advice.winner and UNCOMPRESSED in report["beaten"]:
            report["or_type"] = lines_to_type(advice.winner, backend)
        if adviser.facts.optimizer is not None:
            report["to_begin_with"] = to_begin_with(adviser, advice)
    if swept is not None:
        report["sweep"] = {
            "axis": swept.axis,
            "label": AXES[swept.axis].label,
            "values": _rounded(swept.values),
            "step_ms": {spec: _rounded(1e3 * seconds) for spec, seconds in swept.step_s.items()},
            "least_compression_factor": _rounded(swept.least_factor),
        }
    return report


def to_begin_with(adviser: Adviser, advice: Advice) -> list[str]:
    """Sentences that name the method to try first: the fastest method that lost almost no quality in hvdcomp's own
    training runs.

    Args:
        adviser: the adviser, with the compressors and the optimizer of the training.
        advice: the advice of this adviser for training with several ranks.
    """
    optimizer = None if adviser.facts.optimizer == OTHER else adviser.facts.optimizer
    harmless = [
        method
        for method in advice.methods.values()
        if method.spec not in FREE and is_harmless(adviser.compressors[method.spec], optimizer)
    ]
    best = min(harmless, key=lambda method: method.step_s, default=None)
    trainings = f"with {optimizer}" if optimizer else "with SGD and with Adam"
    methods = f"Of the methods that lost at most {HARMLESS:.0%} of quality {trainings} in hvdcomp's own training runs,"
    if best is None:
        return [f"{methods} none was compared here: add some with --compressor, such as int4 or powersgd:rank=4."]

    def lead_over(spec: str) -> str:
        return compared(advice.methods[spec].step_s / best.step_s, _called(spec))

    def lines(spec: str) -> list[str]:
        return list(lines_to_type(spec, adviser.calibration.machine.get("backend")).values())

    assert advice.free is not None
    beaten, error = advice.beaten_by(best.spec), f"the model's error of {100 * advice.error:.1f}%"
    if set(beaten) == set(FREE):
        line = f"{methods} {best.spec} is the fastest, {lead_over(advice.free)}. Begin with:"
        return [line, *lines(best.spec)]
    if UNCOMPRESSED in beaten:
        line = (
            f"{methods} {best.spec} is the fastest: {lead_over(UNCOMPRESSED)}, but its lead over {advice.free} is "
            f"within {error}. Try both:"
        )
        return [line, *lines(best.spec), *lines(advice.free)]
    free = _called(advice.free)
    return [f"{methods} none is faster than {free} by more than {error}: begin with {free}."]


def _called(spec: str) -> str:
    return "dense" if spec == UNCOMPRESSED else spec


def _add_local_steps(report: dict[str, Any], adviser: Adviser, setting: Setting, every: int) -> list[str]:
    """Adds to a report the step times of training that exchanges only every `every` steps. Also adds notes about these
    step times to the report, and returns the notes."""
    seconds = {spec: adviser.local_step_s(spec, setting, every) for spec in report["methods"]}
    for spec, step_s in seconds.items():
        report["methods"][spec]["local_step_ms"] = None if step_s is None else 1e3 * step_s
    report["local_steps"] = every
    compared = {spec: seconds[spec] for spec in adviser.recommended if spec in seconds}
    predicted = {spec: step_s for spec, step_s in compared.items() if step_s is not None}
    if not predicted:
        note = (
            f"There is no prediction for --local-steps {every}, because {adviser.model} is sharded over all ranks, so "
            "each weight is on only one rank. LocalSteps works only if the model has replicas."
        )
    else:
        best = min(predicted, key=lambda spec: predicted[spec])
        note = (
            f"With an exchange of weight changes {_every(every)} (--local-steps {every}), the fastest method is "
            f"{best}: {1e3 * predicted[best]:.1f} ms per step. Local steps change the result of training, so compare "
            "the accuracy with dense training."
        )
    notes = [note, *_compressed_steps(report, adviser, setting, every)]
    report["notes"] += notes
    return notes


def _compressed_steps(report: dict[str, Any], adviser: Adviser, setting: Setting, every: int) -> list[str]:
    """Sentences about the time that `LocalSteps.compressed` would save, and about the quality that it lost in hvdcomp's
    own training runs; empty if the time cannot be predicted."""
    free, world_size = report["free"], report["world_size"]
    if free is None:  # there is only one rank
        return []
    signs = parse_compressor("efsignsgd")  # the default compressor of `LocalSteps.compressed`
    ways = [signs, *in_each_way(signs)]
    if adviser.ranks_per_node is not None:
        ways += [two_level for way in ways if (two_level := in_two_levels(way)) is not None]
    try:
        of_steps = Adviser(adviser.calibration, adviser.model, [str(way) for way in ways])
    except CalibrationError:  # the encode time of signs is unknown, or the model is sharded over all ranks
        return []
    possible = [str(way) for way in ways if of_steps.possible(str(way), world_size)]
    seconds = {spec: of_steps.local_step_s(spec, setting, every) for spec in possible}
    step_s, spec = min((step_s, spec) for spec, step_s in seconds.items() if step_s is not None)
    factor = report["methods"][free]["step_ms"] / (1e3 * step_s)
    return [
        f"A step with hvdcomp.torch.LocalSteps.compressed(optimizer, every={every}) is predicted to take "
        f"{1e3 * step_s:.1f} ms with {spec}: {times(factor)} times as fast as a step with {_called(free)} gradients. "
        f"{steps_in_words(signs, every)} Tune the learning rate again, and compare the loss with dense training with "
        "the same optimizer (docs/compressed-steps.md)."
    ]


def _every(steps: int) -> str:
    return "after every step" if steps == 1 else f"every {steps} steps"


def lines_to_type(spec: str | None, backend: str | None) -> dict[str, str]:
    """For each library, the line of code that makes a program use a compressor. The line is empty for dense gradients,
    which need no code.

    Args:
        spec: spec of the compressor.
        backend: name of the library that the calibration was made with. If the library is unknown (None), the lines are
            for the libraries that keep the whole model on each rank.
    """
    if spec in (None, UNCOMPRESSED):
        return {}
    compression = f"hvdcomp.Compression.from_spec({spec!r})"
    horovod, ddp = compression, f"hvdcomp.ddp.register(model, {compression}, optimizer)"
    if spec == "fp16":
        hooks = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
        horovod = "hvd.Compression.fp16"
        ddp = f"from {hooks} import fp16_compress_hook; model.register_comm_hook(None, fp16_compress_hook)"
    if backend == "fsdp":
        lower = "fully_shard(..., mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))"
        return {"fsdp": lower if spec == "fp16" else f"hvdcomp.fsdp.register(model, {compression})"}
    lines = {"horovod": f"optimizer = hvd.DistributedOptimizer(optimizer, compression={horovod})", "ddp": ddp}
    return {name: line for name, line in lines.items() if backend in (None, name)}


def _method(method: Method, dense: Method, linear: float) -> dict[str, Any]:
    parts = method.parts
    times = {"compute": parts.compute, "encode": parts.encode, "network": parts.transfer, "latency": parts.latency}
    return {
        "step_ms": 1e3 * method.step_s,
        "at_end_ms": None if method.at_end_s is None else 1e3 * method.at_end_s,
        # Hidden times are differences, so rounding may make them negative.
        **{f"{name}_ms": 1e3 * max(0.0, float(seconds)) for name, seconds in times.items()},
        "limited_by": method.limited_by,
        "speedup_over_dense": dense.step_s / method.step_s,
        "scaling_efficiency": linear / method.step_s,
        "wins_below_gbps": None if method.wins_below is None else method.wins_below / GBPS,
        "wins_in_gbps": [[None if end is None else end / GBPS for end in ends] for ends in method.wins],
        "overlapped": method.exchange.overlapped,
        "rounds": len(method.exchange.rounds),
        "bytes_sent": method.exchange.bytes,
        "bytes_in_node": method.exchange.bytes_in_node,
        "compression_factor": method.exchange.compression_factor,
        "estimated": method.encode is not None and method.encode.estimated,
        "why_not": method.why_not,
    }


def _notes(adviser: Adviser, advice: Advice) -> list[str]:
    facts, network = adviser.facts, adviser.calibration.network
    notes = []
    rounds = [payloads for method in advice.methods.values() for payloads in method.exchange.rounds]
    for kind, among in sorted({(payload.kind, payload.among) for payloads in rounds for payload in payloads}):
        if (stand_in := network.costs_among(among).stand_in(kind)) is not None:
            scope = {"all": "", "node": " within nodes", "across": " between nodes"}[among]
            shared = (
                (" If several ranks share a link, the exchange takes longer than predicted.")
                if (kind, among) == ("alltoall", "all")
                else ""
            )
            notes.append(
                f"The calibration has no times of {kind}{scope}, so these times are predicted from the times of "
                f"{stand_in}.{shared}"
            )
    if facts.compute.forward_s is None:
        notes.append(
            "The calibration has no time of the forward pass, so the predicted step consists only of the backward pass "
            "and the exchange."
        )
    left_out = [spec for spec in adviser.compressors if spec not in advice.methods]
    if left_out:
        notes.append(
            "These compressors are left out, because two-level exchanges need the same number of ranks on each node "
            f"({adviser.ranks_per_node} here): {', '.join(left_out)}"
        )
    notes += _not_recommended(advice)
    notes += [
        (f"The value of {name} in the calibration is {facts.sources.get(name, 'estimated')}")
        for name in facts.estimated
    ]
    if (better := advice.bucket_bytes) is not None:
        notes.append(f"{advice.winner} would be faster with buckets of {better:,} bytes: set bucket_bytes={better}")
    sources: dict[str, list[str]] = {}
    for spec, method in advice.methods.items():
        if method.encode is not None and method.encode.estimated:
            sources.setdefault(method.encode.source, []).append(spec)
    notes += [f"The encode time of {_listed(specs)} is {source}" for source, specs in sources.items()]
    return notes


def _not_recommended(advice: Advice) -> list[str]:
    """Notes, one for each reason why methods are not recommended."""
    methods: dict[str, list[str]] = {}
    for spec, method in advice.methods.items():
        if method.why_not is not None:
            methods.setdefault(method.why_not, []).append(spec)
    return [f"* Not recommended: {', '.join(specs)} ({reason})" for reason, specs in methods.items()]


def _listed(specs: Sequence[str]) -> str:
    """Joins specs into a list for use in a sentence. If there are many specs, only the first few are listed, followed
    by the number of the other specs."""
    if len(specs) <= _LISTED:
        return ", ".join(specs)
    return f"{', '.join(specs[: _LISTED - 1])} and {len(specs) - _LISTED + 1} others"


def _rounded(values: np.ndarray) -> list[float | None]:
    """The values with six significant digits. A value that is not finite becomes None."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]


def _title(report: dict[str, Any]) -> str:
    batch = report["batch_size"]
    return ", ".join(
        [
            str(report["model"]),
            f"{report['world_size']} rank{'' if report['world_size'] == 1 else 's'}",
            ("unknown batch size" if batch is None else f"batch {batch}")
            + (f" added up {report['micro_batches']} times" if report["micro_batches"] > 1 else ""),
            f"{report['bandwidth_gbps']:g} Gb/s",
            str(report["calibration"]),
        ]
    )


def _print(report: dict[str, Any], shows_all: bool, answers: Sequence[str]) -> None:
    """Prints the verdict, and then either a few lines about the most important methods, or everything.

    Args:
        report: the advice, as in the JSON output of the command.
        shows_all: whether to print the table and all notes.
        answers: the notes that are always printed.
    """
    console = make_console()
    if not shows_all:
        console.print(Text(_title(report), "bold"), soft_wrap=True)
    for line in verdict(report):
        console.print(line, soft_wrap=True)
    if shows_all:
        _print_table(console, report)
    for line in _conclusions(report):
        console.print(line, soft_wrap=True)
    if not shows_all:
        _print_few(console, report)
    for line in report["notes"] if shows_all else answers:
        console.print(line, soft_wrap=True)


def _print_few(console: Console, report: dict[str, Any]) -> None:
    """Prints three lines each for dense gradients, for fp16, and for the methods that the advice names. Then says which
    further output the option --all would add."""
    methods = report["methods"]
    named = dict.fromkeys([report["winner"], report["take"], *FREE])
    for spec in named:
        if spec is not None:
            ranges = "" if report["winner"] is None else _ranges(methods[spec]["wins_in_gbps"])
            for line in lines_of(spec, methods[spec], ranges.replace("\n", " ")):
                console.print(line, soft_wrap=True)
    count, left_out = len(report["notes"]), sum(row["why_not"] is not None for row in methods.values())
    why = f", why {left_out} of them {'is' if left_out == 1 else 'are'} not recommended," if left_out else ""
    further = f"{count} note{'' if count == 1 else 's'} about estimates (~) and about what this advice leaves out"
    console.print(f"Add --all to see all {len(methods)} methods{why} and {further}.", soft_wrap=True)


def _print_table(console: Console, report: dict[str, Any]) -> None:
    """Prints the table. On a narrow console, the table has fewer columns, or is printed row by row."""
    tables = [_table(report, _LESS_NEEDED[:count]) for count in range(len(_LESS_NEEDED) + 1)]
    table = next((table for table in tables if fits(console, table)), tables[0])
    print_table(console, table, _title(report))
    if table is not tables[0]:
        console.print(
            f"The table has more columns if your terminal is wider than {console.width} characters.", soft_wrap=True
        )


def _table(report: dict[str, Any], left_out: Sequence[str] = ()) -> Table:
    """The table of the methods, fastest first. `left_out` are the columns to omit."""
    methods, every = report["methods"], report.get("local_steps")
    times = {part: f"{part}\nms" for part in ("step", "compute", "encode", "network", "latency")}
    if any(row["at_end_ms"] is not None for row in methods.values()):
        times = {"step": times.pop("step"), "at_end": "all at\nthe end", **times}
    if every is not None:
        times = {"step": times.pop("step"), "local_step": f"{every} local\nsteps", **times}
    numbers = {**times, "dense": "speedup", "kept": "kept\nB/param"}
    headings = {"method": "method", **numbers, "wins": "beats dense\nat Gb/s", "limited": "limited\nby"}
    shown = [column for column in headings if column not in left_out]
    table = make_table(*(headings[column] for column in shown), numbers=list(numbers.values()), whole=True)
    for spec, row in sorted(methods.items(), key=lambda entry: entry[1]["step_ms"]):
        cells: dict[str, str | Text] = {
            "method": Text(_marked(spec, row), "bold" if spec == report["winner"] else ""),
            **{part: _cell(part, row) for part in times},
            "dense": f"{row['speedup_over_dense']:.2f}",
            "kept": f"{row['kept_bytes_per_parameter']:.1f}",
            "wins": "" if spec == UNCOMPRESSED or report["winner"] is None else _ranges(row["wins_in_gbps"]),
            "limited": row["limited_by"],
        }
        table.add_row(*(cells[column] for column in shown))
    return table


def _marked(spec: str, row: dict[str, Any]) -> str:
    """The name of a method, with an asterisk if the method is not recommended."""
    return spec if row["why_not"] is None else f"{spec} *"


def _cell(part: str, row: dict[str, Any]) -> str:
    """The milliseconds of a part of the step, with a tilde if they are estimated."""
    if (milliseconds := row[f"{part}_ms"]) is None:
        return ""
    return f"{'~' if part == 'encode' and row['estimated'] else ''}{milliseconds:.1f}"


def _ranges(ranges: list[list[float | None]]) -> str:
    """The ranges of bandwidth, in Gb/s, in which a method is faster than dense. Each range is on its own line."""
    if not ranges:
        return "never"
    words = []
    for low, high in ranges:
        if low is None:
            words.append("always" if high is None else f"below {high:.3g}")
        else:
            words.append(f"above {low:.3g}" if high is None else f"{low:.3g} to {high:.3g}")
    return ",\n".join(words)


def _conclusions(report: dict[str, Any]) -> list[str]:
    winner, free, take, error = report["winner"], report["free"], report["take"], f"{report['error_percent']:.1f}%"
    if winner is None:
        return ["One rank exchanges nothing, so no method is faster than another."]
    over_free, over_dense = (1 + report[f"gain_over_{base}_percent"] / 100 for base in ("free", "dense"))
    beside_free = "" if free in (winner, UNCOMPRESSED) else f", {compared(over_free, free)}"
    beside_dense = "" if winner == UNCOMPRESSED else f", {compared(over_dense, _called(UNCOMPRESSED))}"
    lines = [f"Fastest: {winner}{beside_dense}{beside_free}."]
    lead = f"The lead of {winner} over {_called(free)}, which works without hvdcomp, is"
    if not _compared(report):
        lines.append("No compressor was compared: name compressors with --compressor.")
    elif winner == UNCOMPRESSED:
        lines.append("Use dense gradients: compression does not make the step faster here.")
    elif winner == free:
        lines.append(f"Use {winner}: it needs no encoding, and no compressor is faster.")
    elif take == free and UNCOMPRESSED in report["beaten"]:
        lines.append(
            f"{winner} is faster than dense by more than the model's error of {error}, but its lead over {free} is "
            f"smaller than this error: try both {winner} and {free}. {free} needs no encoding."
        )
    elif take == free:
        lines.append(f"{lead} within the model's error of {error}: use {free}.")
    else:
        lines.append(f"{lead} more than the model's error of {error}: use {winner}, if accuracy allows.")
        if report["methods"][take]["estimated"]:
            lines.append(f"The encode time of {take} is an estimate: measure it first, with hvdcomp calibrate.")
    if report["alike"]:
        lines.append(
            f"These methods are as fast as {take} within the model's error of {error}: {_listed(report['alike'])}."
        )
    for to_type in (report["to_type"], report["or_type"]):
        lines += [f"In your code, for {_LIBRARIES[name]}: {line}" for name, line in to_type.items()]
    if take != UNCOMPRESSED:
        lines.append("The model does not predict accuracy: compare the accuracy with dense training in a short run.")
        if (compressed := winner if report["or_type"] else take) not in FREE:
            lines.append(evidence_in_words(parse_compressor(compressed)))
            kept = report["methods"][compressed]["kept_bytes_per_parameter"]
            lines.append(_kept(parse_compressor(compressed), kept))
    if report["to_begin_with"]:
        lines += report["to_begin_with"]
    elif take != UNCOMPRESSED:
        lines.append(first_to_try())
    if report["optimizer"] is None and len(_compared(report)) + len(FREE) < len(report["methods"]):
        lines.append("Which compressors are recommended depends on your optimizer: name it with --optimizer.")
    factor = report["least_compression_factor"]
    if report["sharded"]:
        return lines
    ideal = "an ideal compressor (no encode time, fully overlapped with the backward pass)"
    if factor is None:
        lines.append(f"Even {ideal} does not reach 95% of linear scaling, because of latency.")
    elif factor <= 1:
        lines.append("Uncompressed training reaches 95% of linear scaling.")
    else:
        lines.append(
            f"To reach 95% of linear scaling, {ideal} must send {factor:.1f} times fewer bytes than dense gradients."
        )
    return lines


def _compared(report: dict[str, Any]) -> list[str]:
    """The compressors that may be recommended."""
    return [spec for spec, row in report["methods"].items() if spec not in FREE and row["why_not"] is None]


def _kept(compressor: Compressor, kept: float) -> str:
    """Sentences about the memory that a method keeps. kept: the bytes of this memory per parameter."""
    said = f"On a GPU, {compressor} keeps {kept:.1f} bytes of memory per parameter from step to step."
    if any(leaf.default_memory.name == "error_feedback" for leaf in compressor.leaves()):
        said += " With memory=error_feedback:dtype=bf16, residuals need half of this memory."
    return said


def _draw(work: Callable[[Any], None], file: Path) -> None:
    """Calls `work` with the module that draws plots. That module needs matplotlib."""
    try:
        from hvdcomp.perfmodel import plot
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f"the plot needs {error.name}, which is not installed: pip install 'hvdcomp[plot]'"
        ) from None
    try:
        work(plot)
    except OSError as error:
        raise click.ClickException(f"{file} cannot be written: {error.strerror or error}") from None
