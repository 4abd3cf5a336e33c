"""A budget: the levels of all tensors that lose least among those that send as much as may be sent."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

from hvdcomp.errors import SpecError
from hvdcomp.policies.optimal_levels import (
    Count,
    Least,
    Most,
    OptimalLevels,
    TensorLevels,
    fewest_bytes,
    least_error,
    least_of,
)
from hvdcomp.policies.request import LevelTable, Period, Request, Statistic, Statistics
from hvdcomp.specs.described import number
from hvdcomp.specs.levels import Level


@dataclass(frozen=True, kw_only=True)
class Budget(OptimalLevels):
    """Spends what the user can afford on the tensors where it counts: L-GreCo's programme with a limit of the user's.

    With `factor` the levels are those that lose least of all that send no more than the uncompressed bytes / `factor`.
    With `error` they are those that send least of all that lose no more than that share. What a level loses is
    ||G - C(G)||, of the mean G of the last gradients, as in L-GreCo (Markov et al. 2022, arXiv:2210.17357); the limit
    in bytes is not published.

    Until the first decision, after `last` steps, all tensors have their own levels: those of the training's compressor,
    or of the methods that it routes tensors to. They also say around which levels to look. If no choice is within the
    limit, all tensors get what comes nearest to it.

    Attributes:
        factor: uncompressed bytes / sent bytes of a rank in a step, of the whole model.
        error: share of the norms that may be lost: the sum of ||G - C(G)|| over the sum of ||G||. One of the two.
        interval, last, least, most, levels, statistic: as of `OptimalLevels`.
    """

    factor: Annotated[float, number(lambda it: it == 0 or 1 < it <= 1e12, "above 1 and at most 1e12")] = 0.0
    error: Annotated[float, number(lambda error: 0 <= error < 1, "above 0 and below 1")] = 0.0
    least: Least = 0.1
    most: Most = 10.0
    levels: Count = 13

    name: ClassVar[str] = "budget"
    examples: ClassVar[tuple[str, ...]] = ("budget:factor=50", "budget:error=0.5,interval=200")

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.factor) == bool(self.error):
            given = f"factor={self.factor} and error={self.error} are given" if self.factor else "neither is given"
            raise SpecError(
                f"{self.name}: give factor (uncompressed bytes / sent bytes, such as factor=50) or error (the share of "
                f"norms that may be lost, such as error=0.5), one of the two; {given}"
            )

    def request(self, state: TensorLevels) -> Request:
        undecided = all(level is None for level in state.levels.values())
        asked = frozenset({Statistic.LEVEL_TABLE, *([Statistic.NORMS] if self.error else [])})
        period = Period(steps=self.looks if undecided else self.interval, last=self.looks)
        return Request(asked, period, self.statistic, around=self.around)

    def choose(self, table: LevelTable, statistics: Statistics) -> dict[str, Level]:
        if self.factor:
            limit = table.dense_bytes / self.factor - table.other_bytes
            return least_error(table, limit) or least_of(table.sent)
        assert statistics.norms is not None
        whole = math.fsum(statistics.norms[name] for name in table.errors) / self.looks
        if not math.isfinite(whole):
            return {}
        return fewest_bytes(table, self.error * whole) or least_of(table.errors)
