"""The Makefile: what the demo trains and compares, and the set-up's first step, `scripts/preflight.py`, by which
what is missing is named with its fix before any download."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def preflight() -> ModuleType:
    spec = importlib.util.spec_from_file_location("preflight", ROOT / "scripts" / "preflight.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


def test_the_demo_compares_every_run_and_trains_in_both_frameworks() -> None:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    done = subprocess.run(["make", "-n", "demo"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    recipe = done.stdout.replace("\\\n", " ")
    (compressions,) = re.findall(r"for compression in ([^;]+);", recipe)
    trained = [f"runs/demo/{spec.partition(':')[0]}" for spec in compressions.split()]
    (in_tensorflow,) = re.findall(r"hvdcomp train --framework tensorflow .*--output (\S+)", recipe)
    (reported,) = re.findall(r"hvdcomp report (.+) --output", recipe)
    assert reported.split() == [*trained, in_tensorflow]
    assert len(set(reported.split())) == len(reported.split())
