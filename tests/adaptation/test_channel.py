"""Messages from rank 0 whose length only rank 0 knows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hvdcomp.adaptation.channel import CommunicatorBroadcaster, MessageChannel
from hvdcomp.communicators.in_process import InProcessCommunicator, run_ranks
from tests.harness import BACKENDS, make

every_backend = pytest.mark.parametrize("backend", BACKENDS)


class Counting(CommunicatorBroadcaster):
    """Notes the lengths of what is broadcast, and how many broadcasts are under way."""

    def __init__(self, communicator: InProcessCommunicator, like: Any) -> None:
        super().__init__(communicator, like)
        self.lengths: list[int] = []

    def start(self, message: np.ndarray) -> Any:
        assert message.dtype == np.uint8
        self.lengths.append(message.size)
        return super().start(message)


def exchange(
    size: int, backend: str, capacity: int, messages: list[bytes], others: list[bytes] | None = None
) -> list[tuple[list[bytes], list[int]]]:
    """What each rank receives, and the lengths of its broadcasts; ranks other than 0 give `others`, b"" by default."""

    def work(communicator: InProcessCommunicator) -> tuple[list[bytes], list[int]]:
        made: list[Counting] = []

        def make_broadcaster() -> Counting:
            made.append(Counting(communicator, make(backend, np.zeros(0))))
            return made[-1]

        channel = MessageChannel(make_broadcaster, capacity)
        assert not made  # only with the first message
        mine = messages if communicator.rank == 0 else others or [b""] * len(messages)
        received = []
        for message in mine:
            channel.start(message)
            received.append(channel.finish())
        assert len(made) == bool(messages)
        return received, [length for broadcaster in made for length in broadcaster.lengths]

    return list(run_ranks(size, work))


@every_backend
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_messages_of_every_length_arrive_everywhere(backend: str, size: int) -> None:
    """In a row, longer after shorter and the other way round, so that nothing of an earlier one shows."""
    lengths = [0, 1, 15, 16, 17, 1600, 0, 16, 3, 33, 32]
    rng = np.random.default_rng(1)
    messages = [rng.integers(0, 256, length, np.uint8).tobytes() for length in lengths]
    for received, broadcast in exchange(size, backend, 16, messages):
        assert received == messages
        # The length itself takes eight bytes; what has no room follows at once.
        assert broadcast == [part for length in lengths for part in [24] + [length - 16] * (length > 16)]


@given(
    st.integers(1, 4),
    st.integers(1, 40),
    st.lists(st.tuples(st.binary(max_size=100), st.binary(max_size=100)), max_size=5),
)
@example(2, 4, [(b"abcdefg", b"ABCDEFG")])
def test_what_the_other_ranks_give_is_not_looked_at(size: int, capacity: int, pairs: list[tuple[bytes, bytes]]) -> None:
    messages, others = [mine for mine, _ in pairs], [theirs for _, theirs in pairs]
    for received, _ in exchange(size, "numpy", capacity, messages, others):
        assert received == messages


@every_backend
def test_a_message_may_be_changed_after_it_was_started_and_work_goes_on_before_it_is_awaited(backend: str) -> None:
    def work(communicator: InProcessCommunicator) -> tuple[bytes, float]:
        like = make(backend, np.zeros(0))
        channel = MessageChannel(lambda: CommunicatorBroadcaster(communicator, like), 8)
        text = bytearray(b"0123456789") if communicator.rank == 0 else bytearray()
        channel.start(bytes(text))
        text[:] = b"spoilt"
        total = communicator.wait(communicator.start_allreduce(make(backend, [1.0]), "sum", "other"))
        return channel.finish(), float(total[0])

    assert run_ranks(3, work) == [(b"0123456789", 3.0)] * 3


def test_what_goes_wrong_at_the_start_is_raised_where_the_message_is_awaited() -> None:
    """So it is not raised after a training's last step, when the other ranks may have ended; and it is raised once."""

    class Ended(CommunicatorBroadcaster):
        def __init__(self, communicator: InProcessCommunicator, like: Any) -> None:
            super().__init__(communicator, like)
            self.ended = True

        def start(self, message: np.ndarray) -> Any:
            if self.ended:
                raise RuntimeError("has been shut down")
            return super().start(message)

    def work(communicator: InProcessCommunicator) -> bytes:
        broadcaster = Ended(communicator, np.zeros(0))
        channel = MessageChannel(lambda: broadcaster, 8)
        channel.start(b"lost")
        with pytest.raises(RuntimeError, match="has been shut down"):
            channel.finish()
        broadcaster.ended = False
        channel.start(b"arrives")
        return channel.finish()

    assert run_ranks(1, work) == [b"arrives"]
