"""`python -m benchmarks.reproduce`: published tables and figures, compared with hvdcomp's results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from benchmarks.reproduce.outcome import NOT_SHOWN, Outcome
from benchmarks.reproduce.published import PAPERS, Artifact, artifacts
from hvdcomp.tools.terminal import make_console, make_table, print_table


@click.command()
@click.argument("names", metavar="[NAME]...", nargs=-1)
@click.option(
    "--quick", is_flag=True, help="Run shorter trainings with fewer seeds. This takes a minute or two for each NAME."
)
@click.option(
    "--data-dir",
    "data",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder with the published files of CIFAR and WikiText-2. With this option, the trainings for Accordion are "
    "the authors' own trainings, which take hours on a GPU, instead of small trainings.",
)
@click.option(
    "--epochs",
    type=click.IntRange(1),
    help="With --data-dir: number of epochs, instead of the authors' 300 (90 for text).",
)
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("reproduction"),
    show_default=True,
    help="Folder for NAME.json, for NAME.png if NAME is a figure, and for the trainings.",
)
@click.option("--plot/--no-plot", default=True, help="Draw figures.")
@click.option(
    "--page",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Markdown page to write. A CSV file with the same name is written next to the page.",
)
def main(
    names: tuple[str, ...],
    quick: bool,
    data: Path | None,
    epochs: int | None,
    output: Path,
    plot: bool,
    page: Path | None,
) -> None:
    """Reproduce a published table or figure, and print the result next to the published values.

    Without a NAME, the command lists all tables and figures; with --quick, it reproduces all of them. The name of a
    paper (accordion, utility, bagpipe, gravac) means all its tables and figures. The verdict is one of: does not hold
    here, not confirmed, in part, as published, cannot be shown here.
    """
    console = make_console()
    if epochs and data is None:
        raise click.UsageError(f"--epochs {epochs} needs published data: name their folder with --data-dir")
    if quick and not names and page is None:
        names = tuple(PAPERS)
    for artifact in _chosen(names):
        outcome = _run(artifact, quick, data, epochs, output, plot)
        _show(console, artifact, outcome)
    if page is not None:
        _write_page(page, output)
    elif not names:
        _list(console)


def _chosen(names: tuple[str, ...]) -> list[Artifact]:
    chosen: dict[str, Artifact] = {}
    for name in names:
        named = {key: artifact for key, artifact in artifacts().items() if name in (key, artifact.paper)}
        if not named:
            raise click.UsageError(
                f"{name!r} is not a table, figure or paper; `python -m benchmarks.reproduce` lists all names"
            )
        chosen |= named
    return list(chosen.values())


def _run(artifact: Artifact, quick: bool, data: Path | None, epochs: int | None, output: Path, plot: bool) -> Outcome:
    from benchmarks.reproduce.counterparts import run
    from benchmarks.reproduce.outcome import write
    from hvdcomp.tools.train.ranks import RunRefused

    try:
        outcome = run(artifact, quick, output / "runs", data, epochs)
    except RunRefused as error:
        raise click.ClickException(str(error)) from None
    try:
        write(outcome, output)
        if plot and outcome.curves and artifact.is_figure:
            from benchmarks.reproduce.plot import draw

            draw(outcome, f"{artifact.name}: {artifact.shows}", output / f"{artifact.name}.png")
    except OSError as error:
        raise click.ClickException(f"--output {output} cannot be written: {error.strerror or error}") from None
    except ImportError as error:
        raise click.ClickException(f"{error}; install matplotlib to draw plots, or give --no-plot") from None
    return outcome


def _show(console: Any, artifact: Artifact, outcome: Outcome) -> None:
    from benchmarks.reproduce.page import holds_text, number, with_half

    table = make_table("", "published", "ours", "difference", "holds", "", numbers=("published", "ours", "difference"))
    for row in outcome.rows:
        numbers = number(row.published), with_half(row), number(row.difference, sign=True)
        table.add_row(row.what, *numbers, holds_text(row), row.note)
    title = f"{artifact.name}, {artifact.place} of {PAPERS[artifact.paper]}: {artifact.shows}"
    if outcome.rows:
        print_table(console, table, title)
    else:
        console.print(title, markup=False)
    if outcome.ours:
        console.print(outcome.ours, markup=False)
    why = f", because {outcome.reason}" if outcome.verdict == NOT_SHOWN else ""
    console.print(f"{artifact.name}: {outcome.verdict}{why}", markup=False)


def _list(console: Any) -> None:
    for paper, title in PAPERS.items():
        table = make_table("name", "in the paper", "shows")
        for artifact in artifacts().values():
            if artifact.paper == paper:
                table.add_row(artifact.name, artifact.place, artifact.shows)
        print_table(console, table, title)


def _write_page(page: Path, output: Path) -> None:
    from benchmarks.reproduce import page as pages
    from benchmarks.reproduce.outcome import read
    from hvdcomp.files import replace_text

    outcomes = {file.stem: read(file) for file in sorted(output.glob("*.json")) if file.stem in artifacts()}
    try:
        replace_text(page, pages.page(outcomes))
        replace_text(page.with_suffix(".csv"), pages.rows_as_csv(outcomes))
    except OSError as error:
        raise click.ClickException(f"--page {page} cannot be written: {error.strerror or error}") from None
    click.echo(f"wrote {page} and {page.with_suffix('.csv')}, from {len(outcomes)} results in {output}")


if __name__ == "__main__":
    main()
