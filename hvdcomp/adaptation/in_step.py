"""GraVAC to the letter: what a step sends is decided from the gains of that step itself.

Only a policy with `lag=0` that asks for gains does so. All ranks wait, in the middle of a step, for rank 0's decision.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from hvdcomp.adaptation.coordinator import Coordinator
from hvdcomp.arrays.types import Array
from hvdcomp.policies.base import Policy
from hvdcomp.policies.decisions import Decision, MultiLevel
from hvdcomp.policies.request import Request, Statistic, Statistics


def coordinator_for(policy: Policy[Any]) -> type[Coordinator]:
    """The class whose objects drive a policy."""
    in_step = policy.lag == 0 and Statistic.GAINS in policy.first_request.ever
    return InStepCoordinator if in_step else Coordinator


class InStepCoordinator(Coordinator):
    """Drives a policy that decides twice a step: from its gains what it sends, and at its end from its time."""

    def _end_period(self, statistics: Statistics) -> None:
        self._decide_on_rank_0(statistics)  # the others hear of it with the decision from the next step's gains
        self._await_gains()

    def _follow(self, decision: Decision) -> None:
        self.observers.follow(decision, self._decide_in_step)

    def restore(
        self, shared: Mapping[str, Any], own: Mapping[str, Any] | None, place: Callable[[Array, str], Array]
    ) -> None:
        """Goes on from a checkpoint, as in `Coordinator`."""
        super().restore(shared, own, place)
        self._await_gains()

    def _await_gains(self) -> None:
        """Prepares a step in the middle of which it will be decided what is sent."""
        heard = self.policy.decision(self.channel.state)
        assert isinstance(heard, MultiLevel)
        # Rank 0 knows more than all ranks have heard, but the ranks compare their plans when the step begins.
        self.engine.set_plan(dataclasses.replace(heard, send=None).plan(self.plans))
        self._follow(self.policy.decision(self.channel.latest))

    def _decide_in_step(self) -> MultiLevel:
        """Called by the observer of the gains, on all ranks, when rank 0 has measured them."""
        if self.channel.decides:
            gains = self.observers.statistics(Request(frozenset({Statistic.GAINS})), 0)
            self._decide_on_rank_0(Statistics(self.progress.step, self.progress.epoch_or_none, **gains))
        self.channel.send()
        self.decision = self.channel.receive()
        assert isinstance(self.decision, MultiLevel)
        self.engine.set_plan(self.decision.plan(self.plans))
        self._take_up_in_step()
        return self.decision
