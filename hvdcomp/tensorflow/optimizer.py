"""Settings of Keras optimizers, and a factor of their learning rate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from hvdcomp.errors import ConfigurationError


def unwrapped(optimizer: Any) -> Any:
    """The optimizer inside of a LossScaleOptimizer, or the optimizer itself."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def learning_rate_of(optimizer: Any) -> float:
    """The learning rate of the next step, from a schedule too."""
    names = ("_learning_rate", "learning_rate", "_lr")  # the last one of optimizers of TensorFlow 1
    rate = next((value for name in names if (value := getattr(optimizer, name, None)) is not None), None)
    if rate is None:
        kind = type(optimizer).__name__
        raise ConfigurationError(f"hvdcomp cannot read the learning rate of {kind}; use an optimizer of tf_keras")
    if callable(rate) and not isinstance(rate, tf.Variable):
        rate = rate(optimizer.iterations)
    return float(rate)


def momentum_of(optimizer: Any) -> str | None:
    """The momentum in an optimizer's settings, as text; None without one."""
    if optimizer is None or not hasattr(optimizer, "get_config"):
        return None
    config = optimizer.get_config()
    for key in ("momentum", "beta_1"):
        value = config.get(key)
        if isinstance(value, int | float) and value:
            return f"{key}={value}"
    return None


class ScaledRate:
    """Makes an optimizer apply gradients at a multiple of its learning rate, whose value does not change otherwise.

    It must be made before a function that applies gradients is traced; the multiple may change later.

    Raises:
        ConfigurationError: for an optimizer that is not of tf_keras.
    """

    def __init__(self, optimizer: Any) -> None:
        self._factor = tf.Variable(1.0, trainable=False, name="hvdcomp_learning_rate_factor")
        self._of_next_step = 1.0
        self._legacy = hasattr(optimizer, "_decayed_lr")
        if self._legacy:  # they read their rate by this method
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
        """Sets the new multiple, from the next exchange on.

        A step whose gradients are already exchanged keeps the old multiple.

        A legacy optimizer uses it at once, as it reads its rate before it waits for gradients.
        """
        self._of_next_step = factor
        if self._legacy:
            self.begin_step()

    def begin_step(self) -> None:
        """Fixes the multiple of a step. Call it when the exchange of the step's gradients begins.

        A decision applied after that, as for a checkpoint, is for the next step, as other ranks may apply it later.
        """
        self._factor.assign(self._of_next_step)

    def _scale_updates(self, optimizer: Any, update_step: Callable[..., Any]) -> None:
        def scaled_update_step(gradient: Any, variable: Any) -> Any:
            arrived = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
            with tf.control_dependencies([arrived]):  # the step has begun, and has set the multiple
                factor = self._factor.read_value()
            with self._in_place(optimizer, factor):
                return update_step(gradient, variable)

        optimizer.update_step = scaled_update_step

    @contextmanager
    def _in_place(self, optimizer: Any, factor: tf.Tensor) -> Iterator[None]:
        # The attribute that the property of the rate reads.
        scheduled = callable(optimizer._learning_rate) and not isinstance(optimizer._learning_rate, tf.Variable)
        where = "_current_learning_rate" if scheduled else "_learning_rate"
        own = getattr(optimizer, where)
        object.__setattr__(optimizer, where, own * tf.cast(factor, own.dtype))  # not as a tracked variable
        try:
            yield
        finally:
            object.__setattr__(optimizer, where, own)
