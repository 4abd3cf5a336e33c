"""The pages "... of your own": the Python of each page runs from top to bottom, as one program."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted(page.name for page in DOCS.glob("your-own-*.md"))


def program(text: str) -> str:
    """The blocks marked as Python, with every other line of the page left empty: errors then name the page's lines."""
    lines, inside = [], False
    for line in text.splitlines():
        if line.startswith("```"):
            inside = line == "```python"
            lines.append("")
        else:
            lines.append(line if inside else "")
    return "\n".join(lines)


@pytest.mark.parametrize("name", PAGES)
def test_the_code_of_a_page_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = program((DOCS / name).read_text(encoding="utf-8"))
    assert re.search(r"^assert ", source, re.MULTILINE), "the page shows nothing that could fail"
    module = ModuleType(re.sub(r"\W", "_", name))
    monkeypatch.setitem(sys.modules, module.__name__, module)  # dataclasses and spec strings look types up there
    monkeypatch.chdir(tmp_path)
    exec(compile(source, str(DOCS / name), "exec"), vars(module))
