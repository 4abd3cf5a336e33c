"""Horovod's collectives for TensorFlow, on NumPy arrays and, on a GPU, on arrays of PyTorch."""

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
from hvdcomp.arrays.types import Array
from hvdcomp.communicators.horovod_ranks import HorovodRanks
from hvdcomp.errors import ConfigurationError

if TYPE_CHECKING:
    from hvdcomp.arrays.tensorflow_on_device import DeviceTensors

# Kind, element type and name of each collective. Horovod identifies an operation by its node's name, which only graphs
# have; run eagerly, all allreduces would have the same name. So the collectives of a round are one graph, made once for
# its signature and for any length. Calling it starts all collectives and waits for all.
Signature = tuple[tuple[str, tf.DType, str], ...]


@dataclass(eq=False)
class _Collective:
    kind: str
    array: Array
    name: str
    result: Array | None = None


class HorovodTensorFlowCommunicator(HorovodRanks):
    """The ranks of a Horovod process set (all ranks by default), reached through named operations.

    All collectives of a step start together, when the engine waits for the first of them. A broadcast (only of NumPy
    arrays) starts at once, and may continue during the next step.

    Attributes:
        on_device: converter of PyTorch arrays; None if there are none.
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

    def gather_bytes(self, own: np.ndarray, name: str) -> Array:
        return self.wait(self.start_allgather(own, name))

    def start_allreduce(self, array: Array, op: str, name: str) -> _Collective:
        return self._with_next(_Collective(op, array, name))

    def start_allgather(self, array: Array, name: str) -> _Collective:
        return self._with_next(_Collective("allgather", array, name))

    def start_alltoall(self, array: Array, name: str) -> _Collective:
        return self._with_next(_Collective("alltoall", array, name))

    def start_reducescatter(self, array: Array, op: str, name: str) -> _Collective:
        return self._with_next(_Collective(f"reducescatter {op}", array, name))

    def start_broadcast(self, array: Array, name: str) -> Future[Array]:
        return self._thread.submit(self._broadcast, _Collective("broadcast", array, name))

    def wait(self, started: _Collective | Future[Array]) -> Array:
        if isinstance(started, Future):
            return started.result()
        if started.result is None:
            collectives, self._next = self._next, []
            self._run(collectives)
        return started.result

    def _with_next(self, collective: _Collective) -> _Collective:
        self._next.append(collective)
        return collective

    def _broadcast(self, collective: _Collective) -> Array:
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
            # The error of PyTorch's Horovod. Elastic mode for TensorFlow recognises failures by an operation's name.
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
    """Requires two inter-op threads of TensorFlow: a step waits in one for collectives that run in the other."""
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
