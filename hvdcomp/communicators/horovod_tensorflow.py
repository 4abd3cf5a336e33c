"""Runs collectives with Horovod for TensorFlow, on NumPy arrays or, on a GPU, on PyTorch tensors."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError
from horovod.tensorflow.mpi_ops import global_process_set

from hvdcomp.arrays.tensorflow_tensors import array_of, tensor_of
from hvdcomp.arrays.types import AnyArray
from hvdcomp.communicators.horovod_ranks import HorovodRanks
from hvdcomp.errors import ConfigurationError

if TYPE_CHECKING:
    from hvdcomp.arrays.tensorflow_on_device import DeviceTensors

# Kind, element type and name of each collective in a group of collectives that run together. Horovod identifies a
# collective by the name of its node in a graph; without a graph, all allreduces would have the same name. Therefore one
# graph runs the whole group. The graph is created once for each signature, and accepts arrays of any length. A call of
# the graph starts all collectives, and waits for all of them.
Signature = tuple[tuple[str, tf.DType, str], ...]


@dataclass(eq=False)
class _Collective:
    kind: str
    array: AnyArray
    name: str
    result: AnyArray | None = None


class HorovodTensorFlowCommunicator(HorovodRanks):
    """Runs collectives among the ranks of a Horovod process set. By default, this process set has all ranks.

    Starting a collective only adds the collective to a list. When the engine waits for a collective in the list, all
    collectives in the list run together. A broadcast is an exception, and is possible only for NumPy arrays. A
    broadcast begins at once in a thread, and may continue during the next step.

    Attributes:
        on_device: converter between PyTorch tensors on a GPU and TensorFlow's tensors; None if all arrays are NumPy
            arrays.
    """

    def __init__(self, process_set: Any = None) -> None:
        _require_threads()
        self.on_device: DeviceTensors | None = None
        super().__init__(hvd, process_set or global_process_set)
        self._next: list[_Collective] = []
        self._operation = cache(self._make_operation)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hvdcomp")  # for broadcasts

    def _of(self, process_set: Any) -> HorovodTensorFlowCommunicator:
        part = HorovodTensorFlowCommunicator(process_set)
        part.on_device = self.on_device
        return part

    def renewed(self) -> HorovodTensorFlowCommunicator:
        self._thread.shutdown(wait=False, cancel_futures=True)
        communicator = super().renewed()
        assert isinstance(communicator, HorovodTensorFlowCommunicator)
        return communicator

    def gather_bytes(self, own: np.ndarray, name: str) -> AnyArray:
        return self.wait(self.start_allgather(own, name))

    def start_allreduce(self, array: AnyArray, op: str, name: str) -> _Collective:
        return self._with_next(_Collective(op, array, name))

    def start_allgather(self, array: AnyArray, name: str) -> _Collective:
        return self._with_next(_Collective("allgather", array, name))

    def start_alltoall(self, array: AnyArray, name: str) -> _Collective:
        return self._with_next(_Collective("alltoall", array, name))

    def start_reducescatter(self, array: AnyArray, op: str, name: str) -> _Collective:
        return self._with_next(_Collective(f"reducescatter {op}", array, name))

    def start_broadcast(self, array: AnyArray, name: str) -> Future[AnyArray]:
        return self._thread.submit(self._broadcast, _Collective("broadcast", array, name))

    def wait(self, started: _Collective | Future[AnyArray]) -> AnyArray:
        if isinstance(started, Future):
            return started.result()
        if started.result is None:
            collectives, self._next = self._next, []
            self._run(collectives)
        return started.result

    def _with_next(self, collective: _Collective) -> _Collective:
        self._next.append(collective)
        return collective

    def _broadcast(self, collective: _Collective) -> AnyArray:
        self._run([collective])
        return collective.result

    def _run(self, collectives: Sequence[_Collective]) -> None:
        inputs = [collective.array for collective in collectives]
        on_device = None if isinstance(inputs[0], np.ndarray) else self.on_device
        tensors = list(map(tensor_of, inputs)) if on_device is None else on_device.tensors(inputs)
        signature = tuple(
            (collective.kind, tensor.dtype, collective.name)
            for collective, tensor in zip(collectives, tensors, strict=True)
        )
        try:
            results = self._operation(signature)(*tensors)
        except tf.errors.OpError as error:
            # This is the error class that Horovod for PyTorch raises. Horovod's elastic mode for TensorFlow recognizes
            # a failure by the name of an operation in the message, such as HorovodAllreduce.
            raise HorovodInternalError(f"HorovodAllreduce or another collective failed: {error.message}") from error
        arrays = map(array_of, results) if on_device is None else on_device.arrays(results)
        for collective, array in zip(collectives, arrays, strict=True):
            collective.result = array
            if collective.kind in ("allgather", "alltoall"):
                length = collective.array.shape[0] // (self.world_size if collective.kind == "alltoall" else 1)
                self.check_gathered(array.shape[0], length, collective.name)
                collective.result = array.reshape(self.world_size, length)

    def _make_operation(self, signature: Signature) -> Callable[..., list[tf.Tensor]]:
        def operation(*tensors: tf.Tensor) -> list[tf.Tensor]:
            return [self._node(kind, tensor, name) for (kind, _, name), tensor in zip(signature, tensors, strict=True)]

        specs = [tf.TensorSpec([None], dtype) for _, dtype, _ in signature]
        return tf.function(operation, input_signature=specs, autograph=False).get_concrete_function()

    def _node(self, kind: str, tensor: tf.Tensor, name: str) -> tf.Tensor:
        options: dict[str, Any] = {"name": name, "process_set": self._process_set, "ignore_name_scope": True}
        if kind == "allgather":
            return hvd.allgather(tensor, **options)
        if kind == "alltoall":
            return hvd.alltoall(tensor, **options)
        if kind.startswith("reducescatter"):
            return hvd.reducescatter(tensor, op=self._ops[kind.split()[1]], **options)
        if kind == "broadcast":
            return hvd.broadcast(tensor, self.root, **options)
        return hvd.allreduce(tensor, op=self._ops[kind], **options)


def _require_threads() -> None:
    """Raises ConfigurationError if TensorFlow has fewer than two inter-op threads. In a step, one thread waits for
    collectives that run in a second thread."""
    asked = os.environ.get("TF_NUM_INTEROP_THREADS", "")
    threads = (
        tf.config.threading.get_inter_op_parallelism_threads()
        or (int(asked) if asked.isdecimal() else 0)
        or len(os.sched_getaffinity(0))
    )
    if threads < 2:
        raise ConfigurationError(
            f"TensorFlow runs with {threads} inter-op thread, and gradient compression needs 2: call "
            "tf.config.threading.set_inter_op_parallelism_threads(2) before you use anything else of TensorFlow"
        )
