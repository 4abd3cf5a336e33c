"""What every communicator must answer: each rank makes the arrays of all ranks, so that it knows."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from hvdcomp.communicators import Communicator
from hvdcomp.errors import ConfigurationError

RANKS_PER_NODE = "HVDCOMP_RANKS_PER_NODE"
LENGTHS = (1, 7, 1024)


@contextmanager
def nodes_of(ranks: int) -> Iterator[None]:
    """Makes nodes of so many ranks, whatever Horovod says."""
    os.environ[RANKS_PER_NODE] = str(ranks)
    yield
    del os.environ[RANKS_PER_NODE]


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


def check_groups(communicator: Communicator, array: Callable[[np.ndarray], Any], rank: int, size: int) -> None:
    """The same of the parts of a communicator, with nodes of one rank, of two, and of all, where that fits."""
    for inside in {1, 2, size}:
        if size % inside:
            continue
        fresh = type(communicator)()  # which asks anew who shares a node
        node = rank // inside
        members = {
            "node": list(range(node * inside, (node + 1) * inside)),
            "across": list(range(rank % inside, size, inside)),
        }
        for group, ranks in members.items():
            with nodes_of(inside):
                part = fresh.part(group)
            if len(ranks) == 1:
                assert part.world_size == 1
            else:
                check(part, array, rank, ranks)


def check_refusals(
    make: Callable[[], Communicator],
    rank: int,
    size: int,
    raised: Callable[[type[Exception], Callable[[], object]], str],
) -> None:
    """Nodes that do not fit are refused by all ranks.

    Args:
        make: a communicator of all ranks, which asks anew who shares a node.
        raised: the message of the error that every rank raises.
    """
    wrong = {"0": "set it to a whole number of at least 1", "many": "set it to a whole number of at least 1"}
    if size > 2:
        wrong[str(size - 1)] = f"the same number of ranks on every node, but the nodes have {size - 1}, 1"
    for given, said in wrong.items():
        os.environ[RANKS_PER_NODE] = given
        assert said in raised(ConfigurationError, lambda: make().part("node"))
    os.environ[RANKS_PER_NODE] = str(1 + rank % 2)
    told = raised(ConfigurationError, lambda: make().part("across"))
    assert "the environment variable HVDCOMP_RANKS_PER_NODE differs" in told
    del os.environ[RANKS_PER_NODE]
