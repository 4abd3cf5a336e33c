"""Finds the context of a gradient, because Horovod passes only a single tensor to a compressor.

While TensorFlow traces a step, Horovod calls `compress` for each gradient of a list. The list of gradients, the list of
variables, and the settings of the tape or optimizer are in the stack frames of the callers.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from hvdcomp.bindings.callers import caller_local
from hvdcomp.errors import ConfigurationError


class GradientsCall(NamedTuple):
    """One call of Horovod's function that averages a list of gradients.

    Attributes:
        gradients, variables: lists of equal length. A gradient may be None or tf.IndexedSlices.
        op: Horovod's reduction operation.
        process_set: the process set that Horovod uses.
        prescale_factor: the factor by which Horovod multiplies gradients before the sum.
        optimizer: the Keras optimizer that calls Horovod; None if a gradient tape calls it.
        loss_scale_optimizer: the LossScaleOptimizer around this optimizer; None if there is none.
        steps_per_execution: the number of steps that Keras makes in one call of its training function; 1 without Keras.
    """

    gradients: Sequence[Any]
    variables: Sequence[Any]
    op: int
    process_set: Any
    prescale_factor: float
    optimizer: Any
    loss_scale_optimizer: Any
    steps_per_execution: int


def gradients_call(tensor: tf.Tensor) -> GradientsCall:
    """Finds the call of Horovod for which a gradient is compressed.

    Raises:
        ConfigurationError: if the caller is neither Horovod's tape nor its optimizer, or if XLA compiles the call.
    """
    gradients = caller_local("grads", lambda value: _is_list(value) and any(element is tensor for element in value))
    variables = caller_local("vars", lambda value: _is_list(value) and len(value) == len(gradients or ()))
    if gradients is None or variables is None:
        raise ConfigurationError(
            f"hvdcomp.Compression was given {tensor!r} outside of hvd.DistributedGradientTape and "
            "hvd.DistributedOptimizer; use hvdcomp.Compression only as the compression= argument of these two"
        )
    _refuse_compilation()
    return GradientsCall(
        gradients=gradients,
        variables=variables,
        op=caller_local("op", lambda value: isinstance(value, int)),
        process_set=caller_local("process_set", lambda value: hasattr(value, "process_set_id")),
        prescale_factor=caller_local("prescale_factor", lambda value: isinstance(value, float)),
        optimizer=caller_local("self", lambda value: is_optimizer(value) and not is_loss_scale_optimizer(value)),
        loss_scale_optimizer=caller_local("self", is_loss_scale_optimizer),
        steps_per_execution=_steps_per_execution(),
    )


def _steps_per_execution() -> int:
    model = caller_local("self", lambda value: getattr(value, "_steps_per_execution", None) is not None)
    # The variable is read outside of the graph, because Python cannot read a TensorFlow variable while a function is
    # traced.
    with tf.init_scope():
        return 1 if model is None else int(model._steps_per_execution)


def refuse_keras_3(optimizer: Any) -> None:
    """Raises ConfigurationError for an optimizer of Keras 3. Horovod accepts such an optimizer, but never averages its
    gradients."""
    # The optimizer's class may also be a subclass of a Keras class.
    from_keras = any(kind.__module__.startswith("keras.") for kind in type(optimizer).__mro__)
    if from_keras and int(getattr(sys.modules.get("keras"), "__version__", "0").split(".")[0]) >= 3:
        raise ConfigurationError(
            f"{type(optimizer).__name__} is an optimizer of Keras 3. Horovod does not work with Keras 3, but raises no "
            "error: every rank trains separately. Install tf_keras, and set TF_USE_LEGACY_KERAS=1 before you import "
            "TensorFlow, or use tf_keras.optimizers"
        )


def refuse_keras_3_caller() -> None:
    """Calls `refuse_keras_3` for the optimizer that Horovod is about to wrap."""
    refuse_keras_3(caller_local("optimizer", lambda value: value is not None, "create_distributed_optimizer"))


def refuse_to_be_traced() -> None:
    """Raises ConfigurationError while TensorFlow traces a function, because TensorFlow may trace the same function
    again."""
    # In tf.init_scope, TensorFlow executes eagerly, although `tf.inside_function` returns True.
    if tf.inside_function() and not tf.executing_eagerly():
        raise ConfigurationError(
            "hvdcomp.Compression was made while TensorFlow was tracing a function. Each trace would make a new "
            "Compression, and the residuals of the previous Compression would be lost. Make the Compression once, "
            "outside of the tf.function, and pass it to Horovod inside of the tf.function"
        )


def is_optimizer(candidate: Any) -> bool:
    """Whether an object is an optimizer of Keras or TensorFlow 1."""
    return hasattr(type(candidate), "apply_gradients")


def is_loss_scale_optimizer(candidate: Any) -> bool:
    """Whether an object is a Keras LossScaleOptimizer."""
    return is_optimizer(candidate) and hasattr(type(candidate), "get_scaled_loss")


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _refuse_compilation() -> None:
    compiled = caller_local("self", lambda value: getattr(value, "_jit_compile", False) is True and callable(value))
    if compiled is not None:
        raise ConfigurationError(
            "jit_compile=True compiles the step with XLA, which can compile neither Horovod's operations nor gradient "
            "compression. Leave jit_compile=False in model.compile or tf.function. If you want XLA, compile a function "
            "with only the forward pass"
        )
