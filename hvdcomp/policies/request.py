"""The requests of policies, and the statistics that policies get in return.

`Policy.request` specifies statistics and a period. At the end of the period, the policy gets these statistics as one
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
    """The learning rates of the user's schedule, one for each parameter group. They do not include the factor by which
    a policy multiplies the learning rate.

    Attributes:
        now: the rates at the first step of the period that has ended. A change within the period is then visible,
            because `now` differs from `next`.
        next: the rates of the next step.
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
    """The compression gains of one step for the whole model (`hvdcomp.policies.gravac`). A gain is NaN if it cannot be
    computed.

    Attributes:
        minimum: the gain of the first compression.
        candidate: the gain of the second compression; None if there was no second compression.
        ranks: number of ranks that exchange.
    """

    minimum: float
    candidate: float | None
    ranks: int


@dataclass(frozen=True)
class Timing:
    """The samples and the time of the steps of a period.

    Attributes:
        samples: number of samples that all ranks processed together. Any unit is possible if it does not change during
            a training run.
        seconds: total time of the steps, in seconds.
        evaluation_seconds: the part of `seconds` that was spent only on measuring gains. Later steps do not need this
            time.
    """

    samples: float
    seconds: float
    evaluation_seconds: float = 0.0


@dataclass(frozen=True)
class Candidate:
    """A choice of methods for all tensors, with the predicted time of a step.

    Attributes:
        seconds: predicted time of a step, in seconds.
        compressed: number of tensors that get `method`. These are the first tensors in `Candidates.order`. All other
            tensors get `rest`.
        rest: the spec of the compressor of all other tensors; None for the compressor of the training run.
        method: the spec of the compressor of the first tensors; None for the compressor of the training run.
    """

    seconds: float
    compressed: int
    rest: str | None
    method: str | None = None

    later: ClassVar[tuple[str, ...]] = ("method",)


@dataclass(frozen=True)
class Candidates:
    """The choices of methods from which a policy can choose (`hvdcomp.adaptation.candidates`).

    Attributes:
        order: the names of the tensors whose method may be chosen. The tensors for which compression is most worthwhile
            come first.
        candidates: the candidates, by name.
    """

    order: tuple[str, ...]
    candidates: Mapping[str, Candidate]


@dataclass(frozen=True)
class LevelTable:
    """The errors and the bytes of several levels of each tensor.

    The table does not contain levels that a tensor's method does not have, or tensors without a level or a gradient.

    Attributes:
        errors: ||G - C(G)||, by tensor name and level, where G is the mean of the accumulated gradients. With
            `Request.scaled`, the error is divided by the root mean square of G's elements. NaN if a sum of gradients is
            not finite.
        sent: the bytes that a rank sends in a step, by tensor name and level.
        own: each tensor's own level, which is used without a policy, by tensor name.
        other_bytes: the bytes that a rank sends in a step for all tensors that are not in the table, with their own
            methods.
        dense_bytes: the bytes of the whole model in a step without compression.
        norm: with `Request.scaled`, the sum of ||G|| over the tensors of the table, in the unit of the errors;
            otherwise None.
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
        step: the number of steps that have ended since the start of training.
        epoch: the number of epochs that have ended; None if epochs are not counted.
        learning_rates: the learning rates at the start of this period, and in the next step.
        norms: the 2-norm of each tensor's accumulated gradient, by tensor name. The accumulated gradient is the sum of
            the raw gradients (before memory and averaging) of all steps of the period that has ended. 0.0 for a tensor
            without a gradient.
        model_norm: the 2-norm of the accumulated gradient of the whole model, with all tensors as one vector.
        mean_to_std: |mean| / standard deviation of the elements of the accumulated gradient, by tensor name.
        gains: the compression gains that GraVAC measured in the last step of the period. Only for periods that are
            counted in steps.
        timing: the number of samples that were processed in the period, and the time that this took. Only for periods
            that are counted in steps.
        candidates: the choices of methods from which the policy can choose, with predicted step times. They are
            provided once, before the exchange of the first step. A policy that requests candidates must have the
            settings `calibration`, `model` and `batch`, as in `Auto`. The policy may also have `compressors` and
            `loss`.
        step_times: the seconds of each step since the last decision, in order, by rank 0's clock. A time is measured
            from the end of one step's exchange to the end of the next step's exchange. NaN for the first step after a
            start.
        level_table: the errors and the bytes of each tensor at the levels that `Request.around` names.
        exchange_seconds: the predicted time of a step's exchange for each factor of `Request.around`, as a mapping from
            the bytes that a rank sends in a step to seconds, in ascending order. For each factor, the level of every
            tensor is its own level times this factor. A policy that requests this statistic must have the settings
            `calibration`, `model` and `batch`, and a method `require_reachable`. This method raises an error if no
            level meets the policy's limit.
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
        """The fields that are not None, by name, as plain data without instances of classes. They can be saved in a
        checkpoint: `torch.load` with `weights_only` refuses instances of classes."""
        plain: dict[str, Any] = with_text_keys(self.known())
        return plain

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any]) -> Statistics:
        """Restores the statistics from the result of `plain`.

        Raises:
            ValueError: if a field has an invalid value.
        """
        # Earlier versions wrote numeric keys, and wrote parts as dataclasses.
        statistics: Statistics = typed(cls, with_text_keys(plain), "statistics")
        return statistics


@dataclass(frozen=True)
class Period:
    """Specifies when a policy decides. Exactly one of the first three fields is not 0.

    Attributes:
        epochs: number of epochs from one decision to the next.
        steps: number of steps from one decision to the next.
        until: number of steps after which a single decision is made.
        last: the gradients of this number of steps, at the end of a period of `steps`, are accumulated; 0 for all
            steps.
    """

    epochs: int = 0
    steps: int = 0
    until: int = 0
    last: int = 0


@dataclass(frozen=True)
class Request:
    """The request of a policy in one state.

    Attributes:
        statistics: the statistics that the next `decide` reads. Only these statistics must be computed in the period
            before this call.
        period: the period over which gradients are accumulated. `decide` is called at the end of a period. None if
            `decide` is never called again.
        source: which gradients are accumulated, either "local" (the gradients of rank 0) or "aggregated" (the means
            over the ranks).
        ever: the statistics that a request in any state may name. With these names, all ranks can prepare for any state
            of rank 0.
        around: the levels for LEVEL_TABLE and EXCHANGE_SECONDS, as factors of each tensor's own level. They include
            1.0.
        scaled: whether LEVEL_TABLE divides the errors of a tensor by the root mean square of its mean gradient.
    """

    statistics: frozenset[Statistic] = frozenset()
    period: Period | None = None
    source: str = "local"
    ever: frozenset[Statistic] = frozenset()
    around: tuple[float, ...] = ()
    scaled: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "ever", self.ever | self.statistics)
