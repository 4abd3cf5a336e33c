"""A budget: the levels of all tensors that lose least among those that send as much as may be sent."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, ClassVar

from hvdcomp.errors import ConfigurationError, SpecError
from hvdcomp.policies.accordion import Eta, finite, is_critical
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
from hvdcomp.specs.described import at_least, number
from hvdcomp.specs.levels import Level


@dataclass(frozen=True)
class BudgetState(TensorLevels):
    """The state of `Budget`: levels and, where it has two limits, the regime.

    Attributes:
        critical: whether the regime was critical at the last decision; None before the first, and with one limit.
        previous: norm of the model's accumulated gradient then; None if there is none to compare with.
    """

    critical: bool | None = None
    previous: float | None = None

    later: ClassVar[tuple[str, ...]] = ("critical", "previous")


@dataclass(frozen=True, kw_only=True)
class Budget(OptimalLevels[BudgetState]):
    """Spends what the user can afford on the tensors where it counts: L-GreCo's programme with a limit of the user's.

    With `factor` the levels are those that lose least of all that send no more than the uncompressed bytes / `factor`;
    with `ms` of all that send no more than can be exchanged in that time, by the performance model and a calibration.
    With `error` they are those that send least of all that lose no more than that share. What a level loses is
    ||G - C(G)||, of the mean G of the last gradients, as in L-GreCo (Markov et al. 2022, arXiv:2210.17357); the limit
    in bytes is not published.

    Until the first decision, after `last` steps, all tensors have their own levels: those of the training's compressor,
    or of the methods that it routes tensors to. They also say around which levels to look. If no choice is within the
    limit, all tensors get what comes nearest to it.

    With `critical` there are two limits, and Accordion's rule (Agarwal et al. 2021, arXiv:2010.16248), applied to the
    whole model, chooses at each decision: it is in critical regimes that `critical` counts in place of the other.

    Attributes:
        factor: uncompressed bytes / sent bytes of a rank in a step, of the whole model.
        error: share of the norms that may be lost: the sum of ||G - C(G)|| over the sum of ||G||.
        ms: milliseconds by which the exchange may make a step longer: encoding, exchanging and decoding, as far as the
            backward pass does not hide them. One of the three.
        critical: the same limit while the regime is critical, one that allows more: a smaller factor or error, or more
            milliseconds; 0 for the same as ever.
        eta: for `critical`, the relative change of the norm from one decision to the next from which on a regime is
            critical.
        calibration: for `ms`, a file or a preset of `hvdcomp.perfmodel`. Rank 0 alone reads it.
        model: of the calibration; empty for the one whose tensors have the training's shapes.
        batch: batch size of one rank, if it is not the calibration's; 0 if it is.
        interval, last, least, most, levels, statistic: as of `OptimalLevels`.
    """

    factor: Annotated[float, number(lambda it: it == 0 or 1 < it <= 1e12, "above 1 and at most 1e12")] = 0.0
    error: Annotated[float, number(lambda error: 0 <= error < 1, "above 0 and below 1")] = 0.0
    ms: Annotated[float, number(lambda ms: 0 <= ms <= 1e9, "above 0 and at most 1e9")] = 0.0
    critical: Annotated[float, number(lambda limit: limit >= 0, "a limit above 0")] = 0.0
    eta: Eta = 0.5
    calibration: str = ""
    model: str = ""
    batch: Annotated[int, at_least(0)] = 0
    least: Least = 0.1
    most: Most = 10.0
    levels: Count = 13

    name: ClassVar[str] = "budget"
    examples: ClassVar[tuple[str, ...]] = (
        "budget:factor=50",
        "budget:error=0.5,interval=200",
        "budget:ms=20,calibration=calibration.json",
        "budget:factor=100,critical=20",
    )
    state_type: ClassVar[type] = BudgetState

    def __post_init__(self) -> None:
        super().__post_init__()
        given = self._given("factor", "error", "ms")
        if len(given) != 1:
            raise SpecError(
                f"{self.name}: give factor (uncompressed bytes / sent bytes, such as factor=50), error (the share of "
                "norms that may be lost, such as error=0.5) or ms (milliseconds that the exchange of a step may take, "
                f"such as ms=20, with calibration=FILE), one of the three; given is {' and '.join(given) or 'none'}"
            )
        if self.ms and not self.calibration:
            raise SpecError(
                f"{self.name}: ms={self.ms} needs calibration=FILE, which `hvdcomp calibrate` writes, or the name of a "
                "preset: it says how long an exchange takes"
            )
        if (of_ms := self._given("calibration", "model", "batch")) and not self.ms:
            raise SpecError(f"{self.name}: {' and '.join(of_ms)} is for ms; leave it out with {given[0]}")
        if self.critical:
            allows_more = self.critical > self.ms if self.ms else self.critical < self._limit
            what = f"more than {given[0]}" if self.ms else f"less than {given[0]}"
            what += " and more than 1" if self.factor else ""
            in_range = self.critical > 1 or not self.factor
            self.require(allows_more and in_range, "critical", f"{what}, so that more may be sent")
        elif self.eta != Budget.eta:
            raise SpecError(f"{self.name}: eta={self.eta} is for critical (the limit in critical regimes); give both")

    @property
    def _limit(self) -> float:
        return self.factor or self.error or self.ms

    def _given(self, *settings: str) -> list[str]:
        return [f"{name}={value}" for name in settings if (value := getattr(self, name))]

    def require_reachable(self, seconds: Mapping[int, float]) -> None:
        """Raises ConfigurationError if the exchange takes longer than `ms` at all levels.

        Args:
            seconds: as `Statistics.exchange_seconds`.
        """
        fastest = min(seconds, key=seconds.__getitem__)
        reached = 1000 * seconds[fastest]
        if reached > self.ms:
            raise ConfigurationError(
                f"{self} is out of reach: by {self.calibration} the fastest exchange that there is to choose takes "
                f"{reached:.4g} ms of a step, with {fastest:,} bytes from each rank. Give a larger ms, a smaller least "
                f"than {self.least:g} (times the own levels), or a compressor that sends less"
            )

    def request(self, state: BudgetState) -> Request:
        undecided = all(level is None for level in state.levels.values())
        beside = {
            Statistic.NORMS: self.error,
            Statistic.EXCHANGE_SECONDS: self.ms,
            Statistic.MODEL_NORM: self.critical,
            Statistic.LEARNING_RATES: self.critical,
        }
        asked = frozenset({Statistic.LEVEL_TABLE, *(each for each, limit in beside.items() if limit)})
        period = Period(steps=self.looks if undecided else self.interval, last=self.looks)
        return Request(asked, period, self.statistic, around=self.around)

    def update(self, state: BudgetState, statistics: Statistics) -> BudgetState:
        if self.critical:
            norm, rates = statistics.model_norm, statistics.learning_rates
            assert norm is not None
            assert rates is not None
            critical = is_critical(state.previous, norm, self.eta) or rates.fall
            state = dataclasses.replace(state, critical=critical, previous=finite(norm))
        return super().update(state, statistics)

    def choose(self, table: LevelTable, statistics: Statistics, state: BudgetState) -> dict[str, Level]:
        limit = self.critical if state.critical else self._limit
        if not self.error:
            allowed = table.dense_bytes / limit if self.factor else self._bytes_in(limit, statistics)
            return least_error(table, allowed - table.other_bytes) or least_of(table.sent)
        assert statistics.norms is not None
        whole = math.fsum(statistics.norms[name] for name in table.errors) / self.looks
        if not math.isfinite(whole):
            return {}
        return fewest_bytes(table, limit * whole) or least_of(table.errors)

    def _bytes_in(self, ms: float, statistics: Statistics) -> float:
        assert statistics.exchange_seconds is not None
        return bytes_within(statistics.exchange_seconds, ms / 1000)


def bytes_within(seconds: Mapping[int, float], limit: float) -> float:
    """The most bytes that take no longer than a limit, where the time of some numbers of bytes is known.

    Between these the time is interpolated. It may fall with more bytes, where less is to be encoded.

    Args:
        seconds: by bytes.

    Returns:
        Infinite if even the most bytes that are known take no longer; 0 if all take longer.
    """
    known = sorted(seconds.items())
    if known[-1][1] <= limit:
        return math.inf
    for (fewer, less), (more, longer) in reversed(list(pairwise(known))):
        if less <= limit:
            return fewer + (more - fewer) * (limit - less) / (longer - less)
    return 0.0
