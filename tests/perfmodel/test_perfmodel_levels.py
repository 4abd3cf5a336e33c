"""Two levels in the performance model: what their collectives cost, the file, the steps, and `hvdcomp advise`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.compressors.protocol import TensorInfo
from hvdcomp.errors import SpecError
from hvdcomp.perfmodel import (
    Adviser,
    Calibration,
    CalibrationError,
    Collective,
    CollectiveCost,
    Compute,
    EncodeTime,
    Exchange,
    Inner,
    ModelFacts,
    Network,
    Setting,
    as_json,
    from_json,
    load,
    predict,
    save,
)
from hvdcomp.perfmodel.network import Among, TwoLevelCosts
from hvdcomp.perfmodel.ways import encode_time_of, in_two_levels
from tests.perfmodel.test_advise import as_json as advised
from tests.perfmodel.test_advise import error

FAST, SLOW, SHARED = (CollectiveCost("ring", 1e-5, speed) for speed in (1e10, 1e8, 2.5e7))
FLAT = Network(SLOW, SLOW)
NETWORK = replace(FLAT, levels=TwoLevelCosts(4, Among(FAST, FAST), Among(SHARED, SHARED)))
WITHIN, BETWEEN = "two_level(natural)", "two_level(natural:exchange=scatter)"


def calibration(network: Network = NETWORK, **changes: Any) -> Calibration:
    """25 million elements of 9 bits; 20 ms to encode, 3 ms to decode a payload."""
    times = {"natural": EncodeTime(0.02, decode_per_rank_s=0.003)}
    settings: dict[str, Any] = {"backward_s": 0.1, "forward_s": 0.0, "encode": times, **changes}
    return Calibration("test", network, {"m": ModelFacts((TensorInfo("w", (5000, 5000)),), Compute(**settings), 1e9)})


# The network ----------------------------------------------------------------------------------------------------------


def test_collectives_of_a_node_and_between_nodes() -> None:
    b = 1e7
    node = NETWORK.seconds("reducescatter", b, 16, among="node").total
    assert node == pytest.approx(3 * 1e-5 + b * 3 / 4 / 1e10)
    across = NETWORK.seconds("allgather", b, 16, among="across").total
    assert across == pytest.approx(3 * 1e-5 + 3 * b / 2.5e7)
    assert NETWORK.seconds("allgather", b, 16).total == pytest.approx(15 * 1e-5 + 15 * b / 1e8)
    # A faster link between nodes makes nothing faster within one, and the last node need not be full.
    assert NETWORK.seconds("reducescatter", b, 16, 1e12, among="node").total == node
    assert NETWORK.seconds("allgather", b, 16, 2e8, among="across").transfer == pytest.approx(3 * b / 5e7)
    assert NETWORK.seconds("allgather", b, 13, among="across").total == across
    assert NETWORK.seconds("allgather", b, 4, among="across").total == 0
    assert NETWORK.seconds("allgather", b, 3, among="node").total == pytest.approx(2 * 1e-5 + 2 * b / 1e10)


def test_with_an_inner_link_the_ranks_of_a_node_share_the_outer_one() -> None:
    network = Network(SLOW, SLOW, Inner(FAST, FAST, ranks_per_node=4))
    b = 1e7
    assert network.ranks_per_node == 4
    assert network.seconds("allgather", b, 16, among="across").total == pytest.approx(3 * 1e-5 + 4 * 3 * b / 1e8)
    assert network.seconds("allgather", b, 16, among="node").total == pytest.approx(3 * 1e-5 + 3 * b / 1e10)


def test_without_nodes_there_are_no_levels() -> None:
    assert FLAT.ranks_per_node is None
    for among in ("node", "across"):
        with pytest.raises(CalibrationError, match="has no network costs for nodes with several ranks"):
            FLAT.seconds("allgather", 1.0, 4, among=among)


# The file -------------------------------------------------------------------------------------------------------------


def test_levels_are_written_and_read_again(tmp_path: Path) -> None:
    whole = calibration(replace(NETWORK, levels=replace(NETWORK.levels, node=Among(FAST, FAST, reducescatter=SLOW))))
    save(whole, tmp_path / "file.json")
    assert load(tmp_path / "file.json") == whole
    for hides in (0.0, 0.25):
        assert from_json(as_json(calibration(hides=hides))).models["m"].compute.hides == hides
    assert "hides" not in as_json(calibration())["models"]["m"]


def test_what_is_wrong_is_named() -> None:
    data = as_json(calibration())
    for place, value, said in (
        (("network", "levels", "ranks_per_node"), 1, "levels.ranks_per_node is 1, and must be at least 2"),
        (("network", "levels", "across"), None, "network.levels.across is missing"),
        (("models", "m", "hides"), 1.5, "models.m.hides is 1.5, and must be at most 1"),
        (("network", "levels", "nodes"), 3, "nodes"),
    ):
        wrong = json.loads(json.dumps(data))
        inside = wrong
        for name in place[:-1]:
            inside = inside[name]
        inside[place[-1]] = value
        with pytest.raises(CalibrationError, match=said):
            from_json(wrong)


def test_a_file_may_take_from_a_preset_what_it_does_not_say(tmp_path: Path) -> None:
    own = as_json(calibration())
    file = tmp_path / "own.json"
    published = "v100-p3.8xlarge-2021"
    file.write_text(json.dumps({"like": published, **{name: own[name] for name in own if name != "models"}}))
    assert load(file) == replace(load(published), name="test", network=NETWORK, machine={}, noise=0.0, noise_note="",
                                 network_source="")  # fmt: skip
    file.write_text(json.dumps({"like": "a100"}))
    with pytest.raises(CalibrationError, match="\"like\" is 'a100', which is not a preset; the presets are: a100x8"):
        load(file)


def test_a_network_of_nodes_has_a_short_form() -> None:
    """A ring leaves a node once; in an alltoall, and between nodes, its ranks share the link."""
    nodes = {
        "ranks_per_node": 8, "bytes_per_s": 8e9, "latency_s": 6e-6,
        "inside_bytes_per_s": 3e11, "inside_latency_s": 1e-6,
    }  # fmt: skip
    network = from_json({**as_json(calibration()), "network": {"nodes": nodes}}).network
    assert network.ranks_per_node == 8
    for kind in ("allreduce", "allgather", "reducescatter"):
        assert network.cost(kind).bytes_per_s == 8e9
        assert network.cost(kind).latency_s == pytest.approx((6e-6 + 7 * 1e-6) / 8)
        assert network.costs_among("across").cost(kind) == CollectiveCost("ring", 6e-6, 1e9)
        assert network.costs_among("node").cost(kind) == CollectiveCost("ring", 1e-6, 3e11)
    assert network.costs_among("across").cost("alltoall") == CollectiveCost("pairwise", 6e-6, 1e9)
    assert network.cost("alltoall").bytes_per_s == 1e9
    with pytest.raises(CalibrationError, match=r"network\.nodes\.ranks_per_node is 1, and must be at least 2"):
        from_json({**as_json(calibration()), "network": {"nodes": {**nodes, "ranks_per_node": 1}}})


# A step ---------------------------------------------------------------------------------------------------------------


def test_a_step_by_hand() -> None:
    """16 ranks in 4 nodes. The payload of a shard is a quarter of 25e6 * 9 / 8 bytes."""
    found = Adviser(calibration()).advise(Setting(16)).methods
    dense, shard = 1e8, 25e6 * 9 / 8 / 4
    scatter = 3 * 1e-5 + dense * 3 / 4 / 1e10
    gather = 3 * 1e-5 + 3 * dense / 4 / 1e10
    encode = (0.02 + 0.003 * 4) / 4
    flag = 15 * (1e-5 + 4 / 1e8)
    between = 3 * 1e-5 + 3 * shard / 2.5e7
    assert found[WITHIN].step_s == pytest.approx(0.1 + encode + flag + scatter + between + gather, rel=1e-4)
    alltoall, means = 3 * 1e-5 + shard * 3 / 4 / 2.5e7, 3 * 1e-5 + 3 * shard / 4 / 2.5e7
    encode = (0.02 + 0.003 * (2 - 1 / 4)) / 4
    assert found[BETWEEN].step_s == pytest.approx(0.1 + encode + flag + scatter + alltoall + means + gather, rel=1e-3)


def test_on_one_node_nothing_goes_between_nodes() -> None:
    parts = Adviser(calibration()).parts(WITHIN, Setting(4))
    flag = 3 * 4 / 1e8
    assert float(parts.transfer) == pytest.approx(2 * 1e8 * 3 / 4 / 1e10 + flag, rel=1e-4)


def test_many_numbers_of_ranks_at_once_are_those_one_by_one() -> None:
    adviser, ranks = Adviser(calibration()), np.array([1, 3, 4, 8, 12, 16, 64])
    for spec in (WITHIN, BETWEEN, "two_level(natural:exchange=auto)"):
        adviser = Adviser(calibration(), specs=[spec])
        together = adviser.step_s(spec, Setting(ranks))
        alone = [float(Adviser(calibration(), specs=[spec]).step_s(spec, Setting(int(one)))) for one in ranks]
        assert together.tolist() == pytest.approx(alone, rel=1e-12)


def test_what_starts_early_in_two_levels_is_what_the_node_adds_up() -> None:
    """Half of the gradients are there after half of the pass: their reduce-scatter hides, nothing else does."""
    scatter, between, gather = (
        Collective("reducescatter", 1e9, "float32", "node"),
        Collective("allgather", 1e6, "", "across"),
        Collective("allgather", 2.5e8, "", "node"),
    )
    exchange = Exchange(((scatter,), (between,), (gather,)), overlapped=False, dense_bytes=1e9, ranks_per_node=4)
    compute = Compute(1.0, 0.0, gamma=1.2, ready=((0.5, 0.5), (1.0, 1.0)))
    encode = EncodeTime(0.3, decode_s=0.2)
    late, early = (predict(NETWORK, compute, exchange, 1e9, Setting(16), encode, least) for least in (None, 5e8))

    def node(size: float) -> float:
        return 3 * 1e-5 + size * 3 / 4 / 1e10

    rest = 3 * 1e-5 + 3 * 1e6 / 2.5e7 + 3 * 1e-5 + 3 * 2.5e8 / 1e10
    assert float(late.total) == pytest.approx(1.5 + node(1e9) + rest)
    # Two buckets: the second starts at the end of the pass, and each has messages of its own in every round. What the
    # first takes from the pass is over before the second has arrived.
    assert float(early.total) == pytest.approx(1.5 + node(5e8) + rest + 6 * 1e-5)
    half = predict(NETWORK, replace(compute, hides=0.5), exchange, 1e9, Setting(16), encode, 5e8)
    assert float(half.total) == pytest.approx((float(late.total) + float(early.total)) / 2)


# Encode times ---------------------------------------------------------------------------------------------------------


def test_encode_times_are_estimated_from_those_of_the_compressor_within() -> None:
    known = {"natural": EncodeTime(0.4, 0.2, 0.1), "powersgd:rank=4": EncodeTime(1.0)}
    found = encode_time_of(parse_compressor(BETWEEN), known, (), 4)
    assert found is not None
    assert (found.encode_s, found.decode_s, found.decode_per_rank_s, found.estimated) == (0.1, 0.05, 0.025, True)
    # Of three equal matrices one of two ranks has two.
    matrices = [TensorInfo(name, (64, 64)) for name in "abc"]
    found = encode_time_of(parse_compressor("two_level(powersgd:rank=4)"), known, matrices, 2)
    assert found is not None
    assert found.encode_s == pytest.approx(2 / 3)
    measured = known | {WITHIN: EncodeTime(7.0)}
    assert encode_time_of(parse_compressor(WITHIN), measured, (), 4) == EncodeTime(7.0)
    assert encode_time_of(parse_compressor("two_level(terngrad)"), known, (), 4) is None


def test_not_everything_can_stand_between_nodes() -> None:
    assert in_two_levels(parse_compressor("fp16")) is None
    assert in_two_levels(parse_compressor("dgc:ratio=0.01")) is None
    assert in_two_levels(parse_compressor(WITHIN)) is None


# `hvdcomp advise` -----------------------------------------------------------------------------------------------------


def test_two_levels_are_a_choice_where_nodes_are_known(tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    save(calibration(), file)
    report = advised("--calibration", file, "--world-size", "16")
    assert set(report["methods"]) == {"none", "fp16", "natural", "natural:exchange=scatter", WITHIN, BETWEEN}
    assert report["winner"] == BETWEEN
    row = report["methods"][WITHIN]
    assert row["bytes_in_node"] == pytest.approx(1.25e8, rel=1e-3)
    assert row["compression_factor"] == pytest.approx(4 * 32 / 9, rel=1e-3)
    assert any("no times of reducescatter within nodes, so these times are predicted from the times of allreduce" in one
               for one in report["notes"])  # fmt: skip
    save(calibration(FLAT), file)
    assert set(advised("--calibration", file)["methods"]) == {"none", "fp16", "natural", "natural:exchange=scatter"}
    said = error("--calibration", file, "--compressor", WITHIN)
    assert "two_level(natural) needs the number of ranks on each node" in said


def test_two_levels_are_left_out_where_the_last_node_would_not_be_full(tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    save(calibration(), file)
    report = advised("--calibration", file, "--world-size", "18")
    assert WITHIN not in report["methods"]
    assert f"on each node (4 here): {WITHIN}, {BETWEEN}" in " ".join(report["notes"])


def test_overlap_is_a_choice_with_a_time_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    tensors = tuple(TensorInfo(f"w{place}", (1_000, 2_500)) for place in range(10))
    ready = *((0.1 * place, 0.1 * place) for place in range(1, 10)), (1.0, 1.0)
    made = calibration(FLAT, ready=ready, hides=0.5)
    save(replace(made, models={"m": replace(made.models["m"], tensors=tensors)}), file)
    report = advised("--calibration", file, "--world-size", "2")
    row = report["methods"]["natural"]
    assert row["step_ms"] < row["at_end_ms"]
    assert report["methods"]["none"]["at_end_ms"] is None
    assert advised("--calibration", file, "--bucket-bytes", "0")["methods"]["natural"]["at_end_ms"] is None
    # The link is so slow that the first bytes ought to leave soon.
    assert any("faster with buckets of 10,000,000 bytes" in note for note in report["notes"])
    whole = advised("--calibration", file, "--world-size", "2", "--bucket-bytes", "10000000")
    assert not any("with buckets of" in note for note in whole["notes"])


def test_of_two_levels_an_adviser_needs_nodes() -> None:
    with pytest.raises(SpecError, match="needs the number of ranks on each node"):
        Adviser(calibration(FLAT), specs=[WITHIN])
