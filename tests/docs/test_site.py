"""The site of README, docs and docstrings: every page is in its menu, and it is made without a warning."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def test_every_page_is_in_the_menu() -> None:
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    menus = re.findall(r"```\{toctree\}\n(.*?)```", index, re.DOTALL)
    lines = [line for menu in menus for line in menu.splitlines() if line and not line.startswith(":")]
    named = [re.sub(r".*<(.*)>", r"\1", line) for line in lines]
    assert len(named) == len(set(named))
    assert {path.stem for path in DOCS.glob("*.md")} - {"index"} == {name for name in named if "/" not in name}


@pytest.mark.thorough
@pytest.mark.skipif(importlib.util.find_spec("sphinx") is None, reason="Sphinx is not installed: pip install '.[docs]'")
def test_the_site_is_made_without_a_warning_and_its_links_lead_to_pages(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", str(DOCS), str(tmp_path)],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for page in ("index", "reference", "ddp"):
        text = (tmp_path / f"{page}.html").read_text(encoding="utf-8")
        for link in re.findall(r'href="([^"#:?]+)(?:[?#][^"]*)?"', text):
            assert (tmp_path / link).exists(), f"{page}: {link}"
    reference = (tmp_path / "reference.html").read_text(encoding="utf-8")
    assert 'id="hvdcomp.TopK"' in reference
    assert "substitution" not in reference
