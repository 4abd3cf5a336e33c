"""The cost of collectives: each formula in plain Python as oracle, and what must hold of all of them."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdcomp.perfmodel import ALGORITHMS, CollectiveCost, Inner, Network

sizes = st.floats(0, 1e10)
ranks = st.integers(1, 1024)
latencies = st.floats(0, 1e-2)
bandwidths = st.floats(1e6, 1e11)
every = [(kind, algorithm) for kind, algorithms in ALGORITHMS.items() for algorithm in algorithms]

# Agarwal et al. 2022: table 1, equation 1 and appendix B. Latency alpha, bytes b, ranks p, bandwidth bw; p > 1.
ORACLES: dict[tuple[str, str], Callable[[float, float, int, float], float]] = {
    ("allreduce", "ring"): lambda alpha, b, p, bw: 2 * alpha * (p - 1) + 2 * b * (p - 1) / (p * bw),
    ("allreduce", "tree"): lambda alpha, b, p, bw: 2 * alpha * math.log2(p) + 2 * b * math.log2(p) / bw,
    ("allreduce", "parameter_server"): lambda alpha, b, p, bw: 2 * alpha + 2 * b * (p - 1) / bw,
    ("allgather", "direct"): lambda alpha, b, p, bw: 2 * alpha + b * (p - 1) / bw,
    ("allgather", "ring"): lambda alpha, b, p, bw: alpha * (p - 1) + b * (p - 1) / bw,
    ("alltoall", "direct"): lambda alpha, b, p, bw: 2 * alpha + b * (p - 1) / p / bw,
    ("alltoall", "pairwise"): lambda alpha, b, p, bw: alpha * (p - 1) + b / p * (p - 1) / bw,
    ("reducescatter", "ring"): lambda alpha, b, p, bw: alpha * (p - 1) + b / p * (p - 1) / bw,
}


def test_every_algorithm_has_an_oracle() -> None:
    assert set(ORACLES) == set(every)


@pytest.mark.parametrize(("kind", "algorithm"), every)
@given(alpha=latencies, b=sizes, p=ranks, bandwidth=bandwidths)
def test_the_formulas(kind: str, algorithm: str, alpha: float, b: float, p: int, bandwidth: float) -> None:
    seconds = CollectiveCost(algorithm, alpha, bandwidth).seconds(kind, b, p).total
    assert seconds == pytest.approx(ORACLES[kind, algorithm](alpha, b, p, bandwidth) if p > 1 else 0, rel=1e-12)


# One algorithm of each kind carried out on arrays: the result of each rank, and of rank 0 the bytes of each message.


def ring_allgather(xs: list[np.ndarray]) -> tuple[list[list[np.ndarray]], list[int]]:
    p = len(xs)
    held: list[dict[int, np.ndarray]] = [{rank: x} for rank, x in enumerate(xs)]
    messages = []
    for turn in range(p - 1):
        sent = [((rank - turn) % p, held[rank][(rank - turn) % p]) for rank in range(p)]
        messages.append(sent[0][1].nbytes)
        for rank in range(p):
            place, x = sent[(rank - 1) % p]
            held[rank][place] = x
    return [[one[place] for place in range(p)] for one in held], messages


def pairwise_alltoall(xs: list[np.ndarray]) -> tuple[list[list[np.ndarray]], list[int]]:
    p = len(xs)
    received = [[x[rank] for _ in range(p)] for rank, x in enumerate(xs)]
    messages = []
    for turn in range(1, p):
        messages.append(xs[0][turn].nbytes)
        for rank in range(p):
            received[(rank + turn) % p][rank] = xs[rank][(rank + turn) % p]
    return received, messages


def ring_reducescatter(xs: list[np.ndarray]) -> tuple[list[np.ndarray], list[int]]:
    p = len(xs)
    sums = [x.copy() for x in xs]
    messages = []
    for turn in range(p - 1):
        sent = [((rank - turn - 1) % p, sums[rank][(rank - turn - 1) % p].copy()) for rank in range(p)]
        messages.append(sent[0][1].nbytes)
        for rank in range(p):
            place, x = sent[(rank - 1) % p]
            sums[rank][place] += x
    return [sums[rank][rank] for rank in range(p)], messages


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_messages_and_bytes_are_those_of_the_algorithms(p: int) -> None:
    xs = list(np.random.default_rng(p).normal(size=(p, p, 5)))
    b = xs[0].nbytes
    everyone, of_allgather = ring_allgather(xs)
    theirs, of_alltoall = pairwise_alltoall(xs)
    sums, of_reducescatter = ring_reducescatter(xs)
    for rank in range(p):
        assert np.array_equal(everyone[rank], xs)
        assert np.array_equal(theirs[rank], [x[rank] for x in xs])
        assert np.allclose(sums[rank], sum(x[rank] for x in xs))
    for kind, algorithm, messages in (
        ("allgather", "ring", of_allgather),
        ("alltoall", "pairwise", of_alltoall),
        ("reducescatter", "ring", of_reducescatter),
    ):
        traffic = ALGORITHMS[kind][algorithm](b, float(p))
        assert (traffic.messages, traffic.bytes) == (len(messages), pytest.approx(sum(messages)))


@pytest.mark.parametrize(("kind", "algorithm"), every)
@given(b=sizes, more=sizes, p=ranks, bandwidth=bandwidths, faster=st.floats(1, 1e3))
def test_more_bytes_or_a_slower_link_never_take_less(
    kind: str, algorithm: str, b: float, more: float, p: int, bandwidth: float, faster: float
) -> None:
    table = ((1e3, 1e-5), (1e6, 1e-3))
    cost = CollectiveCost(algorithm, 1e-5, bandwidth, transfer=table, incast=((2, 1.0), (64, 1.5)))
    seconds = cost.seconds(kind, b, p).total
    assert cost.seconds(kind, b + more, p).total >= seconds
    assert cost.seconds(kind, b, p, speed=faster).total <= seconds
    assert cost.seconds(kind, b, p + 1).total >= seconds


@given(p=ranks, alpha=st.floats(1e-6, 1e-2))
def test_a_tree_is_no_slower_than_a_ring_where_latency_rules(p: int, alpha: float) -> None:
    tree, ring = (CollectiveCost(name, alpha, 1e9).seconds("allreduce", 0, p).total for name in ("tree", "ring"))
    assert tree <= ring


@given(p=st.integers(3, 1024), b=st.floats(1, 1e10))
def test_a_ring_is_the_fastest_where_bandwidth_rules(p: int, b: float) -> None:
    ring, tree, server = (
        CollectiveCost(name, 0, 1e9).seconds("allreduce", b, p).total for name in ("ring", "tree", "parameter_server")
    )
    assert ring < tree
    assert ring < server


@given(p=st.integers(2, 1024), b=st.floats(1, 1e9))
def test_what_allgathers_costs_more_with_every_rank_and_what_allreduces_hardly(p: int, b: float) -> None:
    def seconds(kind: str, algorithm: str, p: int) -> float:
        return CollectiveCost(algorithm, 0, 1e9).seconds(kind, b, p).total

    assert seconds("allgather", "direct", 2 * p) > 2 * seconds("allgather", "direct", p)
    assert seconds("allreduce", "ring", 2 * p) <= 1.5 * seconds("allreduce", "ring", p) * (1 + 1e-12)


def test_a_table_is_interpolated_and_goes_on_at_the_bandwidth() -> None:
    cost = CollectiveCost("ring", 0, 1e9, transfer=((1e3, 2e-5), (1e5, 3e-4)))
    seen = [cost.seconds("allgather", size, 2).transfer for size in (0, 500, 1e3, 50.5e3, 1e5, 1e5 + 1e9)]
    assert seen == pytest.approx([0, 1e-5, 2e-5, 1.6e-4, 3e-4, 3e-4 + 1])
    assert cost.seconds("allgather", 1e3, 2, speed=4).transfer == pytest.approx(5e-6)


def test_incast_multiplies_the_transfer_but_not_the_latency() -> None:
    plain = CollectiveCost("direct", 1e-3, 1e9)
    slowed = CollectiveCost("direct", 1e-3, 1e9, incast=((8, 1.0), (16, 1.5)))
    for p, factor in ((2, 1), (8, 1), (12, 1.25), (16, 1.5), (64, 1.5)):
        one, other = plain.seconds("allgather", 1e6, p), slowed.seconds("allgather", 1e6, p)
        assert other.transfer == pytest.approx(factor * one.transfer)
        assert other.latency == one.latency


def test_another_bandwidth_keeps_the_ratio_of_the_kinds_measured() -> None:
    network = Network(CollectiveCost("ring", 0, 1e9), CollectiveCost("direct", 0, 5e8))
    for kind in ("allreduce", "allgather"):
        measured, halved = network.seconds(kind, 1e6, 8).total, network.seconds(kind, 1e6, 8, 5e8).total
        assert halved == pytest.approx(2 * measured)


def test_two_stages_between_and_within_nodes() -> None:
    fast = CollectiveCost("ring", 1e-6, 1e11)
    between, within = CollectiveCost("ring", 1e-4, 1e9), Inner(fast, fast, ranks_per_node=4)
    network = Network(between, CollectiveCost("direct", 1e-4, 1e9), within)
    b = 1e7
    allreduce = 2 * 1e-4 * 3 + 2 * b * 3 / 4 / 1e9 + 2 * 1e-6 * 3 + 2 * b * 3 / 4 / 1e11
    assert network.seconds("allreduce", b, 16).total == pytest.approx(allreduce)
    allgather = 2 * 1e-4 + 4 * b * 3 / 1e9 + 1e-6 * 3 + 4 * b * 3 / 1e11
    assert network.seconds("allgather", b, 16).total == pytest.approx(allgather)
    # Within one node the slow link is not used, and its bandwidth does not matter.
    assert network.seconds("allreduce", b, 4, 1.0).total == pytest.approx(2 * 1e-6 * 3 + 2 * b * 3 / 4 / 1e11)
    assert network.seconds("allreduce", b, 1).total == network.seconds("allgather", b, 1).total == 0


def test_what_is_not_known_costs_what_a_like_collective_does() -> None:
    table = ((1e3, 2e-5), (1e6, 3e-3))
    allreduce = CollectiveCost("tree", 1e-5, 1e9, reduction_s_per_byte={"float16": 1e-9})
    for algorithm, messages in (("ring", 7), ("direct", 2)):
        allgather = CollectiveCost(algorithm, 1e-4, 5e8, table, incast=((2, 1.0), (8, 1.5)), start_s=1e-3)
        network = Network(allreduce, allgather)
        # A rank receives 7/8 of what it hands over, instead of 7 times as much.
        found = network.seconds("alltoall", 8e3, 8)
        assert found.latency == pytest.approx(messages * 1e-4)
        assert found.start == 1e-3
        assert found.transfer == pytest.approx(network.seconds("allgather", 1e3, 8).transfer)
        found = network.seconds("reducescatter", 8e6, 8, dtype="float16").total
        assert found == pytest.approx(7e-5 + 7e6 / 1e9 + 7e6 * 2e-9)  # it adds up all that it moves
        assert [network.stand_in(kind) for kind in ALGORITHMS] == [None, None, "allgather", "allreduce"]
    known = CollectiveCost("pairwise", 1e-3, 1e8)
    network = Network(allreduce, allgather, alltoall=known)
    assert network.stand_in("alltoall") is None
    assert network.seconds("alltoall", 8e6, 8).total == pytest.approx(7e-3 + 7e6 / 1e8)
    assert network.seconds("alltoall", 8e6, 8, 5e8).transfer == pytest.approx(7e6 / 5e7)


def test_two_stages_of_alltoall_and_reduce_scatter() -> None:
    fast, slow = CollectiveCost("ring", 1e-6, 1e11), CollectiveCost("ring", 1e-4, 1e9)
    network = Network(slow, slow, Inner(fast, fast, ranks_per_node=4))
    b = 1e7
    # What the four ranks of a node send other nodes shares the node's link.
    alltoall = 1e-4 * 3 + 4 * b * 3 / 4 / 1e9 + 1e-6 * 3 + b * 3 / 4 / 1e11
    assert network.seconds("alltoall", b, 16).total == pytest.approx(alltoall)
    reducescatter = 1e-4 * 3 + b * 3 / 4 / 1e9 + 1e-6 * 3 + b * 3 / 4 / 1e11
    assert network.seconds("reducescatter", b, 16).total == pytest.approx(reducescatter)
    assert network.seconds("alltoall", b, 4, 1.0).total == pytest.approx(1e-6 * 3 + b * 3 / 4 / 1e11)


def test_arrays_broadcast_and_equal_single_numbers() -> None:
    network = Network(CollectiveCost("tree", 1e-5, 1e9), CollectiveCost("direct", 1e-5, 1e9))
    b, p, bandwidth = np.array([1.0, 1e6])[:, None, None], np.array([1, 2, 64])[:, None], np.array([1e8, 1e9])
    seconds = network.seconds("allreduce", b, p, bandwidth).total
    assert seconds.shape == (2, 3, 2)
    for i, j, k in np.ndindex(seconds.shape):
        single = network.seconds("allreduce", b[i, 0, 0], p[j, 0], bandwidth[k]).total
        assert seconds[i, j, k] == pytest.approx(single, rel=1e-15)
