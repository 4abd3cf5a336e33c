"""Array operations in NumPy: the plain statement that the framework versions are held against."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from hvdcomp.collectives import Array

_UNSIGNED_32 = np.dtype("uint32")


def dtype_name(x: Array) -> str:
    """The element type by its common name, such as "float32"."""
    return x.dtype.name


def item_size(x: Array) -> int:
    """Bytes of one element."""
    return x.dtype.itemsize


def device(x: Array) -> str:
    """Where the array lives, as text."""
    return "cpu"


def astype(x: Array, dtype: str) -> Array:
    """`x` with another element type; `x` itself if it has that type already."""
    return x.astype(dtype, copy=False)


def flatten(x: Array) -> Array:
    """`x` as a vector in row-major order; a view where possible."""
    return x.reshape(-1)


def reshape(x: Array, shape: Sequence[int]) -> Array:
    """`x` in another shape, row-major; a view where possible."""
    return x.reshape(tuple(shape))


def zeros(shape: Sequence[int], like: Array) -> Array:
    """Zeros of `like`'s type and place."""
    return np.zeros(tuple(shape), like.dtype)


def from_numpy(x: np.ndarray, like: Array) -> Array:
    """A NumPy array brought to the place of `like`, with its own element type."""
    return x


def concatenate(arrays: Sequence[Array]) -> Array:
    """The vectors end to end, in fresh storage."""
    return np.concatenate(arrays)


def concatenate_columns(matrices: Sequence[Array]) -> Array:
    """The matrices side by side, in fresh storage."""
    return np.concatenate(matrices, axis=1)


def as_bytes(x: Array) -> Array:
    """The elements as a uint8 vector, row-major; a view where possible."""
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


def from_bytes(x: Array, like: Array) -> Array:
    """A uint8 vector read as elements of `like`'s type in `like`'s shape; a view."""
    return x.view(like.dtype).reshape(like.shape)


def to_bfloat16_bits(x: Array) -> Array:
    """`x` rounded to bfloat16 (to nearest, ties to even), as int16 bit patterns."""
    bits = x.astype(np.float32).view(_UNSIGNED_32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    quiet_nan = (bits >> 16) | np.uint32(0x40)
    return np.where(np.isnan(x), quiet_nan, rounded).astype(np.uint16).view(np.int16)


def from_bfloat16_bits(bits: Array) -> Array:
    """float32 values of int16 bfloat16 bit patterns."""
    return (bits.view(np.uint16).astype(_UNSIGNED_32) << 16).view(np.float32)


def scale(x: Array, factor: float) -> Array:
    """x * factor, in the element type of x; reuses the storage of x."""
    x *= x.dtype.type(factor)
    return x


def top_k_indices(x: Array, k: int) -> Array:
    """Indices (k,), int32 where they fit, of the k elements of the vector `x` largest by magnitude.

    NaN counts as largest. Which of several equal elements is taken is left open; exactly k are.
    """
    magnitude = np.abs(x)
    size = x.shape[0]
    chosen = np.argpartition(magnitude, size - k)[size - k :]
    return chosen.astype(np.int32 if size < 2**31 else np.int64)


def take(x: Array, indices: Array) -> Array:
    """The elements of the vector `x` at `indices`, in fresh storage."""
    return x[indices]


def add_at(x: Array, indices: Array, values: Array) -> Array:
    """The vector `x` with `values` added at `indices` (each at most once); reuses the storage of x."""
    x[indices] += values
    return x


def matmul(a: Array, b: Array) -> Array:
    """Matrix product."""
    return a @ b


def transpose(x: Array) -> Array:
    """The transposed matrix; a view where possible."""
    return x.T


def column_norms(x: Array) -> Array:
    """2-norms (1, c) of the columns of a matrix."""
    return np.sqrt(np.sum(x * x, axis=0, keepdims=True))


def reciprocal_or_zero(x: Array, threshold: Array) -> Array:
    """1 / x where x > threshold, else 0."""
    return np.where(x > threshold, 1 / np.where(x > threshold, x, 1), 0).astype(x.dtype)


def where(condition: Array, x: Array, y: Array) -> Array:
    """Elementwise x where the condition holds, else y, broadcast."""
    return np.where(condition, x, y)


def poison(arrays: Sequence[Array]) -> Array:
    """One float32 element (1,): 0 if every element of every array is finite, else NaN."""
    finite = all(bool(np.isfinite(x).all()) for x in arrays)
    return np.array([0.0 if finite else np.nan], np.float32)


def select(poison: Array, x: Array, y: Array) -> Array:
    """`x` if the element `poison` is zero, `y` if it is NaN."""
    return x if poison[0] == 0 else y


def spoil(x: Array, poison: Array) -> Array:
    """`x` with the element `poison` (0 or NaN) added to its first element; reuses the storage of x."""
    if x.size and poison[0] != 0:
        x = np.array(x)
        x.reshape(-1)[0] = np.nan
    return x


def is_zero(poison: Array) -> bool:
    """Whether the element `poison` is zero, as a Python value; waits for the device."""
    return bool(poison[0] == 0)


def like_original(x: Array, original: Array) -> Array:
    """`x` in the element type, shape and memory layout of `original`."""
    return x.reshape(original.shape).astype(original.dtype, copy=False)


def mark(like: Array) -> float:
    """A point in time on the device of `like`."""
    return time.perf_counter()


def seconds_between(start: float, end: float) -> float | None:
    """Seconds between two marks; None while the device has not reached the second."""
    return end - start
