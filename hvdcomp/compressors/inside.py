"""Chooses the array functions that compress a tensor: those of the framework, or those of NumPy.

On the host, NumPy has less overhead per operation, but the framework uses several threads. So NumPy compresses small
float32 tensors, regardless of the framework. The framework compresses all other tensors.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from hvdcomp.arrays import numpy_arrays
from hvdcomp.arrays.types import AllFunctions, Array, number_of_elements
from hvdcomp.compressors import checked
from hvdcomp.compressors.protocol import Context, SparseVector

LARGE = 1 << 16
"""On the host, tensors with at most this number of elements are compressed faster in NumPy than in the framework."""


def numbers_may_overflow() -> Any:
    """A context manager that silences NumPy's warnings about overflow, because the step's flag reports an inf or
    NaN."""
    return np.errstate(over="ignore", invalid="ignore", divide="ignore")


@dataclasses.dataclass(frozen=True)
class Inside:
    """The array functions that compress one tensor, which come either from the tensor's framework or from NumPy.

    Attributes:
        framework: the array functions of the tensor's framework.
        xp: the array functions that compress the tensor, either from its framework or from NumPy.
        like: an array of the tensor's framework.
    """

    framework: AllFunctions
    xp: AllFunctions
    like: Array

    def enter(self, array: Array) -> Array:
        """Converts an array of the framework to an array of `xp`, in the same storage. An array of `xp` is returned
        unchanged."""
        if self.xp is self.framework or isinstance(array, np.ndarray | np.generic):
            return array
        return self.framework.to_numpy(array)

    def leave(self, array: Array) -> Array:
        """Converts an array of `xp` to an array of the framework, in the same storage if possible. An array of the
        framework is returned unchanged."""
        if self.xp is self.framework or not isinstance(array, np.ndarray | np.generic):
            return array
        array = np.asarray(array)
        shared = array if array.flags.carray else np.array(array, order="C")
        return self.framework.from_numpy(shared, like=self.like)

    def sent(self, sent: Array | SparseVector) -> Array | SparseVector:
        """Converts the C(x) that a compressor returns to an array of the framework, as `leave` does for other
        arrays."""
        return SparseVector(*map(self.leave, sent)) if isinstance(sent, SparseVector) else self.leave(sent)


def inside_of(framework: AllFunctions, array: Array) -> Inside:
    """Chooses the array functions that compress a tensor with the size, element type and device of the given array."""
    small = number_of_elements(tuple(array.shape)) <= LARGE
    in_numpy = small and framework.dtype_name(array) == "float32" and not framework.waits(array)
    return Inside(framework, numpy_arrays if in_numpy else framework, array)


def preview(
    compressor: Any, framework: AllFunctions, x: Array, kept: tuple[Array, ...], context: Context
) -> Array | SparseVector:
    """Compresses x as if this rank were the only rank, and returns C(x), the decoded result.

    Args:
        compressor: the compressor of the tensor.
        framework: the array functions for the framework of x.
        x: the array to compress.
        kept: the state that the compressor kept after the previous step, as arrays of the framework; empty if there is
            none.
        context: the tensor's name, the step, the seed, the rank and the number of ranks.

    Returns:
        C(x), as an array of the framework, or as a sparse vector of such arrays.
    """
    inside = inside_of(framework, x)
    source = inside.enter(x)
    with numbers_may_overflow():
        state = checked.prepare(compressor, inside.xp, source, tuple(map(inside.enter, kept)), context)
        return inside.sent(compressor.preview(inside.xp, source, state, context))
