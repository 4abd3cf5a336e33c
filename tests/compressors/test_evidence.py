"""What is known of methods by measured trainings: the file says what the trainings say, and the worst counts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.best_rates import which_method
from benchmarks.pages import MEASURED
from benchmarks.quality import convergence
from benchmarks.trainings import seeds_there
from hvdcomp.compressors import COMPRESSORS as COMPRESSOR_NAMES
from hvdcomp.compressors import evidence
from hvdcomp.compressors.evidence import (
    DIVERGED,
    FIRST,
    RECOMMENDED,
    Evidence,
    in_words,
    lost_with,
    measured_specs,
    steps_in_words,
)
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.perfmodel.quality import HARMLESS
from hvdcomp.tools.commands.calibrate import COMPRESSORS
from hvdcomp.tools.commands.calibrate import command as calibrate
from hvdcomp.tools.commands.profile import command as profile
from tests.readme import README

FOLDER = Path(evidence.__file__).parent


def test_the_file_of_best_rates_is_made_of_the_trainings() -> None:
    """If not: `python -m benchmarks.best_rates.which_method`."""
    assert json.loads((FOLDER / "evidence.json").read_text()) == which_method.evidence_of(which_method.RUNS)


def test_the_file_of_one_rate_is_made_of_the_trainings() -> None:
    """If not: `python -m benchmarks.quality.convergence --page-only --evidence FILE`, with the path of this file."""
    runs = MEASURED / "convergence"
    tables = convergence.tables_of(runs, seeds_there(runs), {})
    assert json.loads((FOLDER / "evidence_one_rate.json").read_text()) == convergence.evidence_of(tables)


def test_a_result_at_best_rates_replaces_that_of_the_same_method_optimizer_and_task() -> None:
    at_one_rate = [
        Evidence("Adam", "gpt", "loss", {"terngrad": 0.08, "int4": 0.003}),
        Evidence("SGD", "lstm", "loss", {"terngrad": 0.01, "topk:ratio=0.01": 0.09}),
        Evidence("CompressedAdam", "gpt-frozen", "loss", {"efsignsgd": -0.04}),
        evidence._WITH_MUON,
    ]

    def at_best(optimizer: str, training: str, *specs: str) -> Evidence:
        return Evidence(optimizer, training, "loss", dict.fromkeys(specs, -0.001), at_best_rates=True)

    left = evidence.without_replaced(
        at_one_rate,
        [
            at_best("Adam", "gpt", "terngrad"),
            at_best("Adam", "sorting", "int4"),
            at_best("SGD", "shapes", "topk:ratio=0.01"),
            at_best("CompressedAdam", "gpt", "efsignsgd"),
            at_best("Muon", "gpt-muon", *evidence._WITH_MUON.lost),
        ],
    )
    assert left == [Evidence("Adam", "gpt", "loss", {"int4": 0.003}), at_one_rate[1]]
    assert not any(one.at_best_rates for one in left)


def test_results_at_best_rates_come_first_and_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    at_best = {"optimizer": "Adam", "training": "gpt", "metric": "loss", "lost": {"terngrad": None, "eden": 0.001}}
    files = {"evidence.json": {"first": {"Adam": ["eden"]}, "trainings": [at_best]}}
    read = evidence._read
    monkeypatch.setattr(evidence, "_read", lambda name: files.get(name) or read(name))
    evidence.evidence.cache_clear()
    evidence.chosen_by_rule.cache_clear()
    try:
        assert lost("terngrad", "Adam") == DIVERGED, "0.08 at one rate"
        assert lost("eden", "Adam") == 0.001
        assert lost("int4", "Adam") == pytest.approx(0.0027), "there is none at its best rate"
        assert evidence.is_at_best_rates("Adam")
        assert not evidence.is_at_best_rates("SGD")
        assert evidence.chosen_by_rule() == {"Adam": ("eden",)}
        assert "with Adam 0.1 (each at its own best learning rate, docs/best-rates.md)" in in_words(
            parse_compressor("eden")
        )
        said = in_words(parse_compressor("terngrad"))
        assert "with Adam training diverged (each at its own best" in said
        assert re.search(r"; with SGD -?[\d.]+, .*\(all at one learning rate, docs/convergence.md\)", said)
    finally:
        monkeypatch.undo()
        evidence.evidence.cache_clear()
        evidence.chosen_by_rule.cache_clear()


def test_the_worst_of_compressed_steps_is_said_with_their_length(monkeypatch: pytest.MonkeyPatch) -> None:
    common = {"optimizer": "Muon", "metric": "loss", "every": 4}
    steps = [
        {**common, "training": "gpt-muon", "lost": {"efsignsgd": -0.01}},
        {**common, "training": "sorting-muon", "lost": {"efsignsgd": 0.02}},
        {**common, "training": "other", "lost": {"efsignsgd": 0.05}, "every": 1},
    ]
    monkeypatch.setattr(evidence, "_read", lambda name: {"steps": steps})
    evidence.evidence_of_steps.cache_clear()
    try:
        for spec in ("efsignsgd", "two_level(efsignsgd)"):
            said = steps_in_words(parse_compressor(spec), 4)
            assert "compressed steps with efsignsgd lost" in said
            assert ", with every=4, compared" in said
            assert ": with Muon 2.0 (each at its own best learning rate" in said
        assert "with Muon 5.0" in steps_in_words(parse_compressor("efsignsgd"), 1)
        for spec, every in (("efsignsgd", 2), ("int4", 4)):
            said = steps_in_words(parse_compressor(spec), every)
            assert f"did not measure how much quality compressed steps with {spec} and every={every} lose" in said
    finally:
        evidence.evidence_of_steps.cache_clear()


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
    for optimizer in (name for name, specs in FIRST.items() if specs):
        lost = [lost_with(parse_compressor(spec), optimizer) for spec in COMPRESSORS if spec != "fp16"]
        assert any(one is not None and one <= HARMLESS for one in lost), f"auto:loss=0.02 proposes none for {optimizer}"


def test_what_the_readme_tells_to_begin_with_is_measured_and_recommended() -> None:
    table = README.read_text(encoding="utf-8").partition("<!-- which method -->")[2].partition("\n\n")[0]
    named = re.findall(r"`([^`]+)`", "".join(row.split("|")[2] for row in table.strip().splitlines()))
    specs = [spec for spec in named if spec.partition(":")[0] in COMPRESSOR_NAMES]
    of_adam = ["int4", "eden:scaled=True"]
    assert specs == ["eden:bits=1", *of_adam, "int4", "efsignsgd"], "SGD, Adam, Muon, and compressed steps of Muon"
    assert set(RECOMMENDED) <= set(specs) <= set(COMPRESSORS)


def test_the_rule_may_choose_no_method_for_an_optimizer() -> None:
    """The rule of the README's table may find every method with Adam or Muon too harmful. What reads `FIRST` must then
    work, too, above all `import hvdcomp`. The rule's result is read at import, so this is a process of its own."""
    code = """
import json
loads = json.loads
def without_choice(text):
    found = loads(text)
    if "first" in found:
        found["first"] = {"SGD": ["terngrad"], "Adam": [], "CompressedAdam": [], "Muon": []}
    return found
json.loads = without_choice
from hvdcomp.compressors.evidence import first_to_try
print(first_to_try())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "Methods to try first: with SGD terngrad (docs/adam.md).\n", done.stderr


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
    assert "points of accuracy): with SGD 0.3, with Adam 0.9 (all at one" in in_words(parse_compressor("int4"))
    assert "with SGD training diverged (all at one learning rate, docs" in in_words(parse_compressor("qsgd:bits=2"))
    assert "quality that two_level(int4) lost" in in_words(parse_compressor("two_level(int4)"))
    assert "did not measure how much accuracy is lost with fp8" in in_words(parse_compressor("fp8"))


def test_an_exchange_that_the_number_of_ranks_decides_is_judged_by_the_worse_of_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lstm = Evidence("SGD", "lstm", "loss", {"int4": 0.02, "int4:exchange=scatter": 0.01})
    mnist1d = Evidence("SGD", "mnist1d", "loss", {"int4:exchange=scatter": 0.03, "int8": 0})
    monkeypatch.setattr(evidence, "evidence", lambda: [lstm, mnist1d])

    def lost(spec: str) -> float | None:
        return lost_with(parse_compressor(spec), "SGD")

    assert (lost("int4"), lost("int4:exchange=scatter"), lost("int4:exchange=auto")) == (0.02, 0.03, 0.03)
    assert lost("two_level(int4:exchange=auto)") == 0.03
    assert (lost("int8"), lost("int8:exchange=auto")) == (0, None), "nothing is known of int8 with scatter"
    assert "int4:exchange=auto lost in hvdcomp's own small training runs" in in_words(
        parse_compressor("int4:exchange=auto")
    )
