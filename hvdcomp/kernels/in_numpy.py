"""Kernels in NumPy, for hosts where nothing was compiled: those that the bucket of any method needs.

They do what the kernels in C of the same names do (`src/kernels.def`), bit for bit but for sums of squares, which are
added up in another order. Gradients and residuals are float32, and of a kept x either nothing or everything was sent:
other rules come of kernels that are not here. The bucket then runs `aggregate` of each tensor, or `none`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from hvdcomp.kernels.tables import EVERYTHING, NOTHING, Table

_BLOCK = 1 << 15  # elements of a block, so that what is made of it is still in a cache when it is read


def call(kernel: str, table: Table, *arguments: Any) -> bool:
    """Calls a kernel of this module; whether it found an inf or NaN."""
    with np.errstate(over="ignore", invalid="ignore"):
        return _KERNELS[kernel](table, *arguments)


def sums_of(kernel: str, table: Table) -> np.ndarray:
    """Sums of squares of each tensor, float64 (tensors,): for `make_x` of x, for `measure_left` of the residual."""
    with np.errstate(over="ignore", invalid="ignore"):
        if kernel == "make_x":
            return _energies(_made(table))
        return np.where(table.segments["sent_rule"] == NOTHING, _energies(table.vectors("x")), 0.0)


def holds_inf(table: Table, column: str) -> bool:
    """Whether the storage that a column points to holds an inf or NaN."""
    with np.errstate(over="ignore", invalid="ignore"):
        return not all(map(_is_finite, table.vectors(column)))


def _is_finite(vector: np.ndarray) -> bool:
    # A sum is finite only if every element is, and takes half the time. It may also overflow.
    return math.isfinite(np.add.reduce(vector)) or bool(np.isfinite(vector).all())


def _energies(vectors: list[np.ndarray]) -> np.ndarray:
    return np.array([np.sum(np.square(vector, dtype=np.float64)) for vector in vectors], np.float64)


def _made(table: Table) -> list[np.ndarray]:
    """The numbers to compress of each tensor; x is made unless something else is compressed."""
    made = next(column for column in ("source", "x", "gradient") if table.segments[column].all())
    if made == "x":
        columns = ("gradient", "kept", "x", "velocity", "next_velocity")
        rules = table.segments["rule"].tolist()
        assert {NOTHING, EVERYTHING}.issuperset(rules)
        for rule, *vectors in zip(rules, *map(table.vectors, columns), strict=True):
            for start in range(0, vectors[0].size, _BLOCK):
                _make_block(table, rule == EVERYTHING, *(vector[start : start + _BLOCK] for vector in vectors))
    return table.vectors(made)


def _make_x(table: Table) -> bool:
    return not all(map(_is_finite, _made(table)))


def _make_block(
    table: Table,
    everything: bool,
    gradient: np.ndarray,
    kept: np.ndarray,
    x: np.ndarray,
    velocity: np.ndarray,
    next_velocity: np.ndarray,
) -> None:
    """Makes a block of x. There may be no kept x, no velocity yet, and without momentum no next one."""
    settings = table.bucket
    scaled = gradient if settings.factor == 1 else gradient * settings.factor
    residual: Any = None
    if kept.size:
        residual = 0.0 if everything else kept if settings.decay == 1 else kept * settings.decay
    if next_velocity.size:
        next_velocity[:] = velocity * settings.momentum + scaled if velocity.size else scaled
        residual = 0.0 if residual is None else residual
        if settings.nesterov:
            np.add(next_velocity * settings.momentum, residual + scaled, out=x)
        else:
            np.add(residual, next_velocity, out=x)
    elif residual is None:
        x[:] = scaled
    else:
        np.add(residual, scaled, out=x)


def _dense_encode(table: Table, wire: np.ndarray) -> bool:
    made = _made(table)
    np.concatenate(made, out=wire[: table.elements])
    return not all(map(_is_finite, made))


def _dense_decode(table: Table, mean: np.ndarray) -> bool:
    for result, start in zip(table.vectors("result"), table.segments["values"].tolist(), strict=True):
        result[:] = mean[start : start + result.size]
    return not _is_finite(mean)


def _end_step(table: Table, adds: bool, puts: bool) -> bool:
    gradients = table.vectors("gradient")
    if adds:
        for total, gradient in zip(table.vectors("total"), gradients, strict=True):
            total += gradient * table.bucket.share
    if puts:
        for gradient, result in zip(gradients, table.vectors("result"), strict=True):
            gradient[:] = result
    return False


_KERNELS: dict[str, Callable[..., bool]] = {
    "make_x": _make_x,
    "dense_encode": _dense_encode,
    "dense_decode": _dense_decode,
    "end_step": _end_step,
}
