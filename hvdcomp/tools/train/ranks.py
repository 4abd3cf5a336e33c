"""The ranks of a run and its setup: an error on one rank stops all ranks, with one message and without a hang."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import numpy as np

from hvdcomp.errors import ConfigurationError, SpecError
from hvdcomp.tools.train.options import SetupError

Built = TypeVar("Built")


class RunRefused(Exception):  # noqa: N818 - an orderly end of the run
    """A run that cannot start; raised on every rank with the same message."""


class Ranks(ABC):
    """All ranks of a run, through the library that connects them; see `hvdcomp.tools.train.backends.reach`.

    Attributes:
        backend: "horovod" or "ddp".
        rank, size: the number of this process, and the number of ranks.
        local_rank, local_size: number of this process on its host, and number of ranks on this host.
        controller: the carrier of the library's own messages: "mpi" or "gloo".
        restarts: how often the launcher has restarted these ranks after a failure.
        elastic: whether the run continues when the ranks change.
        note: a remark on these ranks for readers of the results, or None.
        links: the links on which steps of simulated ranks are timed.
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
        """The values of all ranks, by rank; a value can be any object that can be pickled.

        Args:
            name: the same on every rank, and of no other call at the same time.
        """

    @abstractmethod
    def broadcast(self, value: Any, name: str) -> Any:
        """Rank 0's value."""

    def now(self) -> float:
        """Seconds on the clock that times this rank's steps."""
        return time.perf_counter()

    def on_links(self) -> np.ndarray:
        """The seconds of training so far by this rank's clock, for each of the `links`."""
        return np.zeros(len(self.links))

    @property
    def changed(self) -> bool:
        """Whether this rank knows of a coming change of the ranks, in an elastic job."""
        return False

    def meet_anew(self, without_me: bool) -> None:
        """Ends the run on all ranks of an elastic job, which then resume from its checkpoint with the new ranks.

        Args:
            without_me: whether this rank ends, with the exit code of a saved run.
        """
        raise NotImplementedError

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.gather(None, "barrier")

    def leave(self, code: int) -> None:
        """End the connection at the end of a program. The program then exits with `code`, perhaps already in here. A
        launcher ends all ranks when one ends, so each rank first waits for all, until rank 0 has printed its output."""
        self.barrier()

    def sum(self, values: Any, name: str) -> np.ndarray:
        """The sum of the ranks' arrays of one shape; identical on every rank, in the arrays' precision."""
        return np.sum(self.gather(values, name), axis=0)

    def together(self, build: Callable[[], Built]) -> Built:
        """Call `build`, which must not communicate, on every rank; returns only if it succeeded on all ranks.

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
            prefix = "" if len(failed) == len(errors) else f"on rank {failed[0]}: "
            raise RunRefused(f"{prefix}{errors[failed[0]]}")
        return built

    def check_same(self, facts: dict[str, Any]) -> None:
        """Check that every rank has the same facts, by name; with different options or data ranks would wait for ever.

        Raises:
            RunRefused: on every rank; the message names the first fact that differs.
        """
        everywhere = self.gather(facts, "facts")
        for rank, rank_facts in enumerate(everywhere):
            for name, value in everywhere[0].items():
                if rank_facts[name] != value:
                    raise RunRefused(
                        f"the ranks differ in {name}: {value!r} on rank 0, {rank_facts[name]!r} on rank {rank}; start "
                        "all ranks with the same command, Python and data"
                    )
