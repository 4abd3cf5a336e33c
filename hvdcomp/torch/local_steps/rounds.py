"""The schedule of `LocalSteps`. The schedule determines which parameters are exchanged after each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from hvdcomp.errors import ConfigurationError
from hvdcomp.specs.described import is_number, is_whole


class Rounds(NamedTuple):
    """The schedule of a model's fragments (Douillard et al. 2025, Streaming DiLoCo, arXiv:2501.18512, section 2.2).
    Each fragment is exchanged once in `every` steps. Different fragments are exchanged at different steps, so that at
    most one exchange is running.

    Attributes:
        every: number of steps from one exchange of a parameter to the next exchange of the same parameter.
        fragments: the number of fragments. A fragment is a set of parameters.
        delay: number of steps from sending a fragment to applying its mean.
        local_share: the share of a rank's own weights after an exchange, from 0 to below 1.
    """

    every: int
    fragments: int
    delay: int
    local_share: float

    def check(self, parameters: int) -> None:
        """Raises ConfigurationError if the schedule is not possible with this number of parameters."""
        every, fragments, delay, share = self
        if not is_whole(every, 1):
            raise ConfigurationError(
                f"LocalSteps: every={every!r} is not allowed; give the number of steps between two exchanges"
            )
        most = min(every, parameters)
        if not is_whole(fragments, 1) or fragments > most:
            raise ConfigurationError(
                f"LocalSteps: fragments={fragments!r} is not allowed with every={every} and {parameters} parameters; "
                f"give a whole number from 1 to {most}"
            )
        if not is_whole(delay, 0) or delay * fragments >= every:
            raise ConfigurationError(
                f"LocalSteps: delay={delay!r} is not allowed with every={every} and fragments={fragments}, because "
                f"each fragment must be applied before the next one is sent; give at most {(every - 1) // fragments}"
            )
        if not (is_number(share) and 0 <= share < 1):
            raise ConfigurationError(
                f"LocalSteps: local_share={share!r} is not allowed; give a number of at least 0 and below 1, such as "
                "0.5"
            )

    @property
    def end_in_sync(self) -> bool:
        """Whether all ranks have the same weights after an exchange."""
        return self.fragments == 1 and self.delay == 0 and self.local_share == 0

    def due(self, steps: int) -> int | None:
        """The number of the fragment that is sent after step `steps`, counted from 1; None if no fragment is sent.

        Example:
            >>> rounds = Rounds(every=7, fragments=3, delay=0, local_share=0.0)
            >>> [rounds.due(steps) for steps in range(1, 10)]
            [None, 0, None, 1, None, 2, None, None, 0]
        """
        number, remainder = divmod((steps - 1) % self.every + 1, self.every // self.fragments)
        return number - 1 if remainder == 0 and number <= self.fragments else None


def in_fragments(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Divides parameters into fragments of about equal size, and returns the indices of each fragment's parameters. The
    function goes through the parameters from the largest to the smallest, and puts each parameter into the fragment
    that is smallest so far."""
    fragments: list[list[int]] = [[] for _ in range(count)]
    filled = [0] * count
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        least = filled.index(min(filled))
        fragments[least].append(place)
        filled[least] += max(1, sizes[place])
    return [sorted(fragment) for fragment in fragments]


class Sent(NamedTuple):
    """A fragment that was sent, and whose mean is not yet applied.

    Attributes:
        places: the indices of the parameters that were sent.
        at: number of steps that this rank had made when it sent the parameters.
        moved: this rank's pseudo-gradients, with which the exchange can be started again.
    """

    places: list[int]
    at: int
    moved: list[torch.Tensor]
