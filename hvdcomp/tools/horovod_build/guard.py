"""Runs a command, and ends it, with all that it has started, when the process is gone that wanted it.

A long build is in a session of its own, so that all of it can be ended at once. A process that is killed cannot do that
any more: its end of a pipe closes with it, and this program, which has the other, does it instead.
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

_PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>


@contextmanager
def guarded(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Runs a command in a session of its own, which ends with this process, however that does.

    Args:
        options: of `subprocess.Popen`.
    """
    theirs, ours = os.pipe()
    try:
        program = [sys.executable, "-I", __file__, str(theirs), *command]
        process = subprocess.Popen(program, pass_fds=[theirs], start_new_session=True, **options)
    except BaseException:
        os.close(ours)
        raise
    finally:
        os.close(theirs)
    try:
        yield process
    finally:
        os.close(ours)


def end_with_make() -> None:
    """Ends this process when the `make` is killed that has started it; does nothing if none has."""
    if "MAKELEVEL" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _end_with(pipe: int) -> None:
    os.read(pipe, 1)  # nothing is ever written to it
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    _process = subprocess.Popen(sys.argv[2:])
    threading.Thread(target=_end_with, args=[int(sys.argv[1])], daemon=True).start()
    _code = _process.wait()
    sys.exit(_code if _code >= 0 else 128 - _code)
