"""An emulated cluster: several hosts on this one machine, joined by links of a chosen rate.

Each host is a Linux network namespace with its own Ethernet interface; a token bucket filter at both ends of its cable
limits the rate. Real Horovod or torch.distributed runs on it, over real TCP. docs/emulated-cluster.md describes its
uses, and what it does not emulate.

    with Cluster(hosts=4, rate="1gbit") as cluster:
        code = cluster.run([sys.executable, "train.py"])
"""

from hvdcomp.tools.bench.cluster.cluster import Cluster
from hvdcomp.tools.bench.cluster.errors import ClusterError
from hvdcomp.tools.bench.cluster.rates import parse_rate

__all__ = ["Cluster", "ClusterError", "parse_rate"]
