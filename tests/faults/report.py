"""The table as a page, as CSV and as JSON."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hvdcomp.files import commit, csv_of, provenance_last, replace_files
from tests.faults.table import Fault, Row

NAME = "faults"
NAMED = 3
"""If more faults than this have the same documented outcome, the page names only the first of them."""


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
    failed = [row for row in rows if not row.passed]
    lines = [
        "# Faults, and their consequences",
        "",
        f"Made by `{command}`, with {versions} on {found['cores']} cores, at commit `{found['commit']}`.",
        "",
        "This page shows what happens to a training run after a fault, such as a killed process or a full disk. A test "
        f"causes each fault, and compares the consequence with the documented consequence. {len(rows) - len(failed)} "
        f"of {len(rows)} rows are as documented.",
        "",
        "Each row is a fault under one transport: Horovod with Gloo or MPI (`gloo`, `mpi`), or torch.distributed under "
        f"torchrun (`ddp`). The file [{NAME}.csv]({NAME}.csv) contains all rows, with the consequences, and the "
        "seconds from the fault until the last process of the run ended. The test also checks that no process of the "
        "run is left. If the ranks train with hvdcomp, the test checks that all ranks have the same weights after each "
        "step.",
        "",
        "Faults with the same documented consequence share a line of the table. The line names all of these faults, or "
        f"only the first fault if there are more than {NAMED}. The last column shows how many seconds the slowest of "
        "these faults took, and its time limit. Ranks that would have waited forever were stopped at the time limit.",
        "",
        *(f"- **FAILED**: {row.fault}, over {row.transport}: {_short(row.happened)}" for row in failed),
        *([""] if failed else []),
        "| faults | documented consequence | slowest, s |",
        "|---|---|--:|",
    ]
    for group, documented in dict.fromkeys((row.group, row.documented) for row in rows):
        alike = [row for row in rows if (row.group, row.documented) == (group, documented)]
        over: dict[str, list[str]] = {}
        for row in alike:
            over.setdefault(row.fault, []).append(row.transport)
        named = [f"{fault} ({', '.join(transports)})" for fault, transports in over.items()]
        if len(named) > NAMED:
            named[1:] = [f"{len(named) - 1} more"]
        slowest = max(alike, key=lambda row: row.seconds or 0)
        seconds = "-" if slowest.seconds is None else f"{slowest.seconds:.1f} of {slowest.within:.0f}"
        lines.append(f"| {' | '.join(_cell(text) for text in ('; '.join(named), documented, seconds))} |")
    return provenance_last("\n".join(lines))


def _cell(text: str) -> str:
    return _short(text).replace("|", "\\|")


def _short(text: str) -> str:
    """In one line, which is not too long."""
    return " ".join(text.split())[:600]
