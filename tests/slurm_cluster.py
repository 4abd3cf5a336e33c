"""A Slurm cluster for tests on this machine: real munged, slurmctld and slurmd, in a temporary folder.

It needs root and the packages of scripts/install-system-packages --slurm; `why_not` names a missing one. Both nodes are
this machine, under two names, with more processors than the machine may have, so that small jobs run side by side; jobs
that fit on the first node do not run on the second. There is no accounting, so no sacct. A second partition is for one
account only.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from tests.ports import free_ports
from tests.processes import with_variable

_PROGRAMS = ("munged", "mungekey", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "setpriv")
_START_SECONDS = 60
SECOND_NODE = "localhost"

# cred_expire is also how long a requeued job waits before it starts again.
_SLURM_CONF = """
ClusterName=hvdcomp
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdDebug=verbose
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
GresTypes=gpu,nic
JobRequeue=0
KillWait=20
MinJobAge=300
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=5
NodeName=DEFAULT CPUs=8 RealMemory=4000 Gres=gpu:2,nic:1 State=UNKNOWN
NodeName={host} NodeAddr=127.0.0.1 Port={node_ports[0]} Weight=1
NodeName={second} NodeHostname={host} NodeAddr=127.0.0.1 Port={node_ports[1]} Weight=2
PartitionName=tests Nodes=ALL Default=YES MaxTime=60 State=UP
PartitionName=physics Nodes=ALL AllowAccounts=physics MaxTime=60 State=UP
"""

# Slurm wants a device for each GPU, and any will do: nothing opens them.
_GRES_CONF = """
Name=gpu File=/dev/full
Name=gpu File=/dev/zero
Name=nic Count=1
"""


def why_not() -> str | None:
    """The reason why Slurm cannot be started here; None if it can."""
    missing = [program for program in _PROGRAMS if shutil.which(program, path=_search_path()) is None]
    if os.geteuid() != 0:
        return "a Slurm of the tests' own needs root"
    if _host() == SECOND_NODE:
        return f"this machine has no name but {SECOND_NODE}"
    if missing:
        return f"no {', '.join(missing)} here (as root: scripts/install-system-packages --slurm)"
    return None


class SlurmCluster:
    """A running Slurm.

    Attributes:
        folder: all its files.
        environment: the variables with which Slurm's commands find the cluster.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": _search_path()}

    def command(self, *arguments: str) -> str:
        """Runs one of Slurm's commands and returns its output."""
        process = subprocess.run(
            arguments, env=os.environ | self.environment, capture_output=True, text=True, check=False, timeout=60
        )
        output = process.stdout + process.stderr
        assert process.returncode == 0, f"{' '.join(arguments)} ended with {process.returncode}:\n{output}"
        return process.stdout

    @contextmanager
    def configured(self, line: str) -> Iterator[None]:
        """Adds a line to slurm.conf within the block."""
        path = self.folder / "slurm.conf"
        before = path.read_text()
        path.write_text(f"{before}{line}\n")
        self.command("scontrol", "reconfigure")
        try:
            yield
        finally:
            path.write_text(before)
            self.command("scontrol", "reconfigure")

    def wait_for_state(self, job: int, *states: str, seconds: float = 120) -> str:
        """Waits until the job is in one of these states and returns it."""
        deadline = time.monotonic() + seconds
        while True:
            text = self.command("scontrol", "--oneliner", "show", "job", str(job))
            state = re.search(r"\bJobState=(\w+)", text)
            assert state is not None, text
            if state[1] in states:
                return state[1]
            assert time.monotonic() < deadline, f"after {seconds} s no job in {states}:\n{text}\n{self.logs()}"
            time.sleep(0.2)

    def logs(self) -> str:
        """The last lines of the daemons' logs."""
        return "\n".join(
            f"== {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-20:])
            for log in sorted(self.folder.glob("*.log"))
        )


@contextmanager
def slurm_cluster() -> Iterator[SlurmCluster]:
    """Starts a Slurm cluster, and removes its jobs, daemons and files at the end of the block."""
    with ExitStack() as stack:
        # Not pytest's folder: munged's own user has to reach the socket.
        folder = Path(tempfile.mkdtemp(prefix="hvdcomp-slurm-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        folder.chmod(0o755)
        nodes = (_host(), SECOND_NODE)
        for name in ("state", *(f"spool-{node}" for node in nodes)):
            (folder / name).mkdir()
        cluster = SlurmCluster(folder)
        stack.callback(_kill_strays, folder)
        _start_munge(cluster, stack)
        controller_port, *node_ports = free_ports(3)
        configuration = {"host": nodes[0], "second": nodes[1], "node_ports": node_ports}
        (folder / "slurm.conf").write_text(
            _SLURM_CONF.format(folder=folder, controller_port=controller_port, **configuration)
        )
        (folder / "gres.conf").write_text(_GRES_CONF)
        _start(cluster, stack, ["slurmctld", "-D"], "slurmctld")
        for node in nodes:
            _start(cluster, stack, ["slurmd", "-D", "-N", node], f"slurmd-{node}")
        stack.callback(_cancel_all, cluster)
        _wait_until_idle(cluster)
        yield cluster


def _start_munge(cluster: SlurmCluster, stack: ExitStack) -> None:
    """Starts munged as its package's user, because it warns about root, with files in a private folder."""
    user = pwd.getpwnam("munge")
    private = cluster.folder / "munge"
    private.mkdir(mode=0o700)
    os.chown(private, user.pw_uid, user.pw_gid)
    os.chown(cluster.folder, user.pw_uid, user.pw_gid)  # the socket is made here
    as_munge = ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
    subprocess.run([*as_munge, "mungekey", "--create", f"--keyfile={private}/key"], check=True, env=_variables(cluster))
    _start(
        cluster,
        stack,
        [
            *as_munge,
            *("munged", "--foreground", f"--key-file={private}/key", f"--pid-file={private}/pid"),
            *(f"--seed-file={private}/seed", f"--log-file={private}/log", f"--socket={cluster.folder}/munge.socket"),
        ],
        "munged",
    )
    _wait(cluster, (cluster.folder / "munge.socket").exists, "munged has no socket")


def _host() -> str:
    return socket.gethostname().partition(".")[0]


def _start(cluster: SlurmCluster, stack: ExitStack, command: list[str], name: str) -> None:
    with (cluster.folder / f"{name}.out.log").open("wb") as output:
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command],  # not even a test run that is killed leaves it behind
            env=_variables(cluster),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    stack.callback(_stop, process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait_until_idle(cluster: SlurmCluster) -> None:
    def idle() -> bool:
        process = subprocess.run(
            ["sinfo", "--noheader", "--format=%T"], env=_variables(cluster), capture_output=True, text=True, check=False
        )
        return set(process.stdout.split()) == {"idle"}

    _wait(cluster, idle, "the nodes do not become idle")


def _wait(cluster: SlurmCluster, ready, problem: str) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not ready():
        assert time.monotonic() < deadline, f"{problem} after {_START_SECONDS} s\n{cluster.logs()}"
        time.sleep(0.1)


def _cancel_all(cluster: SlurmCluster) -> None:
    """Cancels all jobs; `_kill_strays` kills those that do not end in time."""
    subprocess.run(["scancel", "--signal=KILL", "--full", "--user=root"], env=_variables(cluster), check=False)
    subprocess.run(["scancel", "--user=root"], env=_variables(cluster), check=False)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        process = subprocess.run(
            ["squeue", "--noheader"], env=_variables(cluster), capture_output=True, text=True, check=False
        )
        if not process.stdout.strip():
            return
        time.sleep(0.2)


def _kill_strays(folder: Path) -> None:
    """Kills remaining processes of this cluster: step daemons outlive slurmd, and ranks outlive step daemons."""
    for process in with_variable(f"SLURM_CONF={folder}/slurm.conf"):
        with suppress(OSError):  # it is gone
            os.kill(int(process.name), signal.SIGKILL)


def _variables(cluster: SlurmCluster) -> dict[str, str]:
    return os.environ | cluster.environment


def _search_path() -> str:
    """PATH with the folders of daemons, which are not in a normal user's PATH."""
    return f"{os.environ.get('PATH', '')}{os.pathsep}/usr/sbin{os.pathsep}/sbin"
