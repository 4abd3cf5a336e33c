"""The manual: its links lead somewhere, the files and functions that it names exist, and every policy is described."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

import pytest

from hvdcomp.compressors import COMPRESSORS
from hvdcomp.policies import POLICIES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
OF_FOLDERS = sorted((ROOT / "hvdcomp").rglob("README.md"))
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *OF_FOLDERS])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
METRIC = re.compile(r"hvdcomp/(\w+_(sent|in_node|bytes|factor|seconds|ratio|rank|bits)|level(/\w+)?)")  # no file
DEFINED = re.compile(
    r"^\s*(?:def|class) (\w+)|^\s*(?:self\.)?(\w[\w, ]*)(?:: [^=\n]+)? = |^ {4}(\w+): |"
    r"HVD_KERNEL\(\w+, (\w+)|#define (\w+)",
    re.MULTILINE,
)
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
    named = set(re.findall(r"(?<![\w./-])((?:hvdcomp|tests|benchmarks|examples|docs)/[\w/.*-]*\w)", text))
    named |= set(re.findall(r"(?<![\w./])(\w+/[\w/*]+\.py)", text))  # also those that begin in the package's folder
    named = {one for one in named if not METRIC.fullmatch(one)}
    folders = (ROOT, ROOT / "hvdcomp", (ROOT / name).parent)
    assert [one for one in sorted(named) if not any(any(folder.glob(one)) for folder in folders)] == []


@pytest.mark.parametrize("picture", sorted((ROOT / "docs").rglob("*.png")), ids=lambda path: path.stem)
def test_a_picture_has_no_background_of_its_own(picture: Path) -> None:
    """It would be a white field on a dark page."""
    image = pytest.importorskip("matplotlib.image").imread(picture)
    assert image.shape[2] == 4
    assert image[0, 0, 3] == image[-1, -1, 3] == 0


def defined() -> dict[str, set[str]]:
    """The functions, classes, attributes, constants and kernels that each file defines."""
    folders = ("hvdcomp", "benchmarks", "tests", "examples")
    sources = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    sources += (ROOT / "hvdcomp").rglob("*.[ch]")
    sources.append(ROOT / "hvdcomp" / "kernels" / "src" / "kernels.def")
    return {
        str(path.relative_to(ROOT)): set(re.findall(r"\w+", str(DEFINED.findall(path.read_text())))) for path in sources
    }


@pytest.mark.parametrize("page", [ROOT / "docs" / "architecture.md", *OF_FOLDERS], ids=lambda page: page.parent.name)
def test_the_names_by_which_it_leads_to_the_code_are_there(page: Path) -> None:
    """A file has its folder before it or not; of `Class.method`, one file defines both."""
    files = defined()

    def is_there(word: str) -> bool:
        if re.fullmatch(r"[\w./]+\.(py|c|h|def)", word):
            return any(f"/{file}".endswith(f"/{word}") for file in files)
        name = re.fullmatch(r"([A-Za-z_]\w*(?:\.\w+)*)(?:\(.*\))?", word)
        if name is None or word in COMPRESSORS or word.endswith((".toml", ".so")):
            return True  # a command, a spec, another file
        return any(names.issuperset(name[1].removeprefix("hvdcomp.").split(".")) for names in files.values())

    words = re.findall(r"`([^`]+)`", FENCED.sub("", page.read_text(encoding="utf-8")))
    assert [word for word in words if not is_there(word)] == []


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_and_each_of_its_parameters_is_in_the_reference(name: str) -> None:
    page = (ROOT / "docs" / "policies-reference.md").read_text(encoding="utf-8")
    section = next((one for one in re.split(r"^## ", page, flags=re.MULTILINE) if one.startswith(f"`{name}`\n")), None)
    assert section is not None, "describe it there: rule, parameters, source"
    for own in re.findall(r"\((policy-\w+\.md)#parameters\)", section):
        section += (ROOT / "docs" / own).read_text(encoding="utf-8").split("\n## Parameters\n")[1].split("\n## ")[0]
    parameters = {field.name for field in dataclasses.fields(POLICIES[name])} - {"lag"}
    assert [one for one in sorted(parameters) if f"`{one}`" not in section] == []


def test_the_pictures_of_the_layers_are_what_is_held() -> None:
    """Each line of a picture has the number of a layer, counted from the bottom, and the parts in it."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    held = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = page.split("## The layers", 1)[1].split("\n## ", 1)[0]
    pictures = [block.strip("\n").splitlines() for block in section.split("```")[1::2]]
    assert len(pictures) == len(held)
    for picture, layers in zip(pictures, held, strict=True):
        assert [line.split()[0] for line in picture] == [str(number) for number in range(len(layers), 0, -1)]
        parts = [set(re.split(r"\s+", re.split(r"\s{3,}", line.strip())[1])) for line in picture]
        assert parts == [set(layer.split(" | ")) for layer in layers]
