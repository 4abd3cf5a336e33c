"""`hvdcomp launch slurm` on a real Slurm, which the tests start and take away; real ranks under srun and mpirun."""

from __future__ import annotations

import contextlib
import json
import re
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdcomp.tools.launch.promise import EXIT_SAVED
from tests.processes import variables
from tests.slurm_cluster import SlurmCluster, slurm_cluster
from tests.slurm_launch import Launcher, cluster_or_skip, number_of, submission
from tests.tools.launch.test_launch_slurm import _HOSTILE
from tests.tools.launch.test_launch_torch_rank import ADDS_UP, UNTIL_WARNED, found

pytestmark = pytest.mark.cluster

_PYTHON = sys.executable


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    yield from cluster_or_skip()


@pytest.fixture
def launch(cluster: SlurmCluster, tmp_path: Path) -> Launcher:
    return Launcher(cluster, tmp_path)


@pytest.fixture(scope="module")
def horovod() -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("horovod.torch", reason="Horovod is not built here: run `hvdcomp build-horovod`")


@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_a_training_runs_to_its_end(launch: Launcher, launcher: str, horovod: None) -> None:
    training = ["--epochs", "2", "--compression", "topk:ratio=0.01", "--output", "run", "--no-progress"]
    done = launch.job("--launcher", launcher, "--", "hvdcomp", "train", *training)
    assert done.returncode == 0, done.stdout + done.stderr
    states = re.findall(r"^job \d+: ([A-Z]+)", done.stderr, re.MULTILINE)
    assert states[-1] == "COMPLETED"
    assert set(states) <= {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "COMPLETED"}
    assert "cnn on digits: finished" in done.stdout
    assert "the ranks ended with exit code 0" in done.stdout
    summary = json.loads((launch.folder / "run" / "summary.json").read_text())
    assert (summary["world_size"], summary["controller"], summary["identical"]) == (2, "mpi", True)
    assert summary["accuracy"] > 0.85


@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_ranks_of_torch_find_each_other(launch: Launcher, launcher: str) -> None:
    """Started by srun without PMIx, or by mpirun."""
    pytest.importorskip("torch")
    (launch.folder / "program.py").write_text(ADDS_UP)
    program = ["--", _PYTHON, "program.py"]
    done = launch.job("--backend", "torch", "--launcher", launcher, "--no-requeue", *program)
    assert done.returncode == EXIT_SAVED, done.stdout + done.stderr
    number = number_of(done.stderr)
    host = socket.gethostname().partition(".")[0]
    same = {"MASTER_ADDR": host, "MASTER_PORT": str(20000 + number), "TORCHELASTIC_RUN_ID": str(number)}
    place = {"ranks": 2, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    assert found(done.stdout) == [{"RANK": rank, "LOCAL_RANK": rank, **place, **same} for rank in ("0", "1")]


def test_ranks_of_torch_on_two_nodes_look_for_rank_0_on_its_own(launch: Launcher) -> None:
    pytest.importorskip("torch")
    says_where = 'import os; os.write(1, "\\nnode {SLURM_PROCID} {SLURMD_NODENAME}\\n".format(**os.environ).encode())'
    (launch.folder / "program.py").write_text(f"{says_where}\n{ADDS_UP}")
    nodes = ["--nodes", "2", "--no-requeue"]
    done = launch.job("--backend", "torch", *nodes, "--", _PYTHON, "program.py", ranks=4)
    assert done.returncode == EXIT_SAVED, done.stdout + done.stderr
    node_of = dict(re.findall(r"^node (\d) (\S+)$", done.stdout, re.MULTILINE))
    assert node_of["0"] == node_of["1"] != node_of["2"] == node_of["3"]
    for rank, said in enumerate(found(done.stdout)):
        assert (said["ranks"], said["MASTER_ADDR"]) == (4, node_of["0"])
        place = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
        assert [int(said[name]) for name in place] == [rank, rank % 2, 2, rank // 2]


@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_a_job_that_fails_returns_its_code(launch: Launcher, launcher: str) -> None:
    program = "import os, sys; print('told', os.environ['HVDCOMP_EXPECTED_SIZE']); sys.exit(7)"
    done = launch.job("--launcher", launcher, "--", _PYTHON, "-c", program)
    assert done.returncode == 7
    assert "told 2" in done.stdout
    assert "ended as FAILED with exit code 7; its output is in test-" in done.stderr


def test_a_rank_that_is_killed_is_said_so(launch: Launcher) -> None:
    program = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    done = launch.job("--", _PYTHON, "-c", program)
    assert done.returncode == 137


@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_words_reach_the_ranks_as_they_are(launch: Launcher, launcher: str) -> None:
    # In one write, and from the start of a line: mpirun puts together what the ranks write as it comes.
    said = "'\\nwords ' + json.dumps([sys.argv[1:], os.environ['VALUE']]) + '\\n'"
    program = f"import json, os, sys; os.write(1, ({said}).encode())"
    value = "VALUE=a\n#SBATCH --time=1\r\n'\"$(touch injected)"
    done = launch.job("--launcher", launcher, "--env", value, "--", _PYTHON, "-c", program, *_HOSTILE)
    assert done.returncode == 0, done.stdout + done.stderr
    heard = [json.loads(line.removeprefix("words ")) for line in done.stdout.splitlines() if line.startswith("words ")]
    assert heard == [[_HOSTILE, value.removeprefix("VALUE=")]] * 2, done.stdout + done.stderr
    assert not (launch.folder / "injected").exists()


@pytest.mark.parametrize("binding", ["", "single:1"])
def test_each_rank_sees_all_gpus_of_its_node(launch: Launcher, binding: str) -> None:
    """Also where the cluster, or the user's environment, would give each rank its own alone."""
    if binding:
        launch.variables["SLURM_GPU_BIND"] = binding
    program = "import os; print('sees', os.environ['CUDA_VISIBLE_DEVICES'])"
    done = launch.job("--gpus-per-node", "2", "--", _PYTHON, "-c", program)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("sees 0,1\n") == 2, done.stdout


def test_other_resources_of_nodes_are_asked_for(launch: Launcher) -> None:
    job = launch.detached("--gres", "nic:1", "--gpus-per-node", "2", "--", "true")
    shown = launch.cluster.command("scontrol", "show", "job", str(job))
    asked = re.search(r"TresPerNode=(\S+)", shown)
    assert asked is not None, shown
    assert sorted(asked[1].split(",")) == ["gres:gpu:2", "gres:nic:1"]


@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_ranks_may_lock_as_much_memory_as_their_node_allows(launch: Launcher, launcher: str) -> None:
    """InfiniBand needs that, and Slurm brings the limit of the submission along, which is often 64 KB."""
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    program = "import os, resource; os.write(1, f'\\nlocks {resource.getrlimit(resource.RLIMIT_MEMLOCK)}\\n'.encode())"
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (16384, before[1]))
    try:
        done = launch.job("--launcher", launcher, "--", _PYTHON, "-c", program)
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, before)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(f"locks ({before[1]}, {before[1]})\n") == 2, done.stdout


def test_a_script_that_sbatch_gets_inside_of_another_job_asks_for_its_own_memory(launch: Launcher) -> None:
    """srun refuses two amounts, and sbatch passes those of the other job on."""
    script = launch.job("--memory", "100M", "--dry-run", "--", _PYTHON, "-c", "print('runs')").stdout
    (launch.folder / "script").write_text(script)
    command = ["env", "SLURM_MEM_PER_CPU=50", "sbatch", "--parsable", "--wait", f"--chdir={launch.folder}"]
    job = launch.cluster.command(*command, str(launch.folder / "script")).strip()
    assert (launch.folder / f"test-{job}.log").read_text().count("runs\n") == 2


def test_a_wrong_plugin_of_srun_stops_the_ranks(launch: Launcher, horovod: None) -> None:
    """Open MPI sees Slurm and no PMIx, and says so."""
    done = launch.job("--mpi", "none", "--", "hvdcomp", "train", "--epochs", "1")
    assert done.returncode not in (0, EXIT_SAVED)
    assert "was not built with SLURM's PMI support" in " ".join(done.stdout.split())


def test_ranks_that_do_not_find_each_other_stop_with_the_reason(launch: Launcher, horovod: None) -> None:
    """An MPI that sees nothing of the launcher takes each rank for a world of its own."""
    hide = "import os, sys; [os.environ.pop(name) for name in list(os.environ) if name.startswith(('PMI', 'SLURM_'))]"
    train = "os.execvp('hvdcomp', ['hvdcomp', 'train', '--epochs', '1'])"
    done = launch.job("--", _PYTHON, "-c", f"{hide}; {train}")
    assert done.returncode == 2
    assert "HVDCOMP_EXPECTED_SIZE=2, but the training found 1 rank" in done.stdout
    assert "--mpi=pmix" in done.stdout


def test_a_step_that_does_not_start_is_no_success(launch: Launcher) -> None:
    """srun that says it is well and starts nothing, as when a node cannot set PMIx up."""
    folder = launch.folder / "bin"
    folder.mkdir()
    (folder / "srun").write_text("#!/bin/sh\nexit 0\n")
    (folder / "srun").chmod(0o755)
    launch.variables["PATH"] = f"{folder}:{launch.variables['PATH']}"
    done = launch.job("--", "true")
    assert done.returncode == 1
    assert "srun started no rank" in done.stdout


_WAITS = "import signal; print('started', flush=True); signal.pause()"


def test_delete_cancels_a_job(launch: Launcher) -> None:
    job = launch.detached("--", _PYTHON, "-c", _WAITS)
    launch.wait_for_line(job, "started")
    assert " RUNNING " in launch.run("status").stdout
    deleted = launch.run("delete", str(job))
    assert deleted.returncode == 0, deleted.stderr
    followed = launch.run("logs", "--follow", "--poll-seconds", "0.5", str(job))
    assert followed.returncode == 143
    assert "CANCELLED" in followed.stderr
    assert "started" in followed.stdout
    assert " CANCELLED " in launch.run("status", str(job)).stdout


@pytest.mark.parametrize("cancels", [True, False], ids=["cancels", "leaves"])
def test_interrupting(launch: Launcher, cancels: bool) -> None:
    flags = ["--cancel-on-interrupt"] if cancels else []
    process = launch.start(*submission(2), *flags, "--", _PYTHON, "-c", _WAITS)
    assert process.stderr is not None
    job = number_of(process.stderr.readline())
    launch.wait_for_line(job, "started")
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=100)
    assert process.returncode == 130, said
    if cancels:
        assert f"job {job}: CANCELLED" in said
        assert launch.cluster.wait_for_state(job, "CANCELLED") == "CANCELLED"
    else:
        assert f"job {job} continues" in said
        assert launch.cluster.wait_for_state(job, "RUNNING", seconds=1) == "RUNNING"
        assert launch.run("delete", str(job)).returncode == 0
        launch.cluster.wait_for_state(job, "CANCELLED")


def test_a_job_that_slurm_does_not_know(launch: Launcher) -> None:
    for arguments in (["status", "99999"], ["logs", "99999"], ["delete", "99999"]):
        done = launch.run(*arguments)
        assert done.returncode == 125, arguments
        assert "99999" in done.stderr + done.stdout


# Trains, with slow steps in the first start of a job: the time limit then comes in the middle.
_SLOW = """
import os, sys, time
from hvdcomp.tools.commands.train import command
from hvdcomp.tools.train.torch_learner import TorchLearner

real_step = TorchLearner.step

def step(self, *batch):
    time.sleep(float(os.environ["STEP_SECONDS"]) if os.environ.get("SLURM_RESTART_COUNT", "0") == "0" else 0)
    return real_step(self, *batch)

TorchLearner.step = step
command.main(sys.argv[1:], "train")
"""
_TRAINING = [
    *("--model", "mlp", "--samples", "640", "--epochs", "10", "--compression", "topk:ratio=0.02"),
    *("--policy", "accordion:low=0.1,high=0.02", "--no-progress"),
]


@pytest.fixture(scope="module")
def whole(cluster: SlurmCluster, horovod: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a run that was never stopped."""
    launch = Launcher(cluster, tmp_path_factory.mktemp("whole"))
    done = launch.job("--env", "STEP_SECONDS=0", "--", _PYTHON, "-c", _SLOW, *_TRAINING, "--output", "run")
    assert done.returncode == 0, done.stdout + done.stderr
    return launch.folder / "run"


def _check_same(one: Path, other: Path) -> None:
    first, second = (json.loads((folder / "summary.json").read_text()) for folder in (one, other))
    assert first["status"] == second["status"] == "finished"
    assert len(second["resumed_at"]) == 1
    assert second["weights_sha256"] == first["weights_sha256"]
    steps = [json.loads(line)["step"] for line in (other / "steps.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 201))


@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_a_job_that_is_warned_saves_is_queued_again_and_ends_as_if_it_had_not(
    launch: Launcher, launcher: str, whole: Path
) -> None:
    """The warning as a user can send it; the other test waits for Slurm's."""
    program = ["--env", "STEP_SECONDS=0.1", "--launcher", launcher, "--", _PYTHON, "-c", _SLOW, *_TRAINING]
    job = launch.detached(*program, "--output", "b", "--checkpoint-folder", "c")
    _wait_for_steps(launch.folder / "b", 10)
    launch.cluster.command("scancel", "--signal=USR1", "--batch", str(job))
    followed = launch.run("logs", "--follow", "--poll-seconds", "0.5", str(job))
    assert followed.returncode == 0, followed.stdout + followed.stderr
    assert "Slurm is asked to requeue the job, which then continues from this checkpoint" in followed.stdout
    assert "start 2" in followed.stdout
    _check_same(whole, launch.folder / "b")


def test_a_job_that_reaches_its_time_limit_goes_on(launch: Launcher, whole: Path) -> None:
    """In one minute it cannot make its 200 steps. Slurm warns it 10 to 40 seconds before the end."""
    limited = ["--time", "1", "--warning-seconds", "10", "--env", "STEP_SECONDS=0.3", "--", _PYTHON, "-c", _SLOW]
    done = launch.job(*limited, *_TRAINING, "--output", "b", "--checkpoint-folder", "c", timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Slurm is asked to requeue the job" in done.stdout
    assert "start 2" in done.stderr
    _check_same(whole, launch.folder / "b")


def test_a_cancelled_job_is_saved_and_not_queued_again(launch: Launcher, horovod: None) -> None:
    program = ["--env", "STEP_SECONDS=0.1", "--", _PYTHON, "-c", _SLOW, *_TRAINING]
    job = launch.detached(*program, "--output", "b", "--checkpoint-folder", "c")
    _wait_for_steps(launch.folder / "b", 10)
    assert launch.run("delete", str(job)).returncode == 0
    followed = launch.run("logs", "--follow", "--poll-seconds", "0.5", str(job))
    assert followed.returncode == EXIT_SAVED
    assert "the job was cancelled, so it is not requeued" in followed.stdout
    summary = json.loads((launch.folder / "b" / "summary.json").read_text())
    assert summary["status"] == "stopped"
    # On a busy machine an epoch may have ended before, with a checkpoint of its own.
    saved = sorted(place.name for place in (launch.folder / "c").glob("step-????????"))
    assert saved[-1] == f"step-{summary['steps']:08}"


def test_a_job_is_queued_again_only_so_often(launch: Launcher) -> None:
    program = ["--max-requeues", "1", "--", _PYTHON, "-c", f"import sys; sys.exit({EXIT_SAVED})"]
    done = launch.job(*program)
    assert done.returncode == EXIT_SAVED
    assert done.stdout.count("is asked to requeue") == 1
    assert "it is not requeued" in done.stdout
    once = launch.job("--no-requeue", "--", _PYTHON, "-c", f"import sys; sys.exit({EXIT_SAVED})")
    assert once.returncode == EXIT_SAVED
    assert "is asked to requeue" not in once.stdout


@pytest.mark.parametrize(("launcher", "warning"), [("srun", "USR1"), ("mpirun", "TERM")])
def test_ranks_of_torch_that_are_warned_save_are_queued_again_and_go_on(
    launch: Launcher, launcher: str, warning: str
) -> None:
    pytest.importorskip("torch")
    (launch.folder / "program.py").write_text(UNTIL_WARNED)
    job = launch.detached("--backend", "torch", "--launcher", launcher, "--", _PYTHON, "program.py")
    launch.wait_for_line(job, "trains")
    launch.cluster.command("scancel", f"--signal={warning}", "--batch", str(job))
    followed = launch.run("logs", "--follow", "--poll-seconds", "0.5", str(job))
    assert followed.returncode == 0, followed.stdout + followed.stderr
    assert "Slurm is asked to requeue the job, which then continues from this checkpoint" in followed.stdout
    steps = re.findall(r"^goes on after (\d+) (\d+)$", followed.stdout, re.MULTILINE)
    assert len(steps) == 2, followed.stdout
    assert len(set(steps)) == 1
    assert steps[0][0] == steps[0][1], followed.stdout


def _wait_for_steps(folder: Path, count: int, seconds: float = 100) -> None:
    deadline = time.monotonic() + seconds
    while not (folder / "steps.jsonl").exists() or (folder / "steps.jsonl").read_text().count("\n") < count:
        assert time.monotonic() < deadline, f"fewer than {count} steps after {seconds} s"
        time.sleep(0.1)


def test_nothing_is_left_of_a_cluster_even_if_a_test_fails(cluster: SlurmCluster) -> None:
    folders = []

    def fail() -> None:
        with slurm_cluster() as other:
            folders.append(other.folder)
            other.command("sbatch", "--wrap", f"touch {other.folder}/began; sleep 1000", f"--output={other.folder}/log")
            other.wait_for_state(1, "RUNNING")
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        fail()
    (folder,) = folders
    assert folder != cluster.folder
    assert not folder.exists()
    assert not [line for line in _command_lines() if str(folder).encode() in line]


def _command_lines() -> Iterator[bytes]:
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended, or is another user's
            yield b"\0".join([*variables(process), (process / "cmdline").read_bytes()])
