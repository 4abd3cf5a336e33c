"""Selects the largest magnitudes of a vector, and computes their statistics, on any device.

Threshold sparsifiers count the elements that reach a threshold. At the end they choose k elements, as indices. No
function makes the host wait for an accelerator: counts and thresholds are scalar arrays, and all shapes follow from
known sizes. On the host, shapes may depend on the values. So one pass copies the largest elements to a small array.
Functions that need only the largest elements then read this small array.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from hvdcomp.arrays import arrays_for, numpy_arrays
from hvdcomp.arrays.types import Array, ArrayFunctions, wide_dtype

_SAMPLE_STRIDE = 97  # samples about 1 %; it is a prime, so that the sample does not repeat with rows or channels
_SMALLEST_SAMPLE = 1024
_PIECE = 1 << 16  # number of elements; intermediate results of this size fit in a core's cache


def sample_stride(size: int) -> int:
    """The distance between the sampled elements of a vector. The sample has 1 % of the elements, but at least about
    1024."""
    return min(_SAMPLE_STRIDE, size // _SMALLEST_SAMPLE | 1)


def elements_of_sample(ratio: float, size: int) -> int:
    """How many of the `size` elements of a sample correspond to the fraction `ratio`: max(1, ceil(ratio * size))."""
    return max(1, math.ceil(ratio * size))


class Magnitudes:
    """The magnitudes |x| of a vector.

    Args:
        xp: the array functions for the framework of the vector.
        x: a vector of at least one element.
        need: the largest number k with which `top` will be called.

    Attributes:
        xp: the array functions of thresholds and counts.
    """

    def __init__(self, xp: ArrayFunctions, x: Array, need: int) -> None:
        values = abs(xp.astype(x, wide_dtype(xp.dtype_name(x))))
        self._place = xp.from_numpy
        self._like = x
        self._set_aside: _LargestElements | None = None
        if not xp.waits(x):  # NumPy is faster, and then all frameworks choose the same elements
            xp, values = numpy_arrays, arrays_for(values).to_numpy(values)
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
        """The threshold that the fraction `ratio` of the sampled elements reaches or exceeds."""
        sample = self._values[:: sample_stride(self._values.shape[0])]
        places = self.xp.top(sample, elements_of_sample(ratio, sample.shape[0]))
        return self.xp.sort(self.xp.take(sample, places))[0]

    def count(self, threshold: Any) -> Any:
        """Number of elements with |x| >= threshold."""
        threshold = self._rounded(threshold)
        return self.xp.count_nonzero(self._above(threshold)[0] >= threshold)

    def mean_excess(self, threshold: Any) -> Any:
        """The mean of |x| - threshold over the elements with |x| >= threshold; 0 if there are no such elements."""
        return self._mean(self._above(threshold)[0], self._rounded(self.count(threshold).clip(1)), threshold)

    def _mean(self, values: Array, count: Any, threshold: Any) -> Any:
        threshold = self._rounded(threshold)
        piece = _PIECE if self.xp is numpy_arrays else values.shape[0]

        def of(values: Array) -> Any:
            # each term is divided before the addition, because the undivided sum might overflow
            return ((values - threshold).clip(0, math.inf) / count).sum()

        return sum(of(values[start : start + piece]) for start in range(0, values.shape[0], piece))

    def pick(self, low: Any, high: Any, k: int, limit: int) -> Array:
        """The indices (k,) of the k largest among `limit` elements.

        The `limit` elements are first the elements with |x| >= high, and then elements with low <= |x| < high or NaN,
        both in index order. At least `limit` elements must meet one of these conditions. If `low` is 0, every element
        meets one of the conditions.
        """
        low, high = self._rounded(low), self._rounded(high)
        if self.xp is numpy_arrays and self.count(high) >= k:
            low = high  # no elements below `high` are needed
        values, places = self._above(low)
        chosen = self.xp.first_places(values, low, high, limit)
        if chosen.shape[0] > k:
            chosen = self.xp.take(chosen, self.xp.top(self.xp.take(values, chosen), k))
        return self._placed(chosen, places)

    def top(self, k: int) -> Array:
        """The indices (k,) of the k largest elements, with k <= `need`. NaN counts as largest. The indices are int32
        unless the vector is too long for int32.

        Which of several equal elements are chosen is not specified.
        """
        set_aside = self._set_aside
        if set_aside is None:
            return self._placed(self.xp.top(self._values, k))
        return self._placed(self.xp.top(set_aside.values, k), set_aside.places)

    def _above(self, threshold: Any) -> tuple[Array, Array | None]:
        """Returns magnitudes and their indices. All magnitudes that reach a threshold are among them; smaller
        magnitudes may be among them as well. If all magnitudes are returned, the indices are None."""
        set_aside = self._set_aside
        if set_aside is None or not threshold > set_aside.level:
            return self._values, None
        return set_aside.values, set_aside.places

    def _rounded(self, number: Any) -> Any:
        """Converts a number to the element type of the vector, because NumPy is several times slower with a wider
        type."""
        return number if type(number) is float else self.xp.astype(number, self.xp.dtype_name(self._values))

    def _placed(self, indices: Array, places: Array | None = None) -> Array:
        indices = self.xp.astype(indices if places is None else self.xp.take(places, indices), self._index)
        return self._place(np.asarray(indices), like=self._like) if self.xp is numpy_arrays else indices


class _LargestElements(NamedTuple):
    """The largest elements of a vector on the host, in index order: all elements above a level, and some that equal the
    level."""

    level: float
    places: np.ndarray
    values: np.ndarray


def _largest(values: np.ndarray, need: int) -> _LargestElements | None:
    """Copies the largest elements, at least `need` of them, to a separate array. The level that an element must exceed
    is estimated from a sample. Returns None if too few elements are found, or if so many are expected that a separate
    array does not help."""
    sample = values[:: sample_stride(values.shape[0])]
    expected = need / values.shape[0] * len(sample)
    rank = math.ceil(1.5 * expected + 4 * math.sqrt(expected) + 4)
    if 3 * rank > len(sample):
        return None
    level = np.partition(sample, len(sample) - rank)[len(sample) - rank]
    places = np.flatnonzero(~(values <= level))  # includes NaN
    if len(places) < need:  # this happens, for example, if most elements are zero
        places = np.sort(np.concatenate([places, np.flatnonzero(values == level)[: need - len(places)]]))
    return _LargestElements(level, places, values[places]) if len(places) >= need else None
