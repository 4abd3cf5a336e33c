"""The ranks of a run. During the setup of a run, an error on one rank stops all ranks with a single message, so that no
rank waits forever."""

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
    """A run cannot start. Every rank raises this error with the same message."""


class Ranks(ABC):
    """All ranks of a run, connected by a library. `hvdcomp.tools.train.backends.reach` creates such an object.

    Attributes:
        backend: name of the library that connects the ranks: "horovod" or "ddp".
        rank, size: the number of this process, and the number of ranks.
        local_rank, local_size: number of this process on its host, and number of ranks on this host.
        controller: the library with which ranks send each other messages about the exchange: "mpi" or "gloo".
        restarts: the number of times that the launcher has restarted these ranks after a failure.
        elastic: whether the run continues after a change of the ranks.
        note: a remark about these ranks for readers of the results, or None.
        links: the links for which steps of simulated ranks are timed.
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
        """The values of all ranks, in rank order. Values can be any objects that can be pickled.

        Args:
            name: a name for this call. It must be the same on every rank, and no other call may use it at the same
                time.
        """

    @abstractmethod
    def broadcast(self, value: Any, name: str) -> Any:
        """Rank 0's value."""

    def now(self) -> float:
        """The time in seconds, from the clock that is used for timing this rank's steps."""
        return time.perf_counter()

    def on_links(self) -> np.ndarray:
        """The seconds of training so far, on this rank's clock, for each of the `links`."""
        return np.zeros(len(self.links))

    @property
    def changed(self) -> bool:
        """Whether this rank of an elastic job has been told that the ranks will change."""
        return False

    def meet_anew(self, without_me: bool) -> None:
        """Ends the run on all ranks of an elastic job. The new ranks then resume from the checkpoint.

        Args:
            without_me: whether this rank leaves the job, with the exit code of a saved run.
        """
        raise NotImplementedError

    def barrier(self) -> None:
        """Waits for all ranks."""
        self.gather(None, "barrier")

    def leave(self, code: int) -> None:
        """Closes the connection at the end of a program, which then exits with `code`. The exit may already happen in
        this method. A launcher ends all ranks when one rank ends, so each rank first waits for all other ranks, until
        rank 0 has printed its output."""
        self.barrier()

    def sum(self, values: Any, name: str) -> np.ndarray:
        """The sum of the arrays of all ranks, which have the same shape. The sum has the precision of the arrays, and
        is identical on every rank."""
        return np.sum(self.gather(values, name), axis=0)

    def together(self, build: Callable[[], Built]) -> Built:
        """Calls `build` on every rank. Returns only if `build` has succeeded on all ranks. `build` must not
        communicate.

        Raises:
            RunRefused: on every rank, if `build` raised SetupError, SpecError or ConfigurationError on any rank.
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
        """Checks that every rank has the same facts. If options or data differed, ranks would wait for each other
        forever.

        Raises:
            RunRefused: on every rank, if a fact differs. The message names the first such fact.
        """
        everywhere = self.gather(facts, "facts")
        for rank, rank_facts in enumerate(everywhere):
            for name, value in everywhere[0].items():
                if rank_facts[name] != value:
                    raise RunRefused(
                        f"the ranks differ in {name}: {value!r} on rank 0, {rank_facts[name]!r} on rank {rank}; start "
                        "all ranks with the same command, Python and data"
                    )
