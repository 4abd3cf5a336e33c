"""Measured steps on the pages: the predictions beside them are those of today's model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.steps.compare import compare
from hvdcomp.perfmodel.advice import MODEL_ERROR

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("folder", [".", "exchange", "exchange/overlap"])
def test_the_errors_of_the_pages_are_those_of_todays_model(folder: str) -> None:
    """If not: the page's command with --resume makes its tables again."""
    stored = json.loads((DOCS / folder / "steps-measured.json").read_text())
    rows = [row for run in stored["runs"] for row in compare(run)]
    assert len(rows) == len(stored["rows"])
    for row, known in zip(rows, stored["rows"], strict=True):
        assert (row.method, row.measured_ms) == (known["method"], known["measured_ms"])
        assert row.predicted_ms == pytest.approx(known["predicted_ms"], rel=1e-9)
    if folder == "exchange":
        near = sum(abs(row.error) <= MODEL_ERROR for row in rows)
        assert f"because {near} of {len(rows)} predictions were within 10 %" in _words("performance-model.md")


def _words(page: str) -> str:
    return " ".join((DOCS / page).read_text().split())
