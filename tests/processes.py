"""Processes of this machine, known by the variables of their environment."""

from __future__ import annotations

import time
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
