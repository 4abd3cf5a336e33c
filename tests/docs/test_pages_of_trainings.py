"""Pages of figures that a benchmark writes from kept records of trainings are as the benchmark writes them today."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.loaded import ROOT, load_benchmark


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["convergence", "equal-bytes", "time-to-target"])
def test_the_page_in_docs_is_that_of_the_records(name: str, tmp_path: Path) -> None:
    page = ROOT / "docs" / f"{name}.md"
    shutil.copy(page, tmp_path)  # some text on the page is written by hand
    shutil.copytree(ROOT / "benchmarks" / "measured" / name, tmp_path / "runs", ignore=shutil.ignore_patterns("seed*"))
    written, runs = tmp_path / page.name, tmp_path / "runs"
    main = load_benchmark(name.replace("-", "_")).main
    done = CliRunner().invoke(main, ["--page-only", "--runs", str(runs), "--table", str(written)])
    assert done.exit_code == 0, done.output
    assert written.read_text() == page.read_text()
    assert written.with_suffix(".csv").read_bytes() == page.with_suffix(".csv").read_bytes()
