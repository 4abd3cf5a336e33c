"""Whole runs of `hvdcomp train`: one process, two ranks with Gloo and with MPI, and runs that end early."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from tests.launched import run_forked_ranks, run_ranks

pytest.importorskip("sklearn")
pytest.importorskip("horovod.torch", reason="Horovod is not built here: run `hvdcomp build-horovod`")

pytestmark = pytest.mark.alone

_COMMAND = str(Path(sys.executable).parent / "hvdcomp")
_STEP_FIELDS = {
    "step",
    "epoch",
    "loss",
    "learning_rate",
    "accumulation",
    "ms",
    "bytes_sent",
    "bytes_in_node",
    "dense_bytes",
    "floats_sent",
    "encode_ms",
    "communicate_ms",
    "decode_ms",
}


# Runs the command once per list of options, on ranks that stay; RANK in an option is the rank's number.
_RUNS = """
import json, os, sys
from hvdcomp.tools.commands.train import command

rank = os.environ.get("OMPI_COMM_WORLD_RANK", "0")
for options in json.loads(sys.argv[1]):
    code = command.main([option.replace("RANK", rank) for option in options], "train", standalone_mode=False)
    print(f"rank {rank} ends with {code if isinstance(code, int) else 0}", flush=True)
"""


def _alone(*options: str, program: Sequence[str] = (_COMMAND, "train")) -> subprocess.CompletedProcess[str]:
    """One process, started by no launcher."""
    mine = ("OPAL_", "OMPI_", "PMIX_", "HOROVOD_", "SLURM_")
    variables = {key: value for key, value in os.environ.items() if not key.startswith(mine)}
    return subprocess.run(
        [*program, *options],
        env=variables | {"COLUMNS": "160"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )


def _ranks(controller: str, *options: str) -> subprocess.CompletedProcess[str]:
    return run_forked_ranks(2, controller, [_COMMAND, "train", *options], {"COLUMNS": "160"}, timeout=120)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line, parse_constant=_no_constant) for line in path.read_text().splitlines()]


def _summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text(), parse_constant=_no_constant)


def _check_files(folder: Path, steps: int, epochs: int) -> dict[str, Any]:
    """What holds for the files of every finished run."""
    summary, step_lines, epoch_lines = _summary(folder), _lines(folder / "steps.jsonl"), _lines(folder / "epochs.jsonl")
    assert summary["status"] == "finished"
    assert (summary["steps"], summary["epochs"]) == (steps, epochs)
    assert [line["step"] for line in step_lines] == list(range(1, steps + 1))
    assert all(set(line) == _STEP_FIELDS for line in step_lines)
    assert [line["epoch"] for line in epoch_lines] == list(range(1, epochs + 1))
    assert [line["step"] for line in epoch_lines] == [steps // epochs * epoch for epoch in range(1, epochs + 1)]
    assert epoch_lines[-1]["bytes_sent"] == summary["bytes_sent"] == sum(line["bytes_sent"] for line in step_lines)
    assert summary["dense_bytes"] == sum(line["dense_bytes"] for line in step_lines)
    assert summary["loss"] == epoch_lines[-1]["test_loss"]
    assert summary["identical"] is True
    assert len(summary["weights_sha256"]) == summary["world_size"]
    assert len(set(summary["weights_sha256"])) == 1
    assert set(summary["versions"]) == {"python", "hvdcomp", "torch", "horovod"}
    assert not list(folder.glob("*.part"))
    return summary


def test_one_process(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    folder, again = tmp_path / "run", tmp_path / "again"
    common = ["--model", "mlp", "--samples", "320", "--batch-size", "32"]
    options = [*common, "--epochs", "3", "--output", str(folder)]
    shorter = [*common, "--epochs", "1", "--output", str(again), "--no-progress"]
    runs = [
        [*options, "--tensorboard", "--compression", "topk:ratio=0.01"],
        options,  # is refused: the folder is not written over unasked, and what it holds stays
        [*shorter, "--tensorboard"],
        [*shorter, "--overwrite"],
    ]
    done = _alone(json.dumps(runs), program=(sys.executable, "-c", _RUNS))
    assert done.returncode == 0, done.stdout
    ends = [line[-1] for line in done.stdout.splitlines() if line.startswith("rank 0 ends with ")]
    assert ends == ["0", "2", "0", "0"]
    assert done.stdout.count("already contains a run") == 1
    summary = _check_files(folder, steps=30, epochs=3)
    assert (summary["world_size"], summary["bytes_sent"], summary["compression_factor"]) == (1, 0, None)
    assert summary["spec"] == "topk:ratio=0.01"
    assert "one rank" in summary["note"]
    assert "nothing is compressed or sent" in done.stdout
    assert summary["accuracy"] > 0.5
    assert summary["best_accuracy"] == max(line["accuracy"] for line in _lines(folder / "epochs.jsonl"))
    assert summary["ms_per_step"] > 0
    assert summary["ms_per_step_over"] == "median of steps 11 to 30"
    assert summary["options"]["batch_size"] == 32
    assert summary["options"]["lr"] == 0.05
    assert list((folder / "tensorboard").glob("events*"))
    _check_tensorboard(folder)
    assert "epoch 1/1" not in done.stdout
    _check_files(again, steps=10, epochs=1)
    assert not (again / "tensorboard").exists()


def _check_tensorboard(folder: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder / "tensorboard"))
    board.Reload()
    losses = [(event.step, pytest.approx(event.value)) for event in board.Scalars("step/loss")]
    assert losses == [(line["step"], line["loss"]) for line in _lines(folder / "steps.jsonl")]
    assert len(board.Scalars("epoch/accuracy")) == 3


@cache
def run_on_two_ranks(controller: str) -> tuple[Path, str]:
    """The folder of a run, which several tests look at, and what was said."""
    folder = Path(mkdtemp(prefix="hvdcomp-run-")) / controller
    done = _ranks(controller, "--compression", "topk:ratio=0.01", "--epochs", "3", "--output", str(folder))
    assert done.returncode == 0, done.stdout[-3000:]
    return folder, done.stdout


def test_two_ranks_compress_and_agree() -> None:
    """With Gloo and with MPI: the ranks agree, and so do the two runs."""
    summaries = {}
    for controller in ("gloo", "mpi"):
        folder, said = run_on_two_ranks(controller)
        assert "\x1b" not in said, "no control characters where no terminal is"
        for epoch in (1, 2, 3):
            assert said.count(f"epoch {epoch}/3  train loss") == 1, "rank 0 alone reports"
        summary = _check_files(folder, steps=132, epochs=3)
        assert "tracing" not in said
        assert (summary["world_size"], summary["ranks_per_host"], summary["controller"]) == (2, 2, controller)
        assert summary["note"] is None
        assert summary["parameters"] == 151_306
        assert summary["dense_bytes"] == 132 * 4 * 151_306
        assert summary["compression_factor"] > 20
        assert summary["accuracy"] > 0.85
        summaries[controller] = summary
    assert summaries["gloo"]["weights_sha256"] == summaries["mpi"]["weights_sha256"]
    assert summaries["gloo"]["accuracy"] == summaries["mpi"]["accuracy"]


@pytest.mark.thorough
def test_a_run_may_go_on_with_another_overlap(tmp_path: Path) -> None:
    """It changes nothing but a number of each step, by which the ranks agree before a bucket starts."""
    whole, changed = tmp_path / "whole", tmp_path / "changed"
    common = ["--model", "mlp", "--samples", "320", "--compression", "topk:ratio=0.02", "--bucket-bytes", "20000"]
    to_changed = [*common, "--output", str(changed), "--checkpoint-folder", str(tmp_path / "checkpoints")]
    runs = [
        [*common, "--output", str(whole), "--epochs", "2", "--overlap", "off"],
        [*to_changed, "--epochs", "1", "--overlap", "on"],
        [*to_changed, "--epochs", "2", "--overlap", "off", "--bucket-bytes", "30000"],
    ]
    done = run_forked_ranks(2, "mpi", ["-c", _RUNS, json.dumps(runs)], {"COLUMNS": "160"}, timeout=120)
    assert done.stdout.count("ends with 0") == 6, done.stdout[-3000:]
    assert _summary(changed)["weights_sha256"] == _summary(whole)["weights_sha256"]
    assert _summary(changed)["resumed_at"] == [10]
    options = _summary(changed)["options"]
    assert (options["overlap"], options["bucket_bytes"]) == ("off", 30000)
    columns = ([line["bytes_sent"] for line in _lines(folder / "steps.jsonl")] for folder in (changed, whole))
    more = [one - other for one, other in zip(*columns, strict=True)]
    assert more[1:10] == [more[1]] * 9
    assert more[1] > 0
    assert more[10:] == [0] * 10


@pytest.mark.thorough
def test_bytes_within_a_node_do_not_count_in_the_compression_factor(tmp_path: Path) -> None:
    options = ["--model", "mlp", "--samples", "320", "--epochs", "1", "--compression", "two_level(topk:ratio=0.01)"]
    nodes = {"HVDCOMP_RANKS_PER_NODE": "2", "HOROVOD_DYNAMIC_PROCESS_SETS": "1", "COLUMNS": "160"}
    done = run_forked_ranks(4, "mpi", [_COMMAND, "train", *options, "--output", str(tmp_path)], nodes, timeout=120)
    assert done.returncode == 0, done.stdout[-3000:]
    summary = _check_files(tmp_path, steps=5, epochs=1)
    in_node = sum(line["bytes_in_node"] for line in _lines(tmp_path / "steps.jsonl"))
    assert in_node > summary["dense_bytes"]
    assert summary["bytes_in_node_per_step"] == in_node / 5
    assert summary["compression_factor"] == summary["dense_bytes"] / (summary["bytes_sent"] - in_node)
    assert f"{summary['compression_factor']:.1f} (without bytes that stay within a node)" in done.stdout


@pytest.mark.thorough
def test_a_policy_makes_the_batch_larger(tmp_path: Path) -> None:
    """Where the schedule halves the learning rate, the batch doubles, and an epoch has half as many steps."""
    folder = tmp_path / "run"
    options = ["--epochs", "2", "--milestones", "1", "--gamma", "0.5", "--output", str(folder)]
    policy = "increase_batch_size:low=32,high=64,lag=0"
    done = _ranks("gloo", "--compression", "topk:ratio=0.01", "--policy", policy, *options)
    assert done.returncode == 0, done.stdout[-3000:]
    lines = _lines(folder / "steps.jsonl")
    assert [line["accumulation"] for line in lines] == [1] * 44 + [2] * 22
    assert [line["learning_rate"] for line in lines] == [0.03] * 44 + [0.015] * 22  # as scheduled
    assert _summary(folder)["identical"] is True
    assert [line["kind"] for line in _lines(folder / "decisions.jsonl")] == ["start", "decision", "decision"]


@pytest.mark.thorough
def test_ranks_and_backward_passes_make_one_batch(tmp_path: Path) -> None:
    """Two ranks of two passes of 8 see what one process with a batch of 32 sees, and learn the same."""
    schedule = ["--warm-up", "1", "--milestones", "2", "--clip-norm", "0.5", "--nesterov", "--weight-decay", "0.01"]
    common = ["--model", "mlp", "--samples", "320", "--epochs", "3", *schedule]
    done = _alone(*common, "--batch-size", "32", "--output", str(tmp_path / "one"))
    assert done.returncode == 0, done.stdout
    split = ["--batch-size", "8", "--backward-passes-per-step", "2"]
    done = _ranks("mpi", *common, *split, "--output", str(tmp_path / "two"))
    assert done.returncode == 0, done.stdout[-3000:]
    one, two = (_check_files(tmp_path / name, steps=30, epochs=3) for name in ("one", "two"))
    assert two["compression_factor"] == pytest.approx(1, abs=0.001)
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-4)
    assert two["train_loss"] == pytest.approx(one["train_loss"], rel=1e-4)
    rates = [line["learning_rate"] for line in _lines(tmp_path / "two" / "steps.jsonl")]
    assert rates[:11] == pytest.approx([0.05 * step / 10 for step in range(11)])
    assert rates[19:21] == pytest.approx([0.05, 0.005])


@pytest.mark.thorough
def test_language_model_on_two_ranks(tmp_path: Path) -> None:
    options = ["--model", "lstm", "--data", "stdlib-text", "--text-size", "40000", "--epochs", "3"]
    done = _ranks("mpi", *options, "--compression", "powersgd:rank=2", "--output", str(tmp_path))
    assert done.returncode == 0, done.stdout[-3000:]
    summary = _summary(tmp_path)
    assert summary["identical"] is True
    perplexities = [line["perplexity"] for line in _lines(tmp_path / "epochs.jsonl")]
    assert perplexities[-1] < perplexities[0]
    assert summary["perplexity"] == perplexities[-1] == pytest.approx(math.exp(summary["loss"]))
    assert summary["best_perplexity"] == min(perplexities)
    assert "accuracy" not in summary


@pytest.mark.thorough
def test_batch_norm_on_two_ranks(tmp_path: Path) -> None:
    options = ["--model", "resnet20", "--data", "synthetic", "--image-size", "8", "--samples", "256", "--epochs", "2"]
    done = _ranks("mpi", *options, "--batch-size", "32", "--output", str(tmp_path))
    assert done.returncode == 0, done.stdout[-3000:]
    assert _check_files(tmp_path, steps=8, epochs=2)["dense_bytes"] == 8 * 4 * 272_474


@pytest.mark.thorough
def test_bad_spec_under_horovodrun() -> None:
    command = [_COMMAND, "train", "--compression", "topk:ratio=7"]
    done = run_ranks(2, "gloo", command, {"COLUMNS": "160"}, timeout=120, horovodrun=["horovodrun"])
    assert done.returncode != 0
    assert "Error: " in done.stdout
    assert "ratio" in done.stdout
    assert done.stdout.count("Usage: ") == 1, "rank 0 alone speaks"
    assert "trainer.py" not in done.stdout, "a traceback of horovodrun's own is all there may be"


def test_what_each_rank_finds_wrong_is_said_once_and_ends_all() -> None:
    """Before the ranks are connected: a launcher ends all with the first, and rank 0 has said it by then."""
    done = run_ranks(2, "mpi", [_COMMAND, "train", "--compression", "zip"], {"COLUMNS": "160"}, timeout=60)
    assert done.returncode == 2, done.stdout
    assert done.stdout.count("Error: unknown compressor 'zip'") == 1, done.stdout


def test_what_is_wrong_on_any_rank_is_said_once_and_stops_all(tmp_path: Path) -> None:
    """And a run that diverges ends."""
    program = tmp_path / "program.py"
    program.write_text(_RUNS)
    folder = tmp_path / "run"
    (tmp_path / "data0").mkdir()
    for name in ("wiki.train.tokens", "wiki.test.tokens"):
        (tmp_path / "data0" / name).write_text("a cat and a dog \n" * 1000)
    refused = {
        "--batch-size 1000 (times 1 backward passes) is more than the 718": ["--batch-size", "1000"],
        "--model vgg16 needs images of at least 32x32": ["--model", "vgg16"],
        f"on rank 1: --data-dir {tmp_path}/data1 contains no WikiText-2": [
            *("--model", "lstm", "--data", "wikitext2"),
            *("--data-dir", f"{tmp_path}/dataRANK"),
        ],
        "the ranks differ in seed: 0 on rank 0, 1 on rank 1": ["--seed", "RANK"],
    }
    diverging = ["--model", "mlp", "--lr", "1e20", "--no-progress", "--output", str(folder)]
    arguments = [str(program), json.dumps([*refused.values(), diverging])]
    done = run_forked_ranks(2, "mpi", arguments, {"COLUMNS": "160"}, timeout=120)
    assert done.returncode == 0, done.stdout
    for message in refused:
        assert done.stdout.count(message) == 1, done.stdout
    assert done.stdout.count("the loss is no longer a finite number") == 1
    assert done.stdout.count("Error: ") == len(refused) + 1
    assert "Traceback" not in done.stdout
    for rank in (0, 1):
        assert done.stdout.count(f"rank {rank} ends with 2") == len(refused)
        assert done.stdout.count(f"rank {rank} ends with 1") == 1
    summary = _summary(folder)
    assert summary["status"] == "diverged"
    assert summary["epochs"] == 0
    assert summary["steps"] == 20
    assert _lines(folder / "steps.jsonl")[-1]["loss"] is None
