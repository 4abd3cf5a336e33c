"""The replicas of a model in FSDP2: which ranks have the same shards, and who averages their gradients.

On a mesh of two dimensions, FSDP itself allreduces uncompressed gradients between replicas before it calls any hook.
`leave_to_hook` makes FSDP stop after the reduction to this rank's shards, as on a mesh of one dimension. Parameters and
their placements on the mesh do not change, so optimizers, clipping and checkpoints see the same model as before.
`hvdcomp.fsdp.register` exchanges the gradients in a hook. `LocalSteps` has no hook, because it exchanges weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_common import DataParallelMeshInfo, DDPMeshInfo, FSDPMeshInfo
from torch.distributed.tensor import DTensor

from hvdcomp.communicators import Communicator
from hvdcomp.errors import ConfigurationError
from hvdcomp.exchange.agreement import gather_rows
from hvdcomp.torch.fsdp.boxes import cuts_of, number_of_boxes
from hvdcomp.torch.fsdp.checks import all_parameter_groups

REGISTER = "hvdcomp.fsdp.register"
LOCAL_STEPS = "LocalSteps"
"""The names, for messages, of the two callers that can exchange between replicas in place of FSDP."""

_PLACES_BYTES = 64  # bytes of the text that describes which boxes a rank has


def group_of_replicas(model: torch.nn.Module, mesh: DeviceMesh | None, caller: str) -> dist.ProcessGroup | None:
    """The ranks that have the same shards as this rank, one rank of each replica; None if the model has no replicas.

    Args:
        model: a model in FSDP2.
        mesh: the mesh dimension of the replicas, if the model's own mesh does not have this dimension; otherwise None.
        caller: `REGISTER` or `LOCAL_STEPS`.

    Raises:
        ConfigurationError: if FSDP averages the gradients of only some modules, or between ranks other than those of
            `mesh`; or if this model was registered before. (A model that was used only with `LocalSteps` may be used
            with `LocalSteps` again.)
    """
    own = _group_of_fsdp(model, caller)
    if mesh is None:
        return own
    given = mesh.get_group()
    if own is not None and (ranks := _ranks_of(own)) != _ranks_of(given):
        raise ConfigurationError(
            f"{caller} was given a mesh of the ranks {list(_ranks_of(given))}, but on the mesh of fully_shard, the "
            f"ranks {list(ranks)} are replicas; leave out the mesh argument of {caller}"
        )
    return given


def group_of_shards(model: torch.nn.Module) -> dist.ProcessGroup:
    """The ranks over which FSDP shards one replica of a model.

    Raises:
        ConfigurationError: if each rank has a whole replica, or if modules are sharded over different ranks.
    """
    found: dict[tuple[int, ...], tuple[str, dist.ProcessGroup]] = {}
    for name, groups in all_parameter_groups(model).items():
        for group in groups:
            if shards_of(group) == 1:
                raise ConfigurationError(
                    f"{REGISTER} was given the argument shards=, but FSDP does not shard {name or 'the model'}: each "
                    "replica is on a single rank, so there is no reduce-scatter. Omit shards=, or give fully_shard a "
                    "mesh on which several ranks share a replica"
                )
            own = group.mesh_info.shard_process_group
            found.setdefault(_ranks_of(own), (name or "the model", own))
    if len(found) > 1:
        (ranks, (name, _)), (other_ranks, (other_name, _)), *_ = found.items()
        raise ConfigurationError(
            f"{REGISTER} was given the argument shards=, but FSDP shards {name} over the ranks {list(ranks)}, and "
            f"{other_name} over the ranks {list(other_ranks)}. Omit shards=, or call fully_shard with the same mesh "
            "for all modules"
        )
    return next(group for _, group in found.values())


def leave_to_nobody(model: torch.nn.Module) -> None:
    """Limits FSDP to reducing the gradients of a model to this rank's shards. Replicas then have different
    gradients."""
    for groups in all_parameter_groups(model).values():
        for group in groups:
            if isinstance(group.mesh_info, DDPMeshInfo):
                leave_to_hook(group, None)


def leave_to_hook(group: Any, hook: Callable[[torch.Tensor], None] | None) -> None:
    """Limits FSDP to reducing the gradients of a parameter group to this rank's shards, and makes it call a hook with
    the result.

    The function sets the hook directly, because `set_all_reduce_hook` refuses modules with several parameter groups.
    There is no public way to skip FSDP's own allreduce: `set_requires_all_reduce(False)` hides the gradients of the
    backward pass.
    """
    group._all_reduce_hook = hook
    info = group.mesh_info
    if not isinstance(info, DDPMeshInfo):  # the class determines which collectives FSDP starts
        return
    is_sharded = isinstance(info, FSDPMeshInfo)
    arguments = {field.name: getattr(info, field.name) for field in dataclasses.fields(info) if field.init}
    group.mesh_info = (FSDPMeshInfo if is_sharded else DataParallelMeshInfo)(**arguments)
    if hasattr(info, "reduce_scatter_process_group"):  # set by `set_separate_reduce_scatter_group`
        group.mesh_info.reduce_scatter_process_group = info.reduce_scatter_process_group
    # FSDP compares the two objects to decide whether it reshards to other ranks
    if group.post_forward_mesh_info is info:
        group.post_forward_mesh_info = group.mesh_info


def shards_of(group: Any) -> int:
    """The number of ranks over which FSDP shards the parameters of a parameter group."""
    return int(getattr(group.mesh_info, "shard_mesh_size", 1))


def require_replicas(trained: Mapping[str, DTensor], group: dist.ProcessGroup, caller: str) -> None:
    """Raises ConfigurationError if ranks of the process group have different parts of one replica."""
    members = set(_ranks_of(group))
    for name, parameter in trained.items():
        ranks = parameter.device_mesh.mesh
        with_this_box = ranks[tuple(slice(None) if cut.pieces == 1 else cut.place for cut in cuts_of(parameter))]
        shared = members.intersection(ranks.flatten().tolist())
        if not shared.issubset(with_this_box.flatten().tolist()):
            raise ConfigurationError(
                f"parameter {name} is sharded over ranks that include {sorted(shared)}, so these ranks have different "
                f"parts of the parameter. But in the mesh that was given to {caller}, these ranks are replicas. Pass "
                f"mesh['replicate'] to {caller}, from the same mesh whose mesh['shard'] was given to fully_shard."
                + (" If the model is sharded over all ranks, omit mesh=" if caller == REGISTER else "")
            )


def require_same_shards(
    trained: Mapping[str, DTensor], communicator: Communicator, like: torch.Tensor, caller: str
) -> None:
    """Raises ConfigurationError on every rank of the communicator if the ranks have different parts of the
    parameters."""
    places = " and ".join(sorted({_place(parameter) for parameter in trained.values()})) or "of nothing"
    rows = gather_rows(communicator, places.encode()[:_PLACES_BYTES].ljust(_PLACES_BYTES), like, "hvdcomp.shards")
    if len(set(rows)) > 1:
        by_rank = ", ".join(row.decode().strip() for row in rows)
        raise ConfigurationError(
            f"the ranks of the mesh that was given to {caller} have different parts of the parameters (in the order of "
            f"the ranks: {by_rank}). Pass mesh['replicate'] of the mesh whose mesh['shard'] was given to fully_shard"
        )


def _group_of_fsdp(model: torch.nn.Module, caller: str) -> dist.ProcessGroup | None:
    """The ranks between which FSDP itself averages gradients, or averaged gradients until `caller` replaced FSDP's
    averaging. None if there are no such ranks."""
    found: dict[tuple[int, ...], tuple[str, dist.ProcessGroup | None]] = {}
    for name, groups in all_parameter_groups(model).items():
        for group in groups:
            info = group.mesh_info
            own = None
            if info.replicate_mesh_dim is not None:
                _require_not_left(group, caller)
                own = info.mesh.get_group(info.replicate_mesh_dim)
            found.setdefault(() if own is None else _ranks_of(own), (name or "the model", own))
    if len(found) > 1:
        (ranks, (name, _)), (other_ranks, (other_name, _)), *_ = found.items()
        raise ConfigurationError(
            f"FSDP averages the gradients of {name} {_between(ranks)}, but the gradients of {other_name} "
            f"{_between(other_ranks)}; call fully_shard with the same replicas for all modules"
        )
    return next((own for _, own in found.values()), None)


def _require_not_left(group: Any, caller: str) -> None:
    """Raises ConfigurationError if another caller, or a hook, already averages the gradients of a parameter group."""
    if isinstance(group.mesh_info, DDPMeshInfo):
        return
    left_to = LOCAL_STEPS if group._all_reduce_hook is None else REGISTER
    if left_to == caller == REGISTER:
        raise ConfigurationError(
            "hvdcomp.fsdp.register was called for this model, or for a part of the model, before. Call register once "
            "for each model, after all calls of fully_shard or replicate"
        )
    if left_to != caller:
        raise ConfigurationError(
            f"{caller} was given a model that was already given to {left_to}. LocalSteps exchanges weights, and "
            "hvdcomp.fsdp.register exchanges gradients: use only one of the two for a model"
        )


def _ranks_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def _between(ranks: Sequence[int]) -> str:
    return f"between the ranks {list(ranks)}" if ranks else "between no replicas"


def _place(parameter: DTensor) -> str:
    """A text that names this rank's box, such as "1 of 2". Boxes are counted from 0."""
    number = 0
    for cut in cuts_of(parameter):
        number = number * cut.pieces + cut.place
    return f"{number} of {number_of_boxes(parameter)}"
