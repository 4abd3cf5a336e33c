"""What a policy asks of the steps while it is in one state. Every step asks, so it is worked out once per state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hvdcomp.policies.base import Period, Policy, Statistic

_SUMMED = frozenset({Statistic.NORMS, Statistic.MODEL_NORM, Statistic.MEAN_TO_STD})


@dataclass(frozen=True)
class Wants:
    """What is wanted for the next decision.

    Attributes:
        statistics: by name.
        period: at whose end it is made; None for never.
        sums: whether gradients are to be accumulated.
        survey: whether the policy is to be told what there is to choose from.
        step_times: whether steps are to be timed.
    """

    statistics: frozenset[Statistic]
    period: Period | None
    sums: bool
    survey: bool
    step_times: bool

    @classmethod
    def of(cls, policy: Policy[Any], state: Any) -> Wants:
        """Of a policy in a state."""
        return cls._of(policy.wanted(state), policy.period_in(state))

    @classmethod
    def ever(cls, policy: Policy[Any]) -> Wants:
        """What a policy may want in some state, whatever its period is then."""
        return cls._of(policy.statistics, None)

    @classmethod
    def _of(cls, statistics: frozenset[Statistic], period: Period | None) -> Wants:
        return cls(
            statistics=statistics,
            period=period,
            sums=bool(_SUMMED & statistics),
            survey=Statistic.SURVEY in statistics,
            step_times=Statistic.STEP_TIMES in statistics,
        )
