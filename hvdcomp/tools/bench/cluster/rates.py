"""Rates of links as `tc` writes them, and the sizes of their token buckets."""

from __future__ import annotations

import hvdcomp.perfmodel.rates
from hvdcomp.tools.bench.cluster.errors import ClusterError

_SLOWEST, _FASTEST = 10**6, 10**11  # bits per second

# A full bucket passes the bytes of this time at once. Shorter messages are not slowed down, so it must be small; but
# the timer that refills the bucket is late by about ten microseconds, and the overflow is lost, so a smaller bucket
# would not reach 10 Gb/s.
_TOKEN_BUCKET_SECONDS = 200e-6
_SMALLEST_TOKEN_BUCKET = 3200  # bytes: two Ethernet frames of 1514, as a frame must always fit

# The longest wait of a frame. Long, so that frames of several senders to a receiver are seldom dropped.
QUEUE_MILLISECONDS = 50


def parse_rate(rate: str) -> int:
    """Bits per second of a rate such as "100mbit", "2.5gbit".

    Raises:
        ClusterError: the text is not a rate, or not between 1mbit and 100gbit.
    """
    try:
        bits = round(hvdcomp.perfmodel.rates.parse_rate(rate))
    except ValueError as error:
        raise ClusterError(str(error)) from None
    if not _SLOWEST <= bits <= _FASTEST:
        raise ClusterError(f"the rate {rate} is not between 1mbit and 100gbit")
    return bits


def token_bucket_bytes(bits_per_second: int) -> int:
    """The size of the token bucket, in bytes (tc calls it burst)."""
    return max(_SMALLEST_TOKEN_BUCKET, round(bits_per_second * _TOKEN_BUCKET_SECONDS / 8))
