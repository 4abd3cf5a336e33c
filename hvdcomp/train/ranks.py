"""The ranks of a run, and setting it up on all of them: what is wrong on one stops them all, with one message and
without a hang."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from hvdcomp.errors import ConfigurationError, SpecError
from hvdcomp.train import environment
from hvdcomp.train.options import SetupError

Built = TypeVar("Built")


class RunRefused(Exception):  # noqa: N818 - the run ends by it, in good order
    """A run that cannot start; raised on every rank with the same message."""


class Ranks:
    """All ranks, reached through the Horovod of one framework, which is initialized if it was not.

    Attributes:
        rank, size: of this process, and of all together.
        local_rank, local_size: the same, on this host.
        controller: what carries Horovod's coordination, "mpi" or "gloo".

    Raises:
        ImportError: Horovod was not built for this framework.
    """

    def __init__(self, framework: str) -> None:
        self._hvd = importlib.import_module(f"horovod.{framework}")
        if not self._hvd.is_initialized():
            self._hvd.init()
        self.rank: int = self._hvd.rank()
        self.size: int = self._hvd.size()
        self.local_rank: int = self._hvd.local_rank()
        self.local_size: int = self._hvd.local_size()
        self.controller = environment.controller(self._hvd)

    def gather(self, value: Any, name: str) -> list[Any]:
        """The value of each rank, by rank. Named, as Horovod's own choice of name depends on the value's type."""
        return self._hvd.allgather_object(value, name=f"hvdcomp.train.{name}")

    def sum(self, values: Any, name: str) -> np.ndarray:
        """The sum over the ranks of arrays of one shape: the same bits on every rank, in the arrays' own precision."""
        return np.sum(self.gather(values, name), axis=0)

    def together(self, build: Callable[[], Built]) -> Built:
        """Call `build`, which must not communicate, on every rank, and go on only if all ranks could.

        Raises:
            RunRefused: on every rank, if `build` raised SetupError, SpecError or ConfigurationError on any.
        """
        built: Any = None
        error = None
        try:
            built = build()
        except (SetupError, SpecError, ConfigurationError) as raised:
            error = str(raised)
        errors = self.gather(error, "errors")
        failed = [rank for rank, message in enumerate(errors) if message is not None]
        if failed:
            where = "" if len(failed) == len(errors) else f"on rank {failed[0]}: "
            raise RunRefused(f"{where}{errors[failed[0]]}")
        return built

    def check_same(self, facts: dict[str, Any]) -> None:
        """See that every rank has the same facts, by name; different options or data would make ranks wait for
        ever.

        Raises:
            RunRefused: on every rank, naming the first fact that differs.
        """
        everywhere = self.gather(facts, "facts")
        for rank, others in enumerate(everywhere):
            for name, value in everywhere[0].items():
                if others[name] != value:
                    raise RunRefused(
                        f"the ranks differ in {name}: {value!r} on rank 0, {others[name]!r} on rank {rank}; "
                        "start all with the same command, Python and data"
                    )
