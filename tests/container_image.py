"""The CPU image, built by docker/build with buildah, and pods of it: containers in the network namespaces of hosts.

Base image, layers and the builder's caches are in a subfolder of hvdcomp's cache folder, so that an image is built only
once from the same files. No registry is needed: debootstrap makes the base, a Debian. The build gets this machine's
configuration of pip as a secret, and the files that the configuration names as mounts. `why_not` names a missing
program; scripts/install-system-packages --images installs it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hvdcomp.tools.bench.cluster import Cluster
from hvdcomp.tools.cache import cache_folder

ROOT = Path(__file__).parents[1]
TAG = "localhost/hvdcomp:cpu"
# The Debian of the Dockerfile's own base.
_RELEASE = "bookworm"
BASE = f"localhost/hvdcomp-base:{_RELEASE}"
# Frameworks of the tests' image. Compiling Horovod for TensorFlow takes three times as long, and nothing else differs,
# so the default of the Dockerfile is built when asked for: HVDCOMP_IMAGE_FRAMEWORKS="torch tensorflow-cpu".
FRAMEWORKS = os.environ.get("HVDCOMP_IMAGE_FRAMEWORKS", "torch")
_PROGRAMS = ("buildah", "debootstrap", "ip", "setpriv", "ssh-keygen", "tc", "unshare")
_MOST_IMAGES = 300  # with those between; then the storage is made anew, as each commit of hvdcomp leaves a few
_BUSY = "sealing memfd copy: Device or resource busy"  # buildah starts from a copy of itself, and now and then cannot
_HOST = "/mnt/host"  # where this machine's files are seen while building


def why_not() -> str | None:
    """The reason why no image can be built and run here; None if it can."""
    if os.geteuid() != 0:
        return "to make a base image and network namespaces needs root"
    missing = [program for program in _PROGRAMS if shutil.which(program, path=_search_path()) is None]
    if missing:
        return f"no {', '.join(missing)} here (as root: scripts/install-system-packages --images)"
    return None


class UnreachableError(Exception):
    """No Debian mirror answers, and no earlier base image exists."""


class Image:
    """The image, and its containers.

    Attributes:
        environment: the variables with which buildah finds the storage.
    """

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment

    def buildah(self, *arguments: str) -> str:
        """Runs buildah and returns its output."""
        command = ["buildah", *arguments]
        process = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        assert process.returncode == 0, f"{' '.join(command)}:\n{process.stdout}{process.stderr}"
        return process.stdout.strip()

    def configuration(self) -> dict[str, Any]:
        """The image's configuration in Docker's format, with `config` and `history`."""
        described: dict[str, Any] = json.loads(self.buildah("inspect", "--type", "image", TAG))
        return described["Docker"]

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Runs a command in a new container, as the image's own user."""
        container = self.buildah("from", TAG)
        arguments = ["buildah", "run", "--cap-drop", "ALL", container, "--", *command]
        try:
            return subprocess.run(
                arguments, env=self.environment, capture_output=True, text=True, check=False, timeout=200
            )
        finally:
            self.buildah("rm", container)

    def layers(self) -> list[Path]:
        """The folders of the image's layers, from the base up."""
        container = self.buildah("from", TAG)
        mounted = self.buildah("mount", container)
        line = next(line for line in Path("/proc/mounts").read_text().splitlines() if line.split()[1] == mounted)
        options = dict(option.partition("=")[::2] for option in line.split()[3].split(","))
        storage = Path(mounted).parents[1]
        return [storage / lower for lower in reversed(options["lowerdir"].split(":"))]

    def start_pod(
        self,
        cluster: Cluster,
        host: int,
        command: Sequence[str],
        *,
        variables: Mapping[str, str] | None = None,
        volumes: Mapping[Path, str] | None = None,
    ) -> subprocess.Popen[str]:
        """Starts a container on a host of an emulated cluster, as a pod of the restricted Pod Security Standard runs.

        It has the image's user, no capabilities, no privilege escalation, and the host's network and name.

        Args:
            cluster: an entered cluster.
            host: the number of the host.
            command: the container's command.
            variables: added to the image's.
            volumes: folders and files of this machine, with where they are mounted.
        """
        container = self.buildah("from", TAG)
        options = ["--cap-drop=ALL", "--network=host", f"--hostname=host{host}"]
        options += [f"--env={name}={value}" for name, value in (variables or {}).items()]
        options += [f"--volume={path}:{target}" for path, target in (volumes or {}).items()]
        return cluster.start(
            host,
            ["setpriv", "--no-new-privs", "buildah", "run", *options, container, "--", *command],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )


@contextlib.contextmanager
def image() -> Iterator[Image]:
    """Builds the missing layers of the image; its containers end with the block.

    Raises:
        UnreachableError: without a base image and a way to make one.
    """
    folder = cache_folder() / "images"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock, tempfile.TemporaryDirectory(prefix="hvdcomp-images-") as run:
        fcntl.flock(lock, fcntl.LOCK_EX)
        environment = _environment(folder, Path(run))
        built = Image(environment)
        if len(built.buildah("images", "--all", "--quiet").split()) > _MOST_IMAGES:
            shutil.rmtree(folder / "storage")
        built.buildah("rm", "--all")  # of a run that was killed
        if not built.buildah("images", "--quiet", "--filter", f"reference={BASE}"):
            _make_base(built, Path(run))
        _build(environment, Path(run))
        try:
            yield built
        finally:
            built.buildah("rm", "--all")


def _environment(folder: Path, run: Path) -> dict[str, str]:
    configuration = run / "storage.conf"
    configuration.write_text(
        f'[storage]\ndriver = "overlay"\ngraphroot = "{folder}/storage"\nrunroot = "{run}/containers"\n'
    )
    (folder / "mounts").mkdir(exist_ok=True)
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "OMPI_", "HVDCOMP_"))},
        "PATH": _search_path(),
        "CONTAINERS_STORAGE_CONF": str(configuration),
        "CONTAINER_BUILDER": "buildah",
        "BUILDAH_ISOLATION": "chroot",  # needs no container runtime, and no more rights than this process has
        "TMPDIR": str(folder / "mounts"),  # where buildah has the cache mounts
    }


def _make_base(built: Image, folder: Path) -> None:
    """Makes a base like the official Debian image: the packages marked required, and apt."""
    tree = folder / "base"
    command = ["debootstrap", "--variant=minbase", _RELEASE, str(tree)]
    process = subprocess.run(command, env=built.environment, capture_output=True, text=True, check=False)
    if "Failed getting release file" in process.stdout + process.stderr:
        raise UnreachableError(f"debootstrap reaches no Debian mirror: {(process.stdout + process.stderr).strip()}")
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr
    shutil.rmtree(tree / "var" / "cache" / "apt" / "archives")
    archive = shutil.make_archive(str(tree), "tar", tree)
    container = built.buildah("from", "scratch")
    built.buildah("add", container, archive, "/")
    built.buildah("commit", "--rm", "--format", "docker", container, BASE)


def _build(environment: dict[str, str], folder: Path) -> None:
    configuration, paths = _pip_configuration()
    (folder / "pip.conf").write_text(configuration)
    command = [str(ROOT / "docker" / "build"), "cpu", "--build-arg", f"BASE={BASE}"]
    command += ["--build-arg", f"FRAMEWORKS={FRAMEWORKS}"]
    command += [f"--volume={path}:{_HOST}{path}:ro" for path in paths]
    variables = environment | {"PIP_CONFIG_FILE": str(folder / "pip.conf")}
    for _ in range(3):  # what was built by then is kept
        process = subprocess.run(
            command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        if process.returncode == 0 or _BUSY not in process.stdout:
            break
    assert process.returncode == 0, process.stdout[-10000:]


def _pip_configuration() -> tuple[str, list[Path]]:
    """This machine's configuration of pip as a file for the build, and the local files that it names."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    settings: dict[str, str] = {}
    seen: set[Path] = set()
    for line in sorted(listed.splitlines(), reverse=True):  # variables (":env:") come last, and win
        name, _, quoted = line.partition("=")
        values = []
        for value in quoted.strip("'").split():
            path = Path(urlsplit(value).path)
            local = urlsplit(value).scheme in ("", "file") and path.is_absolute() and path.exists()
            if local:
                seen.add(path.parent if urlsplit(value).scheme else path)  # an index's files lie beside its pages
            values.append(value.replace(str(path), f"{_HOST}{path}") if local else value)
        settings[name.rpartition(".")[2]] = " ".join(values)
    lines = [f"{name} = {value}" for name, value in settings.items()]
    return "\n".join(["[global]", *lines, ""]), sorted(seen)


def _search_path() -> str:
    """PATH with the folders of programs for root, which are not in a normal user's PATH."""
    return f"{os.environ.get('PATH', '')}{os.pathsep}/usr/sbin{os.pathsep}/sbin"
