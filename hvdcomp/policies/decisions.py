"""The decisions of policies. Each kind of decision has methods for its plan, for its JSON form, and for its row in a
report.

To add a kind of decision, write a subclass of `Decision`. hvdcomp finds the subclass automatically.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from hvdcomp.specs.levels import Level, Unit
from hvdcomp.specs.typed import as_fields, typed

Gain = Literal["error_feedback", "raw"]
"""How GraVAC's gain is computed. Compression keeps a part of the energy of x = g + r. The gain is this part divided by
the energy of x ("error_feedback"), or by the energy of the gradient g alone ("raw")."""


@dataclass(frozen=True)
class Decision:
    """Base of all decisions.

    Class attributes:
        kind: name of this kind of decision in JSON.
        sets_batch_size: whether decisions set the batch size instead of compression.
        uses_factors: whether decisions give compression factors. hvdcomp then computes the level of a tensor from its
            factor, so any level is possible.
        shown: names of the attributes that a report shows under the same names.
        later: names of the fields that logs of earlier versions lack. `to_json` omits such a field if it has its
            default value.
    """

    kind: ClassVar[str]
    sets_batch_size: ClassVar[bool] = False
    uses_factors: ClassVar[bool] = False
    shown: ClassVar[tuple[str, ...]] = ()
    later: ClassVar[tuple[str, ...]] = ()

    def plan(self, plans: Any) -> Any:
        """Makes the plan of this decision. `plans` is an `hvdcomp.adaptation.plans.Plans`."""
        return plans.own()

    def batch(self) -> BatchSize:
        """The batch size of this decision; by default, the batch size at the start."""
        return BatchSize()

    def observer(self, observers: Any) -> Any:
        """The observer for steps that use this decision, or None. `observers` is an
        `hvdcomp.adaptation.observers.Observers`."""

    def measures(self, period_ends: bool) -> bool:
        """Whether a step that uses this decision is measured. The result is the same on all ranks.

        Args:
            period_ends: whether the step is the last of a period.
        """
        return False

    def to_json(self) -> dict[str, Any]:
        """The decision as JSON data: its `kind` and its fields."""
        fields = dataclasses.asdict(self)
        return {"kind": self.kind, **{name: fields[name] for name in as_fields(self)}}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Decision:
        """Restores the decision that `to_json` of this class wrote.

        Raises:
            LookupError: if a field is missing.
            ValueError: if a field has an invalid value.
        """
        names = [field.name for field in dataclasses.fields(cls) if field.name in data or field.name not in cls.later]
        decision: Decision = typed(cls, {name: data[name] for name in names}, cls.kind)
        return decision

    def row(self, state: Mapping[str, Any], tensors: Sequence[str]) -> dict[str, Any]:
        """The values of the decision in a report, by the names of the attributes of
        `hvdcomp.tools.report.decisions.Decisions`.

        Args:
            state: the state of the policy, as JSON data.
            tensors: the names of the tensors whose level the policy decides.

        Raises:
            LookupError, TypeError, ValueError, AttributeError: if the state belongs to a policy with other decisions.
        """
        critical = state.get("critical")
        if isinstance(critical, bool):  # one regime for the whole model
            critical = {"": critical}
        share = {"critical": sum(map(bool, critical.values())) / len(critical)} if critical else {}
        return {**share, **{name: getattr(self, name) for name in self.shown}}


@dataclass(frozen=True)
class Levels(Decision):
    """The level of each tensor, by name; None for the compressor's own level."""

    levels: Mapping[str, Level | None]

    kind: ClassVar[str] = "levels"
    shown: ClassVar[tuple[str, ...]] = ("levels",)

    def plan(self, plans: Any) -> Any:
        return plans.at_levels(self.levels)


@dataclass(frozen=True)
class Factors(Decision):
    """The compression factor (uncompressed bytes / sent bytes) of each tensor, by name; 1.0 for no compression."""

    factors: Mapping[str, float]

    kind: ClassVar[str] = "factors"
    uses_factors: ClassVar[bool] = True
    shown: ClassVar[tuple[str, ...]] = ("factors",)

    def plan(self, plans: Any) -> Any:
        return plans.at_factors(self.factors)


@dataclass(frozen=True)
class MultiLevel(Decision):
    """Two compression factors for the whole model, and the choice of the result to send.

    Attributes:
        minimum: the factor of the first compression, which compresses the gradient plus the residual.
        candidate: the factor of the second compression, which compresses the result of the first. The factor is
            relative to the uncompressed size. None for no second compression.
        send: which result is sent. This is the result of the first compression, the result of the second compression,
            or "dense" for the uncompressed gradient plus the residual.
        factor: the unit of compression factors, "bytes" or "elements", as in `GraVAC`.
        gain: how the gain is computed, as in `GraVAC`.
    """

    minimum: float
    candidate: float | None
    send: Literal["dense", "minimum", "candidate"]
    factor: Unit = "bytes"
    gain: Gain = "error_feedback"

    kind: ClassVar[str] = "multilevel"
    uses_factors: ClassVar[bool] = True
    shown: ClassVar[tuple[str, ...]] = ("minimum", "candidate", "sent")
    later: ClassVar[tuple[str, ...]] = ("factor", "gain")

    @property
    def sent(self) -> float:
        """The compression factor of the result that is sent; 1.0 for "dense"."""
        if self.send == "candidate" and self.candidate is not None:
            return self.candidate
        return 1.0 if self.send == "dense" else self.minimum

    def plan(self, plans: Any) -> Any:
        return plans.at_factor(self.sent, self.factor)

    def observer(self, observers: Any) -> Any:
        return observers.two_levels(self)

    def measures(self, period_ends: bool) -> bool:
        return period_ends

    def row(self, state: Mapping[str, Any], tensors: Sequence[str]) -> dict[str, Any]:
        by_factor = {key: {float(cf): value for cf, value in state[key].items()} for key in ("gains", "throughput")}
        return {**super().row(state, tensors), **by_factor}


@dataclass(frozen=True)
class BatchSize(Decision):
    """A decision about the batch size, relative to the batch size at the start of training.

    Attributes:
        accumulation: the number of batches, of the size at the start, that are accumulated for one update. The update
            uses the mean of these batches.
        learning_rate_factor: the number by which the schedule's learning rate is multiplied.
    """

    accumulation: int = 1
    learning_rate_factor: float = 1.0

    kind: ClassVar[str] = "batch_size"
    sets_batch_size: ClassVar[bool] = True
    shown: ClassVar[tuple[str, ...]] = ("accumulation",)

    def batch(self) -> BatchSize:
        return self


@dataclass(frozen=True)
class Methods(Decision):
    """A decision about the compressor of each tensor.

    Attributes:
        methods: the spec of each tensor's compressor, by tensor name; None for the compressor of the training run.
        others: the spec of the compressor of all other tensors, including small ones; None for the compressor of the
            training run.
    """

    methods: Mapping[str, str | None]
    others: str | None

    kind: ClassVar[str] = "methods"

    def plan(self, plans: Any) -> Any:
        return plans.with_methods(self.methods, self.others)

    def row(self, state: Mapping[str, Any], tensors: Sequence[str]) -> dict[str, Any]:
        return {
            **super().row(state, tensors),
            "chosen": {name: name == state["chosen"] for name in state["candidates"]},
            "predicted": {name: candidate["seconds"] for name, candidate in state["candidates"].items()},
            "measured": {name: time["seconds"] for name, time in state["measured"].items()},
        }


def decision_from_json(data: Mapping[str, Any]) -> Decision:
    """Restores the decision that `Decision.to_json` wrote.

    Raises:
        ValueError: if the kind is unknown, or a field has an invalid value.
        LookupError: if a field is missing.
    """
    kinds = {kind.kind: kind for kind in Decision.__subclasses__()}
    if data["kind"] not in kinds:
        raise ValueError(f"unknown kind of decision {data['kind']!r}")
    return kinds[data["kind"]].from_json(data)
