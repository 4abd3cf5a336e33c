"""Functions that TensorFlow calls back while a graph runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from horovod.common.exceptions import HorovodInternalError


def as_callback(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function for the graph, whose errors reach the user.

    TensorFlow carries only the text of an error: of a ValueError as InvalidArgumentError, of most others as
    UnknownError. Elastic Horovod looks in every UnknownError for the name of a failed collective. If there is none, it
    ends the training as if it were over. Other errors than Horovod's therefore become ValueErrors.
    """

    @functools.wraps(function)
    def called(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except (HorovodInternalError, MemoryError):  # which Horovod and TensorFlow know
            raise
        except Exception as error:
            raise ValueError(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__) from None

    return called
