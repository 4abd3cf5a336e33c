"""`python -m benchmarks.steps`: predicted and measured step times, compared by `hvdcomp.tools.bench`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.steps.clusters import Options
from benchmarks.steps.places import Hosts, parse_hosts
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.perfmodel import STOCK
from hvdcomp.perfmodel.verdict import compared
from hvdcomp.tools.bench.models import split_model
from hvdcomp.tools.bench.trainings import OVERLAPS
from hvdcomp.tools.commands.plugins import plugin_option
from hvdcomp.tools.terminal import make_console, make_table, print_table

_STEPS = "steps-measured"  # name of the output files, without the suffix


def _list(_context: click.Context, _option: click.Parameter, value: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in value.split(",") if part.strip()))


@click.command()
@click.option(
    "--hosts",
    default="2,4",
    show_default=True,
    callback=_list,
    metavar="N[xRANKS],...",
    help="Emulated clusters. 4 means four hosts with one rank each; 2x2 means two hosts with two ranks each.",
)
@click.option(
    "--rate",
    "rates",
    default="100mbit,1gbit,10gbit",
    show_default=True,
    callback=_list,
    metavar="RATE,...",
    help="Bandwidths of each host's link, such as 100mbit or 1gbit.",
)
@click.option(
    "--model",
    "models",
    default="mlp,resnet20,resnet18",
    show_default=True,
    callback=_list,
    metavar="NAME,...",
    help="Models to train.",
)
@click.option(
    "--compressor",
    "specs",
    multiple=True,
    metavar="SPEC",
    default=("topk:ratio=0.01", "powersgd:rank=4", "efsignsgd"),
    show_default=True,
    help="Compressor to measure, besides dense gradients and the library's own fp16; repeatable.",
)
@plugin_option
@click.option(
    "--backend",
    type=click.Choice(list(STOCK)),
    default="horovod",
    show_default=True,
    help="Library that averages gradients: Horovod or DistributedDataParallel.",
)
@click.option(
    "--overlap",
    type=click.Choice(list(OVERLAPS)),
    default="on",
    show_default=True,
    help="on: compressors send gradients during the backward pass; off: after it; both: measure both ways in turn.",
)
@click.option("--batch-size", type=click.IntRange(1), default=4, show_default=True, help="Samples per rank.")
@click.option(
    "--seconds",
    type=click.FloatRange(1),
    default=60.0,
    show_default=True,
    help="Approximate time to calibrate each model on each cluster. Measuring the steps takes the same time again. The "
    "policy auto takes half of this time to decide, and is then compared with the other methods for up to three "
    "times this time.",
)
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("docs"),
    show_default=True,
    help="Folder for steps-measured.json, .csv, .md and .png, steps-measured-gains.csv and steps-measured-speed.png.",
)
@click.option(
    "--resume",
    is_flag=True,
    help="Continue a run of the same command that was interrupted or failed: keep its measurements, and make only the "
    "missing measurements. If no measurement is missing, the command only makes the tables and plots again, and "
    "needs no root.",
)
def main(
    hosts: tuple[str, ...],
    rates: tuple[str, ...],
    models: tuple[str, ...],
    specs: tuple[str, ...],
    output: Path,
    resume: bool,
    **options: Any,
) -> None:
    """Compare predicted with measured step times, on emulated clusters (needs root and iproute2).

    On each cluster, the command alternates between calibration and training. It trains with dense gradients, with the
    library's own fp16 (Horovod's or DistributedDataParallel's), and with each compressor.
    """
    from benchmarks.steps import clusters as runs
    from benchmarks.steps.compare import choices, compare, gains
    from benchmarks.steps.files import HEADINGS, auto_summary, cells, summary, write
    from benchmarks.steps.places import place_of

    try:
        import matplotlib  # noqa: F401

        compressors = tuple(dict.fromkeys(str(parse_compressor(spec)) for spec in specs))
        clusters = list(dict.fromkeys(map(parse_hosts, hosts)))
        for model in models:
            if ":" not in model:
                split_model(model)
        output.mkdir(parents=True, exist_ok=True)
        chosen = runs.Options(models, compressors, **options)
        details = {
            "command": _steps_command(clusters, rates, chosen, output),
            "left_out": runs.left_out(clusters, chosen),
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

        def show(stage: str) -> None:
            progress.update(task, description=stage)

        try:
            for result in runs.measure(clusters, rates, chosen, show, results):
                rows += compare(result)
                results.append(result)
                write(output, _STEPS, rows, {**details, "runs": results})
                progress.advance(task)
                progress.console.print(f"{place_of(result).in_words()}: measured", highlight=False)
        except (runs.StepsError, OSError) as error:
            again = "\nEarlier measurements are kept: continue with --resume." if results else ""
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
            f"{gain.in_words()}: {gain.best} is {compared(gain.over_dense, 'dense')}, "
            f"{compared(gain.over_fp16, 'fp16')}",
            soft_wrap=True,
        )
    console.print("\n".join(summary(rows)), soft_wrap=True)
    if auto_choices := choices(results):
        console.print(auto_summary(auto_choices), soft_wrap=True)
    for result in results:
        if result["noisy"]:
            console.print(
                f"Noisy measurements, {place_of(result).in_words()}: {', '.join(result['noisy'])}", soft_wrap=True
            )
    click.echo(f"wrote {_STEPS}.json, .csv, .md, .png, {_STEPS}-gains.csv and {_STEPS}-speed.png to {output}")


def _steps_command(clusters: list[Hosts], rates: tuple[str, ...], options: Options, output: Path) -> str:
    words = ["python -m benchmarks.steps", "--hosts", ",".join(map(str, clusters)), "--rate", ",".join(rates)]
    words += ["--model", ",".join(options.models), "--batch-size", str(options.batch_size)]
    words += [word for spec in options.compressors for word in ("--compressor", shlex.quote(spec))]
    if options.backend != "horovod":
        words += ["--backend", options.backend]
    if options.overlap != "on":
        words += ["--overlap", options.overlap]
    return " ".join([*words, "--seconds", f"{options.seconds:g}", "--output", str(output)])


if __name__ == "__main__":
    main()
