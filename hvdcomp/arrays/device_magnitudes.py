"""Questions about the largest magnitudes of a vector, answered on the device of the vector.

No answer makes the host wait, and all shapes follow from sizes known before: counts and thresholds stay on the device
as scalar arrays, and a search runs all its rounds. The docstrings of `magnitudes` hold for the methods of the same
name.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from types import ModuleType
from typing import Any

from hvdcomp.arrays.magnitudes import elements_of_sample, sample_stride
from hvdcomp.arrays.types import Array


class DeviceMagnitudes:
    """The magnitudes |x| of a vector on any device.

    Args:
        xp: the array functions for `x`.
        x: vector of at least one element, float32 or float64.
        count_nonzero: how many elements of an array of truth values are true, as a scalar array.
        largest: indices (k,) of the k largest of a vector without negative numbers, given the vector and k.
        where: as `xp.where`, for scalars that may be Python numbers; they get the type of `x`.
        counter: the element type, wide enough for the number of elements, in which the device makes running sums.
    """

    def __init__(
        self,
        xp: ModuleType,
        x: Array,
        count_nonzero: Callable[[Array], Array],
        largest: Callable[[Array, int], Array],
        where: Callable[[Any, Any, Any], Array],
        counter: str,
    ) -> None:
        self._xp = xp
        self._values = abs(x)
        self._count_nonzero = count_nonzero
        self._largest = largest
        self.where = where
        self._counter = counter
        self._index_type = "int32" if x.shape[0] < 2**31 else "int64"

    @cached_property
    def mean(self) -> Any:
        return self._sum(self._values) / self._values.shape[0]

    @cached_property
    def largest(self) -> Any:
        return self._xp.largest_magnitude(self._values)[0]

    def sample_threshold(self, ratio: float) -> Any:
        sample = self._values[:: sample_stride(self._values.shape[0])]
        chosen = self._largest(sample, elements_of_sample(ratio, sample.shape[0]))
        return self._xp.sort(self._xp.take(sample, chosen))[0]

    def count(self, threshold: Any) -> Any:
        return self._count_nonzero(self._values >= threshold)

    def mean_excess(self, threshold: Any) -> Any:
        excess = self._xp.clip(self._values - threshold, 0.0, float("inf"))
        count = self._xp.astype(self.count(threshold), self._xp.dtype_name(excess))
        return self._sum(excess) / self.where(count > 0, count, 1)

    def settled(self, condition: Any) -> bool:
        return False

    def pick(self, low: Any, high: Any, k: int, limit: int) -> Array:
        # Element j of a mask, counted from 0, is where the running count of its elements first exceeds j. Searching for
        # that needs neither the number of elements on the host nor a scatter.
        xp = self._xp
        front = self._values >= high
        back = ~(front | (self._values < low))
        front_count = xp.cumulative_sum(xp.astype(front, self._counter))
        back_count = xp.cumulative_sum(xp.astype(back, self._counter))
        place = xp.arange(limit, like=front_count)
        in_front, behind = xp.interval_index(front_count, place), xp.interval_index(back_count, place - front_count[-1])
        chosen = xp.astype(xp.where(place < front_count[-1], in_front, behind), self._index_type)
        if limit == k:
            return chosen
        return xp.take(chosen, self._largest(xp.take(self._values, chosen), k))

    def top(self, k: int) -> Array:
        return self._xp.astype(self._largest(self._values, k), self._index_type)

    def _sum(self, values: Array) -> Any:
        return self._xp.row_sums(self._xp.reshape(values, (1, -1)))[0, 0]
