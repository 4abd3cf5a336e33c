"""Pods in which real ranks train. A pod's container is a PID namespace, which ends with its first process. sshd is a
stub that only listens, and ssh a script that enters the namespace. The test does the work of kubelet, Job controller
and mpi-operator.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hvdcomp.tools.launch.k8s.manifest import WORKERS, render
from hvdcomp.tools.launch.k8s.settings import KubernetesSettings

NEEDED = [
    pytest.mark.cluster,
    pytest.mark.skipif(shutil.which("mpirun") is None, reason="there is no mpirun"),
    pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root"),
]
"""Marks of tests that make pods."""

_SSHD = """
import signal, socket, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
with socket.create_server((sys.argv[1], 2222)) as server:
    print("listens", flush=True)
    while True:
        server.accept()[0].close()
"""
# mpirun writes options before the host, horovodrun also behind it.
_SSH = """#!/bin/sh
pod=
while [ "${{1#-}}" != "$1" ] || [ -z "$pod" ]; do
  case "$1" in
    -[pio]) shift ;;
    -*) ;;
    *) pod=$1 ;;
  esac
  shift
done
mkdir -p {folder}/$pod  # a pod's own, as what Open MPI's daemons keep there bears the same name on each
exec nsenter --target "$(cat {folder}/$pod.pid)" --pid --mount \\
  env -i TMPDIR={folder}/$pod PATH={path} HOME={folder} OPAL_PREFIX={prefix} \\
  OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 setsid sh -c "$*"
"""


class Pods:
    """The pods of a job, in a folder.

    Args:
        count: largest number of workers; their hosts are known from the start.
    """

    def __init__(self, folder: Path, stack: contextlib.ExitStack, settings: KubernetesSettings, count: int) -> None:
        self.folder, self._stack = folder, stack
        self.workers = [f"{settings.job.name}-worker-{number}" for number in range(count)]
        (folder / "ssh").write_text(_SSH.format(folder=folder, path=os.environ["PATH"], prefix=sys.prefix))
        (folder / "ssh").chmod(0o755)
        self._domain = f"{settings.job.name}.team.svc"
        (folder / "hostfile").write_text("".join(f"{name}.{self._domain} slots=1\n" for name in self.workers))
        names = "".join(
            f"127.0.0.{11 + number} {name}.{settings.job.name} {name}.{self._domain}\n"
            for number, name in enumerate(self.workers)
        )
        (folder / "hosts").write_text(Path("/etc/hosts").read_text() + names)
        (folder / "discover_hosts.sh").write_text(f"#!/bin/sh\ncat {folder}/listed\n")
        (folder / "discover_hosts.sh").chmod(0o755)
        self.list_workers()
        self._inits: dict[str, int] = {}
        self.settings = settings

    def list_workers(self, *names: str) -> None:
        """Sets the output of the operator's discover_hosts.sh."""
        new = self.folder / "listed.new"
        new.write_text("".join(f"{name}.{self._domain}\n" for name in names))
        new.rename(self.folder / "listed")

    def start_worker(self, name: str) -> subprocess.Popen[str]:
        namespaces = ["unshare", "--pid", "--mount", "--fork", "--kill-child", "sh", "-c"]
        mounts = f'mount --bind {self.folder}/hosts /etc/hosts && mount -t proc proc /proc && exec "$@"'
        address = f"127.0.0.{11 + self.workers.index(name)}"
        process = self._start([*namespaces, mounts, "sh", sys.executable, "-c", _SSHD, address])
        assert process.stdout is not None
        assert process.stdout.readline() == "listens\n"
        first = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0]
        (self.folder / f"{name}.{self._domain}.pid").write_text(first)
        self._inits[name] = int(first)
        return process

    def start_launcher(self, **more: Any) -> subprocess.Popen[str]:
        launcher = self._container("Launcher")
        operator = {
            "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
            "OMPI_MCA_orte_default_hostfile": str(self.folder / "hostfile"),
            "OMPI_MCA_orte_set_default_slots": "1",
        }
        variables = {variable["name"]: variable["value"].replace("$$", "$") for variable in launcher["env"]}
        environment = {
            "OMPI_MCA_plm_rsh_agent": str(self.folder / "ssh"),
            "PATH": f"{self.folder}:{os.environ['PATH']}",
            "TMPDIR": str(self.folder),
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }
        mounts = f'mount --bind {self.folder}/hosts /etc/hosts && exec "$@"'
        words = [word.replace("$$", "$") for word in [*launcher["command"], *launcher["args"]]]
        words = [str(self.folder / "discover_hosts.sh") if word == WORKERS else word for word in words]
        environment = {**os.environ, **operator, **variables, **environment}
        return self._start(["unshare", "--mount", "sh", "-c", mounts, "sh", *words], env=environment, **more)

    def before_stop(self, name: str) -> int:
        """Runs a worker's preStop command, as kubelet does before it ends the pod, and returns the exit code."""
        command = self._container("Worker")["lifecycle"]["preStop"]["exec"]["command"]
        enter = ["nsenter", "--target", str(self._inits[name]), "--pid", "--mount"]
        environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
        return subprocess.run([*enter, *command], env=environment, check=False, timeout=100).returncode

    def signal_worker(self, name: str, number: int) -> None:
        """Sends a signal to the first process of a worker's container."""
        os.kill(self._inits[name], number)

    def _container(self, role: str) -> dict[str, Any]:
        return render(self.settings)["spec"]["mpiReplicaSpecs"][role]["template"]["spec"]["containers"][0]

    def _start(self, command: list[str], **more: Any) -> subprocess.Popen[str]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more}
        process = subprocess.Popen(command, cwd=self.folder, text=True, **pipes)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process
