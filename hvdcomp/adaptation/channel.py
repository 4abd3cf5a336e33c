"""Messages from rank 0 to all ranks, sent without waiting and received later; decisions of a policy above all."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from hvdcomp.arrays import arrays_for
from hvdcomp.arrays.types import Array
from hvdcomp.communicators import Communicator
from hvdcomp.policies.base import Policy
from hvdcomp.policies.decisions import Decision
from hvdcomp.policies.request import Statistics

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
        self._failed: Exception | None = None

    def start(self, message: bytes) -> None:
        """Starts sending rank 0's message; what others give is not looked at.

        What goes wrong is raised by `finish`. Nobody calls it after the last step of a training, when the others may
        have ended and to send them anything is an error.
        """
        self._message = message
        head = len(message).to_bytes(_HEADER_BYTES, "little") + message
        try:
            if self._broadcaster is None:
                self._broadcaster = self._make_broadcaster()
            self._started = self._broadcaster.start(_of_length(head, _HEADER_BYTES + self._capacity))
        except Exception as error:
            self._failed = error

    def finish(self) -> bytes:
        """Rank 0's message; waits for it."""
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise failed
        assert self._broadcaster is not None
        head = self._broadcaster.wait(self._started).tobytes()
        length = int.from_bytes(head[:_HEADER_BYTES], "little")
        received = head[_HEADER_BYTES : _HEADER_BYTES + length]
        missing = length - len(received)
        if not missing:
            return received
        rest = self._broadcaster.start(_of_length(self._message[self._capacity :], missing))
        return received + self._broadcaster.wait(rest).tobytes()


def _of_length(message: bytes, length: int) -> np.ndarray:
    """The beginning of a message, filled up with zeros, as an array of its own."""
    return np.frombuffer(bytearray(message[:length].ljust(length, b"\0")), np.uint8)


class DecisionChannel:
    """Carries what rank 0 decides to all ranks, as the policy's state in JSON, so that every rank can go on from it.

    Args:
        policy: the same on all ranks.
        tensors: names of those whose level is decided.
        decides: whether this is rank 0.
        make_broadcaster: as in `MessageChannel`.

    Attributes:
        state: the policy's, as all ranks know it.
        request: what the policy asks for in it.
        latest: on rank 0 ahead of `state` from a decision until all ranks have received it.
        latest_request: what the policy asks for in that.
        in_flight: whether a state was sent and not yet received.
    """

    def __init__(
        self,
        policy: Policy[Any],
        tensors: Sequence[str],
        decides: bool,
        make_broadcaster: Callable[[], Broadcaster],
    ) -> None:
        self.policy = policy
        self.decides = decides
        self.in_flight = False
        self.enter(policy.initial_state(tensors))
        room = len(self._message()) + 32 * len(tensors) + policy.state_growth
        self._messages = MessageChannel(make_broadcaster, room)

    def enter(self, state: Any) -> None:
        """Goes over to a state that all ranks know."""
        # Every step asks for the request, so it is worked out once per state.
        self.state, self.request = state, self.policy.request(state)
        self.latest, self.latest_request = state, self.request

    def be_ahead(self, state: Any) -> None:
        """Goes over, on rank 0, to a state that the other ranks have yet to receive."""
        self.latest, self.latest_request = state, self.policy.request(state)

    def decide(self, statistics: Statistics) -> Decision:
        """Makes a decision, on rank 0 alone."""
        state, decision = self.policy.decide(self.latest, statistics)
        self.be_ahead(state)
        return decision

    def send(self) -> None:
        """Starts to send rank 0's state, on all ranks."""
        self._messages.start(self._message() if self.decides else b"")
        self.in_flight = True

    def receive(self) -> Decision:
        """Waits for rank 0's state, goes over to it, and returns its decision."""
        self.in_flight = False
        self.enter(self.policy.from_json(json.loads(self._messages.finish())))
        return self.policy.decision(self.state)

    def _message(self) -> bytes:
        return json.dumps(self.policy.to_json(self.latest)).encode()
