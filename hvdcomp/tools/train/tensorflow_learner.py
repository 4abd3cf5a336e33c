"""Trains in TensorFlow with Horovod, using the unmodified `hvd.DistributedGradientTape` with
`compression=hvdcomp.Compression`.

A step is a tf.function.
"""

from __future__ import annotations

import re

from hvdcomp.tools.train.keras_learner import KerasLearner  # imported first, because it configures TensorFlow's logging

import horovod.tensorflow as hvd  # isort: skip
import numpy as np
import tensorflow as tf

from hvdcomp.compression import Compression
from hvdcomp.errors import ConfigurationError, RankMismatchError
from hvdcomp.tools.train.dataset import DataSet
from hvdcomp.tools.train.options import TrainingOptions
from hvdcomp.tools.train.ranks import Ranks


class TensorFlowLearner(KerasLearner):
    """A `Learner` that trains with Horovod and TensorFlow."""

    def __init__(self, options: TrainingOptions, data: DataSet, ranks: Ranks) -> None:
        super().__init__(options, data, ranks)
        self._training = tf.function(self._training_step, input_signature=self._batch)

    def broadcast(self) -> None:
        hvd.broadcast_variables(self._model.variables, root_rank=0)
        self._begin()

    def distribute(self, compression: Compression) -> None:
        self._compression = compression

    def step(self, inputs: np.ndarray, targets: np.ndarray, accumulation: int) -> float:
        try:
            return float(self._training(inputs, targets))
        except tf.errors.OpError as error:
            raise _cause(error) or error from None

    def _training_step(self, inputs: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = self._mean_loss(inputs, targets)
        tape = hvd.DistributedGradientTape(tape, compression=self._compression, sparse_as_dense=True)
        self._apply(tape.gradient(loss, self._model.trainable_variables))
        return loss


def _cause(error: tf.errors.OpError) -> Exception | None:
    """The error that hvdcomp raised in a callback of the graph. It is recreated from the text of TensorFlow's error,
    because TensorFlow keeps only the text."""
    for kind in (ConfigurationError, RankMismatchError):
        match = re.search(rf"\b{kind.__name__}: (.*?)\s*Traceback", error.message, re.DOTALL)
        if match:
            return kind(match[1])
    return None
