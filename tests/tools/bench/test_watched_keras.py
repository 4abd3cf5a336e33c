"""`hvdcomp.tools.bench.watched_keras`: the parts of a step in TensorFlow, traced and eager, and what it refuses."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="needs TensorFlow")
tf_keras = pytest.importorskip("tf_keras")
pytest.importorskip("torch")

from hvdcomp.tools.bench.watched import BACKWARD, EXCHANGE, OPTIMIZER, Watched  # noqa: E402
from hvdcomp.tools.bench.watched_keras import KerasWatch  # noqa: E402
from hvdcomp.tools.train.options import SetupError  # noqa: E402

PART_S = 0.03


def _late(tensor: Any, seconds: float) -> Any:
    """A tensor, after some time."""

    def wait(array: np.ndarray) -> np.ndarray:
        time.sleep(seconds)
        return array

    result = tf.numpy_function(wait, [tensor], tensor.dtype)
    result.set_shape(tensor.shape)
    return result


@tf.custom_gradient
def _slow(x: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Passes a value on, and takes its time backwards."""
    return tf.identity(x), lambda gradient: _late(gradient, 2 * PART_S)


class _SlowSGD(tf_keras.optimizers.SGD):
    def update_step(self, gradient: Any, variable: Any) -> None:
        super().update_step(_late(gradient, 2 * PART_S), variable)


def _train(steps: int, graph: bool) -> list[np.ndarray]:
    """A training whose parts take known times; its weights in the end."""
    rng = np.random.default_rng(0)
    first, second = (tf.Variable(rng.normal(size=shape), dtype=tf.float32) for shape in ((8, 8), (8, 2)))
    optimizer = _SlowSGD(0.1, jit_compile=False)
    optimizer.build([first, second])

    def step(inputs: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(_slow(inputs @ first) @ second))
        one, other = tape.gradient(loss, [first, second])
        optimizer.apply_gradients([(_late(one, PART_S), first), (other, second)])  # as an allreduce takes its time

    if graph:
        step = tf.function(step)
    for _ in range(steps):
        step(tf.constant(rng.normal(size=(4, 8)), tf.float32))
    return [first.numpy(), second.numpy()]


@pytest.mark.alone  # beside another test the processor may come late to what reads the clock
@pytest.mark.parametrize("graph", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_the_parts_of_a_step_are_told_apart_and_the_training_stays_as_it_is(graph: bool) -> None:
    methods = tf.GradientTape.gradient, tf_keras.optimizers.Optimizer.apply_gradients
    seen: list[Watched] = []
    watch = KerasWatch(4, 2, seen.append)
    watch.start()
    try:
        weights = _train(9, graph)
    finally:
        watch.stop()
    assert (tf.GradientTape.gradient, tf_keras.optimizers.Optimizer.apply_gradients) == methods
    assert (watch.done, watch.seen) == (True, 6)
    for own, alone in zip(weights, _train(9, graph), strict=True):
        np.testing.assert_array_equal(own, alone)
    (watched,) = seen
    least = np.zeros(4)
    least[[BACKWARD, EXCHANGE, OPTIMIZER]] = 2 * PART_S, PART_S, 2 * PART_S
    assert watched.parts.shape == (4, 4)
    # Two clocks; and what marks the end of a part may come late, into the next part.
    assert (np.median(watched.parts, 0) >= 0.95 * least).all(), watched.parts
    assert (watched.parts.sum(1) >= 0.95 * least.sum()).all(), watched.parts
    # The least of four steps: another process may have had the processor in one of them.
    most = least + np.array([0.1, PART_S, PART_S, 3 * PART_S])  # variables may be updated one after the other
    assert (watched.parts.min(axis=0) < most).all(), watched.parts
    assert watched.optimizer == "SGD"
    parameters = list(watched.workload.model.parameters())
    assert [tuple(one.grad.shape) for one in parameters if one.grad is not None] == [(8, 8), (8, 2)]
    assert all(one.grad.abs().sum() > 0 for one in parameters if one.grad is not None)
    if graph:
        assert watched.ready[:, 0].min() > 0.5, "the first matrix's gradient comes after what is slow"
        assert watched.ready[:, 1].min() < 0.5, "the last one's before"


def _step(gradients_in_graph: bool, table: Any, optimizer: Any) -> None:
    def gradients() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, [0, 1]))
        return tape.gradient(loss, [table])

    given = tf.function(gradients)() if gradients_in_graph else gradients()
    optimizer.apply_gradients(zip(given, [table], strict=True))


@pytest.mark.parametrize(
    ("in_graph", "said"), [(True, "put both into one tf.function"), (False, "is sparse, like the gradient of an")]
)
def test_steps_whose_times_would_say_nothing_are_refused(in_graph: bool, said: str) -> None:
    watch = KerasWatch(1, 0, print)
    watch.start()
    try:
        with pytest.raises(SetupError, match=said):
            _step(in_graph, tf.Variable(tf.zeros([4, 2])), tf_keras.optimizers.SGD(0.1, jit_compile=False))
    finally:
        watch.stop()
    assert said in str(watch.ended)
