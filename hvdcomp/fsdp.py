"""Gradient compression in FSDP2: in its reduce-scatter between nodes, or between replicas of a model."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from hvdcomp.bindings.frameworks import require_optimizer
from hvdcomp.bindings.setup import UsedCompression, require_compression
from hvdcomp.compressors import Compressor
from hvdcomp.errors import ConfigurationError
from hvdcomp.torch.fsdp_binding import FSDPBinding
from hvdcomp.torch.fsdp_shards import ShardsBinding
from hvdcomp.torch.replicas import group_of_replicas
from hvdcomp.torch.sharded import modules_of

__all__ = ["register"]


def register(
    model: torch.nn.Module,
    compression: UsedCompression,
    mesh: DeviceMesh | None = None,
    optimizer: Any = None,
    weights: Compressor | None = None,
) -> None:
    """Lets a model sharded by `fully_shard`, or replicated by `replicate`, send its gradients between nodes compressed.

    If the model is sharded on a mesh with replicas (HSDP), its shards are exchanged between the replicas:

        mesh = init_device_mesh("cuda", (nodes, 8), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh)
        hvdcomp.fsdp.register(model, hvdcomp.Compression(hvdcomp.TopK(ratio=0.01)))

    FSDP leaves this exchange to hvdcomp from then on. PyTorch's `replicate` makes replicas of a single rank. If the
    model is sharded over all ranks, its reduce-scatter is replaced: exact within a node, quantized between nodes.

        fully_shard(model)
        hvdcomp.fsdp.register(model, hvdcomp.Compression(hvdcomp.Int4()))

    To be called on every rank, after all calls of `fully_shard`, before the first backward pass; docs/fsdp.md documents
    both. With replicas, shards are exchanged during the backward pass; with a policy the ranks of each shard decide for
    themselves, and the decision log has the decisions of rank 0's shard.

    Args:
        model: a model sharded by `fully_shard`, or replicated by `replicate`.
        compression: a compression of this model only. Without replicas its compressor must be a quantizer, without a
            policy.
        mesh: the dimension of the replicas, mesh["replicate"], if `fully_shard` was given only that of the shards,
            mesh["shard"]. None otherwise.
        optimizer: the model's optimizer; needed by policies that follow the learning rate or change the batch size.
        weights: a quantizer, such as `hvdcomp.Int8()`, of the changes of weights that FSDP's all-gathers send, without
            replicas only. Each rank keeps the whole model then. None for FSDP's own all-gather.

    Raises:
        ConfigurationError: if the model is not sharded in this way, or the compression serves another model or is not
            suitable.
        RankMismatchError: on every rank, if some ranks cannot take part. With replicas, settings are compared in the
            first step.
    """
    if mesh is not None and getattr(mesh, "ndim", None) != 1:
        raise ConfigurationError(
            f"hvdcomp.fsdp.register was given a {type(mesh).__name__} as mesh; leave it out, or give it the dimension "
            "of the replicas, such as mesh['replicate'] of init_device_mesh(..., mesh_dim_names=('replicate', "
            "'shard')): hvdcomp.fsdp.register(model, compression, optimizer=optimizer)"
        )
    if not modules_of(model):
        raise ConfigurationError(
            f"hvdcomp.fsdp.register was given a {type(model).__name__} without shards; call "
            "torch.distributed.fsdp.fully_shard(model) first, with replicas fully_shard(model, mesh=mesh)"
        )
    require_compression(compression, "hvdcomp.fsdp.register")
    require_optimizer(optimizer, "hvdcomp.fsdp.register", "torch")
    group = group_of_replicas(model, mesh)
    if group is None:
        compression.serve(lambda setup: ShardsBinding(setup, model, weights), optimizer)
        return
    if weights is not None:
        raise ConfigurationError(
            "weights is for models sharded over all ranks, and this model has replicas, between which no weights are "
            "sent; leave it out"
        )
    compression.serve(lambda setup: FSDPBinding(setup, model, group), optimizer)
