"""An emulated cluster: several hosts on this one machine, joined by links of a chosen rate.

Each host is a Linux network namespace with an Ethernet interface of its own; a token bucket filter at both ends of its
cable holds it to the rate. Real Horovod or torch.distributed runs on it, over real TCP. What it is good for, and what
it does not emulate, is in docs/emulated-cluster.md.

    with Cluster(hosts=4, rate="1gbit") as cluster:
        code = cluster.run([sys.executable, "train.py"])
"""

from hvdcomp.tools.bench.cluster.cluster import Cluster
from hvdcomp.tools.bench.cluster.errors import ClusterError
from hvdcomp.tools.bench.cluster.rates import parse_rate

__all__ = ["Cluster", "ClusterError", "parse_rate"]
