"""Rates of links in the notation of `tc`, and the sizes of their token buckets."""

from __future__ import annotations

import hvdcomp.perfmodel.rates
from hvdcomp.tools.bench.cluster.errors import ClusterError

_SLOWEST, _FASTEST = 10**6, 10**11  # bits per second

# The size of a token bucket, given as the time in which the link sends a full bucket at its rate. A full token bucket
# sends all its bytes immediately, so messages that are shorter than the bucket are not limited to the rate. The bucket
# must therefore be small. However, the timer that refills the bucket is late by about ten microseconds, and tokens that
# do not fit are lost. With a smaller bucket, a link would not reach 10 Gb/s.
_TOKEN_BUCKET_SECONDS = 200e-6
_SMALLEST_TOKEN_BUCKET = 3200  # bytes; two Ethernet frames of 1514 bytes, because a frame must always fit

# The longest time that a frame may wait. It is long, so that frames are rarely dropped when several hosts send to one
# receiver.
QUEUE_MILLISECONDS = 50


def parse_rate(rate: str) -> int:
    """The bits per second of a rate such as "100mbit" or "2.5gbit".

    Raises:
        ClusterError: if the text is not a rate, or the rate is not between 1mbit and 100gbit.
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
