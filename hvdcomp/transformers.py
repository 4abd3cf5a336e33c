"""Gradient compression for the Trainer of Hugging Face's Transformers."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from hvdcomp import ddp
from hvdcomp.bindings.callers import caller_local
from hvdcomp.bindings.setup import UsedCompression, require_compression
from hvdcomp.errors import ConfigurationError
from hvdcomp.torch import trainers

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
except ModuleNotFoundError as error:
    raise trainers.missing(error, "transformers") from None

__all__ = ["CompressionCallback"]


class CompressionCallback(TrainerCallback):
    """A callback that makes a Trainer exchange compressed gradients, and save the state of each rank in its
    checkpoints.

        compression = hvdcomp.Compression(hvdcomp.Int4())
        trainer = Trainer(model, arguments, callbacks=[hvdcomp.transformers.CompressionCallback(compression)], ...)

    The rest of the training code stays the same. Start two or more ranks, with torchrun or accelerate launch. Each rank
    saves its state to `compressionRANK.pt` in the folder of each checkpoint, and
    `trainer.train(resume_from_checkpoint=...)` restores this state. If the number of ranks has changed, the residuals
    of the old ranks are redistributed over the new ranks. With float16, the callback finds the Trainer's GradScaler by
    itself. The times of steps, which some policies use, do not include evaluations and checkpoints.

    Args:
        compression: a `Compression` that only the model of this Trainer uses. If `train` is called again, training
            continues with the current residuals.

    Raises:
        ConfigurationError: if `compression` is not a `Compression`, or has a policy that changes the batch size.
            `train` raises this error if the Trainer has not wrapped the model in DistributedDataParallel, for example
            because there is only one rank. `hyperparameter_search` always raises this error, because it trains several
            models.
    """

    def __init__(self, compression: UsedCompression) -> None:
        require_compression(compression, "hvdcomp.transformers.CompressionCallback")
        trainers.refuse_batch_sizes(compression, "the Trainer of Transformers")
        self.compression = compression
        self._model: Any = None  # the model for which the `Compression` was registered
        self._pause = ExitStack()  # stops the clock of the steps between the end of a step and the next step

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Registers the `Compression`, and restores its state."""
        if state.is_hyper_param_search:
            raise ConfigurationError(
                "hyperparameter_search trains several models, but an hvdcomp.Compression works for only one model. "
                "Search without hvdcomp.transformers.CompressionCallback, and use the callback only in the final "
                "training"
            )
        # The Trainer passes the model to a callback, but not the Trainer itself, the wrapped model or the checkpoint.
        # But `train`, which has called this method, has the Trainer and the checkpoint as arguments. These arguments
        # are read from its local variables.
        trainer = caller_local("self", lambda value: isinstance(value, Trainer))
        model = trainer.model_wrapped
        if not isinstance(getattr(model, "_orig_mod", model), DistributedDataParallel):
            raise ConfigurationError(
                f"the Trainer trains a {type(model).__name__} in {args.world_size} "
                f"process{'es' * (args.world_size > 1)}, but hvdcomp.transformers.CompressionCallback needs "
                "DistributedDataParallel. Start two or more ranks (for example, torchrun --nproc-per-node 2 PROGRAM), "
                "and do not use FSDP or DeepSpeed. For a single rank, leave the callback out"
            )
        if state.global_step:
            checkpoint = caller_local("resume_from_checkpoint", lambda value: isinstance(value, str | Path))
            trainers.restore(
                self.compression,
                lambda rank: trainers.read(_file(checkpoint, rank)),
                args.process_index,
                args.world_size,
                checkpoint,
            )
        if model is not self._model:
            ddp.register(model, self.compression, trainer.optimizer.optimizer, trainer.accelerator.scaler)
            self._model = model

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Saves the state of this rank."""
        if not args.save_only_model:
            folder = Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
            trainers.save(self.compression, _file(folder, args.process_index))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Stops the clock before an evaluation or a checkpoint."""
        if control.should_evaluate or control.should_save:
            self._pause.enter_context(self.compression.paused())

    on_epoch_end = on_step_end

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Starts the clock of the steps again."""
        self._pause.close()


def _file(checkpoint: Any, rank: int) -> Path:
    return Path(checkpoint, f"compression{rank}.pt")
