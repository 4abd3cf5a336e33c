"""Runs a command. When the process that started this program ends, the command and all its children are killed.

A long build runs in its own session, so that all its processes can be killed together. If the parent process itself is
killed, it can no longer kill the build. Therefore the parent process and this program are connected by a pipe. The pipe
closes when the parent process ends. This program notices that the pipe is closed, and kills the build.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

_PR_SET_PDEATHSIG = 1  # the constant in <sys/prctl.h>


@contextmanager
def guarded(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Runs a command in its own session. The session ends when this process ends for any reason.

    Args:
        command: the program and its arguments.
        options: other arguments of `subprocess.Popen`.
    """
    child_end, parent_end = os.pipe()
    try:
        program = [sys.executable, "-I", __file__, str(child_end), *command]
        process = subprocess.Popen(program, pass_fds=[child_end], start_new_session=True, **options)
    except BaseException:
        os.close(parent_end)
        raise
    finally:
        os.close(child_end)
    try:
        yield process
    finally:
        os.close(parent_end)


def end_with_make() -> None:
    """Ends this process when the `make` that started it is killed. If no `make` started it, nothing happens."""
    if "MAKELEVEL" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _end_with(pipe: int) -> None:
    os.read(pipe, 1)  # returns only when the pipe closes, because nothing is written to it
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    _process = subprocess.Popen(sys.argv[2:])
    threading.Thread(target=_end_with, args=[int(sys.argv[1])], daemon=True).start()
    _code = _process.wait()
    sys.exit(_code if _code >= 0 else 128 - _code)
