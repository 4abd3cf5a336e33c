"""Policies that change the batch size. Larger batches need fewer exchanges, and are made by gradient accumulation.

Both policies multiply the learning rate by the same factor as the batch size, so that the noise of the updates does not
change (Goyal et al. 2017, arXiv:1706.02677; Smith et al. 2018, arXiv:1711.00489).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from hvdcomp.errors import SpecError
from hvdcomp.policies.accordion import CriticalRegimes, finite, is_critical
from hvdcomp.policies.base import Policy
from hvdcomp.policies.decisions import BatchSize
from hvdcomp.policies.request import Period, Request, Statistic, Statistics
from hvdcomp.policies.schedules import Levelled
from hvdcomp.specs.described import at_least

Batch = Annotated[int, at_least(1)]
"""A batch size, in samples."""

ROUNDING = 1e-9
"""Relative tolerance: 0.1 / 0.02 must count as a decay by 5 in spite of rounding."""


@dataclass(frozen=True)
class AccordionBatchSizeState:
    """The state that `AccordionBatchSize` keeps from one decision to the next.

    Attributes:
        grown: whether the training run now uses the large batch.
        previous: the norm of the model's accumulated gradient at the last comparison; None before the first comparison.
        ends: the number of epochs (or windows of steps) that have ended.
    """

    grown: bool = False
    previous: float | None = None
    ends: int = 0


@dataclass(frozen=True, kw_only=True)
class AccordionBatchSize(CriticalRegimes[AccordionBatchSizeState]):
    """Accordion for the batch size (Agarwal et al. 2021, arXiv:2010.16248, section 4.1).

    The batch is small at first. The batch becomes large when a comparison of norms finds that the regime of the whole
    model is not critical, unless the learning rate falls at this time. It then stays large.

    Attributes:
        low: size of the small batch at the start of training, in samples.
        high: size of the large batch, in samples; a multiple of `low`.

    Example:
        >>> str(AccordionBatchSize(low=512, high=4096))
        'accordion_batch_size:low=512,high=4096'
    """

    low: Batch
    high: Batch

    name: ClassVar[str] = "accordion_batch_size"
    examples: ClassVar[tuple[str, ...]] = ("accordion_batch_size:low=512,high=4096",)
    state_type: ClassVar[type] = AccordionBatchSizeState

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.high <= self.low or self.high % self.low:
            raise SpecError(
                f"{self.name}: low={self.low},high={self.high} is not allowed: the large batch is accumulated from "
                "small batches, so high must be a multiple of low"
            )

    def check(self, steps_per_epoch: int | None, compressor: Levelled) -> None:
        super().check(steps_per_epoch, compressor)
        require_room(self, self.high // self.low, steps_per_epoch)

    def initial_state(self, tensors: Sequence[str]) -> AccordionBatchSizeState:
        return AccordionBatchSizeState()

    def request(self, state: AccordionBatchSizeState) -> Request:
        statistics = {Statistic.LEARNING_RATES, Statistic.MODEL_NORM}
        compares = not state.grown and self.compares_at(state.ends + 1)
        return self.request_after(1, statistics if compares else set(), ever=statistics)

    def decision(self, state: AccordionBatchSizeState) -> BatchSize:
        factor = self.high // self.low if state.grown else 1
        return BatchSize(accumulation=factor, learning_rate_factor=float(factor))

    def update(self, state: AccordionBatchSizeState, statistics: Statistics) -> AccordionBatchSizeState:
        ends = state.ends + 1
        if state.grown or not self.compares_at(ends):
            # If the learning rate falls between two comparisons, Accordion chooses the small batch, which is already in
            # use.
            return AccordionBatchSizeState(state.grown, state.previous, ends)
        norm, rates = statistics.model_norm, statistics.learning_rates
        assert norm is not None
        assert rates is not None
        critical = is_critical(state.previous, norm, self.eta) or rates.fall
        return AccordionBatchSizeState(grown=not critical, previous=finite(norm), ends=ends)


def require_room(policy: Policy[Any], accumulation: int, steps_per_epoch: int | None) -> None:
    """Raises SpecError if the largest batch is longer than an epoch, which has `steps_per_epoch` batches of the size at
    the start."""
    if steps_per_epoch is not None and accumulation > steps_per_epoch:
        raise SpecError(
            f"{policy}: the largest batch consists of {accumulation} batches of the first size, but an epoch has only "
            f"{steps_per_epoch} batches (steps_per_epoch); choose a smaller high, or start with a larger batch"
        )


@dataclass(frozen=True)
class IncreaseBatchSizeState:
    """The state that `IncreaseBatchSize` keeps from one decision to the next.

    Attributes:
        peak: the highest learning rate of the schedule so far.
        accumulation: number of batches that are accumulated for one update, as in `BatchSize`.
    """

    peak: float = 0.0
    accumulation: int = 1


@dataclass(frozen=True, kw_only=True)
class IncreaseBatchSize(Policy[IncreaseBatchSizeState]):
    """Increases the batch size instead of decaying the learning rate (Smith et al. 2018, arXiv:1711.00489).

    If the schedule's learning rate is below its peak, the batch is multiplied by peak / rate, rounded down to an
    integer and limited by `high`. The learning rate of the schedule is multiplied by the same integer. So the rate
    falls below its peak only because of the rounding and the limit `high`. If there are several parameter groups, the
    policy looks only at the largest rate. If the schedule returns to its peak (a warm restart), the batch returns to
    its original size. A rate of zero, as at the end of some schedules, changes nothing.

    Attributes:
        low: size of the batch at the start of training, in samples.
        high: size of the largest batch, in samples.
        steps: number of steps from one decision to the next. With 0, decisions are made at the end of every epoch.

    Example:
        >>> str(IncreaseBatchSize(low=128, high=2048))
        'increase_batch_size:low=128,high=2048'
    """

    low: Batch
    high: Batch
    steps: Annotated[int, at_least(0)] = 0

    name: ClassVar[str] = "increase_batch_size"
    examples: ClassVar[tuple[str, ...]] = ("increase_batch_size:low=128,high=2048",)
    state_type: ClassVar[type] = IncreaseBatchSizeState

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.high < 2 * self.low:
            raise SpecError(
                f"{self.name}: low={self.low},high={self.high} is not allowed: the batch grows by whole multiples, so "
                "high must be at least twice low"
            )

    def check(self, steps_per_epoch: int | None, compressor: Levelled) -> None:
        super().check(steps_per_epoch, compressor)
        require_room(self, self.high // self.low, steps_per_epoch)

    def initial_state(self, tensors: Sequence[str]) -> IncreaseBatchSizeState:
        return IncreaseBatchSizeState()

    def request(self, state: IncreaseBatchSizeState) -> Request:
        period = Period(steps=self.steps) if self.steps else Period(epochs=1)
        return Request(frozenset({Statistic.LEARNING_RATES}), period)

    def decision(self, state: IncreaseBatchSizeState) -> BatchSize:
        return BatchSize(accumulation=state.accumulation, learning_rate_factor=float(state.accumulation))

    def update(self, state: IncreaseBatchSizeState, statistics: Statistics) -> IncreaseBatchSizeState:
        assert statistics.learning_rates is not None
        present, following = max(statistics.learning_rates.now), max(statistics.learning_rates.next)
        peak = max(state.peak, present, following)
        if not following > 0:
            return IncreaseBatchSizeState(peak, state.accumulation)
        decay = math.floor(min(peak / following * (1 + ROUNDING), self.high // self.low))
        return IncreaseBatchSizeState(peak, decay)
