"""The benchmark of adaptive levels: its controls send as many bytes, its verdicts follow from paired differences."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks.pages import seeds_to_show, verdict
from benchmarks.quality import equal_bytes
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.policies import parse_policy
from hvdcomp.tools.train.options import TrainingOptions


@pytest.mark.thorough
def test_every_row_can_be_trained(tmp_path: Path) -> None:
    for name, workload in equal_bytes.WORKLOADS.items():
        rows = equal_bytes.rows_of(workload)
        runs = equal_bytes.planned([name], [0, 1], tmp_path, lambda _, rows=rows: rows)
        assert len({run.folder for run in runs}) == len(runs) == 2 * len(rows)
        for run in runs[: len(rows)]:  # of the first seed
            options = TrainingOptions(**run.options).resolved()
            if options.policy is not None:
                parse_policy(options.policy).check(10, parse_compressor(options.compression))
            assert options.steps is not None
            assert options.evaluate_every is not None
            assert options.steps % options.evaluate_every == 0, "the last step is to be evaluated"


def _written(run: Any, sent: float, quality: float | None) -> None:
    """A run's summary and its last evaluation, as `hvdcomp train` leaves them."""
    run.folder.mkdir(parents=True, exist_ok=True)
    options = {**TrainingOptions(**run.options).resolved().as_json(), "backend": "simulated"}
    status = "finished" if quality is not None else "diverged"
    summary = {"status": status, "options": options, "bytes_sent": sent, "compression_factor": 1e6 / sent}
    (run.folder / "summary.json").write_text(json.dumps(summary))
    (run.folder / "evaluations.jsonl").write_text(json.dumps({"accuracy": quality, "loss": quality}) + "\n")
    (run.folder / "run.json").write_text(json.dumps({"commit": "abc", "seconds": 1.0, "error": None}))


def test_a_control_sends_as_many_bytes() -> None:
    workload, row = equal_bytes.WORKLOADS["mnist1d"], equal_bytes.Row

    def trained(level: float, compressor: str = "topk") -> float:  # 50 bytes beside, in each of 800 steps
        return 800 * (equal_bytes.bytes_of_step(workload, row("fixed", compressor, level))[0] + 50.0)

    measured = {level: trained(level) for level in (0.03, 0.002)}
    for target in (trained(0.1), trained(0.013), 1.01 * trained(0.002)):
        level = equal_bytes.level_of_bytes(workload, "topk", target, measured)
        assert trained(level) == pytest.approx(target, rel=0.01)
    assert equal_bytes.level_of_bytes(workload, "topk", 1.003 * trained(0.03), measured) == 0.03, "is trained anyway"
    assert equal_bytes.level_of_bytes(workload, "topk", 1.01 * trained(0.03), measured) > 0.03
    of_ranks = {rank: trained(rank, "powersgd") for rank in (1.0, 4.0)}
    assert equal_bytes.level_of_bytes(workload, "powersgd", trained(2, "powersgd"), of_ranks) == 2
    assert equal_bytes.level_of_bytes(workload, "powersgd", trained(2, "powersgd") + 9, of_ranks) == 3


def test_the_number_of_seeds_shows_a_gain_in_four_of_five_experiments() -> None:
    spread = [-1.0, 1.0]  # with a standard deviation of 1.41
    draws = np.random.default_rng(0)
    for effect in (0.5, -1.0, 3.0):
        seeds = seeds_to_show(effect, spread)
        experiments = draws.normal(effect, np.std(spread, ddof=1), (2000, seeds))
        shown = [verdict(list(gains)) == ("**better**" if effect > 0 else "worse") for gains in experiments]
        assert np.mean(shown) == pytest.approx(0.8, abs=0.04), seeds


def test_the_page_counts_as_better_only_what_differs_seed_by_seed(tmp_path: Path) -> None:
    workload = equal_bytes.WORKLOADS["mnist1d"]
    seeds, runs, file = (0, 1, 2), tmp_path / "runs", tmp_path / "page.md"
    qualities = {"budget": [0.92, 0.94, 0.93], "lgreco": [0.90, 0.92, 0.88], "accordion": [0.80, 0.83, None]}
    qualities |= {"gravac": [0.87, 0.89, 0.88], "adaqs": [0.90, 0.92, 0.91], "budget-narrow": [0.91, 0.93, 0.92]}
    for row in equal_bytes.rows_of(workload):
        if row.compressor != "topk":
            continue
        for seed in seeds:
            fixed = equal_bytes.Row("fixed", "topk", row.level if row.kind == "fixed" else 0.008)
            sent = 800.0 * equal_bytes.bytes_of_step(workload, fixed)[0]
            of_level = 0.91 + {0.1: 0.05, 0.002: -0.05}.get(row.level, 0)
            own = of_level + [-0.01, 0.01, 0][seed] if row.kind == "fixed" else qualities[row.kind][seed]
            _written(equal_bytes.LevelRun("mnist1d", seed, runs, row), sent, own)
    controls = equal_bytes.controls_of("mnist1d", runs, seeds)
    assert {row.level for row in controls if row.kind == "fixed"} == {0.008}, "it is among those that were trained"
    (mid,) = (row for row in controls if row.kind == "mid")
    for seed in seeds:
        _written(equal_bytes.LevelRun("mnist1d", seed, runs, mid), 1000.0, 0.85)
    # 800 steps that send what a level of 0.008 does, made of such of 0.1 and 0.002.
    start, end = map(int, mid.policy.rpartition("steps=")[2].split("|"))
    each = {level: equal_bytes.bytes_of_step(workload, equal_bytes.Row("fixed", "topk", level))[0]
            for level in (0.1, 0.008, 0.002)}  # fmt: skip
    right = 800 * (each[0.008] - each[0.002]) / (each[0.1] - each[0.002])
    assert end - start == round(right)
    assert abs(start + end - 800) <= 1

    done = CliRunner().invoke(equal_bytes.main, ["--page-only", "--runs", str(runs), "--table", str(file)])
    assert done.exit_code == 0, done.output
    page = file.read_text()
    assert "at commit `abc`" in page
    lines = [line for line in page.splitlines() if line.startswith("| `topk:ratio=0.008`")]
    # Student's t of two degrees of freedom.
    cells = "| `topk:ratio=0.008` | 100.0% | 91.00 ± 2.48 | 70%, 50% | +2.00 ± 0.00 | **better** | 2 |"
    assert lines[0].endswith(cells), "of the gap between 86 and 96 %"
    assert lines[2].endswith("| -1.00 ± 4.30 | no difference shown | 97 |"), lines
    accordion = [line for line in page.splitlines() if "`accordion:low=0.1" in line]
    assert any("81.50 ± 19.06; 1 of 3 diverged" in line and "| worse |" in line for line in accordion), accordion
    for counts in ("budget | topk | 3 | 0 | 0", "gravac | topk | 0 | 0 | 1", "adaqs | topk | 0 | 1 | 0"):
        assert f"| {counts} |" in page
    assert "better" in file.with_suffix(".csv").read_text()
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")

    assert {row.control_of for row in equal_bytes.controls_of("mnist1d", runs, seeds, ["adaqs"])} == {
        "topk:ratio=0.1 adaqs:start=64,fall=0.5"
    }

    shutil.rmtree(runs / "mnist1d")
    CliRunner().invoke(equal_bytes.main, ["--page-only", "--runs", str(runs), "--table", str(file)])
    assert file.read_text() == page, "records are kept beside the folders"


def test_the_front_has_what_nothing_with_as_few_bytes_is_better_than() -> None:
    quality = {4.0: 0.9, 1.0: 0.7, 2.0: 0.6, 3.0: 0.8, 5.0: 0.9}
    assert equal_bytes.pareto_front(quality, True) == [(1.0, 0.7), (3.0, 0.8), (4.0, 0.9)]
    assert equal_bytes.pareto_front(quality, False) == [(1.0, 0.7), (2.0, 0.6)]


def test_without_runs_there_is_no_page(tmp_path: Path) -> None:
    done = CliRunner().invoke(equal_bytes.main, ["--page-only", "--runs", str(tmp_path)])
    assert "there is no finished pair of runs in" in done.output
