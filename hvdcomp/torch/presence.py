"""Checks, without waiting, that all ranks make a step. The check runs before the first bucket of this step starts in
the backward pass."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from hvdcomp.communicators import Communicator


class PolledCommunicator(Communicator, Protocol):
    """A communicator that can report whether a collective has ended."""

    def is_done(self, started: Any) -> bool:
        """Whether `wait` would return immediately."""


class PresenceCheck:
    """Checks once in each step, with an allreduce during the backward pass, that all ranks take part in the step.

    Before any bucket starts, the check detects a rank that has called `join`, has different levels, or refuses the
    step. `Binding.check_presence` raises the error at the end of the step.

    Args:
        communicator: the communicator of the ranks that take part in the step.
        waits: whether `agrees` waits for the result, so that the answer is the same on all ranks.

    Attributes:
        waits: whether `agrees` waits for the result.
    """

    def __init__(self, communicator: PolledCommunicator, waits: bool = False) -> None:
        self._communicator = communicator
        self.waits = waits
        self._started: Any = None
        self._presence = 0
        self._total = 0

    def start(self, presence: int, name: str) -> None:
        """Starts the allreduce. Call this method on all ranks.

        Args:
            presence: the number that this rank contributes, as in `Binding`.
            name: the name of the collective.
        """
        self._started = self._communicator.start_allreduce(torch.full((1,), presence), "sum", name)
        self._presence, self._total = presence, 0

    def agrees(self) -> bool:
        """Whether it is already known that all ranks make the step, with the same levels."""
        if self._started is not None and (self.waits or self._communicator.is_done(self._started)):
            self.end()
        return 0 < self._total == self._presence * self._communicator.world_size

    def end(self) -> int:
        """Waits for the sum of the numbers `presence` of all ranks, and returns the sum. All ranks must have called
        `start`."""
        if self._started is not None:
            started, self._started = self._started, None
            self._total = int(self._communicator.wait(started))
        return self._total
