"""Decides, during training, the number of steps of a round of `LocalSteps` with `every="auto"`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch

from hvdcomp.specs.described import Described, at_least, number

MEASURED_ROUNDS = 3
"""The number of rounds at the beginning that have `start` steps each. The drift in these rounds determines the drift
that is allowed later."""

WIDTH = 251
"""The number of elements of a sketch. With this number, the standard deviation of the sketch's squared norm is 9 % of
the vector's squared norm."""


@dataclass(frozen=True, kw_only=True)
class AutoRounds(Described):
    """The rule for the length of a round. A round should be long enough that the exchange takes only a small share of
    the time, but short enough that the ranks do not drift too far apart.

    The first three rounds have `start` steps. After the first three rounds, a round has H steps, where H is the
    smallest number for which the exchange takes at most `share` of the round's time. The drift of the ranks limits H.
    The drift S is the mean squared distance of the ranks' pseudo-gradients from their mean. S may be at most C times
    the learning rate times the largest learning rate so far. C is the value of S / (rate times largest rate) in the
    first three rounds (Jiang and Agrawal 2020, ADPSGD, arXiv:2007.06134, algorithm 2, in which the learning rate only
    falls). S grows at least in proportion to H, and at most in proportion to H². So the drift stays within its limit if
    the next round has at most H times the square root of (allowed S / measured S) steps. From one round to the next, H
    at most doubles and at most halves.

    Attributes:
        start: number of steps of each of the first three rounds.
        share: the largest share of a round's time that the exchange may take.
    """

    start: Annotated[int, at_least(1)] = 30
    share: Annotated[float, number(lambda value: 0 < value < 1, "above 0 and below 1")] = 0.1

    name: ClassVar[str] = "auto"
    examples: ClassVar[tuple[str, ...]] = ("auto", "auto:share=0.05,start=10")


@dataclass
class RoundLength:
    """Decides the length of a round with the rule of `AutoRounds`.

    Each rank has its own object, and all ranks use the decision of rank 0's object.

    Attributes:
        steps: the number of steps of the round after the next exchange.
        rounds: the number of measured rounds.
        allowed: C, computed from the rounds so far.
        top_rate: the largest learning rate so far.
        step_seconds, exchange_seconds: moving averages of the durations of a step and of an exchange, in seconds. The
            latest value has the weight 1/2.
    """

    steps: int
    rounds: int = 0
    allowed: float = 0.0
    top_rate: float = 0.0
    step_seconds: float = 0.0
    exchange_seconds: float = 0.0

    def learn(
        self, rule: AutoRounds, steps: int, drift: float, rate: float, step_seconds: float, exchange_seconds: float
    ) -> None:
        """Adds the measurements of a round, and decides the next length.

        Args:
            rule: the settings of the rule.
            steps: the number of steps of the round.
            drift: the drift S at the end of the round.
            rate: the learning rate at the end of the round. A round with rate 0 is ignored.
            step_seconds, exchange_seconds: the duration of a step in seconds, including the time until all ranks have
                finished the step, and the duration of the exchange in seconds.
        """
        if rate <= 0:
            return
        self.rounds += 1
        first = self.rounds == 1
        self.step_seconds = step_seconds if first else (self.step_seconds + step_seconds) / 2
        self.exchange_seconds = exchange_seconds if first else (self.exchange_seconds + exchange_seconds) / 2
        self.top_rate = max(self.top_rate, rate)
        scale = rate * self.top_rate
        if self.rounds <= MEASURED_ROUNDS:
            self.allowed += drift / scale / MEASURED_ROUNDS
            return
        most = 2.0 * steps
        by_time = self.exchange_seconds * (1 / rule.share - 1) / max(self.step_seconds, 1e-9)
        by_drift = most if drift <= 0 else steps * math.sqrt(self.allowed * scale / drift)
        wanted = min(math.ceil(min(by_time, most)), math.floor(min(by_drift, most)))
        self.steps = max(1, steps // 2, wanted)


def sketch(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Computes a sketch of a vector, as a float64 tensor of shape (WIDTH,) on the host. The vector is divided into
    `WIDTH` parts, and the elements of each part are added with random signs.

    The sketch is linear, and the signs are the same on all ranks. The expectation of the sketch's squared norm is the
    squared norm of the vector. Therefore sketches are enough to estimate the distance of ranks from their mean (Alon,
    Matias and Szegedy 1996; for local steps Theologitis et al. 2024, arXiv:2405.20988, section 3).

    Args:
        tensors: the tensors that together form the vector. They may have any shapes.
    """
    total = torch.zeros(WIDTH, dtype=torch.float64)
    for place, tensor in enumerate(tensors):
        flat = tensor.detach().reshape(-1)
        generator = torch.Generator(flat.device).manual_seed(place)
        signs = torch.randint(0, 2, flat.shape, generator=generator, dtype=torch.int8, device=flat.device)
        signed = torch.nn.functional.pad(flat * (2 * signs - 1), (0, -len(flat) % WIDTH))
        total += signed.view(-1, WIDTH).sum(0).double().cpu()
    return total
