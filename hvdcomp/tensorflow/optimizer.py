"""Reads the settings of Keras optimizers, and multiplies their learning rate by a factor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from hvdcomp.errors import ConfigurationError


def unwrapped(optimizer: Any) -> Any:
    """The optimizer inside a LossScaleOptimizer. Any other optimizer is returned unchanged."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def learning_rate_of(optimizer: Any) -> float:
    """The learning rate of the next step. If the optimizer has a schedule of learning rates, the result is the value of
    the schedule for the next step."""
    names = ("_learning_rate", "learning_rate", "_lr")  # optimizers of TensorFlow 1 use the name `_lr`
    rate = next((value for name in names if (value := getattr(optimizer, name, None)) is not None), None)
    if rate is None:
        kind = type(optimizer).__name__
        raise ConfigurationError(f"hvdcomp cannot read the learning rate of {kind}; use an optimizer of tf_keras")
    if callable(rate) and not isinstance(rate, tf.Variable):
        rate = rate(optimizer.iterations)
    return float(rate)


def momentum_of(optimizer: Any) -> str | None:
    """The momentum in the settings of an optimizer, as text; None if it has no momentum."""
    if optimizer is None or not hasattr(optimizer, "get_config"):
        return None
    config = optimizer.get_config()
    for key in ("momentum", "beta_1"):
        value = config.get(key)
        if isinstance(value, int | float) and value:
            return f"{key}={value}"
    return None


class ScaledRate:
    """Makes an optimizer apply gradients with a multiple of its learning rate. Outside of these updates, the learning
    rate has its usual value.

    Create this object before a function that applies gradients is traced. The multiple may change later.

    Raises:
        ConfigurationError: if the optimizer is not an optimizer of tf_keras.
    """

    def __init__(self, optimizer: Any) -> None:
        self._factor = tf.Variable(1.0, trainable=False, name="hvdcomp_learning_rate_factor")
        self._of_next_step = 1.0
        self._legacy = hasattr(optimizer, "_decayed_lr")
        if self._legacy:  # legacy optimizers read their rate with this method
            own_rate = optimizer._decayed_lr
            optimizer._decayed_lr = lambda dtype: own_rate(dtype) * tf.cast(self._factor, dtype)
        elif hasattr(optimizer, "update_step"):
            self._scale_updates(optimizer, optimizer.update_step)
        else:
            raise ConfigurationError(
                "a policy that changes the batch size also scales the learning rate, and hvdcomp cannot do this with a "
                f"{type(optimizer).__name__}; use an optimizer of tf_keras"
            )

    def set(self, factor: float) -> None:
        """Sets a new multiple, which is used from the next exchange on.

        If the gradients of a step are already exchanged, the step keeps the old multiple. A legacy optimizer uses the
        new multiple immediately, because it reads its rate before it waits for gradients.
        """
        self._of_next_step = factor
        if self._legacy:
            self.begin_step()

    def begin_step(self) -> None:
        """Fixes the multiple of a step. Call this method when the exchange of the step's gradients begins.

        If a decision of the policy is applied after this call (for example for a checkpoint), the decision changes the
        multiple of the next step, because other ranks may apply the decision later.
        """
        self._factor.assign(self._of_next_step)

    def _scale_updates(self, optimizer: Any, update_step: Callable[..., Any]) -> None:
        def scaled_update_step(gradient: Any, variable: Any) -> Any:
            arrived = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
            with tf.control_dependencies([arrived]):  # once the gradient has arrived, the multiple of the step is set
                factor = self._factor.read_value()
            with self._in_place(optimizer, factor):
                return update_step(gradient, variable)

        optimizer.update_step = scaled_update_step

    @contextmanager
    def _in_place(self, optimizer: Any, factor: tf.Tensor) -> Iterator[None]:
        # `where` is the name of the attribute that the optimizer's property `learning_rate` reads.
        scheduled = callable(optimizer._learning_rate) and not isinstance(optimizer._learning_rate, tf.Variable)
        where = "_current_learning_rate" if scheduled else "_learning_rate"
        own = getattr(optimizer, where)
        # The attribute is set without the optimizer's own `__setattr__`, which would track a variable.
        object.__setattr__(optimizer, where, own * tf.cast(factor, own.dtype))
        try:
            yield
        finally:
            object.__setattr__(optimizer, where, own)
