"""L-GreCo: the levels of all tensors that send the fewest bytes without losing more than their own levels would.

Tensors differ in what a level costs and in what it loses. Every now and then rank 0 measures both, for a handful of
levels of each tensor, and dynamic programming finds the best choice exactly, up to the rounding of errors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from hvdcomp.errors import SpecError
from hvdcomp.policies.base import Policy
from hvdcomp.policies.decisions import Levels
from hvdcomp.policies.request import Period, Request, Statistic, Statistics
from hvdcomp.policies.schedules import Levelled
from hvdcomp.specs.described import Rule, at_least, between, number
from hvdcomp.specs.levels import Level

PARTS = 10_000
"""Errors are rounded up to the budget's share of one of so many."""

_NO_WAY = np.iinfo(np.int64).max // 2  # bytes of what no choice of levels reaches


def rounded(errors: Sequence[float], budget: float) -> np.ndarray:
    """Errors as whole parts of a budget, rounded up; `PARTS` + 1 for what is beyond it."""
    values = np.asarray(errors, float)
    if budget <= 0:
        return np.where(values > 0, PARTS + 1, 0)
    with np.errstate(over="ignore"):
        return np.minimum(np.ceil(values / budget * PARTS), PARTS + 1).astype(np.int64)


def fewest_bytes(parts: Sequence[np.ndarray], sizes: Sequence[np.ndarray]) -> list[int] | None:
    """The choice of one candidate for each tensor that has the fewest bytes, with at most `PARTS` parts of error.

    D[l][b], the fewest bytes of the first l tensors with at most b parts of error, is the least D[l - 1][b - parts[c]]
    + sizes[c] of all candidates c of tensor l.

    Args:
        parts: by tensor, the error of each candidate as `rounded` gives it.
        sizes: by tensor, the bytes of each candidate.

    Returns:
        The place of each tensor's candidate; None if no choice is within the budget.
    """
    fewest = np.zeros(PARTS + 1, np.int64)
    choices = []
    for own_parts, own_sizes in zip(parts, sizes, strict=True):
        found = np.full(PARTS + 1, _NO_WAY)
        choice = np.zeros(PARTS + 1, np.int16)
        for place, (part, size) in enumerate(zip(own_parts.tolist(), own_sizes.tolist(), strict=True)):
            if part > PARTS:
                continue
            reached = fewest[: PARTS + 1 - part] + size
            better = reached < found[part:]
            np.copyto(found[part:], reached, where=better)
            choice[part:][better] = place
        fewest = found
        choices.append(choice)
    if fewest[PARTS] >= _NO_WAY:
        return None
    left, chosen = PARTS, []
    for choice, own_parts in zip(reversed(choices), reversed(parts), strict=True):
        chosen.append(int(choice[left]))
        left -= int(own_parts[chosen[-1]])
    return chosen[::-1]


@dataclass(frozen=True)
class LGreCoState:
    """The state of `LGreCo`: the level of each tensor by name, None for its own."""

    levels: Mapping[str, Level | None]


@dataclass(frozen=True, kw_only=True)
class LGreCo(Policy[LGreCoState]):
    """L-GreCo (Markov et al. 2022, arXiv:2210.17357): for each tensor the level that sends the fewest bytes in all.

    The error of a level is ||G - C(G)||, of the mean G of the last gradients. The errors of all tensors add up to no
    more than `alpha` times those at the tensors' own levels, which are those of the training's compressor, or of the
    methods that it routes tensors to. No decision sends more bytes than the own levels, unless `alpha` is below 1: then
    it may take more. If no choice is within the budget, each tensor gets the level that loses least. Where a sum of
    gradients is not finite, the levels stay as they are.

    Attributes:
        interval: decide at the end of every `interval` steps.
        last: gradients of so many steps before a decision are looked at; all of them if `interval` is less.
        alpha: the budget, as a share of the error at the own levels.
        least, most: the smallest and the largest level to choose, as factors of a tensor's own.
        levels: how many levels there are to choose from: `least` and `most`, and between them a geometric sequence, of
            which the one nearest to the own level is that. Ranks and bits are rounded; what a method does not have is
            left out.
        statistic: whose gradients are looked at, "local" (rank 0's own) or "aggregated" (the mean over the ranks).
    """

    interval: Annotated[int, at_least(1)] = 100
    last: Annotated[int, at_least(1)] = 10
    alpha: Annotated[float, number(lambda alpha: 0 < alpha <= 1e6, "a number above 0 and at most 1e6")] = 1.0
    least: Annotated[float, number(lambda least: 1e-6 <= least <= 1, "a factor from 1e-6 to 1")] = 0.5
    most: Annotated[float, number(lambda most: 1 <= most <= 1e6, "a factor from 1 to 1e6")] = 2.0
    levels: Annotated[int, between(3, 64)] = 7
    statistic: Annotated[str, Rule(lambda one: one in ("local", "aggregated"), "local or aggregated")] = "local"

    name: ClassVar[str] = "lgreco"
    examples: ClassVar[tuple[str, ...]] = ("lgreco", "lgreco:interval=200,least=0.25,most=4")
    state_type: ClassVar[type] = LGreCoState

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.least == self.most:
            raise SpecError(
                f"{self.name}: least={self.least},most={self.most} is not allowed; there is one level only, so that "
                "nothing is to be chosen. Give least below 1, or most above 1, or leave out the policy"
            )

    @property
    def around(self) -> tuple[float, ...]:
        """The levels to choose from, ascending, as factors of a tensor's own; 1.0 is one of them."""
        step = math.log(self.most / self.least) / (self.levels - 1)
        found = [self.least * math.exp(place * step) for place in range(self.levels)]
        found[0], found[-1] = float(self.least), float(self.most)
        found[min(range(self.levels), key=lambda place: abs(math.log(found[place])))] = 1.0
        return tuple(found)

    def check(self, steps_per_epoch: int | None, compressor: Levelled) -> None:
        super().check(steps_per_epoch, compressor)
        if all(method.level is None for method in compressor.leaves()):
            raise SpecError(
                f"{self.name}: the compressor has no level to set; use one with a level, such as topk:ratio=0.01 or "
                "powersgd:rank=4"
            )

    def initial_state(self, tensors: Sequence[str]) -> LGreCoState:
        return LGreCoState(dict.fromkeys(tensors))

    def request(self, state: LGreCoState) -> Request:
        period = Period(steps=self.interval, last=min(self.last, self.interval))
        return Request(frozenset({Statistic.LEVEL_ERRORS}), period, self.statistic, around=self.around)

    def decision(self, state: LGreCoState) -> Levels:
        return Levels(dict(state.levels))

    def update(self, state: LGreCoState, statistics: Statistics) -> LGreCoState:
        assert statistics.level_errors is not None
        errors, sizes, own = statistics.level_errors, statistics.level_bytes, statistics.own_levels
        if sizes is None or own is None:
            missing = "level_bytes" if sizes is None else "own_levels"
            raise ValueError(f"{self.name} needs {missing} with level_errors, after step {statistics.step}")
        # A tensor without a level, or without a gradient, has no errors, and keeps what it has.
        self.of_tensors({**{name: {} for name in state.levels}, **errors}, state.levels, "level errors")
        for name, found in errors.items():
            if name not in own or own[name] not in found or sizes.get(name, {}).keys() != found.keys():
                raise ValueError(f"{self.name} was given no level_bytes or own_levels to the level errors of {name}")
        if not all(math.isfinite(error) for found in errors.values() for error in found.values()):
            return state
        return LGreCoState({**state.levels, **cheapest(errors, sizes, own, self.alpha)})


def cheapest(
    errors: Mapping[str, Mapping[Level, float]],
    sizes: Mapping[str, Mapping[Level, int]],
    own: Mapping[str, Level],
    alpha: float,
) -> dict[str, Level]:
    """The level of each tensor, as `LGreCo` chooses it.

    Args:
        errors, sizes: by tensor name and level.
        own: the own level of each tensor.
        alpha: the budget, as a share of the error at the own levels.
    """
    budget = alpha * math.fsum(found[own[name]] for name, found in errors.items())
    # The level that loses least comes first, so that of two with as many bytes it is taken.
    candidates = {name: sorted(found, key=found.__getitem__) for name, found in errors.items()}
    parts = [rounded([errors[name][level] for level in levels], budget) for name, levels in candidates.items()]
    bytes_ = [np.array([sizes[name][level] for level in levels]) for name, levels in candidates.items()]
    chosen = fewest_bytes(parts, bytes_)
    if chosen is None:
        found = {name: levels[0] for name, levels in candidates.items()}
    else:
        found = {name: levels[place] for (name, levels), place in zip(candidates.items(), chosen, strict=True)}
    # Rounding up takes from the budget, which the own levels use up to the last bit where alpha is 1.
    if alpha >= 1 and sum(sizes[name][level] for name, level in found.items()) >= sum(
        sizes[name][level] for name, level in own.items() if name in found
    ):
        return {name: own[name] for name in found}
    return found
