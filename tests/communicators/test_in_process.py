"""Ranks as threads: real results in rank order, arrays of their own, and no rank left waiting for ever."""

from __future__ import annotations

import numpy as np
import pytest

from hvdcomp.communicators.in_process import InProcessCommunicator, run_ranks
from hvdcomp.errors import ConfigurationError
from tests.harness import BACKENDS, as_numpy, make

every_backend = pytest.mark.parametrize("backend", BACKENDS)


def mine(communicator: InProcessCommunicator) -> np.ndarray:
    return np.arange(3, dtype=np.float32) + communicator.rank


@every_backend
@pytest.mark.parametrize("size", [1, 2, 4])
def test_collectives_see_all_ranks_in_order(backend: str, size: int) -> None:
    def work(communicator: InProcessCommunicator) -> list[np.ndarray]:
        array = make(backend, mine(communicator))
        started = [
            communicator.start_allreduce(array, "sum", "a"),
            communicator.start_allreduce(array, "max", "b"),
            communicator.start_allreduce(array, "mean", "c"),
            communicator.start_allgather(array, "d"),
            communicator.start_broadcast(array, "e"),
        ]
        return [as_numpy(communicator.wait(handle)) for handle in started]

    everyone = np.stack([np.arange(3, dtype=np.float32) + rank for rank in range(size)])
    for results in run_ranks(size, work):
        expected = [everyone.sum(0), everyone.max(0), everyone.mean(0), everyone, everyone[0]]
        for result, value in zip(results, expected, strict=True):
            np.testing.assert_allclose(result, value, rtol=1e-6)


def test_a_result_belongs_to_its_rank() -> None:
    """What one rank does to its contribution and its result afterwards, no other rank sees."""

    def work(communicator: InProcessCommunicator) -> list[float]:
        seen = []
        array = np.ones(2, np.float32)
        for _ in range(3):
            result = communicator.wait(communicator.start_allreduce(array, "sum", "a"))
            seen.append(float(result[0]))
            result *= 100
            array += 1
        return seen

    assert run_ranks(3, work) == [[3.0, 6.0, 9.0]] * 3


def test_the_first_error_ends_all_ranks() -> None:
    went_on = []

    def work(communicator: InProcessCommunicator) -> None:
        if communicator.rank == 1:
            raise ConfigurationError("rank 1 has had enough")
        communicator.wait(communicator.start_allreduce(mine(communicator), "sum", "a"))
        went_on.append(communicator.rank)

    with pytest.raises(ConfigurationError, match="rank 1 has had enough"):
        run_ranks(3, work)
    assert not went_on


@pytest.mark.parametrize("rounds", [(1, 2, 2), (2, 1, 2), (2, 2, 1), (0, 1, 0)])
def test_a_rank_that_ends_too_early_is_an_error_and_no_hang(rounds: tuple[int, ...]) -> None:
    def work(communicator: InProcessCommunicator) -> None:
        for _ in range(rounds[communicator.rank]):
            communicator.wait(communicator.start_allgather(mine(communicator), "counts"))

    with pytest.raises(RuntimeError, match=r"waits for rank \d in this collective: \('allgather', 'counts', "):
        run_ranks(3, work)
