"""Gradient compression for training loops with Hugging Face's accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from weakref import finalize, ref

import torch.distributed.checkpoint
from torch.nn.parallel import DistributedDataParallel

from hvdcomp import dcp, ddp, fsdp
from hvdcomp.bindings.setup import UsedCompression
from hvdcomp.errors import ConfigurationError
from hvdcomp.torch import trainers
from hvdcomp.torch.fsdp.checks import modules_of

try:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
except ModuleNotFoundError as error:
    raise trainers.missing(error, "accelerate") from None

__all__ = ["register"]


def register(
    accelerator: Accelerator,
    model: Any,
    compression: UsedCompression,
    optimizer: Any = None,
    shards: UsedCompression | None = None,
) -> None:
    """Sets up the exchange of compressed gradients for a model that accelerate has prepared.

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        compression = hvdcomp.Compression(hvdcomp.Int4())
        hvdcomp.accelerate.register(accelerator, model, compression, optimizer)

    Call this function on every rank, right after `prepare`. `accelerator.save_state` then saves the state of each rank
    to `compressionRANK.pt` in the checkpoint's folder, and `accelerator.load_state` restores this state. Call
    `load_state` after `register` and before the first step. If the number of ranks has changed, the residuals of the
    old ranks are redistributed over the new ranks. With float16, hvdcomp finds the GradScaler by itself.

    If the model uses FSDP2, this function works like `hvdcomp.fsdp.register`. The states of all ranks are then in the
    folder `compression` of the checkpoint, in the format of `torch.distributed.checkpoint`.

    Args:
        accelerator: the accelerator, with two or more processes.
        model: the model that `prepare` returned, wrapped in DistributedDataParallel, or sharded by FSDP2.
        compression: a `Compression` that no other model uses.
        optimizer: the optimizer that `prepare` returned. Policies that follow the learning rate need the optimizer.
        shards: a second compression, as in `hvdcomp.fsdp.register`. Only for FSDP2 with replicas.

    Raises:
        ConfigurationError: if accelerate has neither wrapped the model in DistributedDataParallel nor sharded it by
            FSDP2, or if another model uses this `Compression`. With FSDP2, this error is also raised for the reasons
            given in `hvdcomp.fsdp.register`.
        RankMismatchError: on every rank, if some ranks raised an error.
    """
    if not isinstance(accelerator, Accelerator):
        raise ConfigurationError(
            f"hvdcomp.accelerate.register was given a {type(accelerator).__name__} as the argument accelerator. Pass "
            "the accelerate.Accelerator first, then the model, the compression and the optimizer"
        )
    in_fsdp = bool(modules_of(_inner(model)))
    if not isinstance(_inner(model), DistributedDataParallel) and not in_fsdp:
        raise ConfigurationError(
            f"hvdcomp.accelerate.register was given a {type(model).__name__} that is neither wrapped in "
            f"DistributedDataParallel nor sharded by FSDP2 (accelerate: num_processes={accelerator.num_processes}, "
            f"distributed_type={accelerator.distributed_type.value}). Pass the model that accelerator.prepare(model) "
            "returned, and start two or more processes, with torchrun or accelerate launch --multi_gpu"
        )
    if isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    if in_fsdp:
        _register_in_fsdp(accelerator, model, compression, optimizer, shards)
    elif shards is not None:
        raise ConfigurationError(
            "hvdcomp.accelerate.register was given the argument shards=, but a model in DistributedDataParallel is not "
            "sharded. Omit shards=, or let accelerate shard the model with FSDP2, through "
            "ParallelismConfig(dp_replicate_size=..., dp_shard_size=...)"
        )
    else:
        ddp.register(model, compression, optimizer, accelerator.scaler)
    compressions = {"compression": compression} if shards is None else {"compression": compression, "shards": shards}
    # The accelerator keeps the hooks below. If the hooks referred to the model, the model could never be freed.
    prepared = ref(_inner(model))

    def names_of(models: list[Any]) -> str | None:
        """The prefix of the names of this model's files; None if the accelerator no longer has the model."""
        # The accelerator passes the modules as they were before it wrapped them in DistributedDataParallel.
        parameters = [_first_parameter(one) for one in models]
        own = _first_parameter(prepared())
        if own not in parameters:
            return None
        number = parameters.index(own)
        return "compression" if number == 0 else f"compression_{number}_"

    def save(models: list[Any], weights: list[Any], folder: str) -> None:
        name = names_of(models)
        if name is not None and in_fsdp:
            states = {key: dcp.by_rank(one) for key, one in compressions.items()}
            torch.distributed.checkpoint.save(states, checkpoint_id=Path(folder, name))
        elif name is not None:
            trainers.save(compression, Path(folder, f"{name}{accelerator.process_index}.pt"))

    def load(models: list[Any], folder: str) -> None:
        if in_fsdp:  # accelerate has already loaded the models, so it passes no models here
            models = accelerator._models  # noqa: SLF001  # there is no public name for this list
        name = names_of(models)
        if name is not None and in_fsdp:
            if not Path(folder, name).is_dir():
                trainers.warn_of_no_state(folder, accelerator.process_index)
                return
            for key, one in compressions.items():
                dcp.load(one, Path(folder, name), key)
        elif name is not None:
            trainers.restore(
                compression,
                lambda rank: trainers.read(Path(folder, f"{name}{rank}.pt")),
                accelerator.process_index,
                accelerator.num_processes,
                folder,
            )

    for hook in (accelerator.register_save_state_pre_hook(save), accelerator.register_load_state_pre_hook(load)):
        finalize(_inner(model), hook.remove)


def _register_in_fsdp(
    accelerator: Accelerator,
    model: Any,
    compression: UsedCompression,
    optimizer: Any,
    shards: UsedCompression | None,
) -> None:
    if accelerator.scaler is not None and accelerator.scaler.is_enabled():
        raise ConfigurationError(
            "a torch.amp.GradScaler does not work with a sharded model: if the gradients of one shard overflow, the "
            "step is skipped, and the other shards lose the gradients that they have sent. Use "
            'Accelerator(mixed_precision="bf16"), which needs no scaler'
        )
    fsdp.register(model, compression, optimizer=optimizer, shards=shards)


def _inner(model: Any) -> Any:
    """The model without the wrapper of torch.compile."""
    return getattr(model, "_orig_mod", model)


def _first_parameter(model: Any) -> int:
    return id(next(model.parameters(), None))
