"""Measures when the work of a step begins and ends, on the device of the gradients."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from hvdcomp.arrays.types import AllFunctions, Array

Span: TypeAlias = float | tuple[Any, Any]
"""A time span. On the host, it is a number of seconds. On a device, it is a pair of the marks at its beginning and its
end."""


class Spans(NamedTuple):
    """The time spans of the work on a bucket in a step. Work before the last collective of the bucket is encoding, and
    work after this collective is decoding."""

    encoding: list[Span]
    decoding: list[Span]


class Clock:
    """Measures times in the steps of an engine.

    A *turn* is the work of a bucket between two collectives. A *mark* is a point in time. On the host, a mark is a
    number, and takes almost no time to make. On a device, a mark is an event, and the host needs some microseconds for
    each event. To save events:

    - If work directly follows other work, a single mark ends the first and begins the second. This is true for turns,
      and on the host also for `begin`, `open` and `finish` of buckets.
    - If all buckets of a step are on a device, only turns are marked.
    - Later steps use the events again.

    Attributes:
        marks_only_turns: whether `enter` and `leave` do nothing. True when a step begins.
    """

    def __init__(self) -> None:
        self.marks_only_turns = True
        self._xp: AllFunctions
        self._like: Array
        self._last: Any = None
        self._marks: list[Any] = []  # the marks of the present step, if gradients are on a device
        self._spare: list[Any] = []
        self._followed: Callable[[], float] | None = None
        self._now: Callable[[], float] | None = None  # the host's clock; None on a device

    def follow(self, now: Callable[[], float]) -> None:
        """Uses the clock of a simulated rank, in seconds, instead of the device's clock."""
        self._followed = self._now = now

    def begin(self, xp: AllFunctions, like: Array) -> None:
        """Begins a step. All marks of the step are on the device of `like`."""
        self._xp, self._like = xp, like
        self._marks = []
        self._now = self._followed
        self.marks_only_turns = True

    def start(self) -> None:
        """Starts a lap now."""
        if self._now is not None:
            self._last = self._now()
            return
        spare = self._spare.pop() if self._spare else None
        self._last = self._xp.mark(self._like, spare)
        if isinstance(self._last, float):
            self._now = time.perf_counter
        else:
            self._marks.append(self._last)

    def lap(self, spans: list[Span]) -> None:
        """Adds the time since the latest mark to the spans, and starts the next lap."""
        before = self._last
        if self._now is not None:
            self._last = now = self._now()
            spans.append(now - before)
        else:
            self.start()
            spans.append((before, self._last))

    def enter(self) -> None:
        """Starts a lap of work that is no turn, unless `marks_only_turns`. Call this if unmeasured work came before."""
        if not self.marks_only_turns:
            self.start()

    def leave(self, spans: list[Span]) -> None:
        """Ends a lap of work that is no turn, and adds its time to the spans, unless `marks_only_turns`."""
        if not self.marks_only_turns:
            self.lap(spans)

    def end(self) -> Callable[[Sequence[Sequence[Span]]], list[float] | None]:
        """Ends a step.

        Returns:
            A function that gets lists of spans of the step, and returns the total seconds of each list. As long as the
            device has not reached the end of a span, the function returns None. Afterwards, later steps may use the
            marks of this step again.
        """
        if self._now is not None:
            return _sums
        seconds_between, marks, spare = self._xp.seconds_between, self._marks, self._spare

        def read(lists: Sequence[Sequence[Any]]) -> list[float] | None:
            seconds = []
            for spans in lists:
                total = 0.0
                for start, end in spans:
                    spent = seconds_between(start, end)
                    if spent is None:
                        return None
                    total += spent
                seconds.append(total)
            spare.extend(marks)
            return seconds

        return read


def _sums(lists: Sequence[Sequence[Any]]) -> list[float]:
    return list(map(sum, lists))
