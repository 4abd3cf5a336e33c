"""`hvdcomp compressors`: what compressors there are, on the terminal, as JSON, or as the table of the manual."""

from __future__ import annotations

import dataclasses
import json
import typing
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hvdcomp.compressors import COMPRESSORS, Compressor
from hvdcomp.errors import SpecError
from hvdcomp.spec import parse_compressor

BEGIN = "<!-- made by: hvdcomp compressors --markdown docs/compressors.md -->"
END = "<!-- end of what was made -->"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list instead of a table.")
@click.option(
    "--markdown",
    metavar="[FILE]",
    is_flag=False,
    flag_value="-",
    type=click.Path(dir_okay=False, allow_dash=True, path_type=Path),
    help="Print a Markdown table, or put it into a file between its two markers.",
)
def command(as_json: bool, markdown: Path | None) -> None:
    """List the compressors: parameters, what is sent and how, bias, default memory, publication.

    The example is a spec string, as --compression of `hvdcomp train` and Compression.from_spec take it. Parameters
    without a value must be given.
    """
    entries = [describe(kind) for kind in COMPRESSORS.values()]
    if as_json and markdown:
        raise click.UsageError("--json and --markdown exclude each other")
    if as_json:
        click.echo(json.dumps(entries, indent=2))
    elif markdown is None:
        _print_table(entries)
    elif str(markdown) == "-":
        click.echo(markdown_table(entries), nl=False)
    else:
        _write_into(markdown, markdown_table(entries))


def describe(kind: type[Compressor]) -> dict[str, Any]:
    """What is to be said of a compressor, as JSON-serialisable values."""
    types = typing.get_type_hints(kind)
    fields = dataclasses.fields(kind)
    required = {field.name for field in fields if field.default is dataclasses.MISSING}
    example = parse_compressor(kind.examples[0])
    return {
        "name": kind.name,
        "example": str(example),
        "parameters": [
            {
                "name": field.name,
                "type": getattr(types[field.name], "__name__", str(types[field.name])),
                "required": field.name in required,
                "default": None if field.name in required else field.default,
            }
            for field in fields
        ],
        "level": example.level_name,
        "sends": kind.sends,
        "collective": kind.collective,
        "biased": example.biased,
        "biased_when": _biased_when(example),
        "memory": example.default_memory.name,
        "reference": kind.reference,
    }


def _biased_when(example: Compressor) -> dict[str, bool]:
    """The switches that change whether the compressor is biased, each as "name=value", and what it then is."""
    changes = {}
    for field in dataclasses.fields(example):
        if isinstance(field.default, bool):
            try:
                switched = dataclasses.replace(example, **{field.name: not field.default})
            except SpecError:
                continue  # a switch that needs another setting
            if switched.biased != example.biased:
                changes[f"{field.name}={not field.default}"] = switched.biased
    return changes


def markdown_table(entries: list[dict[str, Any]]) -> str:
    """The compressors as a Markdown table with a heading, one line each."""
    lines = ["| " + " | ".join(_HEADINGS) + " |", "|" + "---|" * len(_HEADINGS)]
    for entry in entries:
        cells = _cells(entry)
        cells[:3] = [f"`{cells[0]}`", ", ".join(f"`{part}`" for part in _parameters(entry)), f"`{cells[2]}`"]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


_HEADINGS = ("Name", "Parameters", "Example", "Sends", "Collective", "Biased", "Memory", "Reference")


def _cells(entry: dict[str, Any]) -> list[str]:
    biased = "yes" if entry["biased"] else "no"
    for switch, value in entry["biased_when"].items():
        biased += f"; {'yes' if value else 'no'} with {switch}"
    return [
        entry["name"],
        ", ".join(_parameters(entry)),
        entry["example"],
        entry["sends"],
        entry["collective"],
        biased,
        entry["memory"],
        entry["reference"],
    ]


def _parameters(entry: dict[str, Any]) -> list[str]:
    return [
        parameter["name"] if parameter["required"] else f"{parameter['name']}={parameter['default']}"
        for parameter in entry["parameters"]
    ]


def _print_table(entries: list[dict[str, Any]]) -> None:
    """Few columns with several lines each, to fit into 80 characters."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 1, 0))
    for heading in ("Name and parameters", "Sends, by which collectives", "Biased", "Memory"):
        table.add_column(heading, overflow="fold")
    for entry in entries:
        name, _, _, sends, collective, biased, memory, reference = _cells(entry)
        first = Text("\n".join([name, *_parameters(entry)]), "cyan")
        first.stylize("bold", 0, len(name))
        second = Text("\n".join(filter(None, [sends, f"by {collective}", *reference.split("; ")])))
        second.stylize("dim", len(sends) + 1)
        table.add_row(first, second, biased.replace("; ", "\n"), memory)
    Console().print(table)


def _write_into(path: Path, table: str) -> None:
    """Replaces what stands between the two markers of a file."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"{path} cannot be read: {error.strerror}") from None
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise click.ClickException(f"{path} has no place for the table; put these two lines there:\n{BEGIN}\n{END}")
    path.write_text(f"{before}{BEGIN}\n{table}{END}{after}", encoding="utf-8")
    click.echo(f"Wrote the table of compressors into {path}.", err=True)
