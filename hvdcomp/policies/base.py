"""What a policy is: settings, a state, and a pure step from one state to the next.

A policy is a frozen description; its state is a separate, small, frozen dataclass that survives as JSON. At each
moment of decision it gets one `Statistics`, which holds what `wanted` asked for, and answers with a decision. It reads
no clock and no file, and knows no tensors: numbers in, a decision out, so that any run can be replayed.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Generic, TypeVar

from hvdcomp.errors import SpecError
from hvdcomp.policies.decisions import Decision, Levels
from hvdcomp.policies.schedules import Level, Levelled
from hvdcomp.specs.described import Described

State = TypeVar("State")
Value = TypeVar("Value")


class Statistic(Enum):
    """What a policy may ask for. Each value is the name of the field of `Statistics` that holds it."""

    LEARNING_RATES = "learning_rates"
    NORMS = "norms"
    MODEL_NORM = "model_norm"
    MEAN_TO_STD = "mean_to_std"
    GAINS = "gains"
    LEVEL_GAINS = "level_gains"
    TIMING = "timing"
    SURVEY = "survey"
    STEP_TIMES = "step_times"


@dataclass(frozen=True)
class LearningRates:
    """What the training's schedule says, one rate for each parameter group, without any policy's own factor.

    Attributes:
        now: of the period that ends, at its first step, so that a change in the middle of a period is not missed.
        next: of the step that follows.
    """

    now: tuple[float, ...]
    next: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.now or len(self.now) != len(self.next):
            raise ValueError(f"learning rates {self.now} and {self.next} must be of the same groups, at least one")

    @property
    def fall(self) -> bool:
        """Whether that of any group falls."""
        return any(after < before for before, after in zip(self.now, self.next, strict=True))


@dataclass(frozen=True)
class GravacGains:
    """Compression gains of one step, whole model, see `hvdcomp.policies.gravac`; NaN if a gradient is not finite.

    Attributes:
        minimum: of the first compression.
        candidate: of the second; None if there was none.
        ranks: number of ranks.
    """

    minimum: float
    candidate: float | None
    ranks: int


@dataclass(frozen=True)
class Timing:
    """How long the steps of a period took.

    Attributes:
        samples: that all ranks together took in, in any unit that stays the same throughout a training.
        seconds: of the whole iterations.
        evaluation_seconds: of these, those spent only to learn gains, which a steady state would not spend.
    """

    samples: float
    seconds: float
    evaluation_seconds: float = 0.0


@dataclass(frozen=True)
class Candidate:
    """One way to send all gradients, and what the performance model says of it.

    Attributes:
        seconds: predicted time of a step.
        compressed: so many tensors, the first in the survey's order, get the compressor that the training was given.
        rest: spec of the compressor of all others; None for that of the training.
    """

    seconds: float
    compressed: int
    rest: str | None


@dataclass(frozen=True)
class Survey:
    """What there is to choose from, see `hvdcomp.adaptation.candidates`.

    Attributes:
        order: names of the tensors whose method may be chosen, the most worth compressing first.
        candidates: by name.
    """

    order: tuple[str, ...]
    candidates: Mapping[str, Candidate]


@dataclass(frozen=True)
class Statistics:
    """What is known at one moment of decision. A field that the policy did not ask for may be None.

    Attributes:
        step: steps that ended, from the start of the training.
        epoch: epochs that ended; None if they are not counted.
        learning_rates: now and next.
        norms: by tensor name, the 2-norm of the accumulated gradient: the sum of the raw gradients, before memory and
            averaging, of all steps of the period that ends. 0.0 for a tensor that had no gradient.
        model_norm: the same of the whole model: all tensors as one vector.
        mean_to_std: by tensor name, the absolute mean of the accumulated gradient's elements over their standard
            deviation.
        gains, timing: of the last step of a period, and of all its steps; for policies whose periods are of so many
            steps.
        level_gains: by tensor name and compression factor, the gain 1 - ||x - C(x)||^2 / ||x||^2, both energies summed
            over the probed steps of the period, on rank 0. A tensor without a gradient has no entry; NaN if a gradient
            was not finite.
        level_costs: given together with them, the tensor's sent bytes / dense bytes at the level that serves that
            factor.
        survey: what there is to choose from; told once, before the first step is exchanged.
        step_times: seconds of each step since the last decision, in order: from the end of one step's exchange to
            that of the next, by rank 0's clock. NaN for the first step after a start.
    """

    step: int
    epoch: int | None = None
    learning_rates: LearningRates | None = None
    norms: Mapping[str, float] | None = None
    model_norm: float | None = None
    mean_to_std: Mapping[str, float] | None = None
    gains: GravacGains | None = None
    level_gains: Mapping[str, Mapping[float, float]] | None = None
    level_costs: Mapping[str, Mapping[float, float]] | None = None
    timing: Timing | None = None
    survey: Survey | None = None
    step_times: tuple[float, ...] | None = None

    def known(self) -> dict[str, Any]:
        """The fields that are not None, by name."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class Period:
    """When a policy decides: at the end of every so many epochs, or of every so many steps, or once.

    Attributes:
        epochs, steps: every so many.
        until: once, when so many steps have ended. Of the three, two are 0.
    """

    epochs: int = 0
    steps: int = 0
    until: int = 0


@dataclass(frozen=True, kw_only=True)
class Policy(Described, Generic[State]):
    """Base of all policies.

    Class attributes:
        name: the policy's name in a spec string.
        state_type: the dataclass of its state, whose fields JSON can hold.
        statistics: all that `wanted` may ever name.
        state_growth: so many bytes a state grows as JSON, beside some for each tensor; more takes another message.

    Attributes:
        lag: 1 to obey a decision one step later, so that no step waits for it: it travels to the other ranks behind the
            next step's computation. 0 to have every step wait for the decision that is meant for it.
    """

    lag: int = 1

    name: ClassVar[str]
    state_type: ClassVar[type]
    statistics: ClassVar[frozenset[Statistic]] = frozenset()
    state_growth: ClassVar[int] = 512

    def __post_init__(self) -> None:
        self.require(is_whole(self.lag, 0) and self.lag <= 1, "lag", "0 or 1")

    @property
    def period(self) -> Period | None:
        """How often `decide` is to be called, and over which time gradients are accumulated; None for never."""
        raise NotImplementedError

    def period_in(self, state: State) -> Period | None:
        """The same in a state. All ranks go by the state that they have heard."""
        return self.period

    @property
    def source(self) -> str:
        """Whose gradients are accumulated: "local", rank 0's own, or "aggregated", the mean over the ranks."""
        return "local"

    def wanted(self, state: State) -> frozenset[Statistic]:
        """What the next `decide` reads. Nothing else need be computed in the period before it."""
        raise NotImplementedError

    def check(self, steps_per_epoch: int | None, compressor: Levelled) -> None:
        """Raises SpecError if the policy cannot work with this compressor or run."""
        if self.period is not None and self.period.epochs and not steps_per_epoch:
            raise SpecError(f"{self.name}: epochs can only be counted with steps_per_epoch=len(loader); or give steps")

    def initial_state(self, tensors: Sequence[str]) -> State:
        """The state to begin with.

        Args:
            tensors: names of the tensors that are compressed. Those that always go dense are no policy's business.
        """
        raise NotImplementedError

    def decision(self, state: State) -> Decision:
        """What is in force in a state: at the beginning, after a decision and after a restart."""
        raise NotImplementedError

    @property
    def first_decision(self) -> Decision:
        """A decision of this policy without tensors: of the kind that all of its decisions are, or like it."""
        return self.decision(self.initial_state(()))

    def update(self, state: State, statistics: Statistics) -> State:
        """The state after a moment of decision."""
        raise NotImplementedError

    def decide(self, state: State, statistics: Statistics) -> tuple[State, Decision]:
        """One moment of decision.

        Args:
            state: as the last call returned it, or `initial_state`. It is not changed.
            statistics: with at least all that `wanted(state)` names.

        Returns:
            The state to keep, and the decision for the steps that follow.

        Raises:
            ValueError: if a wanted statistic is missing, or is not of these tensors.
        """
        missing = sorted(each.value for each in self.wanted(state) if getattr(statistics, each.value) is None)
        if missing:
            raise ValueError(f"{self.name} needs {', '.join(missing)} to decide after step {statistics.step}")
        state = self.update(state, statistics)
        return state, self.decision(state)

    def to_json(self, state: State) -> dict[str, Any]:
        """A state as JSON can hold it, where keys are text."""
        return text_keys({"policy": self.name, **dataclasses.asdict(state)})  # type: ignore[call-overload]

    def from_json(self, data: Mapping[str, Any]) -> State:
        """The state that `to_json` wrote.

        Raises:
            ValueError: if it is not of this kind of policy.
        """
        fields = {key: value for key, value in data.items() if key != "policy"}
        expected = {field.name for field in dataclasses.fields(self.state_type)}
        if data.get("policy") != self.name or set(fields) != expected:
            found = f"policy {data.get('policy')!r} with {', '.join(sorted(fields)) or 'nothing'}"
            raise ValueError(
                f"this is not a state of {self.name}, which has {', '.join(sorted(expected))}: {found}; continue with "
                "the policy that the training was started with"
            )
        return self.state_type(**fields)

    def require(self, allowed: bool, setting: str, what: str) -> None:
        """Raises SpecError, which says `what` is allowed, unless a setting is."""
        if not allowed:
            raise SpecError(f"{self.name}: {setting}={getattr(self, setting)} is not allowed; it must be {what}")

    def require_whole(self, setting: str, least: int) -> None:
        """Raises SpecError unless a setting is a whole number of at least `least`."""
        self.require(is_whole(getattr(self, setting), least), setting, f"a whole number of at least {least}")

    def of_tensors(self, values: Mapping[str, Value], tensors: Mapping[str, Any], what: str) -> Mapping[str, Value]:
        """The values, if they are of exactly these tensors.

        Raises:
            ValueError: if not.
        """
        wrong = {"missing": tensors.keys() - values.keys(), "not expected": values.keys() - tensors.keys()}
        words = [f"{word}: {', '.join(sorted(names))}" for word, names in wrong.items() if names]
        if words:
            raise ValueError(f"{self.name} was given {what} of other tensors than it began with; {'; '.join(words)}")
        return values


@dataclass(frozen=True, kw_only=True)
class AccumulatedGradientPolicy(Policy[State]):
    """Base of policies that look at accumulated gradients every now and then.

    Attributes:
        steps: decide at the end of every so many steps, and accumulate over them; 0 to count epochs instead.
        statistic: whose gradients are accumulated, "local" (rank 0's own) or "aggregated" (the mean over the ranks).
    """

    steps: int = 0
    statistic: str = "local"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_whole("steps", 0)
        self.require(self.statistic in ("local", "aggregated"), "statistic", "local or aggregated")

    @property
    def source(self) -> str:
        return self.statistic


@dataclass(frozen=True)
class ConstantState:
    """The state of `Constant`: the names of the tensors."""

    tensors: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Constant(Policy[ConstantState]):
    """Always the same level.

    Attributes:
        level: of all tensors; None for the compressor's own.
    """

    level: Level | None = None

    name: ClassVar[str] = "constant"
    examples: ClassVar[tuple[str, ...]] = ("constant:level=0.01",)
    state_type: ClassVar[type] = ConstantState

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.level is None or is_number(self.level), "level", "a level, such as a ratio or a rank")

    @property
    def period(self) -> None:
        return None

    def wanted(self, state: ConstantState) -> frozenset[Statistic]:
        return frozenset()

    def check(self, steps_per_epoch: int | None, compressor: Levelled) -> None:
        compressor.at_level(self.level)

    def initial_state(self, tensors: Sequence[str]) -> ConstantState:
        return ConstantState(tuple(tensors))

    def decision(self, state: ConstantState) -> Levels:
        return Levels(dict.fromkeys(state.tensors, self.level))

    def update(self, state: ConstantState, statistics: Statistics) -> ConstantState:
        return state

    def from_json(self, data: Mapping[str, Any]) -> ConstantState:
        return ConstantState(tuple(super().from_json(data).tensors))


def text_keys(value: Any) -> Any:
    """The same with every number that is a key of a mapping, however deep, as text that makes the number again."""
    if not isinstance(value, Mapping):
        return value
    return {key if isinstance(key, str) else repr(key): text_keys(inner) for key, inner in value.items()}


def number_keys(table: Mapping[Any, Any]) -> dict[float, Any]:
    """A table by compression factor, as it was before `text_keys`."""
    return {float(cf): value for cf, value in table.items()}


def is_number(value: object) -> bool:
    """Whether a setting is a finite number."""
    # Not math.isfinite, which fails on whole numbers beyond the largest float.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def is_whole(value: object, least: int) -> bool:
    """Whether a setting is a whole number of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def require_level(policy: str, compressor: Levelled) -> None:
    """Raises SpecError unless a compressor has a level by which it can reach a compression factor."""
    if compressor.level is None:
        raise SpecError(
            f"{policy}: the compressor has no single level to set; use one with a level, such as topk:ratio=0.01 or "
            "powersgd:rank=4"
        )
