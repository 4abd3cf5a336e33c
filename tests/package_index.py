"""Environments of tests that install packages, and are skipped where no package index can be reached."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest


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


def environment_on_top(folder: Path) -> Path:
    """Makes a virtual environment that has the packages of the running one too, and may get others; its interpreter."""
    venv.create(folder, with_pip=True)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    beneath = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    lines = [f"import site; site.addsitedir({path!r})" for path in sorted(beneath)]
    (packages / "beneath.pth").write_text("\n".join(lines), encoding=sys.getfilesystemencoding())
    return folder / "bin" / "python"
