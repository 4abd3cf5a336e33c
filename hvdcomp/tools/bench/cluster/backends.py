"""The environment variables with which the ranks of a run find each other. They are the variables that each backend's
launcher would set.

A backend is a function that is called on host0. The function may start a server on host0, to which the ranks connect.
Its arguments are the number of hosts and the number of ranks on each host. It returns the environment variables of
every rank, in the order of ranks. The ranks of a host have consecutive numbers.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Callable

from hvdcomp.tools.bench.cluster.errors import ClusterError
from hvdcomp.tools.bench.cluster.namespaces import address

_INTERFACE = "eth0"
# The ports from torchrun's default port up to the kernel's ephemeral ports. Ephemeral ports are excluded: a rank that
# connects before the store exists could get the store's port for its own end of the connection.
_STORE_PORTS = range(29500, 32768)


def _horovod(hosts: int, slots: int) -> list[dict[str, str]]:
    """The environment variables that horovodrun would set on each rank, with Gloo.

    Raises:
        ClusterError: if Horovod is not installed.
    """
    try:
        from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
        from horovod.runner.http.http_server import RendezvousServer
    except ImportError as error:
        raise ClusterError(f"Horovod is not installed for {sys.executable} ({error}). Run `make setup`") from None
    server = RendezvousServer(0)
    port = server.start()  # the server runs in a thread until this process ends
    places = get_host_assignments(parse_hosts(",".join(f"host{host}:{slots}" for host in range(hosts))), hosts * slots)
    server.init(places)
    common = {
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": _INTERFACE,
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": address(0),
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        # This timeout is long enough for the slowest rank to import its framework.
        "HOROVOD_GLOO_TIMEOUT_SECONDS": os.environ.get("HOROVOD_GLOO_TIMEOUT_SECONDS", "120"),
    }
    # HOROVOD_HOSTNAME, HOROVOD_RANK, HOROVOD_SIZE, HOROVOD_LOCAL_RANK, ...
    by_rank = [{f"HOROVOD_{key.upper()}": str(value) for key, value in vars(place).items()} for place in places]
    return [{**common, **rank_variables} for rank_variables in by_rank]


def _torch(hosts: int, slots: int) -> list[dict[str, str]]:
    """The variables that torchrun would set, for `torch.distributed.init_process_group("gloo")`. Rank 0 creates the
    store."""
    common = {
        "WORLD_SIZE": hosts * slots,
        "LOCAL_WORLD_SIZE": slots,
        "GROUP_WORLD_SIZE": hosts,
        "MASTER_ADDR": address(0),
        "MASTER_PORT": _free_port(),
        "GLOO_SOCKET_IFNAME": _INTERFACE,
        "TORCHELASTIC_RUN_ID": "emulated",  # programs recognize torchrun by this variable
        "TORCHELASTIC_USE_AGENT_STORE": False,
    }
    by_rank = [{"RANK": rank, "LOCAL_RANK": rank % slots, "GROUP_RANK": rank // slots} for rank in range(hosts * slots)]
    return [{key: str(value) for key, value in {**common, **rank_variables}.items()} for rank_variables in by_rank]


BACKENDS: dict[str, Callable[[int, int], list[dict[str, str]]]] = {"horovod": _horovod, "torch": _torch}


def _free_port() -> int:
    """The number of a free port on this host.

    Raises:
        ClusterError: if no port is free.
    """
    for port in _STORE_PORTS:
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
    raise ClusterError(f"all ports from {_STORE_PORTS[0]} to {_STORE_PORTS[-1]} of the emulated host host0 are in use")
