"""A training in elastic Horovod with TensorFlow: `python -m tests.multirank.elastic_tensorflow PLAN_FILE`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import horovod.tensorflow.elastic  # noqa: F401 - makes hvd.elastic
import tensorflow as tf
import tf_keras as keras

import hvdcomp
from tests.multirank.elastic_training import Phases, batch_of, digits


def main(plan: dict[str, Any]) -> None:
    hvd.init()
    tf.random.set_seed(hvd.rank())  # Horovod gives all ranks the weights of rank 0
    model = keras.Sequential([keras.layers.Dense(64, "relu", input_shape=(64,)), keras.layers.Dense(10)])
    optimizer = keras.optimizers.legacy.SGD(0.05, momentum=0.9)
    optimizer.apply_gradients([(tf.zeros_like(one), one) for one in model.trainable_variables])  # makes its variables
    compression = hvdcomp.Compression.from_spec(
        plan["compressor"], variables=model.trainable_variables, optimizer=optimizer, **plan["options"]
    )
    images, shown = digits()
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    phases = Phases(plan, hvd, compression)

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x))
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @hvd.elastic.run
    def train(state: Any) -> None:
        while phases.go_on(state):
            mine = batch_of(state.step, hvd.rank())
            loss = step(tf.constant(images[mine]), tf.constant(shown[mine]))
            weights = [float(one.numpy().astype("float64").sum()) for one in model.trainable_variables]
            phases.step_done(state, weights, float(loss))

    state = hvd.elastic.TensorFlowKerasState(model, optimizer, step=0, phase=0, done=0)
    train(hvdcomp.track(state, compression))
    right = (model(images).numpy().argmax(1) == shown).mean()
    phases.write(right=float(right))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
