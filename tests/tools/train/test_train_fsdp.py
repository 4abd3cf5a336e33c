"""`hvdcomp train --fsdp` under torchrun: the training of DistributedDataParallel, on shards, and checkpoints of it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from hvdcomp.tools.train.options import SetupError, TrainingOptions
from tests.launched import run_forked_ranks
from tests.tools.train.test_train_checkpoints import _check_same_run, _summary

pytest.importorskip("torch")

_OPTIONS = ["--model", "vit", "--samples", "256", "--steps", "6", "--validation-samples", "90", "--no-progress"]
# Rank 1 has fewer batches to evaluate than rank 0.
_UNEVEN = """
from hvdcomp.tools.commands.train import command
from hvdcomp.tools.train import run

whole = run.evaluation_shard
run.evaluation_shard = lambda samples, ranks, rank: whole(samples, 3, 0) if rank else whole(samples, 3, 1).repeat(2)
run._EVALUATION_BATCH = 16
command(prog_name="train")
"""
# Rank 1 cannot write a whole checkpoint.
_FULL = """
import os, resource, signal

from hvdcomp.tools.commands.train import command

if os.environ["RANK"] == "1":
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
command(prog_name="train")
"""
# Rank 1 alone is told to stop, before its fourth step.
_TOLD = """
import os, signal

from hvdcomp.tools.commands.train import command
from hvdcomp.tools.train import run
from hvdcomp.tools.train.fsdp_learner import FSDPLearner

run._STEPS_BETWEEN_CHECKS = 1
real_step, made = FSDPLearner.step, 0

def step(self, *batch):
    global made
    made += 1
    if (made, os.environ["RANK"]) == (4, "1"):
        os.kill(os.getpid(), signal.SIGUSR1)
    return real_step(self, *batch)

FSDPLearner.step = step
command(prog_name="train")
"""


def _said(
    output: Path, *options: str, program: Path | None = None, ranks: int = 2, fails: bool = False, node: int = 1
) -> str:
    words = ["-m", "hvdcomp", "train"] if program is None else [str(program)]
    variables = {"COLUMNS": "200", "HVDCOMP_RANKS_PER_NODE": str(node)}
    done = run_forked_ranks(ranks, "torchrun", [*words, *_OPTIONS, *options, "--output", str(output)], variables)
    assert (done.returncode != 0) == fails, done.stdout[-4000:]
    return " ".join(done.stdout.split())


def _train(output: Path, *options: str, **how: Any) -> dict[str, Any]:
    _said(output, *options, **how)
    return dict(_summary(output))


@pytest.mark.alone
@pytest.mark.thorough
def test_shards_train_as_whole_models_do(tmp_path: Path) -> None:
    ours, ddps = _train(tmp_path / "ours", "--fsdp"), _train(tmp_path / "ddp")
    assert (ours["identical"], ours["parameters"]) == (True, ddps["parameters"])
    assert ours["loss"] == pytest.approx(ddps["loss"], rel=1e-4)


@pytest.mark.alone
@pytest.mark.thorough
def test_changes_of_weights_are_sent_quantized(tmp_path: Path) -> None:
    exact, ours = _train(tmp_path / "exact", "--fsdp"), _train(tmp_path / "ours", "--fsdp", "--fsdp-weights", "int8")
    assert ours["identical"]
    assert ours["loss"] == pytest.approx(exact["loss"], rel=0.01)
    assert ours["loss"] != exact["loss"]
    said = _said(tmp_path / "none", "--fsdp", "--fsdp-weights", "topk:ratio=0.1", fails=True)
    assert "give hvdcomp.Int8(), hvdcomp.Int4() or another quantizer" in said
    said = _said(tmp_path / "unknown", "--fsdp", "--fsdp-weights", "int9", fails=True)
    assert said.count("Error: unknown compressor 'int9'") == 1, said


@pytest.mark.alone
@pytest.mark.thorough
def test_a_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    (program := tmp_path / "program.py").write_text(_UNEVEN)
    options = ["--fsdp", "--compression", "int4", "--memory", "error_feedback", "--evaluate-every", "2"]
    saves = ["--checkpoint-every", "3", "--checkpoint-folder"]
    whole = _train(tmp_path / "whole", *options, *saves, str(tmp_path / "one"), program=program)
    assert whole["compression_factor"] > 6
    stopped, folder = tmp_path / "stopped", tmp_path / "other"
    _train(stopped, *options, *saves, str(folder), program=program)
    newest = max(one for one in folder.iterdir() if one.is_dir())
    shutil.rmtree(newest)
    _train(stopped, *options, *saves, str(folder), program=program)
    _check_same_run(tmp_path / "whole", stopped, resumed_at=[3])


@pytest.mark.alone
@pytest.mark.thorough
def test_a_signal_to_one_rank_saves_all(tmp_path: Path) -> None:
    (program := tmp_path / "program.py").write_text(_TOLD)
    output, saves = tmp_path / "run", ["--checkpoint-every", "1000", "--checkpoint-folder", str(tmp_path / "saved")]
    _said(output, "--fsdp", *saves, program=program, fails=True)  # so torchrun calls the exit code of a saved run
    assert _summary(output)["status"] == "stopped"
    _train(output, "--fsdp", *saves)
    assert _summary(output)["resumed_at"] == [4]


@pytest.mark.alone
@pytest.mark.thorough
def test_two_ranks_then_four_then_two(tmp_path: Path) -> None:
    output, saved = tmp_path / "run", tmp_path / "saved"
    options = ["--fsdp", "--compression", "int4", "--memory", "error_feedback", "--checkpoint-folder", str(saved)]
    _said(output, *options, "--steps", "3")
    said = _said(output, *options, "--steps", "4", ranks=4)
    assert said.count("the checkpoint has 2 ranks, but this run has 4 ranks: the residuals are kept, and cut") == 1
    said = _said(output, *options, "--steps", "6")
    assert said.count("the checkpoint has 4 ranks, but this run has 2 ranks: the residuals are kept, and cut") == 1
    said = _said(output, *options, "--steps", "8", "--residuals", "drop", ranks=3)
    assert said.count("the residuals are dropped, because of --residuals drop") == 1
    summary = _summary(output)
    assert (summary["resumed_at"], summary["steps"], summary["identical"]) == ([3, 4, 6], 8, True)


@pytest.mark.alone
@pytest.mark.thorough
def test_a_full_disk_of_one_rank_ends_all(tmp_path: Path) -> None:
    (program := tmp_path / "program.py").write_text(_FULL)
    saved = tmp_path / "saved"
    said = _said(tmp_path / "run", "--fsdp", "--checkpoint-folder", str(saved), program=program, fails=True)
    assert said.count(" on rank 1; the previous checkpoint, if there is one, is complete") == 2, said
    assert _summary(tmp_path / "run")["status"] == "failed"
    assert not list(saved.iterdir())


@pytest.mark.alone
@pytest.mark.thorough
def test_replicas_train_as_whole_models_do_and_all_bytes_between_nodes_count(tmp_path: Path) -> None:
    ddps = _train(tmp_path / "ddp", ranks=4)
    dense = 6 * 4 * ddps["parameters"]  # bytes of all gradients; a rank's shard has half as many
    for node, of_shards in ((1, dense), (2, 0)):
        ours = _train(tmp_path / f"ours-{node}", "--fsdp", "--shard-ranks", "2", ranks=4, node=node)
        assert (ours["identical"], ours["parameters"]) == (True, ddps["parameters"])
        assert ours["loss"] == pytest.approx(ddps["loss"], rel=1e-4)
        assert ours["dense_bytes"] == dense / 2 + of_shards
        # Beside gradients, replicas send flags.
        assert ours["dense_bytes"] < ours["bytes_sent"] < 1.01 * ours["dense_bytes"]
        shards = {"bytes_sent": dense, "dense_bytes": dense, "compression_factor": 1}
        assert ours["shards"] == (shards if of_shards else None)
    options = ["--fsdp", "--shard-ranks", "2", "--compression", "int8"]
    said = _said(tmp_path / "both", *options, "--shard-compression", "int4", ranks=4)
    both = _summary(tmp_path / "both")
    assert both["identical"]
    assert (both["dense_bytes"], both["shards"]["dense_bytes"]) == (1.5 * dense, dense)
    assert both["shards"]["bytes_sent"] == pytest.approx(0.53 / 4 * dense, rel=0.03)
    assert both["bytes_sent"] - both["shards"]["bytes_sent"] == pytest.approx(0.26 * dense / 2, rel=0.1)
    assert f"of this within replicas {both['shards']['bytes_sent'] / 6000:.2f} kB, 7." in said


@pytest.mark.alone
@pytest.mark.thorough
def test_replicas_go_on_from_their_checkpoint(tmp_path: Path) -> None:
    # Random numbers of the method depend on the step.
    methods = ["--compression", "topk:ratio=0.1", "--shard-compression", "int4:rounding=stochastic"]
    policy = ["--policy", "accordion:low=0.2,high=0.05,interval=1", "--overlap", "off"]
    options = ["--fsdp", "--shard-ranks", "2", *methods, *policy, "--checkpoint-every", "3", "--checkpoint-folder"]
    _train(tmp_path / "whole", *options, str(tmp_path / "one"), ranks=4)
    stopped, folder = tmp_path / "stopped", tmp_path / "other"
    _train(stopped, *options, str(folder), ranks=4)
    shutil.rmtree(max(one for one in folder.iterdir() if one.is_dir()))
    _train(stopped, *options, str(folder), ranks=4)
    _check_same_run(tmp_path / "whole", stopped, resumed_at=[3])
    assert _summary(stopped)["shards"] == _summary(tmp_path / "whole")["shards"]


@pytest.mark.alone
@pytest.mark.thorough
def test_two_replicas_then_three_then_two_on_other_nodes(tmp_path: Path) -> None:
    output, saved = tmp_path / "run", tmp_path / "saved"
    folder = ["--compression", "topk:ratio=0.1", "--checkpoint-folder", str(saved)]
    options = ["--fsdp", "--shard-ranks", "2", "--overlap", "on", "--bucket-bytes", "100000", *folder]
    _said(output, *options, "--steps", "3", ranks=4, node=2)
    said = _said(output, *options, "--steps", "4", ranks=6, node=1)
    assert said.count("the checkpoint has 4 ranks, but this run has 6 ranks: the residuals are kept, and cut") == 1
    said = _said(output, *options, "--steps", "5", ranks=4)
    assert said.count("the checkpoint has 6 ranks, but this run has 4 ranks: the residuals are kept, and cut") == 1
    summary = _summary(output)
    assert (summary["resumed_at"], summary["steps"], summary["identical"]) == ([3, 4], 5, True)
    # The reduce-scatters of the first three steps were within a node.
    assert summary["shards"]["dense_bytes"] == 2 * 4 * summary["parameters"]
    said = _said(output, *options, ranks=3, fails=True)
    assert said.count("--shard-ranks 2 does not divide the 3 ranks of this run into several replicas") == 1, said
    said = _said(output, "--fsdp", *folder, ranks=4, fails=True)
    assert "was saved by a run with shard_ranks=2, but this run has None: use the same options" in said, said


@pytest.mark.alone
@pytest.mark.thorough
def test_replicas_that_cannot_be_are_refused_on_all_ranks(tmp_path: Path) -> None:
    options = ["--fsdp", "--shard-compression", "int8", "--shard-ranks"]
    for ranks, node, shards, wrong in (
        (4, 1, 4, "--shard-ranks 4 does not divide the 4 ranks of this run .*; use 2, or leave --shard-ranks out"),
        (3, 1, 2, "does not divide the 3 ranks of this run .*; start 4, 6, 8 or more ranks, or leave"),
        (4, 2, 2, "--shard-compression int8 would compress nothing, .* set HVDCOMP_RANKS_PER_NODE=1"),
    ):
        said = _said(tmp_path, *options, str(shards), ranks=ranks, node=node, fails=True)
        assert len(re.findall(f"Error: .*{wrong}", said)) == 1, said
    said = _said(tmp_path, *options, "2", "--shard-compression", "topk:ratio=1", ranks=4, fails=True)
    assert "topk:ratio=1.0 does not work in FSDP's reduce-scatter" in said, said


@pytest.mark.parametrize(
    ("name", "value"), [("fsdp_weights", "int8"), ("shard_ranks", 2), ("shard_compression", "int8")]
)
def test_what_is_for_shards_alone_is_refused_without_them(name: str, value: Any) -> None:
    flag = f"--{name.replace('_', '-')}"
    with pytest.raises(SetupError, match=f"{flag} {value} works only with --fsdp: add --fsdp, or leave {flag} out"):
        TrainingOptions(**{name: value}).resolved()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model": "mlp"}, "use one of gpt"),
        ({"backend": "horovod"}, "start it with torchrun"),
        ({"framework": "tensorflow", "model": "gpt", "data": "text"}, "start it with torchrun"),
        ({"simulate_ranks": 2}, "--simulate-ranks"),
        ({"optimizer": "muon"}, "--optimizer muon"),
        ({"local_steps": 2, "steps": 4, "evaluate_every": 2, "validation_samples": 9}, "--local-steps 2"),
        ({"bucket_bytes": 1000}, "--bucket-bytes"),
        ({"overlap": "on"}, "--overlap"),
        ({"policy": "accordion:low=2,high=1"}, "--policy accordion.*, or make replicas with --shard-ranks N"),
        ({"shard_compression": "int8"}, "use --compression int8"),
    ],
)
def test_what_does_not_go_with_shards_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(SetupError, match=f"--(fsdp|shard-compression) .*{said}"):
        TrainingOptions(**{"model": "vit", "fsdp": True, **given}).resolved()


def test_what_does_not_go_with_replicas_is_refused() -> None:
    with pytest.raises(SetupError, match="--fsdp-weights int8 works only without replicas; leave out"):
        TrainingOptions(model="vit", fsdp=True, shard_ranks=2, fsdp_weights="int8").resolved()
    with pytest.raises(SetupError, match="--shard-ranks 1 must be at least 2 ranks; if each rank has a whole replica"):
        TrainingOptions(model="vit", fsdp=True, shard_ranks=1).resolved()
