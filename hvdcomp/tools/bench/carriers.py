"""Chooses the library that exchanges gradients in measured steps. Only the chosen library is imported."""

from __future__ import annotations

from hvdcomp.tools.bench.carrier import Carrier
from hvdcomp.tools.train.ranks import Ranks


def carrier_on(ranks: Ranks) -> Carrier:
    """Creates the `Carrier` of the library that connects these ranks."""
    if ranks.backend == "ddp":
        from hvdcomp.tools.bench.carrier_ddp import DDPCarrier

        return DDPCarrier(ranks)
    from hvdcomp.tools.bench.carrier_horovod import HorovodCarrier

    return HorovodCarrier(ranks)
