"""This rank's parts of parameters in `LocalSteps`: whole parameters, or shards of FSDP2."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from hvdcomp.errors import ConfigurationError


def local_part(tensor: Any) -> torch.Tensor:
    """The tensor without its gradient's history, or of a DTensor the part on this rank; in the same storage."""
    tensor = tensor.detach()
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def require_whole(parameters: Iterable[torch.Tensor]) -> None:
    """Raises ConfigurationError if a parameter is sharded."""
    if any(hasattr(parameter, "device_mesh") for parameter in parameters):
        raise ConfigurationError(
            "the parameters are sharded (FSDP, tensor parallelism), but LocalSteps does not know which ranks have the "
            "same shards. If the mesh of fully_shard or replicate has replicas, use LocalSteps(..., model=model). "
            "Otherwise call fully_shard(model, mesh=mesh['shard']), and use LocalSteps(..., mesh=mesh['replicate']) "
            "with the same mesh"
        )
