"""Gradient compression for `torch.nn.parallel.DistributedDataParallel`."""

from __future__ import annotations

from typing import Any

from torch.nn.parallel import DistributedDataParallel

from hvdcomp.bindings.frameworks import require_optimizer
from hvdcomp.bindings.setup import UsedCompression, require_compression
from hvdcomp.errors import ConfigurationError
from hvdcomp.torch.ddp_binding import DDPBinding

__all__ = ["register"]


def register(model: DistributedDataParallel, compression: UsedCompression, optimizer: Any = None) -> None:
    """Lets a model in DistributedDataParallel exchange its gradients compressed.

        model = torch.nn.parallel.DistributedDataParallel(model)
        hvdcomp.ddp.register(model, hvdcomp.Compression(hvdcomp.TopK(ratio=0.01)))

    To be called on every rank, before the first backward pass. The rest of the training stays as it is. What
    `Compression` offers (`ledger`, `set_level`, `state_dict`, ...) works as with Horovod, and tensors have the names
    that they have in the module, without what wrappers put in front ("module.", "_orig_mod." and others).

    Args:
        model: with no other communication hook; also in torch.compile.
        compression: of this model alone. A state that `load_state_dict` was given before, or is given between
            `register` and the first step, holds from the first step on.
        optimizer: that steps with the gradients; needed by policies that follow the learning rate or change the batch
            size.

    Raises:
        ConfigurationError: if the model is not in DistributedDataParallel, or the compression serves another one.
        RankMismatchError: on every rank, if some cannot take part. Whether all were told the same is compared in the
            first step.
    """
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    if not isinstance(model, DistributedDataParallel):
        raise ConfigurationError(
            f"hvdcomp.ddp.register was given a {type(model).__name__}; give it what "
            "torch.nn.parallel.DistributedDataParallel(model) returned"
        )
    require_compression(compression, "hvdcomp.ddp.register")
    require_optimizer(optimizer, "hvdcomp.ddp.register", "torch")
    compression.serve(lambda setup: DDPBinding(setup, model), optimizer)
