"""`hvdcomp demo`: every method is trained, timed on both networks, and given to the report."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hvdcomp.tools.commands import demo


class Programs:
    """In place of the programs: notes how they were called, with which variables, and writes the files that they
    would."""

    def __init__(self, fails: str = "") -> None:
        self.called: list[list[str]] = []
        self.environments: list[dict[str, str]] = []
        self._fails = fails

    def __call__(self, words: list[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
        self.called.append(words)
        self.environments.append(options["env"])
        failed = bool(self._fails) and any(self._fails in word for word in words)
        for written in map(Path, after(words, "--output")):
            if not failed and written.suffix == ".json":
                written.parent.mkdir(parents=True, exist_ok=True)
                written.touch()
        return subprocess.CompletedProcess(words, 3 if failed else 0)

    def with_word(self, word: str) -> list[list[str]]:
        return [words for words in self.called if word in words]


def run(programs: Programs, monkeypatch: pytest.MonkeyPatch, *words: str) -> Any:
    monkeypatch.setattr(demo.subprocess, "run", programs)
    return CliRunner().invoke(demo.command, words)


def after(words: list[str], option: str) -> list[str]:
    return [value for name, value in itertools.pairwise(words) if name == option]


@pytest.mark.parametrize("backend", ["torch", "horovod"])
def test_every_method_is_trained_timed_and_reported(
    backend: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if backend == "horovod":
        pytest.importorskip("horovod")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HOROVOD_ENABLE_ASYNC_COMPLETION", raising=False)
    programs = Programs()
    done = run(programs, monkeypatch, "--backend", backend)
    assert done.exit_code == 0, done.output
    assert {one["HOROVOD_ENABLE_ASYNC_COMPLETION"] for one in programs.environments} == {"1"}
    started = programs.with_word("hvdcomp.tools.train.in_turn")
    timings = programs.with_word("hvdcomp.tools.bench.compare_worker")
    trainings = [[json.loads(word) for word in words if word.startswith("{")] for words in started]
    specs = [options["compression"] for options in trainings[0]]
    assert specs[0] == "none"
    assert len(specs) == len(set(specs)) >= 3
    frameworks = [{options["framework"] for options in of_start} for of_start in trainings]
    assert frameworks == [{"torch"}, {"tensorflow"}][: 2 if backend == "horovod" else 1]
    for words in timings:
        assert after(words, "--compressor") == [spec for spec in specs if spec not in ("none", "fp16")]
    assert [after(words, "--rate") for words in timings] == [[], ["100mbit", "100mbit"]]  # of the links, and to note
    folders = [options["output"] for of_start in trainings for options in of_start]
    (report,) = programs.with_word("report")
    assert report[report.index("report") + 1 : report.index("--turns")] == folders
    assert len(set(folders)) == sum(map(len, trainings))
    assert after(report, "--turns") == [file for words in timings for file in after(words, "--output")]


def test_without_emulated_hosts_the_rest_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    programs = Programs(fails="bench.cluster")
    done = run(programs, monkeypatch)
    assert done.exit_code == 0
    assert "predicted" in done.output
    assert after(programs.with_word("report")[0], "--turns") == ["runs/demo/turns.json"]


def test_a_training_that_fails_ends_the_demo_with_its_status(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    programs = Programs(fails="topk")
    assert run(programs, monkeypatch, "--output", str(tmp_path / "demo")).exit_code == 3
    assert not programs.with_word("report")


def test_only_a_demo_is_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    (tmp_path / "report.html").touch()  # of the user's own trainings
    programs = Programs()
    done = run(programs, monkeypatch, "--output", str(tmp_path))
    assert done.exit_code == 2
    assert "name another folder" in done.output
    assert (tmp_path / "thesis.tex").exists()
    assert not programs.called
    folder = str(tmp_path / "demo")
    assert run(programs, monkeypatch, "--output", folder).exit_code == 0
    (tmp_path / "demo" / "old").touch()
    assert run(programs, monkeypatch, "--output", folder).exit_code == 0
    assert not (tmp_path / "demo" / "old").exists()


@pytest.mark.thorough
@pytest.mark.alone
def test_it_runs_on_real_ranks(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hvdcomp", "demo", "--seconds", "1"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "runs/demo/report.json").read_text())
    assert "dense training ended at" in done.stdout
    assert "eden:bits=1" in json.dumps(report)
    assert (tmp_path / "runs/demo/report.html").exists()
    # The third of the trainings in a process is as if it were the only one.
    alone = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "hvdcomp"]
    alone += ["train", "--model", "cnn", "--data", "digits", "--batch-size", "16", "--epochs", "5", "--seed", "1"]
    alone += ["--compression", "topk:ratio=0.01", "--output", "alone"]
    subprocess.run(alone, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, timeout=200)
    weights = [
        json.loads((tmp_path / folder / "summary.json").read_text())["weights_sha256"]
        for folder in ("runs/demo/topk", "alone")
    ]
    assert weights[0] == weights[1]
