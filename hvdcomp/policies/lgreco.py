"""L-GreCo: the levels of all tensors that send the fewest bytes without losing more than their own levels would."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from hvdcomp.policies.optimal_levels import Count, Least, Most, OptimalLevels, TensorLevels, fewest_bytes, least_of
from hvdcomp.policies.request import LevelTable, Statistics
from hvdcomp.specs.described import number
from hvdcomp.specs.levels import Level


@dataclass(frozen=True, kw_only=True)
class LGreCo(OptimalLevels[TensorLevels]):
    """L-GreCo (Markov et al. 2022, arXiv:2210.17357): for each tensor the level that sends the fewest bytes in all.

    The error of a level is ||G - C(G)||, of the mean G of the last gradients. The errors of all tensors add up to no
    more than `alpha` times those at the tensors' own levels, which are those of the training's compressor, or of the
    methods that it routes tensors to. No decision sends more bytes than the own levels, unless `alpha` is below 1: then
    it may take more. If no choice is within the budget, each tensor gets the level that loses least. Where a sum of
    gradients is not finite, the levels stay as they are.

    Bytes stand for time. The performance model says that of one method a byte takes as long in every tensor and at
    every level (tests/policies/test_policies_lgreco.py holds that), so no calibration could change a choice.

    Attributes:
        alpha: the budget, as a share of the error at the own levels.
        interval, last, least, most, levels, statistic: as of `OptimalLevels`.
    """

    alpha: Annotated[float, number(lambda alpha: 0 < alpha <= 1e6, "a number above 0 and at most 1e6")] = 1.0
    least: Least = 0.5
    most: Most = 2.0
    levels: Count = 7

    name: ClassVar[str] = "lgreco"
    examples: ClassVar[tuple[str, ...]] = ("lgreco", "lgreco:interval=200,least=0.25,most=4")
    state_type: ClassVar[type] = TensorLevels

    def choose(self, table: LevelTable, statistics: Statistics, state: TensorLevels) -> dict[str, Level]:
        return cheapest(table, self.alpha)


def cheapest(table: LevelTable, alpha: float) -> dict[str, Level]:
    """The level of each tensor, as `LGreCo` chooses it; `alpha` is the share of the error at the own levels."""
    budget = alpha * math.fsum(errors[table.own[name]] for name, errors in table.errors.items())
    levels = fewest_bytes(table, budget) or least_of(table.errors)
    # Rounding up takes from the budget, which the own levels use up to the last bit where alpha is 1.
    own = {name: table.own[name] for name in levels}
    return own if alpha >= 1 and _bytes_of(table, levels) >= _bytes_of(table, own) else levels


def _bytes_of(table: LevelTable, levels: Mapping[str, Level]) -> int:
    return sum(table.sent[name][level] for name, level in levels.items())
