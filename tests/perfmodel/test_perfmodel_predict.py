"""Schedules and predictions, against the formulas of Agarwal et al. 2022 in plain Python."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdcomp.perfmodel import (
    Adviser,
    Collective,
    CollectiveCost,
    Compute,
    EncodeTime,
    Exchange,
    Network,
    Setting,
    cut,
    least_compression_factor,
    limited_by,
    load,
    predict,
)
from hvdcomp.perfmodel.schedule import Parts

ALPHA, BANDWIDTH = 1e-5, 1.25e9
NETWORK = Network(CollectiveCost("ring", ALPHA, BANDWIDTH), CollectiveCost("direct", ALPHA, BANDWIDTH))
MIB = 2**20
ranks = st.integers(2, 512)
bytes_ = st.floats(1, 1e9)
seconds = st.floats(1e-3, 1)


def dense(size: float) -> Exchange:
    return Exchange(((Collective("allreduce", size),),), overlapped=True, dense_bytes=size)


def compressed(*collectives: Collective) -> Exchange:
    return Exchange(tuple((one,) for one in collectives), overlapped=False, dense_bytes=1e9)


def ring(b: float, p: int, bandwidth: float = BANDWIDTH) -> float:
    return 2 * ALPHA * (p - 1) + 2 * b * (p - 1) / (p * bandwidth)


def sync_sgd(total: float, bucket: float, backward: float, gamma: float, p: int, bandwidth: float) -> float:
    """Section 4.1: k - 1 buckets of b bytes during the backward pass, the last one after it."""
    k = max(1, math.ceil(total / bucket))
    b = min(total, bucket)
    last = total - (k - 1) * b
    return max(gamma * backward, (k - 1) * ring(b, p, bandwidth)) + ring(last, p, bandwidth)


@given(total=bytes_, bucket=st.floats(1e5, 1e9), backward=seconds, forward=seconds, gamma=st.floats(1, 2), p=ranks)
def test_sync_sgd(total: float, bucket: float, backward: float, forward: float, gamma: float, p: int) -> None:
    compute = Compute(backward, forward, gamma)
    for bandwidth in (BANDWIDTH / 10, BANDWIDTH):
        parts = predict(NETWORK, compute, dense(total), bucket, Setting(p, bandwidth))
        expected = forward + sync_sgd(total, bucket, backward, gamma, p, bandwidth)
        assert parts.total == pytest.approx(expected, rel=1e-12)
        assert min(parts[:4]) >= 0


@given(total=st.floats(1, 1e10), bucket=st.floats(1e4, 1e10))
def test_buckets_are_full_but_for_the_last_and_nothing_is_lost(total: float, bucket: float) -> None:
    buckets = cut(total, bucket)
    assert buckets.number >= 1
    assert 0 < buckets.last <= buckets.size * (1 + 1e-9)
    assert (buckets.number - 1) * buckets.size + buckets.last == pytest.approx(total)
    assert buckets.size <= bucket


@given(p_bytes=bytes_, q_bytes=bytes_, backward=seconds, encode=seconds, p=ranks)
def test_power_sgd(p_bytes: float, q_bytes: float, backward: float, encode: float, p: int) -> None:
    """Appendix B: T_comp + T_encode-decode + T_comm(P) + T_comm(Q)."""
    exchange = compressed(Collective("allreduce", p_bytes), Collective("allreduce", q_bytes))
    parts = predict(NETWORK, Compute(backward, gamma=1.1), exchange, MIB, Setting(p), EncodeTime(encode))
    assert parts.total == pytest.approx(backward + encode + ring(p_bytes, p) + ring(q_bytes, p), rel=1e-12)


@given(size=bytes_, backward=seconds, encode=seconds, decode=seconds, each=st.floats(0, 1e-3), p=ranks)
def test_what_is_gathered(size: float, backward: float, encode: float, decode: float, each: float, p: int) -> None:
    """Appendix B, with the time that decoding each rank's part adds."""
    exchange = compressed(Collective("allgather", size))
    times = EncodeTime(encode, decode, each)
    parts = predict(NETWORK, Compute(backward), exchange, MIB, Setting(p), times)
    expected = backward + encode + decode + each * p + 2 * ALPHA + size * (p - 1) / BANDWIDTH
    assert parts.total == pytest.approx(expected, rel=1e-12)


@given(size=bytes_, more=bytes_, p=ranks, faster=st.floats(1, 1e3), backward=seconds)
def test_time_never_falls_with_more_bytes_less_bandwidth_or_a_slower_computer(
    size: float, more: float, p: int, faster: float, backward: float
) -> None:
    compute, encode = Compute(backward, gamma=1.07), EncodeTime(0.01)

    def step(exchange: Exchange, **changes: float) -> float:
        setting = Setting(p, **{"bytes_per_s": 1e9, **changes})
        return predict(NETWORK, compute, exchange, 25 * MIB, setting, encode).total

    one = compressed(Collective("allgather", size))
    assert step(compressed(Collective("allgather", size + more))) >= step(one)
    assert step(one, payload=faster) >= step(one)
    for exchange in (one, dense(size)):
        assert step(exchange, bytes_per_s=1e9 * faster) <= step(exchange) * (1 + 1e-12)
        assert step(exchange, compute_speed=faster) <= step(exchange) * (1 + 1e-12)
        assert step(exchange, encode_speed=faster) <= step(exchange) * (1 + 1e-12)


def test_one_rank_costs_nothing() -> None:
    compute = Compute(0.1, 0.05, gamma=1.1)
    for exchange in (dense(1e8), compressed(Collective("allgather", 1e8), Collective("allreduce", 1e8))):
        assert predict(NETWORK, compute, exchange, MIB, Setting(1), EncodeTime(1, 1, 1)).total == pytest.approx(0.15)


def test_batch_and_speed_scale_the_passes() -> None:
    compute = Compute(0.1, 0.05, batch_size=32)
    exchange = compressed(Collective("allreduce", 0.0))
    setting = Setting(1, batch_size=64, compute_speed=4, encode_speed=2)
    assert predict(NETWORK, compute, exchange, MIB, setting).total == pytest.approx(0.15 * 2 / 4)
    parts = predict(NETWORK, compute, exchange, MIB, replace(setting, world_size=2), EncodeTime(0.08))
    assert parts.encode == pytest.approx(0.08 / 8)
    some = compressed(Collective("allgather", 1e6))
    assert predict(NETWORK, compute, some, MIB, Setting(2, payload=3)).transfer == pytest.approx(3 * 1e6 / BANDWIDTH)
    with pytest.raises(ValueError, match="the batch size for which"):
        predict(NETWORK, Compute(0.1), exchange, MIB, setting)


@pytest.mark.parametrize(
    "wrong",
    [{"world_size": 0}, {"bytes_per_s": 0}, {"bytes_per_s": math.nan}, {"compute_speed": -1}, {"batch_size": 0}],
)
def test_settings_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Setting(**{"world_size": 2, **wrong})


def test_limits() -> None:
    false = np.False_
    assert limited_by(Parts(3, 1, 1, 1, false)) == "compute"
    assert limited_by(Parts(3, 4, 1, 1, false)) == "encode"
    assert limited_by(Parts(3, 1, 1, 4, false)) == "latency"
    assert limited_by(Parts(3, 0, 2, 1, np.True_)) == "network"  # the backward pass is over and waits
    slow = predict(NETWORK, Compute(0.1), dense(1e9), MIB, Setting(8))
    assert limited_by(slow) == "network"
    hardly = predict(NETWORK, Compute(0.1), dense(8e7), MIB, Setting(8))  # waits, but not for longer than it computes
    assert hardly.transfer < hardly.compute
    assert limited_by(hardly) == "network"
    fast = predict(NETWORK, Compute(0.1), dense(1e7), MIB, Setting(8))
    assert limited_by(fast) == "compute"


@given(p=ranks, bandwidth=st.floats(1e7, 1e11), backward=seconds, efficiency=st.floats(0.5, 0.99))
def test_the_least_factor_is_enough_and_no_less_is(
    p: int, bandwidth: float, backward: float, efficiency: float
) -> None:
    total, bucket, gamma = 1e8, 25 * MIB, 1.07
    network = Network(CollectiveCost("ring", 0, BANDWIDTH), NETWORK.allgather)
    setting = Setting(p, bandwidth)
    compute = Compute(backward, 0, gamma)
    factor = float(least_compression_factor(network, compute, dense(total), bucket, setting, efficiency))

    def reached(factor: float) -> float:
        def comm(b: float) -> float:
            return 2 * b / factor * (p - 1) / (p * bandwidth)

        k = math.ceil(total / bucket)
        return gamma * backward / (max(gamma * backward, (k - 1) * comm(bucket)) + comm(total - (k - 1) * bucket))

    assert factor >= 1
    assert reached(factor) >= efficiency * (1 - 1e-9)
    assert factor == 1 or reached(factor * (1 - 1e-6)) < efficiency


def test_latency_can_be_too_much_for_any_factor() -> None:
    network = Network(CollectiveCost("ring", 1e-3, BANDWIDTH), NETWORK.allgather)
    factor = least_compression_factor(network, Compute(0.01), dense(1e8), 25 * MIB, Setting(np.array([2, 64])))
    assert np.isnan(factor).tolist() == [True, True]
    assert least_compression_factor(network, Compute(0.01), dense(1e8), 25 * MIB, Setting(1)) == 1


def test_ten_thousand_settings_of_every_method_take_less_than_a_second() -> None:
    """CPU time, the least of three: others may slow the machine down. Bandwidth x world size; all methods of the
    preset that are published, and the least factor."""
    known = load("v100-p3.8xlarge-2021").models["resnet50"].compute.encode
    published = [spec for spec, time in known.items() if not time.estimated]
    bandwidths = np.geomspace(1e7, 1e10, 100)
    setting = Setting(np.arange(1, 101), bytes_per_s=bandwidths[:, None])
    taken = []
    for _ in range(3):
        # Anew: it may remember what it has worked out.
        adviser = Adviser(load("v100-p3.8xlarge-2021"), "resnet50", published)
        start = time.process_time()
        predicted = {spec: adviser.step_s(spec, setting) for spec in adviser.compressors}
        factors = adviser.least_factor(setting)
        taken.append(time.process_time() - start)
    assert min(taken) < 1
    assert factors.shape == (100, 100)
    assert len(predicted) >= 14
    for spec, found in predicted.items():
        assert found.shape == (100, 100)
        for row, column in ((0, 0), (3, 63), (99, 99)):
            single = Setting(column + 1, bandwidths[row])
            assert found[row, column] == pytest.approx(adviser.step_s(spec, single), rel=1e-12)
