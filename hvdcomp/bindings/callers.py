"""What Horovod knows and does not pass on: it is read from the frames of the callers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def caller_local(name: str, suits: Callable[[Any], Any], function: str | None = None) -> Any:
    """The local variable `name` of the nearest caller that has a suitable one; None if none has.

    Args:
        suits: whether a value is suitable; asked about None too, where a caller has no variable of this name.
        function: the name of the only functions to look at. A frame that was looked at keeps what its variables
            held, so those of the user's own training had better be left alone.
    """
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001  # its documented name
    while frame is not None:
        if function in (None, frame.f_code.co_name) and suits(value := frame.f_locals.get(name)):
            return value
        frame = frame.f_back
    return None
