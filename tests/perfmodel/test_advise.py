"""`hvdcomp advise`: the table, the JSON, plots, and errors."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from click.testing import CliRunner, Result

import hvdcomp
from hvdcomp.compressors.evidence import steps_in_words
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.compressors.protocol import TensorInfo
from hvdcomp.perfmodel import (
    Adviser,
    Calibration,
    CalibrationError,
    CollectiveCost,
    Compute,
    EncodeTime,
    ModelFacts,
    Network,
    Setting,
    load,
    presets,
    save,
)
from hvdcomp.perfmodel.advice import MODEL_ERROR
from hvdcomp.perfmodel.cards import CARDS
from hvdcomp.perfmodel.kernel_times import KERNELS, encode_time
from hvdcomp.perfmodel.sweep import GBPS, parse_axis, sweep
from hvdcomp.tools.cli import main

OF_2021 = "v100-p3.8xlarge-2021"
PRESET = ["--calibration", OF_2021, "--model", "resnet50"]
KNOWN = load(OF_2021).models["resnet50"].compute.encode
ERROR = 0.137  # of the presets
DOCS = Path(__file__).parents[2] / "docs"


def named(*specs: str) -> list[str]:
    """The options that compare these compressors, and recommend them whatever they cost in quality."""
    return [word for spec in specs for word in ("--compressor", spec)]


PUBLISHED = [*PRESET, *named(*(spec for spec, time in KNOWN.items() if not time.estimated))]


def run(*arguments: str | Path, width: int = 80) -> Result:
    return CliRunner().invoke(main, ["advise", *map(str, arguments)], env={"COLUMNS": str(width)})


def as_json(*arguments: str | Path) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def error(*arguments: str | Path) -> str:
    result = run(*arguments)
    assert result.exit_code != 0
    assert not isinstance(result.exception, Exception) or isinstance(result.exception, SystemExit)
    return " ".join(result.output.split())


# JSON ---------------------------------------------------------------------------------------------------------------


def test_json_holds_what_the_model_says() -> None:
    report = as_json(*PUBLISHED)
    adviser = Adviser(load(OF_2021), "resnet50")
    assert list(as_json(*PRESET)["methods"]) == list(adviser.compressors)
    assert (report["world_size"], report["batch_size"], report["bandwidth_gbps"]) == (64, 64, 10)
    for spec, row in report["methods"].items():
        assert row["step_ms"] == pytest.approx(1e3 * adviser.step_s(spec, Setting(64)))
        parts = sum(row[f"{part}_ms"] for part in ("compute", "encode", "network", "latency"))
        assert parts == pytest.approx(row["step_ms"])
        assert row["bytes_sent"] == adviser.exchange(spec, 64).bytes
        assert row["speedup_over_dense"] == pytest.approx(report["methods"]["none"]["step_ms"] / row["step_ms"])
        assert row["limited_by"] in ("compute", "encode", "network", "latency")
    assert report["winner"] == report["free"] == report["take"] == "none"
    assert report["to_type"] == {}
    assert 8 < report["methods"]["powersgd:rank=4"]["wins_below_gbps"] < 10
    assert report["methods"]["signsgd"]["wins_below_gbps"] is None
    assert report["methods"]["signsgd"]["wins_in_gbps"] == []
    assert 4 < report["least_compression_factor"] < 6.5


def test_what_is_kept_is_said_before_a_training() -> None:
    """Biases go without residuals, the momentum of dgc is of all parameters."""
    rows = as_json(*PUBLISHED)["methods"]
    kept = {spec: row["kept_bytes_per_parameter"] for spec, row in rows.items()}
    assert kept["none"] == kept["signsgd"] == 0
    assert 3.9 < kept["topk:ratio=0.01"] < 4 < kept["powersgd:rank=4"] < 4.2
    assert kept["dgc:ratio=0.01"] == 8
    said = " ".join(run(*PUBLISHED, "--bandwidth", "1", "--all", width=120).output.split())
    assert "keeps 4.1 bytes of memory per parameter from step to step. With memory=error_feedback" in said
    assert "B/param" in said


def test_bandwidth_decides_the_winner() -> None:
    slow, fast = (as_json(*PUBLISHED, "--bandwidth", gbps) for gbps in ("5", "20"))
    assert (slow["winner"], fast["winner"]) == ("powersgd:rank=4", "none")
    assert (slow["take"], slow["free"]) == ("powersgd:rank=4", "fp16")
    assert slow["gain_over_dense_percent"] == pytest.approx(
        100 * (slow["methods"]["none"]["step_ms"] / slow["methods"]["powersgd:rank=4"]["step_ms"] - 1)
    )
    assert slow["gain_over_free_percent"] == pytest.approx(
        100 * (slow["methods"]["fp16"]["step_ms"] / slow["methods"]["powersgd:rank=4"]["step_ms"] - 1)
    )
    assert fast["gain_over_dense_percent"] == fast["gain_over_free_percent"] == 0


def test_batch_and_world_size_are_obeyed() -> None:
    small = as_json(*PUBLISHED, "--batch", "16", "--world-size", "96")
    assert small["batch_size"] == 16
    assert small["one_rank_ms"] == pytest.approx(122 / 4)
    assert small["winner"] == "powersgd:rank=4"


def test_only_the_named_compressors_and_their_baselines() -> None:
    report = as_json(*PRESET, "--compressor", "signsgd", "--compressor", "powersgd:rank=8")
    assert list(report["methods"]) == ["none", "fp16", "signsgd", "powersgd:rank=8"]


def test_one_rank_has_no_winner() -> None:
    report = as_json(*PRESET, "--world-size", "1")
    assert report["winner"] is report["free"] is report["take"] is report["gain_over_free_percent"] is None
    assert report["to_type"] == {}
    assert {row["step_ms"] for row in report["methods"].values()} == {122.0}
    assert "One rank exchanges nothing" in run(*PRESET, "--world-size", "1").stdout


def test_estimates_are_said(tmp_path: Path) -> None:
    report = as_json("--calibration", OF_2021, "--model", "bert-base")
    assert any("The value of backward_s in the calibration is estimated" in note for note in report["notes"])
    assert report["methods"]["powersgd:rank=4"]["estimated"]
    scattered = ("qsgd:bits=2,exchange=scatter", "terngrad:exchange=scatter")
    published = as_json(*PUBLISHED, *named(*scattered))
    assert [note for note in published["notes"] if "estimated" in note] == [
        f"The encode time of {', '.join(scattered)} is estimated from the time of the same method with another "
        "exchange, by the number of payloads that a rank decodes"
    ]
    assert not published["methods"]["qsgd:bits=2"]["estimated"]
    said = run(*PRESET, "--compressor", "signsgd", "--compressor", "int8", "--all", width=120).stdout
    assert "~50.0" in next(line for line in said.splitlines() if line.lstrip().startswith("int8"))
    assert "~" not in next(line for line in said.splitlines() if line.lstrip().startswith("signsgd"))
    assert "estimated, not published" in run("--calibration", OF_2021, "--model", "bert-base", "--all").stdout


# Where a method wins --------------------------------------------------------------------------------------------------


QUICK = ("randomk:ratio=0.01", "signsgd")
"""Methods of `calibrated` that are not recommended unless they are named."""


def calibrated(**changes: Any) -> Calibration:
    """One that is easy to reckon with: dense takes 100 ms + 800 ms / (Gb/s) on 2 ranks, in one bucket."""
    encode = {"randomk:ratio=0.01": EncodeTime(0.08), "signsgd": EncodeTime(0.0), "topk:ratio=0.01": EncodeTime(9.0)}
    settings: dict[str, Any] = {"backward_s": 0.1, "forward_s": 0.0, "encode": encode, **changes}
    model = ModelFacts((TensorInfo("w", (5000, 5000)),), Compute(**settings), bucket_bytes=1e9)
    network = Network(CollectiveCost("ring", 0.0, GBPS), CollectiveCost("direct", 0.0, GBPS))
    return Calibration("test", network, {"m": model})


def test_of_an_exchange_after_local_steps_each_has_its_share(tmp_path: Path) -> None:
    """Nothing hides it: 100 + 800 / 10, and 100 + (80 + 8) / 10."""
    file = tmp_path / "mine.json"
    save(calibrated(), file)
    asked = ("--calibration", file, "--world-size", "2", "--bandwidth", "1", "--local-steps", "10", *named(*QUICK))
    report = as_json(*asked)
    times = {spec: report["methods"][spec]["local_step_ms"] for spec in ("none", "randomk:ratio=0.01", "signsgd")}
    assert times["none"] == pytest.approx(180, rel=1e-6)
    assert times["randomk:ratio=0.01"] == pytest.approx(108.8, rel=1e-6)
    assert times["signsgd"] is None  # LocalSteps refuses it
    said = run(*asked, "--all", width=140).stdout
    assert "10 local" in said
    assert "the fastest method is randomk:ratio=0.01: 108.8 ms per step" in run(*asked).stdout
    assert "the fastest method is randomk:ratio=0.01: 108.8 ms per step" in said


def test_an_exchange_after_each_local_step_adds_an_outer_step(tmp_path: Path) -> None:
    """The outer step lasts as long as the optimizer's 2 ms: 102 + 80 + 8 + 2 in each step, 102 + (80 + 8 + 2) / 10 in
    the mean of ten. On a computer that is twice as fast, both take half of the time."""
    file = tmp_path / "mine.json"
    save(calibrated(optimizer_s=2e-3), file)
    asked = ("--calibration", file, "--world-size", "2", "--bandwidth", "1", "--compressor", "randomk:ratio=0.01")
    for every, expected in ((1, 192), (10, 111)):
        report = as_json(*asked, "--local-steps", str(every))
        assert report["methods"]["randomk:ratio=0.01"]["local_step_ms"] == pytest.approx(expected, rel=1e-6)
        assert report["local_steps"] == every
    said = run(*asked, "--local-steps", "1").stdout
    assert "With an exchange of weight changes after every step (--local-steps 1)" in said
    faster = Adviser(load(str(file))).local_step_s("none", Setting(2, GBPS, compute_speed=2.0), 1)
    assert faster == pytest.approx(0.051 + 0.8 + 0.001, rel=1e-6)
    assert "0 is not in the range x>=1" in error(*asked, "--local-steps", "0")


def test_compressed_steps_are_advised_in_words_that_say_what_was_measured() -> None:
    """The fastest way to send signs, also if the optimizer's filter leaves signs out, because the filter is about error
    feedback of gradients."""
    asked = ("--calibration", "h100x8", "--model", "resnet50", "--bandwidth", "1", "--local-steps", "4")
    adviser, setting = Adviser(load("h100x8"), "resnet50"), Setting(64, GBPS)
    fastest, gathered = "two_level(efsignsgd:exchange=scatter)", "efsignsgd"
    milliseconds, slowest = (1e3 * adviser.local_step_s(spec, setting, 4) for spec in (fastest, gathered))
    assert slowest > 5 * milliseconds
    gain = 1e3 * adviser.step_s("fp16", setting) / milliseconds
    for options in (("--optimizer", "AdamW"), ("--compressor", "int4")):
        said = " ".join(run(*asked, *options).stdout.split())
        assert (
            f"LocalSteps.compressed(optimizer, every=4) is predicted to take {milliseconds:.1f} ms with {fastest}: "
            f"{gain:.1f} times as fast as a step with fp16 gradients. {steps_in_words(parse_compressor(gathered), 4)} "
            "Tune the learning rate again"
        ) in said, options
    assert "compressed steps" not in run(*asked[:-2], "--compressor", "int4").stdout
    assert "compressed steps" not in run(*asked, "--compressor", "int4", "--world-size", "1").stdout
    assert "compressed steps" not in run(*PRESET, "--local-steps", "4").stdout  # it has no encode time of signs


def test_local_steps_of_a_model_that_is_sharded_over_all_ranks_are_not_predicted() -> None:
    said = run("--model", "llama-1b-fsdp", "--local-steps", "4")
    assert said.exit_code == 0, said.output
    assert "There is no prediction for --local-steps 4, because llama-1b-fsdp is sharded over all ranks" in said.stdout
    report = as_json("--model", "llama-1b-fsdp", "--local-steps", "4")
    assert {method["local_step_ms"] for method in report["methods"].values()} == {None}


def test_crossings_are_where_the_times_are_equal() -> None:
    """100 + 800 / x = 100 + 80 + 8 / x at x = 792 / 80."""
    adviser = Adviser(calibrated())
    ((low, high),) = adviser.wins("randomk:ratio=0.01", Setting(2))
    assert low is None
    assert high is not None
    assert high / GBPS == pytest.approx(792 / 80, rel=1e-6)


def test_a_method_may_win_always_or_never() -> None:
    adviser = Adviser(calibrated())
    assert adviser.wins("signsgd", Setting(2)) == ((None, None),)
    assert adviser.wins("signsgd", Setting(200)) == ()  # gathers more than an allreduce moves


def test_a_method_may_win_only_above_a_bandwidth() -> None:
    """Dense is slowed by gamma; a free encoder then wins where the network is no matter."""
    adviser = Adviser(calibrated(gamma=1.1))
    ((low, high),) = adviser.wins("signsgd", Setting(200))
    assert high is None
    assert low is not None
    methods = adviser.advise(Setting(200)).methods
    assert methods["signsgd"].wins_below is None
    assert adviser.step_s("signsgd", Setting(200, low * 1.01)) < adviser.step_s("none", Setting(200, low * 1.01))
    assert adviser.step_s("signsgd", Setting(200, low / 1.01)) > adviser.step_s("none", Setting(200, low / 1.01))


def test_a_calibration_file_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "here.json"
    save(calibrated(), file)
    # Its only model need not be named.
    report = as_json("--calibration", file, "--world-size", "2", "--bandwidth", "8", *named(*QUICK))
    assert report["methods"]["none"]["step_ms"] == pytest.approx(200)
    assert report["methods"]["randomk:ratio=0.01"]["step_ms"] == pytest.approx(181)
    assert report["forward_included"]
    assert report["winner"] == report["take"] == "signsgd"


# Gathered and scattered -----------------------------------------------------------------------------------------------

SCATTER, AUTO = "natural:exchange=scatter", "natural:exchange=auto"


def of_natural(**changes: Any) -> Calibration:
    """25 million elements of 9 bits; 20 ms to encode, 3 ms to decode a payload; 1 Gb/s and no latency."""
    return calibrated(encode={"natural": EncodeTime(0.02, decode_per_rank_s=0.003)}, **changes)


def test_scatter_is_a_choice_with_a_time_of_its_own() -> None:
    """By hand, for 8 ranks: bytes over the link, and payloads decoded."""
    adviser = Adviser(of_natural())
    assert list(adviser.compressors) == ["none", "fp16", "natural", SCATTER]
    payload = 25e6 * 9 / 8
    gather = 0.1 + 0.02 + 0.003 * 8 + 7 * payload / GBPS
    scatter = 0.1 + 0.02 + 0.003 * (2 - 1 / 8) + 2 * payload * 7 / 8 / GBPS
    advice = adviser.advise(Setting(8))
    assert advice.methods["natural"].step_s == pytest.approx(gather, rel=1e-5)
    assert advice.methods[SCATTER].step_s == pytest.approx(scatter, rel=1e-3)
    assert advice.winner == SCATTER
    ((low, high),) = advice.methods[SCATTER].wins
    assert low is None
    # 100 + 1400 / x = 100 + 20 + 5.6 + 393.75 / x
    assert high is not None
    assert high / GBPS == pytest.approx((1400 - 393.75) / 25.625, rel=1e-2)


def test_scatter_alone_may_be_asked_for_and_measured() -> None:
    assert list(Adviser(of_natural(), specs=[SCATTER]).compressors) == ["none", "fp16", SCATTER]
    measured = calibrated(encode={SCATTER: EncodeTime(0.5, decode_per_rank_s=0.1)})
    adviser = Adviser(measured)
    assert set(adviser.compressors) == {"none", "fp16", "natural", SCATTER}
    assert not adviser.encode[SCATTER].estimated
    assert adviser.encode["natural"].estimated
    parts = adviser.parts("natural", Setting(8))
    assert float(parts.encode) == pytest.approx(0.5 + 0.8)
    with pytest.raises(CalibrationError, match=r"no encode time of 'terngrad:exchange=scatter'"):
        Adviser(measured, specs=["terngrad:exchange=scatter"])


def test_over_numbers_of_ranks_auto_is_gathered_and_then_scattered() -> None:
    adviser = Adviser(of_natural(), specs=["natural", SCATTER, AUTO])
    bandwidths = GBPS * np.array([1.0, 10.0])[:, None]
    ranks = np.array([1, 2, 3, 4, 7])
    found = {spec: adviser.step_s(spec, Setting(ranks, bandwidths)) for spec in ("natural", SCATTER, AUTO)}
    assert found[AUTO].shape == (2, 5)
    assert found[AUTO][:, :3].tolist() == found["natural"][:, :3].tolist()
    assert found[AUTO][:, 3:].tolist() == found[SCATTER][:, 3:].tolist()
    for (row, column), seconds in np.ndenumerate(found[SCATTER]):
        assert seconds == pytest.approx(adviser.step_s(SCATTER, Setting(ranks[column], bandwidths[row, 0])))


def test_an_alltoall_that_was_not_measured_is_said(tmp_path: Path) -> None:
    file = tmp_path / "old.json"
    save(of_natural(), file)
    said = (
        "The calibration has no times of alltoall, so these times are predicted from the times of allgather. "
        "If several ranks share a link, the exchange takes longer than predicted."
    )
    assert said in as_json("--calibration", file)["notes"]
    assert said not in as_json("--calibration", file, "--compressor", "natural")["notes"]
    known = replace(of_natural().network, alltoall=CollectiveCost("pairwise", 0.0, GBPS / 4))
    save(replace(of_natural(), network=known), tmp_path / "new.json")
    new = as_json("--calibration", tmp_path / "new.json", "--world-size", "8")
    assert said not in new["notes"]
    ms = 1e3 * 25e6 * 9 / 8 * 7 / 8 / GBPS * (1 + 4)
    assert new["methods"][SCATTER]["network_ms"] == pytest.approx(ms, rel=1e-3)


# Text -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 120])
def test_the_table(width: int) -> None:
    result = run(*PUBLISHED, "--all", width=width)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    title = lines.index("resnet50, 64 ranks, batch 64, 10 Gb/s, v100-p3.8xlarge-2021")
    assert all(len(line) <= width for line in lines[title : title + 18])
    for spec, time in KNOWN.items():
        assert (spec in result.stdout) == (not time.estimated)
    words = " ".join(result.stdout.split())
    assert "Fastest: none. Use dense gradients: compression does not make the step faster here." in words
    assert "These methods are as fast as none within the model's error of 13.7%: fp16, powersgd:rank=4." in words
    assert "In your code" not in words
    assert "must send 6.1 times fewer bytes" in words


@pytest.mark.parametrize(("width", "more"), [(80, ""), (110, " latency")])
def test_names_are_whole_where_columns_fit(width: int, more: str) -> None:
    longest = "two_level(qsgd:bits=2,exchange=scatter)"
    asked = (*PRESET, "--compressor", longest, "--compressor", "signsgd", "--all")
    lines = run(*asked, width=width).stdout.splitlines()
    lines = lines[lines.index("resnet50, 64 ranks, batch 64, 10 Gb/s, v100-p3.8xlarge-2021") :]
    assert longest in [line.split()[0] for line in lines if line.strip()]
    times = "step compute encode network" if more else "step encode network"
    assert " ".join(lines[2].split()).startswith(f"{times}{more} beats")
    end = lines.index(f"The table has more columns if your terminal is wider than {width} characters.")
    assert max(map(len, lines[:end])) <= width


@pytest.mark.parametrize("width", [20, *(pytest.param(one, marks=pytest.mark.thorough) for one in (40, 60)), None])
def test_nothing_is_cut_off(width: int | None) -> None:
    """On a narrow terminal, and where the output is a pipe, whatever the width of the terminal that it comes from."""
    environment = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
    if width is not None:
        environment["COLUMNS"] = str(width)
    program = "from hvdcomp.tools.cli import main; main()"
    command = [sys.executable, "-c", program, "advise", *PRESET, "--bandwidth", "2gbit", "--all"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment).stdout
    rows = as_json(*PRESET, "--bandwidth", "2")["methods"]
    assert "\u2026" not in said
    for spec, row in rows.items():
        assert f"{row['step_ms']:.1f}" in said
        assert spec in "".join(said.split())
        high = row["wins_below_gbps"]
        assert f"{high:.3g}" in said if high else "never" in said
    if width is None:
        header = next(line for line in said.splitlines() if line.lstrip().startswith("method"))
        assert len(header) > 85, "as wide as it needs to be"


def test_bandwidths_have_units() -> None:
    slow = as_json(*PRESET, "--bandwidth", "100mbit")
    assert slow["bandwidth_gbps"] == pytest.approx(0.1)
    assert slow == as_json(*PRESET, "--bandwidth", "0.1")
    assert parse_axis("bandwidth=100mbit..10gbit")[1][[0, -1]].tolist() == [0.1, 10]
    assert parse_axis("bandwidth=500mbit,1gbit,2")[1].tolist() == [0.5, 1, 2]


def test_without_a_model_the_first_is_taken_and_the_others_are_named() -> None:
    report = as_json()
    assert report["model"] == "resnet50"
    assert report["calibration"] == "h100x8"
    others = "resnet101, bert-base, bert-large, gpt2, gpt2-xl, llama-1b, llama-1b-fsdp, llama-7b-fsdp, vit-l-16, dlrm"
    assert report["notes"][0].endswith(f"The other models of the calibration are: {others}")
    assert report["notes"][0] in run(width=200).stdout


def test_words_for_other_outcomes(tmp_path: Path) -> None:
    file = tmp_path / "here.json"
    save(calibrated(gamma=1.1), file)
    asked = ("--calibration", file, "--world-size", "200", "--bandwidth", "100000", *named(*QUICK))
    words = " ".join(run(*asked).stdout.split())
    assert "above" in words
    assert "Uncompressed training reaches 95% of linear scaling" in words
    assert "Fastest: signsgd" in words
    assert "times faster than dense" in words
    assert "%" not in words.partition("Fastest: ")[2].partition(".")[0], "8.1 times as fast, not 705.7% faster"


# The verdict ---------------------------------------------------------------------------------------------------------


def test_a_lead_over_fp16_within_the_error_is_none() -> None:
    """Two levels on nodes of four V100s with the encode times of 2021: 1.04 times faster than fp16, which is free."""
    asked = ("--calibration", OF_2021, "--model", "bert-base")
    report = as_json(*asked)
    assert report["winner"] == "two_level(powersgd:rank=4)"
    assert 0 < report["gain_over_free_percent"] < report["error_percent"] == pytest.approx(100 * ERROR)
    assert report["gain_over_dense_percent"] > report["error_percent"]
    assert (report["free"], report["take"]) == ("fp16", "fp16")
    words = " ".join(run(*asked, width=120).stdout.split())
    assert f"times faster than dense, {1 + report['gain_over_free_percent'] / 100:.2f} times faster than fp16." in words
    assert (
        "two_level(powersgd:rank=4) is faster than dense by more than the model's error of 13.7%, but its lead over "
        "fp16 is smaller than this error: try both two_level(powersgd:rank=4) and fp16. fp16 needs no" in words
    )
    assert report["beaten"] == ["none"]
    for compression in ("hvd.Compression.fp16", "hvdcomp.Compression.from_spec('two_level(powersgd:rank=4)')"):
        line = f"optimizer = hvd.DistributedOptimizer(optimizer, compression={compression})"
        assert f"In your code, for Horovod: {line}" in words
    assert list(report["or_type"]) == ["horovod", "ddp"]
    assert "The most quality that two_level(powersgd:rank=4) lost" in words


@pytest.mark.parametrize(
    ("noise", "encode_s", "beaten", "take"),
    [
        (0.1, 0.05, ["none", "fp16"], "signsgd"),
        (0.4, 0.05, ["none"], "fp16"),
        (0.6, 0.05, ["none"], "fp16"),
        (1.2, 0.05, [], "fp16"),
        (0.4, 0.5, [], "fp16"),
    ],
)
def test_the_verdict_is_of_each_rival(
    noise: float, encode_s: float, beaten: list[str], take: str, tmp_path: Path
) -> None:
    """At 4 Gb/s dense takes 300 ms, fp16 200, and signsgd 106 + its encode time, here 156: 1.92 and 1.28 times."""
    found = calibrated(encode={"signsgd": EncodeTime(encode_s)})
    file = tmp_path / "noisy.json"
    save(replace(found, noise=noise), file)
    asked = ("--calibration", file, "--world-size", "2", "--bandwidth", "4", "--compressor", "signsgd")
    report = as_json(*asked)
    assert (report["beaten"] if report["winner"] == "signsgd" else [], report["take"]) == (beaten, take)
    assert bool(report["or_type"]) == (beaten == ["none"])
    words = " ".join(run(*asked, width=120).stdout.split())
    assert ("but its lead over fp16 is smaller than this error: try both" in words) == (beaten == ["none"])
    assert (": use fp16" in words) == (report["winner"] == "signsgd" and not beaten)


@pytest.mark.parametrize(
    ("optimizer", "trainings", "best"),
    [("SGD", "with SGD", "terngrad"), ("Adam", "with Adam", "int4"), ("other", "with SGD and with Adam", "int4")],
)
def test_advice_remembers_the_optimizer_of_the_profile(
    optimizer: str, trainings: str, best: str, tmp_path: Path
) -> None:
    """powersgd is the fastest, and lost 6 % with SGD and 8 % with Adam; terngrad lost 8 % with Adam."""
    encode = {"powersgd:rank=4": EncodeTime(0.0), "terngrad": EncodeTime(0.01), "int4": EncodeTime(0.02)}
    found = calibrated(encode=encode)
    file = tmp_path / "profile.json"

    def advised(noise: float, facts: ModelFacts) -> tuple[dict[str, Any], str]:
        save(replace(found, noise=noise, models={"training": facts}, machine={"backend": "ddp"}), file)
        asked = ("--calibration", file, "--world-size", "2", "--bandwidth", "2")
        return as_json(*asked), " ".join(run(*asked, width=120).stdout.split())

    facts = replace(found.models["m"], optimizer=optimizer)
    report, words = advised(0.1, facts)
    assert (report["winner"], report["optimizer"]) == ("powersgd:rank=4", optimizer)
    begin = report["to_begin_with"]
    those = f"Of the methods that lost at most 2% of quality {trainings} in hvdcomp's own training runs, "
    assert begin[0].startswith(f"{those}{best}")
    assert re.search(r"is the fastest, \d\.\d+ times faster than fp16\. Begin with:$", begin[0])
    assert f"hvdcomp.ddp.register(model, hvdcomp.Compression.from_spec('{best}" in begin[1]
    assert " ".join(begin) in words
    assert "Methods to try first" not in words, "it names methods for other optimizers"

    begin = advised(1.5, facts)[0]["to_begin_with"]
    assert re.search(r"times faster than dense, but its lead over fp16 is within the model's error of 150.0%", begin[0])
    assert [best in begin[1], "fp16_compress_hook" in begin[2]] == [True, True]

    begin = advised(9.0, facts)[0]["to_begin_with"]
    assert begin[0].endswith("none is faster than fp16 by more than the model's error of 900.0%: begin with fp16.")

    only_topk = replace(facts, compute=replace(facts.compute, encode={"topk:ratio=0.01": EncodeTime(0.0)}))
    (line,) = advised(0.1, only_topk)[0]["to_begin_with"]
    assert "none was compared here" in line

    report, words = advised(0.1, replace(facts, optimizer=None))
    assert report["to_begin_with"] == []
    assert "Methods to try first: with SGD" in words


def test_a_lead_beyond_the_error_is_one_and_the_line_to_type_works() -> None:
    asked = ("--calibration", OF_2021, "--model", "bert-large")
    report = as_json(*asked)
    spec = report["take"]
    assert spec == report["winner"] == "two_level(powersgd:rank=4)"
    assert report["gain_over_free_percent"] > report["error_percent"]
    words = " ".join(run(*asked, width=120).stdout.split())
    assert f"{spec} over fp16, which works without hvdcomp, is more than the model's error of 13.7%:" in words
    assert f"The encode time of {spec} is an estimate" in words
    assert "The model does not predict accuracy" in words
    assert "The most quality that two_level(powersgd:rank=4) lost in hvdcomp's own small training runs" in words
    for library, call in (("horovod", "hvd.DistributedOptimizer"), ("ddp", "hvdcomp.ddp.register")):
        line = report["to_type"][library]
        assert line in words
        assert call in line
        hvd, ours = Mock(), Mock(Compression=hvdcomp.Compression)
        exec(line, {"hvd": hvd, "hvdcomp": ours, "optimizer": "its optimizer", "model": "its model"})
        if library == "horovod":
            made = hvd.DistributedOptimizer.call_args.kwargs["compression"]
        else:
            model, made, optimizer = ours.ddp.register.call_args.args
            assert (model, optimizer) == ("its model", "its optimizer")
        assert str(made.settings.compressor) == spec


def test_the_line_to_type_is_of_the_library_that_was_calibrated(tmp_path: Path) -> None:
    file = tmp_path / "here.json"
    for backend in ("horovod", "ddp"):
        save(replace(calibrated(), machine={"backend": backend}), file)
        report = as_json("--calibration", file, "--world-size", "2", "--compressor", "fp16")
        assert report["take"] == "fp16"
        assert list(report["to_type"]) == [backend]


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.2])
def test_the_error_is_never_less_than_that_of_the_model(noise: float) -> None:
    """randomk is 4 % faster than fp16 here: no calibration, however quiet, can tell that."""
    found = replace(calibrated(encode={"randomk:ratio=0.01": EncodeTime(0.04)}), noise=noise)
    adviser = Adviser(found, specs=["randomk:ratio=0.01"])
    advice = adviser.advise(Setting(2, 8.7 * GBPS))
    assert advice.winner == "randomk:ratio=0.01"
    assert advice.free == advice.take == "fp16"
    assert advice.error == max(noise, MODEL_ERROR)
    assert advice.winner in advice.alike
    clear = adviser.advise(Setting(2, 2 * GBPS))
    assert clear.take == "randomk:ratio=0.01"


def test_sign_sgd_on_eight_ranks_is_what_the_manual_says() -> None:
    """Figures 6 to 8 have nothing faster than dense; the model puts SignSGD ahead there, by less than its error."""
    report = as_json(*PRESET, "--world-size", "8", "--compressor", "signsgd")
    assert (report["winner"], report["take"]) == ("signsgd", "none")
    said = " ".join(run(*PRESET, "--world-size", "8", "--compressor", "signsgd", width=120).stdout.split())
    assert "signsgd over dense, which works without hvdcomp, is within the model's error of 13.7%: use" in said
    page = " ".join((DOCS / "performance-model-formulas.md").read_text().split())
    assert f"hvdcomp advise --calibration {OF_2021} --model resnet50 --world-size 8 --compressor signsgd" in page
    assert f"on 8 ranks SignSGD is {report['gain_over_free_percent']:.0f} % faster than dense" in page


# Methods and models without a time of their own ----------------------------------------------------------------------


def without_encode(tensors: tuple[TensorInfo, ...]) -> Calibration:
    model = ModelFacts(tensors, Compute(0.1, 0.05), bucket_bytes=25e6)
    return replace(calibrated(), models={"mine": model})


def test_a_model_without_encode_times_gets_those_of_our_kernels(tmp_path: Path) -> None:
    """Without a card, those of an H100."""
    file = tmp_path / "mine.json"
    save(without_encode((TensorInfo("w", (5000, 5112)),)), file)
    assert "No compressor was compared" in run("--calibration", file, "--compressor", "fp16", width=120).stdout
    report = as_json("--calibration", file)
    assert set(KERNELS) <= set(report["methods"])
    assert all(row["estimated"] for spec, row in report["methods"].items() if spec not in ("none", "fp16"))
    own = encode_time("topk:ratio=0.01", CARDS["h100"], 5000 * 5112)
    assert report["methods"]["topk:ratio=0.01"]["encode_ms"] == pytest.approx(1e3 * float(own.seconds(64)))
    assert any("to NVIDIA H100 SXM5 80GB" in note for note in report["notes"])
    assert as_json("--calibration", file, "--compressor", "int8")["methods"]["int8"]["estimated"]


def test_a_model_without_encode_times_gets_those_of_the_nearest_model_beside_it() -> None:
    known = without_encode((TensorInfo("w", (1000, 1000)),))
    measured = known.models["mine"]
    small = replace(measured, compute=replace(measured.compute, encode={"topk:ratio=0.1": EncodeTime(0.01)}))
    large = replace(small, tensors=(TensorInfo("w", (4000, 1000)),))
    asked = replace(measured, tensors=(TensorInfo("w", (3000, 1000)),))
    cast = EncodeTime(0.001)
    asked = replace(asked, compute=replace(asked.compute, encode={"none": cast, "fp16": cast}))
    adviser = Adviser(replace(known, models={"small": small, "asked": asked, "large": large}), "asked")
    assert list(adviser.compressors) == ["none", "fp16", "topk:ratio=0.1"]
    assert adviser.encode["topk:ratio=0.1"] == EncodeTime(
        0.0075,
        source="estimated: the encode time of large times 0.75, the ratio of the two models' numbers of elements",
        estimated=True,
    )
    assert adviser.encode["none"] == cast
    with pytest.raises(CalibrationError, match="no encode time of 'int8' for asked; it has encode times of: none"):
        Adviser(replace(known, models={"small": small, "asked": asked}), "asked", ["int8"])


@pytest.mark.parametrize(
    "preset",
    [pytest.param(preset, marks=() if preset in ("h100x8", OF_2021) else pytest.mark.thorough) for preset in presets()],
)
def test_all_presets_know_the_methods_and_models_of_today(preset: str) -> None:
    known = load(preset)
    assert {"bert-large", "vit-l-16", "gpt2", "resnet101"} < set(known.models)
    for model, facts in known.models.items():
        if facts.sharded:
            continue
        adviser = Adviser(known, model)
        gathered = ("bf16", "int8", "int4", "fp8", "eden", "eden:bits=1", "eden:scaled=True", "eden:bits=1,scaled=True")
        scattered = [str(replace(parse_compressor(spec), exchange="scatter")) for spec in gathered[1:]]
        for spec in (*gathered, *scattered):
            for one in (spec, *[f"two_level({spec})"] * ("scaled" not in spec)):
                assert (encode := adviser.encode[one]) is not None, one
                measured = one in ("int8", "fp8") and facts.shapes in CARDS[known.card].measured
                assert encode.estimated != (measured and preset != OF_2021), one


def test_ratios_of_a_cpu_give_what_is_not_published_of_a_gpu() -> None:
    for name, measured_beside in {
        "presets.json": {**dict.fromkeys(("int8", "int4", "fp8"), "qsgd:bits=2"), "bf16": "signsgd"},
        "presets-sparsifiers.json": {"topkc:ratio=0.01": "mstopk:ratio=0.01"},
        "presets-rotated.json": dict.fromkeys(("eden", "eden:bits=1"), "qsgd:bits=2"),
        "presets-scales.json": {"eden:scaled=True": "eden", "eden:bits=1,scaled=True": "eden:bits=1"},
    }.items():
        stored = json.loads((DOCS / "encode" / name).read_text())
        cpu = {one["method"]: one["cpu_ms"] for one in stored["measurements"]}
        for spec, beside in measured_beside.items():
            assert KNOWN[spec].encode_s == pytest.approx(KNOWN[beside].encode_s * cpu[spec] / cpu[beside], abs=5e-4)
            assert KNOWN[spec].estimated
            assert f"docs/encode/{name}" in KNOWN[spec].source


# Counting -------------------------------------------------------------------------------------------------------------


def counted(*arguments: str | Path) -> list[dict[str, str]]:
    result = run("--count", *arguments)
    assert result.exit_code == 0, result.output
    return list(csv.DictReader(result.stdout.splitlines()))


@pytest.mark.thorough
def test_set_ups_in_which_compression_pays_are_counted() -> None:
    """Each is what `advise` says of it."""
    specs = ["powersgd:rank=4", "two_level(int4:exchange=scatter)", "topk:ratio=0.01"]
    rows = counted("--calibration", "v100x8", *named(*specs))
    (row,) = (one for one in rows if one["model"] == "bert-large")
    adviser = Adviser(load("v100x8"), "bert-large", specs)
    found = [
        adviser.advise(Setting(ranks, batch_size=batch))
        for ranks in (8, 16, 32, 64, 96, 128)
        for batch in (4, 8, 16, 32)
    ]
    assert int(row["setups"]) == len(found)
    for method, key in (("none", "dense_fastest"), ("fp16", "fp16_fastest")):
        assert int(row[key]) == sum(one.winner == method for one in found)
    assert int(row["compressor_fastest"]) == sum(one.winner not in ("none", "fp16") for one in found)
    assert int(row["compressor_taken"]) == sum(one.take not in ("none", "fp16") for one in found) > 0
    gains = [one.methods[one.free or ""].step_s / one.methods[one.winner or ""].step_s - 1 for one in found]
    assert float(row["largest_gain_percent"]) == pytest.approx(100 * max(gains), abs=0.1)


def test_without_a_batch_size_or_a_compressor_there_is_less_to_count(tmp_path: Path) -> None:
    file = tmp_path / "here.json"
    save(calibrated(), file)
    (row,) = counted("--calibration", file, "--compressor", "fp16")
    assert (row["setups"], row["fp16_fastest"], row["compressor_fastest"], row["often"]) == ("6", "6", "0", "")
    assert "leave out --world-size, --json" in error("--count", "--world-size", "8", "--json")
    assert "unknown compressor 'foo'" in error("--count", "--compressor", "foo")


def test_set_ups_are_listed_one_by_one(tmp_path: Path) -> None:
    """At 1 (the calibration's rate), 10 and 25 Gb/s, with the times of a ring and of an allgather of 100 MB. Some leads
    are within the model's error."""
    file = tmp_path / "here.json"
    times = {"randomk:ratio=0.01": 0.07, "signsgd": 0.0, "topk:ratio=0.01": 9.0}
    save(calibrated(encode={spec: EncodeTime(seconds) for spec, seconds in times.items()}), file)
    result = run("--setups", "--calibration", file, *named(*times))
    assert result.exit_code == 0, result.output
    rows = list(csv.DictReader(result.stdout.splitlines()))
    adviser = Adviser(load(file), specs=list(times))
    setups = [(ranks, gbps) for ranks in (8, 16, 32, 64, 96, 128) for gbps in (1, 10, 25)]
    assert len(rows) == len(setups) * len(times)
    for at, (ranks, gbps) in enumerate(setups):
        ring, gathered = 1600 * (ranks - 1) / ranks / gbps, 800 * (ranks - 1) / gbps
        dense, fp16 = 100 + ring, 100 + ring / 2
        expected = (170 + ring / 100, 100 + gathered / 32, 9100 + gathered * 1.5 / 100)
        take = adviser.advise(Setting(ranks, gbps * GBPS)).take
        for method, step, row in zip(times, expected, rows[3 * at :], strict=False):
            known = ("test", "", "m", method, str(ranks), "", f"{gbps}.0")
            assert tuple(row.values())[:7] == known
            milliseconds = [float(row[key]) for key in ("step_ms", "dense_ms", "fp16_ms")]
            assert milliseconds == pytest.approx([step, dense, fp16], rel=1e-3)
            assert float(row["gain_percent"]) == pytest.approx(100 * (min(dense, fp16) / step - 1), abs=0.1)
            assert (row["taken"], row["estimated"]) == (str(take == method), "False")
    assert {row["method"] for row in rows if row["taken"] == "True"} == {"randomk:ratio=0.01", "signsgd"}
    assert any(0 < float(row["gain_percent"]) < 10 for row in rows)
    assert "--setups uses a fixed list of set-ups: leave out --json" in error("--setups", "--json")
    assert "no compressor except none and fp16 can be used" in error("--setups", "--compressor", "fp16")


@pytest.mark.thorough
def test_the_counts_of_the_manual_are_what_the_command_makes() -> None:
    stored = (DOCS / "performance-model" / "count.csv").read_text().splitlines()
    assert counted() == list(csv.DictReader(stored))


# Sweeps ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "points"),
    [
        ("bandwidth=0.1..100", 200),
        ("world_size=2..8", 7),
        *(
            pytest.param(*axis, marks=pytest.mark.thorough)
            for axis in (("world_size=2..64", 63), ("batch=16,32", 2), ("compute=1..4", 200), ("encode=1,2", 2))
        ),
    ],
)
def test_sweeps_are_drawn_and_written(text: str, points: int, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "sweep.png"
    result = run(*PRESET, "--sweep", text, "--output", file, "--json")
    assert result.exit_code == 0, result.output
    assert file.read_bytes().startswith(b"\x89PNG")
    swept = json.loads(result.stdout)["sweep"]
    assert swept["axis"] == text.partition("=")[0]
    assert len(swept["values"]) <= points
    assert len(swept["values"]) > 1
    assert all(len(times) == len(swept["values"]) for times in swept["step_ms"].values())
    assert len(swept["least_compression_factor"]) == len(swept["values"])


def test_a_sweep_is_each_setting_in_turn() -> None:
    adviser = Adviser(load(OF_2021), "resnet50")
    values = np.array([1.0, 2.0, 4.0])
    settings = {
        "bandwidth": lambda x: Setting(64, x * GBPS),
        "world_size": lambda x: Setting(x),
        "batch": lambda x: Setting(64, batch_size=x),
        "compute": lambda x: Setting(64, compute_speed=x),
        "encode": lambda x: Setting(64, encode_speed=x, payload=3 * x),
    }
    for axis, setting in settings.items():
        swept = sweep(adviser, Setting(64), axis, values, 3 if axis == "encode" else None)
        for spec, times in swept.step_s.items():
            assert times.tolist() == pytest.approx([float(adviser.step_s(spec, setting(x))) for x in values])
        assert swept.least_factor.tolist() == pytest.approx(
            [float(adviser.least_factor(setting(x))) for x in values], nan_ok=True
        )


def test_ranges() -> None:
    name, values = parse_axis("bandwidth = 1 .. 100")
    assert (name, values[0], values[-1], len(values)) == ("bandwidth", 1, 100, 200)
    assert np.ptp(np.diff(np.log(values))) < 1e-9
    name, values = parse_axis("world_size=1..8")
    assert values.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert parse_axis("batch=64,16,16")[1].tolist() == [16, 64]


@pytest.mark.parametrize(
    "text",
    [
        *("speed=1..2", "bandwidth", "bandwidth=1", "bandwidth=2..1", "bandwidth=0..1", "bandwidth=a..b"),
        *("batch=1.5..3", "bandwidth=1..inf", "bandwidth=nan..2", "world_size=", "encode=1,-2"),
    ],
)
def test_wrong_ranges_are_refused(text: str) -> None:
    assert f"'{text}'" in error(*PRESET, "--sweep", text)


def test_without_matplotlib_a_plot_says_what_to_install(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from hvdcomp.tools.cli import main\n"
        f"main(['advise', '--model', 'resnet50', '--sweep', 'batch=1..9', '--output', {str(tmp_path / 'x.png')!r}])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 1
    assert "pip install 'hvdcomp[plot]'" in result.stderr
    assert "Fastest: " in result.stdout


# Errors ---------------------------------------------------------------------------------------------------------------


def test_errors(tmp_path: Path) -> None:
    assert "vit-l-16, dlrm, but 'vgg16' is not one of them" in error("--model", "vgg16")
    assert "'a100' is neither a file nor a preset; the presets are: a100x8" in error("--calibration", "a100")
    unknown = error(*PRESET, "--compressor", "natural")
    assert "no encode time of 'natural' for resnet50; it has encode times of: powersgd:rank=4" in unknown
    assert "unknown compressor 'foo'" in error(*PRESET, "--compressor", "foo")
    nothing = "has a name that matches 'features.*' (the nearest names are 'fc.bias', 'fc.weight',"
    assert nothing in error(*PRESET, "--compressor", '{"features.*": "fp16", "*": "none"}')
    assert "--output needs --sweep or --map" in error(*PRESET, "--output", tmp_path / "x.png")
    assert "growth works only in a sweep over encode" in error(*PRESET, "--sweep", "batch=1..2", "--growth", "2")
    assert "nan is not a bandwidth; write a number of Gb/s above 0, or a rate such as 100mbit" in error(
        *PRESET, "--bandwidth", "nan"
    )
    assert "'1gbt' is not a rate" in error(*PRESET, "--bandwidth", "1gbt")
    no_batch = tmp_path / "no-batch.json"
    content = json.loads((DOCS.parent / "hvdcomp/perfmodel/presets/v100-p3.8xlarge-2021.json").read_text())
    del content["models"]["bert-base"]["batch_size"]
    no_batch.write_text(json.dumps(content))
    batch = ("--model", "bert-base", "--batch", "8")
    assert "does not contain the batch size for which" in error("--calibration", no_batch, *batch)
    wrong = tmp_path / "wrong.json"
    wrong.write_text("{")
    assert "is not JSON" in error("--calibration", wrong)
    missing = tmp_path / "no" / "x.png"
    pytest.importorskip("matplotlib")
    assert "cannot be written: No such file" in error(*PRESET, "--sweep", "batch=1..2", "--output", missing)


@pytest.mark.parametrize(("option", "value"), [("--world-size", "0"), ("--batch", "0"), ("--bandwidth", "0")])
def test_numbers_out_of_range(option: str, value: str) -> None:
    assert f"Invalid value for '{option}'" in error(*PRESET, option, value)


# Weight and documentation ---------------------------------------------------------------------------------------------


def test_the_model_needs_no_framework() -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['torch', 'tensorflow', 'horovod', 'mpi4py', 'matplotlib']))\n"
        "from hvdcomp.tools.cli import main; main(['advise', '--model', 'resnet50', '--world-size', '8'])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "Fastest" in result.stdout


def test_the_figure_of_the_manual_is_what_its_command_makes(tmp_path: Path) -> None:
    stored = json.loads((DOCS / "performance-model" / "bandwidth.json").read_text())
    pytest.importorskip("matplotlib")
    page = (DOCS / "performance-model.md").read_text().replace("\\\n", " ")
    command = next(line for line in page.splitlines() if "--output bandwidth.png --json > bandwidth.json" in line)
    words = [str(tmp_path / "x.png") if word == "bandwidth.png" else word for word in shlex.split(command)[2:-3]]
    made = as_json(*words)
    assert made["sweep"]["values"] == pytest.approx(stored["sweep"]["values"])
    for spec, times in stored["sweep"]["step_ms"].items():
        assert made["sweep"]["step_ms"][spec] == pytest.approx(times, rel=1e-4)
    assert {spec: row["limited_by"] for spec, row in made["methods"].items()} == {
        spec: row["limited_by"] for spec, row in stored["methods"].items()
    }
