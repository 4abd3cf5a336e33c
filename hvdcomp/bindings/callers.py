"""Reads local variables of callers, for facts that Horovod does not pass on."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def caller_local(name: str, suits: Callable[[Any], Any], function: str | None = None) -> Any:
    """The local variable `name` of the nearest caller in which it has a suitable value; None if no caller has.

    Args:
        name: name of the variable.
        suits: function that says whether a value is suitable; called with None for a caller without the variable.
        function: name of the functions to search; None for all. Reading a frame's variables keeps their values alive,
            which is to be avoided for the user's own training loop.
    """
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001  # its documented name
    while frame is not None:
        if function in (None, frame.f_code.co_name) and suits(value := frame.f_locals.get(name)):
            return value
        frame = frame.f_back
    return None
