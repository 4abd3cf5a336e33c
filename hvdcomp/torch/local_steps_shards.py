"""`LocalSteps` of parameters that FSDP2 shards: each rank exchanges with the ranks that have the same shards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hvdcomp.communicators.ranks import Ranks
from hvdcomp.communicators.torch_distributed import TorchDistributedCommunicator
from hvdcomp.errors import ConfigurationError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def local_part(tensor: Any) -> torch.Tensor:
    """The tensor without its gradient's history, or of a DTensor the part on this rank; in the same storage."""
    tensor = tensor.detach()
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def replicas_of(
    parameters: Iterable[torch.Tensor], mesh: DeviceMesh, communicator: Ranks | None
) -> TorchDistributedCommunicator:
    """The ranks that have the same shards as this rank.

    Args:
        parameters: all parameters of the optimizer.
        mesh: the dimension of the replicas.
        communicator: as the user gave it to `LocalSteps`; must be None.

    Raises:
        ConfigurationError: if `mesh` is not one dimension of replicas, or if both were given.
    """
    if communicator is not None:
        raise ConfigurationError("LocalSteps was given both mesh and communicator; leave out the communicator")
    if getattr(mesh, "ndim", None) != 1:
        raise ConfigurationError(
            f"LocalSteps was given a {type(mesh).__name__} as mesh, which is not a mesh of one dimension; give it the "
            "dimension of the replicas, such as mesh['replicate'] of init_device_mesh(..., "
            "mesh_dim_names=('replicate', 'shard'))"
        )
    group = mesh.get_group()
    members = set(dist.get_process_group_ranks(group))
    for parameter in parameters:
        of_mesh: Any = getattr(parameter, "device_mesh", None)
        shared = members.intersection(() if of_mesh is None else of_mesh.mesh.flatten().tolist())
        if len(shared) > 1:
            raise ConfigurationError(
                f"a parameter of shape {tuple(parameter.shape)} is sharded over ranks that include {sorted(shared)}, "
                "so these ranks have different parts of it, but the mesh that was given to LocalSteps contains them as "
                "replicas. Give fully_shard mesh['shard'], and LocalSteps mesh['replicate'] of the same mesh"
            )
    return TorchDistributedCommunicator(group)
