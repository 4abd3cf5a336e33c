"""A compressor and a policy of a user's own module in `hvdcomp train`, on real ranks: the classes of the manual."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launched import run_forked_ranks
from tests.readme import block_with
from tests.tools.train.test_train_checkpoints import _check_same_run, _summary

pytest.importorskip("sklearn")
pytest.importorskip("torch")

ROOT = Path(__file__).parents[3]
POLICY = "settle:low=16,high=64,share=0.9,steps=5"
OPTIONS = [
    *("--model", "mlp", "--samples", "320", "--epochs", "2", "--no-progress"),
    *("--compression", "blockmeans:block=16", "--policy", POLICY, "--plugin", "of_my_own"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the module, in which nothing else of this checkout is."""
    pages = {"class BlockMeans": "your-own-compressor.md", "class Settle(": "your-own-policy.md"}
    code = [block_with(words, ROOT / "docs" / page) for words, page in pages.items()]
    (tmp_path / "of_my_own.py").write_text("\n".join(code))
    return tmp_path


def _train(folder: Path, controller: str, *options: str) -> None:
    variables = {"COLUMNS": "200", "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    program = "import os, runpy, sys; os.chdir(sys.argv.pop(1)); runpy.run_module('hvdcomp', run_name='__main__')"
    (folder / "program.py").write_text(program)
    words = [str(folder / "program.py"), str(folder), "train", *OPTIONS, *options]
    done = run_forked_ranks(2, controller, words, variables)
    assert done.returncode == 0, done.stdout[-6000:]


def _replay(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    log = folder / "resumed" / "decisions.jsonl"
    variables = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "1000"}
    command = [sys.executable, "-m", "hvdcomp", "replay", str(log), *options]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=variables, timeout=120)


@pytest.mark.alone
@pytest.mark.parametrize(
    "controller", ["torchrun", *(pytest.param(one, marks=pytest.mark.thorough) for one in ("gloo", "mpi"))]
)
def test_a_training_with_classes_of_my_own_goes_on_and_is_replayed(folder: Path, controller: str) -> None:
    if controller != "torchrun":
        pytest.importorskip("horovod.torch", reason="Horovod is not built here: run `hvdcomp build-horovod`")
    resumed = ["--output", "resumed", "--checkpoint-folder", "saved"]
    _train(folder, controller, "--output", "whole")
    _train(folder, controller, *resumed, "--steps", "13")
    _train(folder, controller, *resumed)
    _check_same_run(folder / "whole", folder / "resumed", [13])
    summary = _summary(folder / "resumed")
    assert summary["compression_factor"] > 8
    assert summary["identical"]
    lines = [json.loads(line) for line in (folder / "resumed" / "decisions.jsonl").read_text().splitlines()]
    assert {line["policy"] for line in lines if "policy" in line} == {POLICY}
    replayed = _replay(folder, "--plugin", "of_my_own")
    assert replayed.returncode == 0, replayed.stderr
    assert f"{POLICY}: 4 decisions" in replayed.stdout
    assert "resumed 1x: all as logged" in replayed.stdout
    without = _replay(folder)
    assert without.returncode == 2
    assert "unknown policy 'settle'" in without.stderr
    assert "for a policy of your own, pass --plugin MODULE" in without.stderr
    report = [sys.executable, "-m", "hvdcomp", "report", "resumed", "--plugin", "of_my_own"]
    variables = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run(report, cwd=folder, env=variables, check=True, timeout=120, capture_output=True)
