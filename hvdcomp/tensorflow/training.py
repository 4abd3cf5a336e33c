"""The base of all TensorFlow bindings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from hvdcomp.arrays.types import AnyArray
from hvdcomp.bindings.base import Binding
from hvdcomp.bindings.setup import Setup
from hvdcomp.communicators.ranks import Ranks
from hvdcomp.compressors.protocol import TensorInfo
from hvdcomp.errors import ConfigurationError
from hvdcomp.policies.decisions import BatchSize
from hvdcomp.policies.request import Statistic
from hvdcomp.tensorflow.compressed_adam import CompressedAdam, Momentum
from hvdcomp.tensorflow.layout import matrix_of
from hvdcomp.tensorflow.optimizer import ScaledRate, learning_rate_of, momentum_of, unwrapped

if TYPE_CHECKING:
    from hvdcomp.arrays.tensorflow_on_device import DeviceTensors


class TensorFlowTraining(Binding):
    """Ties one `Compression` to variables of TensorFlow.

    Args:
        setup: the `Compression`, and what the user passed to it. `setup.grad_scaler` and `setup.optimizer` are Keras
            objects. Each of them is None if it is unknown.
        variables: all trained variables, by name.
        communicator: the communicator of the ranks that exchange gradients.

    Attributes:
        steps_made: the number of steps that the optimizer has made before the current step. The number is set only for
            a `CompressedAdam`.
    """

    overlaps_with_policy = False
    results_in_place = False  # gradients must not change, because other operations may read them later
    _on_device: DeviceTensors | None = None
    steps_made = 0

    def __init__(self, setup: Setup, variables: Mapping[str, tf.Variable], communicator: Ranks) -> None:
        self._variables = variables
        self._grad_scaler = setup.grad_scaler
        self._optimizer = None if setup.optimizer is None else unwrapped(setup.optimizer)
        self._scaled: ScaledRate | None = None
        self._terms: dict[str, AnyArray] = {}  # the momenta that were added to the gradients of this step
        if isinstance(self._optimizer, CompressedAdam):
            b1 = float(self._optimizer.beta_1)
            setup.compression.settings.require_momenta(self._optimizer.compressor_before, 1, b1)
        tensors = [_describe(name, variable) for name, variable in variables.items()]
        super().__init__(setup, tensors, communicator, np.zeros((0,), np.float32))

    def means_of(self, names: Sequence[str], gradients: Sequence[AnyArray]) -> list[AnyArray]:
        """Runs `run_engine`. Returns the means with the shapes of the variables, in the order of `names`."""
        tensors = [self.engine.tensors[name] for name in names]
        by_name = {tensor.name: x.reshape(tensor.shape) for tensor, x in zip(tensors, gradients, strict=True)}
        self._add_momenta(by_name)
        results = self.run_engine(by_name)
        return [results[tensor.name].reshape(tensor.own_shape) for tensor in tensors]

    def _add_momenta(self, gradients: dict[str, AnyArray]) -> None:
        """Adds momenta to gradients. The sums are new arrays."""
        names = self.units.momenta.keys() & gradients.keys()
        self._terms = {name: self._array_of(name) * self._weight_of(name) for name in names}
        for name, term in self._terms.items():
            gradients[name] = gradients[name] + term

    def _weight_of(self, name: str) -> float:
        return float(self.units.momenta[name].weight * self.units.of_momenta)

    def _array_of(self, name: str) -> AnyArray:
        mean = self.units.momenta[name].mean
        array = mean.numpy() if self._on_device is None else self._on_device.arrays([mean.read_value()])[0]
        return array.reshape(self.engine.tensors[name].shape)

    # Methods of `Training`.

    def take_back(self, means: Mapping[str, AnyArray]) -> None:
        for name, term in self._terms.items():
            means[name][...] -= term
        self._terms = {}

    @property
    def optimizer(self) -> Any:
        return self._optimizer

    def warm_up(self) -> str | None:
        optimizer = self._optimizer
        if not isinstance(optimizer, CompressedAdam) or self.steps_made >= optimizer.freeze_after:
            return None
        return optimizer.compressor_before

    def refreshes(self) -> bool:
        optimizer = self._optimizer
        return isinstance(optimizer, CompressedAdam) and optimizer.refreshes_at(self.steps_made)

    def momenta_of_step(self) -> Mapping[str, Momentum]:
        optimizer = self._optimizer
        if not isinstance(optimizer, CompressedAdam) or self.steps_made < optimizer.freeze_after:
            return {}
        return {name: optimizer.momentum(self._variables[name]) for name in self.trained()}

    def checksums(self, names: Sequence[str]) -> list[int]:
        return [_checksum(self._variables[name]) for name in names]

    def learning_rates(self) -> tuple[float, ...]:
        assert self.coordinator is not None
        if self._optimizer is None and Statistic.LEARNING_RATES not in self.coordinator.policy.first_request.ever:
            return ()
        return (learning_rate_of(self._known_optimizer()),)

    def follow_batch_size(self, batch_size: BatchSize) -> None:
        if self._scaled is None:
            self._scaled = ScaledRate(self._known_optimizer())
        self._scaled.set(batch_size.learning_rate_factor)
        if self.communicator.world_size == 1:  # with one rank, there may be no exchange that calls `begin_step`
            self._scaled.begin_step()

    def loss_scale(self) -> float | None:
        return None if self._grad_scaler is None else float(self._grad_scaler.loss_scale)

    def momentum_of_optimizer(self) -> str | None:
        return momentum_of(self._optimizer)

    def copy(self, array: AnyArray) -> AnyArray:
        return np.array(array) if self._on_device is None else self._on_device.to_host(array)

    def place(self, array: Any, name: str) -> AnyArray:
        on_host = np.array(array)  # states of earlier versions contain tensors
        tensor = self.engine.tensors[name]
        if on_host.shape == tensor.own_shape:  # states of earlier versions have this shape
            on_host = on_host.reshape(tensor.shape)
        return on_host if self._on_device is None else self._on_device.from_host(on_host)

    def _known_optimizer(self) -> Any:
        if self._optimizer is None:
            raise ConfigurationError(
                f"the policy {self.setup.compression.settings.policy} follows the learning rate of the optimizer, but "
                "a gradient tape has no optimizer; pass the optimizer, hvdcomp.Compression(..., optimizer=optimizer)"
            )
        return self._optimizer


def _describe(name: str, variable: tf.Variable) -> TensorInfo:
    dtype = variable.dtype.base_dtype.name  # gives float32 for float32_ref
    if variable.dtype.is_complex:
        raise ConfigurationError(
            f"variable {name!r} has type {dtype}, but gradient compression needs floating-point variables. Train the "
            "real and the imaginary part as two variables, and combine them with tf.complex"
        )
    shape = tuple(variable.shape)
    return TensorInfo(name, matrix_of(shape), dtype, in_framework=shape)


def is_readable(variable: tf.Variable) -> bool:
    """Whether Python can read a variable. A variable of TensorFlow 1 can only be read by its session."""
    return hasattr(variable, "numpy") and not tf.is_symbolic_tensor(getattr(variable, "handle", variable))


def _checksum(variable: tf.Variable) -> int:
    """The sum of the bit patterns of all elements, read as integers; 0 if the variable cannot be read."""
    if not is_readable(variable):
        return 0
    values = np.ascontiguousarray(variable.numpy())
    return int(values.view(f"u{values.itemsize}").sum(dtype=np.uint64))
