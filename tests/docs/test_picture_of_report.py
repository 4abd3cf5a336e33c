"""The script that makes docs/demo.png of a report's web page."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("chromium") is None, reason="Chromium is not installed: apt-get install chromium")
def test_a_picture_has_the_page_and_nothing_behind_its_corners(tmp_path: Path) -> None:
    page, picture = tmp_path / "report.html", tmp_path / "picture.png"
    page.write_text("<html><head></head><body style='background: #00ff00'>hvdcomp report</body></html>")
    subprocess.run([ROOT / "scripts" / "picture-of-report", page, picture], check=True)
    image = pytest.importorskip("matplotlib.image").imread(picture)
    assert image.shape == (1026, 1300, 4)
    assert image[0, 0, 3] == image[-1, -1, 3] == 0
    assert image[513, 650].tolist() == [0, 1, 0, 1]


def test_it_says_how_it_is_used() -> None:
    done = subprocess.run([ROOT / "scripts" / "picture-of-report"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.endswith("picture-of-report REPORT.html PICTURE.png\n")
