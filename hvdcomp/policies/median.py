"""Statistics that are robust against outliers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median


def median_with_error(values: Sequence[float]) -> tuple[float, float]:
    """The median and its standard error. The error is estimated from the median absolute deviation, as for a normal
    distribution.

    Args:
        values: the values, at least one. The standard error of a single value is 0.
    """
    middle = median(values)
    spread = 1.4826 * median(abs(value - middle) for value in values)
    return middle, 1.2533 * spread / math.sqrt(len(values))
