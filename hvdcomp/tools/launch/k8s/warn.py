"""The preStop hook of a worker's container: `python3 -m hvdcomp.tools.launch.k8s.warn`.

Without this hook, Kubernetes would send SIGTERM to sshd, and all ranks of the pod would end immediately. The hook warns
the ranks with SIGUSR1, and returns when they have ended, within the pod's grace period. All ranks agree on the step at
which they save, so ranks in other pods do not need a warning.

`python3 -m hvdcomp.tools.launch.k8s.warn all` sends SIGUSR2 once. This signal tells the ranks of an elastic job that
all ranks must end. After SIGUSR1, the ranks of other pods would continue.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

from hvdcomp.tools.launch.k8s.launcher import WARN_EVERY

_LOOK_EVERY = 0.5
_HOROVODRUN = b"HOROVOD_RANK="
"""The beginning of a variable that horovodrun sets for each rank. A rank is recognized by this variable, because its
parent process is only a shell that ssh has started."""


def ranks(processes: Path = Path("/proc")) -> list[int]:
    """The process IDs of the processes that Open MPI's daemon or horovodrun started in this container."""
    names: dict[int, str] = {}
    parents: dict[int, int] = {}
    started: set[int] = set()
    for folder in processes.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has just ended, or belongs to sshd
            # The file has the form "12 (the name) S 1 ...". The name may contain any characters, even parentheses.
            before, _, after = (folder / "stat").read_text(errors="replace").rpartition(")")
            state, parent = after.split()[:2]
            if state != "Z":
                number = int(folder.name)
                names[number], parents[number] = before.partition("(")[2], int(parent)
                if any(variable.startswith(_HOROVODRUN) for variable in (folder / "environ").read_bytes().split(b"\0")):
                    started.add(number)
    # Children of a rank inherit the variable, so they are left out.
    first = {number for number in started if parents[number] not in started}
    return sorted(first | {number for number, parent in parents.items() if names.get(parent) == "orted"})


def warn() -> None:
    """Warns the ranks repeatedly until all of them have ended."""
    warned = -float(WARN_EVERY)
    while processes := ranks():
        if time.monotonic() - warned >= WARN_EVERY:
            _send(processes, signal.SIGUSR1)
            warned = time.monotonic()
        time.sleep(_LOOK_EVERY)


def _send(processes: list[int], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


if __name__ == "__main__":
    if sys.argv[1:] == ["all"]:
        _send(ranks(), signal.SIGUSR2)
    else:
        warn()
