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
from hvdcomp.torch.sharded import modules_of

__all__ = ["register"]


def register(
    model: torch.nn.Module,
    compression: UsedCompression,
    mesh: DeviceMesh | None = None,
    optimizer: Any = None,
    weights: Compressor | None = None,
) -> None:
    """Makes a model that is sharded by `fully_shard` send compressed gradients between nodes.

    If the model is sharded over all ranks, hvdcomp replaces FSDP's reduce-scatter. The new one is exact within a node,
    and quantizes between nodes:

        fully_shard(model)
        hvdcomp.fsdp.register(model, hvdcomp.Compression(hvdcomp.Int4()))

    If the model is sharded over the ranks of a node, and other nodes have replicas (HSDP), hvdcomp compresses the
    exchange of the shards between the replicas:

        mesh = init_device_mesh("cuda", (nodes, 8), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh["shard"])
        hvdcomp.fsdp.register(model, hvdcomp.Compression(hvdcomp.TopK(ratio=0.01)), mesh["replicate"])

    Call it on every rank, before the first backward pass. docs/fsdp.md describes both cases. With replicas, shards are
    exchanged during the backward pass. With a policy, the ranks of each shard decide separately, and the decision log
    has only the decisions of rank 0's shard.

    Args:
        model: a model sharded over one dimension of a mesh.
        compression: a compression of this model only. Without replicas its compressor must be a quantizer, without a
            policy.
        mesh: the other dimension, of replicas: the ranks with the same shards. None for a model without replicas.
        optimizer: the model's optimizer; needed by policies that follow the learning rate or change the batch size.
        weights: a quantizer, such as `hvdcomp.Int8()`. FSDP's all-gathers then send quantized changes of the weights,
            and each rank keeps the whole model. Only without replicas. None for FSDP's own all-gather.

    Raises:
        ConfigurationError: if the model is not sharded in this way, or if another model uses the compression, or if the
            compression is not suitable.
        RankMismatchError: on every rank, if some ranks cannot take part. With replicas, settings are compared in the
            first step.
    """
    if mesh is not None and getattr(mesh, "ndim", None) != 1:
        raise ConfigurationError(
            f"hvdcomp.fsdp.register was given a {type(mesh).__name__} as mesh, which is not a mesh of one dimension. "
            "If the model has replicas, give it the dimension of the replicas, such as mesh['replicate'] of "
            "init_device_mesh(..., mesh_dim_names=('replicate', 'shard')). Otherwise leave mesh out: "
            "hvdcomp.fsdp.register(model, compression, optimizer=optimizer)"
        )
    if not modules_of(model):
        raise ConfigurationError(
            f"hvdcomp.fsdp.register was given a {type(model).__name__} that is not sharded. First call "
            "torch.distributed.fsdp.fully_shard(model), or with replicas fully_shard(model, mesh=mesh['shard'])"
        )
    require_compression(compression, "hvdcomp.fsdp.register")
    require_optimizer(optimizer, "hvdcomp.fsdp.register", "torch")
    if mesh is None:
        compression.serve(lambda setup: ShardsBinding(setup, model, weights), optimizer)
        return
    if weights is not None:
        raise ConfigurationError(
            "hvdcomp.fsdp.register was given both weights and the mesh of replicas, but weights is only for models "
            "that are sharded over all ranks: replicas exchange no weights. Leave weights out"
        )
    group = mesh.get_group()
    compression.serve(lambda setup: FSDPBinding(setup, model, group), optimizer)
