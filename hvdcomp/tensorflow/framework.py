"""The names that the core uses of TensorFlow: `hvdcomp.bindings.frameworks.Framework` says what each name means."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from hvdcomp.bindings.setup import Setup
from hvdcomp.tensorflow.names import by_name

if TYPE_CHECKING:
    from hvdcomp.tensorflow.binding import TensorFlowBinding

__all__ = ["by_name"]  # one of the names that the core asks for

TITLE = "TensorFlow"
ARGUMENT = "variables"
EXAMPLE = "variables=model.trainable_variables"
SCALER = "a Keras LossScaleOptimizer"


def owns_gradient(gradient: Any) -> bool:
    return type(gradient).__module__.partition(".")[0] == "tensorflow"


def owns_optimizer(optimizer: Any) -> bool:
    return hasattr(type(optimizer), "apply_gradients")  # Keras and TensorFlow 1 have many kinds


def owns_scaler(scaler: Any) -> bool:
    return hasattr(type(scaler), "loss_scale")


def is_model(given: Any) -> bool:
    return hasattr(type(given), "trainable_variables")


def check_optimizer(optimizer: Any) -> None:
    """Any will do until a learning rate is asked of it."""


def prepare(kind: type) -> None:
    if _is_imported():
        from hvdcomp.tensorflow.caller import refuse_to_be_traced

        refuse_to_be_traced()


def check_wrapping() -> None:
    # Horovod's optimizer hashes the compression when it is made; one of Keras 3 never calls it again.
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
