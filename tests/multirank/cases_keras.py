"""Horovod's Keras optimizer with our compression: `fit`, accumulation, mixed precision, callbacks, and saved models."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import numpy as np
import tensorflow as tf
import tf_keras

import hvdcomp
import hvdcomp.tensorflow
from hvdcomp.errors import ConfigurationError
from hvdcomp.tensorflow import CompressedAdam
from hvdcomp.tensorflow.keras import PolicyCallback
from tests.multirank.everywhere import halves
from tests.multirank.training_tensorflow import (
    IN_GRAPH,
    assert_like_horovods,
    assert_same_everywhere,
    batch,
    binding_of,
    compression,
    gathered,
    own_generator,
    plan_of,
    raised,
    residuals,
    sgd,
    weights,
)
from tests.multirank.worker import thorough
from tests.pairs import lags_of

SPECS = ["none", "topk:ratio=0.05", "qsgd:bits=4"]


def keras_model(seed: int = 7, kind: type[tf_keras.Sequential] = tf_keras.Sequential) -> Any:
    """Two dense layers with the same weights on all ranks, unless the seed differs."""
    rng = np.random.default_rng(seed)
    layers = [tf_keras.Input((64,)), tf_keras.layers.Dense(32, "relu"), tf_keras.layers.Dense(40)]
    model = kind(layers)
    model.set_weights([rng.normal(0, 0.12, array.shape) for array in model.get_weights()])
    return model


def cross_entropy() -> Any:
    return tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class CountedTraces(tf_keras.Sequential):
    """Counts how often `fit` traces its step."""

    traces = 0

    def train_step(self, data: Any) -> Any:
        self.traces += 1
        return super().train_step(data)


def data(steps: int, seed: int | None = None) -> tf.data.Dataset:
    """This rank's own batches."""
    generator = own_generator() if seed is None else np.random.default_rng(seed)
    inputs, classes = batch(generator, 16 * steps)
    return tf.data.Dataset.from_tensor_slices((inputs, classes)).batch(16, drop_remainder=True)


def fitted(
    how: Any,
    steps: int = 10,
    epochs: int = 1,
    optimizer: Any = None,
    distribute: Callable[..., Any] = hvd_keras.DistributedOptimizer,
    compile_options: dict[str, Any] | None = None,
    callbacks: Any = (),
    options: dict[str, Any] | None = None,
    **horovod: Any,
) -> Any:
    """A model trained by `fit`; `model.ours` is its compression, if `how` was a spec."""
    model = keras_model(kind=CountedTraces)
    if isinstance(how, str):
        how = compression(how, model.trainable_variables, **(options or {}))
    model.ours = how
    distributed = distribute(optimizer or sgd(), compression=how, **horovod)
    model.compile(distributed, cross_entropy(), jit_compile=False, **(compile_options or {}))
    history = model.fit(data(steps), epochs=epochs, verbose=0, callbacks=list(callbacks)).history
    model.losses_by_epoch = history["loss"]
    return model


def case_fit_keeps_weights_identical() -> None:
    for spec in SPECS:
        long = spec != "qsgd:bits=4"
        distribute = hvd_keras.DistributedOptimizer if long else hvd.DistributedOptimizer
        epochs = 5 if long else 1
        model = fitted(spec, 10, epochs, sgd(), distribute)
        assert_same_everywhere(model.trainable_variables)
        assert model.ours.ledger.steps == 10 * epochs, spec
        assert model.traces <= 2, spec
        if long:
            assert model.losses_by_epoch[-1] < model.losses_by_epoch[0], spec


@thorough
def case_casts_equal_horovods_own() -> None:
    for spec in ("none", "fp16"):
        ours, theirs = fitted(spec), fitted(getattr(hvd.Compression, spec))
        tolerances = (1e-4, 1e-5) if spec == "none" else (1e-2, 1e-3)
        assert_like_horovods(weights(ours.trainable_variables), weights(theirs.trainable_variables), *tolerances)


@thorough
def case_every_optimizer() -> None:
    kinds = ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad"]
    optimizers = [getattr(tf_keras.optimizers, kind)(0.01, jit_compile=False) for kind in kinds]
    optimizers += [getattr(tf_keras.optimizers.legacy, kind)(0.01) for kind in ("SGD", "Adam", "RMSprop")]
    for optimizer in optimizers:
        model = fitted("topk:ratio=0.05", steps=4, optimizer=optimizer)
        assert_same_everywhere(model.trainable_variables)
        assert model.ours.ledger.steps == 4, optimizer


@thorough
def case_run_eagerly_and_several_steps_per_execution() -> None:
    plain = weights(fitted("topk:ratio=0.05", steps=8).trainable_variables)
    for options in ({"run_eagerly": True}, {"steps_per_execution": 4}):
        model = fitted("topk:ratio=0.05", steps=8, compile_options=options)
        assert model.ours.ledger.steps == 8, options
        assert_same_everywhere(model.trainable_variables)
        np.testing.assert_allclose(weights(model.trainable_variables), plain, rtol=1e-4, atol=1e-6)


@thorough
def case_backward_passes_per_step() -> None:
    for spec, average in (("topk:ratio=1", False), ("none", True)):
        options = {"backward_passes_per_step": 2, "average_aggregated_gradients": average}
        ours = fitted(spec, steps=8, optimizer=sgd(0.02, momentum=0.0), **options)
        theirs = fitted(hvd.Compression.none, steps=8, optimizer=sgd(0.02, momentum=0.0), **options)
        assert ours.ours.ledger.steps == 4, (spec, average, ours.ours.ledger.steps)
        assert_same_everywhere(ours.trainable_variables)
        np.testing.assert_allclose(
            weights(ours.trainable_variables), weights(theirs.trainable_variables), rtol=1e-3, atol=1e-5
        )
    model = fitted("powersgd:rank=2", steps=6, backward_passes_per_step=3)
    assert model.ours.ledger.steps == 2
    assert_same_everywhere(model.trainable_variables)


@thorough
def case_groups_and_process_sets() -> None:
    plain = weights(fitted("topk:ratio=0.05", steps=4).trainable_variables)
    grouped = fitted("topk:ratio=0.05", steps=4, groups=2)
    assert grouped.ours.ledger.steps == 4
    assert np.array_equal(weights(grouped.trainable_variables), plain)
    sets = halves(hvd)
    mine = sets[0] if sets[0].included() else sets[1]
    model = fitted("topk:ratio=0.05", steps=4, process_set=mine, options={"process_set": mine})
    everyone = gathered(weights(model.trainable_variables))
    assert all(np.array_equal(everyone[mine.ranks[0]], everyone[rank]) for rank in mine.ranks)
    assert not np.array_equal(everyone[0], everyone[-1])
    for process_set in sets:
        hvd.remove_process_set(process_set)


@thorough
def case_local_variables_stay_local() -> None:
    model = keras_model()
    how = compression("topk:ratio=1", model.trainable_variables)
    optimizer = hvd_keras.DistributedOptimizer(sgd(), compression=how)
    optimizer.register_local_var(model.trainable_variables[0])
    model.compile(optimizer, cross_entropy(), jit_compile=False)
    model.fit(data(4), verbose=0)
    assert_same_everywhere(model.trainable_variables[2:])
    first = gathered(weights(model.trainable_variables[:1]))
    assert not np.array_equal(first[0], first[-1])


class _WithOverflow(CountedTraces):
    """A model whose loss is infinite in one step on one rank."""

    found_inf: Any = None

    def compute_loss(self, *arguments: Any, **named: Any) -> Any:
        return super().compute_loss(*arguments, **named) * self.found_inf


def case_mixed_precision_skips_an_overflow_everywhere() -> None:
    _check_overflow("topk:ratio=0.05")


@thorough
def case_mixed_precision_without_compression_skips_it_too() -> None:
    _check_overflow("none")


def _check_overflow(spec: str) -> None:
    model = keras_model(kind=_WithOverflow)
    model.found_inf = tf.Variable(1.0, trainable=False)
    how = compression(spec, model.trainable_variables)
    optimizer = tf_keras.mixed_precision.LossScaleOptimizer(
        hvd_keras.DistributedOptimizer(sgd(), compression=how), initial_scale=1024.0, dynamic_growth_steps=3
    )
    model.compile(optimizer, cross_entropy(), jit_compile=False)
    scales = []
    for step, (inputs, classes) in enumerate(data(8)):
        model.found_inf.assign(np.inf if step == 3 and hvd.rank() == 0 else 1.0)
        start = weights(model.trainable_variables)
        kept = residuals(how) if step else {}
        model.train_on_batch(inputs, classes)
        assert np.array_equal(start, weights(model.trainable_variables)) == (step == 3), (spec, step)
        if step == 3 and spec != "none":
            after = residuals(how)
            assert kept
            assert all(np.array_equal(2 * kept[key], after[key]) for key in kept if ".memory." in key)
        scales.append(float(optimizer.loss_scale))
    assert scales[2:7] == [2048.0, 1024.0, 1024.0, 1024.0, 2048.0], scales
    assert_same_everywhere(model.trainable_variables)


@thorough
def case_half_precision_policy() -> None:
    """Layers compute in half precision, variables stay in single."""
    tf_keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        model = fitted("topk:ratio=0.05", steps=6)
    finally:
        tf_keras.mixed_precision.set_global_policy("float32")
    assert isinstance(model.optimizer, tf_keras.mixed_precision.LossScaleOptimizer)
    assert binding_of(model.ours)._grad_scaler is model.optimizer
    assert_same_everywhere(model.trainable_variables)


@thorough
def case_levels_change_in_fit_without_a_new_trace() -> None:
    class Plans(tf_keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.plans: list[str] = []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.plans.append(plan_of(self.model.ours))

    for policy in (
        "accordion:low=0.5,high=0.02,interval=1,eta=0.15",
        "accordion:low=0.5,high=0.02,steps=2,eta=0.15,lag=0",
        "gravac:min=2,max=64,window=4,omega=0,epsilon=0.6,smoothing=0.3",
    ):
        seen = Plans()
        options = {"policy": policy, "steps_per_epoch": 4}
        model = fitted("topk:ratio=0.1", steps=4, epochs=6, callbacks=[seen], options=options)
        assert len(set(seen.plans)) > 1, policy
        assert len({json.dumps(plans) for plans in hvd.allgather_object(seen.plans)}) == 1
        assert model.traces <= 2
        assert_same_everywhere(model.trainable_variables)


def case_horovods_callbacks() -> None:
    model = keras_model(seed=hvd.rank())  # the ranks begin with different weights
    assert not np.array_equal(*gathered(weights(model.trainable_variables))[:2])
    how = compression("topk:ratio=0.05", model.trainable_variables)
    steps, rate, size = 5, 0.01 * hvd.size(), hvd.size()
    model.compile(hvd_keras.DistributedOptimizer(sgd(rate), compression=how), cross_entropy(), jit_compile=False)
    rates, losses = [], []

    class Before(tf_keras.callbacks.Callback):
        """Notes each step's learning rate, and this rank's own losses."""

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            rates.append(float(self.model.optimizer.learning_rate))

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            losses.append(logs["loss"])

    # Momentum is a number in new optimizers, so that it cannot be corrected.
    options = {"momentum_correction": False}
    callbacks = hvd_keras.callbacks
    history = model.fit(
        data(steps),
        epochs=4,
        verbose=0,
        callbacks=[
            callbacks.BroadcastGlobalVariablesCallback(0),
            Before(),
            callbacks.MetricAverageCallback(),
            callbacks.LearningRateWarmupCallback(rate, warmup_epochs=2, **options),
            callbacks.LearningRateScheduleCallback(rate, lambda epoch: 0.1 ** (epoch - 2), start_epoch=2, **options),
            PolicyCallback(how),
        ],
    ).history
    # Horovod's broadcast comes after the first batch, whose means were the same everywhere but not the weights.
    assert_same_everywhere(model.trainable_variables)
    everyone = gathered(np.array(losses))
    assert not np.array_equal(everyone[0], everyone[1])
    np.testing.assert_allclose(history["loss"], everyone.mean(0), rtol=1e-5)
    assert history["loss"][-1] < history["loss"][0]
    epochs = np.arange(1, 2 * steps + 1) / steps
    expected = [*(rate / size * (epochs * (size - 1) / 2 + 1)), *[rate] * steps, *[0.1 * rate] * steps]
    np.testing.assert_allclose(rates, expected, rtol=1e-5)
    assert how.ledger.steps == 4 * steps
    assert history["compression_factor"][-1] > 2


@thorough
def case_momentum_is_corrected_where_it_can_be() -> None:
    def warm_up(optimizer: Any) -> list[float]:
        model = keras_model()
        how = compression("topk:ratio=0.05", model.trainable_variables)
        model.compile(hvd_keras.DistributedOptimizer(optimizer, compression=how), cross_entropy(), jit_compile=False)
        seen: list[float] = []
        note = tf_keras.callbacks.LambdaCallback(
            on_batch_begin=lambda batch, logs: seen.append(float(tf_keras.backend.get_value(model.optimizer.momentum)))
        )
        warm = hvd_keras.callbacks.LearningRateWarmupCallback(0.05, warmup_epochs=1)
        model.fit(data(3), verbose=0, callbacks=[warm, note])
        return seen

    assert warm_up(tf_keras.optimizers.SGD(0.05, jit_compile=False)) == [0.0, 0.0, 0.0]
    rises = warm_up(tf_keras.optimizers.legacy.SGD(0.05, momentum=0.9))
    assert rises[1] > 0.9, rises
    message = raised(ValueError, lambda: warm_up(sgd(0.05, momentum=0.9)))
    assert "momentum_correction=False" in message, message


def case_a_schedule_of_learning_rates() -> None:
    schedule = tf_keras.optimizers.schedules.PiecewiseConstantDecay([4, 8], [0.05, 0.01, 0.002])
    model = fitted("topk:ratio=0.1", steps=4, epochs=4, optimizer=sgd(schedule), options=_ACCORDION)
    assert_same_everywhere(model.trainable_variables)
    np.testing.assert_allclose(binding_of(model.ours).learning_rates(), [0.002], rtol=1e-5)


_ACCORDION = {"policy": "accordion:low=0.5,high=0.02,interval=1,eta=0.3", "steps_per_epoch": 4}


def case_a_saved_model_is_loaded_with_our_compression() -> None:
    model = fitted("topk:ratio=0.05", steps=4, optimizer=tf_keras.optimizers.Adam(0.01, jit_compile=False))
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "model.h5")
        plain = tf_keras.Sequential([tf_keras.Input((64,)), *model.layers])
        plain.compile(model.optimizer, cross_entropy(), jit_compile=False)
        plain.save(path)
        loaded = tf_keras.models.load_model(path)
    assert np.array_equal(weights(loaded.trainable_variables), weights(model.trainable_variables))
    how = compression("powersgd:rank=2", loaded.trainable_variables)
    optimizer = hvd_keras.DistributedOptimizer(loaded.optimizer, compression=how)
    loaded.compile(optimizer, cross_entropy(), jit_compile=False)
    loaded.fit(data(4), verbose=0)
    assert how.ledger.steps == 4
    assert_same_everywhere(loaded.trainable_variables)


@thorough
def case_resumed_fit_is_as_if_never_stopped() -> None:
    for policy in (_ACCORDION["policy"], "gravac:min=2,max=64,window=4,omega=0,epsilon=0.6,smoothing=0.3"):
        for lag in lags_of(policy):
            options = {"policy": f"{policy},lag={lag}", "steps_per_epoch": 4}

            def ready(options: dict[str, Any] = options) -> Any:
                model = keras_model()
                model.ours = compression("topk:ratio=0.1", model.trainable_variables, **options)
                optimizer = hvd_keras.DistributedOptimizer(sgd(), compression=model.ours)
                model.compile(optimizer, cross_entropy(), jit_compile=False)
                return model

            whole, resumed = ready(), ready()
            whole.fit(data(4), epochs=3, verbose=0)
            with tempfile.TemporaryDirectory() as folder:

                def checkpoint(model: Any) -> tf.train.Checkpoint:
                    state = hvdcomp.tensorflow.CompressionState(model.ours)
                    return tf.train.Checkpoint(model=model, optimizer=model.optimizer, compression=state)

                path = checkpoint(whole).save(f"{folder}/saved")
                resumed.optimizer.build(resumed.trainable_variables)
                checkpoint(resumed).restore(path)
            for model in (whole, resumed):
                model.fit(data(4, seed=hvd.rank()), epochs=2, verbose=0)
            assert np.array_equal(weights(whole.trainable_variables), weights(resumed.trainable_variables)), options
            assert plan_of(whole.ours) == plan_of(resumed.ours)
            assert resumed.ours.ledger.steps == 20


def case_refusals_in_fit() -> None:
    message = raised(
        (ConfigurationError, IN_GRAPH),
        lambda: fitted("dgc:ratio=0.05", steps=1, optimizer=sgd(momentum=0.9)),
    )
    assert "momentum=0.9" in message, message
    spec = "topk:ratio=0.1" if hvd.rank() else "powersgd:rank=2"
    message = raised(IN_GRAPH, lambda: fitted(spec, steps=1))
    assert "topk:ratio=0.1" in message, message
    assert "powersgd:rank=2" in message, message
    message = raised(ConfigurationError, lambda: fitted("topk:ratio=0.1", steps=1, gradient_predivide_factor=2.0))
    assert "gradient_predivide_factor=2.0" in message, message
    model = keras_model()
    how = compression("topk:ratio=0.1", model.trainable_variables)
    model.compile(hvd_keras.DistributedOptimizer(sgd(), compression=how), cross_entropy(), jit_compile=True)
    assert "jit_compile=True" in raised(ConfigurationError, lambda: model.fit(data(1), verbose=0))


def _adam() -> CompressedAdam:
    return CompressedAdam(1e-3, freeze_after=3, warm_up="int8", jit_compile=False)


def case_momenta_that_are_sent_whole_change_nothing() -> None:
    results = []
    for how in ("none", "topk:ratio=1"):  # only what may lose something is sent as momentum
        model = fitted(how, steps=8, optimizer=_adam())
        assert model.optimizer.frozen
        assert_same_everywhere(model.trainable_variables)
        results.append(weights(model.trainable_variables))
    np.testing.assert_allclose(*results, rtol=1e-3, atol=1e-4)
    again = tf_keras.optimizers.deserialize(tf_keras.optimizers.serialize(_adam()))
    assert (type(again), again.freeze_after, again.compressor_before) == (CompressedAdam, 3, "int8")


def case_momenta_are_sent_as_signs() -> None:
    model = fitted("efsignsgd", steps=8, optimizer=_adam(), compile_options={"steps_per_execution": 4})
    assert_same_everywhere(model.trainable_variables)
    assert 6 < model.ours.ledger.totals.compression_factor < 12


@thorough
def case_the_variance_is_refreshed() -> None:
    refreshing = CompressedAdam(1e-3, freeze_after=3, refreshes_per_gap=2, jit_compile=False)
    model = fitted("efsignsgd", steps=7, optimizer=refreshing)  # steps 4 and 6, from 0, are refreshes
    assert_same_everywhere(model.trainable_variables)
    totals, last = model.ours.ledger.totals, model.ours.ledger.last
    assert last.bytes_sent >= last.dense_bytes
    assert 0.7 < totals.bytes_sent / totals.dense_bytes < 0.9  # 5 of 7 steps
