"""The collectives that each rank started in a case, in a file of each rank, so that a failure shows where they differ.

A rank writes each line at once: a rank that waits for ever, or is killed, has said what it waits for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any, TextIO

from hvdcomp.communicators import Communicator


class Requests:
    """The requests of this rank; from now on, every communicator of the process is recorded.

    Args:
        file: where they are written.
    """

    def __init__(self, file: Path) -> None:
        self._file: TextIO = file.open("w", buffering=1)
        kinds = [Communicator]
        for kind in kinds:
            kinds += kind.__subclasses__()
            self._record(kind)

        def record_later(kind: Any, **options: Any) -> None:
            super(Communicator, kind).__init_subclass__(**options)
            self._record(kind)

        Communicator.__init_subclass__ = classmethod(record_later)  # a communicator is imported when it is needed

    def clear(self) -> None:
        """Forgets the requests of the last case."""
        self._file.seek(0)
        self._file.truncate()

    def _record(self, kind: type) -> None:
        for name, method in list(vars(kind).items()):
            if name.startswith("start_"):
                setattr(kind, name, self._recorded(name.removeprefix("start_"), method))

    def _recorded(self, kind: str, start: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(start)
        def recorded(communicator: Communicator, array: Any, *arguments: Any) -> Any:
            words = (kind, *arguments, array.dtype, list(array.shape))
            self._file.write(" ".join(map(str, words)) + "\n")
            return start(communicator, array, *arguments)

        return recorded


def first_difference(files: list[Path]) -> str:
    """The first request in which the ranks differ, as a sentence."""
    ranks = [file.read_text().splitlines() if file.exists() else [] for file in files]
    for number, requests in enumerate(zip_longest(*ranks, fillvalue="nothing"), 1):
        if len(set(requests)) > 1:
            asked = "; ".join(f"rank {rank}: {request}" for rank, request in enumerate(requests))
            return f"the requests of the ranks differ first in number {number} of the case: {asked}"
    return f"all ranks made the same {len(ranks[0])} requests in the case"
