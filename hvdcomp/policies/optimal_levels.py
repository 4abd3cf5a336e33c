"""Finds the best compression levels (ratios, ranks or bits) of all tensors from measured errors and bytes, with dynamic
programming. The module also has the base class of the policies that choose levels in this way.

In each tensor, the same level sends a different number of bytes and causes a different error. At intervals, rank 0
measures the bytes and the errors of a few levels of each tensor. Dynamic programming then finds the best choice. The
choice is optimal, except that the limited quantity (bytes or error) is rounded.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar

import numpy as np

from hvdcomp.errors import SpecError
from hvdcomp.policies.base import Policy, Source
from hvdcomp.policies.decisions import Levels
from hvdcomp.policies.request import LevelTable, Period, Request, Statistic, Statistics
from hvdcomp.policies.schedules import Levelled
from hvdcomp.specs.described import at_least, between, number
from hvdcomp.specs.levels import Level

PARTS = 10_000
"""The limit is divided into this number of parts, and the limited values are rounded up to whole parts."""

Least = Annotated[float, number(lambda least: 1e-6 <= least <= 1, "a factor from 1e-6 to 1")]
Most = Annotated[float, number(lambda most: 1 <= most <= 1e6, "a factor from 1 to 1e6")]
Count = Annotated[int, between(3, 64)]

_ByLevel = Mapping[str, Mapping[Level, float]]  # a number for each tensor and level, by tensor name and then by level


def in_parts(values: Sequence[float], limit: float) -> np.ndarray:
    """Divides a limit into `PARTS` parts, and expresses each value as a number of parts, rounded up. Values beyond the
    limit become `PARTS` + 1."""
    array = np.asarray(values, float)
    if limit <= 0:
        return np.where(array > 0, PARTS + 1, 0)
    with np.errstate(over="ignore"):
        return np.minimum(np.ceil(array / limit * PARTS), PARTS + 1).astype(np.int64)


def least_cost(parts: Sequence[np.ndarray], costs: Sequence[np.ndarray]) -> list[int] | None:
    """The cheapest choice of one candidate for each tensor, with at most `PARTS` parts in total.

    Let D[l][b] be the smallest cost of the first l tensors with at most b parts. D[l][b] is the minimum of D[l - 1][b -
    parts[c]] + costs[c] over the candidates c of tensor l. Among equal costs, the first candidate is taken.

    Args:
        parts: for each tensor, the error of each candidate level as a whole number of parts, from `in_parts`.
        costs: for each tensor, the cost of each candidate level.

    Returns:
        The index of the chosen candidate for each tensor; None if no choice is within the limit.
    """
    least = np.zeros(PARTS + 1)
    choices = []
    for own_parts, own_costs in zip(parts, costs, strict=True):
        best = np.full(PARTS + 1, math.inf)
        choice = np.zeros(PARTS + 1, np.int16)
        for place, (part, cost) in enumerate(zip(own_parts.tolist(), own_costs.tolist(), strict=True)):
            if part > PARTS:
                continue
            reached = least[: PARTS + 1 - part] + cost
            better = reached < best[part:]
            np.copyto(best[part:], reached, where=better)
            choice[part:][better] = place
        least = best
        choices.append(choice)
    if not math.isfinite(least[PARTS]):
        return None
    left, chosen = PARTS, []
    for choice, own_parts in zip(reversed(choices), reversed(parts), strict=True):
        chosen.append(int(choice[left]))
        left -= int(own_parts[chosen[-1]])
    return chosen[::-1]


@dataclass(frozen=True)
class TensorLevels:
    """The state of a policy of optimal levels: the level of each tensor, by name. None is the level with which the
    compressor was created."""

    levels: Mapping[str, Level | None]


Chosen = TypeVar("Chosen", bound=TensorLevels)


@dataclass(frozen=True, kw_only=True)
class OptimalLevels(Policy[Chosen]):
    """Base class of policies that choose the best levels from measured errors and bytes.

    If a sum of gradients is not finite, levels do not change.

    Attributes:
        interval: number of steps from one decision to the next.
        last: the gradients of this number of steps before a decision are accumulated; at most `interval`.
        least, most: the smallest and the largest level to choose from, as factors of a tensor's own level.
        levels: the number of levels to choose from. The levels are a geometric sequence from `least` to `most`, and the
            own level replaces the factor nearest to 1. Ranks and bits are rounded. Levels that a method does not have
            are omitted.
        statistic: which gradients are accumulated, either "local" (the gradients of rank 0) or "aggregated" (the means
            over the ranks).
    """

    interval: Annotated[int, at_least(1)] = 100
    last: Annotated[int, at_least(1)] = 10
    least: Least
    most: Most
    levels: Count
    statistic: Source = "local"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.least == self.most:
            raise SpecError(
                f"{self.name}: least={self.least},most={self.most} is not allowed, because it leaves only one level to "
                "choose. Give least below 1, or most above 1, or leave out the policy"
            )

    @property
    def looks(self) -> int:
        """The number of steps, directly before a decision, over which gradients are accumulated."""
        return min(self.last, self.interval)

    @property
    def around(self) -> tuple[float, ...]:
        """The levels to choose from, as ascending factors of a tensor's own level. 1.0 is one of them."""
        step = math.log(self.most / self.least) / (self.levels - 1)
        factors = [self.least * math.exp(place * step) for place in range(self.levels)]
        factors[0], factors[-1] = float(self.least), float(self.most)
        factors[min(range(self.levels), key=lambda place: abs(math.log(factors[place])))] = 1.0
        return tuple(factors)

    def check(self, steps_per_epoch: int | None, compressor: Levelled) -> None:
        super().check(steps_per_epoch, compressor)
        if all(method.level is None for method in compressor.leaves()):
            raise SpecError(
                f"{self.name}: the compressor has no level that can be set; use a compressor with a level, such as "
                "topk:ratio=0.01 or powersgd:rank=4"
            )

    def initial_state(self, tensors: Sequence[str]) -> Chosen:
        state: Chosen = self.state_type(dict.fromkeys(tensors))
        return state

    def request(self, state: Chosen) -> Request:
        period = Period(steps=self.interval, last=self.looks)
        return Request(frozenset({Statistic.LEVEL_TABLE}), period, self.statistic, around=self.around)

    def decision(self, state: Chosen) -> Levels:
        return Levels(dict(state.levels))

    def update(self, state: Chosen, statistics: Statistics) -> Chosen:
        table = statistics.level_table
        assert table is not None
        # A tensor without a level or a gradient has no errors, and keeps its level.
        self.of_tensors({**{name: {} for name in state.levels}, **table.errors}, state.levels, "level errors")
        if not all(math.isfinite(error) for errors in table.errors.values() for error in errors.values()):
            return state
        return dataclasses.replace(state, levels={**state.levels, **self.choose(table, statistics, state)})

    def choose(self, table: LevelTable, statistics: Statistics, state: Chosen) -> dict[str, Level]:
        """Chooses the level of each tensor of the table. The errors in the table are finite. The table is also part of
        `statistics`."""
        raise NotImplementedError


def fewest_bytes(table: LevelTable, limit: float) -> dict[str, Level] | None:
    """The levels that send the fewest bytes with a total error of at most `limit`; None if no choice of levels is
    within this limit.

    Among levels with equal bytes, the level with the smaller error is taken.
    """
    return _best(table.errors, table.sent, limit)


def least_error(table: LevelTable, limit: float) -> dict[str, Level] | None:
    """The levels with the smallest total error that send at most `limit` bytes; None if no choice of levels is within
    this limit.

    Args:
        table: the errors and the bytes of the levels of each tensor.
        limit: largest number of bytes that all tensors of the table may send together.
    """
    return _best(table.sent, table.errors, limit)


def least_of(values: _ByLevel) -> dict[str, Level]:
    """For each tensor, the level at which the value in `values` is smallest."""
    return {name: min(levels, key=levels.__getitem__) for name, levels in values.items()}


def _best(limited: _ByLevel, costs: _ByLevel, limit: float) -> dict[str, Level] | None:
    """The levels with the smallest total cost, among all choices of levels whose limited values add up to at most
    `limit`; None if there is no such choice."""
    # Candidates are sorted by the limited value, so that among equal costs the candidate with the smaller value is
    # taken.
    candidates = {name: sorted(values, key=values.__getitem__) for name, values in limited.items()}
    chosen = least_cost(
        [in_parts([limited[name][level] for level in levels], limit) for name, levels in candidates.items()],
        [np.array([costs[name][level] for level in levels], float) for name, levels in candidates.items()],
    )
    if chosen is None:
        return None
    return {name: levels[place] for (name, levels), place in zip(candidates.items(), chosen, strict=True)}
