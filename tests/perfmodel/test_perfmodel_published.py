"""What Agarwal et al. 2022 found on V100s, from the numbers they published and nothing else.

The preset's ResNet-50 holds published numbers only: backward pass and encode times of tables 2 and 3, 10 Gb/s, gamma
1.04 to 1.1. Their claims are for batch size 64 a rank (section 3.2) and 64 GPUs unless said otherwise.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hvdcomp.perfmodel import ALGORITHMS, Adviser, Calibration, EncodeTime, Setting, load
from hvdcomp.perfmodel.sweep import GBPS

PRESET = load("v100-p3.8xlarge-2021")
PUBLISHED = [spec for spec, time in PRESET.models["resnet50"].compute.encode.items() if not time.estimated]
GPUS = Setting(64)


def at(gbps: float, world_size: int = 64, **others: Any) -> Setting:
    return Setting(world_size, gbps * GBPS, **others)


def with_latency(allreduce: float, allgather: float) -> Calibration:
    network = PRESET.network
    return replace(
        PRESET,
        network=replace(
            network,
            allreduce=replace(network.allreduce, latency_s=allreduce),
            allgather=replace(network.allgather, latency_s=allgather),
        ),
    )


@pytest.fixture(scope="module")
def resnet50() -> Adviser:
    return Adviser(PRESET, "resnet50", PUBLISHED)


def test_the_preset_holds_the_published_numbers() -> None:
    """Table 3, and those of table 2 that are not in it; ms."""
    compute = PRESET.models["resnet50"].compute
    assert (compute.backward_s, compute.gamma, compute.batch_size) == (0.122, 1.07, 64)
    published = {
        "powersgd:rank=4": 45,
        "powersgd:rank=8": 64,
        "powersgd:rank=16": 130,
        "mstopk:ratio=0.01": 103,
        "mstopk:ratio=0.001": 104,
        "signsgd": 16.34,
        "dgc:ratio=0.01": 221,
        "topk:ratio=0.01": 273,
        "randomk:ratio=0.01": 163,
        "qsgd:bits=2": 39,
        "terngrad": 94,
        "atomo:rank=4": 1586,
    }
    assert {spec: 1e3 * compute.encode[spec].encode_s for spec in PUBLISHED} == pytest.approx(published)
    assert not PRESET.models["resnet50"].estimated
    assert all(time.source for time in compute.encode.values())
    assert PRESET.network.allreduce.bytes_per_s == 10 * GBPS
    for kind in ALGORITHMS:  # what is not published is as what is, but the four GPUs of a node share its link
        assert PRESET.network.stand_in(kind) is None
        there = replace(PRESET.network, alltoall=None, reducescatter=None).seconds(kind, 1e6, 64)
        found = PRESET.network.seconds(kind, 1e6, 64)
        assert (found.start, found.latency) == (there.start, there.latency)
        assert found.transfer == pytest.approx(there.transfer * (4 if kind == "alltoall" else 1))


def test_powersgd_wins_below_a_bandwidth_between_8_and_10_gbps_and_not_above(resnet50: Adviser) -> None:
    """Appendix D: at about 9 Gb/s, syncSGD overtakes PowerSGD rank 4 (figure 19, ResNet-50)."""
    ((low, high),) = resnet50.wins("powersgd:rank=4", GPUS)
    assert low is None
    assert high is not None
    assert 8 < high / GBPS < 10
    for gbps in np.linspace(1, 30, 59):
        faster = resnet50.step_s("powersgd:rank=4", at(gbps)) < resnet50.step_s("none", at(gbps))
        assert faster == (gbps < high / GBPS)


@pytest.mark.parametrize(("gamma", "lowest", "highest"), [(1.04, 9, 10), (1.07, 9, 10), (1.1, 10, 10.7)])
@pytest.mark.parametrize("small_collective_ms", [0, 0.5, 1])
def test_the_crossing_for_the_whole_published_ranges(
    gamma: float, lowest: float, highest: float, small_collective_ms: float
) -> None:
    """At the upper end of gamma it lies a little above 10 Gb/s."""
    calibration = with_latency(small_collective_ms / 1e3 / 126, small_collective_ms / 1e3 / 2)
    facts = calibration.models["resnet50"]
    changed = replace(facts, compute=replace(facts.compute, gamma=gamma))
    adviser = Adviser(replace(calibration, models={"resnet50": changed}), specs=["powersgd:rank=4"])
    ((low, high),) = adviser.wins("powersgd:rank=4", GPUS)
    assert low is None
    assert high is not None
    assert lowest < high / GBPS < highest


def test_alpha_as_time_of_one_message_contradicts_the_papers_own_measurements() -> None:
    """Which is why the preset reads 0.5 to 1 ms as the time of a small collective.

    Section 1: syncSGD takes 262 ms for ResNet-101 on 96 GPUs. With 0.5 ms a message, waiting alone takes longer, and
    even for ResNet-50 PowerSGD rank 4 would win at any bandwidth below 38 Gb/s, or at all of them with 1 ms.
    """
    messages = 2 * 95 * 7  # 7 buckets of at most 25 MiB
    assert messages * 0.5e-3 > 2.5 * 0.262
    ((_, high),) = Adviser(with_latency(0.5e-3, 0.5e-3), "resnet50").wins("powersgd:rank=4", GPUS)
    assert high is not None
    assert high / GBPS > 30
    assert Adviser(with_latency(1e-3, 1e-3), "resnet50").wins("powersgd:rank=4", GPUS) == ((None, None),)


@pytest.mark.parametrize("world_size", [16, 32, 64, 96])
def test_nothing_beats_sync_sgd_at_10_gbps(resnet50: Adviser, world_size: int) -> None:
    """Figures 6 to 8, ResNet-50 at batch 64: PowerSGD, MSTop-K and SignSGD are all slower."""
    step = {spec: float(resnet50.step_s(spec, at(10, world_size))) for spec in resnet50.compressors}
    assert min(step, key=lambda spec: step[spec]) == "none"
    assert sorted(step.values())[1] > step["none"]


def test_the_order_of_the_methods(resnet50: Adviser) -> None:
    """Figures 6 to 8 and section 1: what allreduces is ahead, lower ranks are faster, SignSGD falls behind."""

    def step(spec: str, world_size: int = 96) -> float:
        return float(resnet50.step_s(spec, at(10, world_size)))

    assert step("none") < step("powersgd:rank=4") < step("powersgd:rank=8") < step("powersgd:rank=16")
    assert step("mstopk:ratio=0.001") < step("mstopk:ratio=0.01")
    assert step("powersgd:rank=16") < step("signsgd")
    # SignSGD has the cheapest encoder of all, and grows with the number of ranks nevertheless.
    assert step("signsgd", 96) - step("signsgd", 48) > 4 * (step("none", 96) - step("none", 48))
    gathered = next(one.bytes for one in resnet50.exchange("signsgd", 96).rounds[0] if one.kind == "allgather")
    assert step("signsgd", 96) - step("signsgd", 48) == pytest.approx(48 * gathered / 1.25e9, rel=0.02)


def test_all_methods_but_dense_are_held_up_by_encoding_or_the_network(resnet50: Adviser) -> None:
    advice = resnet50.advise(at(10))
    assert advice.winner == "none"
    assert advice.methods["atomo:rank=4"].limited_by == "encode"
    assert advice.methods["signsgd"].limited_by == "network"
    assert [spec for spec, method in advice.methods.items() if method.exchange.overlapped] == ["none", "fp16"]


def efficiency(adviser: Adviser, factor: float, setting: Setting) -> float:
    """Share of linear scaling with an ideal compressor: section 4.1 with every bucket smaller by the factor."""
    facts = adviser.facts
    gamma, backward = facts.compute.gamma, facts.compute.backward_s * float(facts.compute.share(setting.batch_size))
    total, bucket = adviser.exchange("none", 64).bytes, facts.bucket_bytes

    def comm(b: float) -> float:
        return float(adviser.calibration.network.seconds("allreduce", b / factor, setting.world_size).total)

    full = int(total // bucket)
    return float(gamma * backward / (max(gamma * backward, full * comm(bucket)) + comm(total - full * bucket)))


def test_about_four_times_suffices_at_10_gbps() -> None:
    """Figures 12 and 18, batch 64. 95% of linear scaling takes 6.1x for ResNet-50 and 4x gives 93%; for ResNet-101,
    of figure 12, whose backward pass is estimated, 3.3x is enough."""
    resnet50, resnet101 = Adviser(PRESET, "resnet50"), Adviser(PRESET, "resnet101")
    assert efficiency(resnet50, 1, GPUS) < 0.8
    assert efficiency(resnet50, 4, GPUS) > 0.92
    assert 4 < float(resnet50.least_factor(GPUS)) < 6.5
    assert float(resnet50.least_factor(GPUS, 0.92)) < 4
    assert efficiency(resnet101, 4, GPUS) > 0.95
    assert 3 < float(resnet101.least_factor(GPUS)) < 4
    assert all(
        efficiency(adviser, float(adviser.least_factor(GPUS)), GPUS) == pytest.approx(0.95)
        for adviser in (resnet50, resnet101)
    )


def test_small_batches_need_four_times_only_if_the_last_bucket_is_small() -> None:
    """Of figures 12 and 18 at batch 16. In section 4.1 the last bucket cannot hide; with 25 MiB it rules it out."""
    adviser = Adviser(PRESET, "resnet50")
    small = Setting(64, batch_size=16)
    assert efficiency(adviser, 4, small) < 0.8
    # What can hide does with a factor of about 5.
    backward = adviser.facts.compute.gamma * 0.122 / 4
    everything = 2 * adviser.exchange("none", 64).bytes * 63 / 64 / 1.25e9
    assert 4 < everything / backward < 5.5


def test_small_batches_and_faster_computers_favour_compression(resnet50: Adviser) -> None:
    """Section 3.3 and figure 20: PowerSGD rank 4 wins where the backward pass is too short to hide behind."""

    def speedup(**changes: float) -> float:
        setting = at(10, 64, **changes)
        return float(resnet50.step_s("none", setting) / resnet50.step_s("powersgd:rank=4", setting))

    assert speedup(batch_size=16) > speedup(batch_size=32) > 1 > speedup(batch_size=64)
    assert speedup(compute_speed=1) < 1 < speedup(compute_speed=2) < speedup(compute_speed=3.5)
    assert speedup(compute_speed=3.5) > 1.75  # "can provide 1.75x speedup" at about 3.5 times


@pytest.mark.parametrize("growth", [1, 2, 3])
def test_faster_encoding_pays_even_with_more_bytes(resnet50: Adviser, growth: float) -> None:
    """Figure 21: encoding k times faster for growth k times the bytes, k = 2 to 4."""
    steps = [
        float(resnet50.step_s("powersgd:rank=4", at(10, encode_speed=k, payload=growth * k))) for k in (1, 2, 3, 4)
    ]
    assert steps[1] < steps[0]
    assert (steps[3] < steps[2] < steps[1]) == (growth == 1)  # else bytes use up what is gained
    assert max(steps[1:]) < float(resnet50.step_s("powersgd:rank=4", at(10)))


def test_what_the_estimated_models_do_not_reproduce() -> None:
    """ResNet-101 is published to cross at 8.2 Gb/s and BERT at about 15 (figures 3 and 19): here 10.3 and 11.8.

    Backward pass and encode times of both are not published; see docs/performance-model-formulas.md for the estimates.
    """
    assert PRESET.models["bert-base"].compute.batch_size == 12  # the dissertation, captions of figures 4.4 to 4.6
    for model, crossing in (("resnet101", 10.3), ("bert-base", 11.8)):
        adviser = Adviser(PRESET, model)
        assert adviser.facts.estimated == ("backward_s",)
        assert all(time.estimated and time.source for time in adviser.facts.compute.encode.values())
        ((low, high),) = adviser.wins("powersgd:rank=4", GPUS)
        assert low is None
        assert high is not None
        assert high / GBPS == pytest.approx(crossing, abs=0.1)


def resnet101_with(backward_s: float, encode_s: float) -> Adviser:
    """ResNet-101 with other times than the preset's estimates."""
    facts = PRESET.models["resnet101"]
    encode = {"powersgd:rank=4": EncodeTime(encode_s)}
    changed = replace(facts, compute=replace(facts.compute, gamma=1.04, backward_s=backward_s, encode=encode))
    return Adviser(replace(PRESET, models={"resnet101": changed}))


@pytest.mark.parametrize(("batch_size", "published", "here"), [(16, 42.5, 116), (32, 25.7, 59), (64, -6.3, 4)])
def test_resnet101_by_batch_size_beside_what_is_published(batch_size: int, published: float, here: float) -> None:
    """Figure 9 and section 3.3: how much faster PowerSGD rank 4 is than syncSGD on 96 GPUs, in percent.

    Equation 1 gives more than twice as much. Read as saved time, 54, 37 and 4 %, it is not what is published either.
    """
    adviser, setting = Adviser(PRESET, "resnet101"), at(10, 96, batch_size=batch_size)
    dense, compressed = (float(adviser.step_s(spec, setting)) for spec in ("none", "powersgd:rank=4"))
    assert 100 * (dense / compressed - 1) == pytest.approx(here, abs=1)
    assert min(abs(100 * (dense / compressed - 1) - published), abs(100 * (1 - compressed / dense) - published)) > 9


def test_no_times_give_all_that_is_published_of_resnet101() -> None:
    """262 ms for syncSGD and 6.3 % more for PowerSGD rank 4 (96 GPUs), and a crossing at 8.2 Gb/s (64 GPUs).

    Whatever the bandwidth is that gives the 262 ms, and however the backward pass and encoding share what is left.
    """
    whole, compressed = 0.262, 0.262 * 1.063
    crossings = []
    for gbps in (11.2, 12, 15, 25, 100):
        setting, nothing = at(gbps, 96), resnet101_with(1e-9, 0)
        assert float(nothing.step_s("none", setting)) <= whole  # below 11.1 Gb/s sending alone takes longer
        left = compressed - float(nothing.step_s("powersgd:rank=4", setting))
        for backward in np.linspace(0.05, whole / 1.04, 9):
            ((low, high),) = resnet101_with(backward, max(0, left - backward)).wins("powersgd:rank=4", GPUS)
            assert low is None
            assert high is not None
            crossings.append(high / GBPS)
    assert min(crossings) > 10
