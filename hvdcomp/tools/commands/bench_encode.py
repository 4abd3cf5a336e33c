"""`hvdcomp bench encode` measures the encode time and the memory of each method (`hvdcomp.tools.bench.encode`)."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from hvdcomp.arrays.types import FLOATING
from hvdcomp.compressors import EXAMPLES
from hvdcomp.compressors.parsing import parse_compressor, parse_memory
from hvdcomp.errors import SpecError
from hvdcomp.files import replace_files
from hvdcomp.perfmodel.shapes import MODELS
from hvdcomp.tools.bench.encode import output as shown
from hvdcomp.tools.bench.encode.comparison import Earlier, UnsteadyError, check_steady, earlier, rows, unsteady
from hvdcomp.tools.bench.encode.facts import facts
from hvdcomp.tools.bench.encode.gradients import FRAMEWORKS, PEER_FRAMEWORK
from hvdcomp.tools.bench.encode.measurement import Measurement, MeasurementError, Request, measure
from hvdcomp.tools.bench.encode.peers import PEERS
from hvdcomp.tools.commands.plugins import plugin_option
from hvdcomp.tools.terminal import make_console, make_table, print_table

_EXTRAS = {"torch": "PyTorch", "tensorflow": "TensorFlow"}
_UNFINISHED = "not all methods have been measured"


def _threads(_context: click.Context, _option: click.Parameter, value: str) -> tuple[int, ...]:
    try:
        numbers = tuple(dict.fromkeys(int(part) for part in value.split(",")))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise click.BadParameter(f"{value!r} is not a list of positive integers; separate them by commas, as in 1,2")
    return numbers


@click.command()
@click.option(
    "--model",
    type=click.Choice(MODELS),
    default="resnet50",
    show_default=True,
    help="Model whose gradients are encoded.",
)
@click.option(
    "--method", "methods", multiple=True, metavar="SPEC", help="Compressor to measure; repeatable. [default: all]"
)
@click.option("--peers/--no-peers", default=True, show_default=True, help="Also measure PyTorch's own hooks.")
@click.option(
    "--framework",
    type=click.Choice(list(FRAMEWORKS)),
    default="torch",
    show_default=True,
    help="Array library of the gradients.",
)
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="Device of the gradients; cuda needs --framework torch.",
)
@click.option(
    "--dtype",
    type=click.Choice(list(FLOATING)),
    default="float32",
    show_default=True,
    help="Element type of the gradients.",
)
@click.option(
    "--memory",
    metavar="SPEC",
    help="Memory for the part of a gradient that is not sent. [default: the default memory of each method]",
)
@click.option(
    "--threads",
    default="2",
    show_default=True,
    callback=_threads,
    metavar="N,...",
    help="Numbers of CPU threads to measure with.",
)
@click.option(
    "--ranks",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Number of ranks whose payloads are decoded.",
)
@click.option(
    "--repeats",
    type=click.IntRange(1),
    default=5,
    show_default=True,
    help="Minimum number of repetitions for each method.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0),
    default=1.0,
    show_default=True,
    help="Repeat each method for at least this long.",
)
@click.option(
    "--retries",
    type=click.IntRange(0),
    default=1,
    show_default=True,
    help="How many times to repeat a measurement if other programs on the machine disturbed it.",
)
@click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="JSON file for all rows. It is rewritten after each row.",
)
@plugin_option
@click.option(
    "--before",
    "earlier_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSON file of an earlier run. Its times are shown next to the new times.",
)
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for encode.json, encode.md and encode.png. Nothing is written if the rows cannot be compared.",
)
def encode(
    methods: tuple[str, ...],
    peers: bool,
    threads: tuple[int, ...],
    retries: int,
    json_file: Path | None,
    earlier_file: Path | None,
    output: Path | None,
    **options: Any,
) -> None:
    """Measure encode and decode times, and compare them with a copy of the gradients and PyTorch's own hooks.

    The measurements of the copy and of each method alternate. If the time of the copy differs between methods by more
    than 15 percent, the machine was not equally fast for all methods. In this case, the command refuses to compare the
    methods, and --output does not write anything. Rows that other programs disturbed are marked as unsteady, also in
    the file that --json writes.
    """
    _check(options["framework"], options["device"], options["memory"], methods, output)
    before = None if earlier_file is None else _earlier(earlier_file)
    settings = {**options, "threads": list(threads), "retries": retries}
    machine = facts(options["device"])

    def keep(measured: Sequence[Measurement], refused: str | None) -> None:
        if json_file is not None:
            _write({json_file: shown.as_json(rows(measured, before), settings, machine, refused).encode()}, json_file)

    keep([], _UNFINISHED)
    measured = _measure_all(_requests(methods, peers, threads, options), retries, keep)
    measured_rows = rows(measured, before)
    headings, lines = shown.table(measured_rows)
    table = make_table(*headings, numbers=headings[1:])
    for line in lines:
        table.add_row(*line)
    print_table(make_console(), table, shown.title(options))
    try:
        check_steady(measured)
    except UnsteadyError as error:
        keep(measured, str(error))
        if output is not None:
            raise click.ClickException(f"{error}. Nothing was written to {output}.") from None
        if json_file is not None:
            raise click.ClickException(f"{error}. See {json_file} for the unsteady rows.") from None
        click.echo(f"Warning: {error}.", err=True)
        return
    keep(measured, None)
    if output is not None:
        files = {
            output / "encode.json": shown.as_json(measured_rows, settings, machine, None).encode(),
            output / "encode.md": shown.markdown(measured_rows, options).encode(),
            output / "encode.png": shown.plot(measured_rows, options),
        }
        _write(files, output)
        click.echo(f"wrote encode.json, encode.md and encode.png to {output}")


def _requests(methods: Sequence[str], peers: bool, threads: Sequence[int], options: Mapping[str, Any]) -> list[Request]:
    """The measurements to make: each method with each number of threads, followed by PyTorch's hooks."""
    requests = [Request(method, threads=count, **options) for method in methods or EXAMPLES for count in threads]
    if peers and not _is_there(PEER_FRAMEWORK):
        click.echo("PyTorch is not installed, so its hooks are not measured.", err=True)
    elif peers:
        for_peers = {**options, "framework": PEER_FRAMEWORK}
        requests += [Request(method, threads=count, **for_peers) for method in PEERS for count in threads]
    return requests


def _measure_all(
    requests: Sequence[Request], retries: int, keep: Callable[[Sequence[Measurement], str], None]
) -> list[Measurement]:
    """Measures every request. Unsteady measurements are repeated. Calls `keep` after each measurement."""
    measured: list[Measurement] = []
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=make_console(stderr=True), transient=True) as progress:
        task = progress.add_task("starting", total=len(requests))

        def measure_once(request: Request) -> Measurement:
            progress.update(task, description=f"{request.method}, {request.threads} thread(s)")
            try:
                return measure(request)
            except MeasurementError as error:
                raise click.ClickException(str(error)) from None
            finally:
                progress.advance(task)

        for request in requests:
            measured.append(measure_once(request))
            keep(measured, _UNFINISHED)
        for _ in range(retries):
            places = unsteady(measured)
            progress.update(task, total=progress.tasks[0].completed + len(places))
            for place in places:
                measured[place] = measure_once(measured[place].request)
                keep(measured, _UNFINISHED)
    return measured


def _write(files: Mapping[Path, bytes], place: Path) -> None:
    try:
        replace_files(files)
    except OSError as error:
        raise click.ClickException(f"{place} cannot be written: {error.strerror or error}") from None


def _earlier(file: Path) -> Earlier:
    try:
        return earlier(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise click.UsageError(f"--before {file} is not a file that --json wrote: {error}") from None


def _is_there(framework: str) -> bool:
    return importlib.util.find_spec(framework) is not None


def _check(framework: str, device: str, memory: str | None, methods: Sequence[str], output: Path | None) -> None:
    """Raises an error if an option cannot work. Call this function before the measurements."""
    if not _is_there(framework):
        raise click.ClickException(
            f"--framework {framework} needs {_EXTRAS[framework]}: pip install 'hvdcomp[{framework}]'"
        )
    if device == "cuda":
        if framework != PEER_FRAMEWORK:
            raise click.UsageError(f"--device cuda does not work with --framework {framework}: use --framework torch")
        import torch

        if not torch.cuda.is_available():
            raise click.UsageError(
                "--device cuda needs a GPU, and torch.cuda.is_available() is False: use --device cpu, or run hvdcomp "
                "doctor to find the cause"
            )
    try:
        for method in methods:
            parse_compressor(method)
        if memory is not None:
            parse_memory(memory)
        if output is not None:
            output.mkdir(parents=True, exist_ok=True)
            import matplotlib  # noqa: F401
    except SpecError as error:
        raise click.UsageError(str(error)) from None
    except ImportError:
        raise click.ClickException("the plot needs matplotlib: pip install 'hvdcomp[plot]'") from None
    except OSError as error:
        raise click.UsageError(f"--output {output} cannot be created: {error.strerror or error}") from None
