"""Checks of models and settings that both bindings of FSDP share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hvdcomp.bindings.setup import Setup
from hvdcomp.errors import ConfigurationError
from hvdcomp.torch.compressed_adam import CompressedAdam


def modules_of(model: torch.nn.Module) -> dict[str, FSDPModule]:
    """The FSDP modules of a model by name, the model itself included."""
    return {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}


def parameter_group(module: FSDPModule) -> Any:
    """FSDP's own record of the parameters that a module gathers and reduces together; None if it has none.

    No public name leads to the factor of `set_gradient_divide_factor`, nor to the modules of one `fully_shard`.
    """
    state: Any = module._get_fsdp_state()
    # Older versions have one group at most. Modules with several are refused (`several_meshes_error`).
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return groups[0] if groups else None


def check_divide_factors(model: torch.nn.Module) -> None:
    """Raises ConfigurationError if this PyTorch does not let us read the factors of `set_gradient_divide_factor`."""
    groups = [group for module in modules_of(model).values() if (group := parameter_group(module)) is not None]
    if not all(hasattr(group, "gradient_divide_factor") for group in groups):
        raise ConfigurationError(
            f"PyTorch {torch.__version__} does not tell hvdcomp the number by which FSDP divides gradients "
            "(set_gradient_divide_factor); install PyTorch 2.13 or later"
        )


def check_settings(setup: Setup) -> None:
    """Raises ConfigurationError for settings that do not work with FSDP."""
    if setup.process_set is not None:
        raise ConfigurationError("process_set works only with Horovod; give hvdcomp.fsdp.register a mesh instead")
    if isinstance(setup.optimizer, CompressedAdam):
        raise ConfigurationError(
            "CompressedAdam does not work with FSDP, with or without local steps, because hvdcomp exchanges only "
            "gradients of shards there, not momenta or weights. Use torch.optim.AdamW with a compressor that works "
            "well with it, such as hvdcomp.Int4(), or use DistributedDataParallel if the model fits on one device"
        )


def check_sharding(parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> dict[str, DTensor]:
    """The trained parameters, all sharded, by name.

    Raises:
        ConfigurationError: if a parameter is not sharded, is sharded over several mesh dimensions, or over other ranks
            than another parameter.
    """
    sharded: dict[str, DTensor] = {}
    ranks: dict[str, list[int]] = {}
    for name, parameter in parameters:
        if not parameter.requires_grad:
            continue
        if not isinstance(parameter, DTensor):
            raise ConfigurationError(
                f"parameter {name} is trained but not sharded, so nothing averages its gradients; leave it out of "
                "ignored_params of fully_shard, call fully_shard on the whole model first, or freeze it"
            )
        mesh, placements = parameter.device_mesh, parameter.placements
        if mesh.ndim != 1:
            replicated = placements[0].is_replicate()
            cause = (
                "With such a mesh, FSDP itself exchanges gradients between the replicas. Give fully_shard only the "
                "dimension of the shards, mesh=mesh['shard'], and give hvdcomp.fsdp.register the dimension of the "
                "replicas, mesh['replicate']"
                if replicated
                else (
                    "This is so with tensor parallelism. Parameters that all ranks of it have whole would become "
                    "different, because each rank compresses them, and skips steps, together with its own parts of "
                    "other parameters. Train without hvdcomp, or without tensor parallelism: fully_shard can use its "
                    "ranks too"
                )
            )
            raise ConfigurationError(f"parameter {name} is sharded over a mesh of {mesh.ndim} dimensions. {cause}")
        sharded[name] = parameter
        ranks[name] = mesh.mesh.tolist()
    first = next(iter(ranks), "")
    if other_name := next((name for name, members in ranks.items() if members != ranks[first]), None):
        raise ConfigurationError(
            f"parameter {other_name} is sharded over the ranks {ranks[other_name]}, but {first} over {ranks[first]}; "
            "give fully_shard the same mesh for all parameters"
        )
    return sharded


def before_forward_passes(model: torch.nn.Module, forget: Callable[[], None]) -> None:
    """Calls `forget` before each forward pass outside of a backward pass: state that then still waits for the end of a
    backward pass belongs to one that has raised. (Activation checkpoints make forward passes inside of one.)"""

    @torch.compiler.disable
    def begin(*_: Any) -> None:
        if torch._C._current_graph_task_id() == -1:
            forget()

    model.register_forward_pre_hook(begin, prepend=True)  # before FSDP's own, which gathers weights


def several_meshes_error(error: ValueError) -> ConfigurationError:
    """The error for FSDP's refusal of a hook, which is the same on every rank."""
    return ConfigurationError(
        f"FSDP accepts no hook for a module whose parameters are sharded over several meshes: {error} Return no meshes "
        "from shard_placement_fn, or call fully_shard on modules that have one mesh each"
    )
