"""A training in elastic Horovod with Keras' `fit`: `python -m tests.multirank.elastic_keras PLAN_FILE`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import horovod.tensorflow.keras as hvd
import horovod.tensorflow.keras.elastic  # noqa: F401 - makes hvd.elastic
import numpy as np
import tensorflow as tf
import tf_keras as keras

import hvdcomp
from tests.multirank.elastic_training import BATCH, Phases, batch_of, digits


def main(plan: dict[str, Any]) -> None:
    hvd.init()
    tf.random.set_seed(hvd.rank())  # Horovod gives all ranks the weights of rank 0
    model = keras.Sequential([keras.layers.Dense(64, "relu", input_shape=(64,)), keras.layers.Dense(10)])
    sgd = keras.optimizers.legacy.SGD(0.05, momentum=0.9)
    compression = hvdcomp.Compression.from_spec(
        plan["compressor"], variables=model.trainable_variables, optimizer=sgd, **plan["options"]
    )
    optimizer = hvd.DistributedOptimizer(sgd, compression=compression)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    optimizer._create_all_weights(model.trainable_variables)  # which the state is to keep
    images, shown = digits()
    phases = Phases(plan, hvd, compression)

    def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for step in range(state.step, 1 << 30):
            mine = batch_of(step, hvd.rank())
            yield images[mine], shown[mine]

    class WriteDown(keras.callbacks.Callback):
        def on_batch_end(self, batch: int, logs: Any = None) -> None:
            weights = [float(one.numpy().astype("float64").sum()) for one in model.trainable_variables]
            phases.step_done(state, weights, float(logs["loss"]), commits=False)
            self.model.stop_training = not phases.go_on(state)

    @hvd.elastic.run
    def train(state: Any) -> None:
        kinds = (tf.TensorSpec((BATCH, 64), tf.float32), tf.TensorSpec((BATCH,), tf.int64))
        data = tf.data.Dataset.from_generator(batches, output_signature=kinds)
        commit = hvd.elastic.CommitStateCallback(state, batches_per_commit=plan.get("commit", 1))
        model.fit(data, steps_per_epoch=1 << 20, callbacks=[WriteDown(), commit], verbose=0)

    state = hvdcomp.track(hvd.elastic.KerasState(model, step=0, phase=0, done=0), compression)
    train(state)
    phases.write(right=float((model(images).numpy().argmax(1) == shown).mean()))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
