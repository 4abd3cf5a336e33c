"""Suggests the right name if a name is misspelled."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Words to write after a misspelled name in a message, such as " (did you mean 'ratio'?)"; empty if no known name
    is similar."""
    names = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), names, n=1, cutoff=0.6)
    return f" (did you mean {names[near[0]]!r}?)" if near else ""
