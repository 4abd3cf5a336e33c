"""Runs that stop within an epoch and go on with other numbers of ranks, each time with what was left to be sent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdcomp.tools.report.replay import replay
from tests.launched import run_forked_ranks, run_ranks
from tests.tools.train.test_train_checkpoints import _lines, _summary

pytest.importorskip("sklearn")
torch = pytest.importorskip("torch")

pytestmark = pytest.mark.alone

# `hvdcomp train` whose rank 0 is told to stop after the step that the first argument names.
_PROGRAM = """
import os, signal, sys

import hvdcomp.tools.train.run as training
from hvdcomp.tools.commands.train import command

stop, *options = sys.argv[1:]
training._STEPS_BETWEEN_CHECKS = 1
real_step = training.Run._timed_step

def step(self, *batch):
    real_step(self, *batch)
    if self._step == int(stop) and self._ranks.rank == 0:
        os.kill(os.getpid(), signal.SIGUSR1)

training.Run._timed_step = step
command(options, prog_name="train")
"""
_NEVER = 10**6
# An epoch is 20 steps of two ranks.
_MLP = ["--model", "mlp", "--samples", "640", "--epochs", "3", "--batch-size", "16", "--no-progress"]
_TOPK = [*_MLP, "--compression", "topk:ratio=0.02"]
_POLICY = [*_TOPK, "--policy", "accordion:low=0.1,high=0.02,interval=1"]


def _train(
    tmp_path: Path, controller: str, ranks: int, stop: int, options: list[str], ends: str
) -> tuple[str, dict[str, Any]]:
    """What the ranks said, and the summary."""
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    places = ["--output", str(tmp_path / "run"), "--checkpoint-folder", str(tmp_path / "saved")]
    arguments = [str(program), str(stop), *options, *places]
    start = run_ranks if "tensorflow" in options else run_forked_ranks
    done = start(ranks, controller, arguments, {"COLUMNS": "200"}, timeout=400)
    assert (done.returncode == 0) == (ends == "finished"), done.stdout[-6000:]
    summary = _summary(tmp_path / "run")
    assert (summary["status"], summary["identical"], summary["world_size"]) == (ends, True, ranks)
    return " ".join(done.stdout.split()), summary


def _pending(tmp_path: Path) -> dict[str, np.ndarray]:
    """The mean over the ranks of what they have kept, in the newest checkpoint of PyTorch."""
    newest = max((tmp_path / "saved").glob("step-*"))
    states = [torch.load(file, weights_only=True)["compression"] for file in sorted(newest.glob("rank-*.pt"))]
    assert len(states) == states[0]["own"]["size"]
    return {
        name: np.mean([state["own"]["residuals"][name]["arrays"][0].double().numpy() for state in states], axis=0)
        for name in states[0]["own"]["residuals"]
    }


def _needs(controller: str) -> None:
    if controller != "torchrun":
        pytest.importorskip("horovod.torch", reason="Horovod is not built here: run `hvdcomp build-horovod`")


@pytest.mark.thorough
@pytest.mark.parametrize("controller", ["gloo", "torchrun"])
def test_two_ranks_then_one_then_two(controller: str, tmp_path: Path) -> None:
    """One rank has 40 steps in an epoch, two have 20; half of the second epoch, and a quarter of the third, is over."""
    _needs(controller)
    options = _TOPK if controller == "gloo" else _POLICY
    _train(tmp_path, controller, 2, 30, options, "stopped")
    pending = _pending(tmp_path)
    said, summary = _train(tmp_path, controller, 1, 60, options, "stopped")
    assert (
        said.count("but this run has 1 rank: the residuals are kept; each new rank continues with the residuals of 2")
        == 1
    )
    assert summary["resumed_at"] == [30]
    if controller == "gloo":  # with one rank Horovod exchanges nothing, so it all waits as it was
        waiting = _pending(tmp_path)
        assert any(abs(values).max() > 0 for values in pending.values())
        for name, values in pending.items():
            np.testing.assert_allclose(waiting[name], values, rtol=1e-6, atol=1e-9)
    said, summary = _train(tmp_path, controller, 2, _NEVER, options, "finished")
    assert said.count("the checkpoint has 1 rank, but this run has 2 ranks: the residuals are kept, on rank 0") == 1
    assert summary["resumed_at"] == [30, 60]
    assert [line["step"] for line in _lines(tmp_path / "run" / "epochs.jsonl")] == [20, 50, 75]
    assert [line["step"] for line in _lines(tmp_path / "run" / "steps.jsonl")] == list(range(1, 76))
    assert summary["accuracy"] > 0.8
    if controller == "torchrun":
        log = tmp_path / "run" / "decisions.jsonl"
        decisions = [line for line in _lines(log) if line["kind"] == "decision"]
        # At the end of each epoch but the last: no step follows, whose learning rate it would need.
        assert [line["step"] for line in decisions] == [20, 50]
        assert replay(log).difference is None


@pytest.mark.thorough
def test_two_ranks_then_three_between_two_exchanges(tmp_path: Path) -> None:
    """The third begins with the outer weights; the others go on with their own."""
    options = [*_TOPK, "--optimizer", "adamw", "--local-steps", "4", "--steps", "44"]
    options += ["--validation-samples", "64", "--evaluate-every", "8"]
    _train(tmp_path, "torchrun", 2, 30, options, "stopped")
    said, summary = _train(tmp_path, "torchrun", 3, _NEVER, options, "finished")
    assert said.count("the residuals are kept, on ranks 0 to 1") == 1
    assert (summary["resumed_at"], summary["steps"]) == ([30], 44)
    assert summary["accuracy"] > 0.5


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("controller", "compression"),
    [("torchrun", "topk:ratio=0.02"), ("gloo", "dgc:ratio=0.02"), ("torchrun", "qsgd:bits=4,exchange=auto")],
)
def test_four_ranks_then_two_then_three(controller: str, compression: str, tmp_path: Path) -> None:
    _needs(controller)
    options = [*_MLP, "--compression", compression, *(["--momentum", "0"] if "dgc" in compression else [])]
    _train(tmp_path, controller, 4, 15, options, "stopped")
    said, _ = _train(tmp_path, controller, 2, 35, options, "stopped")
    assert said.count("the residuals are kept; each new rank continues with the residuals of 2 old ranks") == 1
    said, summary = _train(tmp_path, controller, 3, _NEVER, options, "finished")
    assert said.count("the checkpoint has 2 ranks, but this run has 3 ranks: the residuals are kept, on ranks 0 to 1")
    # Of four ranks an epoch is 10 steps, of two 20, of three 13: of the third epoch a half is over, or 6 steps.
    assert [line["step"] for line in _lines(tmp_path / "run" / "epochs.jsonl")] == [10, 25, 35 + 13 - 6]
    assert summary["resumed_at"] == [15, 35]


@pytest.mark.thorough
def test_tensorflow_goes_on_with_other_ranks(tmp_path: Path) -> None:
    pytest.importorskip("horovod.tensorflow", reason="Horovod is not built for TensorFlow here")
    pytest.importorskip("tf_keras")
    options = [*_TOPK, "--framework", "tensorflow"]
    _train(tmp_path, "gloo", 2, 30, options, "stopped")
    _train(tmp_path, "gloo", 3, 40, options, "stopped")
    said, summary = _train(tmp_path, "gloo", 2, _NEVER, options, "finished")
    assert (
        said.count("but this run has 2 ranks: the residuals are kept; each new rank continues with the residuals of up")
        == 1
    )
    # Of three ranks an epoch is 13 steps, of which 6 are over as the run goes on with them; then 3, or 4 of 20.
    assert [line["step"] for line in _lines(tmp_path / "run" / "epochs.jsonl")] == [20, 30 + 13 - 6, 40 + 20 - 4]
    assert summary["resumed_at"] == [30, 40]


@pytest.mark.thorough
def test_what_was_left_to_be_sent_may_be_dropped(tmp_path: Path) -> None:
    _train(tmp_path, "torchrun", 2, 30, _TOPK, "stopped")
    newest = max((tmp_path / "saved").glob("step-*"))
    before = json.loads((newest / "run-0.json").read_text())["facts"]
    assert "residuals" not in before
    said, summary = _train(tmp_path, "torchrun", 3, _NEVER, [*_TOPK, "--residuals", "drop"], "finished")
    assert said.count("the residuals are dropped, because of --residuals drop") == 1
    assert summary["resumed_at"] == [30]
