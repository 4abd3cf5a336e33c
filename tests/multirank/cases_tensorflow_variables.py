"""Variables that TensorFlow tells while it traces the first step, and models that are built only then."""

from __future__ import annotations

import tempfile
from typing import Any

import horovod.tensorflow as hvd
import horovod.tensorflow.elastic  # noqa: F401 - makes hvd.elastic
import horovod.tensorflow.keras as hvd_keras
import numpy as np
import tensorflow as tf
import tf_keras

import hvdcomp
import hvdcomp.tensorflow
from hvdcomp.errors import ConfigurationError
from tests.multirank.cases_keras import cross_entropy, data
from tests.multirank.training_tensorflow import (
    Network,
    TapeTraining,
    assert_same_everywhere,
    batch,
    binding_of,
    loss_of,
    own_generator,
    raised,
    residuals,
    sgd,
    weights,
)
from tests.multirank.worker import thorough


def later(spec: str = "topk:ratio=0.1", **options: Any) -> hvdcomp.Compression:
    """A compression that was told no variables."""
    return hvdcomp.Compression.from_spec(spec, **options)


def case_the_trace_tells_the_variables() -> None:
    for spec, graph in (("powersgd:rank=2", True), ("topk:ratio=0.1", False), ("fp16", True)):
        given = TapeTraining(spec, graph=graph).run(4)
        told = TapeTraining(later(spec), graph=graph).run(4)
        assert np.array_equal(given.weights, told.weights), spec
        assert given.plan == told.plan
        expected, found = residuals(given.compression), residuals(told.compression)
        assert expected.keys() == found.keys()
        assert all(np.array_equal(expected[key], found[key]) for key in expected)


def unbuilt_model() -> Any:
    """Two dense layers that learn their shapes from the first batch, with the same weights on all ranks."""

    def uniform(seed: int) -> Any:
        return tf_keras.initializers.GlorotUniform(seed)

    return tf_keras.Sequential(
        [
            tf_keras.layers.Dense(32, "relu", kernel_initializer=uniform(1)),
            tf_keras.layers.Dense(40, kernel_initializer=uniform(2)),
        ]
    )


@thorough
def case_an_unbuilt_keras_model() -> None:
    trained = []
    for how in ("told", "function", "given"):
        model = unbuilt_model()
        if how == "given":
            model.build((None, 64))
            ours = later(variables=model.trainable_variables)
        else:
            ours = later() if how == "told" else later(variables=lambda model=model: model.trainable_variables)
        optimizer = hvd_keras.DistributedOptimizer(sgd(), compression=ours)
        model.compile(optimizer, cross_entropy(), jit_compile=False)
        broadcast = hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0)
        model.fit(data(5), verbose=0, callbacks=[broadcast])
        assert_same_everywhere(model.trainable_variables)
        names = {"dense/kernel", "dense/bias", "dense_1/kernel", "dense_1/bias"}
        assert set(binding_of(ours).engine.tensors) == names
        assert ours.ledger.steps == 5
        trained.append(weights(model.trainable_variables))
    assert np.array_equal(trained[0], trained[1])
    assert np.array_equal(trained[0], trained[2])


@thorough
def case_an_unbuilt_model_in_a_loop() -> None:
    """As in Horovod's example: the first step is traced with a model that has no variables yet."""
    model, ours, optimizer = unbuilt_model(), later(), sgd()

    @tf.function
    def step(inputs: Any, classes: Any) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(model(inputs), classes)
        tape = hvd.DistributedGradientTape(tape, compression=ours)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    generator = own_generator()
    for place in range(4):
        step(*map(tf.constant, batch(generator)))
        if place == 0:
            hvd.broadcast_variables(model.variables, root_rank=0)
            hvd.broadcast_variables(optimizer.variables, root_rank=0)
    assert_same_everywhere(model.trainable_variables)
    assert ours.ledger.steps == 4


def case_a_state_waits_for_the_first_step() -> None:
    for told in (True, False):
        whole, model = TapeTraining("topk:ratio=0.1", seed=3).run(3), Network()
        options = {} if told else {"variables": lambda model=model: model.variables_in_order}
        resumed = TapeTraining(later(seed=3, **options), model=model)
        for ours, theirs in zip(resumed.variables, whole.variables, strict=True):
            ours.assign(theirs)
        for ours, theirs in zip(resumed.optimizer.variables, whole.optimizer.variables, strict=True):
            ours.assign(theirs)
        resumed.generator = np.random.default_rng()
        resumed.generator.bit_generator.state = whole.generator.bit_generator.state
        with tempfile.TemporaryDirectory() as folder:
            path = tf.train.Checkpoint(state=hvdcomp.tensorflow.CompressionState(whole.compression)).save(f"{folder}/s")
            tf.train.Checkpoint(state=hvdcomp.tensorflow.CompressionState(resumed.compression)).restore(path)
        assert np.array_equal(whole.run(3).weights, resumed.run(3).weights)
        assert resumed.compression.ledger.steps == 6


def case_a_failure_before_the_first_commit_goes_back_to_where_a_worker_joined() -> None:
    whole = TapeTraining("topk:ratio=0.1").run(3)
    joined = TapeTraining("topk:ratio=0.1")
    state = hvdcomp.track(hvd.elastic.TensorFlowKerasState(joined.model, joined.optimizer), joined.compression)
    joined.compression.load_state_dict(whole.compression.state_dict())  # as at the meeting with the others
    start = joined.run(2).compression.state_dict()["shared"]["step"]
    state.restore()
    joined.step()
    assert (start, joined.binding.engine.step_number) == (5, 4)


@thorough
def case_two_tapes_need_all_variables() -> None:
    """As of two models that train in turns."""
    inputs, classes = map(tf.constant, batch(own_generator()))

    @tf.function  # step by step Horovod would take the two, which are alike, for the same
    def step(ours: hvdcomp.Compression, model: Network) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(model(inputs), classes)
        hvd.DistributedGradientTape(tape, compression=ours).gradient(loss, model.variables_in_order)

    first, second = Network(), Network(seed=8)
    told = later()
    step(told, first)
    message = raised(ConfigurationError, lambda: step(told, second))
    assert "4 variables that hvdcomp.Compression found in the first list of gradients" in message, message
    assert "variables=" in message, message
    both = later(variables=lambda: first.variables_in_order + second.variables_in_order)
    for model in (first, second, first):
        step(both, model)
    assert both.ledger.steps == 3


def case_two_models_in_one_function() -> None:
    """The ranks compare weights when its first call is over, after which Horovod's examples give all the same."""
    models = [Network(seed=hvd.rank()), Network(seed=8 + hvd.rank())]
    both = later(variables=[variable for model in models for variable in model.variables_in_order])

    @tf.function
    def step(inputs: Any, classes: Any) -> None:
        for model in models:
            with tf.GradientTape() as tape:
                loss = loss_of(model(inputs), classes)
            gradients = hvd.DistributedGradientTape(tape, compression=both).gradient(loss, model.variables_in_order)
            for variable, gradient in zip(model.variables_in_order, gradients, strict=True):
                variable.assign_sub(0.1 * gradient)

    generator = own_generator()
    for call in range(3):
        step(*map(tf.constant, batch(generator)))
        if call == 0:
            assert not binding_of(both).has_agreed
            for model in models:
                hvd.broadcast_variables(model.variables_in_order, root_rank=0)
    assert binding_of(both).has_agreed
    assert both.ledger.steps == 6
    for model in models:
        assert_same_everywhere(model.variables_in_order)


class Convolution:
    """A convolution whose kernel is a matrix of 27 by 64, and a dense layer."""

    def __init__(self) -> None:
        rng = np.random.default_rng(6)
        shapes = {"kernel": (3, 3, 3, 64), "out": (64, 40)}
        self.variables_in_order = [
            tf.Variable(rng.normal(0, 0.1, shape), dtype=tf.float32, name=name) for name, shape in shapes.items()
        ]

    def __call__(self, inputs: tf.Tensor) -> tf.Tensor:
        kernel, out = self.variables_in_order
        images = tf.reshape(inputs[:, :48], (-1, 4, 4, 3))
        return tf.reduce_mean(tf.nn.conv2d(images, kernel, 1, "SAME"), (1, 2)) @ out


def case_the_kernel_of_a_convolution_is_compressed() -> None:
    """And a checkpoint of when it was another matrix, of 3 by 576, is taken over."""
    training = TapeTraining("powersgd:rank=2", model=Convolution()).run(3)
    assert_same_everywhere(training.variables)
    name = next(one for one in training.binding.engine.tensors if "kernel" in one)
    assert training.compression.ledger.tensors[name].bytes_sent == 3 * 4 * 2 * (27 + 64)
    state = training.compression.state_dict()
    own = state["own"]["residuals"][name]["arrays"]
    kept = [array.copy() for array in own]
    own[:] = [array.reshape(3, 3, 3, 64) for array in own]
    state["shared"]["warm_starts"][name]["arrays"] = [np.ones((576, 2), np.float32)]
    again = TapeTraining("powersgd:rank=2", model=Convolution())
    again.compression.load_state_dict(state)
    loaded = [residuals(again.compression)[f"{name}.memory.{place}"] for place in range(len(kept))]
    assert all(np.array_equal(one.reshape(-1), was.reshape(-1)) for one, was in zip(loaded, kept, strict=True))
    again.run(2)
    assert_same_everywhere(again.variables)
    (warm,) = again.compression.state_dict()["shared"]["warm_starts"][name]["arrays"]
    assert warm.shape == (64, 2)
