"""What the TensorFlow cases share: a small network trained on data that differs between the ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
import tf_keras

import hvdcomp
from hvdcomp.tensorflow.binding import TensorFlowBinding
from tests.multirank.everywhere import assert_same_tensors, raised_everywhere

# What an error becomes that is raised while a graph runs, and not while it is made.
IN_GRAPH = tf.errors.InvalidArgumentError
Batch = tuple[np.ndarray, np.ndarray]


class Network(tf.Module):
    """Two matrices large enough to be compressed, and their biases; the same on all ranks."""

    def __init__(self, dtype: str = "float32", seed: int = 7) -> None:
        super().__init__()
        rng = np.random.default_rng(seed)

        def variable(name: str, *shape: int) -> tf.Variable:
            return tf.Variable(rng.normal(0, 0.12, shape), dtype=dtype, name=name)

        self.first, self.first_bias = variable("first", 64, 32), variable("first_bias", 32)
        self.second, self.second_bias = variable("second", 32, 40), variable("second_bias", 40)

    @property
    def variables_in_order(self) -> list[tf.Variable]:
        return [self.first, self.first_bias, self.second, self.second_bias]

    def __call__(self, inputs: Any) -> tf.Tensor:
        inputs = tf.cast(inputs, self.first.dtype)
        hidden = tf.nn.relu(inputs @ self.first + self.first_bias)
        return hidden @ self.second + self.second_bias


def loss_of(outputs: tf.Tensor, classes: Any) -> tf.Tensor:
    """Mean cross-entropy, in the element type of the outputs."""
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(classes, tf.cast(outputs, tf.float32))
    return tf.cast(tf.reduce_mean(losses), outputs.dtype)


def batch(rng: np.random.Generator, rows: int = 16) -> Batch:
    """Inputs (rows, 64) and classes of a rule that can be learned."""
    inputs = rng.standard_normal((rows, 64)).astype(np.float32)
    return inputs, inputs[:, :10].argmax(1).astype(np.int32)


def own_generator() -> np.random.Generator:
    """A generator that differs between the ranks."""
    return np.random.default_rng(100 + hvd.rank())


def compression(spec: str, variables: Sequence[tf.Variable], **options: Any) -> hvdcomp.Compression:
    """A compression for these variables."""
    return hvdcomp.Compression.from_spec(spec, variables=variables, **options)


def sgd(learning_rate: Any = 0.05, momentum: float = 0.9) -> Any:
    """The optimizer that cases use unless they say so; not compiled with XLA, as Horovod wants it."""
    return tf_keras.optimizers.SGD(learning_rate, momentum=momentum, jit_compile=False)


class TapeTraining:
    """A training loop with Horovod's tape, in a tf.function or step by step.

    Args:
        how: a spec, with `options` for its `Compression`; or a compression as Horovod takes it.
        graph: whether the step is a tf.function.
        tell_optimizer: whether the compression is given the optimizer.
        tape: arguments of `hvd.DistributedGradientTape`.

    Attributes:
        traces: how often TensorFlow traced the step (or ran it, without `graph`).
    """

    def __init__(
        self,
        how: Any,
        graph: bool = True,
        model: Any = None,
        optimizer: Any = None,
        tell_optimizer: bool = False,
        tape: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.model = Network() if model is None else model
        self.optimizer = sgd() if optimizer is None else optimizer
        self.variables = self.model.variables_in_order
        if tell_optimizer:
            options["optimizer"] = self.optimizer
        self.compression = compression(how, self.variables, **options) if isinstance(how, str) else how
        self.generator = own_generator()
        self.traces = 0
        if hasattr(self.optimizer, "build"):  # else it makes its variables in the first step, which is traced twice
            self.optimizer.build(self.variables)
        self._tape = tape or {}
        signature = [tf.TensorSpec((None, 64)), tf.TensorSpec((None,), tf.int32)]
        self._step = tf.function(self._train, input_signature=signature) if graph else self._train

    def _train(self, inputs: Any, classes: Any) -> tf.Tensor:
        self.traces += 1
        with tf.GradientTape() as tape:
            loss = loss_of(self.model(inputs), classes)
        gradients = self.gradients(tape, loss)
        self.optimizer.apply_gradients(zip(gradients, self.variables, strict=True))
        return loss

    def gradients(self, tape: tf.GradientTape, loss: tf.Tensor) -> list[Any]:
        tape = hvd.DistributedGradientTape(tape, compression=self.compression, **self._tape)
        return tape.gradient(loss, self.variables)

    def step(self, rows: int = 16) -> float:
        return float(self._step(*map(tf.constant, batch(self.generator, rows))))

    def run(self, steps: int) -> TapeTraining:
        for _ in range(steps):
            self.step()
        return self

    @property
    def binding(self) -> TensorFlowBinding:
        return binding_of(self.compression)

    @property
    def plan(self) -> str:
        return plan_of(self.compression)

    @property
    def weights(self) -> np.ndarray:
        return weights(self.variables)


def binding_of(how: hvdcomp.Compression) -> TensorFlowBinding:
    """The binding of a compression that has been used."""
    binding = how._binding
    assert isinstance(binding, TensorFlowBinding)
    return binding


def plan_of(how: hvdcomp.Compression) -> str:
    """The compressor of each variable in the last step, as text."""
    return json.dumps({name: str(compressor) for name, compressor in binding_of(how).engine.plan.items()})


def weights(variables: Sequence[tf.Variable]) -> np.ndarray:
    """All variables as one vector of bytes-comparable values."""
    return np.concatenate([tf.reshape(tf.cast(variable, tf.float64), [-1]).numpy() for variable in variables])


def residuals(how: hvdcomp.Compression) -> dict[str, np.ndarray]:
    """A copy of what is left to be sent, and of warm starts, by variable and place."""
    return {
        f"{name}.{kind}.{place}": np.array(tf.cast(array, tf.float64))
        for name, state in binding_of(how).engine.states.items()
        for kind, arrays in (("memory", state.memory), ("compressor", state.compressor))
        for place, array in enumerate(arrays)
    }


def gathered(vector: np.ndarray) -> np.ndarray:
    """The vectors of all ranks, one per row."""
    return hvd.allgather(tf.constant(vector[None]), name="test.gathered").numpy()


def assert_same_everywhere(given: Sequence[tf.Variable] | np.ndarray) -> None:
    """Asserts that variables, or an array, are finite and the same, bit for bit, on all ranks."""
    if isinstance(given, np.ndarray):
        assert_same_tensors([("the array", given.size)], gathered(given.reshape(-1)))
    else:
        sizes = [(variable.name, int(tf.size(variable))) for variable in given]
        assert_same_tensors(sizes, gathered(weights(given)))


def assert_like_horovods(ours: np.ndarray, theirs: np.ndarray, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    """Asserts the same bits on two ranks, and the same but for the order of additions on more."""
    if hvd.size() == 2:
        assert np.array_equal(ours, theirs), f"differs by up to {np.abs(ours - theirs).max()}"
    np.testing.assert_allclose(ours, theirs, rtol, atol)


def raised(kind: type[Exception], work: Callable[[], object]) -> str:
    """The message of the error of this kind that `work` raises; every rank must raise one."""
    return raised_everywhere(kind, work, hvd.allgather_object)
