"""A policy that records its statistics, and makes a test's decisions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from hvdcomp.communicators.in_process import InProcessCommunicator, run_ranks
from hvdcomp.policies.base import Policy
from hvdcomp.policies.decisions import Decision, Levels
from hvdcomp.policies.request import Period, Request, Statistic, Statistics
from tests.driven import COMPRESSED, Driven

EPOCH = 4  # steps


@dataclass(frozen=True)
class SpyState:
    """The number of decisions so far."""

    decided: int = 0


@dataclass(frozen=True, kw_only=True)
class Spy(Policy[SpyState]):
    """Keeps the statistics that it is given; makes one of `decisions` after the other.

    It asks for `asked` before each `every`-th decision, and before the others for no more than learning rates.
    """

    asked: frozenset[Statistic]
    often: Period
    decisions: Sequence[Decision]
    every: int = 1
    of: str = "local"
    seen: list[Statistics] = field(default_factory=list, compare=False)

    name: ClassVar[str] = "spy"
    state_type: ClassVar[type] = SpyState

    def request(self, state: SpyState) -> Request:
        rates = self.asked & {Statistic.LEARNING_RATES}
        return Request(rates if (state.decided + 1) % self.every else self.asked, self.often, self.of, ever=self.asked)

    def initial_state(self, tensors: Sequence[str]) -> SpyState:
        return SpyState()

    def decision(self, state: SpyState) -> Decision:
        return self.decisions[state.decided % len(self.decisions)]

    def update(self, state: SpyState, statistics: Statistics) -> SpyState:
        self.seen.append(statistics)
        return SpyState(state.decided + 1)


def at_ratio(*ratios: float) -> list[Decision]:
    return [Levels(dict.fromkeys(COMPRESSED, ratio)) for ratio in ratios]


def drive(policy: dict[str, Any], backend: str, steps: int, size: int = 2, **options: Any) -> list[tuple[Driven, Spy]]:
    """Runs a separate spy on each rank."""

    def work(communicator: InProcessCommunicator) -> tuple[Driven, Spy]:
        spy = Spy(**policy)
        return Driven(communicator, spy, backend, steps_per_epoch=EPOCH, **options).run(steps), spy

    return list(run_ranks(size, work))
