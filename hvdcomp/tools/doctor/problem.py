"""What a check of `hvdcomp doctor` finds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """What does not fit, and what to do. `stops` is true if training cannot go on with it."""

    stops: bool
    what: str
    remedy: str
