"""What can happen to a link of an emulated cluster; done by a rank to the link of its own host."""

from __future__ import annotations

import os
import socket
import subprocess
import threading

CLUSTER = "HVDCOMP_FAULTS_CLUSTER"
"""In the environment of the ranks: the cluster's name."""

STALL_SECONDS = 30
LOSS = 0.05


def cut() -> None:
    """No packet comes or goes any more; the host does not notice that its cable leads nowhere."""
    _set_port(os.environ[CLUSTER], _this_host(), "nomaster")


def mend(cluster: str, host: int) -> None:
    """What `cut` did is undone."""
    _set_port(cluster, host, "master bridge")


def stall() -> None:
    """`cut`, for `STALL_SECONDS`."""
    cut()
    threading.Timer(STALL_SECONDS, mend, [os.environ[CLUSTER], _this_host()]).start()


def lose_packets() -> None:
    """From now on each packet that comes is lost by chance, `LOSS` of all."""
    words = ["iptables", "-A", "INPUT", "-i", "eth0", "-m", "statistic", "--mode", "random"]
    subprocess.run([*words, "--probability", str(LOSS), "-j", "DROP"], check=True)


def _set_port(cluster: str, host: int, arguments: str) -> None:
    """Of the switch, where the host's cable ends."""
    words = ["ip", "-n", f"hvdcomp-{cluster}-switch", "link", "set", f"port{host}", *arguments.split()]
    subprocess.run(words, check=True)


def _this_host() -> int:
    return int(socket.gethostname().removeprefix("host"))
