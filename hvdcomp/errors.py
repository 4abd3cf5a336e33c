"""The errors that hvdcomp raises on purpose, and how it warns. Each message names the value, what is allowed, and the
way out."""

from __future__ import annotations

import contextlib
import warnings


class SpecError(ValueError):
    """A compressor, memory or spec string with a wrong name or value."""

    ag_pass_through = True  # while TensorFlow traces a step, it stays this error instead of becoming one of AutoGraph's


class ConfigurationError(RuntimeError):
    """A use of Horovod, or of a model, that compression cannot serve correctly."""

    ag_pass_through = True


class UnevenNodesError(ConfigurationError):
    """Nodes with different numbers of ranks, where two levels need as many on each."""


class RankMismatchError(RuntimeError):
    """The ranks were configured differently; raised on every rank in the same step."""

    ag_pass_through = True


def warn_alone(message: str, stacklevel: int = 2) -> None:
    """Warns on this rank alone: made an error by `python -W error`, a warning would leave the others waiting.

    Args:
        stacklevel: as of `warnings.warn`, of the caller.
    """
    with contextlib.suppress(Warning):
        warnings.warn(message, stacklevel=stacklevel + 1)
