"""The table as a page, as CSV and as JSON."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hvdcomp.files import commit, csv_of, replace_files
from tests.faults.table import Fault, Row

NAME = "faults"
TRANSPORTS = ("gloo", "mpi", "ddp")


def facts() -> dict[str, Any]:
    """Of this machine and its software."""
    packages = {name: version(name) for name in ("hvdcomp", "horovod", "torch")}
    return {
        "versions": {"python": platform.python_version(), **packages},
        "kernel": platform.release(),
        "cores": len(os.sched_getaffinity(0)),
        "commit": commit(),
    }


def read(folder: Path) -> list[Row]:
    """The rows that were written to a folder; none if there is no table."""
    file = folder / f"{NAME}.json"
    return [Row(**row) for row in json.loads(file.read_text())["rows"]] if file.exists() else []


def together(faults: Sequence[Fault], old: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """New rows in the place of old ones, in the order of the table; without rows of faults that are no longer in it."""
    rows = {(row.fault, row.transport): row for row in (*old, *new)}
    order = [(fault.name, transport) for fault in faults for transport in fault.transports]
    return [rows[place] for place in order if place in rows]


def write(folder: Path, command: str, rows: Sequence[Row]) -> None:
    """Writes the table.

    Args:
        command: that makes it.
        rows: at least one.

    Raises:
        OSError: as of `replace_files`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    document = {"command": command, **facts(), "rows": [row.as_json() for row in rows]}
    replace_files(
        {
            folder / f"{NAME}.json": (json.dumps(document, indent=1) + "\n").encode(),
            folder / f"{NAME}.csv": csv_of([row.as_json() for row in rows]),
            folder / f"{NAME}.md": as_markdown(command, document, rows).encode(),
        }
    )


def as_markdown(command: str, found: dict[str, Any], rows: Sequence[Row]) -> str:
    """The page."""
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    passed = sum(row.passed for row in rows)
    lines = [
        "# Faults, and what comes of them",
        "",
        f"    {command}",
        "",
        f"It was run with {versions} on {found['cores']} cores, at commit `{found['commit']}`. "
        f"{passed} of {len(rows)} rows are as documented. "
        "A row is a fault over a transport: Horovod with Gloo or with MPI (`gloo`, `mpi`), or torch.distributed under "
        f"torchrun (`ddp`); what happened in each is in `{NAME}.csv`. Above each table stands what is documented, and "
        "in it the seconds from the fault to the end of the last process of the training, `yes` where there is no such "
        "time, and the limit for it. Where ranks wait for ever, they were told to end at the limit. Every row also "
        "sees that no process is left, and, where ranks train with hvdcomp, that all had the same weights after each "
        "step.",
    ]
    for group in dict.fromkeys(row.group for row in rows):
        lines += ["", f"## {group.capitalize()}"]
        of_group = [row for row in rows if row.group == group]
        for documented in dict.fromkeys(row.documented for row in of_group):
            lines += ["", " ".join(documented.split()), ""]
            lines += [f"| fault | {' | '.join(TRANSPORTS)} | limit |", "|---|" + "--:|" * (len(TRANSPORTS) + 1)]
            alike = [row for row in of_group if row.documented == documented]
            for fault in dict.fromkeys(row.fault for row in alike):
                over = {row.transport: row for row in alike if row.fault == fault}
                limit = max(row.within for row in over.values())
                cells = (fault, *(_outcome(over.get(transport)) for transport in TRANSPORTS), f"{limit:.0f}")
                lines.append(f"| {' | '.join(map(_cell, cells))} |")
    return "\n".join(lines) + "\n"


def _outcome(row: Row | None) -> str:
    if row is None:
        return "-"
    if not row.passed:
        return f"**FAILED**: {row.happened}"
    return "yes" if row.seconds is None else f"{row.seconds:.1f}"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")[:600]
