"""Elastic jobs on Kubernetes: horovodrun's command line, as in the manifest, and real ranks that come and go with their
pods; and the program of the overlay `elastic`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hvdcomp.tools.launch.job import Job
from hvdcomp.tools.launch.k8s import manifest
from hvdcomp.tools.launch.k8s.horovodrun import exit_code
from hvdcomp.tools.launch.k8s.settings import KubernetesSettings
from hvdcomp.tools.launch.k8s.warn import ranks
from hvdcomp.tools.launch.promise import EXIT_SAVED
from tests.k8s_pods import NEEDED, Pods
from tests.launched import run_ranks

ROOT = Path(__file__).parents[3]
MODULE = "hvdcomp.tools.launch.k8s.elastic"


@pytest.mark.parametrize(("said", "code"), [("213", 213), ("1", 1), ("255", 255), ("-9", 137)])
def test_the_code_is_that_of_the_rank_that_horovod_names(said: str, code: int) -> None:
    message = f"Horovod detected ...\nThe first process to do so was:\nProcess name: x[0]\nExit code: {said}\n"
    assert exit_code(message) == code


def test_another_end_of_horovodrun_is_a_failure() -> None:
    assert exit_code("Horovod was shutdown because number of resets ...") == 1


def test_ranks_are_what_horovodrun_or_open_mpi_started_and_not_what_they_start(tmp_path: Path) -> None:
    rank = "PATH=/bin\0HOROVOD_RANK=1\0"
    processes = {
        1: ("sshd", "S", 0, ""),
        20: ("sh", "S", 1, "PATH=/bin\0"),  # of an ssh session
        21: ("python3 (a) b", "S", 20, rank),
        22: ("data loader", "S", 21, rank),
        23: ("python3", "Z", 20, rank),
        30: ("orted", "S", 1, ""),
        31: ("python3", "R", 30, "OMPI_COMM_WORLD_RANK=0\0"),
        32: ("python3", "S", 31, "OMPI_COMM_WORLD_RANK=0\0"),
    }
    for number, (name, state, parent, variables) in processes.items():
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "stat").write_text(f"{number} ({name}) {state} {parent} 1 1 0")
        (folder / "environ").write_text(variables)
    (tmp_path / "1" / "environ").unlink()  # what may not be read
    assert ranks(tmp_path) == [21, 31]


def launcher(folder: Path, hosts: str, *words: str, workers: int = 1) -> subprocess.Popen[str]:
    """The launcher with a stand-in for ssh, which gives the command to a shell in a bare environment."""
    ssh = '#!/bin/sh\nfor last; do :; done\nexec env -i PATH="$PATH" sh -c "$last"\n'
    for name, text in (("ssh", ssh), ("discover_hosts.sh", f"#!/bin/sh\n{hosts}")):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return subprocess.Popen(
        [sys.executable, "-m", MODULE, "2222", str(folder / "discover_hosts.sh"), str(workers), *words],
        env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_workers_are_waited_for_and_it_can_be_ended_meanwhile(tmp_path: Path) -> None:
    with launcher(tmp_path, "echo nowhere.invalid\n", "-np", "1", "true") as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "hvdcomp: waiting for workers: 0 of 1 answer\n"
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 143


def test_a_list_that_is_not_there_is_named() -> None:
    command = [sys.executable, "-m", MODULE, "2222", "/no/discover_hosts.sh", "1", "true"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 127
    assert done.stderr == "hvdcomp: /no/discover_hosts.sh cannot be run: No such file or directory\n"


@pytest.mark.thorough
def test_arguments_arrive_and_the_exit_code_of_the_ranks_comes_back(tmp_path: Path) -> None:
    """No worker is waited for; the hosts have names that this machine does not know, so that ssh is used."""
    trap = f"$(touch {tmp_path}/trap)"
    hostile = ("a b", trap, f"`{trap}`", f'"; touch {tmp_path}/trap; "', "'", "", "line\nbreak", "é", "-np")
    job = Job("x", (sys.executable, "-c", "import sys; print(sys.argv[1:], flush=True); sys.exit(41)", *hostile), 2)
    made = manifest.render(KubernetesSettings(job, "hvdcomp", elastic="2:4", interface="lo"))
    container = made["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]
    words = [word.replace("$$", "$") for word in container["args"]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.getcwd())
        for variable in container["env"]:
            patch.setenv(variable["name"], variable["value"].replace("$$", "$"))
        process = launcher(tmp_path, "echo one.invalid\necho two.invalid\n", *words, workers=0)
    with process:
        output, errors = process.communicate(timeout=120)
    assert process.returncode == 41, errors
    assert sorted(re.findall(r"^\[(\d)\]<stdout>:(.*)$", output, re.MULTILINE)) == [
        (rank, repr(list(hostile))) for rank in "01"
    ]
    assert not (tmp_path / "trap").exists()
    assert "Exit code: 41" in errors


def until(process: subprocess.Popen[str], text: str) -> list[str]:
    """The lines that a launcher writes up to one with this text."""
    assert process.stdout is not None
    lines: list[str] = []
    while text not in (lines[-1] if lines else ""):
        lines.append(process.stdout.readline())
        assert lines[-1], "".join(lines)[-6000:]
    return lines


def made(output: Path) -> list[int]:
    """The steps of a training."""
    return [json.loads(line)["step"] for line in (output / "steps.jsonl").read_text().splitlines()]


class TestPods:
    pytestmark = NEEDED

    def job(self, folder: Path, epochs: int) -> KubernetesSettings:
        words = ["hvdcomp", "train", "--model", "mlp", "--data", "digits", "--seed", "3", "--batch-size", "8"]
        words += ["--lr", "0.01", "--compression", "topk:ratio=0.2", "--epochs", str(epochs)]
        words += ["--output", str(folder / "out"), "--checkpoint-folder", str(folder / "saved")]
        words += ["--checkpoint-every", "20"]
        variables = {"PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        return KubernetesSettings(
            Job("x", tuple(words), 2, variables), "hvdcomp", elastic="2:3", interface="lo", checkpoint_claim="disk"
        )

    @pytest.mark.timeout(1200)  # a start of ranks takes a minute where many share few cores
    def test_workers_come_and_go_and_the_next_launcher_goes_on(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pytest.importorskip("torch")
        monkeypatch.setattr(manifest, "_USED_AGAIN", (5, 60))  # seconds, of which the first is doubled
        with contextlib.ExitStack() as stack:
            pods = Pods(tmp_path, stack, self.job(tmp_path, 100_000), 3)
            first, second, third = pods.workers
            pods.start_worker(first)
            pods.list_workers(first)
            running = pods.start_launcher(stderr=subprocess.STDOUT)
            until(running, "hvdcomp: waiting for workers: 1 of 2 answer")

            pods.start_worker(second)
            pods.list_workers(first, second)
            until(running, "epoch 1")
            pods.start_worker(third)  # as after a patch of `replicas`
            pods.list_workers(first, second, third)
            until(running, "the checkpoint has 2 ranks, but this run has 3 ranks: the residuals are kept")

            # A drain: the ranks of the pod leave, and the others go on. The list still has it for a while.
            assert pods.before_stop(second) == 0
            pods.signal_worker(second, signal.SIGTERM)
            lines = until(running, "the checkpoint has 3 ranks, but this run has 2 ranks: the residuals are kept")
            assert any("exit with status code 213" in line for line in lines), lines

            # The operator makes it again, under the same name.
            pods.start_worker(second)
            until(running, "the checkpoint has 2 ranks, but this run has 3 ranks")
            for _ in range(2):  # 60 steps, so that there is a checkpoint of three ranks
                until(running, "<stdout>:epoch ")
            pods.signal_worker(third, signal.SIGKILL)
            pods.list_workers(first, second)
            until(running, "the checkpoint has 3 ranks, but this run has 2 ranks")

            # The launcher's own pod is to end.
            running.send_signal(signal.SIGTERM)
            output, _ = running.communicate(timeout=100)
            assert running.returncode == EXIT_SAVED, output[-6000:]
            assert (
                "hvdcomp: the ranks have saved a checkpoint and stopped; the next start continues from this checkpoint"
                in output
            )
            steps = made(tmp_path / "out")
            assert steps == list(range(1, steps[-1] + 1))

            epochs = json.loads((tmp_path / "out" / "steps.jsonl").read_text().splitlines()[-1])["epoch"] + 1
            pods.settings = self.job(tmp_path, epochs)
            running = pods.start_launcher(stderr=subprocess.STDOUT)
            output, _ = running.communicate(timeout=300)
        assert running.returncode == 0, output[-6000:]
        summary = json.loads((tmp_path / "out" / "summary.json").read_text())
        assert (summary["status"], summary["identical"], summary["world_size"]) == ("finished", True, 2)
        assert len(summary["resumed_at"]) == 5
        assert summary["resumed_at"][-1] == steps[-1]  # all that was made was saved
        all_steps = made(tmp_path / "out")
        assert all_steps == list(range(1, summary["steps"] + 1))


# The program of the overlay, which is made to wait where the list of hosts is to change.
_WAITS = """
import runpy, sys, time
import horovod.torch as hvd
import horovod.torch.elastic

real_commit = hvd.elastic.TorchState.commit

def commit(self):
    change = {{(200, 2): "grown", (400, 3): "shrunk"}}.get((self.step, hvd.size()))
    if change is not None and hvd.rank() == 0:
        open("{folder}/" + change, "w").close()
        while self._host_messages.empty():
            time.sleep(0.1)
    real_commit(self)

hvd.elastic.TorchState.commit = commit
runpy.run_path("{program}", run_name="__main__")
"""


@pytest.mark.alone
@pytest.mark.thorough
def test_the_program_of_the_overlay_goes_on_when_workers_come_and_go(tmp_path: Path) -> None:
    hosts, program = tmp_path / "discover", tmp_path / "program.py"
    hosts.write_text(
        "#!/bin/sh\necho localhost:2\n"
        f"if [ -e {tmp_path}/grown ] && [ ! -e {tmp_path}/shrunk ]; then echo 127.0.0.1:1; fi\n"
    )
    hosts.chmod(0o755)
    program.write_text(_WAITS.format(folder=tmp_path, program=ROOT / "k8s" / "overlays" / "elastic" / "train.py"))
    done = run_ranks(2, "gloo", [str(program)], {"STEPS": "800", "PYTHONPATH": os.getcwd()}, hosts=hosts)
    assert done.returncode == 0, done.stdout[-6000:]
    found = re.findall(r"step (\d+): (\d) ranks", done.stdout)
    assert found == [("0", "2"), ("200", "3"), ("400", "2")], done.stdout[-6000:]
    right = re.search(r"step 800: ([\d.]+)% of the training digits right", done.stdout)
    assert right is not None, done.stdout[-6000:]
    assert float(right[1]) > 90
