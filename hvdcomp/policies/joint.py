"""Compression levels and batch size together: Accordion's two uses, on the same statistics.

No paper describes this: that of Accordion names it as future work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from hvdcomp.policies.accordion import Accordion, AccordionState, CriticalRegimes, require_two_levels
from hvdcomp.policies.base import SomeLevel
from hvdcomp.policies.batch_size import AccordionBatchSize, AccordionBatchSizeState, Batch, require_multiple
from hvdcomp.policies.decisions import LevelsAndBatch
from hvdcomp.policies.request import Request, Statistics
from hvdcomp.policies.schedules import Levelled


@dataclass(frozen=True)
class AccordionJointState:
    """The state of `AccordionJoint`: those of the two policies that it is made of."""

    levels: AccordionState
    batch_size: AccordionBatchSizeState


@dataclass(frozen=True, kw_only=True)
class AccordionJoint(CriticalRegimes[AccordionJointState]):
    """`Accordion` for the level of each tensor and `AccordionBatchSize` for the batch, at the same time.

    Neither knows of the other: a tensor's regime may be critical while that of the whole model is not.

    Attributes:
        low, high: levels of low and high compression, as in `Accordion`.
        batch_low, batch_high: the small batch, that the training is started with, and the large one, in samples.
    """

    low: SomeLevel
    high: SomeLevel
    batch_low: Batch
    batch_high: Batch

    name: ClassVar[str] = "accordion_joint"
    examples: ClassVar[tuple[str, ...]] = ("accordion_joint:low=4,high=1,batch_low=512,batch_high=4096",)
    state_type: ClassVar[type] = AccordionJointState

    def __post_init__(self) -> None:
        super().__post_init__()
        require_two_levels(self, self.low, self.high)
        require_multiple(self, "batch_low", "batch_high")

    @property
    def levels(self) -> Accordion:
        """The policy of the levels."""
        return Accordion(low=self.low, high=self.high, **self._common)

    @property
    def batch_size(self) -> AccordionBatchSize:
        """The policy of the batch size."""
        return AccordionBatchSize(low=self.batch_low, high=self.batch_high, **self._common)

    @property
    def _common(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("eta", "interval", "steps", "statistic", "lag")}

    def check(self, steps_per_epoch: int | None, compressor: Levelled) -> None:
        super().check(steps_per_epoch, compressor)
        self.levels.check(steps_per_epoch, compressor)
        self.batch_size.check(steps_per_epoch, compressor)

    def initial_state(self, tensors: Sequence[str]) -> AccordionJointState:
        return AccordionJointState(self.levels.initial_state(tensors), self.batch_size.initial_state(tensors))

    def request(self, state: AccordionJointState) -> Request:
        return self.levels.request(state.levels) | self.batch_size.request(state.batch_size)

    def decision(self, state: AccordionJointState) -> LevelsAndBatch:
        return LevelsAndBatch(self.levels.decision(state.levels), self.batch_size.decision(state.batch_size))

    def update(self, state: AccordionJointState, statistics: Statistics) -> AccordionJointState:
        levels = self.levels.update(state.levels, statistics)
        return AccordionJointState(levels, self.batch_size.update(state.batch_size, statistics))

    def to_json(self, state: AccordionJointState) -> dict[str, Any]:
        levels, batch_size = self.levels.to_json(state.levels), self.batch_size.to_json(state.batch_size)
        return {"policy": self.name, "levels": levels, "batch_size": batch_size}

    def from_json(self, data: Mapping[str, Any]) -> AccordionJointState:
        parts = self.fields_of(data)
        levels, batch_size = self.levels.from_json(parts["levels"]), self.batch_size.from_json(parts["batch_size"])
        return AccordionJointState(levels, batch_size)
