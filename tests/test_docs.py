"""The manual: its links lead somewhere, the files that it names exist, and every policy is described."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from hvdcomp.policies import POLICIES

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def anchor(heading: str) -> str:
    """The anchor that GitHub gives a heading: small letters, hyphens for blanks, no other signs."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {anchor(heading) for heading in headings}


@pytest.mark.parametrize("name", NAMES)
def test_every_link_leads_to_a_file_and_to_a_heading_in_it(name: str) -> None:
    page = ROOT / name
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCED.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"\w+:", target):
            continue
        path, _, heading = target.partition("#")
        file = page.parent / path if path else page
        if not file.exists() or (heading and heading not in anchors(file)):
            broken.append(target)
    assert broken == []


@pytest.mark.parametrize("name", NAMES)
def test_the_files_that_it_names_exist(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    named = re.findall(r"(?<![\w./])((?:hvdcomp|tests|benchmarks|examples|docs)/[\w/.*-]*\w)", text)
    assert [one for one in sorted(set(named)) if not any(ROOT.glob(one))] == []


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_and_each_of_its_parameters_is_in_the_reference(name: str) -> None:
    page = (ROOT / "docs" / "policies-reference.md").read_text(encoding="utf-8")
    (section,) = [one for one in re.split(r"^## ", page, flags=re.MULTILINE) if one.startswith(f"`{name}`\n")]
    parameters = {field.name for field in dataclasses.fields(POLICIES[name])} - {"lag"}
    assert [one for one in sorted(parameters) if f"`{one}`" not in section] == []
