"""A level that never changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from hvdcomp.policies.base import LEVEL, Policy
from hvdcomp.policies.decisions import Levels
from hvdcomp.policies.request import Request, Statistics
from hvdcomp.policies.schedules import Levelled
from hvdcomp.specs.described import or_none
from hvdcomp.specs.levels import Level


@dataclass(frozen=True)
class ConstantState:
    """The state of `Constant`: the names of the tensors."""

    tensors: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Constant(Policy[ConstantState]):
    """A level that never changes.

    Attributes:
        level: the level of all tensors; None for the compressor's own level.

    Example:
        >>> str(Constant(level=0.01))
        'constant:level=0.01'
    """

    level: Annotated[Level | None, or_none(LEVEL)] = None

    name: ClassVar[str] = "constant"
    examples: ClassVar[tuple[str, ...]] = ("constant:level=0.01",)
    state_type: ClassVar[type] = ConstantState

    def request(self, state: ConstantState) -> Request:
        return Request()

    def check(self, steps_per_epoch: int | None, compressor: Levelled) -> None:
        compressor.at_level(self.level)

    def initial_state(self, tensors: Sequence[str]) -> ConstantState:
        return ConstantState(tuple(tensors))

    def decision(self, state: ConstantState) -> Levels:
        return Levels(dict.fromkeys(state.tensors, self.level))

    def update(self, state: ConstantState, statistics: Statistics) -> ConstantState:
        return state
