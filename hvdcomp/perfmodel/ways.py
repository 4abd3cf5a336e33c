"""The ways in which a method's payloads can be exchanged, gathered or scattered, and the encode time of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from hvdcomp.compressors import Compressor
from hvdcomp.compressors.gathering import Gathering
from hvdcomp.perfmodel.compute import EncodeTime

WAYS = ("gather", "scatter")


def in_each_way(compressor: Compressor) -> tuple[Compressor, ...]:
    """The method gathered and scattered; the compressor itself where there is no choice.

    Example:
        >>> from hvdcomp import QSGD
        >>> [str(one) for one in in_each_way(QSGD(bits=4))]
        ['qsgd:bits=4', 'qsgd:bits=4,exchange=scatter']
    """
    if not isinstance(compressor, Gathering):
        return (compressor,)
    return tuple(dataclasses.replace(compressor, exchange=way) for way in WAYS)


def encode_time_of(compressor: Compressor, known: Mapping[str, EncodeTime]) -> EncodeTime | None:
    """The encode time of a compressor: its own, or else an estimate from the same method exchanged in another way.

    Gathered and scattered payloads are taken to need the same time to encode. How many are decoded follows from the
    exchange; that counts where the known time says what decoding one of them takes (`decode_per_rank_s`). What
    scattering takes beside, such as passes over chunks that error feedback needs, is not in the estimate.

    Args:
        known: by spec.

    Returns:
        None if neither is known.
    """
    if (own := known.get(str(compressor))) is not None or not isinstance(compressor, Gathering):
        return own
    for way in (*WAYS, "auto"):
        other = str(dataclasses.replace(compressor, exchange=way))
        if other in known:
            source = f"estimated from that of {other}, by the number of payloads that are decoded"
            return dataclasses.replace(known[other], source=source, estimated=True)
    return None
