"""Setting up a run on all ranks: what is wrong on one stops them all, with one message and without a hang."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import horovod.torch as hvd

from hvdcomp.errors import ConfigurationError, SpecError
from hvdcomp.train.settings import SetupError

Built = TypeVar("Built")


class RunRefused(Exception):  # noqa: N818 - the run ends by it, in good order
    """A run that cannot start; raised on every rank with the same message."""


def together(build: Callable[[], Built]) -> Built:
    """Call `build`, which must not communicate, on every rank, and go on only if all ranks could.

    Raises:
        RunRefused: on every rank, if `build` raised SetupError, SpecError or ConfigurationError on any.
    """
    built, error = None, None
    try:
        built = build()
    except (SetupError, SpecError, ConfigurationError) as raised:
        error = str(raised)
    errors = gather(error, "errors")
    failed = [rank for rank, message in enumerate(errors) if message is not None]
    if failed:
        where = "" if len(failed) == len(errors) else f"on rank {failed[0]}: "
        raise RunRefused(f"{where}{errors[failed[0]]}")
    assert built is not None
    return built


def check_same(facts: dict[str, Any]) -> None:
    """See that every rank has the same facts, by name; different options or data would make ranks wait for
    ever.

    Raises:
        RunRefused: on every rank, naming the first fact that differs.
    """
    everywhere = gather(facts, "facts")
    for rank, others in enumerate(everywhere):
        for name, value in everywhere[0].items():
            if others[name] != value:
                raise RunRefused(
                    f"the ranks differ in {name}: {value!r} on rank 0, {others[name]!r} on rank {rank}; "
                    "start all with the same command, Python and data"
                )


def gather(value: Any, name: str) -> list[Any]:
    """The value of each rank, by rank. Named, as Horovod's own choice of name depends on the value's type."""
    return hvd.allgather_object(value, name=f"hvdcomp.train.{name}")
