"""Times the parts of training steps. The steps of several training runs alternate. This module needs PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from hvdcomp.tools.bench.carrier import Carrier, Distributed, Ready
from hvdcomp.tools.bench.marks import mark, seconds_between
from hvdcomp.tools.bench.workload import Workload, in_turn, turn_of
from hvdcomp.tools.train.ranks import Ranks

FORWARD, BACKWARD, EXCHANGE, OPTIMIZER = range(4)
"""Parts of a step. EXCHANGE is the time of the exchange that remains after the last gradient was computed."""

Show = Callable[[str], None]

_FEWEST_ROUNDS, _MOST_ROUNDS = 5, 20  # minimum and maximum number of rounds
_READY_STEPS = 5


class Training:
    """A model that is trained in one way, step by step.

    Args:
        workload: the model and its loss.
        distributed: the object that exchanges the gradients.
        after: a function that is called between the exchange and the optimizer's step.
    """

    def __init__(self, workload: Workload, distributed: Distributed, after: Callable[[], None] = lambda: None) -> None:
        self.workload = workload
        self._distributed = distributed
        self._after = after
        self._skips = getattr(distributed.optimizer, "skip_synchronize", None)

    def step(self) -> list[Any]:
        """Runs a step. Returns the time marks before and after its four parts, without waiting for a device."""
        optimizer, device = self._distributed.optimizer, self.workload.device
        marks = [mark(device)]
        optimizer.zero_grad()
        loss = self._distributed.loss()
        marks.append(mark(device))
        computed = _when_computed(loss, device)
        loss.backward()
        marks += computed
        self._distributed.exchange()
        self._after()
        marks.append(mark(device))
        if self._skips is None:
            optimizer.step()
        else:
            with self._skips():
                optimizer.step()
        marks.append(mark(device))
        return marks


def parts_of(marks: Sequence[Any]) -> list[float]:
    """The seconds of the four parts of a step."""
    return [seconds_between(start, end) for start, end in pairwise(marks)]


def _when_computed(loss: torch.Tensor, device: torch.device) -> list[Any]:
    """Returns an empty list. As soon as the backward pass has computed all gradients, a callback appends a time mark to
    the list.

    PyTorch calls callbacks in the order of their registration. DistributedDataParallel waits for its exchange in a
    callback that it registers later, so the mark does not include this wait.
    """
    moments: list[Any] = []
    engine: Any = torch.autograd.Variable._execution_engine
    loss.register_hook(lambda _: engine.queue_callback(lambda: moments.append(mark(device))))
    return moments


def take_turns(
    ways: dict[str, Training], carrier: Carrier, seconds: float, show: Show, beside: Callable[[], None]
) -> dict[str, np.ndarray]:
    """Runs steps of all training runs alternately. Returns, for each training run, the seconds of the four parts of
    each step, an array of shape (ranks, steps, 4)."""
    ranks = carrier.ranks
    step_s: dict[str, float] = {}
    for name, training in ways.items():
        show(f"warming up: {name}")
        for _ in range(carrier.warm_up):
            training.step()
        ranks.barrier()
        step_s[name] = sum(parts_of(training.step()))
    step_s = ranks.broadcast(step_s, "turn")
    round_s = sum(step * sum(turn_of(step)) for step in step_s.values())
    rounds = int(min(_MOST_ROUNDS, max(_FEWEST_ROUNDS, seconds / round_s)))
    samples: dict[str, list[list[float]]] = {name: [] for name in ways}
    for number in range(rounds):
        show(f"steps: round {number + 1} of {rounds}")
        for name in in_turn(list(ways), number):
            settling, block = turn_of(step_s[name])
            ranks.barrier()
            # There is no barrier between the steps, because ranks that share a core slow each other down, and would
            # wait in a barrier.
            for _ in range(settling):
                ways[name].step()
            samples[name] += map(parts_of, [ways[name].step() for _ in range(block)])
        beside()
    return {name: everywhere(np.array(steps), ranks) for name, steps in samples.items()}


def everywhere(values: np.ndarray, ranks: Ranks) -> np.ndarray:
    """The arrays of all ranks, stacked by rank."""
    return np.stack(ranks.gather(values, "measured"))


def slowest(times: np.ndarray) -> list[float]:
    """The seconds of the slowest rank in each step, because ranks wait for each other in every step."""
    return times.sum(axis=2).max(axis=0).tolist()


def mean(times: np.ndarray, part: int) -> list[float]:
    """The seconds of one part of each step, as means over the ranks."""
    return times[:, :, part].mean(axis=0).tolist()


def ready_moments(training: Training, ranks: Ranks) -> Ready:
    """When each share of the gradients is computed, as a mean over all ranks (`Compute.ready`)."""
    named = training.workload.model.named_parameters()
    parameters = {name: parameter for name, parameter in named if parameter.requires_grad}
    moments: dict[str, list[Any]] = {name: [] for name in parameters}
    device = training.workload.device
    handles = [
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: moments[name].append(mark(device)))
        for name, parameter in parameters.items()
    ]
    shares = []
    for _ in range(_READY_STEPS):
        ranks.barrier()
        _, begins, ends, *_ = training.step()
        last = {name: marks[-1] if marks else ends for name, marks in moments.items()}
        backward = seconds_between(begins, ends)
        shares.append([seconds_between(begins, last[name]) / backward for name in parameters])
    for handle in handles:
        handle.remove()
    return ready_of(np.array(shares), list(parameters.values()), ranks)


def ready_of(shares: np.ndarray, parameters: Sequence[torch.Tensor], ranks: Ranks) -> Ready:
    """When each share of the gradients is computed, as a mean over all ranks (`Compute.ready`).

    Args:
        shares: for each step and each gradient, the share of the backward pass after which the gradient is computed.
            The array has the shape (steps, parameters).
    """
    # Take the median over the steps on each rank, and then the mean of these medians over the ranks.
    times = np.median(everywhere(shares, ranks), axis=1).mean(axis=0)
    sizes = np.array([parameter.numel() * parameter.element_size() for parameter in parameters], float)
    order = [place for place in np.argsort(times, kind="stable") if sizes[place]]
    sent = np.cumsum(sizes[order]) / sizes.sum()
    sent[-1] = 1.0
    clipped = np.clip(times[order], 0, 1)
    return tuple(zip(sent.tolist(), clipped.tolist(), strict=True))
