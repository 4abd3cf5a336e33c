"""Which parameters the backward passes reach."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from weakref import finalize

import torch


class Uses:
    """The parameters that this rank has used since the latest exchange.

    A gradient does not tell: that of a parameter which is used may be zero on all ranks, in the first step too, as it
    is behind a factor that starts at zero.

    Args:
        model: of the parameters; with it goes what is noted.
        parameters: by name.

    Attributes:
        names: of those that were used; to be cleared after an exchange.
    """

    def __init__(self, model: torch.nn.Module, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self.names: set[str] = set()
        self._handles = [
            parameter.register_post_accumulate_grad_hook(functools.partial(_note, self.names, name))
            for name, parameter in parameters.items()
        ]
        finalize(model, self.stop)

    def stop(self) -> None:
        """Notes no more."""
        for handle in self._handles:
            handle.remove()


def _note(names: set[str], name: str, parameter: torch.Tensor) -> None:
    names.add(name)
