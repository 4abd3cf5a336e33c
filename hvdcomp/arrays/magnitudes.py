"""Statistics and selection of the largest magnitudes of a vector, on any device.

Threshold sparsifiers count the elements that reach a threshold, and finally choose the indices of k of them. No
function makes the host wait for an accelerator, and all shapes follow from known sizes: counts and thresholds are
scalar arrays. On the host, where shapes may depend on elements, one pass sets the largest elements aside, and functions
that concern no other elements use only these.
"""

from __future__ import annotations

import math
from functools import cached_property
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from hvdcomp.arrays import numpy_arrays
from hvdcomp.arrays.types import Array, wide_dtype

_SAMPLE_STRIDE = 97  # samples about 1 %; a prime, to avoid the periods of rows and channels
_SMALLEST_SAMPLE = 1024
_PIECE = 1 << 16  # elements; intermediate results stay in a core's cache


def sample_stride(size: int) -> int:
    """Distance between the sampled elements of a vector. The sample has 1 % of the elements, but at least about
    1024."""
    return min(_SAMPLE_STRIDE, size // _SMALLEST_SAMPLE | 1)


def elements_of_sample(ratio: float, size: int) -> int:
    """Number of elements in the share `ratio` of a sample of `size` elements: max(1, ceil(ratio * size))."""
    return max(1, math.ceil(ratio * size))


class Magnitudes:
    """The magnitudes |x| of a vector.

    Args:
        xp: the array functions of the vector.
        x: a vector of at least one element.
        need: the number of largest elements that `top` may be asked for.

    Attributes:
        xp: the array functions of thresholds and counts.
    """

    def __init__(self, xp: ModuleType, x: Array, need: int) -> None:
        values = abs(xp.astype(x, wide_dtype(xp.dtype_name(x))))
        self._place = xp.from_numpy
        self._like = x
        self._set_aside: _LargestElements | None = None
        if not xp.waits(x):  # NumPy is faster, and the choice is the same for all frameworks
            xp, values = numpy_arrays, xp.to_numpy(values)
            self._set_aside = _largest(values, min(need, values.shape[0]))
        self.xp, self._values = xp, values
        self._index = "int32" if x.shape[0] < 2**31 else "int64"

    @cached_property
    def mean(self) -> Any:
        """Mean magnitude."""
        return self._mean(self._values, self._values.shape[0], 0.0)

    @cached_property
    def largest(self) -> Any:
        """Largest magnitude."""
        return self._values.max()

    def sample_threshold(self, ratio: float) -> Any:
        """The threshold that a share `ratio` of the sampled elements reaches or exceeds."""
        sample = self._values[:: sample_stride(self._values.shape[0])]
        places = self.xp.top(sample, elements_of_sample(ratio, sample.shape[0]))
        return self.xp.sort(self.xp.take(sample, places))[0]

    def count(self, threshold: Any) -> Any:
        """Number of elements with |x| >= threshold."""
        threshold = self._rounded(threshold)
        return self.xp.count_nonzero(self._above(threshold)[0] >= threshold)

    def mean_excess(self, threshold: Any) -> Any:
        """Mean of |x| - threshold over the elements with |x| >= threshold; 0 if there are none."""
        return self._mean(self._above(threshold)[0], self._rounded(self.count(threshold).clip(1)), threshold)

    def _mean(self, values: Array, count: Any, threshold: Any) -> Any:
        threshold = self._rounded(threshold)
        piece = _PIECE if self.xp is numpy_arrays else values.shape[0]

        def of(values: Array) -> Any:
            return ((values - threshold).clip(0, math.inf) / count).sum()  # divided first: the sum may overflow

        return sum(of(values[start : start + piece]) for start in range(0, values.shape[0], piece))

    def pick(self, low: Any, high: Any, k: int, limit: int) -> Array:
        """Indices (k,) of the k largest among `limit` elements.

        The `limit` elements are, in index order, first the elements with |x| >= high, and then the elements with low <=
        |x| < high or NaN. At least `limit` elements must meet these conditions; with low = 0, all elements do.
        """
        low, high = self._rounded(low), self._rounded(high)
        if self.xp is numpy_arrays and self.count(high) >= k:
            low = high  # no elements below are needed
        values, places = self._above(low)
        chosen = self.xp.first_places(values, low, high, limit)
        if chosen.shape[0] > k:
            chosen = self.xp.take(chosen, self.xp.top(self.xp.take(values, chosen), k))
        return self._placed(chosen, places)

    def top(self, k: int) -> Array:
        """Indices (k,) of the k largest elements, k <= `need`. NaN counts as largest. The indices are int32 if the
        vector is not too long for them.

        The choice among equal elements is not specified.
        """
        set_aside = self._set_aside
        if set_aside is None:
            return self._placed(self.xp.top(self._values, k))
        return self._placed(self.xp.top(set_aside.values, k), set_aside.places)

    def _above(self, threshold: Any) -> tuple[Array, Array | None]:
        """Magnitudes that include all that reach a threshold, and their indices (None if these are all)."""
        set_aside = self._set_aside
        if set_aside is None or not threshold > set_aside.level:
            return self._values, None
        return set_aside.values, set_aside.places

    def _rounded(self, number: Any) -> Any:
        """A number in the vector's element type, as NumPy is several times slower with a wider one."""
        return number if type(number) is float else self.xp.astype(number, self.xp.dtype_name(self._values))

    def _placed(self, indices: Array, places: Array | None = None) -> Array:
        indices = self.xp.astype(indices if places is None else self.xp.take(places, indices), self._index)
        return self._place(indices, like=self._like) if self.xp is numpy_arrays else indices


class _LargestElements(NamedTuple):
    """The largest elements of a vector on the host, in index order: all above a level, and some that equal it."""

    level: float
    places: np.ndarray
    values: np.ndarray


def _largest(values: np.ndarray, need: int) -> _LargestElements | None:
    """At least the `need` largest elements, above a level from the sample; None if they are not few, or too few."""
    sample = values[:: sample_stride(values.shape[0])]
    expected = need / values.shape[0] * len(sample)
    rank = math.ceil(1.5 * expected + 4 * math.sqrt(expected) + 4)
    if 3 * rank > len(sample):
        return None
    level = np.partition(sample, len(sample) - rank)[len(sample) - rank]
    places = np.flatnonzero(~(values <= level))  # includes NaN
    if len(places) < need:  # for example if most elements are zero
        places = np.sort(np.concatenate([places, np.flatnonzero(values == level)[: need - len(places)]]))
    return _LargestElements(level, places, values[places]) if len(places) >= need else None
