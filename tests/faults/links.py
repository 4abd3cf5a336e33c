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
    _switch("link set {port} nomaster")


def stall() -> None:
    """The same, for `STALL_SECONDS`."""
    cut()
    threading.Timer(STALL_SECONDS, _switch, ["link set {port} master bridge"]).start()


def lose_packets() -> None:
    """From now on each packet that comes is lost by chance, `LOSS` of all."""
    words = ["iptables", "-A", "INPUT", "-i", "eth0", "-m", "statistic", "--mode", "random"]
    subprocess.run([*words, "--probability", str(LOSS), "-j", "DROP"], check=True)


def _switch(arguments: str) -> None:
    host = socket.gethostname().removeprefix("host")
    words = arguments.format(port=f"port{host}").split()
    subprocess.run(["ip", "-n", f"hvdcomp-{os.environ[CLUSTER]}-switch", *words], check=True)
