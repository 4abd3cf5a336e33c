"""Environments of tests that install packages; without a package index, these tests are skipped."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def pip_with_index(python: Path, folder: Path) -> list[str]:
    """The beginning of pip's command for an interpreter, if it reaches an index: it downloads a package to the folder.

    Otherwise the test is skipped.
    """
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet"]
    download = [*pip, "download", "--no-deps", "--dest", str(folder), "click"]
    reached = subprocess.run(download, capture_output=True, text=True)
    if reached.returncode:
        pytest.skip(f"no package index can be reached: {reached.stderr.strip().splitlines()[-1]}")
    return pip


def fresh_environment(folder: Path) -> Path:
    """Makes a virtual environment with pip only, and returns its interpreter."""
    venv.create(folder, with_pip=True)
    return folder / "bin" / "python"


def source_of_package(folder: Path) -> Path:
    """Copies the files that `pip install` needs to a new folder, because a build leaves files behind."""
    shutil.copytree(ROOT / "hvdcomp", folder / "hvdcomp", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


def environment_on_top(folder: Path) -> Path:
    """Makes a virtual environment on top of the running one's packages, and returns its interpreter."""
    python = fresh_environment(folder)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    beneath = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    lines = [f"import site; site.addsitedir({path!r})" for path in sorted(beneath)]
    (packages / "beneath.pth").write_text("\n".join(lines), encoding=sys.getfilesystemencoding())
    return python
