"""The benchmark of seconds to a target: its page compares with the better of what does not compress, seed by seed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.best_rates.rows import rate_of
from benchmarks.best_rates.search import best_of
from benchmarks.times import time_to_target
from hvdcomp.tools.train.options import TrainingOptions


def _with_result(runs: Path, workload: str, seed: int, way: tuple[str, str], doublings: int, found: Any) -> None:
    run = time_to_target.ClusterRun(workload, seed, runs, way[0], 4, "100mbit", way[1], doublings)
    run.folder.mkdir(parents=True)
    until = {"reached": found is not None, "trained_seconds": found, "step": 400, "bytes_sent": 2_500_000}
    summary = {"status": "finished", "options": TrainingOptions(**run.options).resolved().as_json()}
    (run.folder / "summary.json").write_text(json.dumps({**summary, "until": until}))
    (run.folder / "run.json").write_text(json.dumps({"commit": "abc", "seconds": 50.0, "error": None}))


def test_the_page_compares_with_the_better_of_dense_and_fp16(tmp_path: Path) -> None:
    runs, page = tmp_path / "runs", tmp_path / "page.md"
    seconds = {
        ("none", ""): (40.0, 42.0),
        ("fp16", ""): (20.0, 22.0),
        ("topk:ratio=0.01", ""): (5.0, None),
        ("none", "auto:loss=0.02"): (10.0, 11.0),
    }
    for way, of_seeds in seconds.items():
        for seed, found in zip((101, 102), of_seeds, strict=True):
            _with_result(runs, "mnist1d", seed, way, -1, found)
    _with_result(runs, "sorting", 101, ("none", ""), 0, 30.0)
    _with_result(runs, "sorting", 101, ("int4", ""), 1, 15.0)
    done = CliRunner().invoke(time_to_target.main, ["--page-only", "--runs", str(runs), "--table", str(page)])
    assert done.exit_code == 0, done.output
    text = page.read_text()
    assert "at commit `abc`" in text
    assert "| 100mbit | `fp16` | 0.05 | 2 of 2 | 400 | 2.50 | 21.0 ± 12.7 | 1.00 ± 0.00 | - |" in text
    assert "| 100mbit | `topk:ratio=0.01` | 0.05 | 1 of 2 | 400 | 2.50 | 5.0 | 4.00 | - |" in text, "only seed 101"
    assert "| `none` with `auto:loss=0.02` | 0.05 | 2 of 2 | 400 | 2.50 | 10.5 ± 6.4 | 2.00 ± 0.00 | 3.91 ±" in text
    assert "terngrad" not in text, "has no run"
    sorting = text.partition("## sorting")[2]
    assert "| 100mbit | `int4` | 0.016 | 1 of 1 | 400 | 2.50 | 15.0 | 2.00 | - |" in sorting, "sorting has its own none"
    assert "topk:ratio=0.01" in page.with_suffix(".csv").read_text()
    assert page.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("workload", time_to_target.TASKS)
def test_each_method_trains_at_its_own_best_rate(workload: str) -> None:
    task = time_to_target.TASKS[workload]
    runs = list(time_to_target.planned([workload], 4, ["1gbit"], [], [101], Path("runs")))
    assert [run.method for run in runs] == ["none", "fp16", *task.methods, *task.policies.values()]
    for run in runs:
        searched = "none" if run.method == "fp16" else run.method
        best = best_of(workload, searched, time_to_target.BEST_RATES)
        assert run.options["lr"] == rate_of(workload, best)
        assert "simulate_ranks" not in run.options, "its ranks are real"
        options = TrainingOptions(**run.options).resolved()
        assert options.compression == run.method.split()[-1]
        assert options.evaluate_every % (options.local_steps or 1) == 0, "weights are equal when they are evaluated"


def test_only_names_a_method_or_a_policy(tmp_path: Path) -> None:
    runs = time_to_target.planned(["mnist1d"], 4, ["1gbit"], ["auto:loss=0.02"], [101], tmp_path)
    assert [(run.method, run.policy) for run in runs] == [("none", "auto:loss=0.02")]
    refused = CliRunner().invoke(time_to_target.main, ["--only", "budget:factor=3", "--runs", str(tmp_path)])
    assert "'budget:factor=3' is not a method or policy of this benchmark; choose from auto:loss=0.02" in refused.output


def test_auto_goes_by_a_calibration_of_the_hosts(tmp_path: Path) -> None:
    run = time_to_target.ClusterRun("mnist1d", 101, tmp_path, "none", 4, "1gbit", "auto:loss=0.02", 0)
    assert run.options["policy"] == "auto:calibration=mnist1d-4x1gbit.json,loss=0.02"
    assert run.settings == dataclasses.replace(run, runs=tmp_path / "other").settings
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORKLOAD", "mnist1d")
        model, loss = time_to_target.network(8)
    loss().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_without_runs_there_is_no_page(tmp_path: Path) -> None:
    done = CliRunner().invoke(time_to_target.main, ["--page-only", "--runs", str(tmp_path)])
    assert "there is no finished run in" in done.output
