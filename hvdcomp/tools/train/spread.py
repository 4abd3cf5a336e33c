"""Means over seeds, with their confidence intervals."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# The 0.975 quantiles of Student's t distribution for 1 to 29 degrees of freedom, from the NIST/SEMATECH e-Handbook of
# Statistical Methods, section 1.3.6.7.2.
_T_QUANTILES = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045,
)  # fmt: skip


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds, and half the width of its 95% confidence interval (None for a single value)."""

    mean: float
    half: float | None


def estimate(values: Sequence[float]) -> Estimate | None:
    """The mean of some values, with its confidence interval from Student's t distribution; None if there are no values.

    For more than 30 values, the quantile for 30 values is used, so the interval is a little too wide.
    """
    if not values:
        return None
    if len(values) == 1:
        return Estimate(values[0], None)
    t = _t_quantile(len(values))
    return Estimate(statistics.fmean(values), t * statistics.stdev(values) / math.sqrt(len(values)))


def seeds_needed(half: float, seeds: int, wanted: float) -> int:
    """The number of seeds with which half the width of the 95 % confidence interval is expected to be at most `wanted`.

    Args:
        half: half the width of the interval with `seeds` seeds.
        seeds: number of seeds, at least 2.
        wanted: a positive number, in the unit of `half`.

    Example:
        >>> seeds_needed(half=2.0, seeds=5, wanted=1.0)
        13
    """
    deviation = half * math.sqrt(seeds) / _t_quantile(seeds)
    return next(
        number for number in itertools.count(2) if _t_quantile(number) * deviation <= wanted * math.sqrt(number)
    )


def _t_quantile(number: int) -> float:
    """The quantile for the confidence interval of the mean of a number of values."""
    return _T_QUANTILES[min(number - 1, len(_T_QUANTILES)) - 1]
