"""Groups of ranks: those of a node, and those that have the same place in each node."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvdcomp.arrays import numpy_arrays
from hvdcomp.communicators.in_process import run_ranks
from hvdcomp.communicators.nodes import Nodes
from hvdcomp.compressors.protocol import AllGather, AllReduce, AllToAll, Group, ReduceScatter
from hvdcomp.errors import ConfigurationError
from hvdcomp.exchange.fusion import Round


def test_who_is_in_which_group() -> None:
    nodes = Nodes(["b", "a", "b", "a", "b", "a"])
    assert (nodes.count, nodes.ranks_per_node) == (2, 3)
    assert nodes.members(3, "all") == tuple(range(6))
    assert nodes.members(3, "node") == (1, 3, 5)
    assert nodes.members(3, "across") == (2, 3)
    assert nodes.groups() == [(0, 2, 4), (1, 3, 5), (0, 1), (2, 3), (4, 5)]


def test_groups_of_one_rank_and_of_all_need_not_be_made() -> None:
    assert Nodes([0, 0, 0]).groups() == []
    assert Nodes([0, 1, 2]).groups() == []


def test_nodes_that_are_not_alike_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="the same number of ranks on every node, but the nodes have 2, 1"):
        Nodes([0, 0, 1])


@pytest.mark.parametrize("ranks_per_node", [1, 2, 3, 6])
def test_requests_are_served_among_their_group(ranks_per_node: int) -> None:
    """Requests of all groups in one round, fused with those of the same group alone."""
    size = 6
    nodes = Nodes([rank // ranks_per_node for rank in range(size)])
    groups: tuple[Group, ...] = ("all", "node", "across")

    def given(rank: int, count: int) -> np.ndarray:
        return (np.arange(count * 4, dtype=np.float32) + 1).reshape(count, 4) * 2.0**rank

    def work(communicator: Any) -> list[Any]:
        rank = communicator.rank
        requests: list[Any] = []
        for group in groups:
            count = len(nodes.members(rank, group))
            assert (communicator.part(group).world_size, communicator.part(group).rank) == (
                count,
                nodes.members(rank, group).index(rank),
            )
            x = given(rank, count)
            requests += [
                AllReduce(x[0].copy(), "sum", group=group),
                AllGather((x[0],), group=group),
                AllToAll((x,), group=group),
                ReduceScatter(x, "sum", group=group),
            ]
        return Round(numpy_arrays, communicator, requests, "test", requests[0].array).wait()

    for rank, answers in enumerate(run_ranks(size, work, ranks_per_node)):
        for group in groups:
            members = nodes.members(rank, group)
            place = members.index(rank)
            xs = [given(one, len(members)) for one in members]
            reduced, gathered, sent, scattered = answers[:4]
            del answers[:4]
            np.testing.assert_array_equal(reduced, sum(xs)[0])
            np.testing.assert_array_equal([part for (part,) in gathered], [x[0] for x in xs])
            np.testing.assert_array_equal([part for (part,) in sent], [x[place] for x in xs])
            np.testing.assert_array_equal(scattered, sum(xs)[place])
