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
    """A DistributedDataParallel strategy that makes a Lightning Trainer exchange compressed gradients.

        compression = hvdcomp.Compression(hvdcomp.Int4())
        trainer = lightning.Trainer(strategy=hvdcomp.lightning.CompressedStrategy(compression), ...)

    The rest of the training code stays the same. Next to each checkpoint that contains an optimizer, each rank saves
    its state to `CHECKPOINT.rankRANK` with the Trainer's own `CheckpointIO`. `trainer.fit(ckpt_path=...)` restores this
    state. If the number of ranks has changed, the residuals of the old ranks are redistributed over the new ranks. With
    float16, the strategy finds the GradScaler by itself. The times of steps, which some policies use, do not include
    validations.

    Args:
        compression: a `Compression` for one call of `Trainer.fit`.
        options: other arguments of `lightning.pytorch.strategies.DDPStrategy`.

    Raises:
        ConfigurationError: if `compression` is not a `Compression`, or has a policy that changes the batch size. `fit`
            raises this error if an earlier call of `fit` has used this `Compression`.
    """

    def __init__(self, compression: UsedCompression, **options: Any) -> None:
        require_compression(compression, "hvdcomp.lightning.CompressedStrategy")
        trainers.refuse_batch_sizes(compression, "the Trainer of Lightning")
        super().__init__(**options)
        self.compression = compression
        self._pause = ExitStack()  # stops the clock of the steps during validations

    def setup(self, trainer: Any) -> None:
        """Registers the `Compression` after Lightning has wrapped the model in DistributedDataParallel."""
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:  # otherwise Lightning does not use DistributedDataParallel
            optimizer = next(iter(self.optimizers), None)
            ddp.register(self.model, self.compression, optimizer, getattr(self.precision_plugin, "scaler", None))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Saves the state of each rank, and then the checkpoint."""
        if "optimizer_states" in checkpoint:  # otherwise the checkpoint has only weights
            _save(self, filepath, storage_options)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Restores the state of this rank if the Trainer continues a training run, and loads the checkpoint."""
        if self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            _restore(self, checkpoint_path)
        return super().load_checkpoint(checkpoint_path, weights_only)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Removes the checkpoint and the state of each rank."""
        self.checkpoint_io.remove_checkpoint(_file(filepath, self.global_rank))
        super().remove_checkpoint(filepath)

    def on_validation_start(self) -> None:
        """Stops the clock of the steps."""
        self._pause.enter_context(self.compression.paused())

    def on_validation_end(self) -> None:
        """Starts the clock of the steps again."""
        self._pause.close()


class CompressedFabricStrategy(FabricDDPStrategy):
    """A DistributedDataParallel strategy that makes Fabric exchange compressed gradients.

        compression = hvdcomp.Compression(hvdcomp.Int4())
        fabric = lightning.Fabric(strategy=hvdcomp.lightning.CompressedFabricStrategy(compression), ...)

    The rest of the program stays the same. If `fabric.save` saves an optimizer, each rank also saves its state to
    `CHECKPOINT.rankRANK`. If `fabric.load` loads an optimizer, each rank also restores this state. Call `fabric.load`
    before the first step. If the number of ranks has changed, the residuals of the old ranks are redistributed over the
    new ranks. With float16, the strategy finds the GradScaler by itself.

    Args:
        compression: the `Compression` of the training run. Call `fabric.setup` for only one model.
        options: other arguments of `lightning.fabric.strategies.DDPStrategy`.

    Raises:
        ConfigurationError: if `compression` is not a `Compression`. `fabric.setup` raises this error if it is called
            for a second model. `fabric.save` and `fabric.load` raise this error if the given state contains the
            `Compression`, because Fabric would save the `Compression` only on rank 0.
    """

    def __init__(self, compression: UsedCompression, **options: Any) -> None:
        require_compression(compression, "hvdcomp.lightning.CompressedFabricStrategy")
        super().__init__(**options)
        self.compression = compression
        self._optimizer: Optimizer | None = None

    def setup_module_and_optimizers(self, module: Any, optimizers: list[Optimizer], scheduler: Any = None) -> Any:
        """Sets up the model, and stores the optimizer for policies that follow its learning rate."""
        self._optimizer = next(iter(optimizers), None)
        return super().setup_module_and_optimizers(module, optimizers, scheduler)

    def setup_module(self, module: Any) -> Any:
        """Wraps the model in DistributedDataParallel, and registers the `Compression`."""
        model = super().setup_module(module)
        ddp.register(model, self.compression, self._optimizer, getattr(self.precision, "scaler", None))
        return model

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Saves the state of each rank if the checkpoint contains an optimizer, and then the checkpoint."""
        if self._trains(state):
            _save(self, path, storage_options)
        super().save_checkpoint(path, state, storage_options, filter)

    def load_checkpoint(self, path: Any, state: Any = None, *arguments: Any, **options: Any) -> dict[str, Any]:
        """Restores the state of this rank if an optimizer is loaded, and loads the checkpoint."""
        if isinstance(state, dict) and self._trains(state):
            _restore(self, path)
        return super().load_checkpoint(path, state, *arguments, **options)

    def _trains(self, state: dict[str, Any]) -> bool:
        """Whether this state contains an optimizer, so that a training run can continue from it.

        Raises:
            ConfigurationError: if the state contains the `Compression`.
        """
        if names := [name for name, value in state.items() if value is self.compression]:
            raise ConfigurationError(
                f"the state for Fabric's checkpoint contains the hvdcomp.Compression as {names[0]!r}. Leave "
                f"{names[0]!r} out, because Fabric would save only the Compression of rank 0. The strategy already "
                "saves and loads the Compression of each rank together with the optimizer"
            )
        return any(isinstance(value, Optimizer) for value in state.values())


def _save(strategy: CompressedStrategy | CompressedFabricStrategy, checkpoint: Any, storage_options: Any) -> None:
    state = strategy.compression.state_dict()
    strategy.checkpoint_io.save_checkpoint(state, _file(checkpoint, strategy.global_rank), storage_options)
    strategy.barrier()  # rank 0 saves the checkpoint only after all ranks have saved their states


def _restore(strategy: CompressedStrategy | CompressedFabricStrategy, checkpoint: Any) -> None:
    # The path may be a link to the latest checkpoint. The states of the ranks are next to the checkpoint, not next to
    # the link. A URL is not a path, and stays as it is.
    path = checkpoint if "://" in str(checkpoint) else os.path.realpath(checkpoint)

    def read(rank: int) -> Any:
        try:
            return strategy.checkpoint_io.load_checkpoint(_file(path, rank), weights_only=True)
        except FileNotFoundError:
            return None

    trainers.restore(strategy.compression, read, strategy.global_rank, strategy.world_size, checkpoint)


def _file(checkpoint: Any, rank: int) -> str:
    return f"{checkpoint}.rank{rank}"
