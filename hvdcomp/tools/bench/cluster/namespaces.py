"""Creates and removes the network namespaces of a cluster, which are its hosts and the switch between them.

Each host has a namespace with the interface eth0. A virtual cable connects eth0 to a bridge in another namespace.
Clusters are therefore isolated from the machine's interfaces and from each other, and removing the namespaces removes
everything. A token bucket filter at both ends of a cable limits the traffic of the host in both directions.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from hvdcomp.tools.bench.cluster import records
from hvdcomp.tools.bench.cluster.errors import ClusterError
from hvdcomp.tools.bench.cluster.rates import QUEUE_MILLISECONDS, parse_rate, token_bucket_bytes

MOST_HOSTS = 64
_GRACE_SECONDS = 5  # time between SIGTERM and SIGKILL


def check_machine() -> None:
    """Checks that this process may create namespaces, and that the required programs are installed.

    Raises:
        ClusterError: if the user is not root, or a program is missing. The message gives the remedy.
    """
    if os.geteuid() != 0:
        raise ClusterError(
            "run this command with sudo: an emulated cluster needs root if its hosts remain after the command, or if "
            "another program creates the cluster"
        )
    _check_programs()


def become_root() -> None:
    """Restarts this program as root of a new user namespace, unless the user is already root.

    In this user namespace, the program can create network namespaces. They cease to exist when the program ends. `ip`
    stores the names of network namespaces in /run, which is empty in the new user namespace.

    Raises:
        ClusterError: if this kernel does not let users create user namespaces.
    """
    if os.geteuid() == 0:
        return
    _check_programs()
    enter = ["unshare", "--user", "--map-root-user", "--net", "--mount", "sh", "-c"]
    tried = subprocess.run([*enter, "mount -t tmpfs none /run"], capture_output=True, text=True)
    if tried.returncode != 0:
        raise ClusterError(
            "the emulated cluster needs network namespaces. To create them, you need root, or a kernel that lets users "
            f"create user namespaces ({tried.stderr.strip()}). Run this command with sudo"
        )
    os.execvp(enter[0], [*enter, 'mount -t tmpfs none /run && exec "$@"', "sh", *sys.orig_argv])


def _check_programs() -> None:
    packages = {"ip": "iproute2 (Debian, Ubuntu) or iproute (Fedora)", "tc": "iproute2 or iproute-tc (Fedora)"}
    packages |= {"unshare": "util-linux", "hostname": "hostname"}
    for program, package in packages.items():
        if shutil.which(program) is None:
            raise ClusterError(
                f"the emulated cluster needs the program {program!r} from the package {package}. On Debian and Ubuntu, "
                "run: sudo scripts/install-system-packages"
            )


def namespace(cluster: str, host: int) -> str:
    """The network namespace of a host."""
    return f"hvdcomp-{cluster}-host{host}"


def address(host: int) -> str:
    """The IPv4 address of a host. The address is the same in every cluster, because clusters are separate networks."""
    return f"10.77.0.{host + 1}"


def hosts_file(cluster: str) -> Path:
    """The file that replaces /etc/hosts on every host of a cluster."""
    return records.FOLDER / f"{cluster}.hosts"


def make(cluster: str, hosts: int, rate: str) -> None:
    """Creates the switch and the hosts. After a failure, call `remove`."""
    switch = f"hvdcomp-{cluster}-switch"
    _ip(f"netns add {switch}")
    _ip(f"-n {switch} link add bridge type bridge")
    _ip(f"-n {switch} link set bridge up")
    names = "".join(f"{address(host)} host{host}\n" for host in range(hosts))
    hosts_file(cluster).write_text(f"127.0.0.1 localhost\n{names}")
    for host in range(hosts):
        host_namespace, port = namespace(cluster, host), f"port{host}"
        _ip(f"netns add {host_namespace}")
        _ip(f"-n {switch} link add {port} type veth peer name eth0 netns {host_namespace}")
        _ip(f"-n {switch} link set {port} master bridge up")
        _ip(f"-n {host_namespace} address add {address(host)}/24 dev eth0")
        _ip(f"-n {host_namespace} link set eth0 up")
        _ip(f"-n {host_namespace} link set lo up")
        _shape(host_namespace, "eth0", rate)
        _shape(switch, port, rate)


def _shape(name: str, interface: str, rate: str) -> None:
    bits = parse_rate(rate)
    _command(
        f"tc -n {name} qdisc replace dev {interface} root tbf rate {bits}bit burst {token_bucket_bytes(bits)} "
        f"latency {QUEUE_MILLISECONDS}ms"
    )


def remove(cluster: str) -> None:
    """Ends the processes of a cluster's hosts, and removes the hosts. This also works if the cluster is incomplete."""
    stop_processes(cluster)
    for name in existing(cluster):
        _ip(f"netns delete {name}")
    hosts_file(cluster).unlink(missing_ok=True)


def stop_processes(cluster: str) -> None:
    """Ends all processes on a cluster's hosts, first with SIGTERM and later with SIGKILL."""
    deadline = time.monotonic() + _GRACE_SECONDS
    warned: set[int] = set()
    while processes := _processes(cluster):
        late = time.monotonic() > deadline
        for process in processes:
            if late or process not in warned:
                warned.add(process)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL if late else signal.SIGTERM)
        time.sleep(0.02)


def _processes(cluster: str) -> set[int]:
    listed = [_ip(f"netns pids {name}") for name in existing(cluster)]
    return {int(number) for lines in listed for number in lines.split()} - {os.getpid()}


def existing(cluster: str | None = None) -> list[str]:
    """The existing network namespaces of one cluster, or of all clusters."""
    all_names = [line.split()[0] for line in _ip("netns list").splitlines() if line]
    owners = {name: records.name_in(name) for name in all_names}
    return [name for name, owner in owners.items() if owner is not None and cluster in (None, owner)]


def remove_leftovers() -> list[str]:
    """Removes each cluster whose process was killed or crashed before it could remove the cluster. Returns the names of
    the removed clusters.

    Call it within `records.exclusive()`.
    """
    of_namespaces = {records.name_in(name) for name in existing()} - {None}
    removed = []
    for name in sorted({*records.names(), *(owner for owner in of_namespaces if owner)}):
        facts = records.read(name)
        if records.in_use(name) or (facts is not None and facts.standing):
            continue
        record = records.Record(name)
        remove(name)
        record.remove()
        removed.append(name)
    return removed


def _ip(arguments: str) -> str:
    return _command(f"ip {arguments}")


def _command(command: str) -> str:
    # The command runs in its own session, so that Ctrl-C does not interrupt it. The terminal sends Ctrl-C to all
    # foreground processes of its session.
    process = subprocess.run(command.split(), capture_output=True, text=True, start_new_session=True)
    if process.returncode == 0:
        return process.stdout
    message = (process.stderr or process.stdout).strip()
    hint = ""
    if "not permitted" in message or "Permission denied" in message:
        hint = (
            ". Here, even root is not allowed to do this, as in most containers: start the container with --privileged"
        )
    elif any(words in message.lower() for words in ("unknown", "not supported", "no such file")):
        hint = (
            ". The kernel seems to lack a feature. It must support bridges, veth, network namespaces and the qdisc tbf"
        )
    raise ClusterError(f"{command!r} failed: {message}{hint}")
