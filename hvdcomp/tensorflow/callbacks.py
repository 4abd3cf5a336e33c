"""Python functions that TensorFlow calls while a graph runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from horovod.common.exceptions import HorovodInternalError


def as_callback(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function for the graph, so that its errors reach the user.

    TensorFlow passes on only the text of an error. A ValueError becomes an InvalidArgumentError, and most other errors
    become an UnknownError. Elastic Horovod searches every UnknownError for the name of a failed collective. If Horovod
    finds no such name, it ends the training run as if the run were complete. Therefore all errors except Horovod's own
    become ValueErrors.
    """

    @functools.wraps(function)
    def called(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except (HorovodInternalError, MemoryError):  # Horovod and TensorFlow handle these errors themselves
            raise
        except Exception as error:
            raise ValueError(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__) from None

    return called
