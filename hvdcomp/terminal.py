"""Tables and lines on a terminal, alike in all commands: nothing is cut off.

A cell that is too long goes on in the next line, and a table that does not fit at all is shown row by row. Where the
output is no terminal, but a file or a pipe, there is no width to fit into, unless COLUMNS gives one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

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
