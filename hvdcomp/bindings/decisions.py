"""Policies in a training: the coordinator, and the optimizer that follows the batch size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from hvdcomp.adaptation.channel import Broadcaster, CommunicatorBroadcaster
from hvdcomp.adaptation.coordinator import Coordinator
from hvdcomp.adaptation.decision_log import DecisionLog, LogFiles
from hvdcomp.bindings.adam import kind_of
from hvdcomp.bindings.training import Training
from hvdcomp.communicators import rank_so_far
from hvdcomp.errors import ConfigurationError
from hvdcomp.policies import Policy
from hvdcomp.policies.decisions import BatchSize
from hvdcomp.policies.request import Candidates, Statistic


def check_files(policy: Any, decision_log: LogFiles | None, process_set: Any) -> None:
    """Checks the files that rank 0 reads and writes for a policy; other ranks need no access to them.

    With a process set, the rank may not be known yet; the first step then reports errors.

    Raises:
        ConfigurationError: on rank 0, if the calibration cannot be read, or the decision log cannot be written.
    """
    if not isinstance(policy, Policy) or process_set is not None or rank_so_far() != 0:
        return
    if policy.first_request.ever & {Statistic.CANDIDATES, Statistic.EXCHANGE_SECONDS}:
        from hvdcomp.perfmodel import CalibrationError, load

        source = cast(Any, policy).calibration
        try:
            load(source)
        except CalibrationError as error:
            raise ConfigurationError(_cannot_use(source, error)) from None
    if decision_log is not None:
        DecisionLog(*decision_log)


def make_coordinator(training: Training) -> tuple[Coordinator | None, str | None]:
    """Makes the coordinator of the training's policy.

    Returns:
        The coordinator, or None without a policy; and the error on rank 0, or None. The binding raises the error on all
        ranks in the first step, because an error raised here would leave the other ranks waiting.
    """
    setup, communicator = training.setup, training.communicator
    policy = setup.compression.settings.policy
    if not isinstance(policy, Policy):
        return None, None
    error: str | None = None
    log: DecisionLog | None = None
    candidates: Candidates | None = None
    exchange_seconds: Mapping[int, float] | None = None
    if Statistic.CANDIDATES in policy.first_request.ever:
        training.engine.overlap.from_rank_0 = setup.compression.settings.bucket_bytes is None
    if communicator.rank == 0:
        try:
            candidates = _candidates(policy, training)
            exchange_seconds = _exchange_seconds(policy, training)
            log = None if setup.compression.decision_log is None else DecisionLog(*setup.compression.decision_log)
        except ConfigurationError as raised:
            error = str(raised)

    def broadcaster() -> Broadcaster:
        if communicator.has_mpi:
            from hvdcomp.communicators.mpi import MPIBroadcaster

            return MPIBroadcaster()
        return CommunicatorBroadcaster(communicator, training.like)

    steps = setup.compression.settings.steps_per_epoch
    coordinator = Coordinator(
        policy, training.engine, broadcaster, training.like, steps, log, candidates, training.now, exchange_seconds
    )
    return coordinator, error


def _candidates(policy: Any, training: Training) -> Candidates | None:
    """The candidates of rank 0's policy, if it requests them.

    Raises:
        ConfigurationError: if its calibration cannot be used.
    """
    if Statistic.CANDIDATES not in policy.first_request.ever:
        return None
    from hvdcomp.adaptation.candidates import candidates_of
    from hvdcomp.perfmodel import CalibrationError, Criteria

    try:
        model, batch = policy.model or None, policy.batch or None
        overlaps = training.overlaps_with_policy
        criteria = None
        if policy.loss:
            warm_up = training.warm_up()
            criteria = Criteria(policy.loss, kind_of(training.optimizer), () if warm_up is None else (warm_up,))
        return candidates_of(training.engine, policy.calibration, model, batch, overlaps, policy.compressors, criteria)
    except CalibrationError as error:
        raise ConfigurationError(_cannot_use(policy.calibration, error)) from None


def _exchange_seconds(policy: Any, training: Training) -> Mapping[int, float] | None:
    """The exchange times of rank 0's policy, if it requests them.

    Raises:
        ConfigurationError: if its calibration cannot be used, or no level keeps its limit.
    """
    request = policy.first_request
    if Statistic.EXCHANGE_SECONDS not in request.ever:
        return None
    from hvdcomp.adaptation.exchange_seconds import exchange_seconds_of
    from hvdcomp.perfmodel import CalibrationError

    try:
        model, batch, overlaps = policy.model or None, policy.batch or None, training.overlaps_with_policy
        seconds = exchange_seconds_of(training.engine, policy.calibration, request.around, model, batch, overlaps)
    except CalibrationError as error:
        raise ConfigurationError(_cannot_use(policy.calibration, error)) from None
    policy.require_reachable(seconds)
    return seconds


def _cannot_use(calibration: str, error: ValueError) -> str:
    return (
        f"the policy's calibration={calibration!r} cannot be used: {error}. Make a calibration with `hvdcomp calibrate`"
    )


class BatchInForce:
    """Keeps the optimizer and the residuals at the coordinator's batch size.

    Args:
        training: the training, with its optimizer and residuals.
        coordinator: the coordinator of its policy.

    Attributes:
        current: the batch size of the optimizer.
    """

    def __init__(self, training: Training, coordinator: Coordinator) -> None:
        self._training = training
        self._coordinator = coordinator
        self.current = BatchSize()

    def apply(self) -> None:
        """Sets the optimizer to the batch size in force, between two steps."""
        # A residual is a pending change of the weights, at the learning rate of its step.
        factor = self.current.learning_rate_factor / self._coordinator.batch_size.learning_rate_factor
        if self.follow():
            self._training.engine.scale_residuals(factor, momentum=False)

    def follow(self) -> bool:
        """Sets the optimizer only: residuals from a checkpoint already fit its batch size.

        Returns:
            Whether the batch size changed.
        """
        changed = self._coordinator.batch_size != self.current
        if changed:
            self.current = self._coordinator.batch_size
            self._training.follow_batch_size(self.current)
        return changed

    def undo(self) -> None:
        """Sets the optimizer back to the batch size of the start."""
        if self.current != BatchSize():
            self._training.follow_batch_size(BatchSize())

    def require_same(self) -> None:
        """Raises ConfigurationError if a step begins at another batch size than the one in force."""
        if self._coordinator.batch_size != self.current:
            raise ConfigurationError(
                f"the policy {self._coordinator.policy} has increased the batch size, but the training loop still uses "
                "the old batch size. Before each step, read compression.accumulation, and multiply the usual number of "
                "backward passes per step by compression.accumulation"
            )
