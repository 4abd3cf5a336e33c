"""Rates of links as `tc` spells them, and how a token bucket is to be sized for them."""

from __future__ import annotations

import hvdcomp.perfmodel.rates
from hvdcomp.tools.bench.cluster.errors import ClusterError

_SLOWEST, _FASTEST = 10**6, 10**11  # bits per second

# A bucket that has filled up lets this much time's worth of bytes pass at once. Short messages of less than that are
# not slowed down, so it has to be small; the timer that refills the bucket comes late by some ten microseconds, and
# what would not fit into the bucket until then is lost, so it cannot be smaller for 10 Gb/s to be reached.
_BUCKET_SECONDS = 200e-6
_SMALLEST_BUCKET = 3200  # bytes: two Ethernet frames of 1514, as one must always fit

# How long a frame may wait for its turn. Long, so that frames of several senders to one receiver are seldom dropped.
QUEUE_MILLISECONDS = 50


def parse_rate(rate: str) -> int:
    """Bits per second of a rate such as "100mbit", "2.5gbit".

    Raises:
        ClusterError: if it is not one, or not between 1mbit and 100gbit.
    """
    try:
        bits = round(hvdcomp.perfmodel.rates.parse_rate(rate))
    except ValueError as error:
        raise ClusterError(str(error)) from None
    if not _SLOWEST <= bits <= _FASTEST:
        raise ClusterError(f"the rate {rate} is not between 1mbit and 100gbit")
    return bits


def bucket_bytes(bits_per_second: int) -> int:
    """The size of the token bucket, in bytes (tc calls it burst)."""
    return max(_SMALLEST_BUCKET, round(bits_per_second * _BUCKET_SECONDS / 8))
