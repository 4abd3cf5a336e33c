"""What the bindings of all frameworks share: one `Compression` at work in one training.

A binding learns from its framework which gradients there are, and gives results back; in between, every step is the
same: `begin` fixes its plan (in the first step the ranks compare their settings before), `check_presence` makes sure
that all ranks take part at the same levels, `run_engine` runs the engine and tells the coordinator.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from hvdcomp.arrays.types import Array
from hvdcomp.bindings import checkpoint, elastic
from hvdcomp.bindings.decisions import BatchInForce, make_coordinator
from hvdcomp.bindings.first_steps import FirstSteps
from hvdcomp.bindings.setup import Setup
from hvdcomp.bindings.training import Training
from hvdcomp.bindings.units import Units
from hvdcomp.communicators.ranks import Ranks
from hvdcomp.compressors.bucket import BUCKET_BYTES
from hvdcomp.compressors.protocol import TensorInfo
from hvdcomp.errors import ConfigurationError
from hvdcomp.exchange.agreement import refused_on_every_rank, require_same_levels
from hvdcomp.exchange.bucket_step import Sums
from hvdcomp.exchange.engine import Engine
from hvdcomp.exchange.waste import WasteWarning
from hvdcomp.policies import LevelSchedule

# What each rank puts in for one step: this number plus a digest of its levels, so that the ranks' sum tells whether all
# of them take part, and all at the same levels.
PRESENCE = 2**44
_DIGESTS = 2**20
_UNIT = 2**10  # between digests, since Horovod's mean of whole numbers drops what is behind the point
PRESENCE_BYTES = 8

_SMALLEST_LOSS_SCALE = 2.0**-126  # what is smaller has no inverse in float32, and nothing that was scaled comes back


class Binding(Training):
    """Ties one `Compression` to one training.

    Args:
        setup: what the user gave.
        tensors: all parameters that may have a gradient.
        communicator: of the ranks that exchange.
        like: an empty array of the framework, where the communicator works.
        names: of all parameters of the model; by default those of `tensors`.

    Attributes:
        presence: what this rank puts in for the step that has begun.
        units: of gradients.
    """

    def __init__(
        self, setup: Setup, tensors: Iterable[TensorInfo], communicator: Ranks, like: Array, names: Collection[str] = ()
    ) -> None:
        self.setup = setup
        self.like = like
        self._tensors = list(tensors)
        self._carried: Mapping[str, Any] | None = None  # the state from before the ranks changed
        self._rolled_back: Mapping[str, Any] | None = None
        if setup.compression.settings.overlap is True and not self.overlaps:
            raise ConfigurationError(
                "overlap=True does not work with this framework, which hands over all gradients of a step at once; "
                'leave it at "auto"'
            )
        setup.compression.settings.require_matches(names or [tensor.name for tensor in self._tensors])
        self.meet(communicator)

    def meet(self, communicator: Ranks) -> None:
        """Makes all that knows the ranks, for those of this communicator."""
        self.communicator = communicator
        self._refused: str | None = None  # why this rank cannot make the step that has begun
        self._met = False  # whether the ranks have the same state, after they may have changed
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
            overlap_bytes=(settings.bucket_bytes or BUCKET_BYTES) if self.overlaps and settings.overlap else None,
        )
        self._waste = WasteWarning(self.engine)
        self.coordinator, error = make_coordinator(self)
        self._batch = None if self.coordinator is None else BatchInForce(self, self.coordinator)
        self._first_steps = FirstSteps(self, error)
        self.presence = PRESENCE
        self.units = Units(self)

    # A change of the ranks, in an elastic job.

    @property
    def is_stale(self) -> bool:
        """Whether `follow_ranks` is due: the ranks are others now, or are to go on from an earlier state."""
        return self._rolled_back is not None or self.communicator.is_stale

    def roll_back(self, state: Mapping[str, Any]) -> None:
        """Lets the next step go on from an earlier `state_dict`, on all ranks, instead of from what is known now."""
        self._rolled_back = state

    def follow_ranks(self) -> None:
        """Goes on with the ranks that there are now; what they have in common follows in the first step.

        Every rank does so, or is new. It raises ConfigurationError on every rank if any cannot go on.
        """
        communicator = self.communicator.anew()
        with refused_on_every_rank(communicator, self.like):
            self._carried = self.state_dict() or None  # nothing, if it goes back to the beginning
            self._rolled_back = None
            if self._batch is not None:
                self._batch.undo()
            self.meet(communicator)

    def meet_elastic_ranks(self) -> None:
        if self._met or (self._carried is None and not elastic.may_change()):
            return
        self._met = True
        carried, self._carried = self._carried, None
        state = self.state_dict() if carried is None else carried
        agreed = elastic.meet(self.communicator, self.like, state, carried is not None, self.pack, self.unpack)
        with refused_on_every_rank(self.communicator, self.like):
            self.load_state_dict(agreed)

    # A step.

    def begin(self) -> None:
        """Starts a step: the plan is fixed now, so that all tensors of the step take the same way.

        The first step waits here for all ranks, to compare their settings.

        Raises:
            RankMismatchError: on every rank, if the settings or the weights of any differ.
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
        scale = self.loss_scale()  # once: on an accelerator the host waits for it
        self._refused = self.reason_to_refuse() or reason_to_refuse_scale(scale)
        digest = self.engine.planner.digest
        if self._refused is not None:  # it disagrees with the ranks that do not refuse, so that all of them learn why
            digest += _DIGESTS // 3
        self.presence = PRESENCE + digest % _DIGESTS * _UNIT
        if self._refused is None:
            self.units.follow(scale)

    def check_presence(self, total: int) -> None:
        """Stops all ranks if one is missing, was configured otherwise, or has other levels.

        Args:
            total: the sum of the ranks' `presence`.
        """
        size = self.communicator.world_size
        present = total / PRESENCE
        if abs(present - size) > 0.5:
            raise ConfigurationError(f"only {present:.0f} of {size} ranks took part in this step: {self.absence}")
        if total != self.presence * size:
            require_same_levels(self.communicator, self.engine.planner.digest, self.like, self._refused)
        self.refuse()

    def run_engine(self, gradients: Mapping[str, Array]) -> dict[str, Array]:
        """Runs the engine on the gradients of a step, and ends the step; returns the means by name."""
        if self.coordinator is not None:
            self.coordinator.before_exchange()
        results = self.engine.step(gradients, self.results_in_place, self._sums())
        self.take_back(results)
        self.end_step()
        return results

    def expect(self, agreed: Callable[[], bool]) -> None:
        """To be called after `begin`, if the step takes the engine: buckets may then start as soon as the engine's
        `overlap` was told of their gradients.

        Args:
            agreed: as of `Overlap.begin`.
        """
        # Ranks that all refuse the step agree too: what some of them had started by then, the others would never start.
        if self._refused is None and (self.coordinator is None or not self.coordinator.decides_before_exchange):
            self.engine.expect(self.results_in_place, self._sums(), agreed)

    def presence_bytes(self, tensors: int) -> int:
        """What a rank sends in a step of so many tensors to say that it takes part."""
        return PRESENCE_BYTES

    def _sums(self) -> Sums | None:
        return None if self.coordinator is None else self.coordinator.sums_of_step(self.units.inverse)

    def end_step(self) -> None:
        """To be called at the end of a step that did not go through `run_engine`."""
        if self.coordinator is not None:
            self.coordinator.end_step()

    def observe(self, source: str, gradients: Mapping[str, Array]) -> None:
        """Shows gradients that did not go through the engine to the coordinator, which looks at them if they are what
        its policy wants."""
        if self.coordinator is not None and self.coordinator.source == source:
            self.coordinator.observe(gradients, self.units.inverse)

    @property
    def needs_engine(self) -> bool:
        """Whether the step that has begun has to go through the engine, whatever its plan."""
        return self.units.engine_only or (self.coordinator is not None and self.coordinator.needs_engine)

    # Settings and refusals.

    @property
    def agreed(self) -> bool:
        """Whether the ranks have nothing more to compare."""
        return self._first_steps.agreed

    @property
    def has_begun(self) -> bool:
        """Whether a step was begun."""
        return self._first_steps.begun

    def refuse(self) -> None:
        """Raises ConfigurationError if this rank cannot make the step that has begun."""
        if self._refused is not None:
            raise ConfigurationError(self._refused)

    def refuse_predivision(self, factor: float) -> None:
        """Raises ConfigurationError if Horovod scales what it allreduces, where compression does not let it."""
        if factor != 1.0:
            raise ConfigurationError(
                f"gradient_predivide_factor={factor} scales what Horovod allreduces, but compressed gradients do not "
                "travel in Horovod's allreduce; leave it at 1.0"
            )

    # What outlives a step, or a restart.

    @property
    def accumulation(self) -> int:
        """`Compression.accumulation`, after what is decided has been put into the optimizer."""
        if self.coordinator is None or self._batch is None:
            return 1
        if self.is_stale:
            return self._batch.current.accumulation
        self.coordinator.settle(self.learning_rates)
        self._batch.apply()
        return self._batch.current.accumulation

    def state_dict(self) -> dict[str, Any]:
        """`Compression.state_dict`."""
        for earlier in (self._rolled_back, self._carried):
            if earlier is not None:
                return dict(earlier)
        if self.is_stale and self.coordinator is not None:
            self.coordinator.give_up_decision()
        if self.coordinator is not None and self._batch is not None:
            self.coordinator.receive()
            self._batch.apply()
        state = checkpoint.state_of(self.engine, self.coordinator, self.copy)
        state["own"]["loss_scale"] = self.units.loss_scale
        if self.summed:
            state["own"]["op"] = "sum"
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """`Compression.load_state_dict`."""
        checkpoint.restore(state, self.engine, self.coordinator, self.place)
        self.units.loss_scale = state["own"].get("loss_scale")
        if self._batch is not None:
            self._batch.follow()


def reason_to_refuse_scale(scale: float | None) -> str | None:
    """Why no step can be made at this loss scale; None if one can, or if there is none."""
    if scale is None or scale >= _SMALLEST_LOSS_SCALE:
        return None
    return (
        f"the loss scale has fallen to {scale:g}: in more than a hundred steps gradients were not finite on some rank, "
        "and nothing is learnt any more. Go on from a checkpoint with a smaller learning rate, or look for the first "
        "gradient that is inf or NaN"
    )
