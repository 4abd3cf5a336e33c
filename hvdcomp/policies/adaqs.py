"""AdaQS halves the compression factor whenever the mean of the gradient has become smaller relative to its standard
deviation.

As training converges, noise becomes a larger part of the gradient, and the mean-to-standard-deviation ratio (MSDR)
falls. AdaQS then sends the gradient more precisely.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from hvdcomp.policies.base import AccumulatedGradientPolicy
from hvdcomp.policies.decisions import Factors
from hvdcomp.policies.request import Request, Statistic, Statistics
from hvdcomp.specs.described import at_least, is_number, number


@dataclass(frozen=True)
class AdaQSState:
    """The state that `AdaQS` keeps from one decision to the next.

    Attributes:
        factors: the compression factor of each tensor, by tensor name.
        reference: the ratio of each tensor at the last change of its factor, by tensor name; None before the first
            usable ratio.
    """

    factors: Mapping[str, float]
    reference: Mapping[str, float | None]


@dataclass(frozen=True, kw_only=True)
class AdaQS(AccumulatedGradientPolicy[AdaQSState]):
    """AdaQS (Guo et al. 2020, Accelerating distributed deep learning by adaptive gradient quantization, ICASSP), for
    any compressor, as in the comparison of Agarwal et al. 2021 (arXiv:2010.16248, section 5).

    Each tensor is treated separately. The first ratio (MSDR) of a tensor is its reference. If (reference - ratio) /
    reference >= fall, the compression factor is halved once, and the ratio becomes the new reference. A rising ratio
    changes nothing, and a factor never rises.

    Attributes:
        start: the compression factor at the start of training.
        fall: the factor is halved if the ratio falls by at least this share, between 0 and 1. The papers give no value.
        floor: the smallest compression factor.
        interval: number of epochs from one decision to the next. Gradients are accumulated over these epochs.
        steps: number of steps from one decision to the next, instead of `interval`. Gradients are accumulated over
            these steps.

    Example:
        >>> str(AdaQS(start=64, fall=0.2))
        'adaqs:start=64,fall=0.2'
    """

    start: float
    fall: Annotated[float, number(lambda fall: 0 < fall < 1, "a number between 0 and 1")]
    floor: Annotated[float, number(lambda floor: floor >= 1, "a number of at least 1")] = 1.0
    interval: Annotated[int, at_least(1)] = 1

    name: ClassVar[str] = "adaqs"
    examples: ClassVar[tuple[str, ...]] = ("adaqs:start=64,fall=0.2",)
    state_type: ClassVar[type] = AdaQSState

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(is_number(self.start) and self.start > self.floor, "start", f"a number above floor={self.floor}")
        self.require_interval(self.interval, AdaQS.interval)

    def initial_state(self, tensors: Sequence[str]) -> AdaQSState:
        return AdaQSState(dict.fromkeys(tensors, float(self.start)), dict.fromkeys(tensors))

    def request(self, state: AdaQSState) -> Request:
        """The statistics that the policy needs next. The policy needs none if the factors of all tensors have reached
        their minimum."""
        ended = all(factor <= self.floor for factor in state.factors.values())
        ratios = {Statistic.MEAN_TO_STD}
        return self.request_after(self.interval, set() if ended else ratios, ever=ratios)

    def decision(self, state: AdaQSState) -> Factors:
        return Factors(dict(state.factors))

    def update(self, state: AdaQSState, statistics: Statistics) -> AdaQSState:
        if not self.request(state).statistics:
            return state
        assert statistics.mean_to_std is not None
        ratios = self.of_tensors(statistics.mean_to_std, state.factors, "ratios")
        factors, references = dict(state.factors), dict(state.reference)
        for name, ratio in ratios.items():
            if not math.isfinite(ratio):
                continue
            reference = references[name]
            if reference is None or not reference > 0:  # ratios are never negative
                references[name] = float(ratio)
            elif (reference - ratio) / reference >= self.fall:
                factors[name] = max(float(self.floor), factors[name] / 2)
                references[name] = float(ratio)
        return AdaQSState(factors, references)
