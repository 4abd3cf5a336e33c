"""hvdcomp's errors and warnings. Each message names the value, the allowed values, and the way out."""

from __future__ import annotations

import contextlib
import warnings


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


def warn_alone(message: str, stacklevel: int = 2) -> None:
    """Warns on this rank only, and never raises: with `python -W error`, an error would leave other ranks waiting.

    Args:
        message: the warning.
        stacklevel: as in `warnings.warn`, for the caller.
    """
    with contextlib.suppress(Warning):
        warnings.warn(message, stacklevel=stacklevel + 1)
