"""Conversion between TensorFlow's tensors and the engine's arrays, on the host without a copy.

On the host TensorFlow's tensors are NumPy arrays, which `numpy_arrays` and the kernels accept. TensorFlow itself copies
tensors from a GPU to the host, and results back, unless `tensorflow_on_device` converts them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from hvdcomp.arrays.types import Array


def in_graph(function: Callable[..., Sequence[Array]], tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
    """Adds a call of a Python function to TensorFlow's current graph.

    Args:
        function: gets an array for each tensor, which it must not change, and returns as many arrays. TensorFlow uses
            the returned arrays, without a copy if an array is aligned to 64 bytes.
        tensors: the inputs; the results have their shapes and element types.
        name: name of the operation.
    """

    def called(*arrays: np.ndarray | np.generic) -> Sequence[Array]:
        return function(*(_read_only(array) for array in arrays))

    results = tf.numpy_function(called, tensors, [tensor.dtype for tensor in tensors], name=name)
    for result, tensor in zip(results, tensors, strict=True):
        result.set_shape(tensor.shape)
    return list(results)


def tensor_of(array: Array) -> tf.Tensor:
    """A tensor that shares an array's storage; a copy if the array is read-only."""
    return tf.experimental.dlpack.from_dlpack(np.require(array, requirements=("C", "W")).__dlpack__())


def array_of(tensor: tf.Tensor) -> Array:
    """An array that shares an eager tensor's storage, or a copy if the tensor is on a GPU. Do not change the array.
    """
    return np.asarray(tensor)


def _read_only(array: np.ndarray | np.generic) -> np.ndarray:
    whole = np.asarray(array)  # a scalar tensor comes as a number
    whole.flags.writeable = False
    return whole
