"""`hvdcomp bench`: measurements of the package on this machine. What is measured lives in `hvdcomp.bench`."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, track
from rich.table import Table

from hvdcomp.bench.encode import PEER, Measurement, Request, UnsteadyError, as_json, check_steady, measure
from hvdcomp.bench.steps import Options
from hvdcomp.compressors import EXAMPLES
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.errors import SpecError
from hvdcomp.files import replace_files
from hvdcomp.perfmodel.shapes import MODELS
from hvdcomp.terminal import Group, make_console, make_table, print_table
from hvdcomp.train.options import MODELS as TRAINED

_STEPS = "steps-measured"  # what the files of `hvdcomp bench steps` are called


@click.group(cls=Group)
def command() -> None:
    """Measure what compression costs here."""


@command.command()
@click.option("--model", type=click.Choice(MODELS), default="resnet50", show_default=True, help="Whose gradients.")
@click.option("--method", "methods", multiple=True, metavar="SPEC", help="A compressor; repeat. Default: all.")
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True)
@click.option("--ranks", type=click.IntRange(1), default=1, show_default=True, help="Decode as many ranks' payloads.")
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True, help="PyTorch's threads.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="Folder for encode.json, encode.md, encode.png.")
def encode(methods: tuple[str, ...], output: Path | None, **options: Any) -> None:
    """Time of encoding and decoding, as multiples of one copy of the same gradients, and peak memory.

    The copy takes turns with each method. Where it differs between methods by more than 15 percent, the machine was not
    equally fast for all of them, and no files are written.
    """
    try:
        import torch  # noqa: F401
    except ImportError:
        raise click.ClickException("hvdcomp bench encode needs PyTorch: pip install 'hvdcomp[torch]'") from None
    try:
        for method in methods:
            parse_compressor(method)
        if output is not None:
            output.mkdir(parents=True, exist_ok=True)
    except SpecError as error:
        raise click.UsageError(str(error)) from None
    except OSError as error:
        raise click.UsageError(f"--output {output} cannot be made: {error.strerror or error}") from None
    requests = [Request(method=method, **options) for method in methods or (*EXAMPLES, PEER)]
    measured = [measure(request) for request in track(requests, "measuring", transient=True)]
    print_table(make_console(), _table(measured), _title(options))
    try:
        check_steady(measured)
    except UnsteadyError as error:
        if output is not None:
            raise click.ClickException(f"{error}. Nothing was written to {output}.") from None
        click.echo(f"Warning: {error}.", err=True)
    if output is not None:
        data = json.dumps({"options": options, "measurements": as_json(measured)}, indent=1) + "\n"
        files = {
            output / "encode.json": data.encode(),
            output / "encode.md": _markdown(measured, options).encode(),
            output / "encode.png": _plot(measured, options),
        }
        try:
            replace_files(files)
        except OSError as error:
            raise click.ClickException(f"{output} cannot be written: {error.strerror or error}") from None
        click.echo(f"wrote encode.json, encode.md and encode.png to {output}")


def _list(_context: click.Context, _option: click.Parameter, value: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in value.split(",") if part.strip()))


@command.command()
@click.option("--hosts", default="2,4", show_default=True, callback=_list, metavar="N,...", help="Numbers of hosts.")
@click.option(
    "--rate",
    "rates",
    default="100mbit,1gbit,10gbit",
    show_default=True,
    callback=_list,
    metavar="RATE,...",
    help="Of each host's link, as tc spells it.",
)
@click.option(
    "--model", "models", default="mlp,resnet20,resnet18", show_default=True, callback=_list, metavar="NAME,..."
)
@click.option(
    "--compressor",
    "specs",
    multiple=True,
    metavar="SPEC",
    default=("topk:ratio=0.01", "powersgd:rank=4", "efsignsgd"),
    show_default=True,
    help="Beside dense and Horovod's fp16; repeat.",
)
@click.option("--batch-size", type=click.IntRange(1), default=4, show_default=True, help="Of one rank.")
@click.option(
    "--seconds",
    type=click.FloatRange(1),
    default=60.0,
    show_default=True,
    help="For calibrating each model on each cluster, about, as a minimum of steps is made. Steps take as long again; "
    "auto alone takes half of it, and its steps that are compared up to three times as long.",
)
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("docs"),
    show_default=True,
    help="Folder for steps-measured.json, .csv, .md and .png, and steps-measured-speed.png.",
)
@click.option(
    "--resume",
    is_flag=True,
    help="Keep the settings that the same command measured before it was interrupted or failed, and measure the rest. "
    "If nothing is left, tables and pictures are made again from what is there, for which no root is needed.",
)
def steps(
    hosts: tuple[str, ...],
    rates: tuple[str, ...],
    models: tuple[str, ...],
    specs: tuple[str, ...],
    output: Path,
    resume: bool,
    **options: Any,
) -> None:
    """Compare predicted with measured times of steps, on emulated clusters (needs root and iproute2).

    On each cluster: calibrates, and in turns with that trains with dense gradients, Horovod's fp16 and each compressor.
    """
    from hvdcomp.bench import steps as runs
    from hvdcomp.bench.compare import choices, compare, gains, place_of
    from hvdcomp.bench.compare_files import HEADINGS, auto_summary, cells, summary, write

    try:
        import matplotlib  # noqa: F401

        compressors = tuple(str(parse_compressor(spec)) for spec in specs)
        numbers = [int(number) for number in hosts]
        output.mkdir(parents=True, exist_ok=True)
        unknown = [model for model in models if ":" not in model and model not in TRAINED]
        if unknown:
            raise click.UsageError(f"--model {unknown[0]} is not known; there are: {', '.join(TRAINED)}")
        wanted = runs.Options(models, compressors, **options)
        details = {"command": _steps_command(numbers, rates, wanted, output), **runs.environment_facts()}
        results = runs.earlier(output / f"{_STEPS}.json", details["command"]) if resume else []
        if len(results) < len(numbers) * len(rates) * len(models):
            runs.check(numbers, rates)
    except ImportError as error:
        raise click.ClickException(f"the plot needs {error.name}: pip install 'hvdcomp[plot]'") from None
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    except (runs.StepsError, OSError) as error:
        raise click.ClickException(str(error)) from None
    rows = [row for result in results for row in compare(result)]
    console = make_console()
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=make_console(stderr=True)) as progress:
        total = len(numbers) * len(rates) * len(models)
        task = progress.add_task("starting", total=total, completed=len(results))

        def show(what: str) -> None:
            progress.update(task, description=what)

        try:
            for result in runs.measure(numbers, rates, wanted, show, results):
                rows += compare(result)
                results.append(result)
                write(output, _STEPS, rows, {**details, "runs": results})
                progress.advance(task)
                progress.console.print(f"{place_of(result)}: measured", highlight=False)
        except (runs.StepsError, OSError) as error:
            again = "\nWhat was measured before is kept: go on with --resume." if results else ""
            raise click.ClickException(f"{str(error).rstrip()}{again}") from None
    if resume:
        try:
            write(output, _STEPS, rows, {**details, "runs": results})
        except OSError as error:
            raise click.ClickException(f"{output} cannot be written: {error.strerror or error}") from None
    table = make_table(*HEADINGS, numbers=[heading for heading in HEADINGS if heading not in ("model", "method")])
    for row in rows:
        table.add_row(*cells(row))
    print_table(console, table)
    for gain in gains(rows):
        console.print(
            f"{gain.hosts} hosts, {gain.rate}, {gain.model}: {gain.best} is {gain.over_dense:.2f} times as fast as "
            f"dense, {gain.over_fp16:.2f} times as fast as fp16",
            soft_wrap=True,
        )
    console.print(summary(rows), soft_wrap=True)
    if found := choices(results):
        console.print(auto_summary(found), soft_wrap=True)
    for result in results:
        if result["noisy"]:
            console.print(f"noisy, {place_of(result)}: {', '.join(result['noisy'])}", soft_wrap=True)
    click.echo(f"wrote {_STEPS}.json, .csv, .md, .png and {_STEPS}-speed.png to {output}")


def _steps_command(numbers: list[int], rates: tuple[str, ...], options: Options, output: Path) -> str:
    words = ["hvdcomp bench steps", "--hosts", ",".join(map(str, numbers)), "--rate", ",".join(rates)]
    words += ["--model", ",".join(options.models), "--batch-size", str(options.batch_size)]
    words += [word for spec in options.compressors for word in ("--compressor", spec)]
    return " ".join([*words, "--seconds", f"{options.seconds:g}", "--output", str(output)])


_HEADINGS = ("method", "x copy", "step ms", "copy ms", "encode ms", "decode ms", "peak MiB", "bytes", "factor")


def _title(options: dict[str, Any]) -> str:
    return (
        f"One step without a network: {options['model']}, payloads of {options['ranks']} rank(s), "
        f"{options['threads']} thread(s), {options['device']}, median of {options['repeats']}"
    )


def _row(one: Measurement) -> tuple[str, ...]:
    return (
        one.method,
        f"{one.ratio:.1f}",
        f"{one.step_ms:.0f}",
        f"{one.copy_ms:.1f}",
        *("-" if value is None else f"{value:.0f}" for value in (one.encode_ms, one.decode_ms)),
        f"{one.peak_mb:.0f}",
        "-" if one.bytes_sent is None else f"{one.bytes_sent:,}",
        "-" if one.compression_factor is None else f"{one.compression_factor:.1f}",
    )


def _table(measured: list[Measurement]) -> Table:
    table = make_table(*_HEADINGS, numbers=_HEADINGS[1:])
    for one in measured:
        table.add_row(*_row(one))
    return table


def _markdown(measured: list[Measurement], options: dict[str, Any]) -> str:
    rows = [_HEADINGS, ("---",) + ("--:",) * (len(_HEADINGS) - 1), *map(_row, measured)]
    return "\n".join([f"{_title(options)}.", "", *(f"| {' | '.join(row)} |" for row in rows), ""])


def _plot(measured: list[Measurement], options: dict[str, Any]) -> bytes:
    """A PNG."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise click.ClickException("the plot needs matplotlib: pip install 'hvdcomp[plot]'") from None
    ordered = sorted(measured, key=lambda one: one.ratio, reverse=True)
    figure = Figure(figsize=(8, 0.32 * len(ordered) + 1.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.barh([one.method for one in ordered], [one.ratio for one in ordered])
    axes.set_xlabel(f"time of a step, in copies of the gradients of {options['model']}")
    axes.grid(axis="x", alpha=0.3)
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=120)
    return image.getvalue()
