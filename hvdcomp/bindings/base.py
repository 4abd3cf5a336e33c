"""What the bindings of all frameworks share: one `Compression` at work in one training.

A binding learns from its framework which gradients there are, and gives results back; in between, every step is the
same: `begin` fixes its plan (in the first step the ranks compare their settings before), `check_presence` makes sure
that all ranks take part at the same levels, `exchange` runs the engine and tells the coordinator.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence, Set
from importlib.metadata import version
from typing import Any, ClassVar

import numpy

from hvdcomp.adaptation.channel import Broadcaster, CommunicatorBroadcaster
from hvdcomp.adaptation.coordinator import Coordinator
from hvdcomp.adaptation.decision_log import DecisionLog
from hvdcomp.adaptation.in_step import coordinator_for
from hvdcomp.arrays.types import Array
from hvdcomp.bindings import checkpoint
from hvdcomp.bindings.setup import Setup
from hvdcomp.communicators import HorovodCommunicator
from hvdcomp.compressors.protocol import TensorInfo
from hvdcomp.errors import ConfigurationError
from hvdcomp.exchange.agreement import WEIGHTS, refused_on_every_rank, require_agreement, require_same_levels
from hvdcomp.exchange.engine import Engine
from hvdcomp.exchange.waste import WasteWarning
from hvdcomp.policies import LevelSchedule, Policy
from hvdcomp.policies.auto import Auto
from hvdcomp.policies.decisions import BatchSize
from hvdcomp.policies.request import Candidates

# What each rank puts in for one step: this number plus a digest of its levels, so that the ranks' sum tells whether all
# of them take part, and all at the same levels.
PRESENCE = 2**44
_DIGESTS = 2**20
_UNIT = 2**10  # between digests, since Horovod's mean of whole numbers drops what is behind the point
PRESENCE_BYTES = 8


class Binding(ABC):
    """Ties one `Compression` to one training.

    Args:
        setup: what the user gave.
        tensors: all parameters that may have a gradient.
        communicator: of the ranks that exchange.
        like: an empty array of the framework, where the communicator works.

    Attributes:
        engine: that compresses.
        coordinator: of the policy, if there is one that rank 0 decides by.
        presence: what this rank puts in for the step that has begun.

    Class attributes:
        overlaps_with_policy: whether, in a training with a policy, Horovod itself carries what is nothing but casts.
    """

    overlaps_with_policy: ClassVar[bool]

    def __init__(
        self,
        setup: Setup,
        tensors: Iterable[TensorInfo],
        communicator: HorovodCommunicator,
        like: Array,
    ) -> None:
        self.setup = setup
        self.communicator = communicator
        self._like = like
        self._loss_scale: float | None = None
        self._refused: str | None = None  # why this rank cannot make the step that has begun
        settings = setup.settings
        self.engine = Engine(
            communicator,
            tensors,
            settings.compressor,
            memory=settings.memory,
            seed=settings.seed,
            min_numel=settings.min_numel,
            min_ndim=settings.min_ndim,
            bytes_per_tensor=PRESENCE_BYTES,
            ledger=setup.ledger,
        )
        self._waste = WasteWarning(self.engine)
        self._log_error: str | None = None
        self._calibration_error: str | None = None
        self.coordinator = self._make_coordinator()
        self._batch_size = BatchSize(1, 1.0)  # as it was put into the optimizer
        self.presence = PRESENCE
        self._settings_agreed = self._weights_agreed = False
        self._first_step: int | None = None

    # What only the framework's own binding knows.

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """What Horovod was told, as far as it must be the same on all ranks; JSON-serialisable."""

    @abstractmethod
    def trained(self) -> Set[str]:
        """The names of the parameters whose gradients Horovod averages."""

    @property
    def steps_before_broadcast(self) -> int:
        """How many steps a training may make before all ranks have the same weights."""
        return 0

    @abstractmethod
    def checksums(self, names: Sequence[str]) -> list[int]:
        """A number for each parameter's value, by which the ranks compare their weights."""

    def reason_to_refuse(self) -> str | None:
        """Why this rank cannot make the step that begins; None if it can."""
        return None

    @abstractmethod
    def learning_rates(self) -> tuple[float, ...]:
        """The rate of each parameter group, as the user set it.

        Raises:
            ConfigurationError: if the optimizer is not known.
        """

    @abstractmethod
    def follow_batch_size(self, batch_size: BatchSize) -> None:
        """Makes the optimizer accumulate so many batches, and step at so many times its learning rate."""

    @abstractmethod
    def loss_scale(self) -> float | None:
        """By how much the loss is multiplied in this step; None where that is not known."""

    @abstractmethod
    def momentum_of_optimizer(self) -> str | None:
        """The first momentum in the optimizer's settings, as text; None without one."""

    @abstractmethod
    def copy(self, array: Array) -> Array:
        """An array of the same content that nothing changes any more."""

    @abstractmethod
    def place(self, array: Array, name: str) -> Array:
        """The array on the device of the parameter of this name."""

    # A step.

    def begin(self) -> None:
        """Starts a step: the plan is fixed now, so that all tensors of the step take the same way.

        The first step waits here for all ranks, to compare their settings.

        Raises:
            RankMismatchError: on every rank, if the settings or the weights of any differ.
        """
        if self.communicator.is_stale:
            raise ConfigurationError(
                f"Horovod was started anew, and rank {self.communicator.rank} of {self.communicator.world_size} is now "
                "another one: hvdcomp does not follow elastic changes by itself. After each make a new "
                "hvdcomp.Compression and hvd.DistributedOptimizer, and give it the old one's state_dict()."
            )
        self._agree()
        settings = self.setup.settings
        if isinstance(settings.policy, LevelSchedule):
            step = self.engine.step_number
            own = settings.compressor.level
            self.engine.set_level(settings.policy.level_at(step, settings.steps_per_epoch, own))
        if self.coordinator is not None:
            self.coordinator.begin_step(self.learning_rates)
            self._require_same_batch_size()
        self.engine.begin()
        self._waste.look()
        self._refused = self.reason_to_refuse()
        digest = self.engine.digest
        if self._refused is not None:  # it disagrees with the ranks that do not refuse, so that all of them learn why
            digest += _DIGESTS // 3
        self.presence = PRESENCE + digest % _DIGESTS * _UNIT
        self._follow_loss_scale()

    def check_presence(self, total: int) -> None:
        """Stops all ranks if one is missing, was configured otherwise, or has other levels.

        Args:
            total: the sum of the ranks' `presence`.
        """
        size = self.communicator.world_size
        present = total / PRESENCE
        if abs(present - size) > 0.5:
            raise ConfigurationError(
                f"only {present:.0f} of {size} ranks took part in this step: hvd.join() "
                "does not work with gradient compression. Give every rank the same number of batches."
            )
        if total != self.presence * size:
            require_same_levels(self.communicator, self.engine.digest, self._like, self._refused)
        self.refuse()

    def exchange(self, gradients: Mapping[str, Array]) -> dict[str, Array]:
        """Runs the engine on the gradients of a step, and ends the step; returns the means by name."""
        if self.coordinator is not None:
            self.coordinator.before_exchange()
        results = self.engine.step(gradients)
        self.observe("local", gradients, self.engine.found_inf)
        self.observe("aggregated", results, self.engine.found_inf)
        self.end_step()
        return results

    def end_step(self) -> None:
        """To be called at the end of a step that did not go through `exchange`."""
        if self.coordinator is not None:
            self.coordinator.end_step()

    def observe(self, source: str, gradients: Mapping[str, Array], found_inf: Array | None = None) -> None:
        """Shows gradients of a step to the coordinator, which looks at them if they are what its policy wants."""
        if self.coordinator is not None and self.coordinator.source == source:
            self.coordinator.observe(gradients, 1 / (self._loss_scale or 1.0), found_inf)

    @property
    def needs_engine(self) -> bool:
        """Whether the step that has begun has to go through the engine, whatever its plan."""
        return self.coordinator is not None and self.coordinator.needs_engine

    # Settings and refusals.

    @property
    def agreed(self) -> bool:
        """Whether the ranks have nothing more to compare."""
        return self._settings_agreed and self._weights_agreed

    def _agree(self) -> None:
        """Compares settings before the first step, and weights as soon as they must be the same."""
        if self.agreed:
            return
        step = self.engine.step_number
        if self._first_step is None:
            self._first_step = step
        weights_due = step - self._first_step >= self.steps_before_broadcast
        if self._settings_agreed and not weights_due:
            return
        facts: dict[str, Any] = {}
        with refused_on_every_rank(self.communicator, self._like):
            if not self._settings_agreed:
                facts |= self._facts()
                self._refuse_double_momentum()
            if weights_due:
                facts |= self._weights()
        require_agreement(self.communicator, facts, self._like)
        if not self._settings_agreed and self.coordinator is not None:
            self.coordinator.start_log()
        self._settings_agreed, self._weights_agreed = True, weights_due

    def _facts(self) -> dict[str, Any]:
        tensors, trained = self.engine.tensors, self.trained()
        parameters = {f"parameter {name}": f"{tensors[name].dtype} {tensors[name].shape}" for name in sorted(trained)}
        settings = self.setup.settings
        return {
            **settings.describe(),
            **self.facts(),
            "level": settings.compressor.level if self.engine.level is None else self.engine.level,
            "step": self.engine.step_number,
            "error of the decision log": self._log_error,
            "error of the calibration": self._calibration_error,
            "momentum of the optimizer": self._doubled_momentum(),
            "hvdcomp": version("hvdcomp"),
            "numpy": numpy.__version__,
            "parameters that are not trained": [name for name in tensors if name not in trained],
            **parameters,
        }

    def _weights(self) -> dict[str, Any]:
        names = sorted(self.trained())
        return {f"{WEIGHTS}{name}": f"{number:x}" for name, number in zip(names, self.checksums(names), strict=True)}

    def refuse(self) -> None:
        """Raises ConfigurationError if this rank cannot make the step that has begun."""
        if self._refused is not None:
            raise ConfigurationError(self._refused)

    def _doubled_momentum(self) -> str | None:
        """The optimizer's momentum, if the memory applies one too."""
        if self.engine.memory is None or not self.engine.memory.is_momentum:
            return None
        return self.momentum_of_optimizer()

    def _refuse_double_momentum(self) -> None:
        found = self._doubled_momentum()
        if found:
            raise ConfigurationError(
                f"the optimizer has {found}, but {self.engine.memory} applies momentum itself, before compression; use "
                "an optimizer without momentum (SGD with momentum=0) and set momentum in the memory "
                "(dgc:momentum=...), or choose memory=hvdcomp.ErrorFeedback()"
            )

    def refuse_predivision(self, factor: float) -> None:
        """Raises ConfigurationError if Horovod scales what it allreduces, where compression does not let it."""
        if factor != 1.0:
            raise ConfigurationError(
                f"gradient_predivide_factor={factor} scales what Horovod allreduces, but compressed gradients do not "
                "travel in Horovod's allreduce; leave it at 1.0"
            )

    def _follow_loss_scale(self) -> None:
        scale = self.loss_scale()
        if scale is None:
            return
        if self._loss_scale is not None and scale != self._loss_scale:
            self.engine.scale_residuals(scale / self._loss_scale)
        self._loss_scale = scale

    # What concerns a policy that rank 0 decides by.

    def _make_coordinator(self) -> Coordinator | None:
        settings = self.setup.settings
        if not isinstance(settings.policy, Policy):
            return None
        candidates = self._make_candidates(settings.policy) if isinstance(settings.policy, Auto) else None

        def broadcaster() -> Broadcaster:
            if self.communicator.has_mpi:
                from hvdcomp.communicators.mpi import MPIBroadcaster

                return MPIBroadcaster()
            return CommunicatorBroadcaster(self.communicator, self._like)

        return coordinator_for(settings.policy)(
            settings.policy,
            self.engine,
            broadcaster,
            self._like,
            settings.steps_per_epoch,
            self._open_log(),
            candidates,
        )

    def _make_candidates(self, policy: Auto) -> Candidates | None:
        """What rank 0's policy has to choose from. A calibration that will not do is told to all with the settings."""
        from hvdcomp.adaptation.candidates import candidates_of
        from hvdcomp.perfmodel import CalibrationError

        if self.communicator.rank != 0:
            return None
        model, batch = policy.model or None, policy.batch or None
        try:
            return candidates_of(self.engine, policy.calibration, model, batch, self.overlaps_with_policy)
        except CalibrationError as error:
            self._calibration_error = str(error)
            return None

    def _open_log(self) -> DecisionLog | None:
        """Rank 0's log. One that cannot be written is told to all ranks with the settings."""
        path = self.setup.decision_log
        if path is None or self.communicator.rank != 0:
            return None
        try:
            return DecisionLog(path)
        except ConfigurationError as error:
            self._log_error = str(error)
            return None

    @property
    def accumulation(self) -> int:
        """`Compression.accumulation`, after what is decided has been put into the optimizer."""
        if self.coordinator is None:
            return 1
        self.coordinator.settle(self.learning_rates)
        self._apply_batch_size()
        return self._batch_size.accumulation

    def _apply_batch_size(self) -> None:
        """Puts the batch size in force into the optimizer, between two steps."""
        if self.coordinator is None or self.coordinator.batch_size == self._batch_size:
            return
        # A residual is a change of the weights that is still to come, at the learning rate of its time.
        factor = self._batch_size.learning_rate_factor / self.coordinator.batch_size.learning_rate_factor
        self.engine.scale_residuals(factor, momentum=False)
        self._batch_size = self.coordinator.batch_size
        self.follow_batch_size(self._batch_size)

    def _require_same_batch_size(self) -> None:
        assert self.coordinator is not None
        if self.coordinator.batch_size != self._batch_size:
            raise ConfigurationError(
                f"the policy {self.coordinator.policy} makes the batch larger, and the training loop does not follow: "
                "before each step read compression.accumulation, and do so many times the usual backward passes"
            )

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """`Compression.state_dict`."""
        if self.coordinator is not None:
            self.coordinator.receive()
            self._apply_batch_size()
        state = checkpoint.state_of(self.engine, self.coordinator, self.copy)
        state["own"]["loss_scale"] = self._loss_scale
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """`Compression.load_state_dict`."""
        checkpoint.restore(state, self.engine, self.coordinator, self.place)
        self._loss_scale = state["own"].get("loss_scale")
        if self.coordinator is not None and self.coordinator.batch_size != self._batch_size:
            self._batch_size = self.coordinator.batch_size
            self.follow_batch_size(self._batch_size)
