"""Horovod's collectives on TensorFlow tensors."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.tensorflow.mpi_ops import global_process_set

from hvdcomp.communicators.horovod_ranks import HorovodRanks
from hvdcomp.errors import ConfigurationError

# Horovod knows an operation by its node's name, which only a graph has: run eagerly, all allreduces would be one and
# the same to it. So each collective is a graph of one node, made once per name and element type, for any length.
# Calling it waits for its result; threads make that a start and a wait. A round has fewer collectives than these.
_THREADS = 16


class HorovodTensorFlowCommunicator(HorovodRanks):
    """The ranks of a Horovod process set (all ranks by default), reached through named operations."""

    def __init__(self, process_set: Any = None) -> None:
        _require_threads()
        super().__init__(hvd, process_set or global_process_set)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="hvdcomp")
        self._operation = cache(self._make_operation)

    def start_allreduce(self, array: tf.Tensor, op: str, name: str) -> Future[tf.Tensor]:
        return self._start(op, array, name)

    def start_allgather(self, array: tf.Tensor, name: str) -> Future[tf.Tensor]:
        return self._threads.submit(self._gather, self._operation("allgather", array.dtype, name), array, name)

    def start_broadcast(self, array: tf.Tensor, name: str) -> Future[tf.Tensor]:
        return self._start("broadcast", array, name)

    def wait(self, started: Future[tf.Tensor]) -> tf.Tensor:
        return started.result()

    def _gather(self, operation: Callable[[tf.Tensor], tf.Tensor], array: tf.Tensor, name: str) -> tf.Tensor:
        gathered = operation(array)
        self.check_gathered(gathered.shape[0], array.shape[0], name)
        return tf.reshape(gathered, (self.world_size, array.shape[0]))

    def _start(self, kind: str, array: tf.Tensor, name: str) -> Future[tf.Tensor]:
        return self._threads.submit(self._operation(kind, array.dtype, name), array)

    def _make_operation(self, kind: str, dtype: tf.DType, name: str) -> Callable[[tf.Tensor], tf.Tensor]:
        options: dict[str, Any] = {"name": name, "process_set": self._process_set, "ignore_name_scope": True}

        def operation(array: tf.Tensor) -> tf.Tensor:
            if kind == "allgather":
                return hvd.allgather(array, **options)
            if kind == "broadcast":
                return hvd.broadcast(array, self.root, **options)
            return hvd.allreduce(array, op=self._ops[kind], **options)

        signature = [tf.TensorSpec([None], dtype)]
        return tf.function(operation, input_signature=signature, autograph=False).get_concrete_function()


def _require_threads() -> None:
    """A step waits in one of TensorFlow's inter-op threads for collectives that run in another."""
    threads = tf.config.threading.get_inter_op_parallelism_threads() or len(os.sched_getaffinity(0))
    if threads < 2:
        raise ConfigurationError(
            f"TensorFlow runs with {threads} inter-op thread, and gradient compression needs 2: call "
            "tf.config.threading.set_inter_op_parallelism_threads(2) before anything else of TensorFlow"
        )
