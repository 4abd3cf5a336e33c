"""The benchmark of what compressors do to accuracy: what it trains, what it skips, and its page."""

from __future__ import annotations

import csv
import dataclasses
import inspect
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.quality import convergence
from benchmarks.trainings import Trainer
from hvdcomp.compressors import COMPRESSORS
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.tools.train.options import TrainingOptions


def test_no_method_is_missing_and_every_run_can_be_trained(tmp_path: Path) -> None:
    specs = [method.spec for method in convergence.METHODS]
    for name in COMPRESSORS:
        levels = [spec for spec in specs if re.split("[:(]", spec)[0] == name]
        assert levels, f"{name} is in no row"
        scatters = "exchange" in inspect.signature(COMPRESSORS[name]).parameters
        assert scatters == any("exchange=scatter" in level for level in levels), name
    runs = convergence.planned(convergence.WORKLOADS, [0, 1], (), tmp_path)
    for name, workload in convergence.WORKLOADS.items():
        left_out = [method.spec for method in convergence.METHODS if name in method.left_out]
        trained = [run.method.spec for run in runs if (run.workload, run.seed) == (name, 1)]
        assert trained == [spec for spec in specs if spec in (workload.only or specs) and spec not in left_out]
    assert len({run.folder for run in runs}) == len(runs)
    for run in runs:
        options = TrainingOptions(**run.options).resolved()
        parse_compressor(options.compression)
        assert options.steps is not None
        assert options.evaluate_every is not None
        assert options.steps % options.evaluate_every == 0, "the last step is to be evaluated"
        target = convergence.Target.parse(convergence.WORKLOADS[run.workload].target)
        assert target.metric in ("loss", convergence.WORKLOADS[run.workload].metric)


def test_a_command_trains_what_its_run_says(tmp_path: Path) -> None:
    chosen = convergence.planned(["gpt"], [3], ["dgc:ratio=0.01", "two_level"], tmp_path)
    dgc, *two_levels = [run.command for run in chosen]
    assert len(two_levels) == 5
    assert "--betas 0.0,0.95 " in dgc
    assert "--compression dgc:ratio=0.01 --simulate-ranks 4 --link none,100mbit,1gbit --seed 3 --output" in dgc
    assert two_levels[0].startswith("HVDCOMP_RANKS_PER_NODE=2 hvdcomp train --model gpt ")


def test_seeds_come_one_after_the_other_and_patterns_choose(tmp_path: Path) -> None:
    def chosen(*only: str) -> list[str]:
        return [str(run) for run in convergence.planned(["mnist1d", "gpt"], [0, 1], only, tmp_path)]

    assert chosen("none") == [f"{name} none seed {seed}" for seed in (0, 1) for name in ("mnist1d", "gpt")]
    assert {one.split()[1] for one in chosen("dgc", "*rank=1*")} == {
        "dgc:ratio=0.01",
        "dgc:ratio=0.001",
        "powersgd:rank=1",
        "powersgd:rank=1,alternating=True",
    }


def _write(run: Any, **figures: Any) -> None:
    """A run's summary, as `hvdcomp train` leaves it."""
    run.folder.mkdir(parents=True, exist_ok=True)
    options = TrainingOptions(**run.options).resolved().as_json()
    summary = {"status": "finished", "options": {**options, "backend": "simulated"}, **figures}
    (run.folder / "summary.json").write_text(json.dumps(summary))


def test_a_run_is_trained_again_only_if_it_is_not_complete_or_its_settings_changed(tmp_path: Path) -> None:
    (run,) = convergence.planned(["gpt"], [0], ["dgc:ratio=0.01"], tmp_path)
    assert run.summary is None
    for status, complete in (("finished", True), ("diverged", True), ("failed", False), ("stopped", False)):
        _write(run, status=status)
        assert (run.summary is not None) == complete, status
    _write(run)
    run.options["steps"] = 601
    assert run.summary is None
    (run.folder / "summary.json").write_text('{"status": "fin')
    assert run.summary is None


def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes one workload tiny, and another one endless."""
    options = {"model": "mlp", "data": "digits", "optimizer": "sgd", "lr": 0.05, "validation_samples": 100}
    for name, steps in (("mnist1d", 6), ("lstm", 10**6)):
        chosen = {**options, "steps": steps, "evaluate_every": 3}
        monkeypatch.setitem(convergence.WORKLOADS, name, convergence.Workload(chosen, "loss=99"))


@pytest.mark.thorough
def test_failures_are_noted_a_stop_ends_all_and_the_next_start_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _tiny(monkeypatch)
    bad, good = convergence.Method("topk:ratio=2"), convergence.Method("topk:ratio=0.01")
    monkeypatch.setattr(convergence, "METHODS", (good,))
    failing = convergence.MethodRun("mnist1d", 0, tmp_path, bad)
    unfinished = [convergence.MethodRun("lstm", seed, tmp_path, good) for seed in (0, 1)]
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Trainer(2, say).train([unfinished[0], failing, unfinished[1]], {"lstm": [100.0]})
    assert "[1/3] mnist1d topk:ratio=2 seed 0: failed: Error: topk: ratio=2.0 is not allowed" in said[0]
    assert said[0].endswith("min left")
    assert "ratio=2.0" in failing.about["error"]
    assert [(run.summary, run.about) for run in unfinished] == [(None, {})] * 2, "they count as not done"

    page_file = tmp_path / "page" / "page.md"
    words = ["--workload", "mnist1d", "--seeds", "4", "--runs", str(tmp_path), "--table", str(page_file)]
    done = CliRunner().invoke(convergence.main, words)
    assert done.exit_code == 0, done.output
    assert "0 of 1 runs are complete, 1 to train" in done.output
    assert "[1/1] mnist1d topk:ratio=0.01 seed 4: finished, loss " in done.output
    page = page_file.read_text()
    assert re.search(r"\| `topk:ratio=0.01` \| \d+\.\d \| - \| - \| - \|", page), page
    assert page_file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    again = CliRunner().invoke(convergence.main, [*words, "--times"])
    assert "0 of 1 runs are complete, 1 to train" in again.output
    again = CliRunner().invoke(convergence.main, words)
    assert "1 of 1 runs are complete, 0 to train" in again.output
    page = page_file.read_text()
    assert re.search(r"\| - \| \d+\.\d \| \d+\.\d \|", page), page

    for place in (tmp_path, tmp_path / "times"):
        shutil.rmtree(place / "mnist1d")  # what is left is the file of records
    page_file.unlink()
    from_records = CliRunner().invoke(convergence.main, words)
    assert "1 of 1 runs are complete, 0 to train" in from_records.output
    assert page_file.read_text() == page
    workload = convergence.WORKLOADS["mnist1d"]
    for changed in ({"target": "loss=98"}, {"options": {**workload.options, "lr": 0.06}}):
        convergence.WORKLOADS["mnist1d"] = dataclasses.replace(workload, **changed)
        (run,) = convergence.planned(["mnist1d"], [4], (), tmp_path)
        assert run.record is None, "its figures are of other settings"


def test_what_is_given_is_checked(tmp_path: Path) -> None:
    for words, said in (
        (["--only", "zip*"], "'zip*' matches no method"),
        (["--seeds", "0,x"], "'0,x' is not a list of seeds"),
        (["--compute-ms", "gpt"], "'gpt': give a workload of mnist1d, gpt"),
        (["--compute-ms", "gpt=0"], "'gpt=0': give a workload"),
    ):
        done = CliRunner().invoke(convergence.main, [*words, "--dry-run", "--runs", str(tmp_path)])
        assert (done.exit_code, said in done.output) == (2, True), done.output
    done = CliRunner().invoke(convergence.main, ["--page-only", "--runs", str(tmp_path)])
    assert "there is no finished run in" in done.output


def _timed(run: Any, waits: float, coding: float = 0.0) -> None:
    """Timed steps of a run's method, of which each computes for 5 ms."""
    timed = convergence.TimedRun.of(run)
    steps = convergence.TIMED_STEPS
    seconds = {"none": 0.123 * steps, "100mbit": (0.123 + waits) * steps, "1gbit": (0.123 + waits / 10) * steps}
    _write(timed, status="diverged", trained_seconds_on_links=seconds)  # noise need not wait for the end
    step = {"ms": 5.0 + coding, "encode_ms": coding or None, "decode_ms": 0.0 if coding else None}
    (timed.folder / "steps.jsonl").write_text((json.dumps(step) + "\n") * steps)


def _written(run: Any, losses: list[float | None], sent: int, waits: float) -> None:
    """A run that evaluates after 10, 20, ... steps, and waits so long for 100mbit in each."""
    ended = losses[-1] is not None
    _write(run, status="finished" if ended else "diverged", compression_factor=4000 / sent, validation_loss=losses[-1])
    metric = convergence_metric(run)
    with (run.folder / "evaluations.jsonl").open("w") as file:
        for number, loss in enumerate(losses, 1):
            step = 10 * number
            computed = 0.123 * step
            seconds = {"none": computed, "100mbit": computed + waits * step, "1gbit": computed + waits * step / 10}
            quality = None if loss is None else 1 - loss / 2 if metric == "accuracy" else loss / 2
            record = {"step": step, "loss": loss, metric: quality}
            record |= {"trained_seconds": computed, "trained_seconds_on_links": seconds, "bytes_sent": sent * step}
            file.write(json.dumps(record) + "\n")
    (run.folder / "run.json").write_text(json.dumps({"commit": "abc", "seconds": 9.0, "error": None}))


def convergence_metric(run: Any) -> str:
    return "perplexity" if run.options["data"] == "text" else "accuracy"


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, target in (("mnist1d", "loss=0.85"), ("gpt", "loss=2.7"), ("gpt-frozen", "loss=2.7")):
        changed = dataclasses.replace(convergence.WORKLOADS[name], target=target)
        monkeypatch.setitem(convergence.WORKLOADS, name, changed)
    runs = {
        (run.workload, run.method.spec, run.seed): run
        for run in convergence.planned(["mnist1d", "gpt", "gpt-frozen"], [0, 1], (), tmp_path / "runs")
    }
    for seed in (0, 1):
        _written(runs["mnist1d", "none", seed], [1.2, 0.8, 0.5 + 0.1 * seed], 4000, 0.020)
        _written(runs["mnist1d", "fp16", seed], [1.2, 0.8, 0.5], 2000, 0.010)
        _written(runs["mnist1d", "topk:ratio=0.01", seed], [1.2, 0.9, 0.504 + 0.1008 * seed], 200, 0.001)
        _written(runs["mnist1d", "signsgd", seed], [1.2, [0.8, 0.9][seed], 0.9], 125, 0.001)
        _written(runs["gpt", "none", seed], [3.5, 2.0], 4000, 0.020)
        _written(runs["gpt-frozen", "none", seed], [3.5, 2.75], 4000, 0.020)
        _written(runs["gpt-frozen", "int4", seed], [3.5, 2.02], 80, 0.001)
    _written(runs["mnist1d", "qsgd:bits=2", 0], [1.2, None], 500, 0.001)
    for name, spec, waits in (
        ("mnist1d", "none", 0.020), ("mnist1d", "fp16", 0.010), ("gpt", "none", 0.020), ("gpt-frozen", "none", 0.020)
    ):  # fmt: skip
        _timed(runs[name, spec, 0], waits)
    _timed(runs["mnist1d", "topk:ratio=0.01", 0], 0.001, coding=2.0)
    _timed(runs["gpt-frozen", "int4", 0], 123.0)  # of CompressedAdam, waits are those of its training
    failed = runs["mnist1d", "atomo:rank=2", 1].folder
    failed.mkdir(parents=True)
    (failed / "run.json").write_text(json.dumps({"commit": "abc", "seconds": 9.0, "error": "Error: no room"}))
    words = ["--page-only", "--runs", str(tmp_path / "runs"), "--table", str(tmp_path / "page.md")]
    done = CliRunner().invoke(convergence.main, [*words, "--compute-ms", "gpt=7"])
    assert done.exit_code == 0, done.output
    return tmp_path / "page.md"


def test_the_page_is_made_of_the_runs_that_are_there(page: Path) -> None:
    text = page.read_text()
    assert "--workload mnist1d --workload gpt --workload gpt-frozen --seeds 0,1`,\nat commit `abc`" in text
    mnist1d, gpt, frozen = (text.partition(f"## {name}\n")[2].partition("\n## ")[0] for name in _TABLES)
    rows = [line for line in mnist1d.splitlines() if re.match(r"\| \**`", line)]
    # Two seeds: 12.706 standard errors. 20 or 30 steps of 5 ms, and what encoding and the link take. Of those that are
    # neither well known nor beside no better one, none is here: signsgd, and qsgd:bits=2, which diverged.
    assert rows == [
        "| `none` | 1.0 | +0.0 ± 0.0 | 0.5 (0.60x) | 0.1 (0.86x) |",
        "| **`fp16`** | 2.0 | -2.5 ± 31.8 | 0.3 (1.00x) | 0.1 (1.00x) |",
        "| **`topk:ratio=0.01`** | 20.0 | +0.2 ± 0.3 | 0.2 (1.25x) | 0.2 (0.56x) |",
    ]
    assert "The seeds were 0, 1. The options of `hvdcomp train` are: model cnn1d" in mnist1d
    assert "The target is loss=0.85. Computing a step takes 5.0 ms." in mnist1d
    assert "Failed: `atomo:rank=2`, seed 1: Error: no room" in mnist1d
    assert "Computing a step takes 7.0 ms." in gpt
    # Beside AdamW's dense training, which the frozen one's does not reach.
    assert "| `none` (gpt) | 1.0 | +0.0 ± 0.0 |" in frozen
    assert "| `none` | 1.0 | +37.5 ± 0.0 | - | - |" in frozen
    assert "| **`int4`** | 50.0 | +1.0 ± 0.0 | 0.1 (4.17x) |" in frozen


_TABLES = ("mnist1d", "gpt", "gpt-frozen")


def test_the_csv_has_all_rows(page: Path) -> None:
    with page.with_suffix(".csv").open() as file:
        rows = {(row["workload"], row["trained_in"], row["method"]): row for row in csv.DictReader(file)}
    assert len(rows) == 5 + 1 + 3
    topk = rows["mnist1d", "mnist1d", "topk:ratio=0.01"]
    shown = ("seeds", "factor", "accuracy", "accuracy_half", "lost", "lost_half", "steps", "megabytes", "perplexity")
    assert [topk[name] for name in shown] == ["2", "20.0", "0.7228", "0.32019", "0.22", "0.25412", "30.0", "0.006", ""]
    assert rows["mnist1d", "mnist1d", "qsgd:bits=2"]["diverged"] == "1"
    signs = rows["mnist1d", "mnist1d", "signsgd"]
    assert (signs["seeds"], signs["reached"], signs["steps"], signs["seconds_1gbit"]) == ("2", "1", "", "")
    assert rows["gpt-frozen", "gpt", "none"]["perplexity"] == "1.0"


def test_what_is_written_by_hand_is_kept(page: Path, tmp_path: Path) -> None:
    """And a workload without marks is in the CSV alone."""
    table = page.read_text().partition("## gpt\n\n")[2].partition("\n\n## ")[0]
    page.write_text("# By hand\n\nBefore.\n<!-- made: gpt -->\nOld.\n<!-- end of gpt -->\nAfter.\n")
    words = ["--page-only", "--runs", str(tmp_path / "runs"), "--table", str(page), "--compute-ms", "gpt=7"]
    assert CliRunner().invoke(convergence.main, words).exit_code == 0
    assert page.read_text() == f"# By hand\n\nBefore.\n{table}\nAfter.\n"
    page.write_text(without_end := "Before.\n<!-- made: gpt -->\nOld.\nAfter.\n")
    assert CliRunner().invoke(convergence.main, words).exit_code == 0
    assert page.read_text() == without_end


def test_an_interval_is_of_students_t() -> None:
    mean, half = convergence.mean_and_interval([1.0, 2.0, 3.0])
    assert (mean, half) == (2.0, pytest.approx(4.303 / math.sqrt(3)))
    assert math.isnan(convergence.mean_and_interval([1.0])[1])
