"""What the TensorFlow binding refuses before any step, and the learning rate that it scales, on one process."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
tf = pytest.importorskip("tensorflow", reason="needs TensorFlow")
tf_keras = pytest.importorskip("tf_keras", reason="needs tf_keras")

import hvdcomp  # noqa: E402
from hvdcomp.errors import ConfigurationError  # noqa: E402
from hvdcomp.tensorflow.optimizer import ScaledRate, learning_rate_of, momentum_of, unwrapped  # noqa: E402
from tests.bindings.test_state_check import state_of_training  # noqa: E402


def compression(variables: Any, **options: Any) -> hvdcomp.Compression:
    return hvdcomp.Compression.from_spec("topk:ratio=0.1", variables=variables, **options)


def variables(*names: str) -> list[Any]:
    return [tf.Variable(tf.ones((4, 4)), name=name) for name in names]


def test_variables_of_equal_names_are_told_apart() -> None:
    given = variables("kernel", "kernel", "bias", "kernel")
    named = compression(given)._parameters
    assert [id(variable) for variable in named.values()] == [id(variable) for variable in given]
    assert len(named) == 4
    assert [name for name in named if name.startswith("bias")] == ["bias"]


def test_names_do_not_depend_on_what_was_made_before() -> None:
    names = []
    for _ in range(2):
        model = tf_keras.Sequential([tf_keras.Input((4,)), tf_keras.layers.Dense(3), tf_keras.layers.Dense(2)])
        names.append(list(compression(model.trainable_variables)._parameters))
    assert names[0] == names[1]


def test_no_variables_are_refused() -> None:
    for nothing in ([], iter(()), tf_keras.layers.Dense(3).trainable_variables):
        with pytest.raises(ConfigurationError, match=r"variables is empty.*variables=lambda: model"):
            compression(nothing)


def test_variables_of_keras_3_are_refused() -> None:
    keras = pytest.importorskip("keras", minversion="3", reason="needs Keras 3")
    layer = keras.layers.Dense(3)
    layer.build((None, 4))
    with pytest.raises(ConfigurationError, match="TF_USE_LEGACY_KERAS=1"):
        compression(layer.trainable_variables)


def test_an_optimizer_of_keras_3_is_refused_when_horovod_wraps_it() -> None:
    keras = pytest.importorskip("keras", minversion="3", reason="needs Keras 3")
    hvd = pytest.importorskip("horovod.tensorflow.keras", reason="needs Horovod")
    with pytest.raises(ConfigurationError, match=r"SGD is an optimizer of Keras 3.*TF_USE_LEGACY_KERAS=1"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(), compression=compression(variables("a")))


@pytest.mark.parametrize("by_environment", [True, False])
def test_a_tensorflow_of_one_inter_op_thread_is_refused(monkeypatch: pytest.MonkeyPatch, by_environment: bool) -> None:
    pytest.importorskip("horovod.tensorflow", reason="needs Horovod")
    from hvdcomp.communicators.horovod_tensorflow import HorovodTensorFlowCommunicator

    if by_environment:
        monkeypatch.setenv("TF_NUM_INTEROP_THREADS", "1")
    else:
        monkeypatch.setattr(tf.config.threading, "get_inter_op_parallelism_threads", lambda: 1)
    with pytest.raises(ConfigurationError, match=r"runs with 1 inter-op thread, .* needs 2: call tf\.config"):
        HorovodTensorFlowCommunicator()


def test_elastic_horovod_passes_on_all_errors_but_its_own() -> None:
    """Of an UnknownError that names no collective it says nothing."""
    exceptions = pytest.importorskip("horovod.common.exceptions", reason="needs Horovod")
    from hvdcomp.tensorflow.callbacks import as_callback

    def message(error: Exception, kind: type[Exception]) -> str:
        def fail(_: Any) -> int:
            raise error

        failing = tf.function(lambda: tf.py_function(as_callback(fail), [0], tf.int64))
        with pytest.raises(kind) as raised:
            failing()
        return str(raised.value)

    for error in (ConfigurationError("the text"), KeyError("the text")):
        assert f"{type(error).__name__}: {error}" in message(error, tf.errors.InvalidArgumentError)
    failed = exceptions.HorovodInternalError("HorovodAllreduce failed")
    assert "HorovodAllreduce failed" in message(failed, tf.errors.UnknownError)


def test_parameters_and_variables_exclude_each_other() -> None:
    given = variables("a")
    with pytest.raises(ConfigurationError, match="parameters of more than one framework"):
        compression(given, named_parameters=[("a", given[0])])
    with pytest.raises(ConfigurationError, match=r"was given a model \(Sequential\); pass"):
        hvdcomp.Compression.from_spec("topk:ratio=0.1", variables=tf_keras.Sequential())
    with pytest.raises(ConfigurationError, match="optimizer= works only with TensorFlow"):
        hvdcomp.Compression.from_spec("none", named_parameters=[("a", given[0])], optimizer=tf_keras.optimizers.SGD())


def test_variables_may_come_later() -> None:
    for later in (None, lambda: pytest.fail("too early")):
        assert compression(later).state_dict() == {}


def test_a_state_that_would_need_variables_too_early_says_so() -> None:
    state = state_of_training("numpy")
    optimizer = tf_keras.optimizers.SGD(0.1)
    with pytest.raises(ConfigurationError, match=r"variables=model\.trainable_variables"):
        compression(None, optimizer=optimizer).load_state_dict(state, optimizer=optimizer)
    with pytest.raises(ConfigurationError, match="variables is empty"):
        compression(lambda: []).load_state_dict(state)


def test_one_made_at_each_trace_is_refused() -> None:
    given = variables("a")
    for made in (lambda: compression(given), lambda: hvdcomp.Compression(hvdcomp.TopK(0.1))):
        with pytest.raises(ConfigurationError, match="Make the Compression once, outside"):
            tf.function(made)()
        with pytest.raises(ConfigurationError, match="Make the Compression once, outside"):
            tf.function(made, autograph=False)()


@pytest.mark.thorough
def test_one_made_beside_a_trace_is_not_refused() -> None:
    kept = []

    @tf.function
    def step() -> Any:
        if not kept:
            with tf.init_scope():
                kept.append(compression(variables("a")))
        return tf.constant(1.0)

    step()
    with tf.Graph().as_default():  # TensorFlow 1: a graph that is made once
        kept.append(compression(None))
    assert len(kept) == 2


# The scaled learning rate, beside a plain statement of SGD with momentum and of Adam.

_RATE = 0.1
_KINDS = ["new", "legacy"]


def made(kind: str, name: str, rate: Any) -> Any:
    module = tf_keras.optimizers if kind == "new" else tf_keras.optimizers.legacy
    options: dict[str, Any] = {"momentum": 0.9} if name == "SGD" else {"epsilon": 1e-7}
    if kind == "new":
        options["jit_compile"] = False
    return getattr(module, name)(rate, **options)


def halving() -> Any:
    return tf_keras.optimizers.schedules.ExponentialDecay(_RATE, 2, 0.5, staircase=True)


class ByHand:
    """One variable, updated as the papers and Keras state it."""

    def __init__(self, name: str, value: np.ndarray) -> None:
        self.name, self.value, self.step = name, value, 0
        self.first, self.second = np.zeros_like(value), np.zeros_like(value)

    def apply(self, gradient: np.ndarray, rate: float) -> None:
        self.step += 1
        if self.name == "SGD":
            self.first = 0.9 * self.first - rate * gradient
            self.value = self.value + self.first
            return
        self.first = 0.9 * self.first + 0.1 * gradient
        self.second = 0.999 * self.second + 0.001 * gradient**2
        corrected = rate * np.sqrt(1 - 0.999**self.step) / (1 - 0.9**self.step)
        self.value = self.value - corrected * self.first / (np.sqrt(self.second) + 1e-7)


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("name", ["SGD", "Adam"])
@pytest.mark.parametrize("kind", _KINDS)
def test_steps_are_scaled_and_the_users_rate_is_not(kind: str, name: str, scheduled: bool, in_graph: bool) -> None:
    rng = np.random.default_rng(1)
    start = rng.standard_normal(5)
    optimizer = made(kind, name, halving() if scheduled else _RATE)
    variable = tf.Variable(start, dtype=tf.float32)
    scaled = ScaledRate(optimizer)
    traces = 0

    def apply(gradient: Any) -> None:
        nonlocal traces
        traces += 1
        optimizer.apply_gradients([(gradient, variable)])

    if kind == "new":
        optimizer.build([variable])
    else:
        optimizer._create_all_weights([variable])
    work = tf.function(apply) if in_graph else apply
    expected = ByHand(name, start)
    for step, factor in enumerate([1.0, 1.0, 2.0, 4.0, 4.0, 0.5]):
        scaled.set(factor)
        scaled.begin_step()
        if kind == "new":
            scaled.set(100.0)  # is for the next step
        gradient = rng.standard_normal(5)
        rate = _RATE * 0.5 ** (step // 2) if scheduled else _RATE
        np.testing.assert_allclose(learning_rate_of(optimizer), rate, rtol=1e-6)
        work(tf.constant(gradient, tf.float32))
        expected.apply(gradient, rate * factor)
        np.testing.assert_allclose(variable.numpy(), expected.value, rtol=1e-4, atol=1e-5)
    assert not in_graph or traces == 1


@pytest.mark.parametrize("kind", _KINDS)
def test_the_user_may_change_the_rate_while_it_is_scaled(kind: str) -> None:
    optimizer = made(kind, "SGD", _RATE)
    scaled = ScaledRate(optimizer)
    variable = tf.Variable(np.zeros(3), dtype=tf.float32)
    scaled.set(2.0)
    scaled.begin_step()
    expected = ByHand("SGD", np.zeros(3))
    for rate in (0.1, 0.05, 0.2):
        optimizer.learning_rate = rate
        optimizer.apply_gradients([(tf.ones(3), variable)])
        expected.apply(np.ones(3), 2 * rate)
        np.testing.assert_allclose(variable.numpy(), expected.value, rtol=1e-5)
        np.testing.assert_allclose(float(tf.convert_to_tensor(optimizer.learning_rate)), rate, rtol=1e-6)
        np.testing.assert_allclose(optimizer.get_config()["learning_rate"], rate, rtol=1e-6)


def test_a_scaled_optimizer_keeps_its_variables() -> None:
    """Nothing is added to what a checkpoint of the optimizer holds."""
    optimizer = made("new", "SGD", _RATE)
    variable = tf.Variable(np.zeros(3), dtype=tf.float32)
    optimizer.build([variable])
    before = len(optimizer.variables)
    scaled = ScaledRate(optimizer)
    scaled.set(2.0)
    scaled.begin_step()
    optimizer.apply_gradients([(tf.ones(3), variable)])
    assert len(optimizer.variables) == before


def test_what_is_known_of_an_optimizer() -> None:
    for kind in _KINDS:
        assert momentum_of(made(kind, "SGD", _RATE)) == "momentum=0.9"
        assert momentum_of(made(kind, "Adam", _RATE)) == "beta_1=0.9"
    assert momentum_of(tf_keras.optimizers.SGD(0.1)) is None
    assert momentum_of(None) is None
    inner = tf_keras.optimizers.SGD(0.3)
    around = tf_keras.mixed_precision.LossScaleOptimizer(inner)
    assert unwrapped(around) is inner
    assert unwrapped(inner) is inner
    assert learning_rate_of(tf.compat.v1.train.GradientDescentOptimizer(0.25)) == 0.25
    with pytest.raises(ConfigurationError, match="object"):
        learning_rate_of(object())
    with pytest.raises(ConfigurationError, match="object"):
        ScaledRate(object())
