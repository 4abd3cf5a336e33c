"""The base class of observers. Observers measure the statistics that a policy requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from hvdcomp.adaptation.look import Look
from hvdcomp.arrays.types import Array
from hvdcomp.policies.request import Request, Statistic


class Observer:
    """Base of all observers. Methods do nothing by default.

    Class attributes:
        measures: the kinds of statistics that the observer measures.
    """

    measures: ClassVar[frozenset[Statistic]]

    def begin_step(self, period_ends: bool) -> None:
        """Begins a step. `period_ends` is True if the step is the last of a period."""

    def before_compress(self, look: Look) -> Mapping[str, Array]:
        """Observes x in a step. The engine calls this method if it was passed to `look.observe`."""
        return {}

    def statistics(self, request: Request, batches: int) -> dict[str, Any]:
        """The measurements, by the field names of `Statistics`. The method may wait for the device.

        Args:
            request: the request of the policy, which names some of `measures`.
            batches: number of batches that this rank has processed in the period. If the batch size has changed since
                the start of training, batches of the original size are counted.
        """
        raise NotImplementedError

    def clear(self) -> None:
        """Begins a new period."""
