"""Every page of figures says by what it was made, and none is stale without a word (docs/measured.toml)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.measured import DOCS, MEASURES, Page, marks, pages, said_of
from tests.trajectories import TRAININGS

ROOT = DOCS.parent
PAGES = {page.name: page for page in pages()}
FIGURES = (".csv", ".json", ".png")


def _text(page: Page) -> str:
    """On one line, because a command may be broken."""
    return " ".join((DOCS / page.name).read_text(encoding="utf-8").replace("\\\n", " ").split())


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
def test_a_row_is_true_of_its_page(page: Page) -> None:
    assert page.command in _text(page)
    assert page.measures in MEASURES
    for pattern in page.files:
        assert any(DOCS.glob(pattern)), f"{pattern}: there is no such file"
    for script in re.findall(r"\S+\.py", page.command):
        assert (ROOT / script).exists()
    assert page.trajectories.keys() <= TRAININGS.keys()
    assert page.test is None or (ROOT / page.test).exists()
    assert page.measures != "quality" or page.gone or page.trajectories, "what does it rest on?"
    assert page.measures != "counts" or page.test, "bytes can be counted anew"
    assert page.commit in _text(page), "a reader cannot tell on which sources the figures rest"


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
def test_no_page_is_stale(page: Page) -> None:
    assert page.gone or not page.changed(marks()), (
        f"docs/{page.name} rests on {', '.join(page.changed(marks()))}, which have changed: run `{page.command}` "
        "again, and note its commit and marks in docs/measured.toml; or say there, in `gone`, what is no more, and on "
        "the page of which commit its figures are"
    )


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: str(page.relative_to(DOCS)))
def test_no_page_begins_with_commits(page: Path) -> None:
    """Readers want the results first; `provenance_last` puts the command and the commits at the foot."""
    first = "\n".join(page.read_text(encoding="utf-8").splitlines()[:15])
    assert re.findall(r"commit `?[0-9a-f]{7,}|\| `[0-9a-f]{7,}` \|", first) == []


def test_a_page_on_what_is_gone_names_the_commit_or_when() -> None:
    for page in PAGES.values():
        if page.gone and page.measures == "quality":
            assert page.commit in _text(page), f"docs/{page.name} passes silently for one of today"


def test_all_files_of_figures_belong_to_a_page() -> None:
    files = {file for file in DOCS.rglob("*") if file.suffix in FIGURES}
    known = {file for page in PAGES.values() for pattern in page.files for file in DOCS.glob(pattern)}
    assert sorted(str(file.relative_to(DOCS)) for file in files - known) == []


def test_all_pages_that_a_benchmark_makes_have_a_row() -> None:
    made = {str(file.relative_to(DOCS)) for file in DOCS.rglob("*.md") if _is_made(file)}
    covered = {str(file.relative_to(DOCS)) for page in PAGES.values() for p in page.files for file in DOCS.glob(p)}
    assert sorted(made - PAGES.keys() - covered) == []


def _is_made(page: Path) -> bool:
    return re.search(r"^Made by `(python|hvdcomp|horovodrun|make) ?", page.read_text(), re.MULTILINE) is not None


def test_a_page_is_stale_when_a_trajectory_is_another_one() -> None:
    page = Page(name="a.md", command="c", commit="abc", measures="quality", trajectories={"topk-budget": "old"})
    assert page.changed({"topk-budget": "new"}) == page.changed({}) == ["topk-budget"]
    assert said_of(page, {"topk-budget": "new"})[0].startswith("Stale")
    assert said_of(page, {"topk-budget": "old"})[0] == "Its trajectories are the present ones"
