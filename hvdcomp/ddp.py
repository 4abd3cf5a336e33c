"""Gradient compression for `torch.nn.parallel.DistributedDataParallel`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from hvdcomp.bindings.frameworks import require_optimizer, require_scaler
from hvdcomp.bindings.setup import Setup, UsedCompression, require_compression
from hvdcomp.errors import ConfigurationError
from hvdcomp.torch.ddp.binding import DDPBinding

__all__ = ["register"]


def register(
    model: DistributedDataParallel, compression: UsedCompression, optimizer: Any = None, grad_scaler: Any = None
) -> None:
    """Sets up the exchange of compressed gradients for a model that is wrapped in DistributedDataParallel.

        model = torch.nn.parallel.DistributedDataParallel(model)
        hvdcomp.ddp.register(model, hvdcomp.Compression(hvdcomp.Int4()))

    Call this function on every rank, before the first backward pass. The rest of the training loop stays the same. The
    attributes and methods of `Compression` (`ledger`, `set_level`, `state_dict`, ...) work as with Horovod. Tensors are
    named after the parameters of the model, without the prefixes of wrappers ("module.", "_orig_mod." and others).

    Args:
        model: a model that is wrapped in DistributedDataParallel and has no other communication hook. It may also be
            wrapped by torch.compile.
        compression: a `Compression` that no other model uses. Call its `load_state_dict` before `register`, or between
            `register` and the first step.
        optimizer: the model's optimizer. Policies that follow the learning rate or change the batch size need the
            optimizer.
        grad_scaler: the `torch.amp.GradScaler` that you train with, if there is one. `Compression(grad_scaler=...)`
            overrides it.

    Raises:
        ConfigurationError: if the model is not wrapped in DistributedDataParallel, or if another model uses this
            `Compression`.
        RankMismatchError: on every rank, if some ranks raised an error. Settings that differ between ranks raise this
            error in the first step.
    """
    model = getattr(model, "_orig_mod", model)  # the model inside the wrapper of torch.compile
    if not isinstance(model, DistributedDataParallel):
        raise ConfigurationError(
            f"hvdcomp.ddp.register was given a {type(model).__name__} as the argument model; pass the model that "
            "torch.nn.parallel.DistributedDataParallel(model) returned"
        )
    require_compression(compression, "hvdcomp.ddp.register")
    require_optimizer(optimizer, "hvdcomp.ddp.register", "torch")
    require_scaler(grad_scaler, "torch")

    def make_binding(setup: Setup) -> DDPBinding:
        scaler = grad_scaler if setup.grad_scaler is None else setup.grad_scaler
        return DDPBinding(replace(setup, grad_scaler=scaler), model)

    compression.serve(make_binding, optimizer)
