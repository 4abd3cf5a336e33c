"""Pages of figures that a benchmark writes from kept records of trainings are as the benchmark writes them today."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.best_rates import __main__ as best_rates
from benchmarks.best_rates import optimizers
from benchmarks.quality import convergence, equal_bytes
from benchmarks.times import time_to_target
from tests.loaded import ROOT

BENCHMARKS = {
    "best-rates": best_rates.main,
    "convergence": convergence.main,
    "equal-bytes": equal_bytes.main,
    "time-to-target": time_to_target.main,
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_page_in_docs_is_that_of_the_records(name: str, tmp_path: Path) -> None:
    page = ROOT / "docs" / f"{name}.md"
    shutil.copy(page, tmp_path)  # some text on the page is written by hand
    shutil.copytree(ROOT / "benchmarks" / "measured" / name, tmp_path / "runs", ignore=shutil.ignore_patterns("seed*"))
    written, runs = tmp_path / page.name, tmp_path / "runs"
    done = CliRunner().invoke(BENCHMARKS[name], ["--page-only", "--runs", str(runs), "--table", str(written)])
    assert done.exit_code == 0, done.output
    assert written.read_text() == page.read_text()
    assert written.with_suffix(".csv").read_bytes() == page.with_suffix(".csv").read_bytes()


@pytest.mark.thorough
def test_the_page_of_optimizers_is_that_of_the_records(tmp_path: Path) -> None:
    page = ROOT / "docs" / "optimizers.md"
    shutil.copy(page, tmp_path)
    done = CliRunner().invoke(optimizers.main, ["--table", str(tmp_path / page.name)])
    assert done.exit_code == 0, done.output
    assert (tmp_path / page.name).read_text() == page.read_text()
