"""Learns, without waiting, whether all ranks make a step: only then buckets may start in its backward pass."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from hvdcomp.communicators import Communicator


class PolledCommunicator(Communicator, Protocol):
    """A communicator that says whether a collective has ended."""

    def is_done(self, started: Any) -> bool:
        """Whether `wait` would not have to."""


class Everyone:
    """All ranks, asked once in a step.

    The answer comes while the backward pass goes on. A rank that has joined, has other levels or refuses the step is so
    met before anything of the step is under way. What it means is said at the step's end, by `Binding.check_presence`.

    Args:
        communicator: the ranks.
        waits: whether `agrees` waits for the answer, so that it says the same on all ranks.

    Attributes:
        waits: as given.
    """

    def __init__(self, communicator: PolledCommunicator, waits: bool = False) -> None:
        self._communicator = communicator
        self.waits = waits
        self._asked: Any = None
        self._presence = 0
        self._total = 0

    def ask(self, presence: int, name: str) -> None:
        """Asks; to be called on all ranks.

        Args:
            presence: as of `Binding`.
            name: of the collective.
        """
        self._asked = self._communicator.start_allreduce(torch.full((1,), presence), "sum", name)
        self._presence, self._total = presence, 0

    def agrees(self) -> bool:
        """Whether it is known by now that all ranks make the step, at the same levels."""
        if self._asked is not None and (self.waits or self._communicator.is_done(self._asked)):
            self.end()
        return 0 < self._total == self._presence * self._communicator.world_size

    def end(self) -> int:
        """The sum of the ranks' presences; waits for it, if it is not there yet. All ranks must have been asked."""
        if self._asked is not None:
            asked, self._asked = self._asked, None
            self._total = int(self._communicator.wait(asked))
        return self._total
