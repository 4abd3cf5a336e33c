"""Trains in TensorFlow with tf_keras. Subclasses connect the ranks.

Functions are traced only once, even if a policy changes the batch size, because traced functions accept batches of any
length. tf_keras is imported with its own name, so TF_USE_LEGACY_KERAS is not needed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Otherwise TensorFlow prints notes about processors and missing GPUs during the import. Errors still raise exceptions.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf
import tf_keras

import hvdcomp
from hvdcomp.compression import Compression
from hvdcomp.tensorflow import CompressedAdam, CompressionState, saved_state
from hvdcomp.tools.train import environment
from hvdcomp.tools.train.dataset import DataSet
from hvdcomp.tools.train.learner import Arrays, Learner, reading
from hvdcomp.tools.train.models_tensorflow import build_model
from hvdcomp.tools.train.options import TrainingOptions
from hvdcomp.tools.train.ranks import Ranks

_ADAM_EPSILON = 1e-8  # the value in PyTorch


class KerasLearner(Learner):
    """A `Learner` that trains Keras models. If there are GPUs, each rank of a host uses a different GPU.

    This learner differs from the learner for PyTorch in two ways. First, Keras's SGD multiplies gradients by the
    learning rate before momentum accumulates them, so after a change of the rate, earlier gradients keep their old
    rate. Second, if a policy makes the batch larger, there is a single backward pass with a larger batch instead of
    several backward passes. This changes the results of normalization layers.
    """

    first_step = "tracing the graph, which takes some seconds, or more on a busy machine ..."

    def __init__(self, options: TrainingOptions, data: DataSet, ranks: Ranks) -> None:
        self._options = options
        self._rank = ranks.rank
        tf_keras.utils.set_random_seed(options.seed)
        self._model = build_model(options.model, channels=data.channels, size=data.size, classes=data.classes)
        self._optimizer: Any = None
        self._compression: Compression | None = None
        inputs = tf.TensorSpec((None, *data.train_x.shape[1:]), tf.int64 if data.has_tokens else tf.float32)
        targets = tf.TensorSpec((None, *data.train_y.shape[1:]), data.train_y.dtype)
        self._batch = (inputs, targets)  # the inputs of traced functions
        self._evaluation = tf.function(self._evaluation_step, input_signature=self._batch)

    @staticmethod
    def prepare(local_rank: int, local_size: int) -> None:
        threads = environment.share_of_cores(local_size)
        try:
            gpus = tf.config.list_physical_devices("GPU")
            if gpus:
                own_gpu = gpus[local_rank % len(gpus)]
                tf.config.set_visible_devices(own_gpu, "GPU")
                tf.config.experimental.set_memory_growth(own_gpu, True)
            tf.config.threading.set_intra_op_parallelism_threads(threads)
            # hvdcomp needs at least two threads
            tf.config.threading.set_inter_op_parallelism_threads(max(2, threads))
        except RuntimeError:
            pass  # TensorFlow keeps its settings if the program that calls `train` has already used TensorFlow

    def _begin(self) -> None:
        """Creates the optimizer. Call this at the end of `broadcast`."""
        self._optimizer = self._new_optimizer()
        self._optimizer.build(self._model.trainable_variables)
        # This seed applies to all functions that are traced from now on.
        tf.random.set_seed(self._options.seed + self._rank * 2**31)

    def _new_optimizer(self) -> Any:
        options = self._options
        if options.optimizer == "sgd":
            return tf_keras.optimizers.SGD(
                options.lr, momentum=options.momentum, nesterov=options.nesterov, jit_compile=False
            )
        beta_1, beta_2 = options.betas
        common: dict[str, Any] = {"weight_decay": options.weight_decay, "epsilon": _ADAM_EPSILON, "jit_compile": False}
        if options.optimizer == "adamw":
            optimizer = tf_keras.optimizers.AdamW(options.lr, beta_1=beta_1, beta_2=beta_2, **common)
        else:
            common |= {"freeze_after": options.freeze_after, "warm_up": options.freeze_compression}
            common |= {"refreshes_per_gap": options.refreshes_per_gap}
            optimizer = CompressedAdam(options.lr, beta_1=beta_1, beta_2=beta_2, **common)
        optimizer.exclude_from_weight_decay(
            [
                trainable_variable
                for trainable_variable in self._model.trainable_variables
                if len(trainable_variable.shape) <= 1
            ]
        )
        return optimizer

    def compression(self, spec: str, **options: Any) -> Compression:
        variables = self._model.trainable_variables
        return Compression.from_spec(spec, variables=variables, optimizer=self._optimizer, **options)

    def set_learning_rate(self, rate: float) -> None:
        self._optimizer.learning_rate = rate

    def evaluate(self, inputs: np.ndarray, targets: np.ndarray) -> tuple[float, int]:
        loss, right = self._evaluation(inputs, targets)
        return float(loss), int(right)

    def parameters(self) -> Arrays:
        return {variable.name: variable.numpy() for variable in self._model.trainable_variables}

    def buffers(self) -> Arrays:
        return {variable.name: variable.numpy() for variable in self._model.non_trainable_variables}

    def set_buffers(self, values: Mapping[str, np.ndarray]) -> None:
        for variable in self._model.non_trainable_variables:
            variable.assign(values[variable.name])

    def save(self, folder: Path) -> list[Path]:
        assert self._compression is not None
        prefix = f"rank-{self._rank}"
        try:
            self._checkpoint(compression=CompressionState(self._compression)).write(str(folder / prefix))
        except tf.errors.OpError as error:
            # Removes the name of the node in TensorFlow's graph.
            raise OSError(error.message.rpartition("}} ")[2]) from None
        return list(folder.glob(f"{prefix}.*"))

    def restore(self, folder: Path, sources: Sequence[int], ranks: int) -> None:
        assert self._compression is not None
        paths = [str(folder / f"rank-{source}") for source in sources]
        with reading(tf.errors.OpError, AssertionError):
            read = self._checkpoint().read(paths[0])
            read.assert_existing_objects_matched()
            read.expect_partial()  # The state of the compression is read below.
        states = map(_read_state, paths)
        state = hvdcomp.state_for(states, self._rank, ranks, self._options.residuals)
        self._compression.load_state_dict(state)

    def _checkpoint(self, **more: Any) -> tf.train.Checkpoint:
        """Creates a checkpoint. It does not contain the random state of dropout, which TensorFlow does not expose."""
        return tf.train.Checkpoint(model=self._model, optimizer=self._optimizer, **more)

    # Traced functions.

    def _mean_loss(self, inputs: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
        """The mean loss of all backward passes of a step."""
        passes = self._options.backward_passes_per_step
        parts = zip(tf.split(inputs, passes), tf.split(targets, passes), strict=True)
        return tf.add_n([_loss(self._model(x, training=True), y) for x, y in parts]) / passes

    def _apply(self, gradients: Sequence[tf.Tensor]) -> None:
        """Takes the optimizer's step with the averaged gradients, which are clipped if `clip_norm` is set."""
        options, variables = self._options, self._model.trainable_variables
        if options.clip_norm:
            clipped, _ = tf.clip_by_global_norm(gradients, options.clip_norm)
            # compressed momenta are not clipped, because their norm is mostly noise
            if options.optimizer == "compressed-adam":
                noisy = self._optimizer.sends_momenta()
                clipped = [tf.where(noisy, *pair) for pair in zip(gradients, clipped, strict=True)]
            gradients = clipped
        if options.weight_decay and options.optimizer == "sgd":
            decay = options.weight_decay
            gradients = [gradient + decay * variable for gradient, variable in zip(gradients, variables, strict=True)]
        self._optimizer.apply_gradients(zip(gradients, variables, strict=True))

    def _evaluation_step(self, inputs: tf.Tensor, targets: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        outputs = self._model(inputs, training=False)
        if targets.dtype.is_floating:
            return _loss(outputs, targets), tf.zeros((), tf.int64)
        right = tf.argmax(outputs, axis=-1) == targets
        return _loss(outputs, targets), tf.reduce_sum(tf.cast(right, tf.int64))


def _read_state(path: str) -> dict[str, Any]:
    with reading(tf.errors.OpError):
        return saved_state(path)


def _loss(outputs: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
    """The loss of a batch, as `torch_learner.loss_of` computes it."""
    if targets.dtype.is_floating:
        return tf.reduce_mean((outputs[:, 0] - targets) ** 2)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=targets, logits=outputs))
