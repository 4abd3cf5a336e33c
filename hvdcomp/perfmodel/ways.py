"""The exchanges that a method can use, and the encode time with each exchange. Payloads are gathered or scattered, and
ranks exchange them with all ranks or only with ranks of other nodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TypeGuard

import numpy as np

from hvdcomp.arrays.types import dtype_bytes
from hvdcomp.compressors import Compressor, TensorInfo
from hvdcomp.compressors.gathering import WAYS, Gathering
from hvdcomp.compressors.node_shares import largest_share
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.compressors.two_level import TwoLevel, within
from hvdcomp.errors import SpecError
from hvdcomp.perfmodel.compute import EncodeTime
from hvdcomp.perfmodel.predict import UNCOMPRESSED


def in_each_way(compressor: Compressor) -> tuple[Compressor, ...]:
    """The variants of a method with `exchange=gather` and with `exchange=scatter`. If the method has no such choice, or
    uses an allreduce, the result is only the method itself.

    Example:
        >>> from hvdcomp import FP16, QSGD
        >>> [str(method) for method in in_each_way(QSGD(bits=4))]
        ['qsgd:bits=4', 'qsgd:bits=4,exchange=scatter']
        >>> [str(method) for method in in_each_way(FP16())]
        ['fp16']
        >>> [str(method) for method in in_each_way(FP16(exchange="auto"))]
        ['fp16:exchange=gather', 'fp16:exchange=scatter']
    """
    if not _is_decoded_by_ranks(compressor):
        return (compressor,)
    return tuple(compressor.with_exchange(way) for way in WAYS)


def _is_decoded_by_ranks(compressor: Compressor) -> TypeGuard[Gathering]:
    """Whether ranks decode the payloads of other ranks. If not, an allreduce adds up the payloads."""
    return isinstance(compressor, Gathering) and compressor.wire_dtype("float32") is None


def reduces_shards(compressor: Compressor) -> bool:
    """Whether a method other than a cast can be used in the reduce-scatter of a sharded model (`hvdcomp.fsdp`). Casts
    can always be used."""
    return _is_decoded_by_ranks(compressor) and not (compressor.of_matrices or compressor.keeps_state)


def in_two_levels(compressor: Compressor) -> Compressor | None:
    """The method in a two-level exchange; None if the method only casts, or cannot be used in a two-level exchange.

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
    """The encode time of a compressor: the known time, or else an estimate from a known time.

    - The time for each encoded payload, and the time for each decoded payload, are assumed to be the same with
      `exchange=gather` and with `exchange=scatter`. The number of decoded payloads follows from the exchange, and
      matters if the time to decode a payload is known (`decode_per_rank_s`). Other costs of scattering, such as
      additional passes for error feedback, are not estimated.
    - In a two-level exchange, a rank encodes and decodes its share of the model. The time to cut and join shards is not
      estimated.
    - The time of a cast is estimated from the time of dense gradients, in proportion to the bytes.

    Args:
        compressor: the compressor.
        known: the known encode times, by spec.
        tensors: the model's tensors. They are needed for methods that compress whole matrices in a two-level exchange.
        ranks_per_node: number of ranks per node. It is needed for two-level exchanges.

    Returns:
        The encode time; None if it is unknown and cannot be estimated.
    """
    own = known.get(str(compressor))
    if own is None and isinstance(compressor, TwoLevel) and ranks_per_node is not None:
        if (flat := encode_time_of(compressor.compressor, known)) is None:
            return None
        share = 1 / ranks_per_node
        if compressor.of_matrices and tensors:
            share = largest_share([tensor.size for tensor in tensors], ranks_per_node)
        source = (
            f"estimated: {share:.0%} of the time of the compressor inside two_level(), because each rank compresses "
            "this share of the model"
        )
        return dataclasses.replace(flat.part(share), source=source, estimated=True)
    if own is None and UNCOMPRESSED in known and (wire := compressor.wire_dtype("float32")) is not None:
        share = dtype_bytes(wire) / dtype_bytes("float32")
        source = "estimated from the time of dense gradients, in proportion to the bytes"
        return dataclasses.replace(known[UNCOMPRESSED].part(share), source=source, estimated=True)
    if own is not None or not _is_decoded_by_ranks(compressor):
        return own
    for way in (*WAYS, "auto"):
        spec = str(compressor.with_exchange(way))
        if spec in known:
            source = (
                "estimated from the time of the same method with another exchange, by the number of payloads that a "
                "rank decodes"
            )
            return dataclasses.replace(known[spec], source=source, estimated=True)
    return None


def encode_time_at(
    compressor: Compressor,
    factor: float,
    known: Mapping[str, EncodeTime],
    tensors: Sequence[TensorInfo] = (),
    ranks_per_node: int | None = None,
) -> EncodeTime | None:
    """The encode time of a compressor after its level is multiplied by `factor`.

    The time is interpolated between levels with known times. Beyond these levels, it is the time of the nearest level.
    If the compressor has no level, or combines methods without a common level, it is the time of the compressor itself.

    Args:
        compressor: the compressor at its current level.
        factor: factor by which the level is multiplied.
        known, tensors, ranks_per_node: as in `encode_time_of`.

    Returns:
        The encode time; None if it is unknown at every level.
    """
    times = {}
    for method in map(parse_compressor, known) if compressor.level is not None else ():
        is_alike = within(method).name == within(compressor).name and method.level_name == compressor.level_name
        if is_alike and method.level is not None:
            alike = compressor.at_level(method.level)
            if (time := encode_time_of(alike, known, tensors, ranks_per_node)) is not None:
                times[method.level] = time
    if compressor.level is None or not times:
        return encode_time_of(compressor, known, tensors, ranks_per_node)
    target, levels = compressor.level * factor, sorted(times)

    def between(of: Callable[[EncodeTime], float]) -> float:
        return float(np.interp(target, levels, [of(times[level]) for level in levels]))

    return EncodeTime(
        between(lambda time: time.encode_s),
        between(lambda time: time.decode_s),
        between(lambda time: time.decode_per_rank_s),
    )
