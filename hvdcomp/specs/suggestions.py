"""What somebody may have meant by a name that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Words to follow the name in a message: " (did you mean 'ratio'?)", or nothing if no name is like it."""
    names = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), names, n=1, cutoff=0.6)
    return f" (did you mean {names[near[0]]!r}?)" if near else ""
