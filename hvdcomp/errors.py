"""hvdcomp's errors and warnings. Each message names the value, the allowed values, and the way out."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence


class SpecError(ValueError):
    """A compressor, memory or spec string with a wrong name or value."""

    ag_pass_through = True  # TensorFlow's AutoGraph then re-raises this class instead of its own


class ConfigurationError(RuntimeError):
    """A use of Horovod, or of a model, that compression cannot serve correctly."""

    ag_pass_through = True


class UnevenNodesError(ConfigurationError):
    """Nodes with different numbers of ranks; two levels need equal numbers."""


class RankMismatchError(RuntimeError):
    """The ranks were configured differently; raised on every rank in the same step."""

    ag_pass_through = True


def listed(names: Sequence[str], most: int = 3) -> str:
    """Names for a message, the first of many.

    >>> listed(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def warn_alone(message: str, stacklevel: int = 2) -> None:
    """Warns on this rank only, and never raises: with `python -W error`, an error would leave other ranks waiting.

    Args:
        message: the warning.
        stacklevel: as in `warnings.warn`, for the caller.
    """
    with contextlib.suppress(Warning):
        warnings.warn(message, stacklevel=stacklevel + 1)
