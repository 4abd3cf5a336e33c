"""`hvdcomp report` compares training runs in a table, a web page, CSV and JSON."""

from __future__ import annotations

from pathlib import Path

import click
from rich.table import Table
from rich.text import Text

from hvdcomp.tools.commands.plugins import plugin_option
from hvdcomp.tools.report.headline import headline
from hvdcomp.tools.report.runs import RunError, find_runs
from hvdcomp.tools.report.series import series_cells
from hvdcomp.tools.report.table import Section, cells, make_sections, policy_line
from hvdcomp.tools.terminal import make_console, make_table, print_table


@click.command()
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--output",
    metavar="DIR",
    default="report",
    show_default=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for report.html, report.json, report.csv, series.csv and the figures.",
)
@click.option(
    "--baseline",
    metavar="NAME",
    help="Name or spec of the run to compare speed with. Only runs of the same model, data, number of ranks and batch "
    'size are compared. [default: the run with spec "none"]',
)
@click.option(
    "--turns",
    "turns_files",
    metavar="FILE",
    multiple=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="File with step times of several methods, which took turns on the same machine. The program python -m "
    "hvdcomp.tools.bench.compare_worker writes such a file. The report shows these times instead of the step times of "
    "the training runs, and predictions for slower networks. Repeatable, for files that were measured with different "
    "values of --rate.",
)
@plugin_option
@click.option("--open", "open_page", is_flag=True, help="Open the page in a browser.")
def command(
    runs: tuple[Path, ...], output: Path, baseline: str | None, turns_files: tuple[Path, ...], open_page: bool
) -> None:
    """Make a table and a web page from training runs.

    Each RUN is the folder of one run of `hvdcomp train`, or a folder that contains such folders. Runs that differ only
    in their seed form one series. For each series, a table shows the mean and the spread over the seeds. Figures plot
    the mean and a band against bytes and against seconds. A run may still be training.
    """
    console = make_console()
    try:
        trainings, notes = find_runs(runs)
        turns = None
        if turns_files:
            from hvdcomp.tools.report.turns import load_all_turns

            turns = load_all_turns(turns_files)
        sections = make_sections(trainings, baseline, turns)
    except (RunError, OSError) as error:
        raise click.ClickException(str(error)) from None
    for note in notes:
        click.echo(f"note: {note}", err=True)
    for section in sections:
        console.print(Text(section.title, "bold"), soft_wrap=True)
        for sentence in headline(section):
            console.print(Text(sentence))
        if section.has_series:
            print_table(console, _series_table(section))
        print_table(console, _terminal_table(section, wide=console.width >= 100))
        for note in section.notes():
            console.print(Text(note))
    try:
        from hvdcomp.tools.report.page import write_report
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f"the page needs {error.name}, which is not installed: pip install 'hvdcomp[plot]'"
        ) from None
    try:
        with console.status(f"Drawing {len(trainings)} runs ..."):
            page = write_report(output, sections)
    except OSError as error:
        place = output if error.filename is None else error.filename
        raise click.ClickException(f"the report cannot be written: {error.strerror or error}: {place}") from None
    tables = "report.json, report.csv, series.csv"
    console.print(f"Wrote {page} with {tables} and the figures as PNG and SVG.", soft_wrap=True)
    if open_page:
        click.launch(str(page))


def _series_table(section: Section) -> Table:
    """A table with one row for each series of runs."""
    numbers = [heading.replace(" ", "\n") for heading in section.series_headings[1:]]
    table = make_table(section.series_headings[0], *numbers, numbers=numbers)
    for row in section.series:
        name, *texts = series_cells(row, section.series_headings)
        table.add_row(Text(name, "cyan"), *map(_spread_below, texts))
    return table


def _spread_below(text: str) -> str:
    """Moves the text in parentheses to a separate line."""
    return text.replace(" (", "\n").rstrip(")")


def _terminal_table(section: Section, wide: bool) -> Table:
    """The table of a section. Spec and policy are shown below the name of the run. The phases of steps are shown only
    if the terminal is wide enough."""
    narrow = ("Ranks", section.headings[-1]) if section.in_turns else section.headings[-1:]
    places = [place for place, heading in enumerate(section.headings) if wide or heading not in narrow]
    shown = [section.headings[place] for place in places[2:]]
    numbers = [heading if " / " in heading else heading.replace(" ", "\n") for heading in shown]
    table = make_table("Run", *numbers, numbers=numbers)
    for row in section.rows:
        all_cells = cells(row, section.in_turns, section.on_links)
        name, spec, *texts = (all_cells[place] for place in places)
        first = Text(f"  {name}" if row["kind"] == "seed" else name, "bold" if row["kind"] == "mean" else "")
        if row["kind"] != "seed" and row["spec"] is not None:
            first.append(f"\n{spec}", "cyan")
        if row["kind"] != "seed" and (policy := policy_line(row)):
            first.append(f"\n{policy}", "green")
        table.add_row(first, *(Text(_spread_below(text), "bold red" if text == "NO" else "") for text in texts))
    return table
