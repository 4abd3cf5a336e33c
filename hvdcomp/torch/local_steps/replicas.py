"""`LocalSteps` for a model in FSDP2. Each rank exchanges pseudo-gradients with the ranks that have the same shards.

`LocalSteps` imports this module only for such models, because older versions of PyTorch have no FSDP2.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hvdcomp.communicators.ranks import Ranks
from hvdcomp.communicators.torch_distributed import TorchDistributedCommunicator
from hvdcomp.errors import ConfigurationError
from hvdcomp.exchange.agreement import refused_on_every_rank, require_agreement
from hvdcomp.torch.fsdp.checks import all_parameter_groups, modules_of
from hvdcomp.torch.fsdp.replicas import LOCAL_STEPS, group_of_replicas, require_replicas, require_same_shards


def replicas_of(
    parameters: Sequence[torch.Tensor],
    mesh: DeviceMesh | None,
    model: torch.nn.Module | None,
    communicator: Ranks | None,
) -> TorchDistributedCommunicator:
    """The ranks that have the same shards as this rank. All ranks wait for each other.

    Args:
        parameters: all parameters of the optimizer.
        mesh: the dimension of the replicas; None if the model's own mesh has this dimension.
        model: the model, if its own mesh has a dimension of replicas; otherwise None.
        communicator: the communicator that the user has passed to `LocalSteps`. The communicator must be None.

    Raises:
        ConfigurationError: if `mesh` is not a single dimension of replicas, or its ranks have different shards; if FSDP
            averages the gradients of replicas and `model` is not given; if `model` has no replicas, or does not have
            all parameters; or if a communicator is given.
        RankMismatchError: on every rank, if only some ranks raised an error.
    """
    if communicator is not None:
        given = "mesh" if model is None else "model"
        raise ConfigurationError(f"LocalSteps was given both {given} and communicator; leave out the communicator")
    if mesh is not None and getattr(mesh, "ndim", None) != 1:
        raise ConfigurationError(
            f"LocalSteps was given a {type(mesh).__name__} as the argument mesh, which must be a mesh with one "
            "dimension; pass the dimension of the replicas, such as mesh['replicate'] of init_device_mesh(..., "
            "mesh_dim_names=('replicate', 'shard'))"
        )
    group = mesh.get_group() if model is None and mesh is not None else _replicas_in(model, mesh)
    ranks, like = TorchDistributedCommunicator(group), torch.empty(0)
    with refused_on_every_rank(ranks, like):
        sharded: dict[str, Any] = {
            f"{number} of the optimizer": parameter
            for number, parameter in enumerate(parameters)
            if hasattr(parameter, "device_mesh")
        }
        require_replicas(sharded, group, LOCAL_STEPS)
        if model is None:
            _require_no_replicas_of_fsdp(sharded.values(), group)
        else:
            _require_all_in(model, parameters)
    require_agreement(ranks, {}, like)  # raises an error if another rank has raised an error
    require_same_shards(sharded, ranks, like, LOCAL_STEPS)
    return ranks


def _replicas_in(model: Any, mesh: DeviceMesh | None) -> dist.ProcessGroup:
    """The process group of the replicas of a model. Raises ConfigurationError if the model has no replicas."""
    is_sharded = isinstance(model, torch.nn.Module) and bool(modules_of(model))
    group = group_of_replicas(model, mesh, LOCAL_STEPS) if is_sharded else None
    if group is None:
        problem = "has no replicas" if is_sharded else "is not sharded"
        raise ConfigurationError(
            f"LocalSteps was given a {type(model).__name__} as the argument model that {problem}. This argument is "
            "only for a model that is sharded by fully_shard(model, mesh=mesh), with a mesh of replicas and shards, or "
            "by replicate(model); omit model= for other models"
        )
    return group


def _require_all_in(model: torch.nn.Module, parameters: Sequence[torch.Tensor]) -> None:
    """Raises ConfigurationError if FSDP does not shard or replicate all parameters in this model."""
    groups = (group for of_module in all_parameter_groups(model).values() for group in of_module)
    known = {one.sharded_param for group in groups for one in group.fsdp_params}
    if missing := sum(parameter not in known for parameter in parameters):
        raise ConfigurationError(
            f"{missing} of the optimizer's {len(parameters)} parameters are not sharded in the model that was given to "
            "LocalSteps, so nothing averages their gradients inside a replica. Give LocalSteps the model of this "
            "optimizer, and shard all its parameters"
        )


def _require_no_replicas_of_fsdp(parameters: Iterable[Any], group: dist.ProcessGroup) -> None:
    """Raises ConfigurationError if FSDP itself averages gradients between ranks of the process group."""
    members = set(dist.get_process_group_ranks(group))
    for parameter in parameters:
        shared = sorted(members.intersection(parameter.device_mesh.mesh.flatten().tolist()))
        if len(shared) > 1:
            raise ConfigurationError(
                f"the model was sharded on a mesh on which the ranks {shared} are replicas, so FSDP averages their "
                "gradients in every step. Give LocalSteps model=model instead of a mesh: then FSDP leaves the replicas "
                "to LocalSteps"
            )
