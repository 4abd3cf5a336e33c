"""What a worker's container does before it is ended (its preStop): `python3 -m hvdcomp.launch.k8s.warn`.

Kubernetes would send SIGTERM to sshd alone, and with it end all ranks of the pod at once. This warns them with SIGUSR1,
and returns when they have ended; Kubernetes gives it as long as the pod's grace period. Ranks agree on when to save, so
those of other pods need no warning.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from hvdcomp.launch.k8s.launcher import WARN_EVERY

_LOOK_EVERY = 0.5


def ranks(processes: Path = Path("/proc")) -> list[int]:
    """The processes that Open MPI's daemon has started in this container."""
    parents: dict[int, tuple[str, int]] = {}
    for folder in processes.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            # "12 (the name) S 1 ...", where the name may have anything in it
            before, _, after = (folder / "stat").read_text(errors="replace").rpartition(")")
            state, parent = after.split()[:2]
            if state != "Z":
                parents[int(folder.name)] = (before.partition("(")[2], int(parent))
    return [number for number, (_, parent) in parents.items() if parents.get(parent, ("", 0))[0] == "orted"]


def warn() -> None:
    """Warn the ranks, again and again, until there are none."""
    warned = -float(WARN_EVERY)
    while found := ranks():
        if time.monotonic() - warned >= WARN_EVERY:
            for number in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(number, signal.SIGUSR1)
            warned = time.monotonic()
        time.sleep(_LOOK_EVERY)


if __name__ == "__main__":
    warn()
