"""Reads local variables of callers. This is needed for values that Horovod or a trainer does not pass to hvdcomp."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def caller_local(name: str, suits: Callable[[Any], Any], function: str | None = None) -> Any:
    """The value of the local variable `name` in the nearest caller whose value is suitable; None if there is no such
    caller.

    Args:
        name: name of the variable.
        suits: function that returns whether a value is suitable. For a caller without the variable, this function is
            called with None.
        function: only functions with this name are searched; None to search all callers. Reading the variables of a
            function keeps their values alive. Therefore the user's own training loop should not be searched.
    """
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001  # Python documents this name
    while frame is not None:
        if function in (None, frame.f_code.co_name) and suits(value := frame.f_locals.get(name)):
            return value
        frame = frame.f_back
    return None
