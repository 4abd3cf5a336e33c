"""The number of steps of a round of `LocalSteps` with `every="auto"`, decided during the training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch

from hvdcomp.specs.described import Described, at_least, number

MEASURED_ROUNDS = 3
"""The first rounds, of `start` steps, whose drift is the one that is allowed later."""

WIDTH = 251
"""Numbers of a sketch: its squared norm is off by 9 % of the vector's, one standard deviation."""


@dataclass(frozen=True, kw_only=True)
class AutoRounds(Described):
    """The rule for the length of a round: long enough that the exchange takes a small share of the time, but short
    enough that the ranks do not drift too far apart.

    After three rounds of `start` steps, a round has the least number H of steps with which the exchange takes at most
    `share` of the round's time. That number is limited so that the drift S, the mean over the ranks of the squared
    distance of a pseudo-gradient from their mean, is at most C times the learning rate times the largest one so far: C
    is what it was in the first three rounds (Jiang and Agrawal 2020, ADPSGD, arXiv:2007.06134, algorithm 2, where the
    learning rate only falls). S grows with H at least as H, at most as H², so that H times the square root of the
    allowed S over S is never too far. From one round to the next H at most doubles, and at least halves.

    Attributes:
        start: steps of the first rounds.
        share: largest share of a round's time that its exchange may take.
    """

    start: Annotated[int, at_least(1)] = 30
    share: Annotated[float, number(lambda value: 0 < value < 1, "above 0 and below 1")] = 0.1

    name: ClassVar[str] = "auto"
    examples: ClassVar[tuple[str, ...]] = ("auto", "auto:share=0.05,start=10")


@dataclass
class RoundLength:
    """Decides the length of a round by the rule of `AutoRounds`.

    Each rank has its own object, and all ranks use the decision of rank 0's object.

    Attributes:
        steps: number of steps of the round after the next exchange.
        rounds: number of measured rounds.
        allowed: C, or the part of it from the rounds so far.
        top_rate: the largest learning rate so far.
        step_seconds, exchange_seconds: mean seconds of a step and of an exchange, the latest counting half.
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
        """Takes in a round, and decides.

        Args:
            rule: the settings.
            steps: number of steps of the round.
            drift: S after the round.
            rate: the learning rate at its end. A round with 0 is ignored.
            step_seconds, exchange_seconds: seconds of a step until all ranks had made it, and of the exchange.
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
    """The sum of a vector's elements, each with a random sign, in `WIDTH` parts: float64 (WIDTH,) on the host.

    It is linear, with the same signs on all ranks, and its squared norm is that of the vector in expectation, so that
    sketches tell the distance of ranks from their mean (Alon, Matias and Szegedy 1996; for local steps Theologitis et
    al. 2024, arXiv:2405.20988, section 3).

    Args:
        tensors: the parts of the vector, of any shapes.
    """
    total = torch.zeros(WIDTH, dtype=torch.float64)
    for place, tensor in enumerate(tensors):
        flat = tensor.detach().reshape(-1)
        generator = torch.Generator(flat.device).manual_seed(place)
        signs = torch.randint(0, 2, flat.shape, generator=generator, dtype=torch.int8, device=flat.device)
        signed = torch.nn.functional.pad(flat * (2 * signs - 1), (0, -len(flat) % WIDTH))
        total += signed.view(-1, WIDTH).sum(0).double().cpu()
    return total
