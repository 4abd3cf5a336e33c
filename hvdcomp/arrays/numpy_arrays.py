"""Array operations in NumPy. These operations are the reference for the versions in other frameworks."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvdcomp.arrays.alignment import CACHE_LINE, empty_aligned
from hvdcomp.errors import ConfigurationError

# An array in this file is a NumPy array. Its type is Any, because `types.AllFunctions` asks for functions that accept
# every `types.Array`.
Array = Any

_UNSIGNED_32 = np.dtype("uint32")
_PIECE = 1 << 16  # number of elements; intermediate results of this size fit in a core's cache


def dtype_name(x: Array) -> str:
    """The element type by its common name, such as "float32"."""
    return _name_of(x.dtype)


@functools.cache  # cached, because NumPy builds the name on every access
def _name_of(dtype: np.dtype) -> str:
    return dtype.name


def device(x: Array) -> str:
    """The array's device, as text."""
    return "cpu"


def waits(x: Array) -> bool:
    """Whether reading an element of the array waits for a device."""
    return False


def astype(x: Array, dtype: str) -> Array:
    """`x` with another element type, or `x` itself if it already has this type.

    Conversion to integers drops the fraction. For NaN, and for numbers that are too large for the integer type, the
    result is not specified.

    Raises:
        ConfigurationError: if the type is bfloat16 and the package ml_dtypes, which adds bfloat16 to NumPy, is not
            installed.
    """
    if dtype == "bfloat16":
        _require_bfloat16()
    if "int" not in dtype:
        return x.astype(dtype, copy=False)
    with np.errstate(invalid="ignore"):
        return x.astype(dtype, copy=False)


@functools.cache
def _require_bfloat16() -> None:
    """Adds bfloat16 to NumPy's types, by importing ml_dtypes. An import of TensorFlow also adds this type."""
    try:
        import ml_dtypes  # noqa: F401
    except ImportError:
        raise ConfigurationError(
            "NumPy has no bfloat16 without the package ml_dtypes. Run pip install ml_dtypes, or use float16 or "
            "float32. If only the residuals are bfloat16, use error_feedback:dtype=fp16"
        ) from None


def flatten(x: Array) -> Array:
    """`x` as a vector in row-major order; a view where possible."""
    return x.reshape(-1)


def reshape(x: Array, shape: Sequence[int]) -> Array:
    """`x` in another shape, row-major; a view where possible."""
    return x.reshape(tuple(shape))


def zeros(shape: Sequence[int], like: Array) -> Array:
    """Zeros, with the element type of `like` and on its device."""
    return np.zeros(tuple(shape), like.dtype)


def arange(count: int, like: Array) -> Array:
    """The numbers 0, 1, ..., count - 1, with the element type of `like` and on its device."""
    return np.arange(count, dtype=like.dtype)


def from_numpy(x: np.ndarray, like: Array) -> Array:
    """Copies a NumPy array to the device of `like`; the element type stays the same."""
    return x


def to_numpy(x: Array) -> np.ndarray:
    """A NumPy array that shares the storage of an array on the host."""
    return x


def hosted(arrays: Sequence[Array], dtype: str = "float32") -> tuple[list[Array], list[int]] | None:
    """The arrays in row-major order, and the addresses of their first elements, if all arrays are on the host.

    Returns:
        The arrays and their addresses. Arrays that are not row-major are replaced with row-major copies. None if an
        array has a different element type, or is on a device that cannot share storage with NumPy.
    """
    if any(dtype_name(x) != dtype for x in arrays):
        return None
    dense = [x if x.flags.c_contiguous else np.ascontiguousarray(x) for x in arrays]
    return dense, [x.__array_interface__["data"][0] for x in dense]


def concatenate(arrays: Sequence[Array], axis: int = 0) -> Array:
    """Joins vectors end to end, or matrices one below the other (side by side with axis 1), in new storage."""
    return np.concatenate(arrays, axis)


def as_bytes(x: Array) -> Array:
    """The bytes of the elements in row-major order, a uint8 vector; a view if possible."""
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


def from_bytes(x: Array, like: Array) -> Array:
    """A view of a uint8 vector, with the element type and the shape of `like`."""
    return x.view(like.dtype).reshape(like.shape)


def to_bfloat16_bits(x: Array) -> Array:
    """`x` rounded to bfloat16 (to nearest, ties to even), as int16 bit patterns."""
    bits = x.astype(np.float32).view(_UNSIGNED_32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    quiet_nan = (bits >> 16) | np.uint32(0x40)
    return np.where(np.isnan(x), quiet_nan, rounded).astype(np.uint16).view(np.int16)


def from_bfloat16_bits(bits: Array) -> Array:
    """The float32 values of bfloat16 numbers, which are given as int16 bit patterns."""
    return (bits.view(np.uint16).astype(_UNSIGNED_32) << 16).view(np.float32)


def top(x: Array, k: int) -> Array:
    """The indices (k,), int64, of the k largest elements of a vector, in any order; NaN counts as largest. For a
    matrix, the indices (r, k) of the k largest elements in each row."""
    return np.argpartition(x, x.shape[-1] - k)[..., x.shape[-1] - k :]


def first_places(x: Array, low: Any, high: Any, limit: int) -> Array:
    """The indices, int64, of `limit` elements of a vector: first the elements of at least `high`, and then the elements
    of at least `low`, or NaN.

    If fewer than `limit` elements meet these conditions, NumPy returns fewer indices. The other frameworks need at
    least `limit` such elements.
    """
    places = [np.flatnonzero(x >= high)[:limit]]
    missing = limit - len(places[0])
    for start in range(0, x.shape[0], _PIECE):
        if missing <= 0:
            break
        piece = x[start : start + _PIECE]
        places.append(start + np.flatnonzero(~((piece >= high) | (piece < low)))[:missing])
        missing -= len(places[-1])
    return np.concatenate(places)


def count_nonzero(x: Array) -> Array:
    """Number of nonzero elements, an integer scalar."""
    return np.asarray(np.count_nonzero(x))


def sort(x: Array) -> Array:
    """The vector in ascending order, in new storage."""
    return np.sort(x)


def block_counts(indices: Array, block: int, blocks: int) -> Array:
    """Counts how many of the ascending indices lie in each block of `block` elements: int32 (blocks,)."""
    ends = np.searchsorted(indices, np.arange(1, blocks, dtype=indices.dtype) * indices.dtype.type(block))
    return np.diff(ends, prepend=0, append=indices.shape[0]).astype(np.int32)


def unique(x: Array) -> tuple[Array, Array]:
    """The unique values of an integer vector in ascending order, and for each element the index, int64, of its value
    among the unique values.

    Waits for an accelerator.
    """
    values, places = np.unique(x, return_inverse=True)
    return values, places.astype(np.int64, copy=False)


def counts(x: Array, length: int) -> Array:
    """Counts how often each of 0, 1, ..., length - 1 occurs in an integer vector: int64 (length,). All elements must be
    in [0, length).

    Waits for an accelerator.
    """
    return np.bincount(x, minlength=length)


def repeat(x: Array, counts: Array, total: int) -> Array:
    """The vector `x` with element i repeated `counts[i]` times; the result has `total` elements."""
    return np.repeat(x, counts)


def norms(arrays: Sequence[Array]) -> Array:
    """The 2-norm of each array, a float64 vector."""
    return np.sqrt(np.array([np.sum(np.square(x, dtype=np.float64)) for x in arrays], np.float64))


def mean_to_std(arrays: Sequence[Array]) -> Array:
    """The magnitude of the mean over the standard deviation of each array's elements, a float64 vector.

    The result is not finite for an array of one element. If all elements are equal, the result is not finite, or is
    very large because of rounding.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.array([np.abs(np.float64(x.mean(dtype=np.float64))) / x.std(dtype=np.float64) for x in arrays])


def add_scaled(totals: Sequence[Array], arrays: Sequence[Array], factor: float, found_inf: Array) -> list[Array]:
    """Adds `factor` times an array to each total, and returns the totals. The totals do not change if the only element
    of `found_inf` is NaN. The result may reuse the storage of the totals. An array may have a narrower element type
    than its total."""
    if found_inf[0] != 0:
        return list(totals)
    return [np.add(total, x * total.dtype.type(factor), out=total) for total, x in zip(totals, arrays, strict=True)]


def take(x: Array, indices: Array) -> Array:
    """The elements of the vector `x`, or the rows of the matrix, at `indices`, in new storage."""
    return x[indices]


def add_at(x: Array, indices: Array, values: Array) -> Array:
    """Adds `values` to the vector `x` at `indices`, in which no index occurs twice. The result reuses the storage of
    x."""
    x[indices] += values
    return x


def reciprocal_or_zero(x: Array, threshold: Array) -> Array:
    """1 / x where x > threshold, else 0."""
    return np.divide(1, x, out=np.zeros(x.shape, x.dtype), where=x > threshold)


def finite_or_zero(x: Array) -> Array:
    """`x` with zeros in place of inf and NaN. The result may reuse the storage of x."""
    return np.where(np.isfinite(x), x, x.dtype.type(0))


def aligned(x: Array) -> Array:
    """The array in row-major order, in memory that begins at a cache line. The array is copied unless it already meets
    both conditions.

    In some libraries, the order in which products of elements are added depends on the address of the array.
    """
    if x.flags.c_contiguous and x.ctypes.data % CACHE_LINE == 0:
        return x
    copy = empty_aligned(x.size, x.dtype).reshape(x.shape)
    np.copyto(copy, x)
    return copy


def eigenvectors(x: Array) -> Array:
    """Orthonormal eigenvectors of a finite symmetric matrix, as rows, in descending order of their eigenvalues.

    Waits for an accelerator. LAPACK's iteration may fail to converge, even for an ordinary gradient in single
    precision. The result is then the unit vectors, which are also an orthonormal basis.
    """
    try:
        return np.linalg.eigh(x)[1].T[::-1]
    except np.linalg.LinAlgError:
        return np.eye(x.shape[0], dtype=x.dtype)


def interval_index(bounds: Array, points: Array) -> Array:
    """For each point, the index, int64, of the first bound that is above the point. If no bound is above the point, the
    index of the last bound. Bounds are in ascending order."""
    return np.minimum(np.searchsorted(bounds, points, side="right"), bounds.shape[0] - 1)


def where(condition: Array, x: Array, y: Array) -> Array:
    """For each element, x if the condition is true, otherwise y. The arguments are broadcast."""
    return np.where(condition, x, y)


def bitcast(x: Array, dtype: str) -> Array:
    """The bits of `x`, read as elements of another type along the last axis; a view where possible."""
    return x.view(dtype)


def floor(x: Array) -> Array:
    """The largest integers that are not above the elements of x. The result reuses the storage of x."""
    return np.floor(x, out=x)


def row_dots(x: Array, y: Array) -> Array:
    """The dot products (r, 1), float64, of the rows of two matrices. Products of float32 numbers are exact.

    The order of additions is the same as in the C function `hvd_sum_of_squares` (quant.h). It first computes 16 sums,
    each over every 16th product. Then it adds the second half of these sums to the first half, until one sum is left.
    With another order, a norm that is nearly halfway between two numbers of the element type might be rounded
    differently.
    """
    rows, length = x.shape
    whole = length // 16
    with np.errstate(over="ignore", invalid="ignore"):
        products = x.astype(np.float64)
        products *= products if x is y else y
        # This takes a third of the time of NumPy's `reduce`.
        lanes = np.einsum("rwl->lr", products[:, : 16 * whole].reshape(rows, whole, 16))
        if length % 16:
            lanes[: length % 16] += products[:, 16 * whole :].T
        for half in (8, 4, 2, 1):
            lanes = lanes[:half] + lanes[half:]
        return lanes.T


def row_norms(x: Array) -> Array:
    """The 2-norms (r, 1) of the rows of a matrix. Sums are float64, so that squares neither overflow nor become
    zero."""
    with np.errstate(over="ignore"):
        return np.sqrt(row_dots(x, x)).astype(x.dtype)


def hadamard(x: Array) -> Array:
    """Multiplies each row of a matrix (r, n), float32, by the Walsh-Hadamard matrix of n rows, without the factor 1 /
    sqrt(n). n is a power of two.

    The first pass computes sums and differences of neighbors. The next passes do the same with elements that are two
    apart, four apart, and so on. Kernels use the same order, so they give the same bits.
    """
    rows, length = x.shape
    result = np.empty_like(x)
    step = max(1, _PIECE // length)
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, rows, step):
            # transposed, because additions of whole rows are fastest
            piece = np.ascontiguousarray(x[start : start + step].T)
            other = np.empty_like(piece)
            apart = 1
            while apart < length:
                shape = length // (2 * apart), 2, apart, piece.shape[1]
                old, new = piece.reshape(shape), other.reshape(shape)
                np.add(old[:, 0], old[:, 1], out=new[:, 0])
                np.subtract(old[:, 0], old[:, 1], out=new[:, 1])
                piece, other = other, piece
                apart *= 2
            result[start : start + step] = piece.T
    return result


def row_largest(x: Array) -> Array:
    """The largest magnitudes (r, 1) of the rows of a matrix; NaN counts as largest."""
    return np.abs(x).max(1, keepdims=True)


def found_inf(arrays: Sequence[Array]) -> Array:
    """One float32 element (1,): 0 if every element of every array is finite, otherwise NaN."""
    with np.errstate(over="ignore", invalid="ignore"):
        # A sum takes half the time of a check of each element. A sum is finite only if every element is finite. But a
        # sum of finite elements may overflow, so each element is checked if the sum is not finite.
        finite = all(math.isfinite(np.add.reduce(x, axis=None)) or np.isfinite(x).all() for x in arrays)
    return np.array([0.0 if finite else np.nan], np.float32)


def select(found_inf: Array, x: Array, y: Array) -> Array:
    """`x` if the only element of `found_inf` is zero, `y` if this element is NaN."""
    return x if found_inf[0] == 0 else y


def spoil(x: Array, found_inf: Array) -> Array:
    """Adds the only element of `found_inf` (0 or NaN) to the first element of `x`. The result reuses the storage of
    x."""
    if x.size and found_inf[0] != 0:
        x = np.array(x)
        x[(0,) * x.ndim] = np.nan
    return x


def read_later(x: Array) -> Callable[[], float]:
    """Returns a function. When you call the function, it waits for the device and returns the only element of `x` as a
    number."""
    return x.item


def like_original(x: Array, original: Array) -> Array:
    """`x` in the element type, shape and memory layout of `original`."""
    x = x.reshape(original.shape).astype(original.dtype, copy=False)
    if x.strides == original.strides:
        return x
    result = np.empty_like(original)
    result[...] = x
    return result


def like_originals(arrays: Sequence[Array], originals: Sequence[Array]) -> list[Array]:
    """`like_original` for each array."""
    return [x if x is original else like_original(x, original) for x, original in zip(arrays, originals, strict=True)]


def protected(x: Array) -> Array:
    """A read-only view of `x`, if the framework has read-only views; otherwise `x` itself."""
    view = np.asarray(x).view()
    view.flags.writeable = False
    return view


def changes(x: Array) -> int | None:
    """How often `x` was changed in place; None if the framework does not count changes."""
    return None


def share_storage(x: Array, y: Array) -> bool:
    """Whether the two arrays may share memory."""
    return np.may_share_memory(x, y)


def stream(x: Array) -> Any:
    """The current CUDA stream of the device of `x`; None on other devices."""
    return None


def mark(like: Array, spare: float | None = None) -> float:
    """A mark of the current time on the device of `like`. On a GPU it is a CUDA event, and on a CPU it is the time of
    the host's clock.

    Args:
        like: an array on the device that the mark belongs to.
        spare: a mark that is no longer used and may be reused.
    """
    return time.perf_counter()


def seconds_between(start: float, end: float) -> float | None:
    """The seconds between two marks; None if the device has not yet reached the second mark."""
    return end - start
