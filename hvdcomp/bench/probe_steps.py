"""Steps of several trainings that take turns, and the times of their parts. PyTorch, on the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from hvdcomp.bench.carrier import Carrier, Distributed, Ready
from hvdcomp.bench.workload import Workload, in_turn, turn_of
from hvdcomp.train.ranks import Ranks

FORWARD, BACKWARD, EXCHANGE, OPTIMIZER = range(4)
"""Parts of a step. The exchange is what is left of it when the last gradient is there."""

Show = Callable[[str], None]

_FEWEST_ROUNDS, _MOST_ROUNDS = 5, 20  # of turns
_READY_STEPS = 5


class Training:
    """A model trained in one way, step by step.

    Args:
        workload: what is trained.
        distributed: how its gradients are exchanged.
        after: what happens between exchange and step.
    """

    def __init__(
        self, workload: Workload, distributed: Distributed, after: Callable[[], None] = lambda: None
    ) -> None:
        self.workload = workload
        self._distributed = distributed
        self._after = after
        self._skips = getattr(distributed.optimizer, "skip_synchronize", None)

    def step(self) -> list[float]:
        """Makes a step; returns the seconds of its four parts."""
        optimizer = self._distributed.optimizer
        marks = [time.perf_counter()]
        optimizer.zero_grad()
        loss = self._distributed.loss()
        marks.append(time.perf_counter())
        computed = _when_computed(loss)
        loss.backward()
        marks += computed
        self._distributed.exchange()
        self._after()
        marks.append(time.perf_counter())
        if self._skips is None:
            optimizer.step()
        else:
            with self._skips():
                optimizer.step()
        marks.append(time.perf_counter())
        return [end - start for start, end in pairwise(marks)]


def _when_computed(loss: torch.Tensor) -> list[float]:
    """A list that gets the moment at which the backward pass has computed its last gradient.

    PyTorch calls what was asked for first, and DistributedDataParallel, which then waits for its exchange, asks later.
    """
    moments: list[float] = []
    engine: Any = torch.autograd.Variable._execution_engine
    loss.register_hook(lambda _: engine.queue_callback(lambda: moments.append(time.perf_counter())))
    return moments


def take_turns(
    ways: dict[str, Training], carrier: Carrier, seconds: float, show: Show, beside: Callable[[], None]
) -> dict[str, np.ndarray]:
    """The parts of the steps of each way, in seconds, (ranks, steps, 4)."""
    ranks = carrier.ranks
    step_s: dict[str, float] = {}
    for name, training in ways.items():
        show(f"warming up: {name}")
        for _ in range(carrier.warm_up):
            training.step()
        ranks.barrier()
        step_s[name] = sum(training.step())
    step_s = ranks.broadcast(step_s, "turn")
    round_s = sum(one * sum(turn_of(one)) for one in step_s.values())
    rounds = int(min(_MOST_ROUNDS, max(_FEWEST_ROUNDS, seconds / round_s)))
    samples: dict[str, list[list[float]]] = {name: [] for name in ways}
    for number in range(rounds):
        show(f"steps: round {number + 1} of {rounds}")
        for name in in_turn(list(ways), number):
            settling, block = turn_of(step_s[name])
            ranks.barrier()
            # None between the steps: ranks that share a core would wait in it for what they take from each other.
            for _ in range(settling):
                ways[name].step()
            samples[name] += [ways[name].step() for _ in range(block)]
        beside()
    return {name: everywhere(np.array(taken), ranks) for name, taken in samples.items()}


def everywhere(values: np.ndarray, ranks: Ranks) -> np.ndarray:
    """An array of each rank, by rank."""
    return np.stack(ranks.gather(values, "measured"))


def slowest(times: np.ndarray) -> list[float]:
    """Of each step, the seconds of the slowest rank: ranks wait for each other in every step."""
    return times.sum(axis=2).max(axis=0).tolist()


def mean(times: np.ndarray, part: int) -> list[float]:
    """Of each step, the seconds of a part, the mean of all ranks."""
    return times[:, :, part].mean(axis=0).tolist()


def ready_moments(training: Training, ranks: Ranks) -> Ready:
    """When which share of the gradients is there, of the ranks' mean; see `Compute.ready`."""
    parameters = {name: one for name, one in training.workload.model.named_parameters() if one.requires_grad}
    moments: dict[str, list[float]] = {name: [] for name in parameters}
    handles = [
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: moments[name].append(time.perf_counter()))
        for name, parameter in parameters.items()
    ]
    shares = []
    for _ in range(_READY_STEPS):
        ranks.barrier()
        begin = time.perf_counter()
        forward, backward, *_ = training.step()
        last = {name: places[-1] if places else begin + forward + backward for name, places in moments.items()}
        shares.append([(last[name] - begin - forward) / backward for name in parameters])
    for handle in handles:
        handle.remove()
    # The middle of the steps on each rank, then of the ranks.
    times = np.median(everywhere(np.array(shares), ranks), axis=1).mean(axis=0)
    sizes = np.array([one.numel() * one.element_size() for one in parameters.values()], float)
    order = [place for place in np.argsort(times, kind="stable") if sizes[place]]
    sent = np.cumsum(sizes[order]) / sizes.sum()
    sent[-1] = 1.0
    clipped = np.clip(times[order], 0, 1)
    return tuple(zip(sent.tolist(), clipped.tolist(), strict=True))
