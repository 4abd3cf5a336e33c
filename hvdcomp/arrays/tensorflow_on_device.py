"""Converts between TensorFlow's and PyTorch's tensors on a GPU with DLPack, without a copy.

Each framework queues its kernels on its own stream. Each framework also frees its memory as soon as nothing in this
framework refers to the memory, even if a kernel of the other framework may still read it. Therefore the conversion has
two safeguards:

- To convert to PyTorch, the host waits for TensorFlow's stream in `to_dlpack`. To convert to TensorFlow, the host waits
  for PyTorch's stream, once for all arrays. The streams cannot wait for each other, because TensorFlow does not expose
  its stream.
- If PyTorch reads TensorFlow's storage, a reference to this storage is kept until the step ends with such a wait. If
  TensorFlow reads PyTorch's storage, a reference is kept until TensorFlow has released the storage and the host has
  then waited for TensorFlow's stream.

The conversions also work on the CPU. Tests run the conversions on the CPU, which has no streams and needs no waits.
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
from hvdcomp.arrays.types import AnyArray

_ALIGNMENT = 64  # bytes; TensorFlow aborts the process for operations on tensors with another alignment
_CUDA = 2  # DLPack's number for CUDA devices
_DEVICE_ORDINAL = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL of CUDA's driver
_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


class _TensorHeader(ctypes.Structure):
    """The first fields of DLPack's DLManagedTensor."""

    _fields_ = (("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


class DeviceTensors:
    """Converts tensors between TensorFlow and PyTorch on one device.

    Args:
        tensor: an eager tensor on the device, with at least one element.

    Attributes:
        name: the name that TensorFlow has for the device.
        device: the PyTorch device. The frameworks number a GPU differently if TensorFlow sees only some of the GPUs, as
            in Horovod's examples.
    """

    def __init__(self, tensor: tf.Tensor) -> None:
        self.name: str = tensor.device
        capsule = tf.experimental.dlpack.to_dlpack(tensor)
        header = _header_of(capsule)
        self._number = header.device_id
        on_gpu = header.device_type == _CUDA
        self.device = torch.device("cuda", _ordinal(header.data)) if on_gpu else torch.device("cpu")
        self._of_tensorflow: list[torch.Tensor] = []
        self._of_torch: dict[int, torch.UntypedStorage] = {}

    def in_graph(
        self, function: Callable[..., Sequence[AnyArray]], tensors: Sequence[tf.Tensor], name: str
    ) -> list[tf.Tensor]:
        """Adds a Python function to a graph, as `tensorflow_tensors.in_graph` does, but the function gets and returns
        PyTorch tensors."""

        def called(*inside: tf.Tensor) -> list[tf.Tensor]:
            # Without this context, PyTorch would also initialize GPU 0.
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
        """PyTorch arrays that share the storage of eager tensors. The host waits for TensorFlow."""
        done_with = [number for number, storage in self._of_torch.items() if _holders(storage) == 1]
        capsules = [_numbered(tf.experimental.dlpack.to_dlpack(tensor), self.device.index) for tensor in tensors]
        # `to` moves int32 tensors, which TensorFlow may keep on the host.
        arrays = [dlpack.from_dlpack(capsule).to(self.device) for capsule in capsules]
        for number in done_with:
            del self._of_torch[number]
        self._of_tensorflow += arrays
        return arrays

    def tensors(self, arrays: Sequence[torch.Tensor]) -> list[tf.Tensor]:
        """TensorFlow tensors that share the storage of arrays. The host waits for PyTorch.

        An array is copied if it is not row-major or not aligned to 64 bytes.
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
        """A NumPy copy of an array of any element type."""
        return np.array(array_of(self.tensors([array])[0]))

    def from_host(self, array: np.ndarray) -> torch.Tensor:
        """A copy of a NumPy array on the device."""
        with tf.device("CPU:0"):
            tensor = tf.constant(array)
        return dlpack.from_dlpack(tf.experimental.dlpack.to_dlpack(tensor)).to(self.device, copy=True)


def _numbered(capsule: Any, number: int | None) -> Any:
    """Sets the number of the GPU in a capsule, and returns the capsule."""
    header = _header_of(capsule)
    if header.device_type == _CUDA:
        header.device_id = number
    return capsule


def _header_of(capsule: Any) -> _TensorHeader:
    return _TensorHeader.from_address(_pointer_of(capsule, b"dltensor"))


def _ordinal(address: int) -> int:
    """CUDA's number of the device to which an address belongs."""
    number = ctypes.c_int()
    failed = ctypes.CDLL("libcuda.so.1").cuPointerGetAttribute(
        ctypes.byref(number), ctypes.c_int(_DEVICE_ORDINAL), ctypes.c_void_p(address)
    )
    if failed:
        raise RuntimeError(f"CUDA could not determine which device a TensorFlow tensor is on (CUDA error {failed})")
    return number.value


def _holders(storage: torch.UntypedStorage) -> int:
    """The number of references to a storage, including the caller's."""
    return int(torch._C._storage_Use_Count(storage._cdata))


def _copied(array: torch.Tensor) -> torch.Tensor:
    return array.clone(memory_format=torch.contiguous_format)
