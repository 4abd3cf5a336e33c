"""Learns, without waiting, whether all ranks make a step: only then buckets may start in its backward pass."""

from __future__ import annotations

from typing import Any

import torch

from hvdcomp.communicators.horovod_torch import HorovodTorchCommunicator


class Everyone:
    """All ranks, asked once in a step.

    The answer comes while the backward pass goes on. A rank that has joined, has other levels or refuses the step is so
    met before anything of the step is under way. What it means is said at the step's end, by `Binding.check_presence`.
    """

    def __init__(self, communicator: HorovodTorchCommunicator) -> None:
        self._communicator = communicator
        self._asked: Any = None
        self._presence = 0
        self._agree = False

    def ask(self, presence: int, name: str) -> None:
        """Asks; to be called on all ranks.

        Args:
            presence: as of `Binding`.
            name: of the collective.
        """
        self._asked = self._communicator.start_allreduce(torch.full((1,), presence), "sum", name)
        self._presence, self._agree = presence, False

    def agrees(self) -> bool:
        """Whether it is known by now that all ranks make the step, at the same levels."""
        if self._asked is not None and self._communicator.is_done(self._asked):
            self.end()
        return self._agree

    def end(self) -> None:
        """Waits for the answer, if there is none yet. All ranks must have been asked."""
        if self._asked is not None:
            asked, self._asked = self._asked, None
            self._agree = int(self._communicator.wait(asked)) == self._presence * self._communicator.world_size
