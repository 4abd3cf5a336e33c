"""What policies decide, and how a decision is written as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from hvdcomp.policies.schedules import Level


@dataclass(frozen=True)
class Levels:
    """The level of each tensor by name; None for the compressor's own."""

    levels: Mapping[str, Level | None]

    kind: ClassVar[str] = "levels"


@dataclass(frozen=True)
class Factors:
    """The compression factor (dense bytes / sent bytes) of each tensor by name; 1.0 for uncompressed."""

    factors: Mapping[str, float]

    kind: ClassVar[str] = "factors"


@dataclass(frozen=True)
class MultiLevel:
    """For the whole model: to which compression factors to compress, and what of it to send.

    Attributes:
        minimum: factor of the first compression, of the gradient with its residual.
        candidate: factor, still against the dense size, to which the result is compressed again; None for not again.
        send: which of the two, or the uncompressed gradient with its residual; None if the gains must be told first.
    """

    minimum: float
    candidate: float | None
    send: Literal["dense", "minimum", "candidate"] | None

    kind: ClassVar[str] = "multilevel"

    @property
    def sent(self) -> float | None:
        """The compression factor of what is sent, 1.0 for dense; None if that is not known yet."""
        if self.send == "dense":
            return 1.0
        return {"minimum": self.minimum, "candidate": self.candidate}.get(self.send or "")


@dataclass(frozen=True)
class BatchSize:
    """How much larger than at the start the batch is.

    Attributes:
        accumulation: so many batches of the starting size are accumulated for one update, which takes their mean.
        learning_rate_factor: what the schedule's learning rate is to be multiplied with.
    """

    accumulation: int
    learning_rate_factor: float

    kind: ClassVar[str] = "batch_size"


@dataclass(frozen=True)
class LevelsAndBatch:
    """Levels and a batch size at the same time."""

    levels: Levels
    batch_size: BatchSize

    kind: ClassVar[str] = "joint"


@dataclass(frozen=True)
class Probe:
    """Levels are to be measured: in some steps rank 0 compresses the same gradients to several factors.

    Attributes:
        factors: the compression factors to try, ascending. Nothing of it is sent.
        every: in the first step of the period and in every so many-th after it.
        send: the factor at which all tensors are sent, in every step.
    """

    factors: tuple[float, ...]
    every: int
    send: float

    kind: ClassVar[str] = "probe"


@dataclass(frozen=True)
class Methods:
    """The method of each tensor.

    Attributes:
        methods: by tensor name the spec of its compressor; None for the one that the training was given.
        others: the same of all tensors that are not named, also of those that are too small to be compressed.
    """

    methods: Mapping[str, str | None]
    others: str | None

    kind: ClassVar[str] = "methods"


Decision = Levels | Factors | MultiLevel | BatchSize | LevelsAndBatch | Probe | Methods


def decision_to_json(decision: Decision) -> dict[str, Any]:
    """A decision as JSON can hold it: its `kind` and its fields.

    In a joint decision `levels` is the mapping of names itself and `batch_size` an object of the two numbers.
    """
    data = dataclasses.asdict(decision)
    if isinstance(decision, LevelsAndBatch):
        data["levels"] = dict(decision.levels.levels)
    if isinstance(decision, Probe):
        data["factors"] = list(decision.factors)
    return {"kind": decision.kind, **data}
