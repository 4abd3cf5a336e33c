"""The base class of the bindings of all frameworks. A binding connects one `Compression` to one training run.

A binding gets gradients from its framework, and returns mean gradients. A step is the same in all frameworks. First,
`begin` fixes the plan. In the first step, `begin` also compares the settings of all ranks before it fixes the plan.
Then `check_presence` checks that all ranks take part, and use the same levels. Finally, `run_engine` runs the engine
and informs the coordinator.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from hvdcomp.arrays.types import AnyArray
from hvdcomp.bindings import checkpoint, elastic
from hvdcomp.bindings.adam import HarmWarning
from hvdcomp.bindings.decisions import BatchInForce, make_coordinator
from hvdcomp.bindings.first_steps import FirstSteps
from hvdcomp.bindings.setup import Setup
from hvdcomp.bindings.training import Training
from hvdcomp.bindings.units import Units
from hvdcomp.communicators.ranks import Ranks
from hvdcomp.compressors.protocol import TensorInfo
from hvdcomp.errors import ConfigurationError
from hvdcomp.exchange.agreement import refused_on_every_rank, require_agreement, require_same_levels
from hvdcomp.exchange.engine import Engine
from hvdcomp.exchange.engine_bucket import Sums
from hvdcomp.exchange.waste import WasteWarning
from hvdcomp.policies import LevelSchedule
from hvdcomp.specs.levels import Level

# In the presence check of a step, each rank contributes this number plus a digest of its levels. The sum over the ranks
# shows whether all ranks take part, and whether all have the same levels.
PRESENCE = 2**44
_DIGESTS = 2**20
_UNIT = 2**10  # digests are multiples of this number, because Horovod's mean of integers drops the fraction
PRESENCE_BYTES = 8

_SMALLEST_LOSS_SCALE = 2.0**-126  # a smaller scale has no inverse in float32


class Binding(Training):
    """Connects one `Compression` to one training run.

    Args:
        setup: the `Compression`, and what the user passed to it.
        tensors: names, shapes and element types of all parameters that may have a gradient.
        communicator: the communicator of the ranks that exchange gradients.
        like: an empty array of the framework on the device of the communicator's arrays.
        names: names of all parameters of the model; by default the names of `tensors`.

    Attributes:
        presence: the number that this rank contributes to the presence check of the current step.
        ranks_may_change: whether ranks may join during training. If so, the ranks agree on a state in their first step,
            because some of them may be new.
        units: the factors by which gradients are scaled, such as the loss scale.
    """

    def __init__(
        self,
        setup: Setup,
        tensors: Iterable[TensorInfo],
        communicator: Ranks,
        like: AnyArray,
        names: Collection[str] = (),
    ) -> None:
        self.setup = setup
        self.like = like
        self._tensors = list(tensors)
        self._carried: Mapping[str, Any] | None = None  # the state before the ranks changed
        self._rolled_back: Mapping[str, Any] | None = None  # the state that `roll_back` got for the next step
        self.ranks_may_change = elastic.may_change()
        # The state at the start of training; used if the weights are rolled back to it.
        self._first_state: Mapping[str, Any] = {}
        self._level: Level | None = None  # the level that the user has set since the last roll-back
        if setup.compression.settings.overlap is True and not self.overlaps:
            raise ConfigurationError(
                "overlap=True does not work with this framework, because the framework passes all gradients of a step "
                'to hvdcomp at once; leave overlap at "auto"'
            )
        setup.compression.settings.require_matches(names or [tensor.name for tensor in self._tensors])
        self.connect(communicator)

    def connect(self, communicator: Ranks) -> None:
        """Creates the objects that depend on the ranks, such as the engine, for the ranks of this communicator."""
        self.communicator = communicator
        self._refused: str | None = None  # the reason why this rank refuses the current step
        self._has_agreed = False  # whether all ranks have agreed on a state since the ranks may have changed
        setup = self.setup
        settings = setup.compression.settings
        self.engine = Engine(
            communicator,
            self._tensors,
            settings.compressor,
            memory=settings.memory,
            seed=settings.seed,
            min_numel=settings.min_numel,
            min_ndim=settings.min_ndim,
            bytes_beside=self.presence_bytes,
            ledger=setup.compression.ledger,
            overlap_bytes=(settings.bucket_bytes or self.early_bytes) if self.overlaps and settings.overlap else None,
            gathered_bytes=settings.gathered_bytes,
        )
        if self._level is not None:
            self.engine.set_level(self._level)
        self._waste = WasteWarning(self.engine)
        self._harm = HarmWarning(self)
        self.coordinator, error = make_coordinator(self)
        self._batch = None if self.coordinator is None else BatchInForce(self, self.coordinator)
        self._first_steps = FirstSteps(self, error)
        self.presence = PRESENCE
        self._facts_of_step: dict[str, Any] = {}
        self.units = Units(self)

    @property
    def is_first_rank(self) -> bool:
        return self.communicator.rank == 0

    # A change of the ranks, in an elastic job.

    @property
    def is_stale(self) -> bool:
        """Whether `follow_ranks` must be called, because the ranks have changed or `roll_back` was called."""
        return self._rolled_back is not None or self.communicator.is_stale

    def roll_back(self, state: Mapping[str, Any]) -> None:
        """Lets the next step continue from a state that `state_dict` returned earlier. All ranks call this method. An
        empty state means the state at the start of training."""
        self._rolled_back = state or self._first_state
        if state:
            self._level = None

    @property
    def level(self) -> Level | None:
        """The level of the next step, as in `Compression.level`."""
        settings = self.setup.compression.settings
        own, level = settings.compressor.level, self.engine.planner.level
        if isinstance(settings.policy, LevelSchedule):
            level = settings.policy.level_at(self.engine.step_number, settings.steps_per_epoch, own)
        if level is None and self.coordinator is None:
            return own
        return level if isinstance(level, int | float) else None

    def set_level(self, level: Level) -> None:
        """Sets the level from the next step on, as in `Compression.set_level`."""
        self._level = level
        self.engine.set_level(level)

    def follow_ranks(self) -> None:
        """Continues with the current ranks after a change. In their next step, the ranks agree on the shared state.
        Call this method on every rank, except on new ranks.

        Raises:
            ConfigurationError: on every rank, if a rank cannot continue.
        """
        communicator = self.communicator.renewed()
        with refused_on_every_rank(communicator, self.like):
            carried = self.state_dict()
            self._rolled_back = None
            if carried and self._level is not None:  # a level that the user has set is not rolled back
                carried["shared"] = {**carried["shared"], "level": self._level}
            self._carried = carried or None  # the state is empty before the first step
            if self._batch is not None:
                self._batch.undo()
            self.connect(communicator)

    def agree_with_new_ranks(self) -> None:
        if self._has_agreed or (self._carried is None and not self.ranks_may_change):
            return
        self._has_agreed = True
        carried, self._carried = self._carried, None
        require_agreement(self.communicator, {}, self.like)  # raises if another rank could not create its binding
        state = self.state_dict() if carried is None else carried
        ranks = self.communicator
        agreed = elastic.agree_on_state(ranks, self.like, state, carried is not None, self.pack, self.unpack)
        with refused_on_every_rank(self.communicator, self.like):
            self.load_state_dict(agreed)

    # A step.

    def begin(self) -> None:
        """Begins a step, and fixes its plan.

        In the first step, this method waits for all ranks to compare their settings.

        Raises:
            RankMismatchError: on every rank, if the settings or the weights of the ranks differ.
        """
        if self.is_stale:
            self.follow_ranks()
        self._first_steps.compare()
        settings = self.setup.compression.settings
        if isinstance(settings.policy, LevelSchedule):
            step = self.engine.step_number
            own = settings.compressor.level
            self.engine.set_level(settings.policy.level_at(step, settings.steps_per_epoch, own))
        if self.coordinator is not None and self._batch is not None:
            self.coordinator.begin_step(self.learning_rates)
            self._batch.require_same()
        self.units.choose_compressor()
        self.engine.begin()
        self.units.choose_momenta()
        self._waste.look()
        self._harm.look()
        # This method is called only once per step, because the host may wait for the device in each call.
        scale = self.loss_scale()
        self._refused = self.reason_to_refuse() or reason_to_refuse_scale(scale)
        digest = self.engine.planner.digest
        self._facts_of_step = self.facts_of_step()
        if self._facts_of_step:
            digest += zlib.crc32(repr(self._facts_of_step).encode())
        if self._refused is not None:  # the different digest tells all ranks that this rank refuses the step
            digest += _DIGESTS // 3
        self.presence = PRESENCE + digest % _DIGESTS * _UNIT
        if self._refused is None:
            self.units.follow(scale)

    def check_presence(self, total: int) -> None:
        """Checks that all ranks take part in the step, with the same levels.

        Args:
            total: the sum of `presence` over all ranks.

        Raises:
            ConfigurationError: on every rank, if a rank is missing or refuses the step.
            RankMismatchError: on every rank, if the levels of the ranks differ.
        """
        size = self.communicator.world_size
        present = total / PRESENCE
        if abs(present - size) > 0.5:
            raise ConfigurationError(f"only {present:.0f} of {size} ranks took part in this step: {self.absence}")
        if total != self.presence * size:
            digest, facts = self.engine.planner.digest, self._facts_of_step
            require_same_levels(self.communicator, digest, self.like, self._refused, facts)
        self.refuse()

    def run_engine(self, gradients: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
        """Runs the engine on the gradients of a step, ends the step, and returns the mean gradients, by name."""
        if self.coordinator is not None:
            self.coordinator.before_exchange()
        results = self.engine.step(gradients, self.results_in_place, self._sums())
        self.take_back(results)
        self.end_step()
        return results

    def expect(self, agreed: Callable[[], bool]) -> None:
        """Allows the engine to start buckets during the backward pass. Call this method after `begin` if the step uses
        the engine.

        Args:
            agreed: function that returns whether it is certain that all ranks make this step at the same levels, as in
                `Overlap.begin`.
        """
        # A rank that refuses the step must not start a bucket. If all ranks refuse the step, `agreed` returns True,
        # although the ranks might start different buckets.
        if self._refused is None and (self.coordinator is None or not self.coordinator.decides_before_exchange):
            self.engine.expect(self.results_in_place, self._sums(), agreed)

    def facts_of_step(self) -> dict[str, Any]:
        """Values, by name, that must be the same on all ranks in the step that begins. The levels, which must also be
        the same, are not included. Empty if there are no such values."""
        return {}

    def presence_bytes(self, tensors: int) -> int:
        """The number of bytes that a rank sends for the presence check of a step with this number of tensors."""
        return PRESENCE_BYTES

    def _sums(self) -> Sums | None:
        return None if self.coordinator is None else self.coordinator.sums_of_step(self.units.inverse)

    def end_step(self) -> None:
        """Ends a step. Call this method in steps that do not call `run_engine`."""
        if self.coordinator is not None:
            self.coordinator.end_step()

    def observe(self, source: str, gradients: Mapping[str, AnyArray]) -> None:
        """Passes the gradients of a step without the engine to the coordinator, for the statistics of the policy.

        Args:
            source: the kind of these gradients. Nothing happens if the policy uses a different kind
                (`Coordinator.source`).
            gradients: the gradients, by name.
        """
        if self.coordinator is not None and self.coordinator.source == source:
            self.coordinator.observe(gradients, self.units.inverse)

    @property
    def needs_engine(self) -> bool:
        """Whether the current step must use the engine, even if its plan only casts gradients."""
        return self.units.engine_only or (self.coordinator is not None and self.coordinator.needs_engine)

    # Settings and refusals.

    @property
    def has_agreed(self) -> bool:
        """Whether the ranks have compared their settings and their weights."""
        return self._first_steps.has_agreed

    @property
    def has_begun(self) -> bool:
        """Whether the first step has begun."""
        return self._first_steps.has_begun

    def refuse(self) -> None:
        """Raises ConfigurationError if this rank refuses the current step."""
        if self._refused is not None:
            raise ConfigurationError(self._refused)

    def refuse_predivision(self, factor: float) -> None:
        """Raises ConfigurationError if the user told Horovod to divide gradients before Horovod's allreduce. hvdcomp
        sends compressed gradients without Horovod's allreduce."""
        if factor != 1.0:
            raise ConfigurationError(
                f"gradient_predivide_factor={factor} does not work with gradient compression: Horovod applies this "
                "factor in its allreduce, and compressed gradients are not sent by Horovod's allreduce. Leave "
                "gradient_predivide_factor at 1.0"
            )

    # Accumulation and checkpoints.

    @property
    def accumulation(self) -> int:
        """Applies the policy's decisions to the optimizer, and returns the result of `Compression.accumulation`."""
        if self.coordinator is None or self._batch is None:
            return 1
        if self.is_stale:
            return self._batch.current.accumulation
        self.coordinator.settle(self.learning_rates)
        self._batch.apply()
        return self._batch.current.accumulation

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint, as in `Compression.state_dict`."""
        for pending in (self._rolled_back, self._carried):
            if pending is not None:
                return dict(pending)
        if self.is_stale and self.coordinator is not None:
            self.coordinator.give_up_decision()
        if self.coordinator is not None and self._batch is not None:
            self.coordinator.receive()
            self._batch.apply()
        state = checkpoint.state_of(self.engine, self.coordinator, self.copy)
        state["own"]["loss_scale"] = self.units.loss_scale
        if self.is_summed:
            state["own"]["op"] = "sum"
        return state

    def begin_from(self, state: Mapping[str, Any]) -> None:
        """Loads a state when the binding is created. An error also reaches the other ranks, which may already wait in
        their first step."""
        with refused_on_every_rank(self.communicator, self.like):
            self.load_state_dict(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state before the first step, as in `Compression.load_state_dict`."""
        checkpoint.restore(state, self.engine, self.coordinator, self.place)
        self.units.loss_scale = state["own"].get("loss_scale")
        if self._batch is not None:
            self._batch.follow()


def reason_to_refuse_scale(scale: float | None) -> str | None:
    """The reason why a rank must refuse steps with this loss scale; None if the loss scale can be used, or if there is
    no loss scale."""
    if scale is None or scale >= _SMALLEST_LOSS_SCALE:
        return None
    return (
        f"the loss scale has fallen to {scale:g}: gradients were inf or NaN on some rank in more than a hundred steps, "
        "so the model no longer learns. Continue from a checkpoint with a smaller learning rate, or look for the first "
        "gradient that is inf or NaN"
    )
