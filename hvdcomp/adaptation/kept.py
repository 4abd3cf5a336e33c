"""What outlives a restart of a coordinator: what all ranks know, and what only rank 0 knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hvdcomp.adaptation.channel import DecisionChannel
from hvdcomp.adaptation.observers import Observers
from hvdcomp.adaptation.step_counter import Progress, Rates
from hvdcomp.arrays.types import Array
from hvdcomp.errors import ConfigurationError
from hvdcomp.policies.base import Policy
from hvdcomp.policies.decisions import BatchSize, Decision
from hvdcomp.policies.request import Statistics


class Kept:
    """The part of a `Coordinator` that saves and restores it; its attributes are those of that class."""

    channel: DecisionChannel
    observers: Observers
    progress: Progress
    _ended: Statistics | None
    _first_rates: Rates | None
    _partial: bool

    @property
    def policy(self) -> Policy[Any]:
        """The policy that is driven."""
        return self.channel.policy

    @property
    def batch_size(self) -> BatchSize:
        """The part of the decision in force that is about the batch."""
        raise NotImplementedError

    def _put_in_force(self, decision: Decision) -> None:
        raise NotImplementedError

    def shared_state(self) -> dict[str, Any]:
        """What all ranks know, between two steps, after `receive`."""
        return {
            "policy": str(self.policy),
            "state": self.policy.to_json(self.channel.state),
            "progress": [self.progress.step, self.progress.epoch, self.progress.taken],
            "steps_per_epoch": self.progress.steps_per_epoch,
            "ended": None if self._ended is None else [self._ended.step, self._ended.epoch],
            "period_rates": self._first_rates,
            **({"partial": True} if self._partial else {}),  # where it is so: earlier versions know nothing of it
        }

    def own_state(self, copy: Callable[[Array], Array]) -> dict[str, Any]:
        """What only rank 0 knows."""
        return {
            "latest": self.policy.to_json(self.channel.latest),
            "ended": None if self._ended is None else self._ended.known(),
            **self.observers.state(copy),
        }

    def restore(
        self, shared: Mapping[str, Any], own: Mapping[str, Any] | None, place: Callable[[Array, str], Array]
    ) -> None:
        """Goes on from `shared_state` and, on rank 0, from its `own_state`."""
        self._partial = shared.get("partial", False)
        if own is None and self.channel.decides and not self._partial:
            raise ConfigurationError("rank 0 has to load the checkpoint that rank 0 wrote")
        self.channel.enter(self.policy.from_json(shared["state"]))
        self.progress.step, self.progress.epoch, self.progress.taken = shared["progress"]
        self._put_in_force(self.policy.decision(self.channel.state))
        self.progress.go_on_after(shared.get("steps_per_epoch"), self.batch_size.accumulation)
        self._ended = None if shared["ended"] is None else Statistics(*shared["ended"])
        self._first_rates = shared["period_rates"] and tuple(shared["period_rates"])
        if own is not None and self.channel.decides:
            self.channel.be_ahead(self.policy.from_json(own["latest"]))
            self._ended = None if own["ended"] is None else Statistics(**own["ended"])
            self.observers.restore(own, place)
