"""Output of all commands on a terminal: tables and lines of which nothing is cut off, and groups of commands.

A cell that is too long goes on in the next line. A table that does not fit is shown row by row. Output to a file or a
pipe has no width to fit into, unless COLUMNS gives one.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from hvdcomp.specs.suggestions import did_you_mean

_NO_LIMIT = 100_000  # columns
_LEAST = 20  # columns: a longer word may be broken


def make_console(**options: Any) -> Console:
    """A console, with rich's options, that prints what it is given: no highlighting, no markup, no emoji."""
    console = Console(**{"highlight": False, "markup": False, "emoji": False, **options})
    if "width" not in options and not console.is_terminal and not os.environ.get("COLUMNS", "").isdigit():
        console.width = _NO_LIMIT
    return console


def make_table(*headings: str, numbers: Sequence[str] = ()) -> Table:
    """An empty table of some columns.

    Args:
        headings: may have several lines.
        numbers: those of the headings whose columns hold numbers, which are aligned and stay in one line.
    """
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_header=any(headings))
    for heading in headings:
        is_number = heading in numbers
        table.add_column(heading, justify="right" if is_number else "left", no_wrap=is_number, overflow="fold")
    return table


def print_table(console: Console, table: Table, title: str | None = None) -> None:
    """Prints a table; row by row, each cell with its heading, if the console is too narrow for it."""
    if title:
        console.print(Text(title, "bold"), soft_wrap=True)
    if _least_width(console, table) <= console.width:
        console.print(table)
        return
    headings = [" ".join(str(column.header).split()) for column in table.columns]
    for row in zip(*(column.cells for column in table.columns), strict=True):
        for heading, cell in zip(headings, row, strict=True):
            if cell:
                label = f"{heading}: " if heading else ""
                console.print(Text.assemble((label, "dim"), cell), overflow="fold")
        console.print()


def _least_width(console: Console, table: Table) -> int:
    """The width from which on a table can be read: numbers and short words are whole."""
    width = 1
    for column in table.columns:
        sizes = [Measurement.get(console, console.options, each) for each in (column.header, *column.cells)]
        widths = [size.maximum if column.no_wrap else min(size.minimum, _LEAST) for size in sizes]
        width += max(widths, default=0) + 1
    return width


class Group(click.Group):
    """A group that says what a command that does not exist may have been meant to be."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name[:1].isalnum() and self.get_command(ctx, name) is None:
            known = self.list_commands(ctx)
            ctx.fail(f"there is no command {name!r}{did_you_mean(name, known)}; there are: {', '.join(known)}")
        return super().resolve_command(ctx, args)


class LazyGroup(Group):
    """A group that lists commands without importing them, so that its `--help` needs nothing that they need.

    Args:
        lazy: by name of a command, its module, its name in that module, and a line of help.
    """

    def __init__(self, *args: Any, lazy: Mapping[str, tuple[str, str, str]], **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self._lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self._lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._lazy:
            return None
        module, name, _ = self._lazy[cmd_name]
        return getattr(importlib.import_module(module), name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, self._lazy[name][2]) for name in self.list_commands(ctx)])
