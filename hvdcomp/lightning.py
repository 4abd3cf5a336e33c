"""Gradient compression for PyTorch Lightning and Fabric."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any

from torch.optim import Optimizer

from hvdcomp import ddp
from hvdcomp.bindings.setup import UsedCompression, require_compression
from hvdcomp.errors import ConfigurationError
from hvdcomp.torch import trainers

try:
    from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.trainer.states import TrainerFn
except ModuleNotFoundError as error:
    raise trainers.missing(error, "lightning") from None

__all__ = ["CompressedFabricStrategy", "CompressedStrategy"]


class CompressedStrategy(DDPStrategy):
    """Lets a Lightning Trainer train in DistributedDataParallel with compressed gradients.

        compression = hvdcomp.Compression(hvdcomp.TopK(ratio=0.01))
        trainer = lightning.Trainer(strategy=hvdcomp.lightning.CompressedStrategy(compression), ...)

    The rest of the training does not change. Beside each checkpoint for training, each rank saves its state to
    `CHECKPOINT.rankRANK` by the Trainer's own `CheckpointIO`, and `trainer.fit(ckpt_path=...)` restores it. If the
    number of ranks has changed, the new ranks share the residuals of all old ranks. In float16 the strategy finds the
    GradScaler by itself. Validations do not count in the step times that some policies use.

    Args:
        compression: a compression for one call of `Trainer.fit`.
        options: other arguments of `lightning.pytorch.strategies.DDPStrategy`.

    Raises:
        ConfigurationError: if `compression` is not a compression, or has a policy that changes the batch size. In
            `fit`, if another `fit` has used the compression.
    """

    def __init__(self, compression: UsedCompression, **options: Any) -> None:
        require_compression(compression, "hvdcomp.lightning.CompressedStrategy")
        trainers.refuse_batch_sizes(compression, "the Trainer of Lightning")
        super().__init__(**options)
        self.compression = compression
        self._pause = ExitStack()  # of the clock, during validations

    def setup(self, trainer: Any) -> None:
        """Registers the compression of the model, once it is in DistributedDataParallel."""
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:  # otherwise there is no DistributedDataParallel
            optimizer = next(iter(self.optimizers), None)
            ddp.register(self.model, self.compression, optimizer, getattr(self.precision_plugin, "scaler", None))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Saves the state of each rank, then the checkpoint."""
        if "optimizer_states" in checkpoint:  # otherwise it has weights only
            _save(self, filepath, storage_options)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Restores the state of this rank if the checkpoint is for training, and loads the checkpoint."""
        if self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            _restore(self, checkpoint_path)
        return super().load_checkpoint(checkpoint_path, weights_only)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Removes the checkpoint and the state of each rank."""
        self.checkpoint_io.remove_checkpoint(_file(filepath, self.global_rank))
        super().remove_checkpoint(filepath)

    def on_validation_start(self) -> None:
        """Stops the clock."""
        self._pause.enter_context(self.compression.paused())

    def on_validation_end(self) -> None:
        """Starts the clock again."""
        self._pause.close()


class CompressedFabricStrategy(FabricDDPStrategy):
    """Lets Fabric train in DistributedDataParallel with compressed gradients.

        compression = hvdcomp.Compression(hvdcomp.TopK(ratio=0.01))
        fabric = lightning.Fabric(strategy=hvdcomp.lightning.CompressedFabricStrategy(compression), ...)

    The rest of the program does not change. If `fabric.save` saves an optimizer, each rank saves its state to
    `CHECKPOINT.rankRANK`, and `fabric.load` restores it with the optimizer. Call `fabric.load` before the first step.
    If the number of ranks has changed, the new ranks share the residuals of all old ranks. In float16 the strategy
    finds the GradScaler by itself.

    Args:
        compression: a compression. `fabric.setup` may be called for one model only.
        options: other arguments of `lightning.fabric.strategies.DDPStrategy`.

    Raises:
        ConfigurationError: if `compression` is not a compression. In `fabric.setup`, for a second model. In
            `fabric.save` and `fabric.load`, if the given state has the compression: Fabric would save it on rank 0
            only.
    """

    def __init__(self, compression: UsedCompression, **options: Any) -> None:
        require_compression(compression, "hvdcomp.lightning.CompressedFabricStrategy")
        super().__init__(**options)
        self.compression = compression
        self._optimizer: Optimizer | None = None

    def setup_module_and_optimizers(self, module: Any, optimizers: list[Optimizer], scheduler: Any = None) -> Any:
        """Sets up the model with its optimizer, because some policies follow the learning rate."""
        self._optimizer = next(iter(optimizers), None)
        return super().setup_module_and_optimizers(module, optimizers, scheduler)

    def setup_module(self, module: Any) -> Any:
        """Puts the model in DistributedDataParallel, and registers the compression."""
        model = super().setup_module(module)
        ddp.register(model, self.compression, self._optimizer, getattr(self.precision, "scaler", None))
        return model

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Saves the state of each rank, then the checkpoint."""
        if self._trains(state):
            _save(self, path, storage_options)
        super().save_checkpoint(path, state, storage_options, filter)

    def load_checkpoint(self, path: Any, state: Any = None, *arguments: Any, **options: Any) -> dict[str, Any]:
        """Restores the state of this rank if the checkpoint is for training, and loads the checkpoint."""
        if isinstance(state, dict) and self._trains(state):
            _restore(self, path)
        return super().load_checkpoint(path, state, *arguments, **options)

    def _trains(self, state: dict[str, Any]) -> bool:
        """Whether a training can continue from what is saved."""
        if names := [name for name, value in state.items() if value is self.compression]:
            raise ConfigurationError(
                f"the state for Fabric's checkpoint has the hvdcomp.Compression as {names[0]!r}; leave {names[0]!r} "
                "out. Fabric would save only the Compression of rank 0, but the strategy already saves and loads the "
                "Compression of each rank together with the optimizer"
            )
        return any(isinstance(value, Optimizer) for value in state.values())


def _save(strategy: CompressedStrategy | CompressedFabricStrategy, checkpoint: Any, storage_options: Any) -> None:
    state = strategy.compression.state_dict()
    strategy.checkpoint_io.save_checkpoint(state, _file(checkpoint, strategy.global_rank), storage_options)
    strategy.barrier()  # where there is a checkpoint, the files of all ranks are there too


def _restore(strategy: CompressedStrategy | CompressedFabricStrategy, checkpoint: Any) -> None:
    # A link to the last checkpoint has no files of ranks beside it. A URL is no path.
    path = checkpoint if "://" in str(checkpoint) else os.path.realpath(checkpoint)

    def read(rank: int) -> Any:
        try:
            return strategy.checkpoint_io.load_checkpoint(_file(path, rank), weights_only=True)
        except FileNotFoundError:
            return None

    trainers.restore(strategy.compression, read, strategy.global_rank, strategy.world_size, checkpoint)


def _file(checkpoint: Any, rank: int) -> str:
    return f"{checkpoint}.rank{rank}"
