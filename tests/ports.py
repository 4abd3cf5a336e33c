"""Ports for servers that a test starts later, or lets others start."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack, suppress
from pathlib import Path

LOCAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(count: int) -> list[int]:
    """Ports that are free on all interfaces, and stay so: they are none of those that the kernel gives to whoever asks
    for any port, or connects, as launchers of ranks do many times.

    Where the kernel gives all ports, these are any that are free.

    Args:
        count: how many; they differ.
    """
    low, high = map(int, LOCAL_RANGE.read_text().split())
    candidates = [*range(1024, low), *range(high + 1, 65536)] or [*range(1024, 65536)]
    random.SystemRandom().shuffle(candidates)  # others may be looking for ports at the same time
    found: list[int] = []
    with ExitStack() as stack:
        while len(found) < count:
            port = candidates.pop()
            with suppress(OSError):  # it is taken
                stack.enter_context(socket.socket()).bind(("", port))
                found.append(port)
    return found
