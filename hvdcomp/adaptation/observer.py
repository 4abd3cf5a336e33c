"""The base class of observers, which measure statistics that a policy requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from hvdcomp.adaptation.look import Look
from hvdcomp.arrays.types import Array
from hvdcomp.policies.request import Request, Statistic


class Observer:
    """Base of all observers. Methods do nothing by default.

    Class attributes:
        measures: the statistics that it measures.
    """

    measures: ClassVar[frozenset[Statistic]]

    def begin_step(self, period_ends: bool) -> None:
        """Begins a step; `period_ends` is whether it is the last of a period."""

    def before_compress(self, look: Look) -> Mapping[str, Array]:
        """Looks at x in a step, if the engine is watched by this function (`look.observe`)."""
        return {}

    def statistics(self, request: Request, batches: int) -> dict[str, Any]:
        """The measurements, by field of `Statistics`. It may wait for the device.

        Args:
            request: the policy's request, for some of `measures`.
            batches: number of batches of the starting size that this rank processed in the period.
        """
        raise NotImplementedError

    def clear(self) -> None:
        """Begins a new period."""
