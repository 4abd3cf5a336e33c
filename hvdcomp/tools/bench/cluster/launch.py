"""Starting a program under Horovod or torch.distributed on the hosts of a cluster, with Gloo.

Horovod can use Gloo or MPI between hosts. Gloo is taken because its allreduce is the ring by which bandwidth-bound
step times are usually computed (each host sends 2(n-1)/n times the gradient), and because a rank that waits sleeps
instead of spinning, which matters where all ranks share a few cores. The ranks are started here rather than by
horovodrun, which would want an ssh server on every host, or by a torchrun on each; `ranks` runs on host0 and starts
them.
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

_GRACE_SECONDS = 5  # for the ranks to end when asked to
_RANKS = "hvdcomp.tools.bench.cluster.ranks"

_VARIABLES = {
    "OMP_NUM_THREADS": "1",  # all hosts share this machine's cores
    "PYTHONUNBUFFERED": "1",
}


def variables(extra: Mapping[str, str] | None) -> dict[str, str]:
    """The environment of the ranks: this process's, with this Python's folder first in PATH, defaults, and `extra`."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**_VARIABLES, **os.environ, "PATH": path, **(extra or {})}


def cores_of(host: int, hosts: int) -> set[int]:
    """The machine's cores that are a host's own; with more hosts than cores, the one that it shares.

    Left to move between cores, ranks get in each other's way by chance, and the same step takes now once, now twice
    its time.
    """
    cores = sorted(os.sched_getaffinity(0))
    return set(cores[host::hosts]) if len(cores) >= hosts else {cores[host % len(cores)]}


def host_command(cluster: str, host: int, command: Sequence[str]) -> list[str]:
    """The command that becomes `command` on one host, which has a host name of its own, and knows those of all."""
    set_name = f'mount --bind {hosts_file(cluster)} /etc/hosts && hostname "$0" && exec "$@"'
    return [
        *("ip", "netns", "exec", namespace(cluster, host)),
        *("unshare", "--uts", "sh", "-c", set_name, f"host{host}"),
        *command,
    ]


def ranks_command(backend: str, cluster: str, hosts: int, ranks: int, command: Sequence[str]) -> list[str]:
    """The command that runs `command` on every rank, and ends with the exit code of the first that fails."""
    starter = [sys.executable, "-m", _RANKS, backend, cluster, str(hosts), str(ranks // hosts), *command]
    return host_command(cluster, 0, starter)


def stream(
    command: Sequence[str],
    environment: Mapping[str, str],
    output: Callable[[str], None] | None,
    timeout: float | None,
) -> int:
    """Runs a command to its end; returns its exit code, 128 + N after signal N, as a shell does.

    Args:
        output: gets each line of stdout and stderr as it comes, with its line end. None: they go where this
            process's go.
        timeout: seconds.

    Raises:
        subprocess.TimeoutExpired: after the timeout.
    """
    # A session of its own: at Ctrl-C this process decides in which order things end.
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
        reader.join(_GRACE_SECONDS)  # a program that a rank left behind may hold the pipe open
    return code if code >= 0 else 128 - code


def _pass_on(process: subprocess.Popen[str], output: Callable[[str], None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        output(line)
