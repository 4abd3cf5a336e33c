"""Messages from rank 0 to all ranks, sent without waiting and received later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from hvdcomp.arrays import arrays_for
from hvdcomp.arrays.types import Array
from hvdcomp.communicators import Communicator

_HEADER_BYTES = 8


class Broadcaster(Protocol):
    """Carries bytes from rank 0 to all ranks. Every rank calls `start` and `wait` in the same order."""

    def start(self, message: np.ndarray) -> Any:
        """Starts a broadcast of uint8 (length,), equally long on all ranks; only rank 0's content counts."""

    def wait(self, started: Any) -> np.ndarray:
        """Rank 0's message."""


class CommunicatorBroadcaster:
    """Broadcasts over the communicator that carries the gradients.

    Args:
        communicator: of the ranks.
        like: an array of the framework and place that it works on.
    """

    def __init__(self, communicator: Communicator, like: Array) -> None:
        self._communicator = communicator
        self._like = like

    def start(self, message: np.ndarray) -> Any:
        xp = arrays_for(self._like)
        array = xp.from_numpy(message, like=self._like)
        return self._communicator.start_broadcast(array, f"hvdcomp.decision.{message.size}")

    def wait(self, started: Any) -> np.ndarray:
        return np.asarray(self._communicator.wait(started))


class MessageChannel:
    """Sends messages whose length only rank 0 knows.

    Args:
        make_broadcaster: called before the first message; all ranks are then at the same point.
        capacity: bytes that are sent at once. What does not fit follows in a second broadcast, for which all wait.
    """

    def __init__(self, make_broadcaster: Callable[[], Broadcaster], capacity: int) -> None:
        self._make_broadcaster = make_broadcaster
        self._broadcaster: Broadcaster | None = None
        self._capacity = capacity
        self._message = b""
        self._started: Any = None

    def start(self, message: bytes) -> None:
        """Starts sending rank 0's message; what others give is not looked at."""
        self._message = message
        if self._broadcaster is None:
            self._broadcaster = self._make_broadcaster()
        head = np.zeros(_HEADER_BYTES + self._capacity, np.uint8)
        head[:_HEADER_BYTES] = np.frombuffer(len(message).to_bytes(_HEADER_BYTES, "little"), np.uint8)
        part = np.frombuffer(message[: self._capacity], np.uint8)
        head[_HEADER_BYTES : _HEADER_BYTES + part.size] = part
        self._started = self._broadcaster.start(head)

    def finish(self) -> bytes:
        """Rank 0's message; waits for it."""
        assert self._broadcaster is not None
        head = self._broadcaster.wait(self._started).tobytes()
        self._started = None
        length = int.from_bytes(head[:_HEADER_BYTES], "little")
        received = head[_HEADER_BYTES : _HEADER_BYTES + length]
        missing = length - len(received)
        if not missing:
            return received
        rest = np.zeros(missing, np.uint8)
        mine = np.frombuffer(self._message[self._capacity :], np.uint8)
        if mine.size == missing:
            rest[:] = mine
        return received + self._broadcaster.wait(self._broadcaster.start(rest)).tobytes()
