"""How computing and exchanging overlap: two schedules, as hvdcomp and Horovod run them.

Overlapped (dense and casts): Horovod sends buckets while the backward pass goes on. Sequential (all else): hvdcomp's
engine encodes, exchanges and decodes after the backward pass. After Agarwal et al. 2022, section 4.1 and appendix B.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from hvdcomp.perfmodel.exchanges import Exchange
from hvdcomp.perfmodel.network import Seconds

Array = Any
CostOf = Callable[[str, Any], Seconds]  # time of a collective of a kind, for the bytes of one rank


class Buckets(NamedTuple):
    """How bytes are cut: `number` buckets, all of `size` bytes but the last, of `last`."""

    number: int
    size: float
    last: float


class Parts(NamedTuple):
    """The parts that a step's time is the sum of, in s; of communication, only what is not hidden.

    `waits` says whether the backward pass is over before what was to hide behind it, so that a faster computer would
    only wait longer.
    """

    compute: Array
    encode: Array
    transfer: Array
    latency: Array
    waits: Array

    @property
    def total(self) -> Array:
        """Time of the step."""
        return self.compute + self.encode + self.transfer + self.latency


def cut(total: float, bucket_bytes: float) -> Buckets:
    """Cuts bytes into full buckets and a last one that is not empty."""
    number = max(1, int(np.ceil(total / bucket_bytes)))
    size = min(bucket_bytes, total)
    return Buckets(number, size, total - (number - 1) * size)


def overlapped(compute: Array, backward: Array, gamma: Array, buckets: Buckets, cost_of: CostOf, ranks: Array) -> Parts:
    """max(gamma backward, (k - 1) T(b)) + T(last), and what else is computed.

    All but the last bucket travel during the backward pass, and slow it by gamma. One rank exchanges nothing and is
    not slowed.

    Args:
        compute: seconds of a step without communication.
        backward: seconds of that in which communication can hide.
        gamma: slow-down of the backward pass.
        buckets: what is sent.
        cost_of: the network.
        ranks: how many there are.
    """
    slowed = np.where(np.asarray(ranks) > 1, gamma, 1.0) * backward
    hidden = cost_of("allreduce", buckets.size) * (buckets.number - 1)
    last = cost_of("allreduce", buckets.last)
    beyond = np.maximum(hidden.total - slowed, 0)
    # What sticks out is of the same mixture as all of it.
    share = beyond / np.where(hidden.total > 0, hidden.total, 1)
    seen = hidden * share + last
    return Parts(compute - backward + slowed, np.zeros_like(seen.total), seen.transfer, seen.latency, beyond > 0)


def sequential(compute: Array, encode: Array, exchange: Exchange, cost_of: CostOf, payload: Array = 1.0) -> Parts:
    """compute + encode and decode + every collective, one after the other.

    Args:
        compute: seconds of a step without communication.
        encode: seconds of encoding and decoding.
        exchange: what is sent.
        cost_of: the network.
        payload: by how much the bytes are multiplied.
    """
    spent = Seconds(0.0, 0.0)
    for collectives in exchange.rounds:
        for collective in collectives:
            spent = spent + cost_of(collective.kind, collective.bytes * payload)
    return Parts(compute, encode, spent.transfer, spent.latency, np.False_)
