"""`hvdcomp train` under torchrun: the same training as under Horovod, and one that goes on after a rank was killed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hvdcomp.tools.train.backends import TORCHRUN, choose
from hvdcomp.tools.train.options import SetupError
from tests.launched import run_forked_ranks
from tests.package_index import fresh_environment, pip_with_index, source_of_package
from tests.project.test_import import run
from tests.tools.train.test_train_checkpoints import _check_same_run, _summary

pytest.importorskip("sklearn")
pytest.importorskip("torch")

_MLP = ["--model", "mlp", "--samples", "640", "--epochs", "2", "--no-progress"]
_KINDS = {
    "topk": [*_MLP, "--compression", "topk:ratio=0.02", "--backward-passes-per-step", "2", "--clip-norm", "0.5"],
    "policy": [*_MLP, "--compression", "powersgd:rank=2", "--policy", "accordion:low=2,high=1,interval=1"],
    "batch_size": [
        *("--model", "mlp", "--samples", "640", "--epochs", "4", "--milestones", "1", "--gamma", "0.5"),
        *("--no-progress", "--compression", "topk:ratio=0.02", "--policy", "increase_batch_size:low=32,high=64,lag=0"),
    ],
    "buffers": [
        *("--model", "resnet20", "--data", "synthetic", "--image-size", "8", "--samples", "64", "--epochs", "2"),
        *("--no-progress", "--batch-size", "8", "--compression", "qsgd:bits=4"),
    ],
    "buckets": [*_MLP, "--compression", "topk:ratio=0.02", "--bucket-bytes", "20000"],
}
# Kills rank 1 before a step of its first life.
_KILLED = """
import os, signal
from hvdcomp.tools.commands.train import command
from hvdcomp.tools.train.ddp_learner import DDPLearner

real_step, made = DDPLearner.step, 0

def step(self, *batch):
    global made
    made += 1
    if (made, os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == ({step}, "1", "0"):
        os.kill(os.getpid(), signal.SIGKILL)
    return real_step(self, *batch)

DDPLearner.step = step
command(prog_name="train")
"""


def _train(
    ranks: int, controller: str, output: Path, options: list[str], **more: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    words = ["-m", "hvdcomp", "train", *options, "--output", str(output)]
    return run_forked_ranks(ranks, controller, words, {"COLUMNS": "200"} | more.get("environment", {}))


@pytest.mark.alone
@pytest.mark.thorough
@pytest.mark.parametrize("kind", _KINDS)
def test_weights_are_those_of_horovod(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("horovod.torch", reason="Horovod is not built here: run `hvdcomp build-horovod`")
    summaries = []
    for controller, backend in (("torchrun", "ddp"), ("mpi", "horovod")):
        done = _train(2, controller, tmp_path / backend, _KINDS[kind])
        assert done.returncode == 0, done.stdout[-4000:]
        summaries.append(summary := _summary(tmp_path / backend))
        assert (summary["backend"], summary["status"], summary["identical"]) == (backend, "finished", True)
        assert summary["compression_factor"] > 2
    ours, horovods = summaries
    assert ours["weights_sha256"] == horovods["weights_sha256"]
    assert (ours["loss"], ours["steps"]) == (horovods["loss"], horovods["steps"])
    assert "horovod" not in ours["versions"]


@pytest.mark.alone
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("at", "local"),
    [(13, ""), (3, ""), (13, "4"), (13, "6 --fragments 2 --delay 2 --local-share 0.5")],
    ids=["saved", "nothing-saved", "between-two-exchanges", "in-an-exchange"],
)
def test_a_killed_rank_comes_back(at: int, local: str, tmp_path: Path) -> None:
    """torchrun starts all ranks again; they go on from the checkpoint, or anew where there is none yet."""
    options = [*_MLP, "--compression", "topk:ratio=0.02", "--checkpoint-every", "10"]
    if local:
        options += ["--batch-size", "16", "--local-steps", *local.split(), "--steps", "40", "--optimizer", "adamw"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    done = _train(2, "torchrun", whole, [*options, "--checkpoint-folder", str(tmp_path / "one")])
    assert done.returncode == 0, done.stdout[-4000:]
    program = tmp_path / "program.py"
    program.write_text(_KILLED.replace("{step}", str(at)))
    words = [*options, "--checkpoint-folder", str(tmp_path / "other"), "--output", str(killed)]
    done = run_forked_ranks(2, "torchrun", ["--max-restarts", "1", str(program), *words], {"COLUMNS": "200"})
    assert done.returncode == 0, done.stdout[-6000:]
    _check_same_run(whole, killed, resumed_at=[10] if at > 10 else [])


@pytest.mark.alone
@pytest.mark.thorough
def test_what_is_wrong_is_said_once(tmp_path: Path) -> None:
    done = _train(2, "torchrun", tmp_path, ["--compression", "topq"])
    assert done.stdout.count("unknown compressor 'topq'") == 1, done.stdout
    assert done.returncode != 0


@pytest.mark.thorough
def test_one_process_alone_trains(tmp_path: Path) -> None:
    launched = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", TORCHRUN)
    environment = {name: value for name, value in os.environ.items() if name not in launched}
    words = [sys.executable, "-m", "hvdcomp", "train", "--backend", "ddp", *_KINDS["topk"], "--output", str(tmp_path)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "mlp on digits: finished" in done.stdout
    summary = _summary(tmp_path)
    assert (summary["world_size"], summary["backend"], summary["note"]) == (1, "ddp", None)


@pytest.mark.parametrize(
    ("backend", "framework", "torchrun", "chosen"),
    [
        ("auto", "torch", True, "ddp"),
        ("auto", "torch", False, "horovod"),
        ("auto", "tensorflow", False, "horovod"),
        ("ddp", "torch", False, "ddp"),
        ("horovod", "torch", False, "horovod"),
        ("horovod", "torch", True, "torchrun started"),
        ("auto", "tensorflow", True, "torchrun works only with PyTorch"),
        ("ddp", "tensorflow", False, "--backend ddp works only with PyTorch"),
    ],
)
def test_the_launcher_chooses_the_backend(backend: str, framework: str, torchrun: bool, chosen: str) -> None:
    environment = {TORCHRUN: "1"} if torchrun else {}
    if " " not in chosen:
        assert choose(backend, framework, environment) == chosen
    else:
        with pytest.raises(SetupError, match=chosen):
            choose(backend, framework, environment)


@pytest.mark.parametrize(
    ("timeout", "torchrun", "refusal"),
    [
        (
            60.0,
            False,
            "--timeout 60 works only with torch.distributed. With Horovod, leave it out. Instead, set HOROVOD_GLOO_",
        ),
        (0.0, True, "--timeout 0 must be more than 0 seconds"),
        (float("nan"), True, "--timeout nan must be more than 0 seconds"),
    ],
)
def test_a_timeout_that_cannot_be_is_refused(timeout: float, torchrun: bool, refusal: str) -> None:
    environment = {TORCHRUN: "1"} if torchrun else {}
    assert choose("ddp", "torch", {TORCHRUN: "1"}, timeout=60.0) == "ddp"
    with pytest.raises(SetupError, match=refusal):
        choose("auto", "torch", environment, timeout=timeout)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR, MASTER_PORT"),
        (
            {
                **{"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
                **{"TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_MAX_RESTARTS": "3"},
            },
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
        ),
    ],
)
def test_what_could_only_wait_is_refused(
    variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hvdcomp.tools.train.ranks_torch import TorchRanks

    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SetupError, match=message):
        TorchRanks()


@pytest.mark.alone
@pytest.mark.network
@pytest.mark.thorough
@pytest.mark.timeout(1200)
def test_from_nothing_to_the_first_epoch(tmp_path: Path) -> None:
    """Installed with its extras and without Horovod, the first epoch is there a minute after the installation."""
    import torch

    python = fresh_environment(tmp_path / "venv")
    pip = pip_with_index(python, tmp_path)
    # First, by its exact version: a range would bring the newest one, with CUDA.
    run(*pip, "install", f"torch=={torch.__version__.partition('+')[0]}")
    run(*pip, "install", f"{source_of_package(tmp_path / 'source')}[torch,train]")
    assert "horovod" not in run(*pip, "list").lower()
    torchrun = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    started = time.monotonic()
    said = run(*torchrun, "-m", "hvdcomp", "train", "--epochs", "1", "--compression", "topk:ratio=0.01")
    assert "epoch 1/1" in said
    assert "the same on every rank" in said
    assert time.monotonic() - started < 60
