"""An emulated cluster: several hosts on a single machine, connected by links with a chosen rate.

Each host is a Linux network namespace with its own Ethernet interface. A virtual cable connects the interface to a
switch. A token bucket filter at each end of the cable limits the rate. Real Horovod or torch.distributed runs on the
hosts, over real TCP. docs/emulated-cluster.md explains what the cluster is useful for, and which properties of a real
cluster it does not emulate.

    with Cluster(hosts=4, rate="1gbit") as cluster:
        code = cluster.run([sys.executable, "train.py"])
"""

from hvdcomp.tools.bench.cluster.cluster import Cluster
from hvdcomp.tools.bench.cluster.errors import ClusterError
from hvdcomp.tools.bench.cluster.rates import parse_rate

__all__ = ["Cluster", "ClusterError", "parse_rate"]
