"""Measures the time that a CUDA device needs for some work, without the time that the host needs to launch it."""

from __future__ import annotations

import functools
from typing import Any

import torch

_HEAD_START = 0.02
"""Seconds for which the device is kept busy while the host launches the work."""
_CYCLES = 10_000_000


@functools.cache
def _cycles_a_ms() -> float:
    """The number of clock cycles per millisecond of the idle device."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_CYCLES)  # the first launch takes longer
    start.record()
    torch.cuda._sleep(_CYCLES)
    end.record()
    end.synchronize()
    return _CYCLES / start.elapsed_time(end)


def head_start() -> None:
    """Waits for the device, and then keeps it busy for a while, so that the host can launch work in advance."""
    cycles = int(_cycles_a_ms() * 1000 * _HEAD_START)
    torch.cuda.synchronize()
    torch.cuda._sleep(cycles)


class Stopwatch:
    """Measures the time of the work that is launched on the current device within a block.

    Attributes:
        ms: measured milliseconds; available after the block.

    Example:
        >>> with Stopwatch() as stopwatch:  # doctest: +SKIP
        ...     x.copy_(y)
        >>> stopwatch.ms  # doctest: +SKIP
        0.052
    """

    ms: float

    def __enter__(self) -> Stopwatch:
        head_start()
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._start.record()
        return self

    def __exit__(self, *error: Any) -> None:
        self._end.record()
        self._end.synchronize()
        self.ms = self._start.elapsed_time(self._end)
