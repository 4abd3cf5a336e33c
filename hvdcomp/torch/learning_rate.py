"""Multiplies the learning rate while the optimizer steps, and at no other time.

Schedulers, and policies that look at the schedule, see the rates that the user set.
"""

from __future__ import annotations

from typing import Any

import torch


class ScaledSteps:
    """Lets an optimizer step at a multiple of its learning rates.

    Attributes:
        factor: the multiple, from the next step on: one whose gradients were exchanged before keeps the earlier one.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.factor = 1.0
        self._optimizer = optimizer
        self._of_step: float | None = None  # the multiple of the step whose gradients have been exchanged
        self._own: list[Any] | None = None  # the rates as the user set them, during a step
        optimizer.register_step_pre_hook(self._scale)
        optimizer.register_step_post_hook(self._restore)

    @property
    def rates(self) -> tuple[float, ...]:
        """The rates as the user set them, also while the optimizer steps."""
        return rates_of(self._optimizer) if self._own is None else tuple(map(float, self._own))

    def begin_step(self) -> None:
        """To be called when the exchange of a step's gradients begins.

        What a rank takes up after that, such as a decision that a checkpoint has to hold, is for the next step: other
        ranks may take it up later.
        """
        self._of_step = self.factor

    # A step of Horovod's optimizer calls that of the optimizer that it wraps, and both call the hooks.

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
    """The learning rate of each parameter group."""
    return tuple(float(group["lr"]) for group in optimizer.param_groups)
