"""Simulated ranks: their clocks, and what they exchange. That they end with the weights of real ranks:
`test_train_simulated.py`."""

from __future__ import annotations

import numpy as np
import pytest

from hvdcomp.communicators import SimulatedCommunicator, SimulatedGroup
from hvdcomp.communicators.simulated import add_in_a_ring


class Computing:
    """A timer by which a rank computes as long as a test says."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def _run(ranks: int, work, cost=lambda kind, size, ranks: 10.0):
    timer = Computing()
    return SimulatedGroup(ranks, [cost], timer).run(lambda communicator: work(communicator, timer))


def test_an_exchange_begins_with_the_last_rank_and_takes_what_the_link_takes() -> None:
    asked: list[tuple[str, int, int]] = []

    def cost(kind: str, size: int, ranks: int) -> float:
        asked.append((kind, size, ranks))
        return 10.0

    def work(communicator: SimulatedCommunicator, timer: Computing) -> float:
        communicator.now()
        timer.seconds += 1 + communicator.rank  # computes for 1, 2 and 3 seconds
        started = communicator.start_allgather(np.zeros(5, np.uint8), "x")
        communicator.wait(started)
        return communicator.now()

    assert _run(3, work, cost) == [13.0, 13.0, 13.0]
    assert asked == [("allgather", 5, 3)]


def test_what_is_computed_beside_an_exchange_takes_no_time_of_its_own() -> None:
    def work(communicator: SimulatedCommunicator, timer: Computing) -> float:
        communicator.now()
        first = communicator.start_allreduce(np.ones(2), "sum", "first")
        second = communicator.start_allreduce(np.ones(2), "sum", "second")
        timer.seconds += 15.0
        communicator.wait(first)  # done after 10 seconds
        waited = communicator.now()
        communicator.wait(second)  # the link carries one after the other
        return waited, communicator.now()

    assert _run(2, work) == [(15.0, 20.0)] * 2


def test_an_exchange_may_count_as_started_earlier() -> None:
    def work(communicator: SimulatedCommunicator, timer: Computing) -> float:
        communicator.now()
        timer.seconds += 4.0
        ready = communicator.moment()
        timer.seconds += 3.0
        communicator.starts_at = ready
        started = communicator.start_allreduce(np.ones(2), "mean", "x")
        communicator.starts_at = None
        communicator.wait(started)
        return communicator.now()

    assert _run(2, work) == [14.0, 14.0]


def test_each_link_has_a_clock_and_all_of_them_the_same_computing() -> None:
    costs = [None, lambda kind, size, ranks: 10.0, lambda kind, size, ranks: 1.0]

    def work(communicator: SimulatedCommunicator, timer: Computing) -> list[list[float]]:
        communicator.now()
        timer.seconds += 4.0
        ready = communicator.moment()
        timer.seconds += 3.0
        moments = [ready]
        for _ in range(2):
            communicator.starts_at = ready
            started = communicator.start_allreduce(np.ones(2), "mean", "x")
            communicator.starts_at = None
            communicator.wait(started)
            moments.append(communicator.moment())
        assert communicator.now() == moments[-1][0], "ranks go by the first"
        return [moment.tolist() for moment in moments]

    timer = Computing()
    found = SimulatedGroup(2, costs, timer).run(lambda communicator: work(communicator, timer))
    # The timer is that of both ranks: while the second computes, the first one's clock stands.
    assert found == [[[4.0, 4.0, 4.0], [7.0, 14.0, 7.0], [7.0, 24.0, 7.0]]] * 2


def test_what_stays_within_a_node_takes_no_time() -> None:
    def work(communicator: SimulatedCommunicator, timer: Computing) -> list[float]:
        times = []
        for group in ("node", "across", "all"):
            part = communicator.part(group)
            part.wait(part.start_allreduce(np.ones(2), "sum", group))
            times.append(communicator.now())
        return times

    timer = Computing()
    group = SimulatedGroup(4, [lambda kind, size, ranks: float(ranks)], timer, ranks_per_node=2)
    assert group.run(lambda communicator: work(communicator, timer)) == [[0.0, 2.0, 6.0]] * 4


def test_values_that_ranks_share_are_copies_and_take_no_time() -> None:
    def work(communicator: SimulatedCommunicator, timer: Computing) -> tuple[list[list[int]], float]:
        values = communicator.group.share(communicator.rank, [communicator.rank], "x")
        values[0].append(7)  # nobody else sees it
        again = communicator.group.share(communicator.rank, values, "y")
        return again[1 - communicator.rank], communicator.now()

    assert _run(2, work) == [([[0, 7], [1]], 0.0)] * 2


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("length", [0, 1, 3, 7, 8, 64, 1001])
def test_a_ring_adds_every_rank_once_beginning_with_the_one_before_its_block(ranks: int, length: int) -> None:
    arrays = [np.random.default_rng([rank, length]).standard_normal(length, np.float32) for rank in range(ranks)]
    found = add_in_a_ring(arrays)
    block = 2 * -(-length // (2 * ranks))  # of less than a mebibyte
    for place in range(length):
        first = place // block - 1
        total = arrays[first][place]
        for distance in range(1, ranks):
            total = np.float32(total + arrays[(first - distance) % ranks][place])
        expected = arrays[0][place] + arrays[1][place] if ranks == 2 else total
        assert found[place] == expected, (place, found[place], expected)
