"""Buckets that start in the backward pass, against a step gone through event by event in plain Python."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdcomp.perfmodel import (
    Adviser,
    Calibration,
    Collective,
    CollectiveCost,
    Compute,
    EncodeTime,
    Exchange,
    ModelFacts,
    Network,
    Setting,
    predict,
)
from hvdcomp.perfmodel.schedule import pieces

RANKS, BANDWIDTH, ALPHA, START = 4, 1e8, 1e-4, 1e-3
NETWORK = Network(
    CollectiveCost("ring", ALPHA, BANDWIDTH, start_s=START), CollectiveCost("direct", ALPHA, BANDWIDTH, start_s=START)
)
READY = ((0.2, 0.1), (0.5, 0.3), (0.9, 0.6), (1.0, 1.0))
DENSE = 1e8
moments = st.lists(st.floats(0, 1), min_size=1, max_size=8).map(sorted)
seconds = st.floats(0, 1)


def gathered(size: float) -> float:
    return START + 2 * ALPHA + size * (RANKS - 1) / BANDWIDTH


def compute_of(gamma: float = 1.0) -> Compute:
    return Compute(0.2, 0.1, gamma=gamma, ready=READY, optimizer_s=0.05)


def step_s(exchange: Exchange, early: float | None, compute: Compute, encode: EncodeTime | None = None) -> float:
    return float(predict(NETWORK, compute, exchange, 1e6, Setting(RANKS), encode, early).total)


def one_round(size: float) -> Exchange:
    return Exchange(((Collective("allgather", size),),), overlapped=False, dense_bytes=DENSE)


def test_pieces_are_full_and_the_last_may_wait_for_all_gradients() -> None:
    assert pieces(READY, 0.5) == [(0.5, 0.3), (0.5, 1.0)]
    assert pieces(READY, 0.6) == [(0.9, 0.6)]
    assert pieces(READY, 1.1) == []
    assert pieces((), 0.1) == []


def test_two_buckets_and_a_rest_step_by_step() -> None:
    """Half of the gradients are ready after 0.06 s of the pass, 0.4 more after 0.12, the rest at its end."""
    size, encode, decode, gamma = 4e6, 0.02, 0.04, 1.5
    found = step_s(one_round(size), 0.4 * DENSE, compute_of(gamma), EncodeTime(encode, decode))
    first = 0.06 + 0.01 + gathered(2e6)  # when the network has carried it
    second = max(first, 0.12 + 0.018) + gathered(1.6e6)
    ends = 0.2 + encode
    busy = gathered(2e6) + gathered(1.6e6)
    ends += 0.5 * (busy - max(0.0, second - ends))
    third = max(second, ends) + gathered(0.4e6)
    decoded = max(third, ends + 0.9 * decode) + 0.1 * decode
    assert found == pytest.approx(0.15 + decoded, rel=1e-12)


def test_rounds_after_the_first_wait_for_the_end_of_the_pass() -> None:
    """As of PowerSGD with two allreduces: the second of all buckets comes at the end; only its first start is seen."""
    collective = Collective("allreduce", 8e5)
    exchange = Exchange(((collective,), (collective,)), overlapped=False, dense_bytes=DENSE)
    found = step_s(exchange, 0.9 * DENSE, compute_of())

    def ring(share: float) -> float:
        return 6 * ALPHA + 2 * share * 8e5 * 3 / (4 * BANDWIDTH)

    network = max(0.12 + START + ring(0.9), 0.2) + START + ring(0.1)
    network += START + ring(0.9) + ring(0.1)
    assert found == pytest.approx(0.15 + network, rel=1e-12)


@given(at=moments, encode=seconds, decode=seconds, size=st.floats(0, 1e8), gamma=st.floats(1, 2))
def test_it_is_never_less_than_computing_nor_more_than_all_in_a_row(
    at: list[float], encode: float, decode: float, size: float, gamma: float
) -> None:
    ready = tuple(zip(np.linspace(1 / len(at), 1, len(at)).tolist(), at, strict=True))
    compute = replace(compute_of(gamma), ready=ready)
    times = EncodeTime(encode, decode)
    whole = step_s(one_round(size), None, compute, times)
    buckets = len(pieces(ready, 0.3))
    found = step_s(one_round(size), 0.3 * DENSE, compute, times)
    alone = 0.35 + encode + decode
    assert alone * (1 - 1e-12) <= found
    # Each bucket has its own latency; and what the network takes from the pass is at most what it is busy.
    slowed = (gamma - 1) * (gathered(size) + buckets * gathered(0))
    assert found <= whole + buckets * gathered(0) + slowed + 1e-9


def test_nothing_is_early_on_one_rank_nor_where_nobody_knows_when_gradients_are_ready() -> None:
    exchange, times = one_round(1e6), EncodeTime(0.01, 0.02)
    alone = predict(NETWORK, compute_of(1.5), exchange, 1e6, Setting(1), times, 0.4 * DENSE)
    assert alone.total == pytest.approx(0.35)
    unknown = replace(compute_of(), ready=())
    assert step_s(exchange, 0.4 * DENSE, unknown, times) == step_s(exchange, None, unknown, times)


def test_nothing_is_early_where_a_rank_gathers_more_than_goes_in_one_part() -> None:
    """As in the engine: tests/exchange/test_overlap.py."""
    exchange, times = one_round(2**20), EncodeTime(0.01, 0.02)

    def steps_s(early_bytes: float | None, **options: float) -> Any:
        setting = Setting(np.array([1023, 1024, 1025]), **options)
        return predict(NETWORK, compute_of(), exchange, 1e6, setting, times, early_bytes).total

    assert (steps_s(None) != steps_s(0.4 * DENSE)).tolist() == [True, True, False]
    assert (steps_s(None, payload=1.0005) != steps_s(0.4 * DENSE, payload=1.0005)).tolist() == [True, False, False]
    scattered = Exchange(
        ((Collective("alltoall", 2**21),), (Collective("allgather", 2**21),)), overlapped=False, dense_bytes=DENSE
    )
    setting = Setting(1025)
    late, early = (predict(NETWORK, compute_of(), scattered, 1e6, setting, times, least) for least in (None, 4e7))
    assert early.total != late.total


def test_many_settings_at_once_are_those_one_by_one() -> None:
    exchange, times, compute = one_round(4e6), EncodeTime(0.01, 0.02, 0.001), compute_of(1.3)
    world, speed = np.array([2, 4, 8]), np.array([1e7, 1e8, 1e9])
    together = predict(NETWORK, compute, exchange, 1e6, Setting(world, speed), times, 0.4 * DENSE)
    for place in range(3):
        setting = Setting(int(world[place]), float(speed[place]))
        alone = predict(NETWORK, compute, exchange, 1e6, setting, times, 0.4 * DENSE)
        for one, other in zip(together[:4], alone[:4], strict=True):
            assert np.broadcast_to(one, 3)[place] == pytest.approx(float(other), rel=1e-12)


def test_the_adviser_counts_with_buckets_that_start_early() -> None:
    from hvdcomp.compressors import TensorInfo

    tensors = tuple(TensorInfo(f"w{place}", (1_000, 2_500)) for place in range(10))
    compute = replace(compute_of(), encode={"topk:ratio=0.01": EncodeTime(0.01)})
    calibration = Calibration("here", NETWORK, {"model": ModelFacts(tensors, compute, 1e6)})

    def step(early: float | None) -> float:
        return float(Adviser(calibration, early_bytes=early).step_s("topk:ratio=0.01", Setting(RANKS, 1e6)))

    # 1.5 MB for each 0.3 s of the slow network: half of it starts after 0.06 s of the pass, which takes 0.2.
    assert step(0) - step(50e6) == pytest.approx(0.2 - 0.06, abs=0.01)
    assert Adviser(calibration).step_s("topk:ratio=0.01", Setting(RANKS, 1e6)) < step(0)


def test_a_calibration_of_a_library_with_buckets_of_its_own_says_what_starts_early() -> None:
    from hvdcomp.compressors import TensorInfo

    tensors = tuple(TensorInfo(f"w{place}", (1_000, 500)) for place in range(10))  # 20 MB
    ready = ((0.2, 0.1), (0.4, 0.3), (1.0, 1.0))
    compute = replace(compute_of(), encode={"terngrad": EncodeTime(0.01)}, ready=ready)
    facts = ModelFacts(tensors, compute, 26e6)
    slow = Setting(RANKS, 1e6)

    def adviser(facts: ModelFacts, early: float | None = None) -> Adviser:
        return Adviser(Calibration("here", NETWORK, {"model": facts}), early_bytes=early)

    def step(*asked: Any) -> float:
        return float(adviser(*asked).step_s("terngrad", slow))

    own = replace(facts, early_bytes=1e6)
    assert step(own) == step(facts, 1e6) < step(own, 0) == step(facts)  # without, 25 MiB are the least
    assert adviser(facts, 8e6).advise(slow).bucket_bytes is not None
    assert adviser(own, 8e6).advise(slow).bucket_bytes is None  # nobody could say it to hvdcomp.Compression
