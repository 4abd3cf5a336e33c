"""Converts between TensorFlow's tensors and the engine's arrays. On the host nothing is copied.

On the host, TensorFlow's tensors are NumPy arrays, which `numpy_arrays` and the kernels accept. If a tensor is on a
GPU, TensorFlow itself copies it to the host, and copies the result back, unless `tensorflow_on_device` converts the
tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from hvdcomp.arrays.types import AnyArray


def in_graph(function: Callable[..., Sequence[AnyArray]], tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
    """Adds a call of a Python function to TensorFlow's current graph.

    Args:
        function: function that gets one array for each tensor, and returns one array for each tensor. It must not
            change its arguments. TensorFlow uses a returned array without a copy if the array is aligned to 64 bytes.
        tensors: the input tensors. The results have the same shapes and element types.
        name: name of the operation in the graph.
    """

    def called(*arrays: np.ndarray | np.generic) -> Sequence[AnyArray]:
        return function(*(_read_only(array) for array in arrays))

    results = tf.numpy_function(called, tensors, [tensor.dtype for tensor in tensors], name=name)
    for result, tensor in zip(results, tensors, strict=True):
        result.set_shape(tensor.shape)
    return list(results)


def tensor_of(array: AnyArray) -> tf.Tensor:
    """A tensor that shares the storage of an array, or a copy if the array is read-only."""
    return tf.experimental.dlpack.from_dlpack(np.require(array, requirements=("C", "W")).__dlpack__())


def array_of(tensor: tf.Tensor) -> AnyArray:
    """An array that shares the storage of an eager tensor, or a copy if the tensor is on a GPU. Do not change the
    array.
    """
    return np.asarray(tensor)


def _read_only(array: np.ndarray | np.generic) -> np.ndarray:
    whole = np.asarray(array)  # TensorFlow gives a scalar tensor as a number
    whole.flags.writeable = False
    return whole
