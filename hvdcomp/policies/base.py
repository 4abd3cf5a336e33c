"""The base class of policies. A policy has settings, a state, and a pure function from one state to the next.

A policy is a frozen description. The state of a policy is a separate, small, frozen dataclass that can be saved as
JSON. To make a decision, a policy gets one `Statistics` with the statistics that its `request` names, and returns a
decision. A policy does not read clocks, files or tensors. A policy only turns numbers into a decision, so any run can
be replayed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Generic, TypeVar

from hvdcomp.errors import SpecError
from hvdcomp.policies.decisions import Decision
from hvdcomp.policies.request import Period, Request, Statistic, Statistics
from hvdcomp.policies.schedules import Levelled
from hvdcomp.specs.described import Described, Rule, at_least, between, is_number, is_whole
from hvdcomp.specs.levels import Level
from hvdcomp.specs.typed import shortened, typed, with_text_keys

State = TypeVar("State")
Value = TypeVar("Value")

Source = Annotated[str, Rule(lambda value: value in ("local", "aggregated"), "local or aggregated")]
LEVEL = Rule(is_number, "a level, such as a ratio or a rank")
SomeLevel = Annotated[Level, LEVEL]


@dataclass(frozen=True, kw_only=True)
class Policy(Described, Generic[State]):
    """Base of all policies.

    Class attributes:
        name: the policy's name in a spec string.
        state_type: the dataclass of the policy's state. The fields must have types that `hvdcomp.specs.typed.typed`
            accepts.
        state_growth: the number of bytes by which the JSON of a state may grow. A further allowance for each tensor is
            added. A larger state needs a second message.

    Attributes:
        lag: with 1, a decision is used one step later, so that its broadcast overlaps with the computation of the next
            step. With 0, every step waits for its decision.
    """

    lag: Annotated[int, Rule(between(0, 1).allows, "0 or 1")] = 1

    name: ClassVar[str]
    state_type: ClassVar[type]
    state_growth: ClassVar[int] = 512

    def request(self, state: State) -> Request:
        """The request of the policy in a state. The request specifies when the policy decides next, and which
        statistics the policy needs for this decision."""
        raise NotImplementedError

    @property
    def compressors(self) -> tuple[str, ...]:
        """The specs of compressors that decisions may use, in addition to the compressor of the training run."""
        return ()

    @property
    def loss(self) -> float:
        """The policy may propose compressors that raised the loss by at most this share in measurements. 0 means no
        proposals."""
        return 0.0

    def check(self, steps_per_epoch: int | None, compressor: Levelled) -> None:
        """Raises SpecError if the policy does not work with this compressor or these settings."""
        period = self.first_request.period
        if period is not None and period.epochs and not steps_per_epoch:
            raise SpecError(
                f"{self.name}: the policy counts epochs, so pass steps_per_epoch=len(loader) to "
                "hvdcomp.Compression, or give the policy its parameter steps"
            )
        if self.first_decision.uses_factors and compressor.level is None:
            raise SpecError(
                f"{self.name}: the compressor has no single level that can be set; use a compressor with a level, such "
                "as topk:ratio=0.01 or powersgd:rank=4"
            )

    def initial_state(self, tensors: Sequence[str]) -> State:
        """The state of the policy before its first decision.

        Args:
            tensors: the names of the tensors that are compressed. Tensors that are always sent uncompressed are not
                included.
        """
        raise NotImplementedError

    def decision(self, state: State) -> Decision:
        """The decision that belongs to a state. The decision is used at the start, after each update, and after a
        restart."""
        raise NotImplementedError

    @property
    def first_decision(self) -> Decision:
        """The decision that this policy makes for a model without tensors. This decision has the same kind as all other
        decisions of the policy."""
        return self.decision(self.initial_state(()))

    @property
    def first_request(self) -> Request:
        """The request that this policy makes for a model without tensors. The field `ever` is the same in all requests
        of a policy."""
        return self.request(self.initial_state(()))

    def update(self, state: State, statistics: Statistics) -> State:
        """Computes the state after a decision, from the state before the decision and the statistics."""
        raise NotImplementedError

    def decide(self, state: State, statistics: Statistics) -> tuple[State, Decision]:
        """Makes one decision.

        Args:
            state: the state that the last call returned, or `initial_state`. The given state is not changed.
            statistics: the statistics, with at least the fields that `request(state)` names.

        Returns:
            The state to keep, and the decision for the steps that follow.

        Raises:
            ValueError: if a requested statistic is missing, or belongs to other tensors.
        """
        requested = self.request(state).statistics
        missing = sorted(statistic.value for statistic in requested if getattr(statistics, statistic.value) is None)
        if missing:
            raise ValueError(
                f"{self.name} needs the statistics {', '.join(missing)} to decide after step {statistics.step}"
            )
        state = self.update(state, statistics)
        return state, self.decision(state)

    def to_json(self, state: State) -> dict[str, Any]:
        """A state as JSON data, in which all keys are strings."""
        return {"policy": self.name, **with_text_keys(state)}

    def from_json(self, data: Mapping[str, Any]) -> State:
        """Restores the state that `to_json` wrote.

        Raises:
            ValueError: if the data belong to another policy, or a field has an invalid value.
        """
        return typed(self.state_type, self.fields_of(data), self.name)

    def fields_of(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """The fields in the JSON data of a state. Raises ValueError if the data belong to another policy."""
        if not isinstance(data, Mapping):
            raise ValueError(f"{shortened(data)} is not a state of {self.name}, because it has no named fields")
        fields = {key: value for key, value in data.items() if key != "policy"}
        expected = {field.name for field in dataclasses.fields(self.state_type)}
        # later: fields that states of earlier versions lack
        needed = expected.difference(getattr(self.state_type, "later", ()))
        if data.get("policy") != self.name or not needed <= fields.keys() <= expected:
            kept = f"policy {data.get('policy')!r} with {', '.join(sorted(fields)) or 'nothing'}"
            raise ValueError(
                f"this is not a state of {self.name}: it has {kept}, but a state of {self.name} has "
                f"{', '.join(sorted(expected))}; continue with the policy that the training was started with"
            )
        return fields

    def require_whole(self, setting: str, least: int) -> None:
        """Raises SpecError unless a setting is an integer of at least `least`."""
        self.require(is_whole(getattr(self, setting), least), setting, f"a whole number of at least {least}")

    def of_tensors(self, values: Mapping[str, Value], tensors: Mapping[str, Any], noun: str) -> Mapping[str, Value]:
        """Checks that the values belong to exactly these tensors, and returns the values.

        Raises:
            ValueError: if a tensor is missing or unknown. In the message, `noun` is the name of the values.
        """
        wrong = {"missing": tensors.keys() - values.keys(), "not expected": values.keys() - tensors.keys()}
        words = [f"{word}: {', '.join(sorted(names))}" for word, names in wrong.items() if names]
        if words:
            raise ValueError(
                f"{self.name} was given {noun} of different tensors than in its first decision; {'; '.join(words)}"
            )
        return values


@dataclass(frozen=True, kw_only=True)
class AccumulatedGradientPolicy(Policy[State]):
    """Base of policies whose decisions depend on accumulated gradients.

    Attributes:
        steps: number of steps from one decision to the next. Gradients are accumulated over these steps. 0 to count
            epochs instead.
        statistic: which gradients are accumulated, either "local" (the gradients of rank 0) or "aggregated" (the means
            over the ranks).
    """

    steps: Annotated[int, at_least(0)] = 0
    statistic: Source = "local"

    def require_interval(self, interval: int, default: int) -> None:
        """Raises SpecError if both `interval` and `steps` were given."""
        if self.steps and interval != default:
            raise SpecError(f"{self.name}: give interval (in epochs) or steps, not both")

    def request_after(self, epochs: int, statistics: Set[Statistic], ever: Set[Statistic] = frozenset()) -> Request:
        """The request for statistics at the end of every `steps` steps, or, if `steps` is 0, at the end of every
        `epochs` epochs."""
        period = Period(steps=self.steps) if self.steps else Period(epochs=epochs)
        return Request(frozenset(statistics), period, self.statistic, frozenset(ever))
