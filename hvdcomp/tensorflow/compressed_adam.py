"""`CompressedAdam` for Keras: a variant of AdamW that lets ranks exchange compressed momenta."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import tensorflow as tf
import tf_keras

from hvdcomp.bindings.adam import check_freezing, is_refresh, refreshes_among
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.errors import ConfigurationError


@dataclass(frozen=True)
class Momentum:
    """The momentum that is added to a variable's gradient before the exchange.

    Attributes:
        mean: Adam's first moment, with the shape of the variable. The moment is the same on all ranks.
        weight: the factor by which `mean` is multiplied when it is added to the gradient.
    """

    mean: tf.Variable
    weight: float
    sent_always: ClassVar[bool] = False


@tf_keras.utils.register_keras_serializable(package="hvdcomp")
class CompressedAdam(tf_keras.optimizers.AdamW):
    """AdamW that freezes its second moment, so that the ranks can exchange momenta instead of gradients.

    `hvdcomp.torch.CompressedAdam` documents the method. With Horovod's optimizer, hvdcomp finds this optimizer itself.
    With a tape, pass it as `hvdcomp.Compression(..., optimizer=optimizer)`.

        optimizer = hvdcomp.tensorflow.CompressedAdam(6e-4, freeze_after=1500)
        optimizer = hvd.DistributedOptimizer(optimizer, compression=hvdcomp.Compression(hvdcomp.EFSignSGD()))

    Args:
        learning_rate, options: the arguments of `tf_keras.optimizers.AdamW`, without `amsgrad`.
        freeze_after: the number of steps before second moments are frozen. Use 15 to 25 % of the steps of the training
            run.
        warm_up, floor, refreshes_per_gap: settings that `hvdcomp.torch.CompressedAdam` describes.

    Raises:
        ConfigurationError: if `freeze_after` is missing; if `freeze_after`, `floor` or `refreshes_per_gap` is invalid;
            if `amsgrad` is True; or if `local_steps` is not 1, because only PyTorch supports local steps.
        SpecError: if `warm_up` is not a compressor.
    """

    def __init__(
        self,
        learning_rate: Any = 1e-3,
        *,
        freeze_after: int | None = None,
        warm_up: str = "none",
        floor: float = 0.01,
        refreshes_per_gap: int | None = None,
        name: str = "CompressedAdam",
        **options: Any,
    ) -> None:
        check_freezing(freeze_after, floor, refreshes_per_gap)
        _refuse_local_steps(options)
        if options.get("amsgrad"):
            raise ConfigurationError(
                "CompressedAdam: amsgrad=True is not allowed, because it has no meaning once the second moment is "
                "frozen; leave amsgrad out"
            )
        super().__init__(learning_rate, name=name, **options)
        self.freeze_after = int(freeze_after or 0)
        self.compressor_before = str(parse_compressor(warm_up))
        self.floor = floor
        self.refreshes_per_gap = refreshes_per_gap

    @property
    def frozen(self) -> bool:
        """Whether second moments are frozen in the next step."""
        return int(self.iterations) >= self.freeze_after

    @property
    def refreshes(self) -> bool:
        """Whether the next step refreshes frozen second moments."""
        return self.refreshes_at(int(self.iterations))

    def refreshes_at(self, step: int) -> bool:
        """Whether a step, counted from 0, refreshes frozen second moments."""
        return is_refresh(step, self.freeze_after, self.refreshes_per_gap)

    def sends_momenta(self) -> tf.Tensor:
        """Whether the ranks exchange compressed momenta in the next step. The gradients of such a step contain the
        noise of compression. The result can be used in a graph."""
        frozen = self.iterations >= self.freeze_after
        if self.refreshes_per_gap is None:
            return frozen
        return tf.logical_and(frozen, tf.logical_not(self._scheduled(self.iterations + 1)))

    def momentum(self, variable: tf.Variable) -> Momentum:
        """The momentum that is added to a variable's gradient in steps with frozen second moments."""
        return Momentum(self._momentums[self._place(variable)], self.beta_1 / (1 - self.beta_1))

    def update_step(self, gradient: Any, variable: tf.Variable) -> None:
        """Updates one variable, as `tf_keras.optimizers.AdamW` does."""
        place, dtype = self._place(variable), variable.dtype
        m, v = self._momentums[place], self._velocities[place]
        gradient = tf.convert_to_tensor(gradient)  # also converts IndexedSlices
        step, last = self.iterations + 1, tf.minimum(self.iterations + 1, self.freeze_after)
        frozen = tf.where(step == self.freeze_after + 1, self._with_floor(v), v)
        if self.refreshes_per_gap is not None:
            finite = tf.where(tf.math.is_inf(frozen), tf.zeros_like(frozen), frozen)
            frozen = tf.where(self._scheduled(step), self._with_floor(self._adapted(finite, gradient)), frozen)
            before = refreshes_among(self.freeze_after, self.refreshes_per_gap)
            last += tf.maximum(self._refreshes_among(step) - before, 0)
        of_first = 1 - tf.pow(tf.cast(self.beta_1, dtype), tf.cast(step, dtype))
        of_second = 1 - tf.pow(tf.cast(self.beta_2, dtype), tf.cast(last, dtype))
        m.assign_add((gradient - m) * (1 - self.beta_1))
        v.assign(tf.where(step > self.freeze_after, frozen, self._adapted(v, gradient)))
        rate = tf.cast(self.learning_rate, dtype) * tf.sqrt(of_second) / of_first
        variable.assign_sub((m * rate) / (tf.sqrt(v) + self.epsilon))

    def get_config(self) -> dict[str, Any]:
        """Returns the settings of the optimizer, as `tf_keras.optimizers.Optimizer` does."""
        own = {"freeze_after": self.freeze_after, "warm_up": self.compressor_before, "floor": self.floor}
        return {**super().get_config(), **own, "refreshes_per_gap": self.refreshes_per_gap}

    def _adapted(self, v: Any, gradient: tf.Tensor) -> tf.Tensor:
        return v + (tf.square(gradient) - v) * (1 - self.beta_2)

    def _with_floor(self, v: Any) -> tf.Tensor:
        """The second moment that is used after freezing: `v` with the floor applied."""
        # The noise of compression must not change an element that has had no gradient.
        return tf.where(v == 0, tf.cast(math.inf, v.dtype), tf.maximum(v, tf.reduce_mean(v) * self.floor))

    def _scheduled(self, step: tf.Tensor) -> tf.Tensor:
        """Whether the schedule has a refresh in step `step`, counted from 1."""
        return self._refreshes_among(step) > self._refreshes_among(step - 1)

    def _refreshes_among(self, steps: tf.Tensor) -> tf.Tensor:
        """The number of refreshes in the first `steps` steps. The result is the same as that of the function
        `refreshes_among`, but it is computed in a graph."""
        begun = (steps - 1) // self.refreshes_per_gap + 1
        doublings = tf.reduce_sum(tf.cast(begun >= 2 ** tf.range(1, 62, dtype=steps.dtype), steps.dtype))
        gap = 2**doublings
        since = steps - 1 - self.refreshes_per_gap * (gap - 1)
        return tf.where(steps > 0, self.refreshes_per_gap * doublings + since // gap + 1, 0)

    def _place(self, variable: tf.Variable) -> int:
        return int(self._index_dict[self._var_key(variable)])


def _refuse_local_steps(options: dict[str, Any]) -> None:
    """Removes `local_steps` from the options. Raises ConfigurationError if its value is not 1."""
    local_steps = options.pop("local_steps", 1)
    if local_steps != 1:
        raise ConfigurationError(
            f"CompressedAdam: local_steps={local_steps!r} is not allowed in Keras, because fit evaluates, saves and "
            "stops at times when the ranks' weights would differ. Omit local_steps, or train in PyTorch with "
            "hvdcomp.torch.CompressedAdam"
        )
