"""The libraries that carry gradients while steps are measured; one is imported when it is chosen."""

from __future__ import annotations

from hvdcomp.tools.bench.carrier import Carrier
from hvdcomp.tools.train.ranks import Ranks


def carrier_on(ranks: Ranks) -> Carrier:
    """The one that connects these ranks."""
    if ranks.backend == "ddp":
        from hvdcomp.tools.bench.carrier_ddp import DDPCarrier

        return DDPCarrier(ranks)
    from hvdcomp.tools.bench.carrier_horovod import HorovodCarrier

    return HorovodCarrier(ranks)
