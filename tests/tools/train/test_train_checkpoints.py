"""Runs that stop and go on: with real ranks and real signals, and the same in the end as runs that never stopped."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hvdcomp.tools.launch.promise import EXIT_SAVED
from hvdcomp.tools.train.checkpoints import KEPT, Checkpoints
from hvdcomp.tools.train.options import TrainingOptions
from hvdcomp.tools.train.ranks import Ranks, RunRefused
from tests.decision_lines import whole_lines
from tests.launched import run_forked_ranks, run_ranks
from tests.tools.train.test_train_data import _write_cifar10

pytest.importorskip("sklearn")
pytest.importorskip("horovod.torch", reason="Horovod is not built here: run `hvdcomp build-horovod`")

pytestmark = pytest.mark.alone

# Runs `hvdcomp train` once per entry of a list, on ranks that stay. An entry may say after how many steps rank 1 gets a
# signal, or a Python statement to run then on each rank; or a statement to run before it. A statement may fill the
# disk: no file can then grow beyond this size. The ranks look every three steps whether one was told to stop.
_PROGRAM = """
import json, os, resource, shutil, signal, sys
from pathlib import Path

import click

from hvdcomp.tools.commands.train import command
import hvdcomp.tools.train.run as training
from hvdcomp.tools.train.frameworks import learner_class

training._STEPS_BETWEEN_CHECKS = 3
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", 0))
runs = json.loads(sys.argv[1])
learner = learner_class(runs[0].get("framework", "torch"))
real_step = learner.step
at, made = {}, 0

def step(self, *batch):
    global made
    made += 1
    if made == at.get("step"):
        if "do" in at:
            exec(at["do"])
        elif rank == 1:
            os.kill(os.getpid(), getattr(signal, at["signal"]))
    return real_step(self, *batch)

def fill_disk(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

learner.step = step
for run in runs:
    at, made = run.get("at", {}), 0
    fill_disk(resource.RLIM_INFINITY)
    exec(run.get("before", ""))
    options = ["--framework", run.get("framework", "torch"), "--no-progress", *run["options"]]
    try:
        code = command.main(options, "train", standalone_mode=False) or 0
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    print(f"run {runs.index(run)} ends on rank {rank} with {code}", flush=True)
"""


def _run(ranks: int, tmp_path: Path, runs: list[dict[str, Any]], timeout: float = 240) -> str:
    """What the ranks wrote, if they all came to the end."""
    done = _launch(ranks, tmp_path, runs, timeout)
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def _launch(
    ranks: int, tmp_path: Path, runs: list[dict[str, Any]], timeout: float = 240
) -> subprocess.CompletedProcess[str]:
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    in_tensorflow = any(run.get("framework") == "tensorflow" for run in runs)
    start = run_ranks if in_tensorflow else run_forked_ranks
    return start(ranks, "mpi", [str(program), json.dumps(runs)], {"COLUMNS": "200"}, timeout)


def _lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file, without times, which no two runs share."""
    times = {"ms", "seconds", "encode_ms", "communicate_ms", "decode_ms"}
    return [
        {key: value for key, value in json.loads(line).items() if key not in times}
        for line in path.read_text().splitlines()
    ]


def _summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def _check_same_run(one: Path, other: Path, resumed_at: list[int]) -> None:
    """That the second run, which stopped and went on, is the first."""
    first, second = _summary(one), _summary(other)
    assert (first["status"], second["status"]) == ("finished", "finished")
    assert second["resumed_at"] == resumed_at
    assert second["weights_sha256"] == first["weights_sha256"]
    for field in ("steps", "epochs", "loss", "train_loss", "dense_bytes", "floats_sent"):
        assert second[field] == first[field], field
    # With overlap ranks tell each other in each step, in 8 bytes, whether all make it, and in 8 more whether what
    # starts early is finite; but not in the first step of each run, which learns the order of gradients.
    saved = first["bytes_sent"] - second["bytes_sent"]
    assert saved in (0, 16 * len(resumed_at)), saved
    for file in ("steps.jsonl", "epochs.jsonl"):
        theirs, ours = _lines(one / file), _lines(other / file)
        if saved:
            for line in theirs + ours:
                del line["bytes_sent"]
        assert ours == theirs


def _decisions(folder: Path) -> list[dict[str, Any]]:
    return [line for line in whole_lines(folder / "decisions.jsonl") if line["kind"] == "decision"]


_TOPK = ["--model", "mlp", "--samples", "640", "--epochs", "3", "--compression", "topk:ratio=0.02"]
_KINDS = {
    # Named by what each of them has to bring over.
    "residuals": _TOPK,
    "warm_starts": ["--model", "mlp", "--samples", "640", "--epochs", "3", "--compression", "powersgd:rank=2"],
    "draws": ["--model", "mlp", "--samples", "640", "--epochs", "3", "--compression", "randomk:ratio=0.1"],
    "policy": [
        *("--model", "mlp", "--samples", "320", "--epochs", "5", "--compression", "topk:ratio=0.02"),
        *("--policy", "accordion:low=0.1,high=0.02"),
    ],
    "batch_size": [
        *("--model", "mlp", "--samples", "640", "--epochs", "4", "--milestones", "1", "--gamma", "0.5"),
        *("--compression", "topk:ratio=0.02", "--policy", "increase_batch_size:low=32,high=64,lag=0"),
    ],
    "buffers": [
        *("--model", "resnet20", "--data", "synthetic", "--image-size", "8", "--samples", "192", "--epochs", "3"),
        *("--batch-size", "8", "--compression", "topk:ratio=0.02"),
    ],
    "muon": [
        *("--model", "mlp", "--samples", "640", "--epochs", "3", "--optimizer", "muon"),
        *("--compression", "topk:ratio=0.02"),
    ],
    "augmentation": [
        *("--model", "cnn", "--data", "cifar10", "--data-dir", "DATA", "--batch-size", "1", "--epochs", "3"),
        *("--compression", "topk:ratio=0.02"),
    ],
    "dropout": [  # of words: the model for characters has none
        *("--model", "lstm", "--data", "stdlib-text", "--text-unit", "word", "--text-size", "60000"),
        *("--sequence-length", "4", "--samples", "80", "--batch-size", "2", "--epochs", "1"),
        *("--compression", "topk:ratio=0.02"),
    ],
}


def _told_to_stop(tmp_path: Path, kinds: Sequence[str]) -> list[dict[str, Any]]:
    """Of each kind a whole run, and a run that goes on after a signal to one rank in the middle of an epoch."""
    (tmp_path / "data").mkdir()
    _write_cifar10(tmp_path / "data")
    runs: list[dict[str, Any]] = []
    for name in kinds:
        options = [str(tmp_path / "data") if option == "DATA" else option for option in _KINDS[name]]
        stopped = [*options, "--output", str(tmp_path / name / "b"), "--checkpoint-folder", str(tmp_path / name / "c")]
        runs += [
            {"options": [*options, "--output", str(tmp_path / name / "a")]},
            {"options": stopped, "at": {"step": 14, "signal": "SIGUSR1" if name != "draws" else "SIGTERM"}},
            {"options": stopped},
        ]
    return runs


def _check_told_to_stop(tmp_path: Path, kinds: Sequence[str], said: str) -> None:
    """That all ranks have saved after the same step, and the run was the whole one; of the first runs of a start."""
    for number in range(3 * len(kinds)):
        for rank in (0, 1):
            assert f"run {number} ends on rank {rank} with {EXIT_SAVED if number % 3 == 1 else 0}" in said
    for name in kinds:
        folder = tmp_path / name
        (stopped_at,) = _summary(folder / "b")["resumed_at"]
        assert 14 <= stopped_at <= 14 + 3
        steps = [line["step"] for line in _lines(folder / "b" / "epochs.jsonl")]
        assert stopped_at not in steps, "it stopped within an epoch"
        _check_same_run(folder / "a", folder / "b", [stopped_at])
        held = _held(folder / "c")
        assert len(held) == 2, "the newest two are kept"
        assert held[1] == f"step-{_summary(folder / 'a')['steps']:08d}"
    for name in {"policy", "batch_size"} & {*kinds}:
        decisions = _decisions(tmp_path / name / "a")
        assert len(decisions) >= 2
        assert _decisions(tmp_path / name / "b") == decisions


@pytest.fixture(scope="module")
def gone_on(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run that was told to stop and one that was killed, which then go on in one start; and what is said there."""
    tmp_path = tmp_path_factory.mktemp("gone_on")
    whole = [*_TOPK, "--output", str(tmp_path / "a")]
    options = [*_TOPK, "--output", str(tmp_path / "b"), "--checkpoint-folder", str(tmp_path / "c")]
    options += ["--checkpoint-every", "7", "--tensorboard"]
    killed = _launch(2, tmp_path, [{"options": options, "at": {"step": 30, "signal": "SIGKILL"}}])
    assert killed.returncode != 0
    assert _held(tmp_path / "c") == ["step-00000021", "step-00000028"]
    (tmp_path / "c" / "step-00000035.part").mkdir()  # as of a run that was killed while it saved
    with (tmp_path / "b" / "steps.jsonl").open("a") as file:
        file.write('{"step": 31, "lo')  # and one that was killed while it wrote
    runs = [*_told_to_stop(tmp_path, ["policy"]), {"options": options}, {"options": whole}, *_ended_early(tmp_path)]
    said = _run(2, tmp_path, runs)
    return tmp_path, said


def test_a_run_that_is_told_to_stop_goes_on_as_if_it_had_not(gone_on: tuple[Path, str]) -> None:
    folder, said = gone_on
    _check_told_to_stop(folder, ["policy"], said)


@pytest.mark.thorough
def test_runs_of_every_kind_that_are_told_to_stop_go_on_as_if_they_had_not(tmp_path: Path) -> None:
    _check_told_to_stop(tmp_path, [*_KINDS], _run(2, tmp_path, _told_to_stop(tmp_path, [*_KINDS]), timeout=500))


def test_a_run_that_was_killed_goes_on_from_its_last_checkpoint(gone_on: tuple[Path, str]) -> None:
    tmp_path, _ = gone_on
    _check_same_run(tmp_path / "a", tmp_path / "b", [28])
    assert _held(tmp_path / "c") == ["step-00000056", "step-00000060"]
    _check_tensorboard(tmp_path / "b")


def _ended_early(tmp_path: Path) -> list[dict[str, Any]]:
    """A whole run of 25 steps, 20 an epoch, and runs of one folder that end within epochs: at a step, at a target
    twice, and at the 25th step."""
    common = ["--model", "mlp", "--samples", "640", "--milestones", "1", "--compression", "topk:ratio=0.02"]
    common += ["--validation-samples", "100", "--batch-size", "16", "--evaluate-every", "4"]
    early = [*common, "--output", str(tmp_path / "early"), "--checkpoint-folder", str(tmp_path / "ended")]
    reached = [*early, "--steps", "25", "--until", "accuracy=0.01"]
    kept = f"rank == 0 and shutil.copytree({str(tmp_path / 'early')!r}, {str(tmp_path / 'reached')!r})"
    return [
        {"options": [*common, "--steps", "25", "--output", str(tmp_path / "at-once")]},
        {"options": [*early, "--steps", "5"]},
        {"options": reached},
        {"options": reached},
        {"options": [*early, "--steps", "25", "--until", "accuracy=1"], "before": kept},
    ]


def test_a_run_that_ended_within_an_epoch_goes_on_with_the_rest_of_it(gone_on: tuple[Path, str]) -> None:
    tmp_path, _ = gone_on
    rates = [line["learning_rate"] for line in _lines(tmp_path / "at-once" / "steps.jsonl")]
    assert rates == pytest.approx([0.05] * 20 + [0.005] * 5)
    _check_same_run(tmp_path / "at-once", tmp_path / "early", [5, 8])
    evaluated = [_lines(tmp_path / name / "evaluations.jsonl") for name in ("at-once", "early")]
    for line in evaluated[0] + evaluated[1]:
        del line["trained_seconds"], line["bytes_sent"]
    assert evaluated[0] == evaluated[1]


def test_a_reached_target_is_kept_for_that_target_alone(gone_on: tuple[Path, str]) -> None:
    tmp_path, _ = gone_on
    reached, later = _summary(tmp_path / "reached"), _summary(tmp_path / "early")
    assert (reached["resumed_at"], reached["steps"]) == ([5, 8], 8)
    assert (reached["until"]["reached"], reached["until"]["step"]) == (True, 8)
    assert [line["step"] for line in _lines(tmp_path / "reached" / "evaluations.jsonl")] == [4, 8]
    assert [line["step"] for line in _lines(tmp_path / "reached" / "epochs.jsonl")] == [8]
    assert later["until"] == {"target": "accuracy=1", "reached": False}


def _held(folder: Path) -> list[str]:
    return sorted(place.name for place in folder.iterdir())


def _check_tensorboard(folder: Path) -> None:
    """Each step once, though steps 29 and 30 were made twice; and what it cost, as in steps.jsonl."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder / "tensorboard"))
    board.Reload()
    assert [event.step for event in board.Scalars("step/loss")] == list(range(1, 61))
    sent = [(event.step, event.value) for event in board.Scalars("hvdcomp/bytes_sent")]
    assert sent == [(line["step"], line["bytes_sent"]) for line in _lines(folder / "steps.jsonl")]
    assert {round(event.value, 6) for event in board.Scalars("hvdcomp/mean_ratio")} == {0.02}
    assert "step/bytes_sent" not in board.Tags()["scalars"]


@pytest.mark.thorough
def test_a_finished_run_is_found_finished_and_can_be_made_longer(tmp_path: Path) -> None:
    options = [*_TOPK, "--output", str(tmp_path / "b"), "--checkpoint-folder", str(tmp_path / "c")]
    longer = ["--epochs", "4"]
    runs = [options, options, [*options, *longer], [*_TOPK, *longer, "--output", str(tmp_path / "a")]]
    _run(2, tmp_path, [{"options": one} for one in runs])
    _check_same_run(tmp_path / "a", tmp_path / "b", [60])  # the second run had nothing to do, and nothing to save


# A checkpoint with a file of another program, and the right digests.
_FOREIGN = """
import hashlib, torch
shutil.copytree({folder!r}, {copy!r})
place = max(Path({copy!r}).glob("step-*"))
torch.save([1, 2], place / "model.pt")
(place / "SHA256SUMS").unlink()
digests = [(hashlib.sha256(file.read_bytes()).hexdigest(), file.name) for file in place.iterdir()]
(place / "SHA256SUMS").write_text("".join("%s  %s\\n" % pair for pair in digests))
"""


@pytest.mark.thorough
def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "damaged" / "step-00000005").mkdir(parents=True)
    (tmp_path / "damaged" / "step-00000005" / "run-0.json").write_text('{"format"')
    (tmp_path / "file").write_text("")
    folder, output = str(tmp_path / "c"), str(tmp_path / "b")
    base = [*_TOPK, "--epochs", "1", "--checkpoint-folder", folder]
    refused = {
        "was saved by a run with seed=0, but this run has 1": [*base, "--output", output, "--seed", "1"],
        "was saved by a run with compression='topk:ratio=0.02'": [*base, "--output", output, "--compression", "fp16"],
        "steps.jsonl does not belong to the run that was saved": [*base, "--output", str(tmp_path / "elsewhere")],
        "run-0.json cannot be read": [*_TOPK, "--checkpoint-folder", str(tmp_path / "damaged")],
        "file cannot be used: File exists; name another": [*_TOPK, "--checkpoint-folder", str(tmp_path / "file")],
        "--checkpoint-every needs --checkpoint-folder DIR": [*_TOPK, "--checkpoint-every", "5"],
        "--checkpoint-every 0 must be at least 1": [*base, "--checkpoint-every", "0"],
    }
    runs: list[dict[str, Any]] = [{"options": one} for one in ([*base, "--output", output], *refused.values())]
    copy = str(tmp_path / "foreign")
    refused["cannot be read: TypeError"] = [*_TOPK, "--epochs", "1", "--checkpoint-folder", copy, "--output", output]
    foreign = _FOREIGN.format(folder=folder, copy=copy)
    runs.append({"options": refused["cannot be read: TypeError"], "before": foreign})
    said = _run(1, tmp_path, runs)
    assert "run 0 ends on rank 0 with 0" in said
    for number, message in enumerate(refused, 1):
        assert message in said
        assert f"run {number} ends on rank 0 with 2" in said
    others = [[*base, "--output", output], [*base, "--output", output, "--seed", "1"]]
    other_ranks = _run(2, tmp_path, [{"options": one} for one in others])
    assert other_ranks.count("the checkpoint has 1 rank, but this run has 2 ranks") == 1
    assert other_ranks.count("was saved by a run with seed=0, but this run has 1") == 1
    for rank in (0, 1):
        assert f"run 0 ends on rank {rank} with 0" in other_ranks
        assert f"run 1 ends on rank {rank} with 2" in other_ranks


@pytest.mark.thorough
def test_weights_that_are_lost_are_not_saved(tmp_path: Path) -> None:
    """The loss of a step is that of the weights before it."""
    spoil = "rank == 1 and next(self._model.parameters()).register_hook(lambda gradient: gradient * float('nan'))"
    options = [*_TOPK, "--output", str(tmp_path / "b"), "--checkpoint-folder", str(tmp_path / "c")]
    runs = [{"options": [*options, "--checkpoint-every", "5"], "at": {"step": 10, "do": spoil}}]
    assert "run 0 ends on rank 1 with 1" in _run(2, tmp_path, runs)
    assert _held(tmp_path / "c") == ["step-00000005"]
    assert (_summary(tmp_path / "b")["status"], _summary(tmp_path / "b")["steps"]) == ("diverged", 10)


@pytest.mark.thorough
def test_a_damaged_checkpoint_is_passed_over_by_all_ranks(tmp_path: Path) -> None:
    """Rank 1 alone reads what is damaged. What the run then does is what it had done, bit for bit."""
    folder = tmp_path / "c"
    options = [*_TOPK, "--output", str(tmp_path / "b"), "--checkpoint-folder", str(folder), "--checkpoint-every", "7"]
    flip = """
if rank == 0:
    file = max(Path({folder!r}).glob("step-*/{name}"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
"""
    # As versions before the digests wrote it.
    strip = f"""
if rank == 0:
    for place in Path({str(folder)!r}).iterdir():
        (place / "SHA256SUMS").unlink()
        for file in place.glob("run-*.json"):
            file.write_text(json.dumps({{**json.loads(file.read_text()), "format": 1}}))
"""
    stop = {"step": 10, "signal": "SIGUSR1"}
    said = _run(
        2,
        tmp_path,
        [
            {"options": [*_TOPK, "--output", str(tmp_path / "a")]},
            {"options": options, "at": {**stop, "step": 24}},
            {"options": options, "before": flip.format(folder=str(folder), name="rank-1.pt"), "at": stop},
            {"options": options, "before": strip},
            {"options": options, "before": flip.format(folder=str(folder), name="rank-1.pt")},
            {
                "options": options,
                "before": f"if rank == 0: [f.write_text('[]') for f in Path({str(folder)!r}).glob('*/run-1.json')]",
            },
        ],
    )
    resumed_at = _summary(tmp_path / "b")["resumed_at"]
    assert resumed_at[0] == 21
    assert 21 < resumed_at[1] < 35
    assert said.count("rank-1.pt is damaged: its SHA-256 differs") == 2, "once a run, by rank 0"
    assert resumed_at[2:] == [56], "the run was over, and its last step was made again"
    _check_same_run(tmp_path / "a", tmp_path / "b", resumed_at)
    for rank in (0, 1):
        assert f"run 3 ends on rank {rank} with 0" in said
        assert f"run 5 ends on rank {rank} with 2" in said
    assert "contains no checkpoint that can be read" in " ".join(said.split())


@pytest.mark.thorough
def test_what_cannot_be_written_ends_all_ranks_with_the_first_cause(tmp_path: Path) -> None:
    """On a full disk, and where a file has taken a folder's place."""
    folder, output = tmp_path / "c", tmp_path / "b"
    (tmp_path / "file").write_text("")
    # In the middle of the run the folder is gone and a file stands in its place.
    gone, failed = tmp_path / "gone", tmp_path / "failed"
    replace = f"rank == 0 and (shutil.rmtree({str(gone)!r}), Path({str(gone)!r}).write_text(''))"
    into_gone = ["--output", str(failed), "--checkpoint-folder", str(gone), "--checkpoint-every", "7"]
    saved = [*_TOPK, "--checkpoint-folder", str(folder), "--checkpoint-every", "7"]
    file = str(output / "steps.jsonl")
    runs: list[dict[str, Any]] = [
        {"options": [*_TOPK, "--output", str(tmp_path / "a"), "--checkpoint-folder", str(tmp_path / "d")]},
        {
            "options": [*_TOPK, "--tensorboard", "--output", str(output)],
            "at": {"step": 21, "do": f"rank == 0 and fill_disk(os.path.getsize({file!r}) + 40)"},
        },
        {"options": saved, "at": {"step": 10, "do": "rank == 1 and fill_disk(5000)"}},
        {"options": saved},
        {"options": [*_TOPK, "--output", str(tmp_path / "file" / "below")]},
        {"options": [*_TOPK, "--output", "/proc/hvdcomp"]},
        {"options": [*_TOPK, "--output", str(tmp_path / ("long" * 100))]},
        {"options": [*_TOPK, *into_gone], "at": {"step": 10, "do": replace}},
    ]
    said = _run(2, tmp_path, runs)
    assert "Traceback" not in said
    for number, code in enumerate((0, 1, 1, 0, 2, 2, 2, 1)):
        for rank in (0, 1):
            assert f"run {number} ends on rank {rank} with {code}" in said, number
    assert said.count(f"Error: {file} cannot be written: File too large. Everything that was written be") == 2
    assert [line["step"] for line in _lines(output / "steps.jsonl")] == list(range(1, 21))
    assert f"{file} cannot be written" in _summary(output)["error"]
    assert not list(output.glob("*.part"))
    assert said.count(f"the checkpoint in {folder} cannot be written on rank 1: File too large") == 2
    assert _held(folder) == ["step-00000056", "step-00000060"]
    assert said.count("continuing after step 7 ") == 1
    weights = [place / "step-00000060" / "model.pt" for place in (folder, tmp_path / "d")]
    assert weights[0].read_bytes() == weights[1].read_bytes(), "the run of before, bit for bit"
    for place in (tmp_path / "file" / "below", Path("/proc/hvdcomp"), tmp_path / ("long" * 100)):
        assert said.count(f"--output {place}") == 1, "rank 0 alone says it"
    assert said.count(f"the checkpoint in {gone} cannot be written on rank 0: ") == 2, "once per rank"
    assert "the previous checkpoint, if there is one, is complete" in said
    assert _summary(failed)["status"] == "failed"
    assert [line["step"] for line in _lines(failed / "steps.jsonl")] == list(range(1, 15))


@pytest.mark.thorough
def test_tensorflow_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    pytest.importorskip("horovod.tensorflow", reason="Horovod is not built for TensorFlow here")
    pytest.importorskip("tf_keras")
    options = [*_TOPK, "--epochs", "2"]
    stopped = [*options, "--output", str(tmp_path / "b"), "--checkpoint-folder", str(tmp_path / "c")]
    runs = [
        {"options": [*options, "--output", str(tmp_path / "a")]},
        {"options": stopped, "at": {"step": 14, "signal": "SIGUSR1"}},
        {"options": stopped},
    ]
    said = _run(2, tmp_path, [{**one, "framework": "tensorflow"} for one in runs], timeout=500)
    assert f"run 1 ends on rank 1 with {EXIT_SAVED}" in said
    (stopped_at,) = _summary(tmp_path / "b")["resumed_at"]
    assert 14 <= stopped_at <= 17
    _check_same_run(tmp_path / "a", tmp_path / "b", [stopped_at])


class _Alone(Ranks):
    """One rank that needs no library."""

    backend, rank, size = "horovod", 0, 1

    def gather(self, value: Any, name: str) -> list[Any]:
        return [value]

    def broadcast(self, value: Any, name: str) -> Any:
        return value


def test_a_start_removes_only_what_a_killed_run_left_in_the_folder(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    for place in ("theirs", "c/step-00000035.part/deep", "c/step-mine.part", "c/step-7", "c/step-7.part"):
        (tmp_path / place / "kept").mkdir(parents=True)
    folder = tmp_path / "c"
    for name in ("step-00000042.part", "step-10.part"):
        (folder / name).symlink_to(theirs)
    (folder / "step-00000049.part").write_text("a file")
    assert Checkpoints(TrainingOptions(checkpoint_folder=folder), {}, _Alone()).find() is None
    assert _held(folder) == ["step-10.part", "step-7", "step-7.part", "step-mine.part"]
    assert _held(theirs) == ["kept"]


def test_a_checkpoint_of_the_first_release_is_one_of_horovod(tmp_path: Path) -> None:
    """It had no digests, and knew neither other backends nor the options that came later."""
    options = TrainingOptions(checkpoint_folder=tmp_path, backend="horovod").resolved()
    facts = options.as_json()
    then = {
        *("framework", "model", "data", "compression", "memory", "policy", "batch_size", "lr", "momentum", "nesterov"),
        *("weight_decay", "milestones", "gamma", "warm_up", "clip_norm", "backward_passes_per_step", "seed", "samples"),
        *("label_noise", "image_size", "text_size", "text_unit", "sequence_length"),
    }
    del facts["data_dir"], facts["output"], facts["checkpoint_folder"]
    run = dict.fromkeys((*KEPT, "augmenting", "resumed_at", "seconds", "epoch_seconds", "sizes"), 7)
    record = {"format": 1, "facts": {**{name: facts[name] for name in then}, "ranks": 1}, "run": run}
    (tmp_path / "step-00000007").mkdir()
    (tmp_path / "step-00000007" / "run-0.json").write_text(json.dumps(record))
    assert Checkpoints(options, facts, _Alone()).find() == run
    with pytest.raises(RunRefused, match="was saved by a run with backend='horovod', but this run has 'ddp'"):
        Checkpoints(options, {**facts, "backend": "ddp"}, _Alone()).find()
