"""What is known of methods by measured trainings: the table says what the pages say, and the worst counts."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from hvdcomp.commands.profile import HARMLESS
from hvdcomp.compressors.evidence import DIVERGED, EVIDENCE, Evidence, excess_of, in_words, measured_specs
from hvdcomp.compressors.first import FIRST
from hvdcomp.compressors.parsing import parse_compressor

DOCS = Path(__file__).parents[1] / "docs"
OTHERWISE = ("none", "fp16", "bf16", "dgc:ratio=0.01", "dgc:ratio=0.001", "signsgd")  # see the module


def rows_of(one: Evidence) -> dict[str, dict[str, str]]:
    """By spec the cells of a training's table, by their headings; a cell "beside" says what stands behind the spec."""
    section = (DOCS / one.page).read_text().split(f"\n## {one.training}\n")[1].split("\n## ")[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    headings, _, *rows = lines
    found = {}
    for row in rows:
        match = re.fullmatch(r"`([^`]+)`(.*)", row[0])
        assert match is not None, row
        if "(gpt)" not in match[2]:  # the control, of another section
            found[str(parse_compressor(match[1]))] = dict(zip(headings, row, strict=True)) | {"beside": match[2]}
    return found


def excess_on_page(row: dict[str, str], dense: dict[str, str]) -> float | None:
    """What a row says of the loss; None if nothing."""
    if "diverged" in row["beside"] + row.get("converged", ""):
        return DIVERGED
    if "to dense (%)" in row:
        return float(row["to dense (%)"].split()[0]) / 100
    if "perplexity" in row:
        return math.log(float(row["perplexity"].split()[0])) / math.log(float(dense["perplexity"].split()[0])) - 1
    return None


@pytest.mark.parametrize("one", EVIDENCE, ids=lambda one: f"{one.training}, {one.optimizer}")
def test_the_table_is_that_of_the_page(one: Evidence) -> None:
    """Whoever measures the page anew enters the figures in `hvdcomp/compressors/evidence.py`."""
    rows = rows_of(one)
    on_page = {spec: excess_on_page(row, rows["none"]) for spec, row in rows.items() if spec not in OTHERWISE}
    assert {spec: excess for spec, excess in on_page.items() if excess is not None} == pytest.approx(one.excess)


def test_all_specs_are_spelt_as_compressors_print() -> None:
    assert all(str(parse_compressor(spec)) == spec for spec in measured_specs())


def excess(spec: str, optimizer: str | None) -> float | None:
    return excess_of(parse_compressor(spec), optimizer)


def test_the_worst_training_counts() -> None:
    assert excess("topk:ratio=0.01", "SGD") == 0.19  # mnist1d; 0.17 with stdlib-text
    assert excess("efsignsgd", "SGD") == 2.7376
    assert excess("qsgd:bits=4", "SGD") == excess("qsgd:bits=2", "SGD") == DIVERGED


def test_what_is_not_known_of_a_method_or_an_optimizer() -> None:
    assert excess("int4", "Adam") == 0.0069
    assert excess("int4", None) == excess("int4", "SGD") == 0.1844  # the stricter of both
    assert excess("powersgd:rank=4", None) == excess("powersgd:rank=4", "Adam") == pytest.approx(0.0853)
    assert excess("int8", None) is None  # not measured with SGD
    assert excess("int4:exchange=scatter", "Adam") is None
    assert excess("powersgd:rank=3", "SGD") is None
    assert excess("two_level(int4)", "Adam") == 0.0069


def test_what_to_try_first_was_measured() -> None:
    for optimizer, specs in FIRST.items():
        assert all(excess(spec, optimizer) is not None for spec in specs)
        assert excess(specs[0], optimizer) <= HARMLESS


def test_a_sentence_on_a_method() -> None:
    assert "+18.4 % with SGD, +0.7 % with Adam (docs/" in in_words(parse_compressor("int4"))
    assert "it diverged with SGD (docs" in in_words(parse_compressor("qsgd:bits=4"))
    assert "two_level(powersgd:rank=4)" in in_words(parse_compressor("two_level(powersgd:rank=4)"))
    assert "fp8 does to the loss was not measured" in in_words(parse_compressor("fp8"))
