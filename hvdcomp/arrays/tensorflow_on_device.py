"""TensorFlow's tensors as PyTorch's on the same GPU, and back, in the same storage: DLPack describes it to the other.

Each framework queues its kernels on a stream of its own, and takes memory for free as soon as nobody holds it, although
a kernel of the other may still be about to read it. So two things are needed at each passage:

- To PyTorch: `to_dlpack` lets the host wait until TensorFlow's stream has come to its end. To TensorFlow: the host
  waits for PyTorch's stream, once for all arrays that pass together. TensorFlow does not tell which stream is its own,
  so no stream can wait for the other without the host.
- What PyTorch reads of TensorFlow's is held until the step has ended, with such a wait. What TensorFlow reads of
  PyTorch's is held until TensorFlow has let go of it, and its stream was waited for afterwards.

All of it works on the CPU too, where tests run it: nothing is queued there, and nobody waits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import tensorflow as tf
import torch
from torch.utils import dlpack

from hvdcomp.arrays.tensorflow_tensors import array_of
from hvdcomp.arrays.types import Array

_ALIGNMENT = 64  # bytes; TensorFlow ends the process when an operation meets a tensor that begins elsewhere
_CUDA = 2  # a device type of DLPack
_DEVICE_ORDINAL = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL of CUDA's driver
_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


class _Described(ctypes.Structure):
    """How a DLManagedTensor of DLPack begins."""

    _fields_ = (("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


class DeviceTensors:
    """Hands tensors over between TensorFlow and PyTorch, on one device.

    Args:
        tensor: an eager tensor on the device, with at least one element.

    Attributes:
        name: of the device, in TensorFlow.
        device: the same in PyTorch. The numbers differ where TensorFlow was shown some of the GPUs only, as Horovod's
            examples do.
    """

    def __init__(self, tensor: tf.Tensor) -> None:
        self.name: str = tensor.device
        capsule = tf.experimental.dlpack.to_dlpack(tensor)
        described = _described(capsule)
        self._number = described.device_id
        on_gpu = described.device_type == _CUDA
        self.device = torch.device("cuda", _ordinal(described.data)) if on_gpu else torch.device("cpu")
        self._of_tensorflow: list[torch.Tensor] = []
        self._of_torch: dict[int, torch.UntypedStorage] = {}

    def in_graph(
        self, function: Callable[..., Sequence[Array]], tensors: Sequence[tf.Tensor], name: str
    ) -> list[tf.Tensor]:
        """As `tensorflow_tensors.in_graph`, with arrays of PyTorch."""

        def called(*inside: tf.Tensor) -> list[tf.Tensor]:
            # PyTorch would prepare its own first GPU too, if that were the current one.
            with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
                try:
                    return self.tensors(function(*self.arrays(inside)))
                finally:
                    self._of_tensorflow.clear()

        with tf.device(self.name):
            results = tf.py_function(called, tensors, [tensor.dtype for tensor in tensors], name=name)
        for result, tensor in zip(results, tensors, strict=True):
            result.set_shape(tensor.shape)
        return list(results)

    def arrays(self, tensors: Sequence[tf.Tensor]) -> list[torch.Tensor]:
        """The arrays of PyTorch that have the elements of eager tensors in their storage; waits for TensorFlow."""
        done_with = [number for number, storage in self._of_torch.items() if _holders(storage) == 1]
        capsules = [_numbered(tf.experimental.dlpack.to_dlpack(tensor), self.device.index) for tensor in tensors]
        arrays = [dlpack.from_dlpack(capsule).to(self.device) for capsule in capsules]  # int32 may be on the host
        for number in done_with:
            del self._of_torch[number]
        self._of_tensorflow += arrays
        return arrays

    def tensors(self, arrays: Sequence[torch.Tensor]) -> list[tf.Tensor]:
        """The tensors that have the elements of arrays in their storage; waits for PyTorch.

        An array that is not row-major, or begins at no multiple of 64 bytes, is copied.
        """
        ready = [
            array if array.is_contiguous() and array.data_ptr() % _ALIGNMENT == 0 else _copied(array)
            for array in arrays
        ]
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        for tensor in ready:
            storage = tensor.untyped_storage()
            self._of_torch[storage._cdata] = storage
        capsules = (_numbered(dlpack.to_dlpack(tensor), self._number) for tensor in ready)
        return [tf.experimental.dlpack.from_dlpack(capsule) for capsule in capsules]

    def to_host(self, array: torch.Tensor) -> np.ndarray:
        """A copy in NumPy, of any element type."""
        return np.array(array_of(self.tensors([array])[0]))

    def from_host(self, array: np.ndarray) -> torch.Tensor:
        """A copy on the device."""
        with tf.device("CPU:0"):
            tensor = tf.constant(array)
        return dlpack.from_dlpack(tf.experimental.dlpack.to_dlpack(tensor)).to(self.device, copy=True)


def _numbered(capsule: Any, number: int | None) -> Any:
    """The capsule, with this number as that of its GPU."""
    described = _described(capsule)
    if described.device_type == _CUDA:
        described.device_id = number
    return capsule


def _described(capsule: Any) -> _Described:
    return _Described.from_address(_pointer_of(capsule, b"dltensor"))


def _ordinal(address: int) -> int:
    """The number, to CUDA, of the device that memory is on."""
    number = ctypes.c_int()
    failed = ctypes.CDLL("libcuda.so.1").cuPointerGetAttribute(
        ctypes.byref(number), ctypes.c_int(_DEVICE_ORDINAL), ctypes.c_void_p(address)
    )
    if failed:
        raise RuntimeError(f"CUDA does not know on which device a tensor of TensorFlow is: error {failed}")
    return number.value


def _holders(storage: torch.UntypedStorage) -> int:
    """How many hold a storage, this one included."""
    return int(torch._C._storage_Use_Count(storage._cdata))


def _copied(array: torch.Tensor) -> torch.Tensor:
    return array.clone(memory_format=torch.contiguous_format)
