"""The ranks of a run, and setting it up on all of them: what is wrong on one stops them all, with one message and
without a hang."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import numpy as np

from hvdcomp.errors import ConfigurationError, SpecError
from hvdcomp.tools.train.options import SetupError

Built = TypeVar("Built")


class RunRefused(Exception):  # noqa: N818 - the run ends by it, in good order
    """A run that cannot start; raised on every rank with the same message."""


class Ranks(ABC):
    """All ranks of a run, through the library that connects them. `hvdcomp.tools.train.backends.reach` makes one.

    Attributes:
        backend: "horovod" or "ddp".
        rank, size: of this process, and of all together.
        local_rank, local_size: the same, on this host.
        controller: what carries the library's own messages: "mpi" or "gloo".
        restarts: how often the launcher has started these ranks again, after one had failed.
        elastic: whether the run goes on when ranks come and go.
        note: what a reader of the results must know of these ranks; None for nothing.
        links: of simulated ranks, those on which steps are timed.
    """

    backend: ClassVar[str]
    rank: int
    size: int
    local_rank: int
    local_size: int
    controller: str
    restarts: int = 0
    elastic: bool = False
    note: str | None = None
    links: tuple[str, ...] = ()

    @abstractmethod
    def gather(self, value: Any, name: str) -> list[Any]:
        """The value of each rank, by rank; anything that can be pickled.

        Args:
            name: the same on every rank; ranks must not call it twice at once with one name.
        """

    @abstractmethod
    def broadcast(self, value: Any, name: str) -> Any:
        """Rank 0's value."""

    def now(self) -> float:
        """Seconds on the clock by which this rank's steps are timed."""
        return time.perf_counter()

    def on_links(self) -> np.ndarray:
        """Seconds on this rank's clock of each of the `links`."""
        return np.zeros(len(self.links))

    @property
    def changed(self) -> bool:
        """Whether this rank has heard that there are to be other ranks, as some rank does in an elastic job."""
        return False

    def meet_anew(self, without_me: bool) -> None:
        """Ends the run on all ranks of an elastic job, which go on from its checkpoint with those that there are then.

        Args:
            without_me: whether this rank ends with the exit code of one that has saved.
        """
        raise NotImplementedError

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.gather(None, "barrier")

    def leave(self, code: int) -> None:
        """End the connection at the end of a program, which exits with `code` afterwards: the library may do that at
        once. A launcher ends all ranks as soon as one is gone: so each waits until all are here, and what rank 0 has to
        say is said."""
        self.barrier()

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
