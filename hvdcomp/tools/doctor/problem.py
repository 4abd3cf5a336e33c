"""A problem that a check of `hvdcomp doctor` finds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """A problem and its remedy. `stops` is whether the problem prevents training."""

    stops: bool
    what: str
    remedy: str
