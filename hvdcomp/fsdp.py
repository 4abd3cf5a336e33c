"""Gradient compression between the replicas of a model in FSDP2."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from hvdcomp.bindings.frameworks import require_optimizer
from hvdcomp.bindings.setup import UsedCompression, require_compression
from hvdcomp.errors import ConfigurationError
from hvdcomp.torch.fsdp_binding import FSDPBinding, modules_of

__all__ = ["register"]


def register(model: torch.nn.Module, compression: UsedCompression, mesh: DeviceMesh, optimizer: Any = None) -> None:
    """Lets the replicas of a model that is sharded by `fully_shard` exchange their gradients compressed (HSDP).

        mesh = init_device_mesh("cuda", (nodes, 8), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh["shard"])
        hvdcomp.fsdp.register(model, hvdcomp.Compression(hvdcomp.TopK(ratio=0.01)), mesh["replicate"])

    To be called on every rank, before the first backward pass. Gradients are reduced to shards as FSDP does it, and
    each shard is exchanged with those of the other replicas when the backward pass is over. With a policy the ranks of
    each shard decide for themselves; the decision log has the decisions of rank 0's shard.

    Args:
        model: sharded over one dimension of a mesh.
        compression: of this model alone.
        mesh: the ranks that have the same shards: the other dimension.
        optimizer: that steps with the gradients; needed by policies that follow the learning rate or change the batch
            size.

    Raises:
        ConfigurationError: if the model is not sharded so, or the compression serves another one.
        RankMismatchError: on every rank, if some cannot take part. Whether all were told the same is compared in the
            first step.
    """
    if getattr(mesh, "ndim", None) != 1:
        raise ConfigurationError(
            f"hvdcomp.fsdp.register was given {mesh!r} as mesh; give it the dimension of the replicas, such as "
            "mesh['replicate'] of init_device_mesh(..., mesh_dim_names=('replicate', 'shard'))"
        )
    modules = modules_of(model)
    if not modules:
        raise ConfigurationError(
            f"hvdcomp.fsdp.register was given a {type(model).__name__} without shards; call "
            "torch.distributed.fsdp.fully_shard(model, mesh=mesh['shard']) first"
        )
    require_compression(compression, "hvdcomp.fsdp.register")
    require_optimizer(optimizer, "hvdcomp.fsdp.register", "torch")
    binding = compression.serve(lambda setup: FSDPBinding(setup, model, mesh.get_group()), optimizer)
    for module in modules:
        module.set_all_reduce_hook(binding.arrived)
