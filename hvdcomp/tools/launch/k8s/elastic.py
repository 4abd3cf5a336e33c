"""The program of the launcher's container in an elastic job.

It is called as `python3 -m hvdcomp.tools.launch.k8s.elastic PORT LIST WORKERS [OPTION]... PROGRAM [ARGUMENT]...`. The
options are passed to horovodrun.

LIST is a program of the operator that prints the hosts of the running workers. The launcher waits until WORKERS of
these hosts answer on the port. Then it runs horovodrun, which adapts to changes of the list. The launcher returns the
exit code of the ranks.

A pod that must end gets SIGTERM. On SIGTERM, horovodrun would end the ranks. Therefore the launcher sends SIGUSR2 to
the ranks of all workers instead. Ranks that handle SIGUSR2 save and end with code 213.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from shlex import quote
from typing import NoReturn

from hvdcomp.tools.launch.k8s.launcher import Ranks, answers, end_while_waiting, finish

_SSH = """#!/bin/sh
exec {ssh} -o BatchMode=yes -o ConnectTimeout=10 -o ConnectionAttempts=5 -o ServerAliveInterval=10 \
-o ServerAliveCountMax=3 -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR "$@"
"""
"""A script with the name `ssh`, which horovodrun runs instead of the real ssh. With the options in this script, a rank
on a lost node fails after half a minute. Without these options, the other ranks would wait for hours."""

_FOR_PYTHON = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")
"""Variables that `python3 -m` may need, and that are not set in sessions of sshd."""


class _Workers:
    """The worker pods of an elastic job that are running."""

    def __init__(self, port: str, program: str) -> None:
        self._port, self._program = port, program
        self._warning: threading.Thread | None = None

    def hosts(self) -> list[str]:
        """The workers' hosts; empty if the program fails."""
        listing = subprocess.run([self._program], stdout=subprocess.PIPE, text=True, check=False)
        return listing.stdout.split() if listing.returncode == 0 else []

    def wait_for(self, count: int) -> None:
        """Waits until `count` workers answer. There is no time limit, because placing pods may take long."""
        announced = False
        while (ready := sum(answers(host, int(self._port)) for host in self.hosts())) < count:
            if not announced:
                print(f"hvdcomp: waiting for workers: {ready} of {count} answer", file=sys.stderr, flush=True)
                announced = True
            time.sleep(1)

    def warn(self, _process: subprocess.Popen[bytes]) -> None:
        """Tells all ranks to save and end, and returns immediately."""
        if self._warning is None or not self._warning.is_alive():
            self._warning = threading.Thread(target=self._warn, daemon=True)
            self._warning.start()

    def _warn(self) -> None:
        variables = [f"{name}={quote(os.environ[name])}" for name in _FOR_PYTHON if name in os.environ]
        command = " ".join(["env", *variables, "python3", "-m", "hvdcomp.tools.launch.k8s.warn", "all"])
        for started in [subprocess.Popen(["ssh", "-p", self._port, host, command]) for host in self.hosts()]:
            started.wait()


def _main() -> NoReturn:
    port, program, count, *arguments = sys.argv[1:]
    end_while_waiting()
    workers = _Workers(port, program)
    with tempfile.TemporaryDirectory() as folder:
        try:
            _make_ssh(Path(folder))
            workers.wait_for(int(count))
        except FileNotFoundError as error:
            print(f"hvdcomp: {error.filename} cannot be run: {error.strerror}", file=sys.stderr)
            sys.exit(127)
        horovodrun = [sys.executable, "-u", "-m", "hvdcomp.tools.launch.k8s.horovodrun", "--gloo", "--ssh-port", port]
        code = Ranks(workers.warn).run([*horovodrun, "--host-discovery-script", quote(program), *arguments])
    finish(code)


def _make_ssh(folder: Path) -> None:
    """Writes a script that runs ssh with the required options, and puts its folder first in PATH."""
    ssh = shutil.which("ssh")
    if ssh is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "ssh")
    script = folder / "ssh"
    script.write_text(_SSH.format(ssh=quote(ssh)))
    script.chmod(0o755)
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"


if __name__ == "__main__":
    _main()
