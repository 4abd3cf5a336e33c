"""`hvdcomp train --elastic` on real ranks: some come, one goes, and the run goes on from its checkpoint."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from hvdcomp.tools.commands.train import command
from hvdcomp.tools.train.options import TrainingOptions
from hvdcomp.tools.train.ranks import RunRefused
from tests.launched import run_ranks

# Two ranks; from the 40th step on three; and one from 200 steps after one has left. What was once so stays so, though
# after a failure there are fewer steps.
_HOSTS = """#!/bin/sh
made=$(cat {output}/steps.jsonl 2>/dev/null | wc -l)
[ $made -ge 40 ] && touch {folder}/grown
[ -e {folder}/left ] && [ $made -ge $(($(cat {folder}/left) + 200)) ] && touch {folder}/shrunk
[ -e {folder}/shrunk ] && exec echo localhost:1
echo localhost:2
[ -e {folder}/grown ] && echo 127.0.0.1:1
true
"""
# The rank that has come is told to go before its 25th step: Horovod calls its host 127.0.0.1.
_TOLD = """
import os, signal
from hvdcomp.tools.commands.train import command
from hvdcomp.tools.train.run import Run

real_step, made = Run._timed_step, 0

def step(self, *batch):
    global made
    made += 1
    if made == 25 and os.environ["HOROVOD_HOSTNAME"] == "127.0.0.1":
        with open("{folder}/left", "w") as file:
            file.write(str(self._step))
        os.kill(os.getpid(), signal.{signal})
    return real_step(self, *batch)

Run._timed_step = step
command(prog_name="train")
"""
# One rank on each of two hosts, and from the 40th step on another on the first.
_GROWING = """#!/bin/sh
[ $(cat {output}/steps.jsonl 2>/dev/null | wc -l) -ge 40 ] && touch {folder}/grown
if [ -e {folder}/grown ]; then echo localhost:2; else echo localhost:1; fi
echo 127.0.0.1:1
"""
# The rank of the second host is told to go while all meet anew.
_TOLD_BETWEEN = """
import os, signal
from hvdcomp.tools.commands.train import command
from hvdcomp.tools.train.ranks_horovod import Changes

real_reset = Changes.reset

def reset(self):
    real_reset(self)
    if os.environ["HOROVOD_HOSTNAME"] == "127.0.0.1":
        os.kill(os.getpid(), signal.SIGTERM)

Changes.reset = reset
command(prog_name="train")
"""


@pytest.mark.alone
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("framework", "signal"), [("torch", "SIGKILL"), ("torch", "SIGTERM"), ("tensorflow", "SIGKILL")]
)
def test_ranks_come_and_go(framework: str, signal: str, tmp_path: Path) -> None:
    output, hosts, program = tmp_path / "out", tmp_path / "hosts", tmp_path / "program.py"
    hosts.write_text(_HOSTS.format(output=output, folder=tmp_path))
    hosts.chmod(0o755)
    program.write_text(_TOLD.replace("{signal}", signal).replace("{folder}", str(tmp_path)))
    words = [
        *(str(program), "--elastic", "--framework", framework, "--model", "mlp", "--data", "digits", "--seed", "3"),
        *("--epochs", "20", "--batch-size", "8", "--lr", "0.01", "--compression", "topk:ratio=0.2", "--no-progress"),
        *("--checkpoint-folder", str(tmp_path / "saved"), "--output", str(output)),
        *("--checkpoint-every", "20" if signal == "SIGKILL" else "100000"),
    ]
    environment = {"COLUMNS": "200", "HOROVOD_GLOO_TIMEOUT_SECONDS": "10", "PYTHONPATH": os.getcwd()}
    done = run_ranks(2, "gloo", words, environment, hosts=hosts)

    assert done.returncode == 0, done.stdout[-6000:]
    summary = json.loads((output / "summary.json").read_text())
    assert (summary["status"], summary["identical"], summary["world_size"]) == ("finished", True, 1)
    assert summary["accuracy"] > 0.8
    grown, left, shrunk = summary["resumed_at"]
    told = int((tmp_path / "left").read_text())  # the step of the signal; with SIGTERM, all save some steps later
    assert 40 <= grown < left < shrunk
    assert told <= shrunk - 200
    if signal == "SIGTERM":
        assert grown + 24 <= left <= grown + 45  # all saved as soon as they heard of it
        assert "exit with status code 213" in done.stdout, done.stdout
    else:
        assert left % 20 == 0
    steps = [json.loads(line)["step"] for line in (output / "steps.jsonl").read_text().splitlines()]
    assert steps == list(range(1, summary["steps"] + 1))
    for then, now in (("2 ranks", "3 ranks"), ("3 ranks", "2 ranks"), ("2 ranks", "1 rank")):
        assert f"the checkpoint has {then}, but this run has {now}: the residuals are kept" in done.stdout


@pytest.mark.alone
@pytest.mark.thorough
def test_a_rank_that_is_told_to_go_while_all_meet_anew_saves_first(tmp_path: Path) -> None:
    output, hosts, program = tmp_path / "out", tmp_path / "hosts", tmp_path / "program.py"
    hosts.write_text(_GROWING.format(output=output, folder=tmp_path))
    hosts.chmod(0o755)
    program.write_text(_TOLD_BETWEEN)
    words = [
        *(str(program), "--elastic", "--model", "mlp", "--data", "digits", "--epochs", "8", "--batch-size", "8"),
        *("--lr", "0.01", "--no-progress", "--checkpoint-folder", str(tmp_path / "saved"), "--output", str(output)),
    ]
    environment = {"COLUMNS": "200", "HOROVOD_GLOO_TIMEOUT_SECONDS": "10", "PYTHONPATH": os.getcwd()}
    done = run_ranks(2, "gloo", [*words, "--checkpoint-every", "100000"], environment, hosts=hosts)
    assert done.returncode == 0, done.stdout[-6000:]
    assert "exit with status code 213" in done.stdout, done.stdout
    summary = json.loads((output / "summary.json").read_text())
    grown, left = summary["resumed_at"]
    assert (summary["status"], summary["world_size"], left) == ("finished", 2, grown + 1)


@pytest.mark.alone
def test_elastic_ranks_that_lack_a_folder_end_and_say_so(tmp_path: Path) -> None:
    """Horovod waits for all of them to end."""
    hosts, command = tmp_path / "hosts", Path(sys.executable).parent / "hvdcomp"
    hosts.write_text("#!/bin/sh\necho localhost:2\n")
    hosts.chmod(0o755)
    done = run_ranks(2, "gloo", [str(command), "train", "--elastic"], {"COLUMNS": "200"}, timeout=100, hosts=hosts)
    assert done.returncode != 0
    assert done.stdout.count("Error: --elastic needs --checkpoint-folder, from which the run resumes") == 1, done.stdout
    assert done.stdout.count("exit with status code 2") == 2, done.stdout


def test_what_elastic_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    said = CliRunner().invoke(command, ["--elastic", "--backend", "ddp", "--checkpoint-folder", "x"])
    assert said.exit_code == 2
    assert "--elastic works only with Horovod. torchrun starts all ranks again when ranks are lost or" in said.output


def test_a_refusal_after_a_change_is_said_by_the_rank_0_of_then(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("horovod.torch", reason="needs Horovod")

    def refuse(options: TrainingOptions) -> None:
        raise RunRefused("the checkpoint is damaged")

    before = SimpleNamespace(rank=1, leave=lambda code: None)
    monkeypatch.setattr("hvdcomp.tools.commands.train.reach", lambda *arguments: before)
    monkeypatch.setattr("hvdcomp.tools.commands.train.rank_so_far", lambda: 0)
    monkeypatch.setattr("hvdcomp.tools.train.elastic.train_elastic", refuse)
    said = CliRunner().invoke(command, ["--elastic", "--checkpoint-folder", "x"])
    assert said.exit_code == 2, said.output
    assert "Error: the checkpoint is damaged" in said.output
