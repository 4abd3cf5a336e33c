"""The Keras callback, and checkpoints by `tf.train.Checkpoint`, in a model that trains by `fit`."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
import tf_keras
from horovod.tensorflow.keras import DistributedOptimizer

import hvdcomp
from hvdcomp.exchange.ledger import Cost
from hvdcomp.tensorflow import CompressionState
from hvdcomp.tensorflow.keras import PolicyCallback
from tests.decision_lines import whole_lines
from tests.multirank.worker import thorough

EPOCHS, STEPS, ROWS = 2, 4, 8


def data() -> tuple[np.ndarray, np.ndarray]:
    """Inputs and classes that differ between the ranks."""
    rng = np.random.default_rng(10 + hvd.rank())
    inputs = rng.normal(size=(STEPS * ROWS, 64)).astype(np.float32)
    return inputs, inputs[:, :5].argmax(1)


def make(policy: str | None = "accordion:low=2,high=1,interval=1", **options: Any) -> tuple[Any, hvdcomp.Compression]:
    """A compiled model, the same on all ranks, and its compression."""
    tf_keras.utils.set_random_seed(1)
    model = tf_keras.Sequential(
        [tf_keras.layers.Dense(32, activation="relu", input_shape=(64,)), tf_keras.layers.Dense(5)]
    )
    options.setdefault("steps_per_epoch", STEPS)
    compression = hvdcomp.Compression.from_spec(
        "powersgd:rank=2", variables=model.trainable_variables, min_numel=100, policy=policy, **options
    )
    compile_model(model, DistributedOptimizer(tf_keras.optimizers.SGD(0.1, momentum=0.9), compression=compression))
    return model, compression


def compile_model(model: Any, optimizer: Any, **options: Any) -> None:
    model.compile(optimizer, tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True), **options)


def fit(model: Any, *callbacks: Any, epochs: int = EPOCHS) -> Any:
    inputs, classes = data()
    return model.fit(
        inputs, classes, batch_size=ROWS, epochs=epochs, verbose=0, shuffle=False, callbacks=list(callbacks)
    ).history


def weights(model: Any) -> bytes:
    return b"".join(variable.numpy().tobytes() for variable in model.trainable_variables)


def refusal(work: Callable[[], object]) -> str:
    try:
        work()
    except hvdcomp.ConfigurationError as error:
        return str(error)
    raise AssertionError("nothing was refused")


def case_logs_say_what_was_sent() -> None:
    model, compression = make()
    history = fit(model, PolicyCallback(compression))
    totals = compression.ledger.totals
    assert np.isclose(sum(history["megabytes_sent"]) * 1e6, totals.bytes_sent)
    pair = history["compression_factor"], history["megabytes_sent"]
    dense = sum(factor * sent for factor, sent in zip(*pair, strict=True))
    assert np.isclose(dense * 1e6, totals.dense_bytes)
    assert np.allclose(history["learning_rate"], 0.1)
    assert compression.ledger.steps == EPOCHS * STEPS


@thorough
def case_bytes_within_a_node_do_not_count() -> None:
    model, compression = make()
    callback = PolicyCallback(compression)
    callback.set_model(model)
    for rest, factor in ((100, 40.0), (50, 80.0)):
        callback.on_epoch_begin(0)
        compression.ledger.totals.add(Cost(5000 + rest, 4000, bytes_in_node=5000))
        logs: dict[str, float] = {}
        callback.on_epoch_end(0, logs)
        assert (logs["compression_factor"], logs["megabytes_sent"]) == (factor, (5000 + rest) / 1e6)


def case_the_callback_changes_nothing() -> None:
    model, compression = make()
    fit(model, PolicyCallback(compression, update_freq=2, log_dir=mkdtemp()))
    alone, _ = make()
    fit(alone)
    assert weights(model) == weights(alone)


def case_scalars_are_written_by_rank_0() -> None:
    folder = Path(mkdtemp())
    model, compression = make()
    fit(model, PolicyCallback(compression, log_dir=folder, update_freq=2))
    files = list(folder.glob("events*"))
    if hvd.rank() != 0:
        assert not files
        return
    events = [event for file in files for event in tf.compat.v1.train.summary_iterator(str(file))]
    written: dict[str, dict[int, float]] = {}
    for event in events:
        for value in event.summary.value:
            written.setdefault(value.tag, {})[event.step] = float(tf.make_ndarray(value.tensor))
    metrics = compression.metrics()
    assert metrics["hvdcomp/compression_factor"] > 1
    for name in ("hvdcomp/level/dense/kernel", "hvdcomp/learning_rate", "hvdcomp/megabytes_sent", *metrics):
        assert list(written[name]) == [2, 4, 6, 8]
    for name, value in metrics.items():
        assert np.isclose(written[name][8], value), name


def case_what_would_go_wrong_is_refused_before_training() -> None:
    model, compression = make()
    compile_model(model, tf_keras.optimizers.SGD(0.1))
    assert "DistributedOptimizer" in refusal(lambda: fit(model, PolicyCallback(compression)))
    model, compression = make()
    compile_model(model, model.optimizer, jit_compile=True)
    assert "jit_compile=False" in refusal(lambda: fit(model, PolicyCallback(compression)))
    model, compression = make(steps_per_epoch=STEPS + 1)
    message = refusal(lambda: fit(model, PolicyCallback(compression)))
    assert f"steps_per_epoch={STEPS + 1}" in message
    assert f"{STEPS} steps" in message
    model, compression = make("increase_batch_size:low=1,high=2")
    assert "accumulation" in refusal(lambda: fit(model, PolicyCallback(compression)))
    assert "update_freq" in refusal(lambda: PolicyCallback(compression, update_freq=0))


def case_an_optimizer_of_keras_3_is_refused() -> None:
    import keras

    assert keras.__version__.startswith("3.")
    _, compression = make()
    message = refusal(lambda: DistributedOptimizer(keras.optimizers.SGD(0.1), compression=compression))
    assert "TF_USE_LEGACY_KERAS=1" in message


def case_variables_of_keras_3_are_refused() -> None:
    import keras

    model = keras.Sequential([keras.layers.Input((64,)), keras.layers.Dense(5)])
    message = refusal(lambda: hvdcomp.Compression(hvdcomp.TopK(ratio=0.1), variables=model.trainable_variables))
    assert "TF_USE_LEGACY_KERAS=1" in message


@thorough
def case_a_checkpoint_resumes_bit_for_bit() -> None:
    for policy in ("accordion:low=2,high=1,interval=1", "gravac:min=2,max=8,window=3,epsilon=0.5"):
        model, compression = make(policy)
        fit(model)
        state = tf.train.Checkpoint(model=model, optimizer=model.optimizer, compression=CompressionState(compression))
        path = state.write(f"{mkdtemp()}/rank{hvd.rank()}")
        fit(model, epochs=1)
        again, compression = make(policy)
        state = tf.train.Checkpoint(model=again, optimizer=again.optimizer, compression=CompressionState(compression))
        state.read(path)
        assert compression.ledger.steps == EPOCHS * STEPS
        fit(again, epochs=1)
        assert weights(again) == weights(model), policy


def case_a_checkpoint_of_another_model_is_refused() -> None:
    model, compression = make()
    fit(model)
    path = tf.train.Checkpoint(compression=CompressionState(compression)).write(f"{mkdtemp()}/state")
    other = hvdcomp.Compression(hvdcomp.TopK(ratio=0.1), variables=[tf.Variable(tf.zeros((64, 64)), name="other")])
    state = tf.train.Checkpoint(compression=CompressionState(other))
    message = refusal(lambda: state.read(path))
    assert "a different model" in message
    assert "other" in message


@thorough
def case_validation_is_left_out_of_the_times_of_steps() -> None:
    """GraVAC with every=1 is told how long each step took: never a validation that takes as long as many of them."""
    log = Path(mkdtemp()) / "decisions.jsonl"
    model, compression = make("gravac:min=2,max=4,every=1", decision_log=log, steps_per_epoch=None)
    inputs, classes = data()

    class Slow(tf_keras.callbacks.Callback):
        def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
            time.sleep(3)

    model.fit(
        inputs, classes, batch_size=ROWS, epochs=3, verbose=0, shuffle=False,
        validation_data=(inputs, classes), validation_steps=1, callbacks=[PolicyCallback(compression), Slow()],
    )  # fmt: skip
    if hvd.rank() == 0:
        lines = whole_lines(log)
        # In the first epochs TensorFlow builds its functions.
        told = [line["statistics"]["timing"]["seconds"] for line in lines if line["step"] > STEPS + 1]
        assert len(told) >= STEPS, told
        assert max(told) < 2, told
