"""hvdcomp's errors and warnings. Each message names the value, the allowed values, and the way out."""

from __future__ import annotations

import contextlib
import inspect
import os
import site
import traceback
import warnings
from collections.abc import Sequence

_PACKAGES = (*map(os.path.dirname, (__file__, os.__file__)), *site.getsitepackages(), site.getusersitepackages())
_NOT_OF_USERS = (*(f"{folder}{os.sep}" for folder in _PACKAGES), "<frozen ")


class SpecError(ValueError):
    """A compressor, memory or spec string with a wrong name or value."""

    ag_pass_through = True  # TensorFlow's AutoGraph then re-raises this class instead of its own


class ConfigurationError(RuntimeError):
    """A setting of Horovod, a framework or a model with which gradient compression would not work correctly."""

    ag_pass_through = True


class UnevenNodesError(ConfigurationError):
    """Nodes have different numbers of ranks, but two-level compression needs the same number of ranks on every node."""


class RankMismatchError(RuntimeError):
    """The ranks were configured differently; raised on every rank in the same step."""

    ag_pass_through = True


def listed(names: Sequence[str], most: int = 3) -> str:
    """The names in a message; if there are many, the first few and the number of the others.

    >>> listed(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def warn_alone(message: str) -> None:
    """Warns on this rank only, and never raises: with `python -W error`, an error would leave other ranks waiting.

    The warning points to the line of the user's program that led to it: the innermost line outside of hvdcomp, of
    installed packages and of Python itself. If there is no such line, as in a thread of a framework, the warning points
    to the caller.
    """
    stack = list(traceback.walk_stack(inspect.currentframe()))[1:]
    users = [place for place in stack if not place[0].f_code.co_filename.startswith(_NOT_OF_USERS)]
    frame, line = (users or stack)[0]
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    with contextlib.suppress(Warning):
        warnings.warn_explicit(
            message, UserWarning, frame.f_code.co_filename, line, frame.f_globals.get("__name__"), registry
        )
