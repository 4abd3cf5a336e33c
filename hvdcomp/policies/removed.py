"""Policies that were removed. If an old spec, log or checkpoint names a removed policy, the error message names the
replacement."""

from __future__ import annotations

import re
from typing import NamedTuple

from hvdcomp.errors import SpecError


class _Removed(NamedTuple):
    specs: str  # a pattern that matches the start of a spec
    name: str
    why: str
    instead: str


_NO_BETTER = "no measurement showed that it is better than a fixed level that sends the same number of bytes"
_REMOVED = (
    _Removed(r"accordion:auto\b", "the policy accordion:auto", _NO_BETTER, "budget:factor=50"),
    _Removed(
        r"accordion_joint\b",
        "the policy accordion_joint",
        _NO_BETTER,
        "accordion for levels, or accordion_batch_size for the batch",
    ),
    _Removed(
        r"gravac:(.*,)?\s*lag\s*=\s*0\s*(,|$)",
        "lag=0 of gravac",
        "it made all ranks wait for a device in the middle of each step",
        "gravac without lag, and every=1 for a decision after each step",
    ),
)


def refuse_removed(spec: str) -> None:
    """Raises SpecError, with the reason and the replacement, if a spec string names a removed policy or setting."""
    spec = spec.strip()
    for removed in _REMOVED:
        if re.match(removed.specs, spec):
            raise SpecError(f"{spec!r}: {removed.name} was removed, because {removed.why}; use {removed.instead}")
