"""`hvdcomp bench steps`: predicted beside measured times of steps. What is measured lives in `hvdcomp.tools.bench`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.perfmodel import STOCK
from hvdcomp.tools.bench.models import split_model
from hvdcomp.tools.bench.places import Hosts, parse_hosts
from hvdcomp.tools.bench.steps import Options
from hvdcomp.tools.bench.trainings import OVERLAPS
from hvdcomp.tools.terminal import make_console, make_table, print_table

_STEPS = "steps-measured"  # what the files of `hvdcomp bench steps` are called


def _list(_context: click.Context, _option: click.Parameter, value: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in value.split(",") if part.strip()))


@click.command()
@click.option(
    "--hosts",
    default="2,4",
    show_default=True,
    callback=_list,
    metavar="N[xRANKS],...",
    help="Numbers of hosts, with one rank on each: 2x2 is two hosts with two.",
)
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
    help="Beside dense and the library's own fp16; repeat.",
)
@click.option(
    "--backend",
    type=click.Choice(list(STOCK)),
    default="horovod",
    show_default=True,
    help="What carries gradients: Horovod, or DistributedDataParallel.",
)
@click.option(
    "--overlap",
    type=click.Choice(list(OVERLAPS)),
    default="on",
    show_default=True,
    help="Compressors as they are by themselves, sending during the backward pass; all at its end; or both.",
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

    On each cluster: calibrates, and in turns with that trains with dense gradients, fp16 as Horovod or
    DistributedDataParallel has it, and each compressor.
    """
    from hvdcomp.tools.bench import steps as runs
    from hvdcomp.tools.bench.compare import choices, compare, gains
    from hvdcomp.tools.bench.compare_files import HEADINGS, auto_summary, cells, summary, write
    from hvdcomp.tools.bench.places import place_of

    try:
        import matplotlib  # noqa: F401

        compressors = tuple(dict.fromkeys(str(parse_compressor(spec)) for spec in specs))
        clusters = list(dict.fromkeys(map(parse_hosts, hosts)))
        for model in models:
            if ":" not in model:
                split_model(model)
        output.mkdir(parents=True, exist_ok=True)
        wanted = runs.Options(models, compressors, **options)
        details = {
            "command": _steps_command(clusters, rates, wanted, output),
            "left_out": runs.left_out(clusters, wanted),
            **runs.environment_facts(),
        }
        results = runs.earlier(output / f"{_STEPS}.json", details["command"]) if resume else []
        if len(results) < len(clusters) * len(rates) * len(models):
            runs.check(clusters, rates)
    except ImportError as error:
        raise click.ClickException(f"the plot needs {error.name}: pip install 'hvdcomp[plot]'") from None
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    except (runs.StepsError, OSError) as error:
        raise click.ClickException(str(error)) from None
    rows = [row for result in results for row in compare(result)]
    console = make_console()
    if details["left_out"]:
        console.print(details["left_out"], soft_wrap=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=make_console(stderr=True)) as progress:
        total = len(clusters) * len(rates) * len(models)
        task = progress.add_task("starting", total=total, completed=len(results))

        def show(what: str) -> None:
            progress.update(task, description=what)

        try:
            for result in runs.measure(clusters, rates, wanted, show, results):
                rows += compare(result)
                results.append(result)
                write(output, _STEPS, rows, {**details, "runs": results})
                progress.advance(task)
                progress.console.print(f"{place_of(result).in_words()}: measured", highlight=False)
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
            f"{gain.in_words()}: {gain.best} is {gain.over_dense:.2f} times as fast as dense, {gain.over_fp16:.2f} "
            "times as fast as fp16",
            soft_wrap=True,
        )
    console.print(summary(rows), soft_wrap=True)
    if found := choices(results):
        console.print(auto_summary(found), soft_wrap=True)
    for result in results:
        if result["noisy"]:
            console.print(f"noisy, {place_of(result).in_words()}: {', '.join(result['noisy'])}", soft_wrap=True)
    click.echo(f"wrote {_STEPS}.json, .csv, .md, .png and {_STEPS}-speed.png to {output}")


def _steps_command(clusters: list[Hosts], rates: tuple[str, ...], options: Options, output: Path) -> str:
    words = ["hvdcomp bench steps", "--hosts", ",".join(map(str, clusters)), "--rate", ",".join(rates)]
    words += ["--model", ",".join(options.models), "--batch-size", str(options.batch_size)]
    words += [word for spec in options.compressors for word in ("--compressor", shlex.quote(spec))]
    if options.backend != "horovod":
        words += ["--backend", options.backend]
    if options.overlap != "on":
        words += ["--overlap", options.overlap]
    return " ".join([*words, "--seconds", f"{options.seconds:g}", "--output", str(output)])
