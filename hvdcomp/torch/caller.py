"""Finds out what Horovod does not say: it passes a compressor nothing but the tensor."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

from hvdcomp.errors import ConfigurationError


class ParameterNames:
    """Knows which parameter a gradient belongs to.

    Args:
        parameters: by name.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._successor: dict[str | None, str] = {}  # who followed whom in the last step
        self._previous: str | None = None

    def begin_step(self) -> None:
        """To be called before the first gradient of a step."""
        self._previous = None

    def of(self, gradient: torch.Tensor, optimizer: Any) -> str:
        """The name of the parameter whose gradient this is: first the one that came next in the last step.

        Raises:
            ConfigurationError: if it is of none.
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
        """For what is no parameter's gradient itself: the dense copy of a sparse gradient, or a mistake."""
        parameter = caller_local("p", torch.nn.Parameter)
        for name, known in self._parameters.items():
            if known is parameter:
                return name
        named = getattr(optimizer, "_parameter_names", {}).get(parameter)
        raise ConfigurationError(
            f"a gradient of shape {tuple(gradient.shape)} arrived that belongs to no parameter in the named_parameters "
            f"of hvdcomp.Compression{f' (Horovod calls it {named!r})' if named else ''}; give it the same "
            "named_parameters as hvd.DistributedOptimizer"
        )


def caller_local(
    name: str, kind: type, suits: Any = lambda found: True, function: str | None = None
) -> Any:
    """The local variable `name` of the nearest caller that has a suitable one; None if none has.

    Horovod passes a compressor nothing but the tensor. What else it knows (the optimizer, its op and process set; the
    parameter behind a dense copy of a sparse gradient) is read from its frame, once or in rare cases.

    Args:
        function: the name of the only functions to look at. A frame that was looked at keeps what its variables
            held, so those of the user's own training had better be left alone.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if function is None or frame.f_code.co_name == function:
            found = frame.f_locals.get(name)
            if isinstance(found, kind) and suits(found):
                return found
        frame = frame.f_back  # type: ignore[assignment]
    return None
