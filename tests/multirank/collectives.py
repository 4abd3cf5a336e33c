"""What every communicator must answer: each rank makes the arrays of all ranks, so that it knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvdcomp.communicators import Communicator

LENGTHS = (1, 7, 1024)


def check(communicator: Communicator, array: Callable[[np.ndarray], Any], rank: int, members: Sequence[int]) -> None:
    """Starts every collective with several lengths, all at once, and compares the answers with NumPy's.

    Args:
        array: that of the framework for one of NumPy.
        rank: of this process among all of Horovod's.
        members: the ranks that take part, in order.
    """
    size, place = len(members), members.index(rank)
    assert (communicator.rank, communicator.world_size) == (place, size)

    def given(of: int, kind: str, length: int) -> np.ndarray:
        rng = np.random.default_rng([of, length])
        if kind in ("allgather", "alltoall"):
            return rng.integers(0, 256, length * (size if kind == "alltoall" else 1)).astype(np.uint8)
        whole = rng.integers(-1000, 1000, length * size)  # whose sums are exact in float32
        return (size * whole).astype(np.float32)

    started, expected = [], []
    for length in LENGTHS:
        of = {kind: [given(one, kind, length) for one in members] for kind in ("allgather", "alltoall", "sums")}
        total = sum(of["sums"])
        mine = slice(place * length, (place + 1) * length)
        started += [
            communicator.start_allgather(array(of["allgather"][place]), f"gather{length}"),
            communicator.start_alltoall(array(of["alltoall"][place]), f"all{length}"),
        ]
        expected += [np.stack(of["allgather"]), np.stack([one[mine] for one in of["alltoall"]])]
        for op, whole in (("sum", total), ("mean", total / size)):
            started += [
                communicator.start_allreduce(array(of["sums"][place].copy()), op, f"reduce.{op}{length}"),
                communicator.start_reducescatter(array(of["sums"][place].copy()), op, f"scatter.{op}{length}"),
            ]
            expected += [whole, whole[mine]]
    for handle, answer in zip(started, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(communicator.wait(handle)), answer)
