"""Questions about the largest magnitudes of a vector, answered on the host in NumPy.

The threshold sparsifiers ask how many elements reach a threshold, and at last for the indices of k of them. Only the
largest few elements matter for that, so one pass sets aside those above a level seen in a sample, and all questions
go to them. `device_magnitudes` answers the same questions on an accelerator, where nothing may wait for a number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any

import numpy as np

from hvdcomp.arrays.types import Array

_CHUNK = 1 << 16  # elements; what is made of them stays in a core's cache
_SAMPLE_STRIDE = 97  # about one element in a hundred; a prime, so as not to fall in step with rows and channels
_SMALLEST_SAMPLE = 1024


def sample_stride(size: int) -> int:
    """Distance between the elements of the sample of a vector: a 1 % sample, but no less than about 1024 elements."""
    return min(_SAMPLE_STRIDE, size // _SMALLEST_SAMPLE | 1)


def elements_of_sample(ratio: float, size: int) -> int:
    """How many elements a share of a sample is: max(1, ceil(ratio size))."""
    return max(1, math.ceil(ratio * size))


class Magnitudes:
    """The magnitudes |x| of a vector on the host.

    Thresholds and counts are Python numbers here, and scalar arrays on an accelerator; code for both computes with
    operators and `where` and asks for truth only through `settled`.

    Args:
        x: vector of at least one element, float32 or float64.
        need: how far counting goes. A count below `need` is exact; a larger one may come out smaller than it is, but
            not below `need`.
        place: brings an array of indices to where the caller wants it.
    """

    def __init__(self, x: np.ndarray, need: int, place: Callable[[np.ndarray], Array] = np.asarray) -> None:
        self._x = x
        self._need = min(need, x.shape[0])
        self._place = place

    @cached_property
    def _largest(self) -> tuple[np.ndarray, np.ndarray | None, float]:
        """Magnitudes in index order, their indices (None for all), and the level below which none are left out."""
        floor = self._floor()
        if floor > 0:
            places, values = [], []
            for start, magnitude in self._chunks():
                found = np.flatnonzero(~(magnitude < floor))  # NaN is found too
                values.append(magnitude[found])
                places.append(found + start)
            if sum(map(len, places)) >= self._need:
                return np.concatenate(values), np.concatenate(places), floor
        return np.abs(self._x), None, 0.0

    def _floor(self) -> float:
        """A level that at least `need` elements will reach, by the evidence of the sample; 0 if nearly all must.

        Where most are zeros, as in what was compressed before, it is the least that all others reach.
        """
        sample = np.abs(self._x[:: sample_stride(self._x.shape[0])])
        expected = self._need / self._x.shape[0] * len(sample)
        rank = math.ceil(1.5 * expected + 4 * math.sqrt(expected) + 4)
        if 3 * rank > len(sample):
            return 0.0
        level = float(np.partition(sample, len(sample) - rank)[len(sample) - rank])
        return level or float(np.finfo(sample.dtype).smallest_subnormal)

    def _chunks(self) -> Iterator[tuple[int, np.ndarray]]:
        """The magnitudes piece by piece, each with the index of its first; a piece is overwritten by the next."""
        buffer = np.empty(min(_CHUNK, self._x.shape[0]), self._x.dtype)
        for start in range(0, self._x.shape[0], _CHUNK):
            piece = self._x[start : start + _CHUNK]
            yield start, np.abs(piece, out=buffer[: len(piece)])

    @property
    def mean(self) -> Any:
        """Mean magnitude."""
        return sum(_sum(magnitude) for _, magnitude in self._chunks()) / self._x.shape[0]

    @property
    def largest(self) -> Any:
        """Largest magnitude."""
        return float(self._largest[0].max())

    def sample_threshold(self, ratio: float) -> Any:
        """The magnitude that a share `ratio` of the sample reaches."""
        sample = np.abs(self._x[:: sample_stride(self._x.shape[0])])
        place = len(sample) - elements_of_sample(ratio, len(sample))
        return float(np.partition(sample, place)[place])

    def count(self, threshold: Any) -> Any:
        """Number of elements with |x| >= threshold."""
        return int(np.count_nonzero(self._largest[0] >= threshold))

    def mean_excess(self, threshold: Any) -> Any:
        """Mean of |x| - threshold over the elements with |x| >= threshold; 0 if there are none."""
        whole, count = 0.0, 0
        for _, magnitude in self._chunks():
            with np.errstate(invalid="ignore"):
                excess = np.subtract(magnitude, threshold, out=magnitude)
            count += int(np.count_nonzero(excess >= 0))
            whole += _sum(np.maximum(excess, 0, out=excess))
        return whole / max(count, 1)

    def where(self, condition: Any, x: Any, y: Any) -> Any:
        """The number x where the condition holds, else y."""
        return x if condition else y

    def settled(self, condition: Any) -> bool:
        """Whether the condition holds, if that can be known without waiting; otherwise False."""
        return bool(condition)

    def pick(self, low: Any, high: Any, k: int, limit: int) -> Array:
        """Indices (k,) of the k largest among the first `limit` of the elements that matter.

        In front, in index order, come the elements with |x| >= high, then, again in index order, those with
        low <= |x| < high. There must be `limit` of them; low = 0 is always enough.
        """
        magnitude, indices, floor = self._largest
        chosen = _at(indices, np.flatnonzero(magnitude >= high)[:limit])
        if len(chosen) < k:
            pieces = [(0, magnitude)] if low >= floor else self._chunks()
            between = _first_between(pieces, low, high, limit - len(chosen))
            chosen = np.concatenate([chosen, _at(indices, between) if low >= floor else between])
        if len(chosen) > k:
            found = np.abs(self._x[chosen])
            chosen = chosen[np.argpartition(found, len(chosen) - k)[len(chosen) - k :]]
        return self._placed(chosen)

    def top(self, k: int) -> Array:
        """Indices (k,), int32 where they fit, of the k largest elements; NaN counts as largest.

        Which of several equal elements is taken is left open; exactly k are.
        """
        magnitude, indices, _ = self._largest
        chosen = np.argpartition(magnitude, len(magnitude) - k)[len(magnitude) - k :]
        return self._placed(_at(indices, chosen))

    def _placed(self, indices: np.ndarray) -> Array:
        return self._place(indices.astype(np.int32 if self._x.shape[0] < 2**31 else np.int64))


def _sum(x: np.ndarray) -> float:
    """The sum of a vector; in float64, which is slower, where it overflows otherwise."""
    with np.errstate(over="ignore"):
        total = float(np.sum(x))
    return total if math.isfinite(total) else float(np.sum(x, dtype=np.float64))


def _at(indices: np.ndarray | None, places: np.ndarray) -> np.ndarray:
    return places if indices is None else indices[places]


def _first_between(pieces: Iterable[tuple[int, np.ndarray]], low: float, high: float, count: int) -> np.ndarray:
    """The places of the first `count` magnitudes that reach `low` but not `high`, or are NaN."""
    places = [np.empty(0, np.intp)]
    for start, magnitude in pieces:
        places.append(start + np.flatnonzero(~((magnitude >= high) | (magnitude < low)))[:count])
        count -= len(places[-1])
        if not count:
            break
    return np.concatenate(places)
