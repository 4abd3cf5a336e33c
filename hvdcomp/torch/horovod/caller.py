"""Finds the parameter of a gradient, because Horovod passes only the tensor to a compressor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hvdcomp.bindings.callers import caller_local
from hvdcomp.errors import ConfigurationError


class ParameterNames:
    """Finds the name of a gradient's parameter.

    Args:
        parameters: the parameters of the model, by name.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._successor: dict[str | None, str] = {}  # for each parameter, the parameter that came next in the last step
        self._previous: str | None = None

    def begin_step(self) -> None:
        """Begins a step. Call this method before the first gradient of the step."""
        self._previous = None

    def of(self, gradient: torch.Tensor, optimizer: Any) -> str:
        """The name of the gradient's parameter. First tries the parameter that came next in the last step.

        Raises:
            ConfigurationError: if the gradient does not belong to a parameter.
        """
        guess = self._successor.get(self._previous)
        if guess is not None and self._parameters[guess].grad is gradient:
            name: str | None = guess
        else:
            name = next((name for name, p in self._parameters.items() if p.grad is gradient), None)
        if name is None:
            name = self._by_caller(gradient, optimizer)
        self._successor[self._previous] = name
        self._previous = name
        return name

    def _by_caller(self, gradient: torch.Tensor, optimizer: Any) -> str:
        """The name for a tensor that is not the `grad` of a parameter, such as the dense copy of a sparse gradient."""
        parameter = caller_local("p", lambda value: isinstance(value, torch.nn.Parameter))
        for name, known in self._parameters.items():
            if known is parameter:
                return name
        named = getattr(optimizer, "_parameter_names", {}).get(parameter)
        raise ConfigurationError(
            f"a gradient of shape {tuple(gradient.shape)} belongs to no parameter in the named_parameters of "
            f"hvdcomp.Compression{f' (Horovod calls it {named!r})' if named else ''}; pass the same named_parameters "
            "to hvdcomp.Compression and to hvd.DistributedOptimizer"
        )
