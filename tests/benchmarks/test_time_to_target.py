"""The benchmark of seconds to a target: its page compares with the better of what does not compress, seed by seed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.times import time_to_target
from hvdcomp.tools.train.options import TrainingOptions


def test_the_page_compares_with_the_better_of_dense_and_fp16(tmp_path: Path) -> None:
    runs, page = tmp_path / "runs", tmp_path / "page.md"
    accordion = "accordion:low=0.1,high=0.002,steps=40"
    seconds = {
        ("none", ""): (40.0, 42.0),
        ("fp16", ""): (20.0, 22.0),
        ("topk:ratio=0.01", ""): (5.0, None),
        ("topk:ratio=0.01", "budget:factor=50"): (4.0, None),
        ("topk:ratio=0.002", accordion): (10.0, 11.0),
        ("none", "auto:loss=0.02"): (10.0, 11.0),
    }
    for (method, policy), of_seeds in seconds.items():
        for seed, found in enumerate(of_seeds):
            run = time_to_target.ClusterRun("mnist1d", seed, runs, method, 4, "100mbit", policy)
            run.folder.mkdir(parents=True)
            until = {"reached": found is not None, "trained_seconds": found, "step": 400, "bytes_sent": 2_500_000}
            summary = {"status": "finished", "options": TrainingOptions(**run.options).resolved().as_json()}
            (run.folder / "summary.json").write_text(json.dumps({**summary, "until": until}))
            (run.folder / "run.json").write_text(json.dumps({"commit": "abc", "seconds": 50.0, "error": None}))
    words = ["--page-only", "--runs", str(runs), "--table", str(page), "--seeds", "0,1"]
    done = CliRunner().invoke(time_to_target.main, words)
    assert done.exit_code == 0, done.output
    text = page.read_text()
    assert "at commit `abc`" in text
    assert "| 100mbit | `fp16` | 2 of 2 | 400 | 2.50 | 21.0 ± 12.7 | 1.00 ± 0.00 | - |" in text
    assert "| 100mbit | `topk:ratio=0.01` | 1 of 2 | 400 | 2.50 | 5.0 | 4.00 | - |" in text, "against seed 0 of fp16"
    assert "| 100mbit | `topk:ratio=0.01` with `budget:factor=50` | 1 of 2 | 400 | 2.50 | 4.0 | 5.00 | 1.25 |" in text
    # Whose fixed level has no run.
    assert f"| `topk:ratio=0.002` with `{accordion}` | 2 of 2 | 400 | 2.50 | 10.5 ± 6.4 | 2.00 ± 0.00 | - |" in text
    assert "| 100mbit | `none` with `auto:loss=0.02` | 2 of 2 | 400 | 2.50 | 10.5 ± 6.4 | 2.00 ± 0.00 | 3.91 ±" in text
    assert "powersgd" not in text, "has no run"
    assert "topk:ratio=0.01" in page.with_suffix(".csv").read_text()
    assert page.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_auto_goes_by_a_calibration_of_the_hosts(tmp_path: Path) -> None:
    run = time_to_target.ClusterRun("mnist1d", 0, tmp_path, "none", 4, "1gbit", "auto:loss=0.02")
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
