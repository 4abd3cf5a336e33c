"""What an observer is: it measures the statistics of one kind, as far as a policy asks for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from hvdcomp.arrays.types import Array
from hvdcomp.exchange.look import Look
from hvdcomp.policies.request import Request, Statistic


class Observer:
    """Base of all observers. Each method does nothing here, for the observers that have nothing to do then.

    Class attributes:
        tells: the statistics that it measures.
    """

    tells: ClassVar[frozenset[Statistic]]

    def begin_step(self, period_ends: bool) -> None:
        """To be called when a step begins, which is the last of a period or not."""

    def before_compress(self, look: Look) -> Mapping[str, Array]:
        """`Engine.before_compress`, if it observes the engine."""
        return {}

    def statistics(self, request: Request, batches: int) -> dict[str, Any]:
        """The measurements, by the fields of `Statistics`. It may wait for the device.

        Args:
            request: for some of `tells`, among others.
            batches: of the starting size, that this rank took in since the period began.
        """
        raise NotImplementedError

    def clear(self) -> None:
        """Begins a new period."""
