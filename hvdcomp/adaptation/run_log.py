"""Writes the start of a run and each decision to the decision log, on rank 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvdcomp.adaptation.channel import DecisionChannel
from hvdcomp.adaptation.decision_log import DecisionLog
from hvdcomp.adaptation.plans import Plans
from hvdcomp.adaptation.step_counter import Progress
from hvdcomp.errors import ConfigurationError, warn_alone
from hvdcomp.policies.decisions import Decision
from hvdcomp.policies.request import Statistics


class RunLog:
    """Writes to a decision log. If writing fails, the object stops writing, because a full disk must not end the
    training run or block the ranks.

    Args:
        log: the decision log; None if there is no log.
        channel: the channel that sends the decisions.
        progress: the object that counts the steps and epochs of the run.
    """

    def __init__(self, log: DecisionLog | None, channel: DecisionChannel, progress: Progress) -> None:
        self._log = log
        self._channel = channel
        self._progress = progress

    def start(self, plans: Plans) -> None:
        """Records that a run begins or is resumed."""
        engine, policy = plans.engine, self._channel.policy
        self._write(
            DecisionLog.start,
            policy.decision(self._channel.latest),
            step=self._progress.step,
            epoch=self._progress.epoch_or_none,
            policy=str(policy),
            compressor=str(engine.compressor),
            tensors={name: engine.tensors[name].shape for name in plans.names},
            steps_per_epoch=self._progress.steps_per_epoch,
            ranks=engine.communicator.world_size,
        )

    def decision(self, statistics: Statistics, decision: Decision) -> None:
        """Writes a decision for the current or next step."""
        self._write(
            DecisionLog.decision,
            decision,
            step=statistics.step,
            epoch=statistics.epoch,
            from_step=self._progress.step,
            statistics=statistics,
        )

    def _write(self, write: Callable[..., None], decision: Decision, **record: Any) -> None:
        if self._log is None:
            return
        state = self._channel.policy.to_json(self._channel.latest)
        try:
            write(self._log, state=state, decision=decision.to_json(), **record)
        except ConfigurationError as error:
            self._log = None
            warn_alone(f"hvdcomp has stopped writing the decision log, but training continues: {error}")
