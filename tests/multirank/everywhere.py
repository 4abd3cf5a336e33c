"""What the cases assert of all ranks, whatever they exchange with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def raised_everywhere(kind: type[Exception], work: Callable[[], object], gather: Callable[[Any], list[Any]]) -> str:
    """The message of the error of this kind that `work` raises; every rank must raise one.

    Args:
        gather: the objects that all ranks give, by rank.
    """
    message = None
    try:
        work()
    except kind as error:
        message = str(error)
    everyone = gather(message)
    assert all(everyone), f"raised only on some ranks: {everyone}"
    assert message is not None
    return message
