"""Processes of this machine: which run, and which have a variable in their environment."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_EXEC_SECONDS = 0.5


def variables(process: Path) -> list[bytes]:
    """The environment of a process, as `NAME=value`.

    For a moment of `exec`, between two programs, a process has no environment. One that is empty is therefore read
    again, for half a second.

    Args:
        process: its folder in /proc.

    Raises:
        OSError: it has ended, is the kernel's own, or belongs to another user.
    """
    until = time.monotonic() + _EXEC_SECONDS
    while not (found := (process / "environ").read_bytes()) and time.monotonic() < until:
        (process / "exe").readlink()  # raises where there is no program
        time.sleep(0.001)
    return found.split(b"\0")


def with_variable(variable: str) -> Iterator[Path]:
    """The folders in /proc of the processes beside this one that have a variable.

    Args:
        variable: as `NAME=value`.
    """
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended, or is somebody else's
            if int(process.name) != os.getpid() and variable.encode() in variables(process):
                yield process


def runs(process: int) -> bool:
    """Whether a process still runs; what nobody asked for its exit code yet (a zombie) does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter if it ended since the file was opened
        return False
