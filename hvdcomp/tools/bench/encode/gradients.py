"""The gradients of a model in each framework. The gradients are created once, restored before each step, and copied for
comparison."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np

from hvdcomp.arrays import numpy_arrays
from hvdcomp.compressors import TensorInfo

PEER_FRAMEWORK = "torch"
"""The framework whose own hooks are compared with hvdcomp's methods."""


Work = Callable[[Mapping[str, Any], bool], Mapping[str, Any]]
"""The type of a step: a function that gets the gradients by name, and whether it may write results into them. It
returns the results by name."""


class Gradients(ABC):
    """The gradients of one model. The gradients are normally distributed, and have the same values in each framework.

    Attributes:
        arrays: the gradients of a step, by tensor name. The step may write to them.
    """

    arrays: dict[str, Any]

    @abstractmethod
    def restore(self) -> None:
        """Restores the original values of `arrays`, so that no step uses the output of the previous step."""

    @abstractmethod
    def copy(self) -> None:
        """Copies all original gradients together into memory that was allocated at the start.

        If memory were allocated for each copy, the time of the copy would depend on the memory that a method has freed
        before. If each tensor were copied separately, the time would depend on how the threads of a framework wait for
        each other. PyTorch's hooks influence how the threads wait.
        """

    def through(self, work: Work) -> None:
        """Runs a step with `arrays`, in the same way as hvdcomp's binding for the framework."""
        work(self.arrays, True)

    def synchronize(self) -> None:
        """Waits until the device has finished its work. Does nothing on a CPU."""
        return

    def device_ms(self, work: Callable[[], Any]) -> float | None:
        """The milliseconds that an accelerator needs for `work`; None on a CPU. The host launches the work in advance,
        as it does in training."""
        return None

    def operations(self, work: Callable[[], Any]) -> int | None:
        """The number of operations of the framework that `work` calls; None if they cannot be counted."""
        return None

    def kernel_launches(self, work: Callable[[], Any]) -> int | None:
        """The number of kernels that `work` launches on an accelerator; None on a CPU, or if the profiler does not see
        them."""
        return None


def _values(tensors: Sequence[TensorInfo]) -> np.ndarray:
    """Returns two vectors in an array of shape (2, elements). The first vector contains all gradients. Copies are
    written to the second vector."""
    values = np.zeros((2, sum(tensor.size for tensor in tensors)), np.float32)
    np.random.default_rng(0).standard_normal(dtype=np.float32, out=values[0])
    values[0] *= 1e-3
    return values


def _parts(flat: Any, tensors: Sequence[TensorInfo]) -> dict[str, Any]:
    """Splits a vector into views, one for each tensor."""
    parts, start = {}, 0
    for tensor in tensors:
        parts[tensor.name] = flat[start : start + tensor.size].reshape(tensor.shape)
        start += tensor.size
    return parts


class NumpyGradients(Gradients):
    """Gradients in NumPy. NumPy's operations cannot be counted."""

    def __init__(self, tensors: Sequence[TensorInfo], threads: int, device: str) -> None:
        self._flat, self._target = numpy_arrays.astype(_values(tensors), tensors[0].dtype)
        self._originals = _parts(self._flat, tensors)
        self.arrays = {name: original.copy() for name, original in self._originals.items()}

    def restore(self) -> None:
        for name, original in self._originals.items():
            np.copyto(self.arrays[name], original)

    def copy(self) -> None:
        np.copyto(self._target, self._flat)


class TorchGradients(Gradients):
    """Gradients in PyTorch. The counted operations are all calls that reach the dispatcher, including views."""

    def __init__(self, tensors: Sequence[TensorInfo], threads: int, device: str) -> None:
        import torch

        torch.set_num_threads(threads)
        self._device = device
        self._flat, self._target = torch.from_numpy(_values(tensors)).to(device, getattr(torch, tensors[0].dtype))
        self._originals = _parts(self._flat, tensors)
        self.arrays = {name: original.clone() for name, original in self._originals.items()}

    def join(self) -> Any:
        """Moves all gradients into one vector, and returns the vector. Afterwards, `arrays` are views of this
        vector."""
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
        # The CPU makes one of these calls for each launch: cudaLaunchKernel, cuLaunchKernel, cudaLaunchKernelExC and
        # similar.
        return sum(event.count for event in profiler.key_averages() if "LaunchKernel" in event.key) or None


@contextmanager
def _entered_by_callbacks(mode: Any) -> Iterator[None]:
    """A context manager. Within it, callbacks that wait for a collective use the dispatch mode `mode` of this thread,
    even if a different thread runs the callbacks."""
    from torch import _C

    futures: Any = _C.Future
    own_thread, then = threading.get_ident(), futures.then

    def then_in_mode(future: Any, callback: Callable[[Any], Any]) -> Any:
        def in_mode(future: Any) -> Any:
            with nullcontext() if threading.get_ident() == own_thread else mode:
                return callback(future)

        return then(future, in_mode)

    futures.then = then_in_mode
    try:
        yield
    finally:
        futures.then = then


class TensorFlowGradients(NumpyGradients):
    """Gradients in TensorFlow. TensorFlow's tensors cannot be changed, so `restore` creates new ones, as a backward
    pass does. A step reads the tensors from a graph, and returns the results to the graph.

    NumPy copies the gradients, on one thread, because TensorFlow has no operation that copies into existing memory.
    Operations are not counted, because the step is a single operation of TensorFlow.
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
"""For each framework, the function that creates gradients: `FRAMEWORKS[name](tensors, threads, device)`."""
