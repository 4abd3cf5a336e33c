"""Questions about the largest magnitudes of a vector, answered by PyTorch on the device of the vector.

No answer makes the host wait, and all shapes follow from sizes known before: counts and thresholds stay on the device
as scalar tensors, and a search runs all its rounds. The docstrings of `magnitudes` hold for the methods of the same
name.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch

from hvdcomp.arrays.magnitudes import elements_of_sample, sample_stride
from hvdcomp.arrays.types import Array


class TorchMagnitudes:
    """The magnitudes |x| of a vector on any device, in float32 or wider."""

    def __init__(self, x: torch.Tensor) -> None:
        self._values = x.abs() if x.element_size() >= 4 else x.float().abs_()
        self._index_type = torch.int32 if x.shape[0] < 2**31 else torch.int64

    @cached_property
    def mean(self) -> Any:
        return self._values.mean()

    @cached_property
    def largest(self) -> Any:
        return self._values.max()

    def sample_threshold(self, ratio: float) -> Any:
        sample = self._values[:: sample_stride(self._values.shape[0])]
        return torch.topk(sample, elements_of_sample(ratio, sample.shape[0]), sorted=False).values.min()

    def count(self, threshold: Any) -> Any:
        return (self._values >= threshold).sum()

    def mean_excess(self, threshold: Any) -> Any:
        return (self._values - threshold).clamp_(min=0).sum() / self.count(threshold).clamp(min=1)

    def where(self, condition: Any, x: Any, y: Any) -> Any:
        return torch.where(condition, x, y)

    def settled(self, condition: Any) -> bool:
        return False

    def pick(self, low: Any, high: Any, k: int, limit: int) -> Array:
        # The j-th element of a mask is where the running count of its elements first reaches j. Searching for that
        # needs neither the number of elements on the host nor a scatter.
        front = self._values >= high
        back = ~(front | (self._values < low))
        front_rank = torch.cumsum(front, 0, dtype=self._index_type)
        back_rank = torch.cumsum(back, 0, dtype=self._index_type)
        place = torch.arange(1, limit + 1, dtype=self._index_type, device=self._values.device)
        chosen = torch.where(
            place <= front_rank[-1],
            torch.searchsorted(front_rank, place),
            torch.searchsorted(back_rank, place - front_rank[-1]),
        ).to(self._index_type)
        if limit == k:
            return chosen
        return chosen[torch.topk(self._values[chosen], k, sorted=False).indices]

    def top(self, k: int) -> Array:
        return torch.topk(self._values, k, sorted=False).indices.to(self._index_type)
