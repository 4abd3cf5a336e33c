"""Array operations in TensorFlow, on eager tensors on CPU and GPU. Off the CPU none of them reads a value back to the
host unless its docstring says so; TensorFlow itself, however, keeps int32 on the host for some operations.

Tensors cannot be changed, so that nothing here reuses storage. Where an operation runs is TensorFlow's choice, and
with a GPU that is the GPU; results go back to where their original is. The docstrings of `numpy_arrays` hold for the
functions of the same name.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdcomp.arrays.device_magnitudes import DeviceMagnitudes
from hvdcomp.arrays.magnitudes import Magnitudes
from hvdcomp.arrays.types import Array


def dtype_name(x: Array) -> str:
    return x.dtype.name


def device(x: Array) -> str:
    return "cpu" if _on_cpu(x) else x.device.rpartition("device:")[2].lower()


def astype(x: Array, dtype: str) -> Array:
    return tf.cast(x, dtype)


def flatten(x: Array) -> Array:
    return tf.reshape(x, (-1,))


def reshape(x: Array, shape: Sequence[int]) -> Array:
    return tf.reshape(x, tuple(shape))


def zeros(shape: Sequence[int], like: Array) -> Array:
    with tf.device(like.device):
        return tf.zeros(tuple(shape), like.dtype)


def arange(count: int, like: Array) -> Array:
    return from_numpy(np.arange(count).astype(like.dtype.as_numpy_dtype), like)  # tf.range makes few element types


def from_numpy(x: np.ndarray, like: Array) -> Array:
    with tf.device(like.device):
        return tf.constant(x)


def hosted(arrays: Sequence[Array]) -> None:
    return None


def concatenate(arrays: Sequence[Array], axis: int = 0) -> Array:
    return tf.concat(list(arrays), axis)


def as_bytes(x: Array) -> Array:
    return tf.reshape(tf.bitcast(x, tf.uint8), (-1,))


def from_bytes(x: Array, like: Array) -> Array:
    size = like.dtype.size
    elements = tf.reshape(x, (-1, size)) if size > 1 else x  # what a wider element is made of is a dimension of its own
    return tf.reshape(tf.bitcast(elements, like.dtype), like.shape)


def to_bfloat16_bits(x: Array) -> Array:
    return tf.bitcast(tf.cast(x, tf.bfloat16), tf.int16)


def from_bfloat16_bits(bits: Array) -> Array:
    return tf.cast(tf.bitcast(bits, tf.bfloat16), tf.float32)


def magnitudes(x: Array, need: int) -> Magnitudes | DeviceMagnitudes:
    x = tf.cast(x, tf.float32) if x.dtype.size < 4 else x
    if _on_cpu(x):
        return Magnitudes(x.numpy(), need, lambda indices: from_numpy(indices, like=x))
    return _device_magnitudes(x)


def _device_magnitudes(x: Array) -> DeviceMagnitudes:
    def largest(values: Array, k: int) -> Array:
        # Compared as integers: numbers that are not negative have the same order, and NaN comes last.
        return tf.math.top_k(tf.bitcast(values, tf.int32 if values.dtype == tf.float32 else tf.int64), k).indices

    def where(condition: Any, first: Any, second: Any) -> Array:
        # Of two Python numbers TensorFlow would make float32 in any case.
        return tf.where(condition, tf.convert_to_tensor(first, x.dtype), tf.convert_to_tensor(second, x.dtype))

    # TensorFlow makes running sums of floats only on a GPU, and float64 counts exactly.
    return DeviceMagnitudes(sys.modules[__name__], x, tf.math.count_nonzero, largest, where, "float64")


def sort(x: Array) -> Array:
    if _on_cpu(x):  # where NumPy sorts integers many times as fast
        return from_numpy(np.sort(x.numpy()), like=x)
    return tf.sort(x)


def block_counts(indices: Array, block: int, blocks: int) -> Array:
    starts = from_numpy(np.arange(1, blocks).astype(indices.dtype.as_numpy_dtype) * block, like=indices)
    ends = tf.searchsorted(indices, starts, out_type=tf.int32)
    edges = tf.concat([[0], ends, [indices.shape[0]]], 0)
    return edges[1:] - edges[:-1]


def repeat(x: Array, counts: Array, total: int) -> Array:
    # Not tf.repeat, which takes memory for the largest count of every element, and waits for the sum of the counts.
    ends = tf.cumsum(tf.cast(counts, tf.float64))
    places = from_numpy(np.arange(total, dtype=np.float64), like=x)
    return tf.gather(x, tf.searchsorted(ends, places, side="right"))


def multiply_add(x: Array, y: Array, factor: float) -> Array:
    return y * factor + x


def fill_at(x: Array, indices: Array, value: float) -> Array:
    return tf.tensor_scatter_nd_update(x, indices[:, None], tf.fill(indices.shape, tf.cast(value, x.dtype)))


def stack(scalars: Sequence[Array]) -> Array:
    return tf.stack(list(scalars))


def norm(arrays: Sequence[Array]) -> Array:
    return tf.sqrt(tf.reduce_sum(tf.square(norms(arrays))))


def norms(arrays: Sequence[Array]) -> Array:
    return tf.sqrt(tf.stack([tf.reduce_sum(tf.square(tf.cast(x, tf.float64))) for x in arrays]))


def mean_to_std(arrays: Sequence[Array]) -> Array:
    wide = [tf.cast(x, tf.float64) for x in arrays]
    return tf.stack([tf.abs(tf.reduce_mean(x)) / tf.math.reduce_std(x) for x in wide])


def add_scaled(totals: Sequence[Array], arrays: Sequence[Array], factor: float, found_inf: Array) -> list[Array]:
    if _on_cpu(found_inf) and not is_zero(found_inf):
        return list(totals)
    added = [total + tf.cast(x, total.dtype) * factor for total, x in zip(totals, arrays, strict=True)]
    return [select(found_inf, new, old) for new, old in zip(added, totals, strict=True)]


def to_list(x: Array) -> list[float]:
    return x.numpy().tolist()


def take(x: Array, indices: Array) -> Array:
    return tf.gather(x, indices)


def add_at(x: Array, indices: Array, values: Array) -> Array:
    return tf.tensor_scatter_nd_add(x, indices[:, None], values)


def transpose(x: Array) -> Array:
    return tf.transpose(x)


def column_norms(x: Array) -> Array:
    return tf.sqrt(tf.reduce_sum(x * x, 0, keepdims=True))


def reciprocal_or_zero(x: Array, threshold: Array) -> Array:
    return tf.where(x > threshold, 1 / x, tf.zeros((), x.dtype))


def finite_or_zero(x: Array) -> Array:
    return tf.where(tf.math.is_finite(x), x, tf.zeros((), x.dtype))


def eigenvectors(x: Array) -> Array:
    if _on_cpu(x):  # where LAPACK, which NumPy calls, is faster
        return from_numpy(np.linalg.eigh(x.numpy())[1].T[::-1], like=x)
    return tf.transpose(tf.linalg.eigh(x)[1])[::-1]


def cumulative_sum(x: Array) -> Array:
    return tf.cumsum(x)


def interval_index(bounds: Array, points: Array) -> Array:
    found = tf.searchsorted(bounds, points, side="right", out_type=tf.int64)
    return tf.minimum(found, tf.cast(bounds.shape[0] - 1, tf.int64))


def where(condition: Array, x: Array, y: Array) -> Array:
    return tf.where(condition, x, y)


def bitcast(x: Array, dtype: str) -> Array:
    return tf.bitcast(x, dtype)


def shift_left(x: Array, places: int | Array) -> Array:
    return tf.bitwise.left_shift(x, tf.cast(places, x.dtype))


def shift_right(x: Array, places: int | Array) -> Array:
    return tf.bitwise.right_shift(x, tf.cast(places, x.dtype))


def floor(x: Array) -> Array:
    return tf.floor(x)


def clip(x: Array, low: float, high: float) -> Array:
    return tf.maximum(tf.minimum(x, tf.cast(high, x.dtype)), tf.cast(low, x.dtype))


def largest_magnitude(x: Array) -> Array:
    return tf.reduce_max(tf.abs(x), keepdims=True)


def row_sums(x: Array) -> Array:
    return tf.reduce_sum(x, 1, keepdims=True)


def column_sums(x: Array) -> Array:
    return tf.reduce_sum(x, 0)


def row_counts(condition: Array) -> Array:
    return tf.cast(tf.math.count_nonzero(condition, 1, keepdims=True), tf.float32)


def row_norms(x: Array) -> Array:
    return tf.cast(tf.sqrt(tf.reduce_sum(tf.square(tf.cast(x, tf.float64)), 1, keepdims=True)), x.dtype)


def rows_with_nonzero(x: Array) -> Array:
    return tf.reduce_any(x != 0, 1)


def found_inf(arrays: Sequence[Array]) -> Array:
    # A sum is finite only if every element is: one operation for each array. It may also overflow.
    if _on_cpu(arrays[0]) and all(math.isfinite(tf.reduce_sum(x).numpy()) for x in arrays):
        return tf.zeros((1,))
    finite = tf.reduce_all(tf.stack([tf.reduce_all(tf.math.is_finite(x)) for x in arrays]))
    return tf.where(tf.reshape(finite, (1,)), 0.0, np.nan)


def select(found_inf: Array, x: Array, y: Array) -> Array:
    if _on_cpu(found_inf):
        return x if is_zero(found_inf) else y
    return tf.where(tf.reshape(found_inf, ()) == 0, x, y)


def spoil(x: Array, found_inf: Array) -> Array:
    if not x.shape.num_elements() or (_on_cpu(found_inf) and is_zero(found_inf)):
        return x
    spoiled = tf.tensor_scatter_nd_add(flatten(x), [[0]], tf.cast(found_inf, x.dtype))
    return tf.reshape(spoiled, x.shape)


def is_zero(found_inf: Array) -> bool:
    return bool(found_inf.numpy()[0] == 0)


def like_original(x: Array, original: Array) -> Array:
    x = tf.reshape(tf.cast(x, original.dtype), original.shape)
    if x.device == original.device:
        return x
    with tf.device(original.device):
        return tf.identity(x)


def mark(like: Array) -> float:
    """The host's clock: TensorFlow shows no events of a GPU's stream, so that with a GPU it tells when the host got
    there, and not when the device did."""
    return time.perf_counter()


def seconds_between(start: float, end: float) -> float | None:
    return end - start


def _on_cpu(x: Array) -> bool:
    return "device:CPU" in x.device
