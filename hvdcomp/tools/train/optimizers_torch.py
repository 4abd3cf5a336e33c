"""The optimizers of `hvdcomp train` in PyTorch: named optimizers, and optimizers from other packages."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hvdcomp.tools.train.models_torch import hidden_matrices
from hvdcomp.tools.train.options import SetupError, TrainingOptions, is_dotted
from hvdcomp.torch import CompressedAdam, MuonWithAdamW


def build_optimizer(options: TrainingOptions, model: nn.Module) -> torch.optim.Optimizer:
    """Creates an optimizer for all parameters, without state. Its learning rate is set before each step.

    Raises:
        SetupError: if the optimizer comes from another package, and cannot be imported or created.
    """
    decay = options.weight_decay or 0.0
    if options.optimizer == "sgd":
        return torch.optim.SGD(
            model.parameters(), lr=0.0, momentum=options.momentum, nesterov=options.nesterov, weight_decay=decay
        )
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    if options.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=0.0, betas=options.betas)
    if options.optimizer == "muon":
        hidden = hidden_matrices(model)
        groups[0]["params"] = [matrix for matrix in matrices if matrix not in {*hidden}]
        groups.insert(0, {"params": hidden, "weight_decay": decay, "use_muon": True})
        return MuonWithAdamW(groups, lr=0.0, adamw={"betas": options.betas})
    if options.optimizer == "compressed-adam":
        return CompressedAdam(
            groups,
            lr=0.0,
            betas=options.betas,
            freeze_after=options.freeze_after,
            warm_up=options.freeze_compression,
            local_steps=int(options.local_steps),
            refreshes_per_gap=options.refreshes_per_gap,
        )
    return _of_other_package(options, groups)


def _of_other_package(options: TrainingOptions, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    shown = f"--optimizer {options.optimizer}"
    make = _imported(options.optimizer or "", shown)
    groups = [group for group in groups if group["params"]]  # some optimizers refuse a group without parameters
    try:
        optimizer = make(groups, lr=options.lr)  # some optimizers refuse a rate of 0
    except Exception as error:
        raise SetupError(
            f"{shown} cannot be called with the parameter groups of a model and lr=: {type(error).__name__}: {error}; "
            "write a function that takes these arguments and returns the optimizer, and name this function"
        ) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise SetupError(
            f"{shown} returns an object of type {type(optimizer).__name__}; name a class of torch.optim.Optimizer, or "
            "a function that returns an optimizer"
        )
    return optimizer


def _imported(name: str, shown: str) -> Callable[..., Any]:
    """The class or function with a dotted name."""
    assert is_dotted(name)
    module, _, attribute = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise SetupError(
            f"{shown} cannot be imported: {error}; name a class of an installed package, such as "
            "torch.optim.Adafactor, or a function in a module of this folder (with PYTHONPATH=.)"
        ) from error
    if not callable(found):
        raise SetupError(f"{shown} is neither a class nor a function, but an object of type {type(found).__name__}")
    return found


def prepare(optimizer: torch.optim.Optimizer, *, training: bool) -> None:
    """Switches the weights of the model if the optimizer uses different weights for training and for evaluation, as
    schedule-free AdamW does.

    Args:
        optimizer: the optimizer of the model. Most optimizers do not have different weights, and nothing happens.
        training: True before a step, False before an evaluation.
    """
    change = getattr(optimizer, "train" if training else "eval", None)
    if change is not None:
        change()
