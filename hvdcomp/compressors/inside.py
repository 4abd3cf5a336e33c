"""`aggregate` of one tensor in the array functions that take the least time for it.

On the host, NumPy has the smaller overhead per operation, and the framework has threads. So a small float32 tensor goes
through `aggregate` in NumPy, whatever the framework; every other tensor goes through it in the framework.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from hvdcomp.arrays import numpy_arrays
from hvdcomp.arrays.types import Array, number_of_elements
from hvdcomp.compressors import checked
from hvdcomp.compressors.protocol import Aggregation, Context, Outcome, SparseVector

LARGE = 1 << 16
"""Elements up to which `aggregate` of a tensor on the host takes less time in NumPy than in the framework."""


def numbers_may_overflow() -> Any:
    """Silences NumPy's warnings: the step's flag reports an inf or NaN."""
    return np.errstate(over="ignore", invalid="ignore", divide="ignore")


def start(
    compressor: Any, xp: ModuleType, x: Array, kept: Sequence[Array], context: Context
) -> tuple[tuple[Array, ...], Aggregation]:
    """Starts a step of a tensor.

    Args:
        compressor: the tensor's compressor.
        xp: the array functions of the framework.
        x: what is compressed, an array of the framework.
        kept: the state that the step before left, arrays of the framework; empty if there is none.
        context: of the tensor.

    Returns:
        The state that the step starts from, and a generator like that of `aggregate`. The generator's requests may be
        in NumPy. Its outcome consists of arrays of the framework, each row-major if it was in NumPy.
    """
    inside, source, arrays = _enter(xp, x, kept)
    state = checked.prepare(compressor, inside, source, arrays, context)
    return _leave(xp, state, x), _aggregate(compressor, xp, x, inside, source, state, context)


def preview(
    compressor: Any, xp: ModuleType, x: Array, kept: Sequence[Array], context: Context
) -> Array | SparseVector:
    """C(x) as if this rank were the only one, in arrays of the framework; arguments as of `start`."""
    inside, source, arrays = _enter(xp, x, kept)
    with numbers_may_overflow():
        state = checked.prepare(compressor, inside, source, arrays, context)
        return _sent(xp, compressor.preview(inside, source, state, context), x)


def _aggregate(
    compressor: Any,
    xp: ModuleType,
    x: Array,
    inside: ModuleType,
    source: Array,
    state: tuple[Array, ...],
    context: Context,
) -> Aggregation:
    outcome = yield from checked.aggregate(compressor, inside, source, state, context)
    if inside is xp:
        return outcome
    (mean,) = _leave(xp, (outcome.mean,), x)
    return Outcome(mean, _sent(xp, outcome.sent, x), _leave(xp, outcome.state, x))


def _enter(xp: ModuleType, x: Array, kept: Sequence[Array]) -> tuple[ModuleType, Array, tuple[Array, ...]]:
    """The array functions for a tensor, and its arrays for these functions, in the same storage."""
    small = number_of_elements(tuple(x.shape)) <= LARGE
    if xp is numpy_arrays or not small or xp.dtype_name(x) != "float32" or xp.waits(x):
        return xp, x, tuple(kept)
    return numpy_arrays, xp.to_numpy(x), tuple(map(xp.to_numpy, kept))


def _leave(xp: ModuleType, arrays: Sequence[Array], like: Array) -> tuple[Array, ...]:
    """Arrays of the framework in the same storage, where the framework can share it."""
    return tuple(
        xp.from_numpy(_plain(array), like=like) if isinstance(array, np.ndarray | np.generic) else array
        for array in arrays
    )


def _plain(array: Any) -> np.ndarray:
    array = np.asarray(array)
    return array if array.flags.carray else np.array(array, order="C")


def _sent(xp: ModuleType, sent: Array | SparseVector, like: Array) -> Array | SparseVector:
    if isinstance(sent, SparseVector):
        return SparseVector(*_leave(xp, sent, like))
    return _leave(xp, (sent,), like)[0]
