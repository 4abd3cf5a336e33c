"""`CompressedAdam` for Keras: AdamW whose momentum can be sent compressed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import tensorflow as tf
import tf_keras

from hvdcomp.bindings.adam import check_freezing
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.errors import ConfigurationError


@dataclass(frozen=True)
class Momentum:
    """What a variable's gradient is sent with.

    Attributes:
        mean: of the gradients so far, as Adam has it; the same on all ranks, and in the variable's shape.
        weight: by which it is multiplied before it is added to a gradient.
    """

    mean: tf.Variable
    weight: float
    sent_always: ClassVar[bool] = False


@tf_keras.utils.register_keras_serializable(package="hvdcomp")
class CompressedAdam(tf_keras.optimizers.AdamW):
    """AdamW that stops to adapt its second moment, so that the ranks can exchange momenta in place of gradients.

    `hvdcomp.torch.CompressedAdam` says how, and why. Horovod's optimizer finds it by itself; with tapes give it to
    `hvdcomp.Compression(..., optimizer=optimizer)`.

        optimizer = hvdcomp.tensorflow.CompressedAdam(6e-4, freeze_after=1500)
        optimizer = hvd.DistributedOptimizer(optimizer, compression=hvdcomp.Compression(hvdcomp.EFSignSGD()))

    Args:
        learning_rate, options: as of `tf_keras.optimizers.AdamW`, but for `amsgrad`.
        freeze_after: steps before the second moments are frozen; 15 to 25 % of the training.
        warm_up, floor: as of `hvdcomp.torch.CompressedAdam`.

    Raises:
        ConfigurationError: without `freeze_after`, or for one that is no number of steps; for a floor that is no share;
            for `amsgrad`.
        SpecError: for a `warm_up` that is no compressor.
    """

    def __init__(
        self,
        learning_rate: Any = 1e-3,
        *,
        freeze_after: int | None = None,
        warm_up: str = "none",
        floor: float = 0.01,
        name: str = "CompressedAdam",
        **options: Any,
    ) -> None:
        check_freezing(freeze_after, floor)
        if options.get("amsgrad"):
            raise ConfigurationError("CompressedAdam: amsgrad=True has no meaning where the second moment is frozen")
        super().__init__(learning_rate, name=name, **options)
        self.freeze_after = int(freeze_after or 0)
        self.compressor_before = str(parse_compressor(warm_up))
        self.floor = floor

    @property
    def frozen(self) -> bool:
        """Whether the next step is one with frozen second moments."""
        return int(self.iterations) >= self.freeze_after

    def momentum(self, variable: tf.Variable) -> Momentum:
        """What the gradient of a variable is to be sent with, in steps with frozen second moments."""
        return Momentum(self._momentums[self._place(variable)], self.beta_1 / (1 - self.beta_1))

    def update_step(self, gradient: Any, variable: tf.Variable) -> None:
        """As of `tf_keras.optimizers.AdamW`."""
        place, dtype = self._place(variable), variable.dtype
        m, v = self._momentums[place], self._velocities[place]
        gradient = tf.convert_to_tensor(gradient)  # also of rows
        step, last = self.iterations + 1, tf.minimum(self.iterations + 1, self.freeze_after)
        of_first = 1 - tf.pow(tf.cast(self.beta_1, dtype), tf.cast(step, dtype))
        of_second = 1 - tf.pow(tf.cast(self.beta_2, dtype), tf.cast(last, dtype))
        m.assign_add((gradient - m) * (1 - self.beta_1))
        # An element without a gradient so far gets no step, whatever noise compression makes of it.
        floored = tf.where(v == 0, tf.cast(math.inf, dtype), tf.maximum(v, tf.reduce_mean(v) * self.floor))
        frozen = tf.where(step == self.freeze_after + 1, floored, v)
        adapted = v + (tf.square(gradient) - v) * (1 - self.beta_2)
        v.assign(tf.where(step > self.freeze_after, frozen, adapted))
        rate = tf.cast(self.learning_rate, dtype) * tf.sqrt(of_second) / of_first
        variable.assign_sub((m * rate) / (tf.sqrt(v) + self.epsilon))

    def get_config(self) -> dict[str, Any]:
        """As of `tf_keras.optimizers.Optimizer`."""
        own = {"freeze_after": self.freeze_after, "warm_up": self.compressor_before, "floor": self.floor}
        return {**super().get_config(), **own}

    def _place(self, variable: tf.Variable) -> int:
        return int(self._index_dict[self._var_key(variable)])
