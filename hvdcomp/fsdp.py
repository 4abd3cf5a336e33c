"""Gradient compression for FSDP2: in its reduce-scatter between nodes, or in the exchange between replicas of a
model."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hvdcomp.bindings.frameworks import require_optimizer
from hvdcomp.bindings.setup import UsedCompression, require_compression
from hvdcomp.communicators.torch_distributed import TorchDistributedCommunicator
from hvdcomp.compressors import Compressor
from hvdcomp.errors import ConfigurationError
from hvdcomp.exchange.agreement import refused_on_every_rank, require_agreement
from hvdcomp.torch.fsdp.binding import FSDPBinding
from hvdcomp.torch.fsdp.checks import modules_of
from hvdcomp.torch.fsdp.replicas import REGISTER, group_of_replicas, group_of_shards
from hvdcomp.torch.fsdp.shards import ShardsBinding

__all__ = ["register"]


def register(
    model: torch.nn.Module,
    compression: UsedCompression,
    mesh: DeviceMesh | None = None,
    optimizer: Any = None,
    weights: Compressor | None = None,
    shards: UsedCompression | None = None,
) -> None:
    """Compresses the gradients that are sent between nodes, for a model that is sharded by `fully_shard` or replicated
    by `replicate`.

    If the model is sharded on a mesh with replicas (HSDP), hvdcomp compresses the exchange of its shards between the
    replicas:

        mesh = init_device_mesh("cuda", (nodes, 8), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh)
        hvdcomp.fsdp.register(model, hvdcomp.Compression(hvdcomp.Int4()))

    From then on, FSDP leaves this exchange to hvdcomp. PyTorch's `replicate` creates replicas of one rank each.

    If the model is sharded over all ranks, hvdcomp replaces FSDP's reduce-scatter. The reduce-scatter of hvdcomp sends
    uncompressed gradients within a node, and quantized gradients between nodes:

        fully_shard(model)
        hvdcomp.fsdp.register(model, hvdcomp.Compression(hvdcomp.Int4()))

    If each replica's shards are also spread over several nodes, a second compression quantizes the reduce-scatter
    within each replica:

        quantized = hvdcomp.Compression(hvdcomp.Int8())
        hvdcomp.fsdp.register(model, hvdcomp.Compression(hvdcomp.Int4()), shards=quantized)

    Call this function on every rank, after all calls of `fully_shard`, before the first backward pass. docs/fsdp.md
    describes all cases. If there are replicas, shards are exchanged during the backward pass. If there is a policy,
    each group of ranks with the same shard makes its own decisions, and the decision log contains only the decisions
    for rank 0's shard.

    Args:
        model: a model that is sharded by `fully_shard`, or replicated by `replicate`.
        compression: a `Compression` that no other model uses. If there are no replicas, its compressor must be a
            quantizer, and it must have no policy.
        mesh: the mesh dimension of the replicas, mesh["replicate"], if you passed only the dimension of the shards,
            mesh["shard"], to `fully_shard`. In all other cases, omit this argument.
        optimizer: the model's optimizer. Policies that follow the learning rate or change the batch size need the
            optimizer.
        weights: a quantizer, such as `hvdcomp.Int8()`. FSDP's all-gathers then send quantized changes of the weights,
            and each rank keeps the whole model. `weights` is allowed only if there are no replicas. Omit this argument
            to keep FSDP's own all-gather.
        shards: a second `Compression`, for the reduce-scatter over the shards of each replica. Its compressor must be a
            quantizer, and it must have no policy. This `Compression` has its own residuals, ledger and checkpoints.
            `shards` is allowed only if there are replicas. Omit this argument to keep FSDP's own reduce-scatter.

    Raises:
        ConfigurationError: if the model is neither sharded nor replicated in this way, if another model uses a given
            `Compression`, or if a `Compression` does not work with this model.
        RankMismatchError: on every rank, if some ranks raised an error. If there are replicas, settings that differ
            between ranks raise this error only in the first step.
    """
    if mesh is not None and getattr(mesh, "ndim", None) != 1:
        raise ConfigurationError(
            f"hvdcomp.fsdp.register was given a {type(mesh).__name__} as the argument mesh, which must be a mesh with "
            "one dimension. Omit mesh=, or pass the dimension of the replicas, such as mesh['replicate'] of "
            "init_device_mesh(..., mesh_dim_names=('replicate', 'shard')): hvdcomp.fsdp.register(model, compression, "
            "optimizer=optimizer)"
        )
    if not modules_of(model):
        raise ConfigurationError(
            f"hvdcomp.fsdp.register was given a {type(model).__name__} that is not sharded. First call "
            "torch.distributed.fsdp.fully_shard(model), or, if the model has replicas, fully_shard(model, mesh=mesh)"
        )
    require_compression(compression, "hvdcomp.fsdp.register")
    require_optimizer(optimizer, "hvdcomp.fsdp.register", "torch")
    group = group_of_replicas(model, mesh, REGISTER)
    if group is None:
        if shards is not None:
            raise ConfigurationError(
                "hvdcomp.fsdp.register was given the argument shards= for a model without replicas. Pass the "
                "compression of the reduce-scatter as the argument compression=, and omit shards=: "
                "hvdcomp.fsdp.register(model, compression)"
            )
        compression.serve(lambda setup: ShardsBinding(setup, model, weights), optimizer)
        return
    if weights is not None:
        raise ConfigurationError(
            "hvdcomp.fsdp.register was given the argument weights= for a model with replicas. This argument works only "
            "if a model is sharded over all ranks, because replicas exchange no weights. Omit weights="
        )
    if shards is not None:
        require_compression(shards, "hvdcomp.fsdp.register (shards)")
        _serve_shards(model, shards, group)
    compression.serve(lambda setup: FSDPBinding(setup, model, group), optimizer)


def _serve_shards(model: torch.nn.Module, shards: UsedCompression, group: dist.ProcessGroup) -> None:
    """Makes FSDP quantize the reduce-scatter within each replica. An error on one rank reaches all ranks: first the
    ranks of its replica, and then the ranks that have the same shards as these.

    Args:
        model: the model, which has replicas.
        shards: the `Compression` of the reduce-scatter.
        group: the process group of the ranks that have the same shard as this rank.
    """
    replicas, like = TorchDistributedCommunicator(group), torch.empty(0)
    place = replicas.rank, replicas.world_size
    with refused_on_every_rank(replicas, like):
        shards.serve(lambda setup: ShardsBinding(setup, model, None, group_of_shards(model), *place))
    require_agreement(replicas, {f"shards: {name}": value for name, value in shards.settings.describe().items()}, like)
