"""The terminal output of all commands: tables and lines that are never truncated, and groups of commands.

A long cell is wrapped. A table that is too wide is shown row by row. Output to a file or a pipe has no width limit,
unless COLUMNS sets it.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import click
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from hvdcomp.specs.suggestions import did_you_mean

_NO_LIMIT = 100_000  # columns
_LEAST = 20  # columns; words that are longer than this may be broken


def make_console(**options: Any) -> Console:
    """Creates a console with rich's options, but without highlighting, markup and emoji."""
    console = Console(**{"highlight": False, "markup": False, "emoji": False, **options})
    if "width" not in options and not console.is_terminal and not os.environ.get("COLUMNS", "").isdigit():
        console.width = _NO_LIMIT
    return console


def make_table(*headings: str, numbers: Sequence[str] = (), whole: bool = False) -> Table:
    """Creates a table without rows.

    Args:
        headings: headings of the columns, of one or more lines.
        numbers: headings of columns with numbers, which are right-aligned and not wrapped.
        whole: whether no column is wrapped.
    """
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_header=any(headings))
    for heading in headings:
        is_number = heading in numbers
        justify: Literal["left", "right"] = "right" if is_number else "left"
        table.add_column(heading, justify=justify, no_wrap=is_number or whole, overflow="fold")
    return table


def print_table(console: Console, table: Table, title: str | None = None) -> None:
    """Prints a table. If the console is too narrow, prints the table row by row, each cell with its heading."""
    if title:
        console.print(Text(title, "bold"), soft_wrap=True)
    if fits(console, table):
        console.print(table)
        return
    headings = [" ".join(str(column.header).split()) for column in table.columns]
    for row in zip(*(column.cells for column in table.columns), strict=True):
        for heading, cell in zip(headings, row, strict=True):
            if cell:
                label = f"{heading}: " if heading else ""
                console.print(Text.assemble((label, "dim"), cell), overflow="fold")
        console.print()


def fits(console: Console, table: Table) -> bool:
    """Whether the console is wide enough to show a table without breaking a number or a short word."""
    width = 0
    for column in table.columns:
        sizes = [Measurement.get(console, console.options, cell) for cell in (column.header, *column.cells)]
        widths = [size.maximum if column.no_wrap else min(size.minimum, _LEAST) for size in sizes]
        width += max(widths, default=0) + 2  # + 2 for an edge or a divider, and a space
    return width <= console.width


class Group(click.Group):
    """A command group that suggests a name for an unknown command."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name[:1].isalnum() and self.get_command(ctx, name) is None:
            commands = self.list_commands(ctx)
            ctx.fail(
                f"there is no command {name!r}{did_you_mean(name, commands)}; the commands are: {', '.join(commands)}"
            )
        return super().resolve_command(ctx, args)


class LazyGroup(Group):
    """A command group that can list its commands without importing them, so that `--help` does not need their
    dependencies.

    Args:
        lazy: a mapping from the name of each command to the command's module, its name in that module, and a line of
            help.
        moved: a mapping from the name of each command that is no longer in the package to the command that replaces it
            in a clone of the repository.
    """

    def __init__(
        self,
        *args: Any,
        lazy: Mapping[str, tuple[str, str, str]],
        moved: Mapping[str, str] = MappingProxyType({}),
        **attributes: Any,
    ) -> None:
        super().__init__(*args, **attributes)
        self._lazy = lazy
        self._moved = moved

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self._lazy)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if instead := self._moved.get(args[0]):
            ctx.fail(f"the command {args[0]!r} has moved: run `{instead}` in a clone of the repository")
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._lazy:
            return None
        module, name, _ = self._lazy[cmd_name]
        return getattr(importlib.import_module(module), name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, self._lazy[name][2]) for name in self.list_commands(ctx)])
