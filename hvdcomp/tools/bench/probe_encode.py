"""What a compressor's encoding and decoding take, from a measured step and from an engine that exchanges with itself.
PyTorch."""

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
    """Those that a backward pass has left, by name."""
    named = workload.model.named_parameters()
    return {name: parameter.grad for name, parameter in named if parameter.grad is not None}


def latency_s(exchange: Exchange, network: Network, ranks: int) -> float:
    """What a step's collectives take without a payload."""

    def cost_of(kind: str, size: float, **what: Any) -> Any:
        return network.seconds(kind, size, ranks, **what)

    return float(sequential(0.0, 0.0, exchange, cost_of, payload=0.0).total)


def encode_time(
    compressor: Compressor, workload: Workload, exchange: Exchange, measured: float, everyone: Ranks
) -> EncodeTime:
    """What was measured with this number of ranks, with the part of it that grows with what is decoded.

    It is no less than what encoding and decoding alone take. What decoding a payload takes is measured with gathered
    ones, whose number grows with that of the ranks; scattered ones are decoded by the same code.
    """
    ranks, inside = everyone.size, exchange.ranks_per_node
    first, then = _alone(compressor, workload, everyone, ranks, inside)
    measured = max(measured, first + then)
    each, decoded = 0.0, float(exchange.decoded(ranks))
    if any(
        collective.kind == "allgather" and collective.among != "node"
        for collectives in exchange.rounds
        for collective in collectives
    ):
        gathering = _gathered(compressor)
        fewer, more = (_decoding(gathering, workload, everyone, size, inside) for size in (ranks, 2 * ranks))
        senders = ranks // inside if isinstance(compressor, TwoLevel) else ranks
        each = min(max(0.0, (more - fewer) / senders), measured / decoded)
    return EncodeTime(measured - each * decoded, decode_per_rank_s=each, source=SOURCE)


def _gathered(compressor: Compressor) -> Compressor:
    """The same method, gathered if it can be."""
    if isinstance(compressor, TwoLevel):
        return TwoLevel(_gathered(compressor.compressor))
    return in_each_way(compressor)[0]


def _decoding(compressor: Compressor, workload: Workload, everyone: Ranks, ranks: int, ranks_per_node: int) -> float:
    """Seconds that grow with the number of payloads decoded, and others that do not."""
    first, then = _alone(compressor, workload, everyone, ranks, ranks_per_node)
    # In two levels what other nodes sent is decoded before the last collective, which is within the node.
    return first + then if isinstance(compressor, TwoLevel) else then


def _alone(
    compressor: Compressor, workload: Workload, everyone: Ranks, ranks: int, ranks_per_node: int
) -> tuple[float, float]:
    """Seconds before and after the last collective of a step with the payloads of `ranks`, the mean of all ranks."""
    engine = Engine(LoopbackCommunicator(ranks, ranks_per_node), workload.tensors(), compressor)
    given = gradients(workload)
    taking = {name: gradient.clone() for name, gradient in given.items()}
    taken = []
    for _ in range(1 + _DECODES):
        for name, gradient in given.items():  # whose place results take, as in a training
            taking[name].copy_(gradient)
        engine.begin()
        engine.step(taking, in_place=True)
        wait_for(workload.device)
        engine.ledger.settle()  # a device's times are known only now
        cost = engine.ledger.last
        assert cost is not None
        taken.append([cost.encode_seconds or 0.0, cost.decode_seconds or 0.0])
    encode, decode = everywhere(np.median(taken[1:], axis=0), everyone).mean(axis=0)
    return float(encode), float(decode)
