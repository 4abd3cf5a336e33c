"""What is known of methods by measured trainings: the file says what the trainings say, and the worst counts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hvdcomp.compressors import COMPRESSORS as COMPRESSOR_NAMES
from hvdcomp.compressors import evidence
from hvdcomp.compressors.evidence import DIVERGED, Evidence, in_words, lost_with, measured_specs
from hvdcomp.compressors.first import FIRST, RECOMMENDED
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.perfmodel.quality import HARMLESS
from hvdcomp.tools.commands.calibrate import COMPRESSORS
from hvdcomp.tools.commands.calibrate import command as calibrate
from hvdcomp.tools.commands.profile import command as profile
from tests.loaded import load_benchmark
from tests.readme import README

FILE = Path(evidence.__file__).with_name("evidence.json")


def test_the_file_is_made_of_the_trainings() -> None:
    """If not: `python benchmarks/convergence.py --page-only --evidence hvdcomp/compressors/evidence.json`."""
    benchmark: Any = load_benchmark("convergence")
    runs = load_benchmark("pages").MEASURED / "convergence"
    tables = benchmark.tables_of(runs, benchmark.seeds_there(runs), {})
    assert json.loads(FILE.read_text()) == benchmark.evidence_of(tables)


def test_all_specs_are_spelt_as_compressors_print() -> None:
    assert measured_specs()
    assert all(str(parse_compressor(spec)) == spec for spec in measured_specs())


def test_what_to_try_first_was_measured() -> None:
    for optimizer, specs in FIRST.items():
        assert all(lost_with(parse_compressor(spec), optimizer) is not None for spec in specs)


def test_what_is_recommended_is_measured_unless_others_are_named() -> None:
    """Else `auto` and `advise` leave out, for want of an encode time, the very methods to begin with."""
    assert set(RECOMMENDED) == {spec for specs in FIRST.values() for spec in specs} <= set(COMPRESSORS)
    assert len(set(COMPRESSORS)) == len(COMPRESSORS)
    for command in (calibrate, profile):
        (option,) = (option for option in command.params if option.name == "specs")
        assert option.default == COMPRESSORS
    for optimizer in FIRST:
        lost = [lost_with(parse_compressor(spec), optimizer) for spec in COMPRESSORS if spec != "fp16"]
        assert any(one is not None and one <= HARMLESS for one in lost), f"auto:loss=0.02 proposes none for {optimizer}"


def test_what_the_readme_tells_to_begin_with_is_measured_and_recommended() -> None:
    table = README.read_text(encoding="utf-8").partition("<!-- which method -->")[2].partition("\n\n")[0]
    named = re.findall(r"`([^`]+)`", "".join(row.split("|")[2] for row in table.strip().splitlines()))
    specs = [spec for spec in named if spec.partition(":")[0] in COMPRESSOR_NAMES]
    assert len(specs) >= 5
    assert set(RECOMMENDED) <= set(specs) <= set(COMPRESSORS)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three trainings, of which two are with SGD."""
    found = (
        Evidence("SGD", "images", "accuracy", {"topk:ratio=0.01": 0.019, "int4": 0.002, "qsgd:bits=2": DIVERGED}),
        Evidence("SGD", "text", "loss", {"topk:ratio=0.01": 0.017, "int4": 0.003, "qsgd:bits=2": 0.01}),
        Evidence("Adam", "text", "loss", {"int4": 0.009, "int8": -0.001}),
    )
    monkeypatch.setattr(evidence, "evidence", lambda: found)


def lost(spec: str, optimizer: str | None) -> float | None:
    return lost_with(parse_compressor(spec), optimizer)


@pytest.mark.usefixtures("few")
def test_the_worst_training_counts() -> None:
    assert lost("topk:ratio=0.01", "SGD") == 0.019
    assert lost("int4", "SGD") == 0.003
    assert lost("qsgd:bits=2", "SGD") == DIVERGED


@pytest.mark.usefixtures("few")
def test_what_is_not_known_of_a_method_or_an_optimizer() -> None:
    assert lost("int4", None) == lost("int4", "Adam") == 0.009  # the worst of both
    assert lost("int8", None) is None  # not measured with SGD
    assert lost("int4:exchange=scatter", "Adam") is None
    assert lost("powersgd:rank=3", "SGD") is None
    assert lost("two_level(int4)", "Adam") == 0.009


@pytest.mark.usefixtures("few")
def test_a_sentence_on_a_method() -> None:
    assert "points of accuracy: with SGD 0.3, with Adam 0.9 (docs/" in in_words(parse_compressor("int4"))
    assert "with SGD it diverged (docs" in in_words(parse_compressor("qsgd:bits=2"))
    assert "quality with two_level(int4)" in in_words(parse_compressor("two_level(int4)"))
    assert "did not measure what fp8 costs in accuracy" in in_words(parse_compressor("fp8"))
