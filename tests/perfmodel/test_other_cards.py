"""Encode times and models on GPUs that were not measured: the rule against both measured cards, and its parts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.times import other_card
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.compressors.protocol import TensorInfo
from hvdcomp.perfmodel import Adviser, Compute, EncodeTime, Network, Setting, load, model_of, predict, presets
from hvdcomp.perfmodel.by_size import encode_times
from hvdcomp.perfmodel.cards import CARDS
from hvdcomp.perfmodel.count import with_own_kernels
from hvdcomp.perfmodel.exchanges import sharded_exchange_of
from hvdcomp.perfmodel.kernel_times import BENCH, KERNELS, LAUNCH_S, REACHED, ROOFLINE, arithmetic_ps, encode_time
from hvdcomp.perfmodel.network import CollectiveCost, network_of_nodes
from hvdcomp.perfmodel.shapes import tensors_of
from hvdcomp.perfmodel.workloads import WORKLOADS, models_on, ready_times

ENCODE = Path(__file__).parents[2] / "docs" / "encode"
OF_2021 = "v100-p3.8xlarge-2021"

# The rule -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("known", "asked"), [("h200", "h100"), ("h100", "h200")])
def test_one_card_is_predicted_from_the_other(known: str, asked: str) -> None:
    found = list(other_card.predictions(known, asked))
    assert {one.method for one in found} == {spec for spec, kernels in KERNELS.items() if kernels.source == BENCH}
    assert other_card.median_error(found) < 0.06
    assert max(abs(one.error) for one in found) < 0.11


def test_the_clock_is_the_longer_of_host_and_device() -> None:
    for card in ("h100", "h200"):
        assert other_card.median_error(list(other_card.clock(card))) < 0.16


def test_the_table_holds_what_was_measured() -> None:
    for spec, rows in other_card.measurements("h200").items():
        times = {other_card.elements_of(model): row["device_ms"] / 1e3 for model, row in rows.items()}
        assert len(times) == 2
        assert arithmetic_ps(times, KERNELS[spec], CARDS["h200"]) == pytest.approx(
            KERNELS[spec].arithmetic_ps, abs=0.051
        ), spec
        assert {row["kernel_launches"] for row in rows.values()} == {KERNELS[spec].launches}


def test_methods_that_only_the_roofline_timed() -> None:
    """Of BERT-base's matrices, kernel by kernel."""
    rows = json.loads((ENCODE / "gpu.json").read_text())["parts"]["roofline"]["rows"]
    (elements,) = {round(row["bytes_a_second"] * row["ms"] / 8e3) for row in rows if row["kernel"] == "dense_decode"}
    rooflines = [spec for spec, kernels in KERNELS.items() if kernels.source == ROOFLINE]
    assert rooflines
    for spec in rooflines:
        times = [row["ms"] / 1e3 for row in rows if row["method"] == spec]
        kernels = replace(KERNELS[spec], launches=len(times))
        found = arithmetic_ps({elements: sum(times)}, kernels, CARDS["h200"])
        assert found == pytest.approx(KERNELS[spec].arithmetic_ps, abs=0.051), spec
    for spec, kernel in (("int8", "plane_decode"), ("signsgd", "votes_decode"), ("topk:ratio=0.01", "sparse_decode")):
        ms = next(row["ms"] for row in rows if (row["method"], row["kernel"]) == (spec, kernel))
        moved = 4 + (0.08 if kernel == "sparse_decode" else KERNELS[spec].payload)
        beyond = 1e12 * ((ms / 1e3 - LAUNCH_S) / elements - moved / (REACHED * CARDS["h200"].bytes_per_s))
        assert beyond == pytest.approx(KERNELS[spec].decode_ps, abs=0.06), spec


def test_what_was_measured_nowhere_is_estimated_by_ratios_of_a_cpu() -> None:
    for name, beside in {
        "presets.json": {"int4": "int8"},
        "presets-sparsifiers.json": {"topkc:ratio=0.01": "mstopk:ratio=0.01"},
        "presets-rotated.json": dict.fromkeys(("eden", "eden:bits=1"), "qsgd:bits=2"),
        "presets-scales.json": {"eden:scaled=True": "eden", "eden:bits=1,scaled=True": "eden:bits=1"},
    }.items():
        cpu = {one["method"]: one["cpu_ms"] for one in json.loads((ENCODE / name).read_text())["measurements"]}
        for spec, other in beside.items():
            assert KERNELS[spec].estimated
            assert name in KERNELS[spec].source
            expected = KERNELS[other].arithmetic_ps * cpu[spec] / cpu[other]
            assert KERNELS[spec].arithmetic_ps == pytest.approx(expected, abs=0.051), spec


def test_slower_memory_and_slower_integers_make_a_card_slower() -> None:
    """By hand: 100 million elements of int8, whose kernels move 14 bytes of each."""
    elements = 1e8
    fast, slow = (float(encode_time("int8", CARDS[card], elements).seconds(1)) for card in ("h200", "l4"))
    assert fast == pytest.approx(12 * 6e-6 + elements * (14 / (0.85 * 4.8e12) + 2.8e-12), abs=1.8e-3)
    integers = 132 * 1.98e9 / (58 * 2.04e9)
    assert slow == pytest.approx(12 * 6e-6 + elements * (14 / (0.85 * 3e11) + 2.8e-12 * integers))


def test_a_further_payload_takes_its_bytes_and_its_decoding() -> None:
    time = encode_time("int8", CARDS["h200"], 1e9)
    further = float(time.seconds(3) - time.seconds(2))
    assert further == pytest.approx(1e9 * (1 / (0.85 * 4.8e12) + 1.2e-12))
    assert time.encode_s > 0
    assert encode_time("powersgd:rank=4", CARDS["h200"], 1e9).decode_per_rank_s == 0


def test_the_host_takes_no_less_for_a_part_of_the_model() -> None:
    time = EncodeTime(0.008, host_s=0.002)
    assert float(time.seconds(1)) == 0.008
    assert float(time.part(1 / 8).seconds(1)) == 0.002
    assert float(time.part(1 / 2).seconds(1)) == 0.004


@pytest.mark.parametrize("spec", KERNELS)
def test_bytes_count_what_a_method_keeps(spec: str) -> None:
    """At least gradients and results; x and the residual if it keeps one; and numbers of each element."""
    method = parse_compressor(spec)
    least = {"none": 8, "error_feedback": 16, "momentum_correction": 24}[method.default_memory.name]
    least += 24 * (method.keeps_state and not method.of_matrices)
    assert least <= KERNELS[spec].bytes < least + 13


# Models ---------------------------------------------------------------------------------------------------------------


def test_models_that_do_not_fit_are_left_out() -> None:
    assert set(models_on(CARDS["h100"])) == set(WORKLOADS)
    assert set(WORKLOADS) - set(models_on(CARDS["v100"])) == {"gpt2-xl", "llama-1b"}


def test_times_of_models_by_hand() -> None:
    """GPT-2: 6 operations of each multiplied weight and token, and 12 of each pair of tokens and width."""
    facts = models_on(CARDS["a100"])["gpt2"]
    weights = 12 * 12 * 768**2 + 50257 * 768
    operations = 32 * (6 * weights * 1024 + 12 * 12 * 768 * 1024**2)
    assert facts["forward_s"] + facts["backward_s"] == pytest.approx(operations / (312e12 * 0.55), rel=1e-6)
    assert facts["backward_s"] == pytest.approx(2 * facts["forward_s"])
    images = {card: models_on(CARDS[card])["resnet50"] for card in ("v100", "a100")}
    per_s = {card: 256 / (facts["forward_s"] + facts["backward_s"]) for card, facts in images.items()}
    assert per_s["v100"] == pytest.approx(1200, rel=0.1), "as NVIDIA published"
    assert per_s["a100"] == pytest.approx(2470 * 1555 / 2039)


def test_embeddings_come_last_and_take_no_time() -> None:
    layers = [TensorInfo("wte", (50, 10)), *(TensorInfo(f"h.{place}", (25, 10)) for place in range(4))]
    pairs = ready_times(layers, size=6 * 25 * 2**20)
    assert pairs == [pytest.approx(pair) for pair in ((1 / 6, 0.25), (1 / 3, 0.5), (0.5, 0.75), (2 / 3, 1), (1, 1))]
    convolutions = [TensorInfo("conv1", (64, 3, 7, 7)), TensorInfo("conv2", (512, 512, 3, 3))]
    assert ready_times(convolutions, size=2 * 25 * 2**20)[0][1] == pytest.approx(0.5)


@pytest.mark.parametrize("preset", sorted(set(presets()) - {OF_2021}))
def test_numbers_of_presets_have_sources(preset: str) -> None:
    known = load(preset)
    assert known.card in CARDS
    assert "Nothing was measured" in known.network_source
    assert known.noise >= 0.1
    for model, facts in known.models.items():
        assert {"forward_s", "backward_s", "ready", "optimizer_s"} <= set(facts.sources), model
        for spec, time in encode_times(known, model).items():
            assert time.source.startswith("estimated") == time.estimated, (model, spec)


def test_on_sixteen_v100_at_10_gbps_the_tool_no_longer_sends_users_away() -> None:
    """With the times of 2021, PowerSGD loses to dense gradients on ResNet-50. With our kernels it wins."""
    published = load(OF_2021)
    setting = Setting(16, 1.25e9)
    then = published.models["resnet50"]
    speedups = []
    for facts in (then, with_own_kernels(then, "v100")):
        adviser = Adviser(replace(published, models={"resnet50": facts}), "resnet50", ["powersgd:rank=4"])
        speedups.append(float(adviser.step_s("none", setting) / adviser.step_s("powersgd:rank=4", setting)))
    assert speedups[0] < 1
    assert speedups[1] > 1.25


# Sharded --------------------------------------------------------------------------------------------------------------


def test_a_step_of_fsdp_by_hand() -> None:
    """Four nodes of two ranks and no latency; 8 million weights in two modules."""
    network = network_of_nodes(2, 1e9, 0.0, 1e10, 0.0)
    tensors = [TensorInfo("a", (2000, 2000)), TensorInfo("b", (2000, 2000))]
    compute = Compute(0.05, 0.02)
    n, ranks = 8e6, 8

    def step_s(spec: str, encode: EncodeTime | None = None) -> float:
        exchange = sharded_exchange_of(parse_compressor(spec), tensors, ranks, 2)
        return float(predict(network, compute, exchange, 16e6, Setting(ranks), encode).total)

    gather = 2 * n / 1e9 * 7 / 8
    dense = 4 * n / 1e9 * 7 / 8
    assert step_s("none") == pytest.approx(max(0.02, gather) + max(0.05, gather + dense / 2) + dense / 2, rel=1e-3)
    assert step_s("fp16") == pytest.approx(max(0.02, gather) + max(0.05, gather + dense / 4) + dense / 4, rel=1e-3)
    # int8: 4 bytes of each weight within a node, and a byte of half of them between four nodes, at half of the link.
    between = 4 * n / 1e10 / 2 + n * (1 + 4 / 256) / 2 * 3 / 4 / 5e8
    assert step_s("int8", EncodeTime(0.01)) == pytest.approx(
        max(0.02, gather) + max(0.055, gather + between / 2) + between / 2, rel=2e-2
    )
    exchange = sharded_exchange_of(parse_compressor("none"), tensors, ranks, 2)
    accumulated = predict(network, Compute(0.01, 0.002), exchange, 16e6, Setting(ranks, micro_batches=3)).total
    assert 5 * gather > 0.002 + 2 * 0.012
    assert float(accumulated) == pytest.approx(5 * gather + max(0.01, gather + dense / 2) + dense / 2, rel=1e-3)
    assert sharded_exchange_of(parse_compressor("int8"), tensors, 2, 2).rounds[0][0].kind == "reducescatter"


def test_without_nodes_shards_are_exchanged_among_all_ranks() -> None:
    cost = CollectiveCost("ring", 0.0, 1e9)
    tensors = [TensorInfo("a", (2000, 2000))]
    exchange = sharded_exchange_of(parse_compressor("int8"), tensors, 4, None)
    kinds = [one.kind for collectives in exchange.rounds for one in collectives if one.bytes > 8]
    assert kinds == ["alltoall"]
    assert predict(Network(cost, cost), Compute(0.1), exchange, 16e6, Setting(4)).total > 0.1


def test_a_sharded_model_is_compared_with_quantizers_only() -> None:
    adviser = Adviser(load("h100x8"), "llama-1b-fsdp")
    assert {"int4", "int8", "natural"} < set(adviser.compressors)
    assert not [spec for spec in adviser.compressors if spec.startswith(("topk", "powersgd", "two_level"))]
    slow, fast = (adviser.advise(Setting(64, rate * 1.25e8)) for rate in (10, 400))
    assert slow.take not in ("none", "fp16")
    assert fast.take in ("none", "fp16")
    assert slow.least_factor is None
    with pytest.raises(ValueError, match=r"of FSDP2 does not work with topk:ratio=0.01; use a quantizer"):
        Adviser(load("h100x8"), "llama-1b-fsdp", ["topk:ratio=0.01"])


def test_a_training_fits_the_model_that_is_not_sharded() -> None:
    known = load("h100x8")
    assert model_of(known, tensors_of("llama-1b"), "h100x8", None) == known.models["llama-1b"]


# Accumulation and checkpointing ---------------------------------------------------------------------------------------


def test_only_the_last_backward_pass_hides_the_exchange() -> None:
    adviser = Adviser(load("h100x8"), "gpt2", ["int4"])
    one, four = (adviser.parts("none", Setting(64, 1.25e9, micro_batches=number)) for number in (1, 4))
    compute = adviser.facts.compute
    passes = compute.backward_s + (compute.forward_s or 0)
    assert float(four.total - one.total) == pytest.approx(3 * passes)
    assert float(four.transfer) == pytest.approx(float(one.transfer))


def test_recomputing_makes_the_backward_pass_longer() -> None:
    adviser = Adviser(load("h100x8"), "gpt2", ["int4"])
    plain, again = (adviser.parts("int4", Setting(1, recompute=share)) for share in (0, 1))
    assert float(again.total - plain.total) == pytest.approx(adviser.facts.compute.forward_s or 0)
    rates = np.array([1.25e9, 1.25e10])
    hidden = [adviser.step_s("none", Setting(64, rates, recompute=share)) for share in (0, 1)]
    assert np.all(hidden[1] >= hidden[0])
