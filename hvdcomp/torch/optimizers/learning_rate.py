"""A factor for the learning rate that is applied only while the optimizer makes a step.

Schedulers, and policies that read the schedule, see the user's rates without the factor.
"""

from __future__ import annotations

from typing import Any

import torch

from hvdcomp.errors import ConfigurationError


class ScaledSteps:
    """Makes an optimizer use a multiple of its learning rates in its steps.

    Attributes:
        factor: the multiple. A new value is used from the next exchange on. If the gradients of a step were already
            exchanged, this step keeps the earlier value.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.factor = 1.0
        self._optimizer = optimizer
        self._of_step: float | None = None  # the factor of the step whose gradients were already exchanged
        self._own: list[Any] | None = None  # the user's rates, stored during a step
        optimizer.register_step_pre_hook(self._scale)
        optimizer.register_step_post_hook(self._restore)

    @property
    def rates(self) -> tuple[float, ...]:
        """The user's rates, even while the optimizer makes a step."""
        return rates_of(self._optimizer) if self._own is None else tuple(map(float, self._own))

    def begin_step(self) -> None:
        """Fixes the factor of a step. Call this method when the exchange of the step's gradients begins.

        If a decision of the policy is applied after this call (for example for a checkpoint), the decision changes the
        factor of the next step, because other ranks may apply the decision later.
        """
        self._of_step = self.factor

    # In a step, both Horovod's optimizer and the wrapped optimizer call the hooks.

    def _scale(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        factor = self.factor if self._of_step is None else self._of_step
        if factor != 1 and self._own is None:
            self._own = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * factor

    def _restore(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._own is not None:
            for group, rate in zip(optimizer.param_groups, self._own, strict=True):
                group["lr"] = rate
            self._own = None
        self._of_step = None


def rates_of(optimizer: torch.optim.Optimizer) -> tuple[float, ...]:
    """The learning rate of each parameter group.

    Raises:
        ConfigurationError: if the optimizer chooses its own rate. Adafactor of transformers does so by default.
    """
    if not has_rates(optimizer):
        raise ConfigurationError(
            f"{type(optimizer).__name__} has lr=None, so it chooses its learning rate itself, and hvdcomp cannot "
            "follow this rate: set a learning rate (Adafactor of transformers: relative_step=False, lr=1e-3)"
        )
    return tuple(float(group["lr"]) for group in optimizer.param_groups)


def has_rates(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the user has set the optimizer's learning rates."""
    return all(group["lr"] is not None for group in optimizer.param_groups)
