"""The stories of docs/: their files and commands, run as the pages have them, print what the pages say."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from click.testing import CliRunner

from hvdcomp.tools.cli import main
from tests.docs.test_docs import ROOT
from tests.launched import launcher_variables

PAGES = sorted((ROOT / "docs").glob("story-*.md"))
BLOCK = re.compile(r"^```(bash|sh|text|python|py)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"Save this as\s+`([\w.]+)`(?:(?!^```).)*\Z", re.MULTILINE | re.DOTALL)
NOT_RUN = "*Not run here"
QUICK = ("hvdcomp advise", "hvdcomp launch")
"""Commands that compute and print, and take less than a few seconds. Those that train are thorough."""

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


class Told(NamedTuple):
    """A part of a page: a file that the reader saves, or commands, and the lines that they print among others."""

    file: str | None
    code: str
    prints: list[str]


def parts_of(page: Path) -> list[Told]:
    text = page.read_text(encoding="utf-8")
    parts: list[Told] = []
    end = 0
    for block in BLOCK.finditer(text):
        before, end = text[end : block.start()], block.end()
        kind, code = block.groups()
        if kind == "text":
            assert parts, f"{page.name}: no command prints this: {code}"
            parts[-1].prints.extend(code.splitlines())
        elif kind == "python" and (name := NAMED.search(before)):
            parts.append(Told(name[1], code, []))
        elif kind == "bash":
            parts.append(Told(None, code, []))
        else:
            assert kind != "python", f"{page.name}: name the file of this program, or call it py: {code}"
            assert kind != "sh" or NOT_RUN in before, f"{page.name}: say that this was not run, or call it bash: {code}"
    return parts


def commands_of(code: str) -> list[str]:
    return [line for line in re.sub(r"\\\n\s*", "", code).splitlines() if line.strip()]


def is_quick(part: Told) -> bool:
    return part.file is None and all(line.startswith(QUICK) for line in commands_of(part.code))


def assert_printed(part: Told, output: str) -> None:
    """Asserts that the output has the lines of the page in this order, however it is broken into lines."""
    output, place = " ".join(output.split()), 0
    for line in part.prints:
        words = " ".join(line.split())
        found = output.find(words, place)
        assert found >= 0, f"after `{part.code.strip()}` the page has {words!r}, but it printed:\n{output[-6000:]}"
        place = found + len(words)


def test_the_stories_are_there_and_have_commands_of_both_kinds() -> None:
    assert len(PAGES) == 3
    parts = [part for page in PAGES for part in parts_of(page)]
    assert {is_quick(part) for part in parts} == {False, True}
    assert sum(bool(part.prints) for part in parts) >= 8


@every_page
def test_its_quick_commands_print_what_it_says(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("k8s", "slurm"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    for part in filter(is_quick, parts_of(page)):
        if "launch k8s" in part.code:
            pytest.importorskip("kubernetes")
        output = ""
        for line in commands_of(part.code):
            done = CliRunner().invoke(main, shlex.split(line)[1:])
            assert done.exit_code == 0, (line, done.output)
            output += done.output
        assert_printed(part, output)


@every_page
def test_its_files_are_programs(page: Path) -> None:
    for part in parts_of(page):
        if part.file is not None:
            compile(part.code, f"{page.name}: {part.file}", "exec")


def test_the_new_compressor_does_what_its_story_says(tmp_path: Path) -> None:
    """Its two programs need neither a framework nor ranks."""
    parts = parts_of(ROOT / "docs" / "story-new-compressor.md")
    _run([part for part in parts if part.file or part.code.startswith("python ")], tmp_path)


@every_page
@pytest.mark.thorough
@pytest.mark.alone
@pytest.mark.timeout(3600)
def test_a_reader_can_follow_it(page: Path, tmp_path: Path) -> None:
    """All files and commands, in order, in a folder with the folders of a clone."""
    for name in ("examples", "k8s", "slurm"):
        (tmp_path / name).symlink_to(ROOT / name)
    if "horovodrun" in page.read_text(encoding="utf-8"):
        pytest.importorskip("horovod.torch", reason="Horovod is not built here: run `hvdcomp build-horovod`")
    _run(parts_of(page), tmp_path)


def _run(parts: list[Told], folder: Path) -> None:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    variables = launcher_variables({"COLUMNS": "200", "PYTHONPATH": path})
    variables["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), variables["PATH"]))
    for part in parts:
        if part.file is not None:
            (folder / part.file).write_text(part.code, encoding="utf-8")
            continue
        done = subprocess.run(
            ["bash", "-e"], input=part.code, cwd=folder, env=variables, capture_output=True, text=True
        )
        assert done.returncode == 0, (part.code, (done.stdout + done.stderr)[-4000:])
        assert_printed(part, done.stdout)
