"""What a policy that rank 0 decides by needs: a coordinator, and an optimizer that follows the batch size."""

from __future__ import annotations

from collections.abc import Callable

from hvdcomp.adaptation.channel import Broadcaster, CommunicatorBroadcaster
from hvdcomp.adaptation.coordinator import Coordinator
from hvdcomp.adaptation.decision_log import DecisionLog
from hvdcomp.adaptation.in_step import coordinator_for
from hvdcomp.arrays.types import Array
from hvdcomp.bindings.setup import Setup
from hvdcomp.communicators import HorovodCommunicator
from hvdcomp.errors import ConfigurationError
from hvdcomp.exchange.engine import Engine
from hvdcomp.policies import Policy
from hvdcomp.policies.auto import Auto
from hvdcomp.policies.decisions import BatchSize
from hvdcomp.policies.request import Candidates


def make_coordinator(
    setup: Setup, engine: Engine, communicator: HorovodCommunicator, like: Array, overlaps: bool
) -> tuple[Coordinator | None, dict[str, str]]:
    """The coordinator of the policy, if there is one that rank 0 decides by.

    Args:
        like: an empty array of the framework, where the communicator works.
        overlaps: as `Binding.overlaps_with_policy`.

    Returns:
        The coordinator or None, and what went wrong on rank 0. The binding tells that to all ranks with the settings:
        an error raised here would leave them waiting.
    """
    policy = setup.settings.policy
    if not isinstance(policy, Policy):
        return None, {}
    errors: dict[str, str] = {}
    log: DecisionLog | None = None
    candidates: Candidates | None = None
    if communicator.rank == 0:
        candidates = _candidates(policy, engine, overlaps, errors)
        try:
            log = None if setup.decision_log is None else DecisionLog(setup.decision_log)
        except ConfigurationError as error:
            errors["error of the decision log"] = str(error)

    def broadcaster() -> Broadcaster:
        if communicator.has_mpi:
            from hvdcomp.communicators.mpi import MPIBroadcaster

            return MPIBroadcaster()
        return CommunicatorBroadcaster(communicator, like)

    make = coordinator_for(policy)
    return make(policy, engine, broadcaster, like, setup.settings.steps_per_epoch, log, candidates), errors


def _candidates(policy: Policy, engine: Engine, overlaps: bool, errors: dict[str, str]) -> Candidates | None:
    """What rank 0's policy has to choose from, if it chooses by a calibration."""
    from hvdcomp.adaptation.candidates import candidates_of
    from hvdcomp.perfmodel import CalibrationError

    if not isinstance(policy, Auto):
        return None
    try:
        return candidates_of(engine, policy.calibration, policy.model or None, policy.batch or None, overlaps)
    except CalibrationError as error:
        errors["error of the calibration"] = str(error)
        return None


class BatchInForce:
    """Keeps the optimizer and the residuals at the batch size that the coordinator says.

    Args:
        coordinator: of the policy.
        engine: whose residuals follow the learning rate.
        follow: puts a batch size into the optimizer.
    """

    def __init__(self, coordinator: Coordinator, engine: Engine, follow: Callable[[BatchSize], None]) -> None:
        self._coordinator = coordinator
        self._engine = engine
        self._follow = follow
        self.current = BatchSize()  # as it was put into the optimizer

    def apply(self) -> None:
        """Puts the batch size in force into the optimizer, between two steps."""
        # A residual is a change of the weights that is still to come, at the learning rate of its time.
        factor = self.current.learning_rate_factor / self._coordinator.batch_size.learning_rate_factor
        if self._follow_coordinator():
            self._engine.scale_residuals(factor, momentum=False)

    def restore(self) -> None:
        """The same after a restart: the residuals of a checkpoint are those of its batch size already."""
        self._follow_coordinator()

    def _follow_coordinator(self) -> bool:
        changed = self._coordinator.batch_size != self.current
        if changed:
            self.current = self._coordinator.batch_size
            self._follow(self.current)
        return changed

    def require_same(self) -> None:
        """Raises ConfigurationError if a step begins at another batch size than that in force."""
        if self._coordinator.batch_size != self.current:
            raise ConfigurationError(
                f"the policy {self._coordinator.policy} makes the batch larger, and the training loop does not follow: "
                "before each step read compression.accumulation, and make this number of times the usual backward "
                "passes"
            )
