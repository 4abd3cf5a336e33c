"""TensorFlow's tensors as arrays that the engine works on, and back, without a copy on the host.

On the host its tensors are NumPy's arrays, so the functions of `numpy_arrays` and the kernels serve it too. Tensors on
a GPU are brought to the host, and results back, by TensorFlow itself, unless `tensorflow_on_device` takes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from hvdcomp.arrays.types import Array


def in_graph(function: Callable[..., Sequence[Array]], tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
    """Puts a call of a Python function into the graph that is being made.

    Args:
        function: is given an array for each tensor, which it must not change, and returns as many. TensorFlow takes
            over what it returns: without a copy where an array begins at a multiple of 64 bytes.
        tensors: the results have their shapes and element types.
        name: of the operation.
    """

    def called(*arrays: np.ndarray | np.generic) -> Sequence[Array]:
        return function(*(_read_only(array) for array in arrays))

    results = tf.numpy_function(called, tensors, [tensor.dtype for tensor in tensors], name=name)
    for result, tensor in zip(results, tensors, strict=True):
        result.set_shape(tensor.shape)
    return list(results)


def tensor_of(array: Array) -> tf.Tensor:
    """The tensor that has an array's elements in its storage; of an array that may not be changed, in its own."""
    return tf.experimental.dlpack.from_dlpack(np.require(array, requirements=("C", "W")).__dlpack__())


def array_of(tensor: tf.Tensor) -> Array:
    """The array that has an eager tensor's elements in its storage, or in its own if the tensor is on a GPU.

    It must not be changed.
    """
    return np.asarray(tensor)


def _read_only(array: np.ndarray | np.generic) -> np.ndarray:
    whole = np.asarray(array)  # a tensor without dimensions comes as a number
    whole.flags.writeable = False
    return whole
