"""Candidates of `auto` that nobody named: what is proposed on slow and fast networks, and what evidence forbids."""

from __future__ import annotations

import csv
import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import hvdcomp
from benchmarks.steps import proposals
from hvdcomp import Auto, Compression, ErrorFeedback, SpecError
from hvdcomp.adaptation.candidates import candidates_of
from hvdcomp.communicators.in_process import InProcessCommunicator, run_ranks
from hvdcomp.compressors import evidence
from hvdcomp.compressors.evidence import DIVERGED, Evidence
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.exchange.engine import Engine
from hvdcomp.perfmodel import Adviser, Criteria, Setting, load, propose
from hvdcomp.perfmodel.calibration import OTHER
from hvdcomp.perfmodel.proposals import MOST, REACH
from hvdcomp.policies import parse_policy
from hvdcomp.policies.request import Candidates
from hvdcomp.tools.commands.advise import to_begin_with
from tests.harness import infos

DOCS = Path(__file__).parents[2] / "docs"

SHAPES = {"conv": (64, 32, 3, 3), "linear": (1000, 1280), "bias": (1000,)}
ENCODE_S = {
    "natural": 0.002, "terngrad": 0.004, "globalqsgd": 0.003, "powersgd:rank=4": 0.003, "topk:ratio=0.01": 0.002,
    "qsgd:bits=4": 0.001, "int8": 0.001, "int4": 0.001, "fp8": 0.0001,
}  # fmt: skip


TRAININGS = (
    Evidence(
        "SGD", "images", "accuracy",
        {"topk:ratio=0.01": 0.19, "powersgd:rank=4": 0.009, "int4": 0.18, "qsgd:bits=4": DIVERGED, "natural": 0.0},
    ),
    Evidence(
        "SGD", "text", "loss",
        {"topk:ratio=0.01": 0.17, "terngrad": 0.015, "natural": 0.0, "globalqsgd": -0.004, "qsgd:bits=4": 0.045},
    ),
    Evidence("Adam", "text", "loss", {"int8": -0.001, "int4": 0.007, "powersgd:rank=4": 0.085}),
)  # fmt: skip


@pytest.fixture
def trainings(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known of methods, whatever the latest measurement says."""
    monkeypatch.setattr(evidence, "evidence", lambda: TRAININGS)


needs_trainings = pytest.mark.usefixtures("trainings")


def calibration(bytes_per_s: float, encode_s: Mapping[str, float] = ENCODE_S) -> dict[str, Any]:
    cost = {"algorithm": "ring", "latency_s": 1e-5, "bytes_per_s": bytes_per_s}
    model = {
        "tensors": [{"name": name, "shape": list(shape)} for name, shape in SHAPES.items()],
        "backward_s": 0.010, "forward_s": 0.005, "bucket_bytes": 2e6,
        "encode": {spec: {"encode_s": seconds, "decode_per_rank_s": 1e-5} for spec, seconds in encode_s.items()},
    }  # fmt: skip
    network = {"allreduce": cost, "allgather": {**cost, "algorithm": "direct"}}
    return {
        "format": "hvdcomp-calibration", "version": 1, "name": "test", "models": {"mine": model}, "network": network,
    }  # fmt: skip


def proposed(
    tmp_path: Path, content: dict[str, Any], criteria: Criteria, own: str = "none", others: tuple[str, ...] = ()
) -> tuple[Candidates, list[str]]:
    """The candidates of two ranks, and what rank 0 says of what is missing."""
    file = tmp_path / "cluster.json"
    file.write_text(json.dumps(content))

    def work(communicator: InProcessCommunicator) -> Candidates | None:
        if communicator.rank:
            return None  # rank 0 alone is asked
        engine = Engine(communicator, infos(SHAPES), parse_compressor(own))
        return candidates_of(engine, str(file), others=others, criteria=criteria)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = run_ranks(2, work)[0]
    assert found is not None
    return found, [str(one.message) for one in caught if str(one.message).startswith("the policy auto ")]


def whole(found: Candidates) -> list[str]:
    """The candidates that are no mixtures, the fastest first."""
    names = [name for name in found.candidates if " and " not in name]
    return sorted(names, key=lambda name: found.candidates[name].seconds)


@needs_trainings
def test_on_a_slow_network_the_fastest_that_evidence_allows_are_proposed(tmp_path: Path) -> None:
    """Of SGD: not topk, which harms the loss, nor qsgd, which diverged, nor int4 and fp8, though they are faster."""
    found, said = proposed(tmp_path, calibration(2e7), Criteria(0.02, "SGD"))
    compressed = [name for name in whole(found) if name not in ("dense", "fp16")]
    assert compressed[0] == "powersgd:rank=4"
    assert whole(found)[0] == "powersgd:rank=4"
    assert "powersgd:rank=4 and dense" in found.candidates
    assert set(compressed) <= {"powersgd:rank=4", "terngrad", "natural", "globalqsgd"}
    fastest = found.candidates[compressed[0]].seconds
    assert all(found.candidates[name].seconds <= (1 + REACH) * fastest for name in compressed)
    assert said == []
    adviser = Adviser(load(tmp_path / "cluster.json"))
    for name in compressed:
        assert found.candidates[name].seconds == float(adviser.step_s(name, Setting(2)))
        assert found.candidates[name].rest == name


@pytest.mark.parametrize(
    ("of_one_bit", "optimizer", "proposed_spec"),
    [
        (0.013, "SGD", "eden:bits=1"),
        (0.013, "Adam", "eden:bits=1"),
        (0.013, None, "eden:bits=1"),
        (0.021, "Adam", "eden"),  # another level of the same method
        (0.021, None, "eden"),
        (0.3, "SGD", "eden:bits=1"),  # only harmful with Adam
    ],
)
def test_a_method_is_proposed_and_advised_once_its_trainings_are_measured(
    of_one_bit: float, optimizer: str | None, proposed_spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = (
        Evidence("SGD", "images", "accuracy", {"eden": -0.001, "eden:bits=1": 0.004}),
        Evidence("Adam", "text", "loss", {"eden": 0.002, "eden:bits=1": of_one_bit}),
    )
    content = calibration(2e7, {**ENCODE_S, "powersgd:rank=4": 1.0, "eden": 0.001, "eden:bits=1": 0.001})
    monkeypatch.setattr(evidence, "evidence", lambda: TRAININGS)
    found, _ = proposed(tmp_path, content, Criteria(0.02, optimizer))
    assert not {"eden", "eden:bits=1"} & set(found.candidates), "nothing is known of them yet"
    monkeypatch.setattr(evidence, "evidence", lambda: (*TRAININGS, *new))
    found, said = proposed(tmp_path, content, Criteria(0.02, optimizer))
    assert {"eden", "eden:bits=1"} & set(found.candidates) == {proposed_spec}
    assert whole(found)[0] == proposed_spec
    assert said == []
    adviser = Adviser(load(tmp_path / "cluster.json"))
    adviser.facts = replace(adviser.facts, optimizer=optimizer or OTHER)
    line, *to_type = to_begin_with(adviser, adviser.advise(Setting(2)))
    assert f", {proposed_spec}" in line
    assert "is the fastest, " in line
    assert any(f"from_spec('{proposed_spec}" in one for one in to_type)


@needs_trainings
def test_on_a_fast_network_a_single_one_is_left(tmp_path: Path) -> None:
    encode_s = {spec: 10 * seconds for spec, seconds in ENCODE_S.items()}
    found, _ = proposed(tmp_path, calibration(1e11, encode_s), Criteria(0.02, "SGD"))
    assert whole(found)[0] in ("dense", "fp16")
    assert len(set(whole(found)) - {"dense", "fp16"}) == 1  # should the network become slower


@needs_trainings
def test_the_optimizer_decides(tmp_path: Path) -> None:
    content = calibration(2e7)
    with_adam = set(whole(proposed(tmp_path, content, Criteria(0.02, "Adam"))[0])) - {"dense", "fp16"}
    assert "int4" in with_adam
    assert with_adam <= {"int4", "int8"}
    with_more_loss = set(whole(proposed(tmp_path, content, Criteria(0.1, "Adam"))[0]))
    assert "powersgd:rank=4" in with_more_loss
    unknown, said = proposed(tmp_path, content, Criteria(0.1, None))
    assert "powersgd:rank=4" in unknown.candidates  # the one that both allow
    assert not {"int4", "int8", "terngrad"} & set(unknown.candidates)
    assert said == []


@needs_trainings
@pytest.mark.parametrize(
    ("criteria", "words"),
    [
        (
            Criteria(0.02, None),
            r"with SGD and with Adam, no .*\. Give a larger .* or the training run's optimizer as opt",
        ),
        (Criteria(0.00001, "SGD"), None),  # natural had the loss of dense
        (Criteria(0.02, "Adam"), None),
        (
            Criteria(0.02, "Lion"),
            r"training runs with Lion, no compressor kept the loss within 2\.00% of uncompressed training\. "
            r"Give a larger loss= or your",
        ),
    ],
)
def test_where_evidence_allows_nothing_rank_0_says_the_way_out(
    criteria: Criteria, words: str | None, tmp_path: Path
) -> None:
    found, said = proposed(tmp_path, calibration(2e7), criteria)
    assert (set(found.candidates) == {"dense", "fp16"}) == (words is not None)
    assert len(said) == (words is not None)
    if words is not None:
        assert re.search(words, said[0])


@needs_trainings
def test_a_method_without_an_encode_time_is_left_out_and_named(tmp_path: Path) -> None:
    encode_s = {spec: seconds for spec, seconds in ENCODE_S.items() if spec in ("int4", "natural", "powersgd:rank=4")}
    found, said = proposed(tmp_path, calibration(2e7, encode_s), Criteria(0.02, "SGD"))
    assert "powersgd:rank=4" in found.candidates
    (words,) = said
    assert "\n" not in words
    leaves_out = r"the policy auto leaves out compressors that loss=0\.02 allows, because .* for this model: terngrad"
    assert re.match(leaves_out, words)
    assert words.endswith("calibrate with --compressor 'terngrad' --compressor 'globalqsgd'")


@needs_trainings
def test_what_the_user_named_stays_and_goes_with_what_is_proposed(tmp_path: Path) -> None:
    """qsgd:bits=4 cannot take turns with error feedback, so that powersgd is left out."""
    found, _ = proposed(tmp_path, calibration(2e7), Criteria(0.02, "SGD"), "topk:ratio=0.01", ("int4",))
    assert {"topk:ratio=0.01", "int4", "powersgd:rank=4"} <= set(found.candidates)
    found, _ = proposed(tmp_path, calibration(2e7), Criteria(0.02, "SGD"), "qsgd:bits=4")
    assert "qsgd:bits=4" in found.candidates
    assert "powersgd:rank=4" not in found.candidates
    found, _ = proposed(tmp_path, calibration(2e7), Criteria(0.02, "SGD"), "none", ("powersgd:rank=4",))
    assert list(found.candidates).count("powersgd:rank=4") == 1


@needs_trainings
@pytest.mark.parametrize("named", [False, True])
def test_two_levels_where_the_user_has_named_some(named: bool, tmp_path: Path) -> None:
    """Only then all ranks have found out in the first step that there are nodes of as many ranks."""
    content = calibration(2e7)
    costs = dict(content["network"])
    fast = {kind: {**cost, "bytes_per_s": 1e10} for kind, cost in costs.items()}
    both = {"node": {**fast, "reducescatter": fast["allreduce"]}, "across": costs}
    content["network"]["levels"] = {"ranks_per_node": 2, **both}
    others = ("two_level(topk:ratio=0.01)",) if named else ()
    found, _ = proposed(tmp_path, content, Criteria(0.02, "Adam"), others=others)
    assert ("two_level(int4)" in found.candidates) == named


@needs_trainings
def test_a_handful_of_different_kinds() -> None:
    times = {spec: 1.0 + place / 1000 for place, spec in enumerate(ENCODE_S)}

    def seconds_of(compressor: Any) -> float | None:
        return 1.0 if compressor.name == "powersgd" else times.get(str(compressor), 1.1)

    found = propose(Criteria(0.9, "SGD"), [], seconds_of, 1.2)
    kinds = [parse_compressor(spec).name for spec in found.specs]
    assert len(set(kinds)) == len(kinds) == MOST
    assert kinds[0] == "powersgd"
    assert propose(Criteria(0.9, "SGD"), [], lambda one: 2.0 if one.name == "onebit" else 3.0, 1.0).specs[1:] == ()


@needs_trainings
@pytest.mark.parametrize("spec", ["auto:calibration=c.json,loss=2", "auto:calibration=c.json,loss=-0.1"])
def test_a_share_that_is_none(spec: str) -> None:
    with pytest.raises(SpecError, match=r"auto: loss=.* is not allowed; it must be from 0 to below 1, such as 0.02"):
        parse_policy(spec)


@needs_trainings
def test_a_memory_of_the_users_has_no_evidence() -> None:
    auto = Auto(calibration="v100-p3.8xlarge-2021", loss=0.02)
    for compressor, memory, words in (
        (hvdcomp.NoCompression(), ErrorFeedback(), "memory=error_feedback"),
        (hvdcomp.DGC(ratio=0.01), None, "dgc:ratio=0.01"),
    ):
        with pytest.raises(SpecError, match=f"loss=0.02 does not work with {words}: .* omit loss, and list the"):
            Compression(compressor, memory=memory, policy=auto)
    assert str(auto) == "auto:calibration=v100-p3.8xlarge-2021,loss=0.02"
    assert parse_policy(str(auto)) == auto


def test_what_it_would_have_chosen_where_steps_were_measured() -> None:
    """The page is what the command prints, and of all rows the choice is the fastest that evidence allows, or near."""
    done = CliRunner().invoke(proposals.main, [str(DOCS / "steps-measured.json")])
    assert done.exit_code == 0, done.output
    assert done.stdout == (DOCS / "auto-proposals.csv").read_text()
    rows = list(csv.DictReader(done.stdout.splitlines()))
    assert all(row["behind_percent"] == "0.0" for row in rows if row["loss"] == "0.2")
    others = {(row["chosen"], row["fastest"], row["fastest_lost_percent"]) for row in rows if row["loss"] == "0.02"}
    assert others == {("eden:bits=1,exchange=auto", "topk:ratio=0.01", "10.8")}, "the fastest lost more than is allowed"
    assert max(float(row["behind_percent"]) for row in rows) < 35
    assert all(row["chosen"] == row["fastest_allowed"] for row in rows)


def test_a_file_that_holds_no_steps(tmp_path: Path) -> None:
    file = tmp_path / "steps.json"
    for content, words in (("{}", "was not written by `python -m"), ('{"runs": []}', "contains no measured steps")):
        file.write_text(content)
        done = CliRunner().invoke(proposals.main, [str(file)])
        assert done.exit_code == 1
        assert words in done.output
