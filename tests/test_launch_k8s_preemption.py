"""Pods that are to end, or are killed, while real ranks train in them: the ranks save, and the job goes on when it is
started again.

A pod's container is a PID namespace, which ends with its first process. sshd is a stand-in that only listens, and ssh
a script that enters the namespace. What kubelet, Job controller and mpi-operator do, the test does.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hvdcomp.launch.job import Job
from hvdcomp.launch.k8s.manifest import render
from hvdcomp.launch.k8s.settings import KubernetesSettings
from hvdcomp.launch.promise import EXIT_SAVED
from tests.test_launch_torch_rank import UNTIL_WARNED

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(shutil.which("mpirun") is None, reason="there is no mpirun"),
    pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root"),
]

SSHD = """
import signal, socket, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
with socket.create_server((sys.argv[1], 2222)) as server:
    print("listens", flush=True)
    while True:
        server.accept()[0].close()
"""
SSH = """#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do
  case "$1" in -[pio]) shift ;; esac
  shift
done
pod=$1
shift
mkdir -p {folder}/$pod  # a pod's own, as what Open MPI's daemons keep there bears the same name on each
exec nsenter --target "$(cat {folder}/$pod.pid)" --pid --mount \\
  env -i TMPDIR={folder}/$pod PATH={path} HOME={folder} OPAL_PREFIX={prefix} \\
  OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 setsid sh -c "$*"
"""
WORKERS = ("x-worker-0", "x-worker-1")


class Pods:
    """The pods of a job of two ranks of torch.distributed, in a folder."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.folder, self._stack = folder, stack
        (folder / "ssh").write_text(SSH.format(folder=folder, path=os.environ["PATH"], prefix=sys.prefix))
        (folder / "ssh").chmod(0o755)
        (folder / "program.py").write_text(UNTIL_WARNED)
        (folder / "hostfile").write_text("".join(f"{name}.x.team.svc slots=1\n" for name in WORKERS))
        names = "".join(f"127.0.0.{11 + number} {name}.x {name}.x.team.svc\n" for number, name in enumerate(WORKERS))
        (folder / "hosts").write_text(Path("/etc/hosts").read_text() + names)
        job = Job("x", (sys.executable, "program.py"), 2, {"PYTHONPATH": ":".join(sys.path)}, "torch")
        replicas = render(KubernetesSettings(job, "hvdcomp"))["spec"]["mpiReplicaSpecs"]
        self._launcher, self._worker = (
            replicas[role]["template"]["spec"]["containers"][0] for role in ("Launcher", "Worker")
        )
        self._inits: dict[str, int] = {}

    def start_worker(self, name: str) -> subprocess.Popen[str]:
        namespaces = ["unshare", "--pid", "--mount", "--fork", "--kill-child", "sh", "-c"]
        mounts = f'mount --bind {self.folder}/hosts /etc/hosts && mount -t proc proc /proc && exec "$@"'
        address = f"127.0.0.{11 + WORKERS.index(name)}"
        process = self._start([*namespaces, mounts, "sh", sys.executable, "-c", SSHD, address])
        assert process.stdout is not None
        assert process.stdout.readline() == "listens\n"
        first = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0]
        (self.folder / f"{name}.x.team.svc.pid").write_text(first)
        self._inits[name] = int(first)
        return process

    def start_launcher(self) -> subprocess.Popen[str]:
        operator = {
            "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
            "OMPI_MCA_orte_default_hostfile": str(self.folder / "hostfile"),
            "OMPI_MCA_orte_set_default_slots": "1",
        }
        variables = {one["name"]: one["value"].replace("$$", "$") for one in self._launcher["env"]}
        here = {
            "OMPI_MCA_plm_rsh_agent": str(self.folder / "ssh"),
            "TMPDIR": str(self.folder),
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }
        mounts = f'mount --bind {self.folder}/hosts /etc/hosts && exec "$@"'
        words = (word.replace("$$", "$") for word in [*self._launcher["command"], *self._launcher["args"]])
        environment = {**os.environ, **operator, **variables, **here}
        return self._start(["unshare", "--mount", "sh", "-c", mounts, "sh", *words], env=environment)

    def before_stop(self, name: str) -> int:
        """What the kubelet runs in a worker first, when its pod is to end; the exit code."""
        command = self._worker["lifecycle"]["preStop"]["exec"]["command"]
        enter = ["nsenter", "--target", str(self._inits[name]), "--pid", "--mount"]
        environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
        return subprocess.run([*enter, *command], env=environment, check=False, timeout=100).returncode

    def signal_worker(self, name: str, number: int) -> None:
        """To the first process of the container."""
        os.kill(self._inits[name], number)

    def _start(self, command: list[str], **more: Any) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command, cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more
        )
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    pytest.importorskip("torch")
    with contextlib.ExitStack() as stack:
        running = Pods(tmp_path, stack)
        for name in WORKERS:
            running.start_worker(name)
        yield running


def wait_until_ranks_train(launcher: subprocess.Popen[str]) -> None:
    assert launcher.stdout is not None
    lines: list[str] = []
    while lines.count("trains\n") < 2:
        lines.append(launcher.stdout.readline())
        assert lines[-1], (lines, launcher.stderr and launcher.stderr.read())


def goes_on(launcher: subprocess.Popen[str]) -> None:
    """The launcher's end, after its ranks found what both had saved at one step."""
    output, errors = launcher.communicate(timeout=100)
    assert launcher.returncode == 0, errors
    steps = re.findall(r"^goes on after (\d+) (\d+)$", output, re.MULTILINE)
    assert len(steps) == 2, output
    assert len({*steps[0], *steps[1]}) == 1, output


def test_a_launcher_that_is_told_to_end_saves_and_the_next_one_goes_on(pods: Pods) -> None:
    launcher = pods.start_launcher()
    wait_until_ranks_train(launcher)
    launcher.send_signal(signal.SIGTERM)
    _, errors = launcher.communicate(timeout=100)
    assert launcher.returncode == EXIT_SAVED, errors
    assert "the ranks have saved and stopped" in errors
    goes_on(pods.start_launcher())


def test_a_worker_that_is_told_to_end_saves_and_the_job_goes_on_with_the_next_one(pods: Pods) -> None:
    launcher = pods.start_launcher()
    wait_until_ranks_train(launcher)
    assert pods.before_stop("x-worker-1") == 0
    _, errors = launcher.communicate(timeout=100)
    assert launcher.returncode == EXIT_SAVED, errors
    pods.signal_worker("x-worker-1", signal.SIGTERM)

    launcher = pods.start_launcher()
    assert launcher.stderr is not None
    assert launcher.stderr.readline().startswith("hvdcomp: waiting for worker x-worker-1.x.team.svc (")
    pods.start_worker("x-worker-1")
    goes_on(launcher)


def test_a_worker_that_is_killed_fails_the_launcher_and_the_next_one_trains_anew(pods: Pods) -> None:
    """As for memory; the kubelet starts the container again."""
    launcher = pods.start_launcher()
    wait_until_ranks_train(launcher)
    pods.signal_worker("x-worker-1", signal.SIGKILL)
    launcher.communicate(timeout=100)
    assert launcher.returncode not in (0, EXIT_SAVED)
    pods.start_worker("x-worker-1")
    wait_until_ranks_train(pods.start_launcher())


def test_a_worker_without_ranks_ends_at_once(pods: Pods) -> None:
    assert pods.before_stop("x-worker-0") == 0
