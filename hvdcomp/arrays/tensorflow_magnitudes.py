"""Questions about the largest magnitudes of a vector, answered by TensorFlow on the device of the vector.

No answer makes the host wait, and all shapes follow from sizes known before: counts and thresholds stay on the device
as scalar tensors, and a search runs all its rounds. The docstrings of `magnitudes` hold for the methods of the same
name.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import tensorflow as tf

from hvdcomp.arrays.magnitudes import elements_of_sample, sample_stride
from hvdcomp.arrays.types import Array


class TensorFlowMagnitudes:
    """The magnitudes |x| of a vector on any device, float32 or float64."""

    def __init__(self, x: tf.Tensor) -> None:
        self._values = tf.abs(x)
        self._index_type = tf.int32 if x.shape[0] < 2**31 else tf.int64

    @cached_property
    def mean(self) -> Any:
        return tf.reduce_mean(self._values)

    @cached_property
    def largest(self) -> Any:
        return tf.reduce_max(self._values)

    def sample_threshold(self, ratio: float) -> Any:
        sample = self._values[:: sample_stride(self._values.shape[0])]
        return tf.gather(sample, _largest(sample, elements_of_sample(ratio, sample.shape[0])))[-1]

    def count(self, threshold: Any) -> Any:
        return tf.math.count_nonzero(self._values >= threshold)

    def mean_excess(self, threshold: Any) -> Any:
        excess = tf.reduce_sum(tf.maximum(self._values - threshold, tf.zeros((), self._values.dtype)))
        return excess / tf.cast(tf.maximum(self.count(threshold), 1), excess.dtype)

    def where(self, condition: Any, x: Any, y: Any) -> Any:
        dtype = self._values.dtype  # of two Python numbers TensorFlow would make float32 in any case
        return tf.where(condition, tf.convert_to_tensor(x, dtype), tf.convert_to_tensor(y, dtype))

    def settled(self, condition: Any) -> bool:
        return False

    def pick(self, low: Any, high: Any, k: int, limit: int) -> Array:
        # The j-th element of a mask is where the running count of its elements first reaches j. Searching for that
        # needs neither the number of elements on the host nor a scatter. TensorFlow makes running sums of floats only
        # on a GPU, and float64 counts exactly.
        front = self._values >= high
        back = ~(front | (self._values < low))
        front_rank = tf.cumsum(tf.cast(front, tf.float64))
        back_rank = tf.cumsum(tf.cast(back, tf.float64))
        place = tf.cast(tf.range(1, limit + 1), tf.float64)
        chosen = tf.where(
            place <= front_rank[-1],
            tf.searchsorted(front_rank, place, out_type=self._index_type),
            tf.searchsorted(back_rank, place - front_rank[-1], out_type=self._index_type),
        )
        if limit == k:
            return chosen
        return tf.gather(chosen, _largest(tf.gather(self._values, chosen), k))

    def top(self, k: int) -> Array:
        return tf.cast(_largest(self._values, k), self._index_type)


def _largest(values: tf.Tensor, k: int) -> tf.Tensor:
    """Indices (k,) of the k largest of a vector without negative numbers, in descending order, of equals the first.

    Compared as integers, which order such numbers alike, and NaN above all.
    """
    patterns = tf.bitcast(values, tf.int32 if values.dtype == tf.float32 else tf.int64)
    return tf.math.top_k(patterns, k).indices
