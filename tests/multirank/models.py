"""A small model and data for it, for whoever exchanges the gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing


def small_model(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Two matrices large enough to be compressed, a convolution, and biases; the same on all ranks."""
    torch.manual_seed(7)
    model = torch.nn.Sequential(
        torch.nn.Unflatten(1, (1, 8, 8)),
        torch.nn.Conv2d(1, 128, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(512, 32),
        torch.nn.ReLU(),
        torch.nn.Linear(32, 40),
    )
    return model.to(dtype)


def batch(generator: torch.Generator, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs (16, 64) and classes of a rule that can be learned."""
    inputs = torch.randn(16, 64, generator=generator)
    return inputs.to(dtype), inputs[:, :10].argmax(1)


def weights(model: torch.nn.Module) -> torch.Tensor:
    """All parameters as one vector of bytes-comparable values."""
    return torch.cat([parameter.detach().reshape(-1).double() for parameter in model.parameters()])


def tensors_of(given: torch.nn.Module | torch.Tensor) -> dict[str, torch.Tensor]:
    """The parameters of a model by name, or a tensor alone, as vectors."""
    if isinstance(given, torch.Tensor):
        vector = given.detach().reshape(-1)
        return {"the tensor": vector.float() if given.dtype is torch.bfloat16 else vector}  # NumPy has no bfloat16
    return {name: parameter.detach().reshape(-1).double() for name, parameter in given.named_parameters()}


class Branches(torch.nn.Module):
    """Two branches; which is used, and in which order, is up to the caller. Nobody uses `never`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.left = torch.nn.Linear(64, 40)
        self.right = torch.nn.Linear(64, 40)
        self.never = torch.nn.Linear(64, 40)

    def forward(self, inputs: torch.Tensor, order: str) -> torch.Tensor:
        outputs = [{"l": self.left, "r": self.right}[branch](inputs) for branch in order]
        total = outputs[0]
        for output in outputs[1:]:
            total = total + output
        return total


def _compiled_in_place(model: torch.nn.Module) -> torch.nn.Module:
    model.compile(backend="eager")
    return model


def _checkpointed(model: torch.nn.Module) -> torch.nn.Module:
    apply_activation_checkpointing(model, check_fn=lambda layer: isinstance(layer, torch.nn.Linear))
    return model


WRAPPERS: dict[str, Callable[[torch.nn.Module], torch.nn.Module]] = {
    "nothing": lambda model: model,
    "torch.compile": lambda model: torch.compile(model, backend="eager"),
    "model.compile": _compiled_in_place,
    "torch.compile of activation checkpointing": lambda model: torch.compile(_checkpointed(model), backend="eager"),
}
"""What gives the same function, with or without other names of the parameters."""
