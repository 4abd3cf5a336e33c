"""A program that runs on host0. It starts the ranks of a program on all hosts, connects them, and waits for them.

    python -m hvdcomp.tools.bench.cluster.ranks BACKEND CLUSTER HOSTS RANKS_PER_HOST COMMAND...

The exit code is 0 if all ranks succeed. Otherwise it is the exit code of the first rank that fails. The other ranks
then have a few seconds to write their output before they are killed.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import wait

from hvdcomp.tools.bench.cluster.backends import BACKENDS
from hvdcomp.tools.bench.cluster.errors import ClusterError
from hvdcomp.tools.bench.cluster.launch import cores_of, host_command

_GRACE_SECONDS = 5


def main(backend: str, cluster: str, hosts: int, slots: int, command: list[str]) -> int:
    """Starts the ranks, and returns the exit code of the run."""
    try:
        ranks = BACKENDS[backend](hosts, slots)
    except ClusterError as error:
        print(error, file=sys.stderr)
        return 1
    processes = []
    for rank, variables in enumerate(ranks):
        host = rank // slots
        full = host_command(cluster, host, command)
        keep = functools.partial(os.sched_setaffinity, 0, cores_of(host, hosts))
        processes.append(subprocess.Popen(full, env={**os.environ, **variables}, preexec_fn=keep))
    return _wait(processes)


def _wait(processes: list[subprocess.Popen[bytes]]) -> int:
    running = {os.pidfd_open(process.pid): process for process in processes}
    code, deadline = 0, float("inf")
    while running:
        timeout = None if deadline == float("inf") else max(0.0, deadline - time.monotonic())
        ended = [descriptor for descriptor in wait(list(running), timeout) if isinstance(descriptor, int)]
        if not ended:
            for process in running.values():
                process.kill()
            deadline = float("inf")
        for descriptor in ended:
            result = running.pop(descriptor).wait()
            os.close(descriptor)
            if result != 0 and code == 0:
                code = result if result > 0 else 128 - result
                deadline = time.monotonic() + _GRACE_SECONDS
    return code


def _interrupted(number: int, frame: object) -> None:
    os._exit(128 + number)  # the process that started this program ends the ranks


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupted)
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5:]))
