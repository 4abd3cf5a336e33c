"""TensorFlow's implementation of `hvdcomp.bindings.frameworks.Framework`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from hvdcomp.bindings.setup import Setup
from hvdcomp.tensorflow.names import by_name

if TYPE_CHECKING:
    from hvdcomp.tensorflow.binding import TensorFlowBinding

__all__ = ["by_name"]  # the core uses this name

TITLE = "TensorFlow"
ARGUMENT = "variables"
EXAMPLE = "variables=model.trainable_variables"
SCALER = "a Keras LossScaleOptimizer"


def owns_gradient(gradient: Any) -> bool:
    return type(gradient).__module__.partition(".")[0] == "tensorflow"


def owns_optimizer(optimizer: Any) -> bool:
    return hasattr(type(optimizer), "apply_gradients")  # there are many optimizer classes in Keras and TensorFlow 1


def owns_scaler(scaler: Any) -> bool:
    return hasattr(type(scaler), "loss_scale")


def is_model(value: Any) -> bool:
    return hasattr(type(value), "trainable_variables")


def check_optimizer(optimizer: Any) -> None:
    """Accepts any optimizer. The optimizer's learning rate is checked later, when it is read."""


def prepare(kind: type) -> None:
    if _is_imported():
        from hvdcomp.tensorflow.caller import refuse_to_be_traced

        refuse_to_be_traced()


def check_wrapping() -> None:
    # This function is called when Horovod's optimizer computes the hash of the `Compression`. With Keras 3, Horovod
    # never calls `compress`, so this is the only chance to refuse the optimizer.
    if _is_imported():
        from hvdcomp.tensorflow.caller import refuse_keras_3_caller

        refuse_keras_3_caller()


def can_bind(parameters: Any, optimizer: Any) -> bool:
    return parameters is not None or optimizer is not None


def make_binding(setup: Setup, gradient: Any) -> TensorFlowBinding:
    from hvdcomp.tensorflow.binding import TensorFlowBinding

    return TensorFlowBinding(setup, gradient)


def _is_imported() -> bool:
    return sys.modules.get("tensorflow") is not None
