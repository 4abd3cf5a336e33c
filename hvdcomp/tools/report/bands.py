"""Computes the mean curve and the band of a series of runs, at the steps that all runs have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np


@dataclass(frozen=True)
class Curve:
    """A curve of a run. For each of its steps, it has a position on the x axis and a value."""

    steps: np.ndarray
    x: np.ndarray
    y: np.ndarray

    def at(self, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The x and y values at these steps, which must all be steps of the curve."""
        places = {step: place for place, step in enumerate(self.steps.tolist())}
        chosen = [places[step] for step in steps.tolist()]
        return self.x[chosen], self.y[chosen]


@dataclass(frozen=True)
class Band:
    """The mean of several curves at each x, and their lowest and highest values."""

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def band_of(curves: Sequence[Curve]) -> Band:
    """The band of one or more curves, at the steps that all curves have."""
    common = reduce(np.intersect1d, [curve.steps for curve in curves])
    x, y = np.stack([np.stack(curve.at(common)) for curve in curves], axis=1)
    return Band(x.mean(axis=0), y.mean(axis=0), y.min(axis=0), y.max(axis=0))
