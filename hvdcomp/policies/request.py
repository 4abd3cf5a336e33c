"""The requests of policies, and the statistics that answer them.

`Policy.request` names statistics and the period after which they are told, as one `Statistics`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

from hvdcomp.specs.levels import Level


class Statistic(Enum):
    """A statistic that a policy may ask for. Each value is the name of the field of `Statistics` that holds it."""

    LEARNING_RATES = "learning_rates"
    NORMS = "norms"
    MODEL_NORM = "model_norm"
    MEAN_TO_STD = "mean_to_std"
    GAINS = "gains"
    TIMING = "timing"
    CANDIDATES = "candidates"
    STEP_TIMES = "step_times"
    LEVEL_TABLE = "level_table"
    EXCHANGE_SECONDS = "exchange_seconds"


@dataclass(frozen=True)
class LearningRates:
    """The learning rates of the training's schedule, one for each parameter group, without any policy's own factor.

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
    """Compression gains of one step, whole model, see `hvdcomp.policies.gravac`; NaN if there is none.

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
        compressed: number of tensors, the first in the order of `Candidates`, that get `method`.
        rest: spec of the compressor of all others; None for that of the training.
        method: spec of the compressor of these tensors; None for that of the training.
    """

    seconds: float
    compressed: int
    rest: str | None
    method: str | None = None

    later: ClassVar[tuple[str, ...]] = ("method",)


@dataclass(frozen=True)
class Candidates:
    """The candidates to choose from, see `hvdcomp.adaptation.candidates`.

    Attributes:
        order: names of the tensors whose method may be chosen, the most worth compressing first.
        candidates: by name.
    """

    order: tuple[str, ...]
    candidates: Mapping[str, Candidate]


@dataclass(frozen=True)
class LevelTable:
    """The loss and the bytes of some levels of each tensor. Levels that a tensor's method does not have are left out.

    Tensors whose method has no level, or that had no gradient, are left out.

    Attributes:
        errors: by tensor name and level, ||G - C(G)|| of the mean G of the accumulated gradients. NaN if a sum of
            gradients is not finite.
        sent: the bytes that a rank sends of the tensor in a step at each level.
        own: by tensor name, the level that it has without a policy.
        other_bytes: that a rank sends in a step of all tensors that are left out, by their own methods.
        dense_bytes: of the whole model in a step without compression.
    """

    errors: Mapping[str, Mapping[Level, float]]
    sent: Mapping[str, Mapping[Level, int]]
    own: Mapping[str, Level]
    other_bytes: int
    dense_bytes: int

    def __post_init__(self) -> None:
        for name, errors in self.errors.items():
            if self.own.get(name) not in errors or self.sent.get(name, {}).keys() != errors.keys():
                raise ValueError(f"the levels of {name} in errors, sent and own are not the same")


@dataclass(frozen=True)
class Statistics:
    """The statistics at one moment of decision. A field that the policy did not ask for may be None.

    Attributes:
        step: steps that ended, from the start of the training.
        epoch: epochs that ended; None if they are not counted.
        learning_rates: now and next.
        norms: by tensor name, the 2-norm of the accumulated gradient: the sum of the raw gradients, before memory and
            averaging, of all steps of the period that ends. 0.0 for a tensor that had no gradient.
        model_norm: the same of the whole model: all tensors as one vector.
        mean_to_std: by tensor name, the absolute mean of the accumulated gradient's elements over their standard
            deviation.
        gains, timing: of the last step of a period, and of all its steps; for policies whose periods are counted in
            steps.
        candidates: what there is to choose from; told once, before the first step is exchanged. The policy that asks
            for it has settings of what they are made from: `calibration`, `model` and `batch`, as `Auto`; and it may
            have its `compressors` and `loss`.
        step_times: seconds of each step since the last decision, in order: from the end of one step's exchange to
            that of the next, by rank 0's clock. NaN for the first step after a start.
        level_table: errors and bytes, for the levels of `Request.around`.
        exchange_seconds: predicted time of a step's exchange, by the bytes that a rank sends in a step, ascending: with
            all tensors at so many times their own levels as `Request.around` says. The policy that asks for it has
            settings of what they are predicted by, `calibration`, `model` and `batch`, and its `require_reachable`
            refuses a limit that no level keeps.
    """

    step: int
    epoch: int | None = None
    learning_rates: LearningRates | None = None
    norms: Mapping[str, float] | None = None
    model_norm: float | None = None
    mean_to_std: Mapping[str, float] | None = None
    gains: GravacGains | None = None
    timing: Timing | None = None
    candidates: Candidates | None = None
    step_times: tuple[float, ...] | None = None
    level_table: LevelTable | None = None
    exchange_seconds: Mapping[int, float] | None = None

    def known(self) -> dict[str, Any]:
        """The fields that are not None, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class Period:
    """When a policy decides. Two of the first three are 0.

    Attributes:
        epochs: at the end of every `epochs` epochs.
        steps: at the end of every `steps` steps.
        until: once, when `until` steps have ended.
        last: of the steps of a period of `steps`, how many at its end have their gradients accumulated; 0 for all.
    """

    epochs: int = 0
    steps: int = 0
    until: int = 0
    last: int = 0


@dataclass(frozen=True)
class Request:
    """The request of a policy while it is in one state.

    Attributes:
        statistics: what the next `decide` reads. Nothing else need be computed in the period before it.
        period: at whose end `decide` is called, and over which gradients are accumulated; None for never.
        source: whose gradients are accumulated: "local", rank 0's own, or "aggregated", the mean over the ranks.
        ever: what requests of other states may name. All ranks go by it, whatever state rank 0 has reached.
        around: for LEVEL_TABLE and EXCHANGE_SECONDS, the levels to look at, as factors of each tensor's own level; 1.0
            is one of them.
    """

    statistics: frozenset[Statistic] = frozenset()
    period: Period | None = None
    source: str = "local"
    ever: frozenset[Statistic] = frozenset()
    around: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "ever", self.ever | self.statistics)
