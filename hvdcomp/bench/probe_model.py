"""What a training step of one model takes here, measured by all ranks at once. PyTorch, on the CPU.

The model is trained in several ways that take turns: alone; with stock Horovod, whose allreduce overlaps with the
backward pass, of dense gradients and of each cast; with a stand-in that sends one number for each tensor; and with that
and each compressor, whose collectives have no payload: all that a real step does but to move bytes; and with one
compressor really, with and without overlap. The parts of the step are timed in each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch

from hvdcomp import TwoLevel
from hvdcomp.bench.fit import Reading, halves
from hvdcomp.bench.levels import Levels
from hvdcomp.bench.no_payload import NoPayload
from hvdcomp.bench.probe_network import Show, fusion_threshold
from hvdcomp.bench.probe_overlap import AT_END, EARLY, OverlapTrial, trial_of
from hvdcomp.bench.workload import Workload, build, in_turn, turn_of
from hvdcomp.communicators import LoopbackCommunicator
from hvdcomp.compressors import Compressor, NoCompression
from hvdcomp.exchange import Engine
from hvdcomp.perfmodel.calibration import ModelFacts
from hvdcomp.perfmodel.compute import Compute, EncodeTime
from hvdcomp.perfmodel.exchanges import Exchange, exchange_of
from hvdcomp.perfmodel.network import Network
from hvdcomp.perfmodel.predict import Setting, predict
from hvdcomp.perfmodel.schedule import sequential
from hvdcomp.perfmodel.ways import in_each_way

_FORWARD, _BACKWARD, _MIDDLE, _OPTIMIZER = range(4)  # parts of a step; the middle is the exchange, or stands for it
_LEARNING_RATE = 1e-4
_FEWEST_ROUNDS, _MOST_ROUNDS = 5, 20  # of turns
_READY_STEPS = 5
_DECODES = 3
_SOURCE = "hvdcomp calibrate"

Ways = dict[str, "Training"]


@dataclass(frozen=True)
class ModelProbe:
    """What was measured. `readings` holds the times that went into `facts`, by what they are."""

    facts: ModelFacts
    readings: dict[str, Reading]


class Training:
    """A model trained in one way, step by step.

    Args:
        workload: what is trained.
        optimizer: that makes the step.
        middle: what happens between backward pass and step.
    """

    def __init__(self, workload: Workload, optimizer: Any, middle: Callable[[], None]) -> None:
        self.workload = workload
        self._optimizer = optimizer
        self._middle = middle
        self._skips = getattr(optimizer, "skip_synchronize", None)

    def step(self) -> list[float]:
        """Makes a step; returns the seconds of its four parts."""
        marks = [time.perf_counter()]
        self._optimizer.zero_grad()
        loss = self.workload.loss()
        marks.append(time.perf_counter())
        loss.backward()
        marks.append(time.perf_counter())
        self._middle()
        marks.append(time.perf_counter())
        if self._skips is None:
            self._optimizer.step()
        else:
            with self._skips():
                self._optimizer.step()
        marks.append(time.perf_counter())
        return [end - start for start, end in pairwise(marks)]


class _OneNumber:
    """Sends one number for each gradient, as hvdcomp does in a step through its engine, and nothing of the gradient."""

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by Horovod for each gradient."""
        return torch.full((1,), 1), tensor

    def decompress(self, tensor: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Called by Horovod when the number is back."""
        return gradient


class _Cast:
    """Sends each gradient in the element type that a compressor gives it."""

    def __init__(self, compressor: Compressor) -> None:
        self._compressor = compressor

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by Horovod for each gradient."""
        wire = self._compressor.wire_dtype(str(tensor.dtype).removeprefix("torch."))
        return tensor.to(getattr(torch, wire or "")), tensor

    def decompress(self, tensor: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Called by Horovod when the means are back."""
        return tensor.to(gradient.dtype)


def probe_model(
    model: str,
    specs: Sequence[Compressor],
    network: Network,
    levels: Levels,
    *,
    batch_size: int,
    seed: int,
    seconds: float,
    show: Show,
    beside: Callable[[], None] = lambda: None,
) -> ModelProbe:
    """Measures the passes, the optimizer, gamma, what Horovod and hvdcomp take beside, encode times and overlap.

    To be called on every rank, with the same arguments.

    Args:
        model: as for `hvdcomp.bench.workload.build`.
        specs: compressors whose encoding and decoding to time.
        network: what collectives cost here.
        levels: of the ranks.
        batch_size: of one rank.
        seed: of weights and data.
        seconds: about how long to take; a minimum of steps is made in any case.
        show: called with what comes next.
        beside: called after each round of turns.
    """
    show("building")
    ways, plain, trial = _ways(model, specs, levels, batch_size, seed)
    tensors = plain.tensors()
    times = _take_turns(ways, seconds, show, beside)
    show("when gradients are ready")
    ready = _ready(ways["passes"])
    alone, dense, numbers = times["passes"], times["dense"], times["numbers"]
    readings = {
        "passes": halves(_slowest(alone)),
        "backward pass with Horovod": halves(_mean(dense, _BACKWARD)),
        "step without payload": halves(_slowest(numbers)),
    }
    whole = readings["passes"].seconds
    parts = [float(np.median(_mean(alone, part))) for part in (_FORWARD, _BACKWARD, _OPTIMIZER)]
    forward, backward, optimizer = (whole * part / sum(parts) for part in parts)
    gamma = max(1.0, float(np.median(_mean(dense, _BACKWARD))) / parts[1])
    engine = max(0.0, readings["step without payload"].seconds - whole)
    # The same step holds hooks in the backward pass, and one small collective at the end; the rest is handing back.
    hooks = float(np.median(_mean(numbers, _BACKWARD))) / parts[1] - 1
    small = float(network.seconds("allreduce", 8.0, hvd.size()).total)
    horovod = max(0.0, engine - max(0.0, hooks) * backward - small)
    compute = Compute(
        backward_s=backward,
        forward_s=forward,
        gamma=gamma,
        batch_size=batch_size,
        optimizer_s=optimizer,
        engine_s=engine,
        horovod_s=horovod,
        ready=ready,
    )
    bucket_bytes = float(fusion_threshold())

    def beyond(compressor: Compressor, step_s: float) -> float:
        """What a step takes that Horovod carries, beside what follows from all else."""
        exchange = exchange_of(compressor, tensors, hvd.size())
        known = predict(network, compute, exchange, bucket_bytes, Setting(hvd.size()))
        return max(0.0, step_s - float(known.total))

    readings["step with Horovod"] = step = halves(_slowest(dense))
    compute = replace(compute, horovod_s=horovod + beyond(NoCompression(), step.seconds))
    encode = {}
    for one in specs:
        spec = str(one)
        if spec not in times:
            continue
        exchange = exchange_of(one, tensors, hvd.size(), levels.ranks_per_node)
        if exchange.overlapped:
            readings[f"step of {spec}"] = step = halves(_slowest(times[spec]))
            encode[spec] = EncodeTime(beyond(one, step.seconds), source=_SOURCE)
            continue
        show(f"decoding of {spec}")
        readings[f"step without payload of {spec}"] = step = halves(_slowest(times[spec]))
        # What the ranks wait for each other between the rounds is in it.
        beyond_it = step.seconds - whole - engine - _latency_s(exchange, network)
        encode[spec] = _encode_time(one, plain, exchange, beyond_it)
    compute = replace(compute, encode=encode)
    hides, source = None, "taken as 1: nothing was measured that can be sent in the backward pass"
    if trial is not None:
        at_end, early = (halves(_slowest(times[name])) for name in (AT_END, EARLY))
        readings |= {f"step of {trial.compressor} {name}": one for name, one in ((AT_END, at_end), (EARLY, early))}
        hides, source = trial.hidden_share(network, compute, tensors, bucket_bytes, at_end, early)
    facts = ModelFacts(
        tuple(tensors),
        replace(compute, hides=1.0 if hides is None else hides),
        bucket_bytes,
        sources={"hides": source},
        estimated=("hides",) if hides is None else (),
    )
    return ModelProbe(facts, readings)


def _ways(
    model: str, specs: Sequence[Compressor], levels: Levels, batch_size: int, seed: int
) -> tuple[Ways, Workload, OverlapTrial | None]:
    def fresh() -> tuple[Workload, Any]:
        workload = build(model, batch_size, seed, hvd.rank())
        return workload, torch.optim.SGD(workload.model.parameters(), lr=_LEARNING_RATE, momentum=0.9)

    def with_horovod(name: str, compression: Any, trial: OverlapTrial | None = None) -> tuple[Workload, Any]:
        workload, optimizer = fresh()
        # Names of their own: a known name with another shape costs Horovod a negotiation.
        named = [(f"{name}.{key}", value) for key, value in workload.model.named_parameters()]
        if trial is not None:
            compression = trial.compression(name, named, seed)
        return workload, hvd.DistributedOptimizer(optimizer, named_parameters=named, compression=compression)

    plain, optimizer = fresh()
    dense, dense_optimizer = with_horovod("dense", hvd.Compression.none)
    numbers, numbers_optimizer = with_horovod("numbers", _OneNumber())
    ways = {
        "passes": Training(plain, optimizer, lambda: None),
        "dense": Training(dense, dense_optimizer, dense_optimizer.synchronize),
        "numbers": Training(numbers, numbers_optimizer, numbers_optimizer.synchronize),
    }
    for one in specs:
        engine = Engine(NoPayload(str(one), levels.ranks), numbers.tensors(), one)
        if not engine.passthrough:
            ways[str(one)] = Training(numbers, numbers_optimizer, _through(engine, numbers, numbers_optimizer))
        elif not all(kind.lossless for kind in engine.plan.values()):
            cast, cast_optimizer = with_horovod(str(one), _Cast(one))
            ways[str(one)] = Training(cast, cast_optimizer, cast_optimizer.synchronize)
    trial = trial_of(specs, plain.tensors(), hvd.size())
    if trial is not None:
        for name in (AT_END, EARLY):
            real, real_optimizer = with_horovod(name, None, trial)
            ways[name] = Training(real, real_optimizer, real_optimizer.synchronize)
    return ways, plain, trial


def _through(engine: Engine, workload: Workload, optimizer: Any) -> Callable[[], None]:
    """The middle of a step through the engine."""

    def exchange() -> None:
        optimizer.synchronize()
        engine.begin()
        engine.step(_gradients(workload), in_place=True)

    return exchange


def _gradients(workload: Workload) -> dict[str, torch.Tensor]:
    named = workload.model.named_parameters()
    return {name: parameter.grad for name, parameter in named if parameter.grad is not None}


def _take_turns(ways: Ways, seconds: float, show: Show, beside: Callable[[], None]) -> dict[str, np.ndarray]:
    """The parts of the steps of each way, in seconds, (ranks, steps, 4)."""
    step_s: dict[str, float] = {}
    for name, training in ways.items():
        show(f"warming up: {name}")
        training.step()
        hvd.barrier()
        step_s[name] = sum(training.step())
    step_s = hvd.broadcast_object(step_s, name="hvdcomp.calibrate.turn")
    round_s = sum(one * sum(turn_of(one)) for one in step_s.values())
    rounds = int(min(_MOST_ROUNDS, max(_FEWEST_ROUNDS, seconds / round_s)))
    samples: dict[str, list[list[float]]] = {name: [] for name in ways}
    for number in range(rounds):
        show(f"steps: round {number + 1} of {rounds}")
        for name in in_turn(list(ways), number):
            settling, block = turn_of(step_s[name])
            hvd.barrier()
            # None between the steps: ranks that share a core would wait in it for what they take from each other.
            for _ in range(settling):
                ways[name].step()
            samples[name] += [ways[name].step() for _ in range(block)]
        beside()
    return {
        name: _everywhere(np.array(taken), f"hvdcomp.calibrate.steps.{name}") for name, taken in samples.items()
    }


def _everywhere(values: np.ndarray, name: str) -> np.ndarray:
    """An array of each rank, by rank."""
    return np.stack(hvd.allgather_object(values, name=name))


def _slowest(times: np.ndarray) -> list[float]:
    """Of each step, the seconds of the slowest rank: ranks wait for each other in every step."""
    return times.sum(axis=2).max(axis=0).tolist()


def _mean(times: np.ndarray, part: int) -> list[float]:
    return times[:, :, part].mean(axis=0).tolist()


def _ready(training: Training) -> tuple[tuple[float, float], ...]:
    """When which share of the gradients is ready, of the ranks' mean; see `Compute.ready`."""
    parameters = {name: one for name, one in training.workload.model.named_parameters() if one.requires_grad}
    moments: dict[str, list[float]] = {name: [] for name in parameters}
    handles = [
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: moments[name].append(time.perf_counter()))
        for name, parameter in parameters.items()
    ]
    shares = []
    for _ in range(_READY_STEPS):
        hvd.barrier()
        begin = time.perf_counter()
        forward, backward, *_ = training.step()
        last = {name: places[-1] if places else begin + forward + backward for name, places in moments.items()}
        shares.append([(last[name] - begin - forward) / backward for name in parameters])
    for handle in handles:
        handle.remove()
    # The middle of the steps on each rank, then of the ranks.
    times = np.median(_everywhere(np.array(shares), "hvdcomp.calibrate.ready"), axis=1).mean(axis=0)
    sizes = np.array([one.numel() * one.element_size() for one in parameters.values()], float)
    order = [place for place in np.argsort(times, kind="stable") if sizes[place]]
    sent = np.cumsum(sizes[order]) / sizes.sum()
    sent[-1] = 1.0
    clipped = np.clip(times[order], 0, 1)
    return tuple(zip(sent.tolist(), clipped.tolist(), strict=True))


def _latency_s(exchange: Exchange, network: Network) -> float:
    """What a step's collectives take without a payload."""

    def cost_of(kind: str, size: float, **what: Any) -> Any:
        return network.seconds(kind, size, hvd.size(), **what)

    return float(sequential(0.0, 0.0, exchange, cost_of, payload=0.0).total)


def _encode_time(compressor: Compressor, workload: Workload, exchange: Exchange, measured: float) -> EncodeTime:
    """What was measured with this number of ranks, with the part of it that grows with what is decoded.

    It is no less than what encoding and decoding alone take. What decoding a payload takes is measured with gathered
    ones, whose number grows with that of the ranks; scattered ones are decoded by the same code.
    """
    ranks, inside = hvd.size(), exchange.ranks_per_node
    first, then = _alone(compressor, workload, ranks, inside)
    measured = max(measured, first + then)
    each, decoded = 0.0, float(exchange.decoded(ranks))
    if any(one.kind == "allgather" and one.among != "node" for collectives in exchange.rounds for one in collectives):
        gathering = _gathered(compressor)
        fewer, more = (_decoding(gathering, workload, size, inside) for size in (ranks, 2 * ranks))
        senders = ranks // inside if isinstance(compressor, TwoLevel) else ranks
        each = min(max(0.0, (more - fewer) / senders), measured / decoded)
    return EncodeTime(measured - each * decoded, decode_per_rank_s=each, source=_SOURCE)


def _gathered(compressor: Compressor) -> Compressor:
    """The same method, gathered if it can be."""
    if isinstance(compressor, TwoLevel):
        return TwoLevel(_gathered(compressor.compressor))
    return in_each_way(compressor)[0]


def _decoding(compressor: Compressor, workload: Workload, ranks: int, ranks_per_node: int) -> float:
    """Seconds that grow with the number of payloads decoded, and others that do not."""
    first, then = _alone(compressor, workload, ranks, ranks_per_node)
    # In two levels what other nodes sent is decoded before the last collective, which is within the node.
    return first + then if isinstance(compressor, TwoLevel) else then


def _alone(compressor: Compressor, workload: Workload, ranks: int, ranks_per_node: int) -> tuple[float, float]:
    """Seconds before and after the last collective of a step with the payloads of `ranks`, the mean of all ranks."""
    engine = Engine(LoopbackCommunicator(ranks, ranks_per_node), workload.tensors(), compressor)
    given = _gradients(workload)
    gradients = {name: gradient.clone() for name, gradient in given.items()}
    taken = []
    for _ in range(1 + _DECODES):
        for name, gradient in given.items():  # whose place results take, as in a training
            gradients[name].copy_(gradient)
        engine.begin()
        engine.step(gradients, in_place=True)
        cost = engine.ledger.last
        assert cost is not None
        taken.append([cost.encode_seconds or 0.0, cost.decode_seconds or 0.0])
    mine = np.median(taken[1:], axis=0)
    encode, decode = _everywhere(mine, f"hvdcomp.calibrate.decode.{compressor}.{ranks}").mean(axis=0)
    return float(encode), float(decode)
