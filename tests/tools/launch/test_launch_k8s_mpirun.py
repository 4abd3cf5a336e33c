"""mpirun's command line, as in the manifest, run by a real Open MPI on two hosts that it must reach by ssh. Here
ssh is a script that does with the command what sshd does: it gives it to a shell, in a bare environment."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hvdcomp.tools.launch.job import Job
from hvdcomp.tools.launch.k8s.manifest import render
from hvdcomp.tools.launch.k8s.settings import KubernetesSettings
from hvdcomp.tools.launch.promise import EXIT_SAVED
from tests.tools.launch.test_launch_torch_rank import ADDS_UP, found

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(shutil.which("mpirun") is None, reason="there is no mpirun"),
]

SSH = """#!/bin/sh
echo "$@" >> {log}
while [ "${{1#-}}" != "$1" ]; do
  case "$1" in -[pio]) shift ;; esac
  shift
done
mkdir -p {folder}/$1
export TMPDIR={folder}/$1  # a host's own, as what Open MPI's daemons keep there bears the same name on each
shift
exec env -i TMPDIR=$TMPDIR PATH={path} HOME={folder} OPAL_PREFIX={prefix} \
  OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
  setsid sh -c "$*"
"""


def launch(
    tmp_path: Path, program: list[str], environment: dict[str, str], code: int = 0, backend: Any = "horovod"
) -> list[str]:
    """Run the launcher's container on this machine; returns the lines of the ranks."""
    (tmp_path / "ssh").write_text(
        SSH.format(log=tmp_path / "ssh.log", path=os.environ["PATH"], folder=tmp_path, prefix=sys.prefix)
    )
    (tmp_path / "ssh").chmod(0o755)
    (tmp_path / "hostfile").write_text("".join(f"x-worker-{index}.x.team.svc slots=1\n" for index in range(2)))
    manifest = render(KubernetesSettings(Job("x", tuple(program), 2, environment, backend), "hvdcomp"))
    pod = manifest["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]
    container = pod["containers"][0]
    operator = {
        "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
        "OMPI_MCA_orte_default_hostfile": str(tmp_path / "hostfile"),
        "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
        "OMPI_MCA_orte_set_default_slots": "1",
    }
    variables = {one["name"]: one["value"].replace("$$", "$") for one in container["env"]}
    here = {
        "OMPI_MCA_plm_rsh_agent": str(tmp_path / "ssh"),
        "TMPDIR": str(tmp_path),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    hosts = _known_hosts(tmp_path) if backend == "torch" else []
    done = subprocess.run(
        [*hosts, container["command"][-1], *(word.replace("$$", "$") for word in container["args"])],
        env={**os.environ, **operator, **variables, **here},
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    return done.stdout.splitlines()


def _known_hosts(folder: Path) -> list[str]:
    """A command that runs another where the names of the workers stand for this machine, as DNS has them in a pod."""
    (folder / "hosts").write_text(Path("/etc/hosts").read_text() + "127.0.0.1 x-worker-0.x x-worker-1.x\n")
    mount = f"mount --bind {folder}/hosts /etc/hosts"
    return ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh"]


def test_arguments_and_variables_reach_other_hosts_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text(
        "import json, os, sys\n"
        "names = 'VALUE', 'HVDCOMP_EXPECTED_SIZE', 'OMPI_COMM_WORLD_SIZE', 'OMPI_COMM_WORLD_RANK'\n"
        "print(json.dumps([sys.argv[1:], [os.environ[name] for name in names]]))\n"
    )
    trap = f"$(touch {tmp_path}/trap)"
    hostile = [
        "a b",
        trap,
        f"`touch {tmp_path}/trap`",
        f'"; touch {tmp_path}/trap; "',
        "'",
        "",
        ":",
        "line\nbreak",
        "é",
    ]
    arguments = [*hostile, "--mca", "anything", trap, "-np", "7", "-x", "VALUE", "--"]
    value = f'; "{trap}"\n$HOME'
    lines = launch(tmp_path, ["python3", str(tmp_path / "show.py"), *arguments], {"VALUE": value})
    ranks = sorted(map(json.loads, lines), key=lambda rank: rank[1][-1])
    assert ranks == [[arguments, [value, "2", "2", "0"]], [arguments, [value, "2", "2", "1"]]]
    assert not (tmp_path / "trap").exists()
    calls = (tmp_path / "ssh.log").read_text().splitlines()
    assert len(calls) == 2
    # Not the operator's own arguments, which lack the port.
    assert all(" -p 2222 -o ConnectionAttempts=10 -o StrictHostKeyChecking=no" in call for call in calls)
    assert {call.partition(" orted ")[0].split()[-1] for call in calls} == {
        "x-worker-0.x.team.svc",
        "x-worker-1.x.team.svc",
    }


def test_the_exit_code_of_a_rank_is_the_launcher_s(tmp_path: Path) -> None:
    launch(
        tmp_path, ["python3", "-c", "import os; os._exit(41 * int(os.environ['OMPI_COMM_WORLD_RANK']))"], {}, code=41
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file of host names needs root")
def test_ranks_of_torch_find_each_other_on_the_host_that_the_manifest_names(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "program.py").write_text(ADDS_UP)
    program = [sys.executable, str(tmp_path / "program.py")]
    lines = launch(tmp_path, program, {"PYTHONPATH": ":".join(sys.path)}, EXIT_SAVED, backend="torch")
    place = {"ranks": 2, "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    same = {"MASTER_ADDR": "x-worker-0.x", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "x"}
    assert found("\n".join(lines)) == [{"RANK": rank, "GROUP_RANK": rank, **place, **same} for rank in ("0", "1")]
