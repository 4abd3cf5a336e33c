"""Network namespaces: making the hosts of a cluster and the switch between them, and removing them.

Each host has a namespace with one interface, eth0; its cable ends in a bridge that is in a namespace of its own, so
nothing of a cluster is among the machine's own interfaces, and clusters do not see each other. Removing the namespaces
removes all. A token bucket filter at both ends of a cable limits what the host sends and what it receives.
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
from hvdcomp.tools.bench.cluster.rates import QUEUE_MILLISECONDS, bucket_bytes, parse_rate

MOST_HOSTS = 64
_GRACE_SECONDS = 5  # between asking processes to end and ending them


def check_machine() -> None:
    """Sees that this process may make namespaces, and that the programs for it are there.

    Raises:
        ClusterError: says what to do.
    """
    if os.geteuid() != 0:
        raise ClusterError(
            "an emulated cluster needs root if its hosts are to stay, or if another program makes it: run it with sudo"
        )
    _check_programs()


def become_root() -> None:
    """Starts this program anew as root of a user namespace of its own, unless it is root already.

    That root can make network namespaces, which end with the program. /run, where `ip` keeps their names, is empty.

    Raises:
        ClusterError: if this kernel does not let users make user namespaces.
    """
    if os.geteuid() == 0:
        return
    _check_programs()
    enter = ["unshare", "--user", "--map-root-user", "--net", "--mount", "sh", "-c"]
    tried = subprocess.run([*enter, "mount -t tmpfs none /run"], capture_output=True, text=True)
    if tried.returncode != 0:
        raise ClusterError(
            "the emulated cluster makes network namespaces, which needs root, or a kernel that lets users make user "
            f"namespaces ({tried.stderr.strip()}): run it with sudo"
        )
    os.execvp(enter[0], [*enter, 'mount -t tmpfs none /run && exec "$@"', "sh", *sys.orig_argv])


def _check_programs() -> None:
    packages = {"ip": "iproute2 (Debian, Ubuntu) or iproute (Fedora)", "tc": "iproute2 or iproute-tc (Fedora)"}
    packages |= {"unshare": "util-linux", "hostname": "hostname"}
    for program, package in packages.items():
        if shutil.which(program) is None:
            raise ClusterError(
                f"the emulated cluster needs the program {program!r}, of the package {package}; on Debian and Ubuntu: "
                "sudo scripts/install-system-packages"
            )


def namespace(cluster: str, host: int) -> str:
    """The network namespace of a host."""
    return f"hvdcomp-{cluster}-host{host}"


def address(host: int) -> str:
    """The IPv4 address of a host: the same in every cluster, as they are separate networks."""
    return f"10.77.0.{host + 1}"


def hosts_file(cluster: str) -> Path:
    """What stands in place of /etc/hosts on every host of a cluster."""
    return records.FOLDER / f"{cluster}.hosts"


def make(cluster: str, hosts: int, rate: str) -> None:
    """Makes the switch and the hosts. What is there when it fails is left to `remove`."""
    switch = f"hvdcomp-{cluster}-switch"
    _ip(f"netns add {switch}")
    _ip(f"-n {switch} link add bridge type bridge")
    _ip(f"-n {switch} link set bridge up")
    names = "".join(f"{address(host)} host{host}\n" for host in range(hosts))
    hosts_file(cluster).write_text(f"127.0.0.1 localhost\n{names}")
    for host in range(hosts):
        own, port = namespace(cluster, host), f"port{host}"
        _ip(f"netns add {own}")
        _ip(f"-n {switch} link add {port} type veth peer name eth0 netns {own}")
        _ip(f"-n {switch} link set {port} master bridge up")
        _ip(f"-n {own} address add {address(host)}/24 dev eth0")
        _ip(f"-n {own} link set eth0 up")
        _ip(f"-n {own} link set lo up")
        _shape(own, "eth0", rate)
        _shape(switch, port, rate)


def _shape(where: str, interface: str, rate: str) -> None:
    bits = parse_rate(rate)
    _command(
        f"tc -n {where} qdisc replace dev {interface} root tbf rate {bits}bit burst {bucket_bytes(bits)} "
        f"latency {QUEUE_MILLISECONDS}ms"
    )


def remove(cluster: str) -> None:
    """Ends what runs on a cluster's hosts and removes them, however much of them there is."""
    stop_processes(cluster)
    for name in existing(cluster):
        _ip(f"netns delete {name}")
    hosts_file(cluster).unlink(missing_ok=True)


def stop_processes(cluster: str) -> None:
    """Ends all processes on a cluster's hosts: asks them first, and ends them if they do not."""
    deadline = time.monotonic() + _GRACE_SECONDS
    asked: set[int] = set()
    while processes := _processes(cluster):
        late = time.monotonic() > deadline
        for process in processes:
            if late or process not in asked:
                asked.add(process)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL if late else signal.SIGTERM)
        time.sleep(0.02)


def _processes(cluster: str) -> set[int]:
    listed = [_ip(f"netns pids {name}") for name in existing(cluster)]
    return {int(number) for lines in listed for number in lines.split()} - {os.getpid()}


def existing(cluster: str | None = None) -> list[str]:
    """The network namespaces that are there, of one cluster or of all."""
    found = [line.split()[0] for line in _ip("netns list").splitlines() if line]
    owners = {name: records.name_in(name) for name in found}
    return [name for name, owner in owners.items() if owner is not None and cluster in (None, owner)]


def remove_leftovers() -> list[str]:
    """Removes the clusters whose process ended without removing them (kill -9, a crash); returns their names.

    To be called within `records.exclusive()`.
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
    # In a session of its own: Ctrl-C in a terminal goes to all processes of the session's foreground group.
    done = subprocess.run(command.split(), capture_output=True, text=True, start_new_session=True)
    if done.returncode == 0:
        return done.stdout
    said = (done.stderr or done.stdout).strip()
    hint = ""
    if "not permitted" in said or "Permission denied" in said:
        hint = "; this root may not do it, as in most containers: start the container with --privileged"
    elif any(words in said.lower() for words in ("unknown", "not supported", "no such file")):
        hint = "; this kernel seems to lack it: bridges, veth, network namespaces and the qdisc tbf are needed"
    raise ClusterError(f"{command!r} failed: {said}{hint}")
