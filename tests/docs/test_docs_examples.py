"""The pages "... of your own" and the how-tos: the Python of each page runs from top to bottom, as one program. And
README's, block by block: what trains runs on real ranks (`case_the_readme_trains`), the rest here."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner

from hvdcomp.tools.cli import main
from tests.readme import blocks, run

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ["compiled-graph.md", "how-to.md", *sorted(page.name for page in DOCS.glob("your-own-*.md"))]


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


def test_the_how_to_says_what_advise_predicts_without_nvlink() -> None:
    page = (DOCS / "how-to.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^hvdcomp (advise .*)$", page, re.MULTILINE)
    done = CliRunner().invoke(main, [*command.split(), "--json"])
    assert done.exit_code == 0, done.output
    fastest = max(method["speedup_over_dense"] for method in json.loads(done.stdout)["methods"].values())
    assert f"at most {fastest:.2f} times as fast as training with uncompressed gradients" in " ".join(page.split())


def test_the_code_of_the_readme_runs() -> None:
    torch = pytest.importorskip("torch")
    import hvdcomp

    own = [block for block in blocks() if "import " in block or "hvd." in block]
    assert len(own) == 3, "the cases that train: Horovod, DistributedDataParallel, TensorFlow"
    rest = [block for block in blocks() if block not in own]
    assert len(rest) == 2
    for block in rest:
        run(block, hvdcomp=hvdcomp, model=torch.nn.Linear(64, 64), loader=range(10))
