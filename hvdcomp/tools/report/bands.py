"""A curve for each run of a series, made into one: the mean over the seeds at the steps that all have, and its band."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np


@dataclass(frozen=True)
class Curve:
    """What one run says of each of some steps: a place on the x axis, and a value."""

    steps: np.ndarray
    x: np.ndarray
    y: np.ndarray

    def at(self, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """x and y at some of the steps."""
        places = {step: place for place, step in enumerate(self.steps.tolist())}
        chosen = [places[step] for step in steps.tolist()]
        return self.x[chosen], self.y[chosen]


@dataclass(frozen=True)
class Band:
    """The mean of several curves, and the lowest and the highest of them at each of its places."""

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def band_of(curves: Sequence[Curve]) -> Band:
    """The mean over some curves, at least one, at the steps that all of them have."""
    common = reduce(np.intersect1d, [curve.steps for curve in curves])
    x, y = np.stack([np.stack(curve.at(common)) for curve in curves], axis=1)
    return Band(x.mean(axis=0), y.mean(axis=0), y.min(axis=0), y.max(axis=0))
