"""Finds out which parameters backward passes reach."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from weakref import finalize

import torch


class UsedParameters:
    """The parameters that this rank has used since the latest exchange.

    The gradients do not show which parameters were used. The gradient of a used parameter may be zero on all ranks, for
    example if the output is multiplied by a factor that starts at zero.

    Args:
        model: the model. The hooks are removed when the model is freed.
        parameters: the parameters of the model, by name.

    Attributes:
        names: names of the parameters that had a gradient. Clear this set after an exchange.
    """

    def __init__(self, model: torch.nn.Module, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self.names: set[str] = set()
        self._handles = [
            parameter.register_post_accumulate_grad_hook(functools.partial(_note, self.names, name))
            for name, parameter in parameters.items()
        ]
        finalize(model, self.stop)

    def stop(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()


def _note(names: set[str], name: str, parameter: torch.Tensor) -> None:
    names.add(name)
