"""The Makefile: the set-up's first step, `scripts/preflight.py`, by which what is missing is named with its fix
before any download; and `scripts/run-tests`, which runs the tests in parts."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from tests.loaded import load_file

ROOT = Path(__file__).parents[2]


@pytest.fixture
def preflight() -> ModuleType:
    return load_file("scripts/preflight.py", "preflight")


def test_this_python_and_compiler_pass(preflight: ModuleType) -> None:
    assert list(preflight.check_python()) == []
    assert list(preflight.check_compiler()) == []


@pytest.mark.parametrize("version", [(3, 9, 18), (3, 14, 0)])
def test_an_unsuitable_python_is_named(
    preflight: ModuleType, monkeypatch: pytest.MonkeyPatch, version: tuple[int, int, int]
) -> None:
    monkeypatch.setattr(sys, "version_info", version)
    (problem,) = preflight.check_python()
    assert "3.10 to 3.13" in problem
    assert "make PYTHON=" in problem


def test_a_python_without_venv_is_named(preflight: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ensurepip", None)
    (problem,) = preflight.check_python()
    assert "ensurepip" in problem
    assert "python3-venv" in problem


def test_a_python_without_headers_is_named(
    preflight: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    (problem,) = preflight.check_python()
    assert "python3-dev" in problem


def test_a_missing_compiler_is_named(preflight: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    (problem,) = preflight.check_compiler()
    assert "no C++ compiler" in problem
    assert "apt-get install g++" in problem


def test_a_compiler_without_cxx20_is_named_with_its_message(
    preflight: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = tmp_path / "old-c++"
    compiler.write_text("#!/bin/sh\necho unrecognized command line option -std=c++20\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    (problem,) = preflight.check_compiler()
    assert "unrecognized command line option -std=c++20" in problem


def test_another_python_gets_its_packages_at_once(tmp_path: Path) -> None:
    for name in ("Makefile", "constraints.txt", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, tmp_path)
    for version in ("3.11.9", "3.12.4"):
        (tmp_path / version).write_text(f"#!/bin/sh\necho Python {version}\n")
        (tmp_path / version).chmod(0o755)

    def planned(version: str) -> str:
        """The commands of the set-up, which are not run."""
        command = ["make", "--dry-run", f"PYTHON=./{version}", "setup"]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    words = "Installing packages"
    first = planned("3.11.9")
    assert words in first
    (tmp_path / ".venv").mkdir()
    for stamp in re.findall(r"touch (\.venv/\S+)", first):
        (tmp_path / stamp).touch()
    assert words not in planned("3.11.9")
    assert words in planned("3.12.4"), "the environment is made anew, without packages"


@pytest.mark.parametrize(("free", "problems"), [(0.5e9, 1), (100e9, 0)])
def test_too_little_disk_is_named_with_the_sum_of_what_lies_there(
    preflight: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: float, problems: int
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    monkeypatch.setenv("HVDCOMP_CACHE", str(tmp_path / "not" / "there" / "yet"))
    monkeypatch.setattr(preflight.tempfile, "gettempdir", lambda: str(tmp_path))
    found = list(preflight.check_disk(str(tmp_path / ".venv")))
    assert len(found) == problems
    needed = preflight.ENVIRONMENT_BYTES + preflight.CACHE_BYTES + preflight.TEMPORARY_BYTES
    assert all("0.5 GB free" in problem and f"{needed / 1e9:.1f} GB" in problem for problem in found)


class Suite:
    """`scripts/run-tests` with programs in place of the linters and pytest, which note how they were called."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for name in ("scripts", "bin"):
            (folder / name).mkdir()
        shutil.copy(ROOT / "scripts" / "run-tests", folder / "scripts")
        for name in ("ruff", "mypy", "lint-imports", "pytest"):
            program = folder / "bin" / name
            program.write_text(f'#!/bin/sh\necho {name} "$@" >> {folder}/calls\ncase "$*" in $FAIL) exit 1 ;; esac\n')
            program.chmod(0o755)

    def run(self, *arguments: str, fail: str = "nothing", **environment: str) -> tuple[int, str, list[str]]:
        """Exit status, output, and the programs that were called with their arguments."""
        calls = self._folder / "calls"
        calls.write_text("")
        done = subprocess.run(
            ["scripts/run-tests", *arguments],
            cwd=self._folder,
            env={"PATH": f"{self._folder / 'bin'}:{os.environ['PATH']}", "FAIL": fail, **environment},
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.returncode, done.stdout + done.stderr, calls.read_text().splitlines()


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    return Suite(tmp_path)


def selected(calls: list[str], marks: set[str]) -> int:
    """By how many calls of pytest a test with these marks is run."""
    expressions = [call.partition(" -m ")[2] for call in calls if call.startswith("pytest")]
    names = ("alone", "cluster", "thorough")
    return sum(eval(one, {}, {name: name in marks for name in names}) for one in expressions)


def test_the_parts_together_are_all_tests_and_make_test_leaves_out_what_is_marked(suite: Suite) -> None:
    _, _, quick = suite.run("quick")
    code, output, everything = suite.run("all")
    assert code == 0, output
    for number in range(8):
        marks = {name for place, name in enumerate(("alone", "cluster", "thorough")) if number >> place & 1}
        assert selected(everything, marks) == 1, marks
        assert selected(quick, marks) == (not marks & {"cluster", "thorough"}), marks
    for calls in (quick, everything):
        assert calls[:4] == ["ruff check .", "ruff format --check .", "mypy", "lint-imports --no-cache --no-logo"]
        assert all("--durations=40" in call for call in calls[4:])


def test_the_mark_by_which_files_are_found_that_start_ranks_stands_in_files_of_tests_only() -> None:
    mark = "mark" + ".alone"  # else this file would be found, too
    naming = [path for path in (ROOT / "tests").rglob("*.py") if mark in path.read_text(encoding="utf-8")]
    assert len(naming) > 20
    assert [path.name for path in naming if not path.name.startswith("test_")] == []


def test_a_part_that_fails_is_said_and_keeps_no_other_from_running(suite: Suite) -> None:
    code, output, calls = suite.run("all", fail="*not?alone*")
    assert code == 1
    assert len(calls) == 7
    assert re.search(r"in-process +FAILED +0 min 0\d s", output)
    assert re.search(r"clusters +passed +0 min 0\d s", output)
    assert re.search(r"In all, with set-up: 1 min 4\d s", suite.run("quick", STARTED=str(int(time.time()) - 100))[1])


def test_some_parts_can_be_chosen_and_a_seed_repeated(suite: Suite) -> None:
    code, output, calls = suite.run("all", "ranks", SEED="7")
    assert code == 0
    assert len(calls) == 1
    assert "--hypothesis-profile=fresh --hypothesis-seed=7" in calls[0]
    assert "make test-all SEED=7" in output
    assert "HVDCOMP_EXAMPLES=12 pytest" in output
    assert "HVDCOMP_EXAMPLES=100 pytest" in suite.run("all", "lint", HVDCOMP_EXAMPLES="100")[1]
    seeds = [re.findall(r"seed (\d+)", suite.run("all", "lint")[1]) for _ in range(2)]
    assert seeds[0] != seeds[1]
    assert suite.run("all", "ranks", "rank")[0] == 2
    assert suite.run("some")[0] == 2


def test_lint_needs_no_set_up() -> None:
    """Neither the frameworks nor Horovod."""
    words = ["make", "--dry-run", "--no-print-directory", "lint"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "scripts/run-tests quick lint" in done.stdout
    assert not re.search(r"torch|tensorflow|horovod|\.venv", done.stdout), done.stdout


def test_a_quiet_command_speaks_only_if_it_fails(tmp_path: Path) -> None:
    def run(script: str) -> subprocess.CompletedProcess[str]:
        words = [str(ROOT / "scripts" / "quietly"), "sh", "-c", script]
        env = {"PATH": os.environ["PATH"], "TMPDIR": str(tmp_path)}
        return subprocess.run(words, capture_output=True, text=True, timeout=60, env=env)

    done = run("echo one; echo two >&2")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    failed = run("echo one; echo two >&2; exit 3")
    assert failed.returncode == 3
    assert failed.stderr.splitlines()[:2] == ["one", "two"]
    assert "ended with status 3" in failed.stderr
    assert not list(tmp_path.iterdir())


def test_a_quiet_command_shows_where_it_is_and_ends_when_it_is_told_to(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    script = f"echo Collecting numpy; echo Collecting torch; echo $$ >{tmp_path}/pipe; exec sleep 1000"
    words = [str(ROOT / "scripts" / "quietly"), "sh", "-c", script]
    environment = {**os.environ, "QUIETLY_SECONDS": "0.2"}
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment) as quiet:
        command = int((tmp_path / "pipe").read_text())
        assert quiet.stderr is not None
        until = time.monotonic() + 30
        # The last line of the output so far, where the command has begun late.
        while (line := quiet.stderr.readline()) in ("  \n", "  Collecting numpy\n") and time.monotonic() < until:
            pass
        assert line == "  Collecting torch\n"
        quiet.terminate()
        assert "Collecting numpy\n" in quiet.communicate(timeout=30)[1], "all of the output, as it failed"
    assert quiet.returncode == 130
    with pytest.raises(ProcessLookupError):
        os.kill(command, 0)
