"""What the launcher's container starts: `python3 -m hvdcomp.tools.launch.k8s.launcher PORT mpirun [ARGUMENT]...`.

A launcher that is started again, after a worker was lost, does not wait for the new worker by itself; so this waits
until the sshd of every worker answers on the port. Then it runs mpirun, and ends with its exit code.

A pod that is to end, by a drain, a preemption or a deletion, gets SIGTERM, at which mpirun would kill the ranks. This
passes SIGUSR1 on to them instead, as the batch script does under Slurm: ranks that know it save and end with code 213.
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
"""The variable by which the operator names a file with a line for each worker, its host first."""

WORKERS_WITHIN = 1800.0
"""Seconds to wait for a worker. One that its node gave up is never made again."""

WARN_EVERY = 15
"""Seconds between two warnings: a program that is only just starting takes no notice yet."""

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM)


def hosts() -> list[str]:
    """The workers' hosts, in the order of the operator's file; none if there is no such file."""
    file = os.environ.get(HOSTS)
    return [] if file is None else [line.split()[0] for line in Path(file).read_text().splitlines() if line.strip()]


def answers(host: str, port: int) -> bool:
    """Whether something answers on a host's port."""
    try:
        with socket.create_connection((host, port), timeout=5):
            return True
    except OSError:  # also while the name is not known yet
        return False


def wait_for(host: str, port: int, seconds: float = WORKERS_WITHIN) -> None:
    """Return when something answers on a host's port.

    Raises:
        TimeoutError: nothing did.
    """
    until = time.monotonic() + seconds
    said = False
    while True:
        try:
            with socket.create_connection((host, port), timeout=5):
                return
        except OSError as error:  # also while the name is not known yet
            if time.monotonic() > until:
                raise TimeoutError(f"no answer from worker {host} in {seconds:g} seconds ({error})") from None
            if not said:
                print(f"hvdcomp: waiting for worker {host} ({error})", file=sys.stderr, flush=True)
                said = True
        time.sleep(1)


def _pass_on(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGUSR1)  # mpirun passes it on to all ranks


class Ranks:
    """The ranks of a command that starts them. `run` runs it, and warns them when this process is told to end.

    Arguments:
        warn: warns them, given the process of the command; it may be called again and again, and must not wait.
    """

    def __init__(self, warn: Callable[[subprocess.Popen[bytes]], None] = _pass_on) -> None:
        self._warn_ranks = warn
        self._process: subprocess.Popen[bytes] | None = None
        self._told = False

    def run(self, command: list[str]) -> int:
        """The exit code of the command; 128 and the number of the signal, if one ended it."""
        for number in _SIGNALS:
            signal.signal(number, self._warn)
        self._process = subprocess.Popen(command)
        if self._told:
            self._warn()
        code = self._process.wait()
        for number in _SIGNALS:  # an alarm that is still set must not end this process in place of its code
            signal.signal(number, signal.SIG_IGN)
        return code if code >= 0 else 128 - code

    def _warn(self, *_: Any) -> None:
        self._told = True
        if self._process is not None:
            self._warn_ranks(self._process)
            signal.alarm(WARN_EVERY)


def end_while_waiting() -> None:
    """Let SIGTERM end this process: the first one of a container is not ended by a signal that it does not handle."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def finish(code: int) -> NoReturn:
    """End with the exit code of the ranks."""
    if code == EXIT_SAVED:
        print("hvdcomp: the ranks have saved and stopped; started again, they go on from there", file=sys.stderr)
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
