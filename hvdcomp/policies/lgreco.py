"""L-GreCo chooses the compression levels (ratios, ranks or bits) that send the fewest bytes, with no more error than
the levels that the user has chosen."""

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
    """L-GreCo (Markov et al. 2022, arXiv:2210.17357): chooses the levels of all tensors that send the fewest bytes in
    total.

    The error of a level is ||G - C(G)||, where G is the mean of the last gradients. The own level of a tensor is the
    level of the training run's compressor, or of the method to which this compressor routes the tensor. The sum of the
    errors of all tensors is at most `alpha` times the sum at their own levels. No decision sends more bytes than the
    own levels, unless `alpha` is below 1. If no choice is within this limit, each tensor gets the level with the
    smallest error. If a sum of gradients is not finite, levels do not change.

    The policy minimizes bytes, not time. In the performance model, a byte of a method takes the same time in every
    tensor and at every level (tests/policies/test_policies_lgreco.py). So a calibration could not change a choice.

    Attributes:
        alpha: largest allowed error, as a multiple of the error at the tensors' own levels.
        interval, last, least, most, levels, statistic: settings that `OptimalLevels` describes.

    Example:
        >>> str(LGreCo(interval=200))
        'lgreco:interval=200'
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
    """The levels that `LGreCo` chooses with the setting `alpha`."""
    budget = alpha * math.fsum(errors[table.own[name]] for name, errors in table.errors.items())
    levels = fewest_bytes(table, budget) or least_of(table.errors)
    # Errors are rounded up, so with alpha=1 even the own levels may exceed the limit.
    own = {name: table.own[name] for name in levels}
    return own if alpha >= 1 and _bytes_of(table, levels) >= _bytes_of(table, own) else levels


def _bytes_of(table: LevelTable, levels: Mapping[str, Level]) -> int:
    return sum(table.sent[name][level] for name, level in levels.items())
