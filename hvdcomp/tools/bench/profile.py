"""Profiles a user's training program: measures the time of its steps, and predicts their time with each method. This
module needs PyTorch.

The program's own steps show how long it computes, and when each gradient is ready. Then all ranks stop in the same
step. They measure the network, and the time that each method needs to encode and decode copies of the gradients of this
step. The training results do not change.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from hvdcomp.communicators import Communicator
from hvdcomp.compressors import Compressor, NoCompression
from hvdcomp.exchange import Engine
from hvdcomp.perfmodel.advice import Adviser
from hvdcomp.perfmodel.calibration import OTHER, Calibration, ModelFacts
from hvdcomp.perfmodel.compute import Compute
from hvdcomp.perfmodel.exchanges import exchange_of
from hvdcomp.perfmodel.predict import UNCOMPRESSED, Setting
from hvdcomp.tools.bench.calibrate import Calibrated, Show, levels_for, network_for, put_together
from hvdcomp.tools.bench.carrier import Carrier
from hvdcomp.tools.bench.fit import Reading, halves
from hvdcomp.tools.bench.marks import wait_for
from hvdcomp.tools.bench.no_payload import NoPayload
from hvdcomp.tools.bench.probe_encode import encode_time, gradients, latency_s
from hvdcomp.tools.bench.probe_model import unpredicted_time
from hvdcomp.tools.bench.probe_steps import everywhere, mean, ready_of, slowest
from hvdcomp.tools.bench.watched import BACKWARD, FORWARD, OPTIMIZER, Watched
from hvdcomp.tools.bench.workload import Workload

MODEL = "training"
"""The name of the user's model in the calibration."""
SOURCE = "hvdcomp profile"
_NETWORK_SHARE = 0.5  # the share of a profile's time for measuring the network
_FEWEST, _MOST = 5, 20  # minimum and maximum number of timed exchanges for each method
_TRIED = 3  # number of methods whose exchanges are actually run


@dataclass(frozen=True)
class Profiled:
    """The results of profiling a user's training program.

    Attributes:
        calibrated: the calibration for `hvdcomp advise`, together with the list of measurements that are too noisy.
        step: times of the parts of a training step without hvdcomp, on the slowest rank.
        waits: seconds of a step in which a rank only waits for gradients.
        tried: for each spec, the measured seconds of an exchange of all gradients after the backward pass; empty if
            there is only one rank.
    """

    calibrated: Calibrated
    step: Reading
    waits: float
    tried: dict[str, Reading]


def profile(
    watched: Watched,
    carrier: Carrier,
    compressors: Sequence[Compressor],
    *,
    name: str,
    seconds: float,
    known_network: Calibration | None = None,
    show: Show = lambda _: None,
) -> Profiled:
    """Measures the network and the methods. Every rank must call this function in the same step.

    Args:
        watched: the times of the training's steps on this rank.
        carrier: the library that exchanges the gradients.
        compressors: specs of the compressors to measure.
        name: name of the calibration.
        seconds: approximate duration of the measurements.
        known_network: a calibration whose network is used instead of measuring the network. This argument is required
            if there is only one rank.
        show: function that is called with the name of the next measurement.

    Raises:
        SpecError: if a compressor is two-level but the run does not have two levels.
        ConfigurationError: if `find_levels` raises this error.
    """
    levels = levels_for(compressors, carrier)
    ranks, workload, device = carrier.ranks, watched.workload, watched.workload.device
    tensors = workload.tensors()
    probe = network_for([tensors], compressors, carrier, levels, device, _NETWORK_SHARE * seconds, show, known_network)
    parts = everywhere(watched.parts, ranks)  # (ranks, steps, parts)
    step = halves(slowest(parts))
    # In every step, ranks wait for the slowest rank, whatever they send. This waiting therefore does not count as
    # exchange.
    computing = halves(slowest(parts[:, :, [FORWARD, BACKWARD, OPTIMIZER]]))
    means = [float(np.median(mean(parts, part))) for part in (FORWARD, BACKWARD, OPTIMIZER)]
    forward, backward, optimizer = (computing.seconds * part / sum(means) for part in means)
    ready = ready_of(watched.ready, list(workload.model.parameters()), ranks)
    compute = Compute(
        backward_s=backward,
        forward_s=forward,
        gamma=1.0,  # backward_s already includes the slowdown by dense gradients that are sent at the same time
        batch_size=None,
        optimizer_s=optimizer,
        ready=carrier.sent_together(ready, workload.dense_bytes),
    )
    dense = exchange_of(NoCompression(), tensors, ranks.size)
    overhead = unpredicted_time(probe.network, compute, dense, carrier.bucket_bytes, ranks.size, step.seconds)
    encode = {UNCOMPRESSED: replace(overhead, source=SOURCE)}
    readings = {"step of the training": step, "computing of a step": computing}
    seconds_each = (1 - _NETWORK_SHARE) * seconds / max(1, len(compressors) + _TRIED)
    for compressor in compressors:
        spec = str(compressor)
        engine = Engine(NoPayload(spec, levels.ranks), tensors, compressor)
        if engine.passthrough:
            # The library itself casts and sends the gradients. The time of the cast can be measured only in a separate
            # training run.
            continue
        show(f"encoding and decoding of {spec}")
        reading = _exchanges(engine, workload, carrier, seconds_each)
        readings[f"exchange without payload of {spec}"] = reading
        its_exchange = exchange_of(compressor, tensors, ranks.size, levels.ranks_per_node)
        encoding_s = reading.seconds - latency_s(its_exchange, probe.network, ranks.size)
        encode[spec] = replace(encode_time(compressor, workload, its_exchange, encoding_s, ranks), source=SOURCE)
    facts = ModelFacts(
        tuple(tensors),
        replace(compute, encode=encode),
        carrier.bucket_bytes,
        early_bytes=carrier.early_bytes_of(workload),
        sources={"hides": "assumed: everything that can be sent during the backward pass costs no extra time"},
        estimated=("hides",),
        optimizer=watched.optimizer or OTHER,
    )
    calibrated = put_together(name, SOURCE, probe, {MODEL: facts}, readings, carrier, device)
    if ranks.size == 1:
        return Profiled(calibrated, step, max(0.0, step.seconds - computing.seconds), {})
    adviser = Adviser(calibrated.calibration)
    by_time = sorted(adviser.advise(Setting(ranks.size)).methods.values(), key=lambda method: method.step_s)
    compressed = [method.spec for method in by_time if not method.exchange.overlapped][:_TRIED]
    show("exchanges of dense gradients")
    tried = {UNCOMPRESSED: _dense(workload, carrier, levels.ranks, seconds_each)}
    for spec in ranks.broadcast(compressed, "tried"):
        show(f"exchanges of {spec}")
        engine = Engine(levels.ranks, tensors, adviser.compressors[spec])
        tried[spec] = _exchanges(engine, workload, carrier, seconds_each)
    return Profiled(calibrated, step, max(0.0, step.seconds - computing.seconds), tried)


def _exchanges(engine: Engine, workload: Workload, carrier: Carrier, seconds: float) -> Reading:
    """Runs steps of an engine on copies of the program's gradients. Returns the seconds that the slowest rank needs for
    a step."""
    originals = gradients(workload)
    copies = {name: gradient.clone() for name, gradient in originals.items()}

    def exchange() -> None:
        engine.begin()
        engine.step(copies, in_place=True)

    def renew() -> None:
        for name, gradient in originals.items():
            copies[name].copy_(gradient)

    return _timed(exchange, renew, workload.device, carrier, seconds)


def _dense(workload: Workload, carrier: Carrier, ranks: Communicator, seconds: float) -> Reading:
    """The seconds that the slowest rank needs for an allreduce of all gradients without compression. All gradients of
    one type are in one array."""
    by_type: dict[torch.dtype, list[torch.Tensor]] = {}
    for gradient in gradients(workload).values():
        by_type.setdefault(gradient.dtype, []).append(gradient.flatten())
    flat = {f"hvdcomp.profile.dense.{dtype}": torch.cat(parts) for dtype, parts in by_type.items()}

    def exchange() -> None:
        for started in [ranks.start_allreduce(array, "mean", name) for name, array in flat.items()]:
            ranks.wait(started)

    return _timed(exchange, lambda: None, workload.device, carrier, seconds)


def _timed(
    exchange: Callable[[], None], renew: Callable[[], None], device: torch.device, carrier: Carrier, seconds: float
) -> Reading:
    ranks = carrier.ranks

    def once() -> float:
        renew()
        wait_for(device)
        ranks.barrier()
        begin = time.perf_counter()
        exchange()
        wait_for(device)
        return time.perf_counter() - begin

    once()  # the first step creates states and compiles kernels
    first = float(everywhere(np.array(once()), ranks).max())
    count = int(min(_MOST, max(_FEWEST, seconds / max(first, 1e-6))))
    times = everywhere(np.array([once() for _ in range(count)]), ranks)
    return halves(times.max(axis=0).tolist())
