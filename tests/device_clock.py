"""A device's clock, on machines without a device: work and events wait in a queue until the host waits for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

CUDA = torch.device("cuda")


class Device:
    """In place of a CUDA device, with one stream.

    Attributes:
        now: seconds of its clock, which moves only while it works.
        waits: number of works that were queued, at each time that the host waited.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.waits: list[int] = []
        self._queue: list[Any] = []
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing=False: _Event(self, enable_timing))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: self.run())

    def add(self, work: Any) -> None:
        """Queues work: seconds, or an event."""
        self._queue.append(work)

    def run(self) -> None:
        """Does all queued work, because the host waits for it."""
        self.waits.append(sum(isinstance(work, float) for work in self._queue))
        for work in self._queue:
            if isinstance(work, float):
                self.now += work
            else:
                work.at = self.now
        self._queue.clear()


class _Event:
    """As `torch.cuda.Event`."""

    def __init__(self, device: Device, timing: bool) -> None:
        assert timing, "an event without timing has no elapsed time"
        self._device = device
        self.at: float | None = None

    def record(self, stream: Device) -> None:
        stream.add(self)

    def synchronize(self) -> None:
        if self.at is None:
            self._device.run()

    def elapsed_time(self, end: _Event) -> float:
        if self.at is None or end.at is None:
            raise RuntimeError("both events must be completed")
        return 1000 * (end.at - self.at)
