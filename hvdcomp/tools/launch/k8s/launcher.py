"""The program of the launcher's container: `python3 -m hvdcomp.tools.launch.k8s.launcher PORT mpirun [ARGUMENT]...`.

If a launcher restarts after the loss of a worker, mpirun does not wait for the new worker. Therefore this program first
waits until the sshd of every worker answers on the port. Then it runs mpirun, and returns mpirun's exit code.

A pod that must end (because of a drain, a preemption or a deletion) gets SIGTERM. On SIGTERM, mpirun would kill the
ranks. Therefore this program sends SIGUSR1 to the ranks instead, like the batch script under Slurm. Ranks that handle
SIGUSR1 save and end with code 213.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from hvdcomp.tools.launch.promise import EXIT_SAVED

HOSTS = "OMPI_MCA_orte_default_hostfile"
"""The operator's variable that names a file with a line for each worker. The line begins with the worker's host."""

WORKERS_WITHIN = 1800.0
"""Seconds to wait for a worker. The time is limited because a worker that its node evicted is never replaced."""

WARN_EVERY = 15
"""Seconds between two signals that warn the ranks. The signal is repeated because a program that is still starting
ignores it."""

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM)


def hosts() -> list[str]:
    """The hosts of the workers, in the order of the operator's file; empty if the file does not exist."""
    file = os.environ.get(HOSTS)
    return [] if file is None else [line.split()[0] for line in Path(file).read_text().splitlines() if line.strip()]


def answers(host: str, port: int) -> bool:
    """Whether a program accepts connections on a port of a host."""
    try:
        with socket.create_connection((host, port), timeout=5):
            return True
    except OSError:  # This error also occurs while the host's name cannot be resolved yet.
        return False


def wait_for(host: str, port: int, seconds: float = WORKERS_WITHIN) -> None:
    """Waits until something answers on a port of a host.

    Raises:
        TimeoutError: if nothing answers within this time.
    """
    until = time.monotonic() + seconds
    announced = False
    while True:
        try:
            with socket.create_connection((host, port), timeout=5):
                return
        except OSError as error:  # This error also occurs while the host's name cannot be resolved yet.
            if time.monotonic() > until:
                raise TimeoutError(f"no answer from worker {host} in {seconds:g} seconds ({error})") from None
            if not announced:
                print(f"hvdcomp: waiting for worker {host} ({error})", file=sys.stderr, flush=True)
                announced = True
        time.sleep(1)


def _pass_on(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGUSR1)  # mpirun passes this signal to all ranks


class Ranks:
    """The ranks of a command such as mpirun. `run` runs the command, and warns the ranks if this process is told to
    end.

    Args:
        warn: a function that gets the process of the command and warns its ranks. This function may be called several
            times, and must not wait.
    """

    def __init__(self, warn: Callable[[subprocess.Popen[bytes]], None] = _pass_on) -> None:
        self._warn_ranks = warn
        self._process: subprocess.Popen[bytes] | None = None
        self._warned = False

    def run(self, command: list[str]) -> int:
        """Runs a command, and returns its exit code. If a signal ended the command, this is 128 plus the number of the
        signal."""
        for number in _SIGNALS:
            signal.signal(number, self._warn)
        self._process = subprocess.Popen(command)
        if self._warned:
            self._warn()
        code = self._process.wait()
        for number in _SIGNALS:  # a pending alarm must not end this process
            signal.signal(number, signal.SIG_IGN)
        return code if code >= 0 else 128 - code

    def _warn(self, *_: Any) -> None:
        self._warned = True
        if self._process is not None:
            self._warn_ranks(self._process)
            signal.alarm(WARN_EVERY)


def end_while_waiting() -> None:
    """Makes SIGTERM end this process. Without a handler, the first process of a container ignores signals."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def finish(code: int) -> NoReturn:
    """Ends this process with the exit code of the ranks."""
    if code == EXIT_SAVED:
        print(
            "hvdcomp: the ranks have saved a checkpoint and stopped; the next start continues from this checkpoint",
            file=sys.stderr,
        )
    sys.exit(code)


def _main() -> NoReturn:
    port, *command = sys.argv[1:]
    end_while_waiting()
    try:
        for host in hosts():
            wait_for(host, int(port))
        code = Ranks().run(command)
    except TimeoutError as error:
        print(f"hvdcomp: {error}: see `hvdcomp launch k8s status`", file=sys.stderr)
        sys.exit(125)
    except FileNotFoundError as error:
        print(f"hvdcomp: {error.filename} cannot be run: {error.strerror}", file=sys.stderr)
        sys.exit(127)
    finish(code)


if __name__ == "__main__":
    _main()
