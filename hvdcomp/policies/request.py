"""The requests of policies, and the statistics that policies get in return.

`Policy.request` names statistics and a period. At the end of the period, the policy gets these statistics as one
`Statistics`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

from hvdcomp.specs.levels import Level
from hvdcomp.specs.typed import typed, with_text_keys


class Statistic(Enum):
    """A statistic that a policy may request. Each value is the name of its field in `Statistics`."""

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
        now: rates at the first step of the period that ends, so that a change within a period is not missed.
        next: rates of the next step.
    """

    now: tuple[float, ...]
    next: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.now or len(self.now) != len(self.next):
            raise ValueError(
                f"learning rates {self.now} and {self.next} must have the same length: one rate for each parameter "
                "group, and at least one parameter group"
            )

    @property
    def fall(self) -> bool:
        """Whether the rate of any parameter group falls."""
        return any(after < before for before, after in zip(self.now, self.next, strict=True))


@dataclass(frozen=True)
class GravacGains:
    """Compression gains of one step for the whole model (`hvdcomp.policies.gravac`); NaN if there is none.

    Attributes:
        minimum: gain of the first compression.
        candidate: gain of the second compression; None if there was none.
        ranks: number of ranks.
    """

    minimum: float
    candidate: float | None
    ranks: int


@dataclass(frozen=True)
class Timing:
    """Samples and time of the steps of a period.

    Attributes:
        samples: samples of all ranks together, in any unit that does not change during a training.
        seconds: seconds of the whole iterations.
        evaluation_seconds: the part of `seconds` spent only on measuring gains, which later steps do not spend.
    """

    samples: float
    seconds: float
    evaluation_seconds: float = 0.0


@dataclass(frozen=True)
class Candidate:
    """A choice of methods for all tensors, with its predicted step time.

    Attributes:
        seconds: predicted time of a step.
        compressed: number of tensors, the first in the order of `Candidates`, that get `method`.
        rest: spec of the compressor of all other tensors; None for the training's own.
        method: spec of the compressor of the first tensors; None for the training's own.
    """

    seconds: float
    compressed: int
    rest: str | None
    method: str | None = None

    later: ClassVar[tuple[str, ...]] = ("method",)


@dataclass(frozen=True)
class Candidates:
    """The candidates to choose from (`hvdcomp.adaptation.candidates`).

    Attributes:
        order: names of the tensors whose method may be chosen, the most worth compressing first.
        candidates: the candidates by name.
    """

    order: tuple[str, ...]
    candidates: Mapping[str, Candidate]


@dataclass(frozen=True)
class LevelTable:
    """The errors and the bytes of several levels of each tensor.

    The table leaves out levels that a tensor's method does not have, and tensors without a level or a gradient.

    Attributes:
        errors: ||G - C(G)|| with the mean G of the accumulated gradients, by tensor name and level; with
            `Request.scaled` over the root mean square of G's elements. NaN if a sum of gradients is not finite.
        sent: bytes that a rank sends in a step, by tensor name and level.
        own: level without a policy, by tensor name.
        other_bytes: bytes that a rank sends in a step for all tensors that are left out, by their own methods.
        dense_bytes: bytes of the whole model in a step without compression.
        norm: with `Request.scaled` the sum of ||G|| over the table's tensors, in units of their errors; else None.
    """

    errors: Mapping[str, Mapping[Level, float]]
    sent: Mapping[str, Mapping[Level, int]]
    own: Mapping[str, Level]
    other_bytes: int
    dense_bytes: int
    norm: float | None = None

    later: ClassVar[tuple[str, ...]] = ("norm",)

    def __post_init__(self) -> None:
        for name, errors in self.errors.items():
            if self.own.get(name) not in errors or self.sent.get(name, {}).keys() != errors.keys():
                raise ValueError(f"errors, sent and own must have the same levels for {name}")


@dataclass(frozen=True)
class Statistics:
    """The statistics for one decision. A field that the policy did not request may be None.

    Attributes:
        step: number of steps that ended since the start of the training.
        epoch: number of epochs that ended; None if they are not counted.
        learning_rates: the rates of this period and of the next step.
        norms: 2-norm of the accumulated gradient, by tensor name: the sum of the raw gradients, before memory and
            averaging, of all steps of the period that ends. 0.0 for a tensor without a gradient.
        model_norm: 2-norm of the accumulated gradient of the whole model, all tensors as one vector.
        mean_to_std: absolute mean of the accumulated gradient's elements over their standard deviation, by tensor name.
        gains: gains of the last step of a period counted in steps.
        timing: samples and time of all steps of a period counted in steps.
        candidates: the candidates; given once, before the first step is exchanged. A policy that requests them has the
            settings `calibration`, `model` and `batch` of `Auto`, and may have its `compressors` and `loss`.
        step_times: seconds of each step since the last decision, in order, from the end of one step's exchange to the
            end of the next, by rank 0's clock. NaN for the first step after a start.
        level_table: errors and bytes of the levels of `Request.around`.
        exchange_seconds: predicted time of a step's exchange, by the bytes that a rank sends in a step, ascending; all
            tensors are at the same factor of `Request.around` of their own levels. A policy that requests it has the
            settings `calibration`, `model` and `batch`, and its `require_reachable` refuses limits that no level meets.
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

    def plain(self) -> dict[str, Any]:
        """`known` for a checkpoint, without classes, which `torch.load` with `weights_only` refuses."""
        plain: dict[str, Any] = with_text_keys(self.known())
        return plain

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any]) -> Statistics:
        """The statistics from which `plain` was made.

        Raises:
            ValueError: if a field has an invalid value.
        """
        # Earlier versions wrote numeric keys, and parts as dataclasses.
        statistics: Statistics = typed(cls, with_text_keys(plain), "statistics")
        return statistics


@dataclass(frozen=True)
class Period:
    """The times of a policy's decisions. Two of the first three fields are 0.

    Attributes:
        epochs: number of epochs between decisions.
        steps: number of steps between decisions.
        until: number of steps after which a single decision is made.
        last: number of steps at the end of a period of `steps` whose gradients are accumulated; 0 for all.
    """

    epochs: int = 0
    steps: int = 0
    until: int = 0
    last: int = 0


@dataclass(frozen=True)
class Request:
    """The request of a policy in one state.

    Attributes:
        statistics: statistics that the next `decide` reads; no others need be computed in the period before it.
        period: the period at whose end `decide` is called, and over which gradients are accumulated; None for never.
        source: the gradients that are accumulated: "local", rank 0's own, or "aggregated", the mean over ranks.
        ever: statistics that the requests of any state may name, so that all ranks can prepare for all states of rank
            0.
        around: levels for LEVEL_TABLE and EXCHANGE_SECONDS, as factors of each tensor's own level; 1.0 is one of them.
        scaled: whether LEVEL_TABLE has errors in units of the root mean square of each tensor's mean gradient.
    """

    statistics: frozenset[Statistic] = frozenset()
    period: Period | None = None
    source: str = "local"
    ever: frozenset[Statistic] = frozenset()
    around: tuple[float, ...] = ()
    scaled: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "ever", self.ever | self.statistics)
