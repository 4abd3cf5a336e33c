"""Measures when the work of a step begins and ends, on the device of the gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

from hvdcomp.arrays.types import Array

Span = tuple[Any, Any]  # two marks


class Spans(NamedTuple):
    """When the work on a bucket ran in a step: encoding before its last collective, and decoding after it."""

    encoding: list[Span]
    decoding: list[Span]


class Clock:
    """Marks times in the steps of an engine.

    A *turn* is the work of a bucket between two collectives. On the host, a mark takes almost no time. On a device, a
    mark is an event, and the host needs some microseconds for each event. To save events:

    - Two turns that follow each other share the mark between them.
    - If all buckets of a step are on a device, only turns are marked.
    - Later steps use the events again.

    Attributes:
        marks_only_turns: whether `around` marks nothing. True when a step begins.
    """

    def __init__(self) -> None:
        self.marks_only_turns = True
        self._xp: ModuleType
        self._like: Array
        self._last: Any = None
        self._marks: list[Any] = []  # of the step
        self._spare: list[Any] = []
        self._now: Callable[[], float] | None = None

    def follow(self, now: Callable[[], float]) -> None:
        """Uses the clock of a simulated rank, in seconds, instead of the device's clock."""
        self._now = now

    def begin(self, xp: ModuleType, like: Array) -> None:
        """Begins a step. All marks of the step are on the device of `like`."""
        self._xp, self._like = xp, like
        self._marks = []
        self.marks_only_turns = True

    def start(self) -> None:
        """Starts a lap now."""
        spare = self._spare.pop() if self._spare else None
        self._last = self._xp.mark(self._like, spare) if self._now is None else self._now()
        self._marks.append(self._last)

    def lap(self, spans: list[Span]) -> None:
        """Adds the time since the latest mark to the spans, and starts the next lap."""
        before = self._last
        self.start()
        spans.append((before, self._last))

    @contextmanager
    def around(self, spans: list[Span]) -> Iterator[None]:
        """Adds the time of the work in this context to the spans, unless `marks_only_turns`. The work is not a turn."""
        if self.marks_only_turns:
            yield
            return
        self.start()
        yield
        self.lap(spans)

    def end(self) -> Callable[[], None]:
        """Ends a step; returns a function that recycles its marks. Call it when the marks are no longer needed."""
        marks = self._marks
        return lambda: self._spare.extend(marks)
