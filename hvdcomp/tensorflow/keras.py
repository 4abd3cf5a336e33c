"""A callback that shows, checks and records what a `Compression` does during Keras `fit`."""

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
    """Tells a training by `fit` what its compression and its policy do.

    - Before training it checks what would go wrong later: a model compiled without Horovod's optimizer or with
      `jit_compile=True`, a `steps_per_epoch` of the policy that is not that of `fit`, a policy that changes the batch
      size, which `fit` cannot follow.
    - At the end of each epoch it adds `compression_factor` (dense bytes / sent bytes that may leave the node),
      `megabytes_sent` (all that this rank sent, both in that epoch) and `learning_rate` to the logs, where History,
      CSVLogger and the progress bar show them.
    - On rank 0 it writes TensorBoard scalars: `Compression.metrics` of the latest step, the level of each tensor, the
      learning rate, and the megabytes sent since the epoch began.
    - It leaves validation out of the times of steps, by which some policies decide.

    The decisions themselves do not need it: `fit` without this callback trains alike.

    Args:
        compression: as in Horovod's optimizer.
        log_dir: of the TensorBoard scalars; None for none.
        update_freq: when to write the scalars: "epoch", or after how many batches.

    Raises:
        ConfigurationError: for another update_freq; in `fit`, for what it checks.
    """

    def __init__(
        self, compression: UsedCompression, log_dir: str | Path | None = None, update_freq: str | int = "epoch"
    ) -> None:
        super().__init__()
        if update_freq != "epoch" and (not isinstance(update_freq, int) or update_freq < 1):
            raise ConfigurationError(f'update_freq={update_freq!r} must be "epoch" or a number of batches, at least 1')
        self._compression = compression
        self._log_dir = log_dir
        self._update_freq = update_freq
        self._writer: tf.summary.SummaryWriter | None = None
        self._pause = ExitStack()  # while validation goes on
        self._epoch_began = Cost()  # what was sent until then

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
                f"the policy {settings.policy} changes the batch size, and fit takes batches as its dataset gives "
                "them; write the training loop with hvd.DistributedGradientTape, and read compression.accumulation"
            )
        steps = self.params.get("steps")
        if settings.steps_per_epoch and steps and settings.steps_per_epoch != steps:
            raise ConfigurationError(
                f"hvdcomp.Compression was given steps_per_epoch={settings.steps_per_epoch}, and fit makes {steps} "
                "steps per epoch: its policy would decide at other moments than the ends of epochs"
            )
        if self._log_dir is not None and hvd.rank() == 0:
            self._writer = tf.summary.create_file_writer(str(self._log_dir))

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes what was sent until now."""
        self._epoch_began = replace(self._compression.ledger.totals)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Writes the scalars, if it is time."""
        if self._update_freq != "epoch" and (batch + 1) % int(self._update_freq) == 0:
            self._write(self._scalars())

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds to the logs, and writes the scalars."""
        if logs is not None:
            logs |= self._scalars()
        if self._update_freq == "epoch":
            self._write(self._scalars())

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Stops the clock by which policies time steps: validation belongs to none."""
        self._pause.enter_context(self._compression.paused())

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """Lets it go on."""
        self._pause.close()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Closes the TensorBoard file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _scalars(self) -> dict[str, float]:
        """The learning rate, and what was sent since the epoch began."""
        epoch = replace(self._compression.ledger.totals)
        epoch.add(self._epoch_began, -1)  # bytes only: its times mean nothing now
        scalars = {"learning_rate": learning_rate_of(unwrapped(self.model.optimizer))}
        if (factor := epoch.compression_factor) is not None:
            scalars |= {"compression_factor": factor, "megabytes_sent": epoch.bytes_sent / 1e6}
        return scalars

    def _write(self, scalars: dict[str, float]) -> None:
        if self._writer is None:
            return
        written: dict[str, float] = {f"hvdcomp/{name}": value for name, value in scalars.items()}
        written |= self._compression.metrics()  # the compression factor too is that of a step
        written |= {f"hvdcomp/level/{name}": level for name, level in self._compression.levels.items()}
        with self._writer.as_default(step=self._compression.ledger.steps):
            for name, value in written.items():
                tf.summary.scalar(name, value)
        self._writer.flush()
