"""PyTorch's implementation of `hvdcomp.bindings.frameworks.Framework`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from hvdcomp.bindings.elastic import may_change
from hvdcomp.bindings.setup import Setup
from hvdcomp.errors import ConfigurationError
from hvdcomp.torch.parameters import unique

if TYPE_CHECKING:
    from hvdcomp.torch.horovod.binding import TorchBinding

TITLE = "PyTorch"
ARGUMENT = "named_parameters"
EXAMPLE = "named_parameters=model.named_parameters()"
SCALER = "a torch.amp.GradScaler"

by_name = unique


def owns_gradient(gradient: Any) -> bool:
    return type(gradient).__module__.partition(".")[0] == "torch"


def owns_optimizer(optimizer: Any) -> bool:
    return hasattr(optimizer, "param_groups")


def owns_scaler(scaler: Any) -> bool:
    return hasattr(type(scaler), "get_scale")


def is_model(value: Any) -> bool:
    return hasattr(type(value), "named_parameters")


def check_optimizer(optimizer: Any) -> None:
    raise ConfigurationError(
        "optimizer= works only with TensorFlow; leave optimizer= out in PyTorch, where hvdcomp finds Horovod's "
        "optimizer by itself"
    )


def prepare(kind: type) -> None:
    """Registers the compression with Horovod's elastic state, if the job may be elastic."""
    if "horovod.torch.elastic" in sys.modules or ("horovod.torch" in sys.modules and may_change()):
        from hvdcomp.torch.horovod.elastic import register

        register(kind)


def check_wrapping() -> None:
    """Accepts any optimizer. The binding checks the optimizer when the first gradient arrives."""


def can_bind(parameters: Any, optimizer: Any) -> bool:
    return optimizer is not None


def make_binding(setup: Setup, gradient: Any) -> TorchBinding:
    from hvdcomp.torch.horovod.binding import TorchBinding

    return TorchBinding(setup)
