"""The site of README, docs and docstrings: every page is in its menu, and it is made without a warning."""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
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


def test_links_of_the_changelog_lead_to_pages() -> None:
    content = [(ROOT / "CHANGELOG.md").read_text(encoding="utf-8")]
    runpy.run_path(str(DOCS / "conf.py"))["_of_the_readme"](None, Path("../CHANGELOG.md"), "changelog", content)
    links = re.findall(r"\]\((?!https?:|#)([^)#]*)", content[0])
    assert "ddp.md" in links
    assert [link for link in links if not (DOCS / link).exists()] == []


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site, which Sphinx makes without a warning."""
    if importlib.util.find_spec("sphinx") is None:
        pytest.skip("Sphinx is not installed: pip install '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", str(DOCS), str(folder)],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


def page_of(site: Path, name: str) -> str:
    return (site / f"{name}.html").read_text(encoding="utf-8")


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["index", "reference", "ddp", "story-two-machines"])
def test_the_links_of_the_site_lead_to_pages(site: Path, name: str) -> None:
    links = re.findall(r'(?:href|src)="([^"#:?]+)(?:[?#][^"]*)?"', page_of(site, name))
    assert [link for link in links if not (site / link).exists()] == []


@pytest.mark.thorough
def test_the_reference_is_made_of_the_docstrings(site: Path) -> None:
    reference = page_of(site, "reference")
    assert 'id="hvdcomp.TopK"' in reference
    assert "substitution" not in reference


@pytest.mark.thorough
def test_the_front_page_has_the_demo_and_three_doors(site: Path) -> None:
    text = page_of(site, "index")
    assert re.search(r'<img[^>]* src="_images/demo.png"', text)
    doors = re.split(r'class="sd-card-title', text)[1:4]
    for door, pages in zip(
        doors, (("ddp", "fsdp"), ("horovod", "tensorflow"), ("compressors", "reproduction")), strict=True
    ):
        for page in pages:
            assert f'href="{page}.html"' in door


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("word", "pages"),
    [("FSDP", {"fsdp", "ddp", "start"}), ("V100", {"installation", "will-it-pay", "story-horovod-v100"})],
)
def test_its_search_finds(site: Path, word: str, pages: set[str]) -> None:
    """The index that the search in the browser reads has each word in small letters, and its pages by number."""
    index = json.loads((site / "searchindex.js").read_text(encoding="utf-8").removeprefix("Search.setIndex(")[:-1])
    numbers = [
        number
        for terms in (index["terms"], index["titleterms"])
        if (found := terms.get(word.lower())) is not None
        for number in ([found] if isinstance(found, int) else found)
    ]
    assert pages <= {index["docnames"][number] for number in numbers}
