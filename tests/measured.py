"""Finds pages with stale figures, by docs/measured.toml: `python -m tests.measured`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import click

from tests.trajectories import kept

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DOCS = Path(__file__).parents[1] / "docs"
TABLE = DOCS / "measured.toml"
MEASURES = ("quality", "counts", "times", "behavior")


@dataclass(frozen=True, kw_only=True)
class Page:
    """A row of the table; its header explains the fields."""

    name: str
    command: str
    commit: str
    measures: str
    files: tuple[str, ...] = ()
    trajectories: Mapping[str, str] = field(default_factory=dict)
    test: str | None = None
    gone: str | None = None

    def changed(self, marks: Mapping[str, str]) -> list[str]:
        """The changed trajectories on which the page depends."""
        return [name for name, mark in self.trajectories.items() if marks.get(name) != mark]


def pages() -> list[Page]:
    rows = tomllib.loads(TABLE.read_text())
    return [Page(name=name, **{**row, "files": tuple(row.get("files", ()))}) for name, row in rows.items()]


def marks() -> dict[str, str]:
    """The marks of the current trajectories."""
    return {name: record["mark"] for name, record in kept().items()}


def said_of(page: Page, marks: Mapping[str, str]) -> tuple[str, str]:
    """The heading of a page, and its line below it."""
    line = f"docs/{page.name}: {page.command.split(' --')[0]}, at {page.commit}"
    if page.gone is not None:
        return "Measured on what is gone", f"{line}: {page.gone}"
    if changed := page.changed(marks):
        return "Stale: a trajectory has changed", f"{line}: {', '.join(changed)}"
    if page.trajectories:
        return "Its trajectories are the present ones", line
    if page.test is not None:
        return "Made anew by a test", f"{line}, by {page.test}"
    return "No trajectory shows whether it holds: measured then, and not since", f"{line} ({page.measures})"


@click.command(help="Lists the pages of figures, by whether their measurements are still valid.")
def command() -> None:
    lines_by_heading: dict[str, list[str]] = {}
    for page in pages():
        heading, line = said_of(page, marks())
        lines_by_heading.setdefault(heading, []).append(line)
    for heading, lines in lines_by_heading.items():
        click.echo("\n  ".join([heading, *lines]))


if __name__ == "__main__":
    command()
