"""Questions about the largest magnitudes of a vector, wherever it is.

The threshold sparsifiers ask how many elements reach a threshold, and at last for the indices of k of them. No answer
makes an accelerator wait, and all shapes follow from sizes known before: counts and thresholds are scalar arrays.
"""

from __future__ import annotations

import math
from functools import cached_property
from types import ModuleType
from typing import Any

from hvdcomp.arrays import numpy_arrays
from hvdcomp.arrays.types import Array, wide_dtype

_SAMPLE_STRIDE = 97  # about one element in a hundred; a prime, so as not to fall in step with rows and channels
_SMALLEST_SAMPLE = 1024


def sample_stride(size: int) -> int:
    """Distance between the elements of the sample of a vector: a 1 % sample, but no less than about 1024 elements."""
    return min(_SAMPLE_STRIDE, size // _SMALLEST_SAMPLE | 1)


def elements_of_sample(ratio: float, size: int) -> int:
    """How many elements a share of a sample is: max(1, ceil(ratio size))."""
    return max(1, math.ceil(ratio * size))


class Magnitudes:
    """The magnitudes |x| of a vector.

    Args:
        xp: the array functions of the vector.
        x: of at least one element.

    Attributes:
        xp: the array functions of thresholds and counts.
    """

    def __init__(self, xp: ModuleType, x: Array) -> None:
        values = abs(xp.astype(x, wide_dtype(xp.dtype_name(x))))
        self._place = xp.from_numpy
        self._like = x
        if not xp.waits(x):  # where NumPy is quicker, and all frameworks' choices are the same
            xp, values = numpy_arrays, xp.to_numpy(values)
        self.xp, self._values = xp, values
        self._index = "int32" if x.shape[0] < 2**31 else "int64"

    @cached_property
    def mean(self) -> Any:
        """Mean magnitude."""
        return (self._values / self._values.shape[0]).sum()  # divided first: the sum may overflow

    @cached_property
    def largest(self) -> Any:
        """Largest magnitude."""
        return self._values.max()

    def sample_threshold(self, ratio: float) -> Any:
        """The magnitude that a share `ratio` of the sample reaches."""
        sample = self._values[:: sample_stride(self._values.shape[0])]
        places = self.xp.top(sample, elements_of_sample(ratio, sample.shape[0]))
        return self.xp.sort(self.xp.take(sample, places))[0]

    def count(self, threshold: Any) -> Any:
        """Number of elements with |x| >= threshold."""
        return self.xp.count_nonzero(self._values >= self._rounded(threshold))

    def mean_excess(self, threshold: Any) -> Any:
        """Mean of |x| - threshold over the elements with |x| >= threshold; 0 if there are none."""
        excess = self._values - threshold
        return (excess.clip(0, math.inf) / self.xp.count_nonzero(excess >= 0).clip(1)).sum()

    def pick(self, low: Any, high: Any, k: int, limit: int) -> Array:
        """Indices (k,) of the k largest among the first `limit` of the elements that matter.

        In front, in index order, come the elements with |x| >= high, then, again in index order, those with
        low <= |x| < high, or NaN. There must be `limit` of them; low = 0 is always enough.
        """
        front = self._values >= self._rounded(high)
        chosen = self.xp.first_places(front, ~(front | (self._values < self._rounded(low))), limit)
        if limit > k:
            chosen = self.xp.take(chosen, self.xp.top(self.xp.take(self._values, chosen), k))
        return self._placed(chosen)

    def top(self, k: int) -> Array:
        """Indices (k,), int32 where they fit, of the k largest elements; NaN counts as largest.

        Which of several equal elements is taken is left open; exactly k are.
        """
        return self._placed(self.xp.top(self._values, k))

    def _rounded(self, threshold: Any) -> Any:
        """A threshold in the vector's element type: NumPy takes several times as long to compare with a wider one."""
        return self.xp.astype(threshold, self.xp.dtype_name(self._values))

    def _placed(self, indices: Array) -> Array:
        indices = self.xp.astype(indices, self._index)
        return self._place(indices, like=self._like) if self.xp is numpy_arrays else indices
