"""A model's gradients in each framework: made once, restored before each step, copied, and counted operations on."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np

from hvdcomp.compressors import TensorInfo

PEER_FRAMEWORK = "torch"
"""The framework of the hooks that methods are compared with."""


Work = Callable[[Mapping[str, Any], bool], Mapping[str, Any]]
"""A step: takes gradients by name, and whether the results may take their place; returns the results by name."""


class Gradients(ABC):
    """The gradients of one model, normally distributed, the same values in each framework.

    Attributes:
        arrays: by the tensor's name; what a step is given. A step may write into them.
    """

    arrays: dict[str, Any]

    @abstractmethod
    def restore(self) -> None:
        """Makes `arrays` what they were at first, so that no step works on the output of the one before."""

    @abstractmethod
    def copy(self) -> None:
        """Copies all original gradients at once into memory that is there from the beginning.

        Fresh memory would cost more or less by what a method has freed before. A copy of each tensor by itself would
        depend on how a framework's threads wait for each other, which PyTorch's hooks change.
        """

    def through(self, work: Work) -> None:
        """Has a step made of `arrays` as the framework's binding does it."""
        work(self.arrays, True)

    def synchronize(self) -> None:
        """Waits until the device has done its work; a CPU has."""
        return

    def device_ms(self, work: Callable[[], Any]) -> float | None:
        """Milliseconds that an accelerator takes for `work`, which the host has handed to it before it begins: as in a
        training, where the host is ahead. None on a CPU."""
        return None

    def operations(self, work: Callable[[], Any]) -> int | None:
        """How many of the framework's operations on arrays `work` calls; None where they cannot be counted."""
        return None

    def kernel_launches(self, work: Callable[[], Any]) -> int | None:
        """How many kernels `work` launches on an accelerator; None on a CPU, and where no profiler sees them."""
        return None


def _values(tensors: Sequence[TensorInfo]) -> np.ndarray:
    """Two vectors, (2, elements): the first holds all gradients, the second is what they are copied into."""
    values = np.zeros((2, sum(tensor.size for tensor in tensors)), np.float32)
    np.random.default_rng(0).standard_normal(dtype=np.float32, out=values[0])
    values[0] *= 1e-3
    return values


def _parts(flat: Any, tensors: Sequence[TensorInfo]) -> dict[str, Any]:
    """The tensors in a vector, as views."""
    parts, start = {}, 0
    for tensor in tensors:
        parts[tensor.name] = flat[start : start + tensor.size].reshape(tensor.shape)
        start += tensor.size
    return parts


class NumpyGradients(Gradients):
    """NumPy's operations are not counted: arithmetic on arrays leaves no trace that would show them all."""

    def __init__(self, tensors: Sequence[TensorInfo], threads: int, device: str) -> None:
        if tensors[0].dtype == "bfloat16":
            import ml_dtypes  # noqa: F401  # makes it a type of NumPy
        self._flat, self._target = _values(tensors).astype(tensors[0].dtype, copy=False)
        self._originals = _parts(self._flat, tensors)
        self.arrays = {name: original.copy() for name, original in self._originals.items()}

    def restore(self) -> None:
        for name, original in self._originals.items():
            np.copyto(self.arrays[name], original)

    def copy(self) -> None:
        np.copyto(self._target, self._flat)


class TorchGradients(Gradients):
    """Operations are those that reach PyTorch's dispatcher, views included."""

    def __init__(self, tensors: Sequence[TensorInfo], threads: int, device: str) -> None:
        import torch

        torch.set_num_threads(threads)
        self._device = device
        self._flat, self._target = torch.from_numpy(_values(tensors)).to(device, getattr(torch, tensors[0].dtype))
        self._originals = _parts(self._flat, tensors)
        self.arrays = {name: original.clone() for name, original in self._originals.items()}

    def join(self) -> Any:
        """Moves all gradients into one vector, which is returned, and of which `arrays` are views from now on."""
        import torch

        flat = torch.cat([array.reshape(-1) for array in self.arrays.values()])
        parts = flat.split([array.numel() for array in self.arrays.values()])
        self.arrays = {
            name: part.view(array.shape) for (name, array), part in zip(self.arrays.items(), parts, strict=True)
        }
        return flat

    def restore(self) -> None:
        for name, original in self._originals.items():
            self.arrays[name].copy_(original)

    def copy(self) -> None:
        self._target.copy_(self._flat)

    def synchronize(self) -> None:
        if self._device == "cuda":
            import torch

            torch.cuda.synchronize()

    def device_ms(self, work: Callable[[], Any]) -> float | None:
        if self._device != "cuda":
            return None
        from hvdcomp.tools.bench.encode.device_time import Stopwatch

        with Stopwatch() as stopwatch:
            work()
        return stopwatch.ms

    def operations(self, work: Callable[[], Any]) -> int | None:
        from torch.utils._python_dispatch import TorchDispatchMode

        class Counter(TorchDispatchMode):
            calls = 0

            def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                self.calls += 1
                return function(*args, **(kwargs or {}))

        with Counter() as counter, _entered_by_callbacks(counter):
            work()
        return counter.calls

    def kernel_launches(self, work: Callable[[], Any]) -> int | None:
        if self._device != "cuda":
            return None
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            work()
            self.synchronize()
        # What CPU code calls: cudaLaunchKernel, cuLaunchKernel, cudaLaunchKernelExC and the like.
        return sum(event.count for event in profiler.key_averages() if "LaunchKernel" in event.key) or None


@contextmanager
def _entered_by_callbacks(mode: Any) -> Iterator[None]:
    """Has what waits for a collective run in a mode that this thread is in, whatever thread it runs in."""
    from torch._C import Future

    here, then = threading.get_ident(), Future.then

    def then_in_mode(future: Any, callback: Callable[[Any], Any]) -> Any:
        def in_mode(done: Any) -> Any:
            with nullcontext() if threading.get_ident() == here else mode:
                return callback(done)

        return then(future, in_mode)

    Future.then = then_in_mode  # type: ignore
    try:
        yield
    finally:
        Future.then = then  # type: ignore


class TensorFlowGradients(NumpyGradients):
    """Tensors. They cannot be written to, so restoring makes them anew, as a backward pass does. A step takes them out
    of a graph and brings results back into it.

    Copies are NumPy's, on one thread: TensorFlow has no operation that copies into memory that is there. Operations are
    not counted: the step is one in TensorFlow's eyes.
    """

    def __init__(self, tensors: Sequence[TensorInfo], threads: int, device: str) -> None:
        import tensorflow as tf

        super().__init__(tensors, threads, device)

        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(threads)
        with tf.device("CPU:0"):
            self._tensors = {name: tf.constant(original) for name, original in self._originals.items()}
        self._graph = tf.function(self._called_in_graph, autograph=False)
        self._work: Work
        self.restore()

    def restore(self) -> None:
        import tensorflow as tf

        with tf.device("CPU:0"):
            self.arrays = {name: tf.raw_ops.DeepCopy(x=tensor) for name, tensor in self._tensors.items()}

    def through(self, work: Work) -> None:
        self._work = work
        self._graph(*self.arrays.values())

    def _called_in_graph(self, *tensors: Any) -> list[Any]:
        from hvdcomp.arrays.tensorflow_tensors import in_graph

        def step(*arrays: Any) -> list[Any]:
            return list(self._work(dict(zip(self.arrays, arrays, strict=True)), False).values())

        return in_graph(step, tensors, "step")


FRAMEWORKS: dict[str, Callable[[Sequence[TensorInfo], int, str], Gradients]] = {
    "torch": TorchGradients,
    "tensorflow": TensorFlowGradients,
    "numpy": NumpyGradients,
}
"""How gradients are made: `FRAMEWORKS[name](tensors, threads, device)`."""
