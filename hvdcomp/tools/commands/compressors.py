"""`hvdcomp compressors` lists the compressors on the terminal, as JSON, or as the table of the manual."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import re
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from hvdcomp.compressors import COMPRESSORS, Compressor, first_to_try
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.errors import SpecError
from hvdcomp.files import replace_text, with_block
from hvdcomp.specs.described import fields_of
from hvdcomp.specs.parsing import type_hints
from hvdcomp.specs.suggestions import did_you_mean
from hvdcomp.tools.terminal import make_console, make_table, print_table

BEGIN = "<!-- made by: hvdcomp compressors --markdown docs/compressors.md -->"
END = "<!-- end of what was made -->"

_ATTRIBUTE = re.compile(r"^    (\w+(?:, \w+)*): (.*(?:\n {8}.*)*)", re.MULTILINE)  # an attribute in a docstring


@click.command()
@click.argument("names", metavar="[NAME]...", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list instead of a table.")
@click.option(
    "--markdown",
    metavar="[FILE]",
    is_flag=False,
    flag_value="-",
    type=click.Path(dir_okay=False, allow_dash=True, path_type=Path),
    help="Print a Markdown table, or write the table between the two markers in FILE.",
)
def command(names: tuple[str, ...], as_json: bool, markdown: Path | None) -> None:
    """List all compressors, or describe each NAME in detail.

    Each example is a spec string. Pass a spec string to --compression of `hvdcomp train`, or to Compression.from_spec.
    Parameters without a default value are required.
    """
    if markdown and (as_json or names):
        raise click.UsageError(
            f"--markdown and {'--json' if as_json else 'NAME'} cannot be used together: leave one of them out"
        )
    for name in names:
        if name not in COMPRESSORS:
            guess = did_you_mean(name, COMPRESSORS)
            raise click.UsageError(
                f"there is no compressor {name!r}{guess}; the compressors are: {', '.join(COMPRESSORS)}"
            )
    entries = [describe(COMPRESSORS[name]) for name in names or COMPRESSORS]
    if as_json:
        click.echo(json.dumps(entries, indent=2))
    elif names:
        for entry in entries:
            _print_one(entry)
    elif markdown is None:
        _print_list(entries)
    elif str(markdown) == "-":
        click.echo(markdown_table(entries), nl=False)
    else:
        _write_into(markdown, markdown_table(entries))


def describe(kind: type[Compressor]) -> dict[str, Any]:
    """The description of a compressor, as JSON-serializable values."""
    types = type_hints(kind)
    fields = fields_of(kind)
    required = {field.name for field in fields if field.default is dataclasses.MISSING}
    example = parse_compressor(kind.examples[0])
    meanings = _meanings(kind)
    return {
        "name": kind.name,
        "summary": " ".join(_paragraphs(kind)[0].split()),
        "example": str(example),
        "examples": list(kind.examples),
        "parameters": [
            {
                "name": field.name,
                "type": getattr(types[field.name], "__name__", str(types[field.name])),
                "required": field.name in required,
                "default": None if field.name in required else field.default,
                "allowed": _allowed(example, field.name, types[field.name]),
                "meaning": meanings.get(field.name, ""),
            }
            for field in fields
        ],
        "level": example.level_name,
        "sends": kind.sends,
        "collective": ", ".join(payload.kind for payload in example.payloads((64, 64))),
        "biased": example.biased,
        "biased_when": _biased_when(example),
        "memory": example.default_memory.name,
        "reference": kind.reference,
    }


def _allowed(example: Compressor, setting: str, kind: type) -> str:
    """The allowed values of a setting. The function reads them from the error message for the value NaN, because every
    setting refuses NaN."""
    try:
        dataclasses.replace(example, **{setting: math.nan})
    except SpecError as error:
        return str(error).partition("is not allowed; ")[2]
    return "it must be true or false" if kind is bool else ""


def _paragraphs(kind: type) -> list[str]:
    return (inspect.getdoc(kind) or "").split("\n\n")


def _meanings(kind: type) -> dict[str, str]:
    """The meanings of a compressor's settings, read from the docstrings of its class and base classes."""
    meanings: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        for paragraph in _paragraphs(base) if dataclasses.is_dataclass(base) else []:
            if paragraph.startswith("Attributes:\n"):
                for names, text in _ATTRIBUTE.findall(paragraph):
                    meanings |= dict.fromkeys(names.split(", "), " ".join(text.split()))
    return meanings


def _biased_when(example: Compressor) -> dict[str, bool]:
    """The settings that determine whether the compressor is biased. For each key "name=value", the value is whether the
    compressor is biased with this setting."""
    changes = {}
    for variant in map(parse_compressor, example.examples):
        if variant.biased != example.biased:
            settings = {name: value for name, value in vars(variant).items() if value != getattr(example, name)}
            changes[",".join(f"{name}={value}" for name, value in settings.items())] = variant.biased
    return changes


def markdown_table(entries: list[dict[str, Any]]) -> str:
    """The compressors as a Markdown table with a heading and one line for each compressor."""
    lines = ["| " + " | ".join(_HEADINGS) + " |", "|" + "---|" * len(_HEADINGS)]
    for entry in entries:
        cells = _cells(entry)
        cells[:3] = [f"`{cells[0]}`", ", ".join(f"`{part}`" for part in _parameters(entry)), f"`{cells[2]}`"]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


_HEADINGS = ("Name", "Parameters", "Example", "Sends", "Collective", "Biased", "Memory", "Reference")


def _cells(entry: dict[str, Any]) -> list[str]:
    return [
        entry["name"],
        ", ".join(_parameters(entry)),
        entry["example"],
        entry["sends"],
        entry["collective"],
        _biased(entry),
        entry["memory"],
        entry["reference"],
    ]


def _biased(entry: dict[str, Any]) -> str:
    biased = "yes" if entry["biased"] else "no"
    for switch, value in entry["biased_when"].items():
        biased += f"; {'yes' if value else 'no'} with {switch}"
    return biased


def _parameters(entry: dict[str, Any]) -> list[str]:
    return [
        parameter["name"] if parameter["required"] else f"{parameter['name']}={parameter['default']}"
        for parameter in entry["parameters"]
    ]


def _print_list(entries: list[dict[str, Any]]) -> None:
    """Prints the list of compressors, with only as many columns as fit into 80 characters."""
    console = make_console()
    table = make_table("name", "parameters", "sends", "by", "biased")
    for entry in entries:
        biased = "yes" if entry["biased"] else "no"
        parameters = ", ".join(_parameters(entry))
        collectives = entry["collective"].replace(", ", "\n")
        table.add_row(Text(entry["name"], "bold cyan"), parameters, entry["sends"], collectives, biased)
    print_table(console, table)
    console.print(first_to_try())
    console.print("Details and examples: hvdcomp compressors NAME", soft_wrap=True)


def _print_one(entry: dict[str, Any]) -> None:
    console = make_console()
    console.print(Text.assemble((entry["name"], "bold cyan"), f": {entry['summary']}"))
    about = {
        "example": "\n".join(entry["examples"]),
        "sends": entry["sends"],
        "by": entry["collective"],
        "biased": _biased(entry),
        "memory": entry["memory"],
        "level": entry["level"] or "none, so a policy cannot change the level",
        "reference": entry["reference"].replace("; ", "\n"),
    }
    table = make_table("", "")
    for key, value in about.items():
        if value:
            table.add_row(Text(key, "dim"), value)
    print_table(console, table)
    if entry["parameters"]:
        table = make_table("parameter", "type", "default", "meaning, and allowed values")
        for parameter in entry["parameters"]:
            default = "required" if parameter["required"] else str(parameter["default"])
            text = "\n".join(filter(None, [parameter["meaning"], parameter["allowed"]]))
            table.add_row(Text(parameter["name"], "bold"), parameter["type"], default, text)
        print_table(console, table)


def _write_into(path: Path, table: str) -> None:
    """Replaces the text between the two markers of a file."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"{path} cannot be read: {error.strerror}") from None
    written = with_block(text, BEGIN, END, table.removesuffix("\n"))
    if written is None:
        raise click.ClickException(f"{path} has no markers for the table. Add these two lines:\n{BEGIN}\n{END}")
    try:
        replace_text(path, written)
    except OSError as error:
        raise click.ClickException(f"{path} cannot be written: {error.strerror or error}") from None
    click.echo(f"Wrote the table of compressors to {path}.", err=True)
