"""`hvdcomp bench`: measurements of the package on this machine. What is measured lives in `hvdcomp.bench`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import track
from rich.table import Table

from hvdcomp.bench.encode import METHODS, PEER, Measurement, Request, as_json, measure
from hvdcomp.bench.shapes import MODELS
from hvdcomp.errors import SpecError
from hvdcomp.spec import parse_compressor


@click.group()
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
    """Time of encoding and decoding, as multiples of one copy of the same gradients, and peak memory."""
    try:
        import torch  # noqa: F401
    except ImportError:
        raise click.ClickException("hvdcomp bench encode needs PyTorch: pip install 'hvdcomp[torch]'") from None
    try:
        for method in methods:
            parse_compressor(method)
    except SpecError as error:
        raise click.UsageError(str(error)) from None
    requests = [Request(method=method, **options) for method in methods or (*METHODS, PEER)]
    measured = [measure(request) for request in track(requests, "measuring", transient=True)]
    Console(width=max(120, Console().width)).print(_table(measured, options))
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        (output / "encode.json").write_text(
            json.dumps({"options": options, "measurements": as_json(measured)}, indent=1) + "\n"
        )
        (output / "encode.md").write_text(_markdown(measured, options))
        _plot(measured, options, output / "encode.png")
        click.echo(f"wrote encode.json, encode.md and encode.png to {output}")


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


def _table(measured: list[Measurement], options: dict[str, Any]) -> Table:
    table = Table(title=_title(options))
    for heading in _HEADINGS:
        table.add_column(heading, justify="left" if heading == "method" else "right", no_wrap=True)
    for one in measured:
        table.add_row(*_row(one))
    return table


def _markdown(measured: list[Measurement], options: dict[str, Any]) -> str:
    rows = [_HEADINGS, ("---",) + ("--:",) * (len(_HEADINGS) - 1), *map(_row, measured)]
    return "\n".join([f"{_title(options)}.", "", *(f"| {' | '.join(row)} |" for row in rows), ""])


def _plot(measured: list[Measurement], options: dict[str, Any], file: Path) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise click.ClickException("the plot needs matplotlib: pip install 'hvdcomp[train]'") from None
    ordered = sorted(measured, key=lambda one: one.ratio, reverse=True)
    figure = Figure(figsize=(8, 0.32 * len(ordered) + 1.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.barh([one.method for one in ordered], [one.ratio for one in ordered])
    axes.set_xlabel(f"time of a step, in copies of the gradients of {options['model']}")
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(file, dpi=120)
