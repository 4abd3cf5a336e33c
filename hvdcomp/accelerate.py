"""Gradient compression for training loops with Hugging Face's accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from weakref import finalize, ref

from torch.nn.parallel import DistributedDataParallel

from hvdcomp import ddp
from hvdcomp.bindings.setup import UsedCompression
from hvdcomp.errors import ConfigurationError
from hvdcomp.torch import trainers

try:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
except ModuleNotFoundError as error:
    raise trainers.missing(error, "accelerate") from None

__all__ = ["register"]


def register(accelerator: Accelerator, model: Any, compression: UsedCompression, optimizer: Any = None) -> None:
    """Makes a model that accelerate has prepared exchange compressed gradients.

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        compression = hvdcomp.Compression(hvdcomp.TopK(ratio=0.01))
        hvdcomp.accelerate.register(accelerator, model, compression, optimizer)

    Call this function on every rank, right after `prepare`. `accelerator.save_state` then saves the state of each rank
    to `compressionRANK.pt` in the checkpoint's folder, and `accelerator.load_state` restores this state. Call
    `load_state` after `register` and before the first step. If the number of ranks has changed, the new ranks share the
    residuals of all old ranks. With float16, hvdcomp finds the GradScaler by itself.

    Args:
        accelerator: the accelerator. It must have two or more processes.
        model: the model that `prepare` returned, wrapped in DistributedDataParallel.
        compression: a `Compression` that no other model uses.
        optimizer: the optimizer that `prepare` returned. Policies that follow the learning rate need it.

    Raises:
        ConfigurationError: if accelerate has not wrapped the model in DistributedDataParallel, or if another model uses
            this `Compression`.
        RankMismatchError: on every rank, if some ranks raised an error.
    """
    if not isinstance(accelerator, Accelerator):
        raise ConfigurationError(
            f"hvdcomp.accelerate.register was given a {type(accelerator).__name__} as accelerator; pass the "
            "accelerate.Accelerator first, then the model, the compression and the optimizer"
        )
    if not isinstance(_inner(model), DistributedDataParallel):
        raise ConfigurationError(
            f"hvdcomp.accelerate.register was given a {type(model).__name__} that is not wrapped in "
            f"DistributedDataParallel (accelerate: num_processes={accelerator.num_processes}, "
            f"distributed_type={accelerator.distributed_type.value}). Pass the model that accelerator.prepare(model) "
            "returned, and start two or more processes, with torchrun or accelerate launch --multi_gpu. For FSDP2, use "
            "hvdcomp.fsdp.register"
        )
    if isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    ddp.register(model, compression, optimizer, accelerator.scaler)
    # The accelerator keeps the hooks below. If they referred to the model, it could not be freed.
    prepared = ref(_inner(model))

    def names_of(models: list[Any]) -> str | None:
        """The beginning of the names of this model's files; None if the accelerator no longer has the model."""
        # The accelerator passes the modules as they were before it wrapped them in DistributedDataParallel.
        parameters = [_first_parameter(one) for one in models]
        own = _first_parameter(prepared())
        if own not in parameters:
            return None
        number = parameters.index(own)
        return "compression" if number == 0 else f"compression_{number}_"

    def save(models: list[Any], weights: list[Any], folder: str) -> None:
        if (name := names_of(models)) is not None:
            trainers.save(compression, Path(folder, f"{name}{accelerator.process_index}.pt"))

    def load(models: list[Any], folder: str) -> None:
        if (name := names_of(models)) is not None:
            trainers.restore(
                compression,
                lambda rank: trainers.read(Path(folder, f"{name}{rank}.pt")),
                accelerator.process_index,
                accelerator.num_processes,
                folder,
            )

    for hook in (accelerator.register_save_state_pre_hook(save), accelerator.register_load_state_pre_hook(load)):
        finalize(_inner(model), hook.remove)


def _inner(model: Any) -> Any:
    """The model without the wrapper of torch.compile."""
    return getattr(model, "_orig_mod", model)


def _first_parameter(model: Any) -> int:
    return id(next(model.parameters(), None))
