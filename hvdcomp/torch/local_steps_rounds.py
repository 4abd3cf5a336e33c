"""Which parameters `LocalSteps` exchanges after which step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from hvdcomp.errors import ConfigurationError
from hvdcomp.specs.described import is_number, is_whole


class Rounds(NamedTuple):
    """When the fragments of a model are exchanged (Douillard et al. 2025, Streaming DiLoCo, arXiv:2501.18512, section
    2.2): each once in `every` steps, at staggered steps, so that never two are under way.

    Attributes:
        every: steps from one exchange of a parameter to the next.
        fragments: the number of groups of parameters.
        delay: steps from sending a fragment to applying what has come of it.
        local_share: what a rank keeps of its own weights then, from 0 to 1.
    """

    every: int
    fragments: int
    delay: int
    local_share: float

    def check(self, parameters: int) -> None:
        """Raises ConfigurationError if these numbers are not possible with so many parameters."""
        every, fragments, delay, share = self
        if not is_whole(every, 1):
            raise ConfigurationError(
                f"LocalSteps: every={every!r} is not possible; give the steps between two exchanges"
            )
        most = min(every, parameters)
        if not is_whole(fragments, 1) or fragments > most:
            raise ConfigurationError(
                f"LocalSteps: fragments={fragments!r} is not possible with every={every} and {parameters} parameters; "
                f"give a whole number from 1 to {most}"
            )
        if not is_whole(delay, 0) or delay * fragments >= every:
            raise ConfigurationError(
                f"LocalSteps: delay={delay!r} is not possible with every={every} and fragments={fragments}, since a "
                f"fragment is to be applied before the next is sent; give at most {(every - 1) // fragments}"
            )
        if not (is_number(share) and 0 <= share < 1):
            raise ConfigurationError(
                f"LocalSteps: local_share={share!r} is not possible; give 0, or a share below 1, such as 0.5"
            )

    @property
    def end_in_sync(self) -> bool:
        """Whether all ranks have the same weights after an exchange."""
        return self.fragments == 1 and self.delay == 0 and self.local_share == 0

    def due(self, steps: int) -> int | None:
        """The number of the fragment that is sent after so many steps, from 1; None if none is.

        Example:
            >>> rounds = Rounds(every=7, fragments=3, delay=0, local_share=0.0)
            >>> [rounds.due(steps) for steps in range(1, 10)]
            [None, 0, None, 1, None, 2, None, None, 0]
        """
        number, rest = divmod((steps - 1) % self.every + 1, self.every // self.fragments)
        return number - 1 if rest == 0 and number <= self.fragments else None


def grouped(sizes: Sequence[int], count: int) -> list[list[int]]:
    """The places of parameters of these sizes in groups of about equal size: the largest first, each to the group that
    has least."""
    groups: list[list[int]] = [[] for _ in range(count)]
    filled = [0] * count
    for place in sorted(range(len(sizes)), key=lambda one: -sizes[one]):
        least = filled.index(min(filled))
        groups[least].append(place)
        filled[least] += max(1, sizes[place])
    return [sorted(group) for group in groups]


class Sent(NamedTuple):
    """A fragment that was sent, and not applied yet.

    Attributes:
        places: of its parameters.
        at: the number of steps after which it was sent.
        moved: the pseudo-gradients of this rank: from them the exchange can be started again.
    """

    places: list[int]
    at: int
    moved: list[torch.Tensor]
