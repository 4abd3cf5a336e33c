"""What the ranks of a run find each other by: for each backend, the variables that its launcher would give them.

A backend is a function that is called on host0, where it may start what ranks meet at. It is given the number of hosts
and of ranks on each, and returns the variables of every rank, in the order of ranks; a host's ranks stand together.
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
# From torchrun's to those that the kernel gives out by itself: a rank that asks for the store before it is there must
# not be given the store's own port to ask from.
_STORE_PORTS = range(29500, 32768)


def _horovod(hosts: int, slots: int) -> list[dict[str, str]]:
    """As horovodrun does it, with Gloo.

    Raises:
        ClusterError: if Horovod is not installed.
    """
    try:
        from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
        from horovod.runner.http.http_server import RendezvousServer
    except ImportError as error:
        raise ClusterError(f"Horovod is not installed for {sys.executable} ({error}); run `make setup`") from None
    server = RendezvousServer(0)
    port = server.start()  # in a thread, to the end of this process
    places = get_host_assignments(parse_hosts(",".join(f"host{host}:{slots}" for host in range(hosts))), hosts * slots)
    server.init(places)
    common = {
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": _INTERFACE,
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": address(0),
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        # Until the slowest rank has imported its framework.
        "HOROVOD_GLOO_TIMEOUT_SECONDS": os.environ.get("HOROVOD_GLOO_TIMEOUT_SECONDS", "120"),
    }
    # HOROVOD_HOSTNAME, HOROVOD_RANK, HOROVOD_SIZE, HOROVOD_LOCAL_RANK, ...
    own = [{f"HOROVOD_{key.upper()}": str(value) for key, value in vars(place).items()} for place in places]
    return [{**common, **one} for one in own]


def _torch(hosts: int, slots: int) -> list[dict[str, str]]:
    """As torchrun does it, for `torch.distributed.init_process_group("gloo")`: rank 0 makes the store."""
    common = {
        "WORLD_SIZE": hosts * slots,
        "LOCAL_WORLD_SIZE": slots,
        "GROUP_WORLD_SIZE": hosts,
        "MASTER_ADDR": address(0),
        "MASTER_PORT": _free_port(),
        "GLOO_SOCKET_IFNAME": _INTERFACE,
        "TORCHELASTIC_RUN_ID": "emulated",  # by which programs know that something like torchrun has started them
        "TORCHELASTIC_USE_AGENT_STORE": False,
    }
    own = [{"RANK": rank, "LOCAL_RANK": rank % slots, "GROUP_RANK": rank // slots} for rank in range(hosts * slots)]
    return [{key: str(value) for key, value in {**common, **one}.items()} for one in own]


BACKENDS: dict[str, Callable[[int, int], list[dict[str, str]]]] = {"horovod": _horovod, "torch": _torch}


def _free_port() -> int:
    """A port of this host at which nobody listens.

    Raises:
        ClusterError: if there is none.
    """
    for port in _STORE_PORTS:
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
    raise ClusterError(f"no port of host0 from {_STORE_PORTS[0]} to {_STORE_PORTS[-1]} is free")
