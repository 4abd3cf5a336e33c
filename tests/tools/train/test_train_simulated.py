"""`hvdcomp train --simulate-ranks`: the weights of real ranks, bit for bit, and times that a link would take."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hvdcomp.tools.cli import main
from tests.launched import launcher_variables, run_forked_ranks, run_ranks

pytest.importorskip("mnist1d", reason="mnist1d is not installed: pip install 'hvdcomp[mnist1d]'")
pytest.importorskip("torch")

_MLP = ["--model", "mlp", "--data", "digits", "--samples", "640"]
_GPT = ["--model", "gpt", "--data", "text", "--text-size", "20000", "--batch-size", "2", "--steps", "4"]
_KINDS = {
    "none": [*_GPT, "--compression", "none"],
    "fp16": [*_MLP, "--steps", "10", "--compression", "fp16"],
    "topk": [*_MLP, "--steps", "10", "--compression", "topk:ratio=0.02"],
    "attention": [*_GPT, "--compression", "topk:ratio=0.02"],
    "policy": [
        *(*_MLP, "--epochs", "3", "--compression", "powersgd:rank=2"),
        *("--policy", "accordion:low=2,high=1,interval=1", "--backward-passes-per-step", "2", "--clip-norm", "0.5"),
    ],
    "batch_size": [
        *("--model", "mlp", "--samples", "640", "--epochs", "3", "--milestones", "1", "--gamma", "0.5"),
        *("--compression", "topk:ratio=0.02", "--policy", "increase_batch_size:low=32,high=64,lag=0"),
    ],
    "buffers": [
        *("--model", "resnet20", "--data", "synthetic", "--image-size", "8", "--samples", "64", "--epochs", "2"),
        *("--batch-size", "8", "--compression", "qsgd:bits=4"),
    ],
    "scatter": [*_MLP, "--steps", "10", "--compression", "int8:exchange=scatter"],
    "momenta": [
        *(*_GPT, "--steps", "6", "--optimizer", "compressed-adam", "--freeze-after", "3"),
        *("--freeze-compression", "int8", "--compression", "efsignsgd", "--refreshes-per-gap", "2"),
    ],
    "local_steps": [
        *(*_GPT, "--steps", "9", "--optimizer", "compressed-adam", "--freeze-after", "4", "--local-steps", "3"),
        *("--lr", "1e-4", "--freeze-compression", "powersgd:rank=2", "--compression", "efsignsgd"),
    ],
    "rotated_momenta": [
        *(*_GPT, "--steps", "9", "--optimizer", "compressed-adam", "--freeze-after", "4", "--local-steps", "3"),
        *("--freeze-compression", "int4", "--compression", "eden:bits=1"),
    ],
    "rotated_local_steps": [
        *(*_GPT, "--steps", "9", "--optimizer", "adamw", "--local-steps", "3", "--compression", "eden"),
    ],
    "local_steps_and_an_outer_one": [
        *(*_GPT, "--steps", "9", "--optimizer", "adamw", "--local-steps", "3", "--compression", "topk:ratio=0.02"),
        *("--backward-passes-per-step", "2", "--clip-norm", "0.5"),
    ],
    "streamed_local_steps": [
        *(*_GPT, "--steps", "11", "--optimizer", "adamw", "--local-steps", "6", "--fragments", "2", "--delay", "2"),
        *("--local-share", "0.5", "--compression", "topk:ratio=0.02"),
    ],
    "muon": [*_GPT, "--optimizer", "muon", "--compression", "topk:ratio=0.02"],
    "rows": ["--model", "dlrm", "--data", "clicks", "--steps", "6", "--compression", "topk:ratio=0.1"],
    "dropout": [*_GPT, "--compression", "int8"],
}
_SAME = ("weights_sha256", "loss", "steps", "bytes_sent", "floats_sent", "compression_factor", "tables")


def _simulated(ranks: int, folder: Path, *options: str) -> dict[str, Any]:
    words = ["train", "--simulate-ranks", str(ranks), *options, "--no-progress", "--output", str(folder / "simulated")]
    done = CliRunner().invoke(main, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads((folder / "simulated" / "summary.json").read_text())


def _in_a_process(ranks: int, folder: Path, *options: str) -> dict[str, Any]:
    """`_simulated`, in a process of its own: the threads of TensorFlow are chosen once in each."""
    words = ["-m", "hvdcomp", "train", "--simulate-ranks", str(ranks), *options, "--no-progress"]
    command = [sys.executable, *words, "--output", str(folder / "simulated")]
    done = subprocess.run(command, env=launcher_variables(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "simulated" / "summary.json").read_text())


def _real(ranks: int, controller: str, folder: Path, *options: str) -> dict[str, Any]:
    words = ["-m", "hvdcomp", "train", *options, "--no-progress", "--output", str(folder / "real")]
    start = run_ranks if "tensorflow" in options else run_forked_ranks
    done = start(ranks, controller, words, {"COLUMNS": "200"})
    assert done.returncode == 0, done.stdout[-4000:]
    return json.loads((folder / "real" / "summary.json").read_text())


@pytest.mark.alone
@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("topk", 2),
        *(pytest.param(kind, 4 - place % 2 * 2, marks=pytest.mark.thorough) for place, kind in enumerate(_KINDS)),
    ],
)
def test_simulated_ranks_end_with_the_weights_of_real_ones(kind: str, ranks: int, tmp_path: Path) -> None:
    found = _simulated(ranks, tmp_path, *_KINDS[kind])
    # What of a larger model is sent during its backward pass has padding of its own.
    real = _real(ranks, "torchrun", tmp_path, *_KINDS[kind], "--overlap", "off")
    assert len(set(found["weights_sha256"])) == 1
    assert {key: found[key] for key in _SAME} == {key: real[key] for key in _SAME}


def test_a_run_that_does_not_finish_has_no_result_of_the_test_part(tmp_path: Path) -> None:
    """Of one step an epoch, of which the first has a rate of zero, and the second loses the weights."""
    options = ["--samples", "16", "--batch-size", "16", "--validation-samples", "100", "--warm-up", "4", "--lr", "1e20"]
    words = ["train", "--simulate-ranks", "1", "--model", "mlp", *options, "--no-progress", "--output", str(tmp_path)]
    assert CliRunner().invoke(main, words, catch_exceptions=False).exit_code == 1
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["best_over"]) == ("diverged", "the validation part, at the ends of epochs")
    assert summary["epochs"] >= 1
    assert summary["best_accuracy"] is not None
    assert (summary["accuracy"], summary["loss"]) == (None, None)


@pytest.mark.alone
@pytest.mark.thorough
def test_the_click_model_has_these_weights_under_horovod_too(tmp_path: Path) -> None:
    options = [*_KINDS["rows"], "--clip-norm", "0.5", "--backward-passes-per-step", "2", "--batch-size", "32"]
    found = _simulated(2, tmp_path, *options)
    real = _real(2, "gloo", tmp_path, *options)
    for same in ("weights_sha256", "loss", "tables"):  # of layers, Horovod sends each gradient's presence
        assert found[same] == real[same]


@pytest.mark.parametrize("steps", ["auto:start=2", "6 --fragments 2 --delay 2 --local-share 0.5"])
def test_local_steps_of_any_length_end_with_the_same_weights(steps: str, tmp_path: Path) -> None:
    """The outer weights are evaluated, the last exchange is one more, and bytes of all steps are those of the run."""
    options = [*_MLP, "--steps", "21", "--local-steps", *steps.split(), "--compression", "topk:ratio=0.1"]
    options += ["--validation-samples", "64", "--evaluate-every", "10", "--outer-momentum", "0.5"]
    found = _simulated(2, tmp_path, *options)
    assert found["identical"]
    lines = (tmp_path / "simulated" / "steps.jsonl").read_text().splitlines()
    sent = [json.loads(line)["bytes_sent"] for line in lines]
    assert sum(sent) == found["bytes_sent"]
    assert sent[-1] > 0
    assert sent.count(0) >= 2


@pytest.mark.alone
@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "ranks"), [("topk", 2), ("policy", 2), ("none", 2), ("momenta", 2), ("gathered", 4)])
def test_so_they_do_in_tensorflow(kind: str, ranks: int, tmp_path: Path) -> None:
    """On four ranks what is allreduced is left out: what Horovod fuses, and so the order of additions, varies."""
    pytest.importorskip("horovod.tensorflow", reason="Horovod is not built here: run `hvdcomp build-horovod`")
    gathered = [*_MLP, "--steps", "6", "--compression", '{"*": "int8"}']
    options = ["--framework", "tensorflow", *({**_KINDS, "gathered": gathered}[kind])]
    found = _in_a_process(ranks, tmp_path, *options)
    real = _real(ranks, "gloo", tmp_path, *options)
    assert found["weights_sha256"] == real["weights_sha256"]
    assert found["loss"] == real["loss"]


def test_a_link_takes_time_and_changes_nothing_else(tmp_path: Path) -> None:
    options = [*_MLP, "--steps", "8", "--compression", "topk:ratio=0.01"]
    seconds = {}
    for link in ("10gbit", "1mbit"):
        (tmp_path / link).mkdir()
        summary = _simulated(4, tmp_path / link, *options, "--link", link)
        seconds[link] = summary["trained_seconds"]
        digest = summary["weights_sha256"]
    assert digest == _simulated(4, tmp_path, *options)["weights_sha256"]
    # Of what each rank sends, a link carries 1.5 times what 4 ranks allreduce, and 3 times what they gather.
    sent = summary["bytes_sent"] * 8 / 1e6
    assert 1.5 * sent < seconds["1mbit"] - seconds["10gbit"] < 3.5 * sent


def test_one_run_is_timed_on_several_links(tmp_path: Path) -> None:
    options = [*_MLP, "--validation-samples", "100", "--evaluate-every", "4", "--steps", "8"]
    summary = _simulated(2, tmp_path, *options, "--until", "accuracy=0.01", "--link", "none,1mbit,10gbit")
    line = json.loads((tmp_path / "simulated" / "evaluations.jsonl").read_text().splitlines()[0])
    seconds = line["trained_seconds_on_links"]
    assert list(seconds) == ["none", "1mbit", "10gbit"]
    assert seconds["none"] == pytest.approx(line["trained_seconds"], rel=0.1)  # a moment later
    assert seconds["none"] < seconds["10gbit"] < seconds["1mbit"]
    sent = line["bytes_sent"] * 8 / 1e6  # of two ranks, what each sends is what its link carries
    assert seconds["1mbit"] - seconds["none"] == pytest.approx(sent, rel=0.2)
    assert summary["trained_seconds_on_links"] == summary["until"]["trained_seconds_on_links"] == seconds


def test_ranks_may_share_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVDCOMP_RANKS_PER_NODE", "2")
    options = [*_MLP, "--steps", "3", "--compression", "two_level(topk:ratio=0.01)"]
    summary = _simulated(4, tmp_path, *options)
    assert (summary["bytes_in_node_per_step"] > 0, summary["ranks_per_host"]) == (True, 2)
    assert summary["identical"]
    for given, said in (("3", "the same number of ranks on every node"), ("two", "'two' is not allowed")):
        monkeypatch.setenv("HVDCOMP_RANKS_PER_NODE", given)
        done = CliRunner().invoke(main, ["train", "--simulate-ranks", "4", *options])
        assert (done.exit_code, said in done.output) == (1, True), done.output


def test_a_run_ends_at_its_target(tmp_path: Path) -> None:
    options = ["--model", "cnn1d", "--data", "mnist1d", "--samples", "1000", "--evaluate-every", "10"]
    summary = _simulated(1, tmp_path, *options, "--until", "accuracy=0.2", "--steps", "400")
    until = summary["until"]
    lines = (tmp_path / "simulated" / "evaluations.jsonl").read_text().splitlines()
    evaluations = [json.loads(line) for line in lines]
    assert (summary["status"], until["reached"], until["target"]) == ("finished", True, "accuracy=0.2")
    assert summary["steps"] == until["step"] == evaluations[-1]["step"] < 400
    assert [one["step"] for one in evaluations] == list(range(10, until["step"] + 1, 10))
    assert all(one["part"] == "validation" for one in evaluations)
    assert [one["accuracy"] >= 0.2 for one in evaluations] == [False] * (len(evaluations) - 1) + [True]
    assert evaluations[-1]["accuracy"] == until["accuracy"] != summary["accuracy"], "the last one is of the test part"
    assert until["trained_seconds"] == pytest.approx(summary["trained_seconds"])


@pytest.mark.parametrize(
    "framework", ["torch", pytest.param("tensorflow", marks=[pytest.mark.thorough, pytest.mark.alone])]
)
def test_a_regression_is_measured_by_the_root_of_its_loss(framework: str, tmp_path: Path) -> None:
    if framework == "tensorflow":
        pytest.importorskip("tf_keras")
    options = ["--framework", framework, "--model", "mlp", "--data", "heavy-tails", "--samples", "6400"]
    options += ["--lr", "2e-3", "--compression", "int8", "--evaluate-every", "4", "--until", "rmse=0.8"]
    summary = _in_a_process(2, tmp_path, *options)
    lines = (tmp_path / "simulated" / "evaluations.jsonl").read_text().splitlines()
    first, *_, last = (json.loads(line) for line in lines)
    assert summary["rmse"] == pytest.approx(summary["loss"] ** 0.5)
    assert "accuracy" not in summary
    assert "perplexity" not in summary
    assert last["rmse"] <= 0.8 < first["rmse"] < 1.2, "guessing the mean has 1"
    assert (summary["identical"], summary["until"]["rmse"]) == (True, last["rmse"])


def test_a_loss_that_is_lost_in_the_last_steps_is_no_finished_run() -> None:
    words = ["train", "--simulate-ranks", "2", *_MLP, "--steps", "5", "--lr", "1e30", "--no-progress"]
    done = CliRunner().invoke(main, words)
    assert (done.exit_code, "no longer a finite number" in done.output) == (1, True), done.output


def test_what_is_wrong_is_said_once() -> None:
    done = CliRunner().invoke(main, ["train", "--simulate-ranks", "2", "--compression", "zip"])
    assert (done.exit_code, done.output.count("unknown compressor 'zip'")) == (2, 1)
