"""hvdcomp's errors and warnings. Each message names the wrong value and the allowed values, and explains what to do."""

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
    """A compressor, a memory, a policy or a spec string has a wrong name or value."""

    ag_pass_through = True  # makes TensorFlow's AutoGraph raise this error instead of an error of its own


class ConfigurationError(RuntimeError):
    """Gradient compression would not work correctly with a setting of Horovod, of a framework or of a model."""

    ag_pass_through = True


class UnevenNodesError(ConfigurationError):
    """Nodes have different numbers of ranks, but two-level compression needs the same number of ranks on every node."""


class RankMismatchError(RuntimeError):
    """The ranks were configured differently. Every rank raises this error in the same step."""

    ag_pass_through = True


def listed(names: Sequence[str], most: int = 3) -> str:
    """Lists names for a message. If there are more than `most` names, the function lists the first names and counts the
    others.

    >>> listed(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def warn_alone(message: str) -> None:
    """Warns on this rank only. The function never raises an error, not even with `python -W error`, because the other
    ranks would then wait forever.

    The warning points to the line of the user's program that caused it. This is the innermost line that is not in
    hvdcomp, in an installed package or in Python itself. If there is no such line, as in a thread of a framework, the
    warning points to the caller of this function.
    """
    stack = list(traceback.walk_stack(inspect.currentframe()))[1:]
    users = [place for place in stack if not place[0].f_code.co_filename.startswith(_NOT_OF_USERS)]
    frame, line = (users or stack)[0]
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    with contextlib.suppress(Warning):
        warnings.warn_explicit(
            message, UserWarning, frame.f_code.co_filename, line, frame.f_globals.get("__name__"), registry
        )
