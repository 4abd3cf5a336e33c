"""Trains in TensorFlow on simulated ranks, each with a model in this process."""

from __future__ import annotations

import os
from typing import cast

from hvdcomp.tools.train.keras_learner import KerasLearner  # imported first, because it configures TensorFlow's logging

import numpy as np  # isort: skip
import tensorflow as tf

from hvdcomp.compression import Compression
from hvdcomp.tensorflow import serve_simulated
from hvdcomp.tools.train.dataset import DataSet
from hvdcomp.tools.train.options import TrainingOptions
from hvdcomp.tools.train.ranks import Ranks
from hvdcomp.tools.train.simulation import SimulatedRanks


class SimulatedKerasLearner(KerasLearner):
    """A `Learner` for simulated ranks with Keras. A step consists of two TensorFlow functions; the exchange happens
    between them, in Python."""

    def __init__(self, options: TrainingOptions, data: DataSet, ranks: Ranks) -> None:
        super().__init__(options, data, ranks)
        self._communicator = cast(SimulatedRanks, ranks).communicator

    @staticmethod
    def prepare(local_rank: int, local_size: int) -> None:
        # As if there were one rank for each core, so that TensorFlow uses one thread.
        KerasLearner.prepare(local_rank, os.cpu_count() or 1)

    def broadcast(self) -> None:
        self._begin()  # all ranks have the same initial weights

    def distribute(self, compression: Compression) -> None:
        self._compression = compression
        variables = self._model.trainable_variables
        self._exchange = serve_simulated(compression, variables, self._communicator, self._optimizer)
        # Functions are traced now, because dropout uses TensorFlow's global seed, and the next rank sets a different
        # seed.
        tf.random.set_seed(self._options.seed + self._rank * 2**31)
        self._gradients = tf.function(self._gradients_of_step, input_signature=self._batch).get_concrete_function()
        self._update = tf.function(
            self._apply, input_signature=[[tf.TensorSpec(variable.shape, variable.dtype) for variable in variables]]
        )

    def step(self, inputs: np.ndarray, targets: np.ndarray, accumulation: int) -> float:
        loss, gradients = self._gradients(tf.constant(inputs), tf.constant(targets))
        means = self._exchange([gradient.numpy() for gradient in gradients])
        self._update([tf.convert_to_tensor(mean) for mean in means])
        return float(loss)

    def _gradients_of_step(self, inputs: tf.Tensor, targets: tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
        with tf.GradientTape() as tape:
            loss = self._mean_loss(inputs, targets)
        gradients = tape.gradient(loss, self._model.trainable_variables)
        return loss, [tf.convert_to_tensor(gradient) for gradient in gradients]
