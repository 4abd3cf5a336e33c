"""Chooses the array functions that compress a tensor: the framework's, or NumPy's.

On the host, NumPy has the smaller overhead per operation, and the framework has threads. So a small float32 tensor is
computed in NumPy with every framework; every other tensor is computed in the framework.
"""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

import numpy as np

from hvdcomp.arrays import numpy_arrays
from hvdcomp.arrays.types import Array, number_of_elements
from hvdcomp.compressors import checked
from hvdcomp.compressors.protocol import Context, SparseVector

LARGE = 1 << 16
"""Elements up to which a tensor on the host takes less time in NumPy than in the framework."""


def numbers_may_overflow() -> Any:
    """Silences NumPy's warnings: the step's flag reports an inf or NaN."""
    return np.errstate(over="ignore", invalid="ignore", divide="ignore")


@dataclasses.dataclass(frozen=True)
class Inside:
    """The array functions that compress a tensor.

    Attributes:
        framework: the array functions of the tensor's framework.
        xp: the array functions in which the tensor is computed: those of the framework, or NumPy's.
        like: an array of the framework.
    """

    framework: ModuleType
    xp: ModuleType
    like: Array

    def enter(self, array: Array) -> Array:
        """An array of the framework or of `xp` as one of `xp`, in the same storage."""
        if self.xp is self.framework or isinstance(array, np.ndarray | np.generic):
            return array
        return self.framework.to_numpy(array)

    def leave(self, array: Array) -> Array:
        """An array of `xp` or of the framework as one of the framework, in the same storage if possible."""
        if self.xp is self.framework or not isinstance(array, np.ndarray | np.generic):
            return array
        array = np.asarray(array)
        shared = array if array.flags.carray else np.array(array, order="C")
        return self.framework.from_numpy(shared, like=self.like)

    def sent(self, sent: Array | SparseVector) -> Array | SparseVector:
        """As `leave`, of what a compressor has sent."""
        return SparseVector(*map(self.leave, sent)) if isinstance(sent, SparseVector) else self.leave(sent)


def inside_of(framework: ModuleType, array: Array) -> Inside:
    """The array functions that compress a tensor like the given array of the framework."""
    small = number_of_elements(tuple(array.shape)) <= LARGE
    in_numpy = small and framework.dtype_name(array) == "float32" and not framework.waits(array)
    return Inside(framework, numpy_arrays if in_numpy else framework, array)


def preview(
    compressor: Any, framework: ModuleType, x: Array, kept: tuple[Array, ...], context: Context
) -> Array | SparseVector:
    """Compresses x as if this rank were the only rank, and returns C(x), the decoded result.

    Args:
        compressor: the tensor's compressor.
        framework: the array functions of x.
        x: the array to compress.
        kept: the state after the previous step, arrays of the framework; empty if there is none.
        context: the context of the tensor.

    Returns:
        C(x), an array of the framework or several.
    """
    inside = inside_of(framework, x)
    source = inside.enter(x)
    with numbers_may_overflow():
        state = checked.prepare(compressor, inside.xp, source, tuple(map(inside.enter, kept)), context)
        return inside.sent(compressor.preview(inside.xp, source, state, context))
