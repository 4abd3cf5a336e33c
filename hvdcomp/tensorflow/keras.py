"""A callback for Keras `fit`. The callback checks a training run, and records its compression in logs and
TensorBoard."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf
import tf_keras

from hvdcomp.bindings.setup import UsedCompression
from hvdcomp.errors import ConfigurationError
from hvdcomp.exchange.ledger import Cost
from hvdcomp.policies import changes_batch_size
from hvdcomp.tensorflow.caller import refuse_keras_3
from hvdcomp.tensorflow.optimizer import learning_rate_of, unwrapped


class PolicyCallback(tf_keras.callbacks.Callback):
    """Checks a training run with `fit`, and records its compression and policy.

    - Before training begins, the callback raises an error if the model was compiled without Horovod's optimizer or with
      `jit_compile=True`. It also raises an error if `steps_per_epoch` of the `Compression` differs from the number of
      steps per epoch in `fit`, or if a policy changes the batch size, which `fit` does not support.
    - At the end of each epoch, the callback adds three values to the logs: `compression_factor` (dense bytes / sent
      bytes that may leave the node), `megabytes_sent` (everything that this rank has sent in the epoch), and
      `learning_rate`. History, CSVLogger and the progress bar show these values.
    - On rank 0, the callback writes TensorBoard scalars: `Compression.metrics` of the latest step, the level of each
      tensor, the learning rate, and the megabytes sent since the start of the epoch.
    - The callback excludes the time of validation from step times, which some policies use.

    The callback does not influence the result: `fit` gives the same weights without the callback.

    Args:
        compression: the `Compression` that Horovod's optimizer uses.
        log_dir: the folder for the TensorBoard scalars; None to write no scalars.
        update_freq: "epoch", or the number of batches after which scalars are written.

    Raises:
        ConfigurationError: if update_freq is invalid; in `fit`, if a check fails.
    """

    def __init__(
        self, compression: UsedCompression, log_dir: str | Path | None = None, update_freq: str | int = "epoch"
    ) -> None:
        super().__init__()
        if update_freq != "epoch" and (not isinstance(update_freq, int) or update_freq < 1):
            raise ConfigurationError(
                f'update_freq={update_freq!r} is not allowed; give "epoch" or a number of batches of at least 1'
            )
        self._compression = compression
        self._log_dir = log_dir
        self._update_freq = update_freq
        self._writer: tf.summary.SummaryWriter | None = None
        self._pause = ExitStack()  # stops the clock during validation
        self._epoch_began = Cost()  # the totals at the start of the epoch

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Checks the model, and opens the TensorBoard file."""
        optimizer = unwrapped(self.model.optimizer)
        refuse_keras_3(optimizer)
        if hvd.size() > 1 and not hasattr(optimizer, "_allreduce_grads"):
            raise ConfigurationError(
                "the model was compiled without Horovod's optimizer: use model.compile(optimizer="
                "hvd.DistributedOptimizer(optimizer, compression=compression), ...)"
            )
        if getattr(self.model, "_jit_compile", False):
            raise ConfigurationError("gradient compression and Horovod need model.compile(..., jit_compile=False)")
        settings = self._compression.settings
        if changes_batch_size(settings.policy):
            raise ConfigurationError(
                f"the policy {settings.policy} changes the batch size, but fit always uses the batches of its dataset. "
                "Write the training loop yourself, with hvd.DistributedGradientTape, and read compression.accumulation"
            )
        steps = self.params.get("steps")
        if settings.steps_per_epoch and steps and settings.steps_per_epoch != steps:
            raise ConfigurationError(
                f"hvdcomp.Compression was given steps_per_epoch={settings.steps_per_epoch}, but fit makes {steps} "
                "steps per epoch, so the policy would not decide at the ends of epochs; use hvdcomp.Compression(..., "
                f"steps_per_epoch={steps})"
            )
        if self._log_dir is not None and hvd.rank() == 0:
            self._writer = tf.summary.create_file_writer(str(self._log_dir))

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Records the totals at the start of the epoch."""
        self._epoch_began = replace(self._compression.ledger.totals)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Writes the scalars every `update_freq` batches."""
        if self._update_freq != "epoch" and (batch + 1) % int(self._update_freq) == 0:
            self._write(self._scalars())

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds values to the logs, and writes the scalars."""
        if logs is not None:
            logs |= self._scalars()
        if self._update_freq == "epoch":
            self._write(self._scalars())

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Stops the clock of steps during validation."""
        self._pause.enter_context(self._compression.paused())

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """Starts the clock of steps again."""
        self._pause.close()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Closes the TensorBoard file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _scalars(self) -> dict[str, float]:
        """The learning rate, the compression factor of the epoch, and the megabytes sent in the epoch."""
        epoch = replace(self._compression.ledger.totals)
        epoch.add(self._epoch_began, -1)  # only the bytes are used: the difference between two times is not meaningful
        scalars = {"learning_rate": learning_rate_of(unwrapped(self.model.optimizer))}
        if (factor := epoch.compression_factor) is not None:
            scalars |= {"compression_factor": factor, "megabytes_sent": epoch.bytes_sent / 1e6}
        return scalars

    def _write(self, scalars: dict[str, float]) -> None:
        if self._writer is None:
            return
        written: dict[str, float] = {f"hvdcomp/{name}": value for name, value in scalars.items()}
        written |= self._compression.metrics()  # replaces the compression factor with the factor of the latest step
        written |= {f"hvdcomp/level/{name}": level for name, level in self._compression.levels.items()}
        with self._writer.as_default(step=self._compression.ledger.steps):
            for name, value in written.items():
                tf.summary.scalar(name, value)
        self._writer.flush()
