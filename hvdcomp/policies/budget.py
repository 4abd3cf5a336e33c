"""A policy that chooses the best compression level (ratio, rank or bits) of each tensor within a budget of bytes, error
or time."""

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
    """The state of `Budget`: the levels and, if there are two limits, the regime.

    Attributes:
        critical: whether the regime was critical at the last decision; None before the first decision, or if there is
            only one limit.
        previous: the norm of the model's accumulated gradient at the last decision; None if it is unknown or not
            finite.
    """

    critical: bool | None = None
    previous: float | None = None

    later: ClassVar[tuple[str, ...]] = ("critical", "previous")


@dataclass(frozen=True, kw_only=True)
class Budget(OptimalLevels[BudgetState]):
    """Chooses the levels of all tensors with the optimization of L-GreCo, within a limit of bytes, error or time.

    L-GreCo (Markov et al. 2022, arXiv:2210.17357) measures the error of a level as ||G - C(G)||, where G is the mean of
    the last gradients. This policy divides the error by the root mean square of the tensor's elements of G, which gives
    ||G - C(G)|| sqrt(n) / ||G|| for n elements. Adam divides gradients by a similar number: the square root of its
    second moment. With `factor`, the policy considers all choices that send at most the uncompressed bytes / `factor`,
    and takes the choice with the smallest error. With `ms`, the policy considers all choices that can be exchanged in
    this time, and takes the choice with the smallest error. The performance model predicts the time from a calibration.
    With `error`, the policy takes the choice that sends the fewest bytes with at most this error. The limit in bytes
    and the unit of the error were developed for hvdcomp and are not from the paper.

    The first decision is made after `last` steps. (With `critical` and an `interval` below twice `last`, it is made
    after `interval` steps.) Before the first decision, all tensors have their own levels. These are the levels of the
    training run's compressor, or of the methods to which this compressor routes tensors. The policy chooses from levels
    around the own levels. If no choice is within the limit, all tensors get the levels that come closest to the limit.

    With `critical` there are two limits. At each decision, Accordion's rule (Agarwal et al. 2021, arXiv:2010.16248)
    decides whether the regime of the whole model is critical. In critical regimes, `critical` replaces the other limit.

    Attributes:
        factor: smallest compression factor of the whole model in a step, that is, the uncompressed bytes divided by the
            bytes that a rank sends.
        error: the limit on the relative error. The relative error is the sum of the tensors' errors, divided by the sum
            of their norms ||G|| in the unit of the errors. This quotient is the mean of ||G - C(G)|| / ||G||, weighted
            by sqrt(n).
        ms: largest number of milliseconds by which the exchange may lengthen a step. Encoding, exchange and decoding
            count, except for the parts that overlap with the backward pass. Pass exactly one of `factor`, `error` and
            `ms`.
        critical: the limit in critical regimes; 0 for a single limit. The critical limit must lead to less compression:
            a smaller factor, a smaller error, or more milliseconds.
        eta: used with `critical`. A regime is critical if the norm changes by at least this share between two
            decisions.
        calibration: used with `ms`. A calibration file, or the name of a preset of `hvdcomp.perfmodel`. Only rank 0
            reads it.
        model: the model in the calibration; empty for the model whose tensors have the same shapes as in this training
            run.
        batch: the batch size of one rank; 0 for the batch size of the calibration.
        interval, last, least, most, levels, statistic: settings that `OptimalLevels` describes.

    Example:
        >>> str(Budget(factor=50))
        'budget:factor=50'
    """

    factor: Annotated[float, number(lambda factor: factor == 0 or 1 < factor <= 1e12, "above 1 and at most 1e12")] = 0.0
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
                f"{self.name}: give exactly one of three settings: factor (uncompressed bytes / sent bytes, such as "
                "factor=50), error (the share of norms that may be lost, such as error=0.5) or ms (the milliseconds "
                "that the exchange of a step may take, such as ms=20, with calibration=FILE). You gave "
                f"{' and '.join(given) or 'none'}"
            )
        if self.ms and not self.calibration:
            raise SpecError(
                f"{self.name}: ms={self.ms} needs calibration=FILE, the name of a preset or of a file from `hvdcomp "
                "calibrate`, because the policy must know how long an exchange takes"
            )
        if (of_ms := self._given("calibration", "model", "batch")) and not self.ms:
            raise SpecError(
                f"{self.name}: {' and '.join(of_ms)} can be used only with ms, not with {given[0]}; leave "
                f"{' and '.join(of_ms)} out"
            )
        if self.critical:
            allows_more = self.critical > self.ms if self.ms else self.critical < self._limit
            bound = f"more than {given[0]}" if self.ms else f"less than {given[0]}"
            bound += " and more than 1" if self.factor else ""
            in_range = self.critical > 1 or not self.factor
            self.require(
                allows_more and in_range, "critical", f"{bound}, because critical regimes must be allowed to send more"
            )
        elif self.eta != Budget.eta:
            raise SpecError(
                f"{self.name}: eta={self.eta} is used only with critical (the limit in critical regimes); give both, "
                "or leave out eta"
            )

    @property
    def _limit(self) -> float:
        return self.factor or self.error or self.ms

    def _given(self, *settings: str) -> list[str]:
        return [f"{name}={value}" for name in settings if (value := getattr(self, name))]

    def require_reachable(self, seconds: Mapping[int, float]) -> None:
        """Raises ConfigurationError if the exchange takes longer than `ms` at all levels.

        Args:
            seconds: the predicted seconds of a step's exchange, by the bytes that a rank sends
                (`Statistics.exchange_seconds`).
        """
        fastest = min(seconds, key=seconds.__getitem__)
        reached = 1000 * seconds[fastest]
        if reached > self.ms:
            raise ConfigurationError(
                f"{self} cannot be reached: according to {self.calibration}, the fastest exchange that the policy can "
                f"choose takes {reached:.4g} ms per step, with {fastest:,} bytes from each rank. Give a larger ms, "
                "give a compressor that sends less, or set least, the smallest factor of the compressors' own levels, "
                f"below {self.least:g}"
            )

    def request(self, state: BudgetState) -> Request:
        undecided = all(level is None for level in state.levels.values())
        limits = {
            Statistic.EXCHANGE_SECONDS: self.ms,
            Statistic.MODEL_NORM: self.critical,
            Statistic.LEARNING_RATES: self.critical,
        }
        limited = [statistic for statistic, limit in limits.items() if limit]
        statistics = frozenset({Statistic.LEVEL_TABLE, *limited})
        # The norms of two decisions can only be compared if both cover the same number of steps.
        early = undecided and (not self.critical or self.interval >= 2 * self.looks)
        period = Period(steps=self.looks if early else self.interval, last=self.looks)
        return Request(statistics, period, self.statistic, around=self.around, scaled=True)

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
        assert table.norm is not None
        return fewest_bytes(table, limit * table.norm) or least_of(table.errors)

    def _bytes_in(self, ms: float, statistics: Statistics) -> float:
        assert statistics.exchange_seconds is not None
        return bytes_within(statistics.exchange_seconds, ms / 1000)


def bytes_within(seconds: Mapping[int, float], limit: float) -> float:
    """The largest number of bytes whose exchange stays within a time limit, by linear interpolation.

    Sending more bytes may take less time than sending fewer bytes, because less must then be encoded.

    Args:
        seconds: the predicted seconds of a step's exchange, by the bytes that a rank sends.
        limit: largest time of the exchange, in seconds.

    Returns:
        The number of bytes; infinite if even the largest number in `seconds` is within the limit, and 0 if none is.
    """
    known = sorted(seconds.items())
    if known[-1][1] <= limit:
        return math.inf
    for (fewer, less), (more, longer) in reversed(list(pairwise(known))):
        if less <= limit:
            return fewer + (more - fewer) * (limit - less) / (longer - less)
    return 0.0
