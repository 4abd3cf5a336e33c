"""Determines the time that a compressor needs to encode and decode, from a measured step and from an engine without a
network. This module needs PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hvdcomp import TwoLevel
from hvdcomp.communicators import LoopbackCommunicator
from hvdcomp.compressors import Compressor
from hvdcomp.exchange import Engine
from hvdcomp.perfmodel.compute import EncodeTime
from hvdcomp.perfmodel.exchanges import Exchange
from hvdcomp.perfmodel.network import Network
from hvdcomp.perfmodel.schedule import sequential
from hvdcomp.perfmodel.ways import in_each_way
from hvdcomp.tools.bench.marks import wait_for
from hvdcomp.tools.bench.probe_steps import everywhere
from hvdcomp.tools.bench.workload import Workload
from hvdcomp.tools.train.ranks import Ranks

SOURCE = "hvdcomp calibrate"
_DECODES = 3


def gradients(workload: Workload) -> dict[str, torch.Tensor]:
    """The gradients of the last backward pass, by name."""
    named = workload.model.named_parameters()
    return {name: parameter.grad for name, parameter in named if parameter.grad is not None}


def latency_s(exchange: Exchange, network: Network, ranks: int) -> float:
    """The seconds that the collectives of a step take if they have no payload."""

    def cost_of(kind: str, size: float, **options: Any) -> Any:
        return network.seconds(kind, size, ranks, **options)

    return float(sequential(0.0, 0.0, exchange, cost_of, payload=0.0).total)


def encode_time(
    compressor: Compressor, workload: Workload, exchange: Exchange, measured: float, all_ranks: Ranks
) -> EncodeTime:
    """The time of encoding and decoding with this number of ranks, and the part of this time that grows with the number
    of decoded payloads.

    The result is never below the time of encoding and decoding without an exchange. The time to decode a payload is
    measured with exchange "gather", in which the number of payloads grows with the number of ranks. The result also
    applies to exchange "scatter", because the same code decodes its payloads.

    Args:
        measured: the measured seconds of encoding and of decoding in a step, including the time in which ranks wait for
            each other.
    """
    ranks, inside = all_ranks.size, exchange.ranks_per_node
    first, then = _alone(compressor, workload, all_ranks, ranks, inside)
    measured = max(measured, first + then)
    per_payload_s, decoded = 0.0, float(exchange.decoded(ranks))
    if any(
        collective.kind == "allgather" and collective.among != "node"
        for collectives in exchange.rounds
        for collective in collectives
    ):
        gathering = _gathered(compressor)
        fewer, more = (_decoding(gathering, workload, all_ranks, size, inside) for size in (ranks, 2 * ranks))
        senders = ranks // inside if isinstance(compressor, TwoLevel) else ranks
        per_payload_s = min(max(0.0, (more - fewer) / senders), measured / decoded)
    return EncodeTime(measured - per_payload_s * decoded, decode_per_rank_s=per_payload_s, source=SOURCE)


def _gathered(compressor: Compressor) -> Compressor:
    """The compressor with the same settings but exchange "gather", if the compressor supports this exchange."""
    if isinstance(compressor, TwoLevel):
        return TwoLevel(_gathered(compressor.compressor))
    return in_each_way(compressor)[0]


def _decoding(compressor: Compressor, workload: Workload, all_ranks: Ranks, ranks: int, ranks_per_node: int) -> float:
    """The seconds of decoding the payloads of `ranks` ranks, including work that does not grow with the number of
    payloads."""
    first, then = _alone(compressor, workload, all_ranks, ranks, ranks_per_node)
    # In a two-level exchange, payloads from other nodes are decoded before the last collective, which is within the
    # node.
    return first + then if isinstance(compressor, TwoLevel) else then


def _alone(
    compressor: Compressor, workload: Workload, all_ranks: Ranks, ranks: int, ranks_per_node: int
) -> tuple[float, float]:
    """The seconds before and after the last collective of a step with the payloads of `ranks` ranks, as means over all
    ranks."""
    engine = Engine(LoopbackCommunicator(ranks, ranks_per_node), workload.tensors(), compressor)
    originals = gradients(workload)
    copies = {name: gradient.clone() for name, gradient in originals.items()}
    times = []
    for _ in range(1 + _DECODES):
        for name, gradient in originals.items():  # the results overwrite the copies, as in training
            copies[name].copy_(gradient)
        engine.begin()
        engine.step(copies, in_place=True)
        wait_for(workload.device)
        engine.ledger.settle()  # waits until the times on the device are known
        cost = engine.ledger.last
        assert cost is not None
        times.append([cost.encode_seconds or 0.0, cost.decode_seconds or 0.0])
    encode, decode = everywhere(np.median(times[1:], axis=0), all_ranks).mean(axis=0)
    return float(encode), float(decode)
