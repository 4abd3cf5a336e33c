"""Starts a program under Horovod or torch.distributed on the hosts of a cluster, with Gloo.

Horovod can use Gloo or MPI between hosts. This module uses Gloo for two reasons. First, Gloo's allreduce is the usual
ring, in which each host sends 2(n-1)/n times the gradient. Second, a waiting rank sleeps instead of spinning, which is
important if all ranks share a few cores. Neither horovodrun nor torchrun starts the ranks: horovodrun would need an ssh
server on every host, and torchrun itself would have to run on every host. Instead, the program `ranks` runs on host0
and starts the ranks.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hvdcomp.tools.bench.cluster.namespaces import hosts_file, namespace

_GRACE_SECONDS = 5  # time for the ranks to end after SIGTERM
_RANKS = "hvdcomp.tools.bench.cluster.ranks"

_VARIABLES = {
    "OMP_NUM_THREADS": "1",  # all hosts share this machine's cores
    "PYTHONUNBUFFERED": "1",
}


def variables(extra: Mapping[str, str] | None) -> dict[str, str]:
    """The environment variables of the ranks. They are a few defaults, the variables of this process, and `extra`. Each
    source overrides the sources before it. In PATH, the folder of this Python comes first."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**_VARIABLES, **os.environ, "PATH": path, **(extra or {})}


def cores_of(host: int, hosts: int) -> set[int]:
    """The cores of this machine on which the emulated host number `host` runs. If there are more hosts than cores,
    several hosts share a core.

    If ranks were not pinned to cores, they would disturb each other at random, and step times would vary by a factor of
    two.
    """
    cores = sorted(os.sched_getaffinity(0))
    return set(cores[host::hosts]) if len(cores) >= hosts else {cores[host % len(cores)]}


def host_command(cluster: str, host: int, command: Sequence[str]) -> list[str]:
    """The command that runs `command` on a host. On this host, `hostname` prints the host's own name, and /etc/hosts
    lists the names of all hosts."""
    set_name = f'mount --bind {hosts_file(cluster)} /etc/hosts && hostname "$0" && exec "$@"'
    return [
        *("ip", "netns", "exec", namespace(cluster, host)),
        *("unshare", "--uts", "sh", "-c", set_name, f"host{host}"),
        *command,
    ]


def ranks_command(backend: str, cluster: str, hosts: int, ranks: int, command: Sequence[str]) -> list[str]:
    """The command that runs `command` on every rank, and returns the exit code of the first rank that fails."""
    starter = [sys.executable, "-m", _RANKS, backend, cluster, str(hosts), str(ranks // hosts), *command]
    return host_command(cluster, 0, starter)


def stream(
    command: Sequence[str],
    environment: Mapping[str, str],
    output: Callable[[str], None] | None,
    timeout: float | None,
) -> int:
    """Runs a command to its end, and returns its exit code. Like a shell, it returns 128 + N if signal N ended the
    command.

    Args:
        command: the command to run.
        environment: environment variables of the command.
        output: a function that is called with each line of stdout and stderr, including the line end; None to inherit
            stdout and stderr.
        timeout: the seconds after which the command is ended; None for no limit.

    Raises:
        subprocess.TimeoutExpired: after the timeout.
    """
    # The command gets its own session, so that after Ctrl-C this process decides the order in which processes end.
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=None if output is None else subprocess.PIPE,
        stderr=None if output is None else subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    reader = None
    if output is not None:
        reader = threading.Thread(target=_pass_on, args=(process, output), daemon=True)
        reader.start()
    try:
        code = process.wait(timeout)
    except BaseException:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)
        process.kill()
        raise
    if reader is not None:
        reader.join(_GRACE_SECONDS)  # a child process of a rank may still have the pipe open
    return code if code >= 0 else 128 - code


def _pass_on(process: subprocess.Popen[str], output: Callable[[str], None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        output(line)
