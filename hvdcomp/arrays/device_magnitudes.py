"""Questions about the largest magnitudes of a vector, answered on the device of the vector, in PyTorch.

No answer makes the host wait, and all shapes follow from sizes known before: counts and thresholds stay on the device
as scalar arrays, and a search runs all its rounds. The docstrings of `magnitudes` hold for the methods of the same
name.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch

from hvdcomp.arrays.magnitudes import elements_of_sample, sample_stride
from hvdcomp.arrays.types import Array


class DeviceMagnitudes:
    """The magnitudes |x| of a vector on any device.

    Args:
        x: vector of at least one element, float32 or float64.
    """

    def __init__(self, x: Array) -> None:
        self._values = abs(x)
        self._index_type = torch.int32 if x.shape[0] < 2**31 else torch.int64

    @cached_property
    def mean(self) -> Any:
        return self._values.sum() / self._values.shape[0]

    @cached_property
    def largest(self) -> Any:
        return self._values.amax()

    def sample_threshold(self, ratio: float) -> Any:
        sample = self._values[:: sample_stride(self._values.shape[0])]
        return _largest(sample, elements_of_sample(ratio, sample.shape[0])).values.sort().values[0]

    def count(self, threshold: Any) -> Any:
        return torch.count_nonzero(self._values >= threshold)

    def mean_excess(self, threshold: Any) -> Any:
        excess = (self._values - threshold).clamp(min=0.0)
        return excess.sum() / self.count(threshold).clamp(min=1)

    def where(self, condition: Any, x: Any, y: Any) -> Any:
        return torch.where(condition, x, y)

    def settled(self, condition: Any) -> bool:
        return False

    def pick(self, low: Any, high: Any, k: int, limit: int) -> Array:
        # Element j of a mask, counted from 0, is where the running count of its elements first exceeds j. Searching for
        # that needs neither the number of elements on the host nor a scatter.
        front = self._values >= high
        back = ~(front | (self._values < low))
        front_count = torch.cumsum(front, 0, dtype=self._index_type)
        back_count = torch.cumsum(back, 0, dtype=self._index_type)
        place = torch.arange(limit, dtype=self._index_type, device=front.device)
        behind = place - front_count[-1]
        chosen = torch.where(behind < 0, _first_above(front_count, place), _first_above(back_count, behind))
        if limit > k:
            chosen = chosen[_largest(self._values[chosen], k).indices]
        return chosen.to(self._index_type)

    def top(self, k: int) -> Array:
        return _largest(self._values, k).indices.to(self._index_type)


def _largest(values: Array, k: int) -> Any:
    return torch.topk(values, k, sorted=False)


def _first_above(counts: Array, numbers: Array) -> Array:
    """For each number the index of the first of the ascending counts above it, or else of the last count."""
    return torch.searchsorted(counts, numbers, right=True).clamp_(max=counts.shape[0] - 1)
