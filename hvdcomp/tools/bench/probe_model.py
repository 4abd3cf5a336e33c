"""Measures the time of a training step of one model, on all ranks together. This module needs PyTorch.

The model is trained in several ways. The steps of the different ways alternate:

- without an exchange
- with the library's own exchange, which overlaps with the backward pass: once with dense gradients, and once with each
  cast
- with an exchange of one number instead of the gradients
- with an exchange of this number and, for each compressor, with collectives that have no payload. Such a step does all
  the work of a real step, but does not send the payload.
- with the real exchange of one compressor, once with overlap and once without overlap

The parts of each step are timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from hvdcomp.compressors import Compressor, NoCompression
from hvdcomp.exchange import Engine
from hvdcomp.perfmodel.calibration import ModelFacts
from hvdcomp.perfmodel.compute import Compute, EncodeTime
from hvdcomp.perfmodel.exchanges import Exchange, exchange_of
from hvdcomp.perfmodel.network import Network
from hvdcomp.perfmodel.predict import UNCOMPRESSED, Setting, predict
from hvdcomp.tools.bench.carrier import Carrier, alone
from hvdcomp.tools.bench.fit import Reading, halves
from hvdcomp.tools.bench.levels import Levels
from hvdcomp.tools.bench.no_payload import NoPayload
from hvdcomp.tools.bench.probe_encode import SOURCE, encode_time, gradients, latency_s
from hvdcomp.tools.bench.probe_overlap import AT_END, EARLY, OverlapTrial, trial_of
from hvdcomp.tools.bench.probe_steps import (
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    Show,
    Training,
    mean,
    ready_moments,
    slowest,
    take_turns,
)
from hvdcomp.tools.bench.workload import Workload, build


@dataclass(frozen=True)
class ModelProbe:
    """The results for one model. `facts` was computed from the measured times in `readings`, which has a key for each
    measurement."""

    facts: ModelFacts
    readings: dict[str, Reading]


def probe_model(
    model: str,
    specs: Sequence[Compressor],
    network: Network,
    carrier: Carrier,
    levels: Levels,
    *,
    device: torch.device,
    batch_size: int,
    seed: int,
    seconds: float,
    show: Show,
    beside: Callable[[], None] = lambda: None,
) -> ModelProbe:
    """Measures the forward and backward pass, the optimizer, gamma (how much slower the backward pass is during an
    exchange), the overhead of the library and of hvdcomp, encode times and overlap.

    Every rank must call this function with the same arguments.

    Args:
        model: name of the model, as for `hvdcomp.tools.bench.workload.build`.
        specs: the compressors whose encoding and decoding are timed.
        network: the costs of collectives that were measured before.
        carrier: the library that exchanges the gradients.
        levels: how the ranks are distributed over nodes.
        device: the device on which to train.
        batch_size: the batch size of one rank.
        seed: the seed of the weights and the data.
        seconds: the approximate duration. A minimum number of steps is always run.
        show: function that is called with the name of the next measurement.
        beside: a function that is called after each round. In a round, each way to train runs some steps.
    """
    show("building")
    ranks = carrier.ranks.size
    ways, plain, trial = _ways(model, specs, carrier, levels, device, batch_size, seed)
    tensors = plain.tensors()
    times = take_turns(ways, carrier, seconds, show, beside)
    show("when gradients are ready")
    ready = ready_moments(ways["passes"], carrier.ranks)
    undisturbed, dense, numbers = times["passes"], times["dense"], times["numbers"]
    readings = {
        "passes": halves(slowest(undisturbed)),
        f"backward pass with {carrier.title}": halves(mean(dense, BACKWARD)),
        "step without payload": halves(slowest(numbers)),
    }
    whole = readings["passes"].seconds
    parts = [float(np.median(mean(undisturbed, part))) for part in (FORWARD, BACKWARD, OPTIMIZER)]
    forward, backward, optimizer = (whole * part / sum(parts) for part in parts)
    gamma = max(1.0, float(np.median(mean(dense, BACKWARD))) / parts[1])
    engine = max(0.0, readings["step without payload"].seconds - whole)
    # The step without payload runs hooks during the backward pass, and one small collective after the backward pass.
    # The rest of its additional time is Horovod's overhead.
    hooks = float(np.median(mean(numbers, BACKWARD))) / parts[1] - 1
    small = float(network.seconds("allreduce", 8.0, ranks).total)
    compute = Compute(
        backward_s=backward,
        forward_s=forward,
        gamma=gamma,
        batch_size=batch_size,
        optimizer_s=optimizer,
        engine_s=engine,
        horovod_s=max(0.0, engine - max(0.0, hooks) * backward - small),
        ready=carrier.sent_together(ready, plain.dense_bytes),
    )

    def of_carried(compressor: Compressor, step: Reading) -> EncodeTime:
        exchange = exchange_of(compressor, tensors, ranks)
        return unpredicted_time(network, compute, exchange, carrier.bucket_bytes, ranks, step.seconds)

    readings[f"step with {carrier.title}"] = step = halves(slowest(dense))
    encode = {UNCOMPRESSED: of_carried(NoCompression(), step)}
    for compressor in specs:
        spec = str(compressor)
        if spec not in times:
            continue
        exchange = exchange_of(compressor, tensors, ranks, levels.ranks_per_node)
        if exchange.overlapped:
            readings[f"step of {spec}"] = step = halves(slowest(times[spec]))
            encode[spec] = of_carried(compressor, step)
            continue
        show(f"decoding of {spec}")
        readings[f"step without payload of {spec}"] = step = halves(slowest(times[spec]))
        # This time includes the time in which ranks wait for each other between the rounds of an exchange.
        encoding_s = step.seconds - whole - engine - latency_s(exchange, network, ranks)
        encode[spec] = encode_time(compressor, plain, exchange, encoding_s, carrier.ranks)
    compute = replace(compute, encode=encode)
    hides = None
    source = (
        "assumed to be 1 (all of the possible overlap), because no measured method can send gradients during the "
        "backward pass"
    )
    if trial is not None:
        at_end, early = (halves(slowest(times[name])) for name in (AT_END, EARLY))
        readings |= {f"step of {trial.compressor} {AT_END}": at_end, f"step of {trial.compressor} {EARLY}": early}
        hides, source = trial.hidden_share(network, replace(compute, ready=ready), tensors, at_end, early)
    facts = ModelFacts(
        tuple(tensors),
        replace(compute, hides=1.0 if hides is None else hides),
        carrier.bucket_bytes,
        early_bytes=carrier.early_bytes_of(plain),
        sources={"hides": source},
        estimated=("hides",) if hides is None else (),
    )
    return ModelProbe(facts, readings)


def unpredicted_time(
    network: Network, compute: Compute, exchange: Exchange, bucket_bytes: float, ranks: int, step_s: float
) -> EncodeTime:
    """Computes the part of a measured step time that the model does not predict, for steps in which the library itself
    exchanges or casts the gradients.

    This time is measured separately for dense gradients and for each cast. Computation and exchange slow each other
    down if they run at the same time, and the effect grows with the number of bytes. If the time of dense gradients
    were used for a cast, the cast would seem too slow.

    Args:
        exchange: the collectives of the library's own exchange.
        step_s: measured time of a step, in seconds.
    """
    predicted = predict(network, compute, exchange, bucket_bytes, Setting(ranks))
    return EncodeTime(max(0.0, step_s - float(predicted.total)), source=SOURCE)


def _ways(
    model: str,
    specs: Sequence[Compressor],
    carrier: Carrier,
    levels: Levels,
    device: torch.device,
    batch_size: int,
    seed: int,
) -> tuple[dict[str, Training], Workload, OverlapTrial | None]:
    def fresh() -> Workload:
        return build(model, batch_size, seed, carrier.ranks.rank, device)

    plain, dense, numbers = fresh(), fresh(), fresh()
    one_number = carrier.with_one_number(numbers, "numbers")
    ways = {
        "passes": Training(plain, alone(plain)),
        "dense": Training(dense, carrier.with_stock(dense, carrier.stock[0], "dense")),
        "numbers": Training(numbers, one_number),
    }
    for spec in specs:
        engine = Engine(NoPayload(str(spec), levels.ranks), numbers.tensors(), spec)
        if not engine.passthrough:
            ways[str(spec)] = Training(numbers, one_number, _through(engine, numbers))
        elif not all(kind.lossless for kind in engine.plan.values()):
            cast = fresh()
            ways[str(spec)] = Training(cast, carrier.with_cast(cast, spec, str(spec)))
    trial = trial_of(specs, plain.tensors(), carrier)
    if trial is not None:
        for name in (AT_END, EARLY):
            real = fresh()
            ways[name] = Training(real, trial.distributed(name, real, carrier, seed))
    return ways, plain, trial


def _through(engine: Engine, workload: Workload) -> Callable[[], None]:
    """Returns a function that runs hvdcomp's exchange in a step."""

    def exchange() -> None:
        engine.begin()
        engine.step(gradients(workload), in_place=True)

    return exchange
