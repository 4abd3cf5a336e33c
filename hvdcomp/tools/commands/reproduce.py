"""`hvdcomp reproduce`: a table or figure of the papers beside ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hvdcomp.tools.reproduce.outcome import NOT_SHOWN, Outcome
from hvdcomp.tools.reproduce.published import PAPERS, Artefact, artefacts
from hvdcomp.tools.terminal import make_console, make_table, print_table


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("names", metavar="[NAME]...", nargs=-1)
@click.option("--quick", is_flag=True, help="In about a minute each: fewer seeds.")
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("reproduction"),
    show_default=True,
    help="Folder for NAME.json, for NAME.png of a figure, and for the trainings.",
)
@click.option("--plot/--no-plot", default=True, help="Draw figures.")
@click.option("--page", type=click.Path(dir_okay=False, path_type=Path), help="Write a page of --output, and a CSV.")
def command(names: tuple[str, ...], quick: bool, output: Path, plot: bool, page: Path | None) -> None:
    """Print a table or figure of the papers beside what hvdcomp finds.

    Without a NAME, list all tables and figures. The name of a paper (accordion, utility, gravac) stands for all of it.
    What a result says is one of: as published, in part, reversed, cannot be shown here.
    """
    console = make_console()
    for artefact in _chosen(names):
        found = _run(artefact, quick, output, plot)
        _show(console, artefact, found)
    if page is not None:
        _write_page(page, output)
    elif not names:
        _list(console)


def _chosen(names: tuple[str, ...]) -> list[Artefact]:
    chosen: dict[str, Artefact] = {}
    for name in names:
        found = {key: artefact for key, artefact in artefacts().items() if name in (key, artefact.paper)}
        if not found:
            raise click.UsageError(f"{name!r} is no table or figure; `hvdcomp reproduce` lists all names")
        chosen |= found
    return list(chosen.values())


def _run(artefact: Artefact, quick: bool, output: Path, plot: bool) -> Outcome:
    from hvdcomp.tools.reproduce.counterparts import run
    from hvdcomp.tools.reproduce.outcome import write
    from hvdcomp.tools.train.ranks import RunRefused

    try:
        found = run(artefact, quick, output / "runs")
    except RunRefused as error:
        raise click.ClickException(str(error)) from None
    try:
        write(found, output)
        if plot and found.curves and artefact.is_figure:
            from hvdcomp.tools.reproduce.plot import draw

            draw(found, f"{artefact.name}: {artefact.shows}", output / f"{artefact.name}.png")
    except OSError as error:
        raise click.ClickException(f"--output {output} cannot be written: {error.strerror or error}") from None
    except ImportError as error:
        raise click.ClickException(f"{error}; plots need matplotlib, or give --no-plot") from None
    return found


def _show(console: Any, artefact: Artefact, found: Outcome) -> None:
    from hvdcomp.tools.reproduce.page import number, said, with_half

    table = make_table("", "published", "ours", "difference", "holds", "", numbers=("published", "ours", "difference"))
    for row in found.rows:
        numbers = number(row.published), with_half(row), number(row.difference, sign=True)
        table.add_row(row.what, *numbers, said(row), row.note)
    title = f"{artefact.name}, {artefact.place} of {PAPERS[artefact.paper]}: {artefact.shows}"
    if found.rows:
        print_table(console, table, title)
    else:
        console.print(title, markup=False)
    if found.ours:
        console.print(found.ours, markup=False)
    why = f", because {found.reason}" if found.verdict == NOT_SHOWN else ""
    console.print(f"{artefact.name}: {found.verdict}{why}", markup=False)


def _list(console: Any) -> None:
    for paper, title in PAPERS.items():
        table = make_table("name", "in the paper", "shows")
        for artefact in artefacts().values():
            if artefact.paper == paper:
                table.add_row(artefact.name, artefact.place, artefact.shows)
        print_table(console, table, title)


def _write_page(page: Path, output: Path) -> None:
    from hvdcomp.files import replace_text
    from hvdcomp.tools.reproduce import page as pages
    from hvdcomp.tools.reproduce.outcome import read

    found = {file.stem: read(file) for file in sorted(output.glob("*.json")) if file.stem in artefacts()}
    try:
        replace_text(page, pages.page(found))
        replace_text(page.with_suffix(".csv"), pages.rows_as_csv(found))
    except OSError as error:
        raise click.ClickException(f"--page {page} cannot be written: {error.strerror or error}") from None
    click.echo(f"wrote {page} and {page.with_suffix('.csv')}, from {len(found)} results in {output}")
