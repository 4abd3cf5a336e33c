"""Sends messages from rank 0 to all ranks, such as the decisions of a policy. Rank 0 does not wait until the other
ranks have received a message."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from hvdcomp.arrays import arrays_for
from hvdcomp.arrays.types import Array
from hvdcomp.communicators import Communicator
from hvdcomp.errors import ConfigurationError
from hvdcomp.policies.base import Policy
from hvdcomp.policies.decisions import Decision
from hvdcomp.policies.request import Statistics

_HEADER_BYTES = 8
_FAILED = "the policy failed"  # the key of a message that reports an error of the policy instead of a state


class Broadcaster(Protocol):
    """Sends bytes from rank 0 to all ranks. Every rank must call `start` and `wait` in the same order."""

    def start(self, message: np.ndarray) -> Any:
        """Starts a broadcast of a message, which is a vector of uint8. The vectors of all ranks must have the same
        length, but only the content of rank 0's vector is sent."""

    def wait(self, started: Any) -> np.ndarray:
        """Waits for a broadcast, and returns rank 0's message."""


class CommunicatorBroadcaster:
    """Broadcasts over the communicator that also exchanges the gradients.

    Args:
        communicator: the communicator of the ranks that get the messages.
        like: an array with the framework and the device of the communicator's arrays.
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
    """Sends messages of any length. The other ranks need not know the length in advance.

    Args:
        make_broadcaster: function that creates the broadcaster. All ranks call it before the first message.
        capacity: the number of bytes of the first broadcast. A longer message needs a second broadcast, and all ranks
            wait for it.
    """

    def __init__(self, make_broadcaster: Callable[[], Broadcaster], capacity: int) -> None:
        self._make_broadcaster = make_broadcaster
        self._broadcaster: Broadcaster | None = None
        self._capacity = capacity
        self._message = b""
        self._started: Any = None
        self._failed: Exception | None = None

    def start(self, message: bytes) -> None:
        """Starts sending rank 0's message. The messages of other ranks are ignored.

        If sending fails, `finish` raises the error. `finish` is not called after the last step of a training run. By
        then, other ranks may have ended, so that sending may fail.
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
        """Waits for rank 0's message, and returns it."""
        if self._failed is not None:
            error, self._failed = self._failed, None
            raise error
        assert self._broadcaster is not None
        head = self._broadcaster.wait(self._started).tobytes()
        length = int.from_bytes(head[:_HEADER_BYTES], "little")
        received = head[_HEADER_BYTES : _HEADER_BYTES + length]
        missing = length - len(received)
        if not missing:
            return received
        remainder = self._broadcaster.start(_of_length(self._message[self._capacity :], missing))
        return received + self._broadcaster.wait(remainder).tobytes()


def _of_length(message: bytes, length: int) -> np.ndarray:
    """The first `length` bytes of a message, padded with zeros if the message is shorter, as a new array."""
    return np.frombuffer(bytearray(message[:length].ljust(length, b"\0")), np.uint8)


class DecisionChannel:
    """Sends rank 0's decisions to all ranks. A message is the policy's state in JSON, so that every rank can continue
    from this state.

    Args:
        policy: the policy, the same on all ranks.
        tensors: the names of the tensors whose level the policy decides.
        decides: whether this is rank 0.
        make_broadcaster: function that creates the broadcaster, as in `MessageChannel`.

    Attributes:
        state: the newest state of the policy that all ranks have received.
        request: the statistics that the policy requests in `state`.
        latest: the newest state on this rank. On rank 0, after a decision, `latest` is newer than `state` until all
            ranks have received the decision.
        latest_request: the statistics that the policy requests in `latest`.
        in_flight: whether a state was sent but not yet received.
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
        self._error: Exception | None = None  # the error of the policy, on rank 0
        self.enter(policy.initial_state(tensors))
        room = len(self._message()) + 32 * len(tensors) + policy.state_growth
        self._messages = MessageChannel(make_broadcaster, room)

    def enter(self, state: Any) -> None:
        """Sets the state. Call this on all ranks with the same state."""
        # Every step reads the request, so it is computed once for each state.
        self.state, self.request = state, self.policy.request(state)
        self.latest, self.latest_request = state, self.request

    def set_latest(self, state: Any) -> None:
        """Sets the latest state on rank 0, before the other ranks have received it."""
        self.latest, self.latest_request = state, self.policy.request(state)

    def decide(self, statistics: Statistics) -> Decision:
        """Makes a decision. Call this only on rank 0."""
        state, decision = self.policy.decide(self.latest, statistics)
        self.set_latest(state)
        return decision

    def refuse(self, error: Exception) -> None:
        """Makes `receive` raise an error of the policy on all ranks. Call this only on rank 0, and instead of
        `decide`."""
        self._error = error

    def send(self) -> None:
        """Starts sending rank 0's state. Call this on all ranks."""
        message = b""
        if self.decides:
            error = self._error
            message = self._message() if error is None else json.dumps({_FAILED: repr(error)}).encode()
        self._messages.start(message)
        self.in_flight = True

    def receive(self) -> Decision:
        """Waits for rank 0's state, sets it, and returns the decision of this state.

        Raises:
            ConfigurationError: on every rank, if the policy has raised an error on rank 0. On rank 0, the error of the
                policy is the cause (`__cause__`).
        """
        self.in_flight = False
        state = json.loads(self._messages.finish())
        if isinstance(state, dict) and _FAILED in state:
            raise ConfigurationError(f"the policy {self.policy} failed on rank 0: {state[_FAILED]}") from self._error
        self.enter(self.policy.from_json(state))
        return self.policy.decision(self.state)

    def _message(self) -> bytes:
        return json.dumps(self.policy.to_json(self.latest)).encode()
