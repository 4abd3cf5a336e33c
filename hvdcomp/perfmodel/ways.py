"""The ways in which a method's payloads can be exchanged, and the encode time of each: gathered or scattered, among all
ranks or in two levels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TypeGuard

import numpy as np

from hvdcomp.arrays.types import dtype_bytes
from hvdcomp.compressors import Compressor, TensorInfo
from hvdcomp.compressors.gathering import Gathering
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.compressors.two_level import TwoLevel, within
from hvdcomp.compressors.two_level_bucket import largest_share
from hvdcomp.errors import SpecError
from hvdcomp.perfmodel.compute import EncodeTime
from hvdcomp.perfmodel.predict import UNCOMPRESSED

WAYS = ("gather", "scatter")


def in_each_way(compressor: Compressor) -> tuple[Compressor, ...]:
    """The method gathered and scattered; the compressor itself where there is no choice, or an allreduce is asked for.

    Example:
        >>> from hvdcomp import FP16, QSGD
        >>> [str(one) for one in in_each_way(QSGD(bits=4))]
        ['qsgd:bits=4', 'qsgd:bits=4,exchange=scatter']
        >>> [str(one) for one in in_each_way(FP16())]
        ['fp16']
        >>> [str(one) for one in in_each_way(FP16(exchange="auto"))]
        ['fp16:exchange=gather', 'fp16:exchange=scatter']
    """
    if not _travels_whole(compressor):
        return (compressor,)
    return tuple(dataclasses.replace(compressor, exchange=way) for way in WAYS)


def _travels_whole(compressor: Compressor) -> TypeGuard[Gathering]:
    """Whether ranks decode each other's payloads, and no allreduce adds them up."""
    return isinstance(compressor, Gathering) and compressor.wire_dtype("float32") is None


def in_two_levels(compressor: Compressor) -> Compressor | None:
    """The method between nodes alone; None where it cannot stand there, or needs no compressor at all.

    Example:
        >>> from hvdcomp import QSGD
        >>> str(in_two_levels(QSGD(bits=4)))
        'two_level(qsgd:bits=4)'
    """
    if compressor.wire_dtype("float32") is not None:
        return None
    try:
        return TwoLevel(compressor)
    except SpecError:
        return None


def encode_time_of(
    compressor: Compressor,
    known: Mapping[str, EncodeTime],
    tensors: Sequence[TensorInfo] = (),
    ranks_per_node: int | None = None,
) -> EncodeTime | None:
    """The encode time of a compressor: its own, or else an estimate from the same method exchanged in another way.

    Gathered and scattered payloads are taken to need the same time to encode. How many are decoded follows from the
    exchange; that counts where the known time says what decoding one of them takes (`decode_per_rank_s`). What
    scattering takes beside, such as passes over chunks that error feedback needs, is not in the estimate. In two levels
    a rank encodes and decodes its share of the model; what is dealt out and put together again is not in the estimate.
    What a cast takes is taken to be that of dense gradients, in proportion to the bytes.

    Args:
        known: by spec.
        tensors: of the model; they matter to methods that get whole ones in two levels.
        ranks_per_node: for two levels.

    Returns:
        None if neither is known.
    """
    own = known.get(str(compressor))
    if own is None and isinstance(compressor, TwoLevel) and ranks_per_node is not None:
        if (flat := encode_time_of(compressor.compressor, known)) is None:
            return None
        share = 1 / ranks_per_node
        if compressor.of_matrices and tensors:
            share = largest_share([tensor.size for tensor in tensors], ranks_per_node)
        source = f"estimated: {share:.0%} of that of the compressor within, as a rank has so much of the model"
        return dataclasses.replace(flat.part(share), source=source, estimated=True)
    if own is None and UNCOMPRESSED in known and (wire := compressor.wire_dtype("float32")) is not None:
        share = dtype_bytes(wire) / dtype_bytes("float32")
        source = "estimated from that of dense gradients, by the bytes"
        return dataclasses.replace(known[UNCOMPRESSED].part(share), source=source, estimated=True)
    if own is not None or not _travels_whole(compressor):
        return own
    for way in (*WAYS, "auto"):
        other = str(dataclasses.replace(compressor, exchange=way))
        if other in known:
            source = "estimated from that of the same method exchanged in another way, by the payloads that are decoded"
            return dataclasses.replace(known[other], source=source, estimated=True)
    return None


def encode_time_at(
    compressor: Compressor,
    factor: float,
    known: Mapping[str, EncodeTime],
    tensors: Sequence[TensorInfo] = (),
    ranks_per_node: int | None = None,
) -> EncodeTime | None:
    """The encode time of a compressor at so many times its level.

    Between levels whose times are known, those are interpolated; beyond them that of the nearest counts. So it does
    where only one is known, and that of the compressor itself where not all of its methods have the same level.

    Args:
        known, tensors, ranks_per_node: as of `encode_time_of`.

    Returns:
        None if that of no level is known.
    """
    times = {}
    for other in map(parse_compressor, known) if compressor.level is not None else ():
        is_alike = within(other).name == within(compressor).name and other.level_name == compressor.level_name
        if is_alike and other.level is not None:
            alike = compressor.at_level(other.level)
            if (time := encode_time_of(alike, known, tensors, ranks_per_node)) is not None:
                times[other.level] = time
    if compressor.level is None or not times:
        return encode_time_of(compressor, known, tensors, ranks_per_node)
    wanted, levels = compressor.level * factor, sorted(times)

    def between(of: Callable[[EncodeTime], float]) -> float:
        return float(np.interp(wanted, levels, [of(times[level]) for level in levels]))

    return EncodeTime(
        between(lambda time: time.encode_s),
        between(lambda time: time.decode_s),
        between(lambda time: time.decode_per_rank_s),
    )
