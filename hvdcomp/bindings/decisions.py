"""Connects a policy to a training run: creates the coordinator, and makes the optimizer follow the batch size."""

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
    """Checks that rank 0 can read the calibration of a policy and write its decision log. Other ranks need no access to
    these files.

    Args:
        policy: the policy, a schedule of levels, or None.
        decision_log: the files of the decision log; None if there is no log.
        process_set: Horovod's process set; None for all ranks. With a process set, the rank may not be known yet. In
            this case, this function checks nothing, and the first step raises the error instead.

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
    """Creates the coordinator of the training run's policy.

    Returns:
        Two values. The first is the coordinator; None if there is no policy. The second is the message of an error on
        rank 0; None if there was no error. The binding raises this error on all ranks in the first step. If the error
        were raised here, the other ranks would wait forever.
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
    """The compressors that the policy of rank 0 can choose from, with their predicted times; None if the policy does
    not request them.

    Raises:
        ConfigurationError: if the calibration of the policy cannot be used.
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
    """The predicted duration of a step's exchange in seconds, by the number of bytes that a rank sends. The policy of
    rank 0 uses these predictions. The result is None if the policy does not request them.

    Raises:
        ConfigurationError: if the calibration of the policy cannot be used, or if no level stays within the limit of
            the policy.
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
    """Adapts the optimizer and the residuals to the batch size that the policy has chosen.

    Args:
        training: the `Training`, with its optimizer and residuals.
        coordinator: the coordinator of the training run's policy.

    Attributes:
        current: the batch size to which the optimizer is set.
    """

    def __init__(self, training: Training, coordinator: Coordinator) -> None:
        self._training = training
        self._coordinator = coordinator
        self.current = BatchSize()

    def apply(self) -> None:
        """Sets the optimizer to the batch size of the coordinator, and scales residuals. Call this method between two
        steps."""
        # A residual is a part of a gradient from an earlier step. The residual must change the weights as much as with
        # the learning rate of the earlier step. Therefore it is multiplied by the old learning rate and divided by the
        # new learning rate.
        factor = self.current.learning_rate_factor / self._coordinator.batch_size.learning_rate_factor
        if self.follow():
            self._training.engine.scale_residuals(factor, momentum=False)

    def follow(self) -> bool:
        """Sets the optimizer to the batch size of the coordinator, without scaling residuals. Residuals from a
        checkpoint already fit the batch size of the checkpoint.

        Returns:
            Whether the batch size has changed.
        """
        changed = self._coordinator.batch_size != self.current
        if changed:
            self.current = self._coordinator.batch_size
            self._training.follow_batch_size(self.current)
        return changed

    def undo(self) -> None:
        """Sets the optimizer to the batch size at the start of training."""
        if self.current != BatchSize():
            self._training.follow_batch_size(BatchSize())

    def require_same(self) -> None:
        """Raises ConfigurationError if a step begins although the optimizer is not set to the batch size of the
        coordinator."""
        if self._coordinator.batch_size != self.current:
            raise ConfigurationError(
                f"the policy {self._coordinator.policy} has increased the batch size, but the training loop still uses "
                "the old batch size. Before each step, read compression.accumulation, and multiply the usual number of "
                "backward passes per step by this value"
            )
