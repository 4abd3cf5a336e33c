"""Shapes: drawn gray images of 16x16 pixels. Each image has a whole shape, a piece of another shape, and noise.

The label is the type of the whole shape, one of ten types. Places, sizes, angles and brightness are random. The piece
is a window of 5x5 pixels from another drawing, and the whole shape is drawn over it. The images are the same for every
seed of a run.

References: Mnih et al., Recurrent Models of Visual Attention, 2014, section 4.2 (digits among pieces of digits).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from hvdcomp.tools.train.dataset import DataSet, in_parts, labeled_data

TRAIN, VALIDATION, TEST = 12_000, 2_000, 4_000
SIZE = 16
_SEED = 42
_RADII = (4.5, 6.0)  # in pixels
_WINDOW = 5  # side of the window in pixels
_NOISE = 0.1  # standard deviation of the noise; the brightness of a shape is between 0.6 and 1


def _largest(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    return np.maximum(abs(u), abs(v))


def _is_in_triangle(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    angles = 2 * np.pi * np.arange(3) / 3
    return (u[..., None] * np.cos(angles) + v[..., None] * np.sin(angles)).max(-1) < 0.55


SHAPES: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "disc": lambda u, v: u**2 + v**2 < 0.8,
    "ring": lambda u, v: (u**2 + v**2 < 1) & (u**2 + v**2 > 0.35),
    "square": lambda u, v: _largest(u, v) < 0.75,
    "frame": lambda u, v: (_largest(u, v) < 0.85) & (_largest(u, v) > 0.5),
    "triangle": _is_in_triangle,
    "cross": lambda u, v: (np.minimum(abs(u), abs(v)) < 0.28) & (_largest(u, v) < 1),
    "bar": lambda u, v: (abs(u) < 1) & (abs(v) < 0.4),
    "half": lambda u, v: (u**2 + v**2 < 1.1) & (v > -0.1),
    "corner": lambda u, v: (_largest(u, v) < 0.9) & (np.minimum(u, v) < -0.2),
    "crescent": lambda u, v: (u**2 + v**2 < 1) & ((u - 0.5) ** 2 + v**2 > 0.6),
}
"""For each shape, by name, a function that decides whether points are inside the shape, which has radius 1 and center
(0, 0). A shape's position in this order is its label."""


@functools.cache
def load() -> DataSet:
    """The images (N, 1, 16, 16) with their labels."""
    x, y = _draw(TRAIN + VALIDATION + TEST, np.random.default_rng(_SEED))
    train, validation, test = in_parts(x, y, TRAIN, VALIDATION)
    return labeled_data(*train, *test, classes=len(SHAPES), validation=validation)


def _draw(count: int, draws: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    labels = draws.integers(len(SHAPES), size=count)
    others = _drawn(draws.integers(len(SHAPES), size=count), (2, SIZE - 3), draws)
    images = others * _windows(count, draws) * draws.uniform(0.4, 1, (count, 1, 1))
    whole = _drawn(labels, (5.5, SIZE - 6.5), draws)
    images = np.where(whole, draws.uniform(0.6, 1, (count, 1, 1)), images)
    images += _NOISE * draws.standard_normal(images.shape)
    return images[:, None].astype(np.float32), labels


def _drawn(labels: np.ndarray, centers: tuple[float, float], draws: np.random.Generator) -> np.ndarray:
    """Whether pixels (N, 16, 16) are inside the shapes with these labels (N,). `centers` is the range from which the
    centers of the shapes are drawn."""
    row, column, angle, radius = (
        draws.uniform(low, high, (len(labels), 1, 1)) for low, high in (centers, centers, (0, 2 * np.pi), _RADII)
    )
    down, right = np.arange(SIZE)[:, None] - row, np.arange(SIZE) - column
    u = (np.cos(angle) * right + np.sin(angle) * down) / radius
    v = (np.cos(angle) * down - np.sin(angle) * right) / radius
    inside = np.zeros(u.shape, bool)
    for label, is_inside in enumerate(SHAPES.values()):
        places = labels == label
        inside[places] = is_inside(u[places], v[places])
    return inside


def _windows(count: int, draws: np.random.Generator) -> np.ndarray:
    """Whether pixels (N, 16, 16) are inside a window at a random place."""
    top, left = draws.integers(SIZE - _WINDOW + 1, size=(2, count, 1, 1))
    rows, columns = np.arange(SIZE)[:, None] - top, np.arange(SIZE) - left
    return (np.minimum(rows, columns) >= 0) & (np.maximum(rows, columns) < _WINDOW)
