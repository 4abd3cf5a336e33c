"""Runs on host0: starts a program's ranks on all hosts, helps them find each other, and waits for them.

    python -m hvdcomp.bench.cluster.ranks CLUSTER HOSTS RANKS_PER_HOST COMMAND...

Ends with 0 if all ranks did, else with the exit code of the first that failed; the others then get some seconds to
say what they have to say, and are ended.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import wait

from hvdcomp.bench.cluster.launch import cores_of, host_command
from hvdcomp.bench.cluster.namespaces import address

_GRACE_SECONDS = 5


def main(cluster: str, hosts: int, slots: int, command: list[str]) -> int:
    """Returns the exit code of the run."""
    try:
        from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
        from horovod.runner.http.http_server import RendezvousServer
    except ImportError as error:
        print(f"Horovod is not installed for {sys.executable} ({error}); run `make setup`", file=sys.stderr)
        return 1
    server = RendezvousServer(0)
    port = server.start()
    size = hosts * slots
    places = get_host_assignments(parse_hosts(",".join(f"host{host}:{slots}" for host in range(hosts))), size)
    server.init(places)
    common = {
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": "eth0",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": address(0),
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
    }
    processes = []
    for place in places:
        # HOROVOD_HOSTNAME, HOROVOD_RANK, HOROVOD_SIZE, HOROVOD_LOCAL_RANK, ...
        own = {f"HOROVOD_{key.upper()}": str(value) for key, value in vars(place).items()}
        host = int(place.hostname.removeprefix("host"))
        full = host_command(cluster, host, command)
        keep = functools.partial(os.sched_setaffinity, 0, cores_of(host, hosts))
        processes.append(subprocess.Popen(full, env={**os.environ, **common, **own}, preexec_fn=keep))
    return _wait(processes)


def _wait(processes: list[subprocess.Popen[bytes]]) -> int:
    running = {os.pidfd_open(process.pid): process for process in processes}
    code, deadline = 0, float("inf")
    while running:
        left = None if deadline == float("inf") else max(0.0, deadline - time.monotonic())
        ended = [descriptor for descriptor in wait(list(running), left) if isinstance(descriptor, int)]
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
    os._exit(128 + number)  # the ranks are ended by whoever ends this


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupted)
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]))
