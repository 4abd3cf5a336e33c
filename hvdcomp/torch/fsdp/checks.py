"""Checks of models and settings that both bindings of FSDP share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hvdcomp.bindings.setup import Setup
from hvdcomp.errors import ConfigurationError
from hvdcomp.torch.optimizers.compressed_adam import CompressedAdam


def modules_of(model: torch.nn.Module) -> dict[str, FSDPModule]:
    """The FSDP modules of a model, by name. The model itself may be one of these modules."""
    return {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}


def parameter_groups(module: FSDPModule) -> list[Any]:
    """FSDP's own records of the parameters that a module gathers and reduces together. There are several records if the
    module's parameters are sharded over several meshes.

    These private records are needed because there is no public way to read the factor of `set_gradient_divide_factor`,
    or the modules of one `fully_shard`.
    """
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    # older versions have at most one record
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def all_parameter_groups(model: torch.nn.Module) -> dict[str, list[Any]]:
    """The `parameter_groups` of all modules of a model, without duplicates. The key is the name of the first module of
    the parameter group."""
    seen: set[int] = set()
    found: dict[str, list[Any]] = {}
    for name, module in modules_of(model).items():
        found[name] = [group for group in parameter_groups(module) if id(group) not in seen]
        seen.update(map(id, found[name]))
    return found


def check_divide_factors(model: torch.nn.Module) -> None:
    """Raises ConfigurationError if this version of PyTorch does not allow hvdcomp to read the factors of
    `set_gradient_divide_factor`."""
    groups = all_parameter_groups(model).values()
    if not all(hasattr(group, "gradient_divide_factor") for of_module in groups for group in of_module):
        raise ConfigurationError(
            f"PyTorch {torch.__version__} does not let hvdcomp read the factor by which FSDP divides gradients "
            "(set_gradient_divide_factor); install PyTorch 2.13 or later"
        )


def check_settings(setup: Setup) -> None:
    """Raises ConfigurationError if a setting does not work with FSDP."""
    if setup.process_set is not None:
        raise ConfigurationError("process_set works only with Horovod; pass a mesh to hvdcomp.fsdp.register instead")
    if isinstance(setup.optimizer, CompressedAdam):
        raise ConfigurationError(
            "CompressedAdam does not work with FSDP, with or without local steps, because with FSDP, hvdcomp exchanges "
            "only gradients of shards, not momenta or weights. Use torch.optim.AdamW with a compressor that works well "
            "with AdamW, such as hvdcomp.Int4(), or use DistributedDataParallel if the model fits on one device"
        )


def check_sharding(parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> dict[str, DTensor]:
    """The trained parameters, by name. All trained parameters must be sharded.

    Raises:
        ConfigurationError: if a parameter is not sharded, or has no weights yet.
    """
    sharded: dict[str, DTensor] = {}
    for name, parameter in parameters:
        if not parameter.requires_grad:
            continue
        if not isinstance(parameter, DTensor):
            raise ConfigurationError(
                f"parameter {name} is trained but not sharded, so nothing averages its gradients; leave it out of "
                "ignored_params of fully_shard, call fully_shard on the whole model first, or freeze it"
            )
        if parameter.is_meta:
            raise ConfigurationError(
                f"parameter {name} is on the meta device; call hvdcomp.fsdp.register after model.to_empty(device=...) "
                "and after the weights are initialized"
            )
        sharded[name] = parameter
    return sharded


def before_forward_passes(model: torch.nn.Module, forget: Callable[[], None]) -> None:
    """Calls `forget` before each forward pass that is not part of a backward pass. If a backward pass has not ended by
    this time, it has raised an error, and `forget` drops its state. (Activation checkpointing runs forward passes
    within a backward pass.)"""

    @torch.compiler.disable
    def begin(*_: Any) -> None:
        if torch._C._current_graph_task_id() == -1:
            forget()

    model.register_forward_pre_hook(begin, prepend=True)  # runs before FSDP's own hook, which gathers weights
