"""Measures the throughput of a TCP connection between two hosts of a cluster, to check the links.

If this file is run as a program, it is one end of the connection: `throughput.py receive SECONDS` or `throughput.py
send ADDRESS`.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the programs at the two ends do not need this import, and must start quickly
    from hvdcomp.tools.bench.cluster.cluster import Cluster

_PORT = 5001
_PIECE = 1 << 20  # number of bytes passed to the kernel at a time
_WARM_UP = 0.5  # seconds before the measurement, while TCP's window grows
_TIMEOUT = 10.0


def measure(cluster: Cluster, seconds: float = 3.0) -> float:
    """Sends from host0 to host1 for some seconds. Returns the bits of payload that arrived per second.

    Raises:
        RuntimeError: if one end of the connection failed.
    """
    from hvdcomp.tools.bench.cluster.namespaces import address

    program = [sys.executable, __file__]
    with cluster.start(1, [*program, "receive", str(seconds)], stdout=subprocess.PIPE) as receiver:
        assert receiver.stdout is not None
        receiver.stdout.readline()  # waits until the receiver listens
        with cluster.start(0, [*program, "send", address(1)]):
            answer = receiver.stdout.readline()
    if not answer:
        raise RuntimeError("the receiving end of the connection failed; see its error message above")
    return float(answer)


def receive(seconds: float) -> None:
    """Listens, and prints that it listens. Then receives from a sender, and prints the bits per second."""
    with socket.create_server(("", _PORT)) as server:
        print("listening", flush=True)
        server.settimeout(_TIMEOUT)
        connection, _ = server.accept()
    with connection:
        connection.settimeout(_TIMEOUT)
        _drain(connection, _WARM_UP)
        start = time.perf_counter()
        received = _drain(connection, seconds)
        print(8 * received / (time.perf_counter() - start))


def _drain(connection: socket.socket, seconds: float) -> int:
    buffer = bytearray(_PIECE)
    received, end = 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        received += connection.recv_into(buffer)
    return received


def send(address: str) -> None:
    """Sends zeros until the other end closes the connection."""
    piece = bytes(_PIECE)
    with socket.create_connection((address, _PORT), timeout=_TIMEOUT) as connection:
        try:
            while True:
                connection.sendall(piece)
        except (ConnectionResetError, BrokenPipeError):
            pass


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive(float(sys.argv[2]))
    else:
        send(sys.argv[2])
