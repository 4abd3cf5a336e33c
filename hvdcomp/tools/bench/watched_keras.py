"""Times the parts of the steps of a user's training program in TensorFlow.

The module finds gradients in the results of `tf.GradientTape.gradient` and in the arguments of an optimizer's
`apply_gradients`. Keras's `fit`, and Horovod's tape and optimizer, also call these two functions. TensorFlow traces
both functions once, and then runs a graph. This module therefore adds operations to the graph. Some of these operations
read the clock as soon as certain tensors are computed. One operation at the end of a step passes the times to Python.
The training results do not change.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras
import torch

from hvdcomp.bindings import caller_local, kind_of, left_as_written
from hvdcomp.errors import ConfigurationError
from hvdcomp.tensorflow import by_name, matrix_of, refuse_keras_3
from hvdcomp.tools.bench.watched import Named, Watched, no_loss
from hvdcomp.tools.bench.workload import Workload
from hvdcomp.tools.train.options import SetupError

_KEPT = 8  # number of recent backward passes to keep, because the latest pass may belong to another model


@dataclass
class _Pass:
    """A backward pass, which was traced or run eagerly.

    Attributes:
        graph: the graph that contains the pass; None if it was run eagerly.
        begin: the time at which the pass began.
        gradients, ready: the gradient of each variable, and the time at which it was computed. The keys are the
            identities (`id`) of the variables.
    """

    graph: Any
    begin: tf.Tensor
    gradients: dict[int, Any]
    ready: dict[int, tf.Tensor]


class KerasWatch:
    """Times the steps of the first optimizer that takes a step.

    Args:
        steps, warm_up, then: the arguments of `hvdcomp.tools.bench.watched.Watch`. `then` may be called in a thread of
            TensorFlow.

    Attributes:
        seen, done: attributes that `hvdcomp.tools.bench.watched.Watch` describes.
        ended: the exception that a step raised; None if no step raised one. The exception is stored because TensorFlow
            replaces it with an error of its own.
    """

    def __init__(self, steps: int, warm_up: int, then: Callable[[Watched], None]) -> None:
        self._steps, self._warm_up, self._then = steps, warm_up, then
        self.seen = 0
        self.done = False
        self.ended: BaseException | None = None
        self._before: dict[Any, Callable[..., Any]] = {}  # the original methods, which `stop` restores
        self._passes: deque[_Pass] = deque(maxlen=_KEPT)
        self._optimizer: Any = None
        self._other_optimizers: set[str] = set()
        self._variables: list[Any] = []
        self._last: float | None = None
        self._samples: list[np.ndarray] = []

    def start(self) -> None:
        self._replace(tf.GradientTape, "gradient", self._gradient)
        optimizers = tf.keras.optimizers.Optimizer, tf_keras.optimizers.Optimizer, tf_keras.optimizers.legacy.Optimizer
        for kind in dict.fromkeys(optimizers):
            self._replace(kind, "apply_gradients", self._apply)

    def stop(self) -> None:
        """Restores the original functions, so that later traces contain no operations of this module."""
        for (owner, name), method in self._before.items():
            setattr(owner, name, method)
        self._before = {}

    def _replace(self, owner: type, name: str, by: Callable[..., Any]) -> None:
        self._before[owner, name] = method = getattr(owner, name)

        @left_as_written
        @wraps(method)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            try:
                return by(method, *args, **kwargs)
            except (SetupError, ConfigurationError) as error:
                self.ended = SetupError(str(error))
                raise

        setattr(owner, name, replaced)

    def _gradient(self, method: Callable[..., Any], tape: Any, target: Any, sources: Any, *args: Any, **kw: Any) -> Any:
        begin = _when_computed(target)
        result = method(tape, target, sources, *args, **kw)
        pairs = zip(tf.nest.flatten(sources), tf.nest.flatten(result), strict=True)
        gradients = {id(source): gradient for source, gradient in pairs if gradient is not None}
        ready = {variable: _when_computed(gradient) for variable, gradient in gradients.items()}
        self._passes.append(_Pass(_graphs()[0], begin, gradients, ready))
        return result

    def _apply(self, method: Callable[..., Any], optimizer: Any, grads_and_vars: Any, *args: Any, **kw: Any) -> Any:
        refuse_keras_3(optimizer)
        pairs = [*grads_and_vars]
        variables = [variable for gradient, variable in pairs if gradient is not None]
        ids = {id(variable) for variable in variables}
        passes = [backward for backward in self._passes if ids <= backward.gradients.keys()]
        if self._optimizer is None:
            self._optimizer, self._variables = optimizer, variables
        if optimizer is not self._optimizer:
            self._other_optimizers.add(type(optimizer).__name__)
        if optimizer is not self._optimizer or not passes:
            return method(optimizer, pairs, *args, **kw)
        backward = passes[-1]
        _check(backward, variables)
        exchanged = _when_computed([gradient for gradient, _ in pairs])
        result = method(optimizer, pairs, *args, **kw)
        stepped = _when_computed([variable.read_value() for variable in variables])
        keys = [id(variable) for variable in variables]
        read = tf.stack([backward.begin, exchanged, stepped, *(backward.ready[key] for key in keys)])
        tf.numpy_function(self._end_step, [read, *(backward.gradients[key] for key in keys)], [])
        return result

    def _end_step(self, read: np.ndarray, *gradients: np.ndarray) -> list[np.ndarray]:
        """Receives the times of a step: the start of the backward pass, the time at which the averaged gradients are
        ready, the end of the step, and the time at which each gradient was computed."""
        if self.done:
            return []
        self.seen += 1
        before, self._last = self._last, read[2]
        if before is not None and self.seen > self._warm_up:
            self._samples.append(np.array([before, *read]))
        if len(self._samples) == self._steps:
            self.stop()
            self.done = True
            try:
                self._then(self._watched(gradients))
            except BaseException as error:
                self.ended = error
                if not isinstance(error, SystemExit) or threading.current_thread() is threading.main_thread():
                    raise
                _end_program()
        return []

    def _watched(self, gradients: tuple[np.ndarray, ...]) -> Watched:
        before, begin, exchanged, stepped, *ready = np.array(self._samples).T
        computed = np.max(ready, axis=0)
        parts = [np.maximum(0, begin - before), computed - begin, exchanged - computed, stepped - exchanged]
        shares = (np.array(ready) - begin) / np.maximum(computed - begin, 1e-9)
        names = by_name(self._variables)
        parameters = {name: _parameter(gradient) for name, gradient in zip(names, gradients, strict=True)}
        # Horovod's helper, which adds up the gradients of several passes
        helper = getattr(self._optimizer, "_agg_helper", None)
        return Watched(
            Workload(Named(parameters), no_loss),
            kind_of(self._optimizer),
            np.array(parts).T,
            shares.T,
            getattr(helper, "backward_passes_per_step", 1),
            tuple(sorted(self._other_optimizers)),
        )


def _when_computed(tensors: Any) -> tf.Tensor:
    """An operation that returns the time, in seconds, at which tensors are computed."""
    inputs = [tensor for tensor in tf.nest.flatten(tensors) if tf.is_tensor(tensor)]
    with tf.control_dependencies(inputs), tf.device("CPU:0"):
        moment = tf.timestamp()
    if not tf.executing_eagerly():
        # A trace normally keeps all stateful operations in program order. However, a clock operation must wait only for
        # its tensors, and no operation may wait for a clock operation.
        order = caller_local("deps_ctx", lambda context: getattr(context, "_graph", None) is moment.graph)
        if order is not None:
            order.run_independently(moment.op)
    return moment


def _graphs() -> list[Any]:
    """The graph that is being traced, and the graphs that contain it; [None] in eager mode."""
    if tf.executing_eagerly():
        return [None]
    graphs = [tf.compat.v1.get_default_graph()]
    while (outer := getattr(graphs[-1], "outer_graph", None)) is not None:
        graphs.append(outer)
    return graphs


def _check(backward: _Pass, variables: list[Any]) -> None:
    """Raises SetupError if the times of the program's steps would be meaningless."""
    if backward.graph not in _graphs():
        raise SetupError(
            "the gradients are computed in one tf.function, but the optimizer is called outside of it. To profile the "
            "training, put both into one tf.function, or use Keras fit"
        )
    for variable in variables:
        if isinstance(backward.gradients[id(variable)], tf.IndexedSlices):
            raise SetupError(
                f"the gradient of {variable.name} is sparse, like the gradient of an embedding, but hvdcomp profile "
                "does not support sparse gradients. Profile the model with tf.one_hot and a matrix instead of the "
                "embedding"
            )
        if "GPU" in (variable.device or ""):
            raise SetupError(
                f"{variable.name} is on a GPU, where TensorFlow's clock shows when work was launched, not when it was "
                "finished. Profile the training in PyTorch, or measure with hvdcomp calibrate --device cuda"
            )


def _end_program() -> None:
    """Raises SystemExit in the main thread as soon as that thread runs Python code. If SystemExit were raised in one of
    TensorFlow's threads, TensorFlow would log its traceback as an error."""
    main = ctypes.c_ulong(threading.main_thread().ident or 0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(main, ctypes.py_object(SystemExit))


def _parameter(gradient: np.ndarray) -> torch.nn.Parameter:
    """A parameter of PyTorch with a copy of a gradient. The copy has the shape in which compressors get this
    gradient."""
    copy = torch.tensor(gradient.astype(np.float32)).to(getattr(torch, gradient.dtype.name))
    parameter = torch.nn.Parameter(torch.zeros_like(copy).reshape(matrix_of(gradient.shape)))
    parameter.grad = copy.reshape(parameter.shape)
    return parameter
