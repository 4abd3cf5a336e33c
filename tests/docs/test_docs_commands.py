"""The manual: every `hvdcomp` command that a page names exists, and takes the options that it is given there."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from hvdcomp.tools.cli import main
from tests.docs.test_docs import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "hvdcomp").rglob("README.md"))]
FENCED = re.compile(r"^```[^\n`]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:^ {4}.*\n)+", re.MULTILINE)
SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
FORMER = re.compile(r"Before commit `\w+`, the command\s+was\s+`[^`]+`")
COMMAND = re.compile(r"(?:^|\s|/)hvdcomp ([a-z].*)")
ENDS = re.compile(r" (?:\||>|&&|\|\|) ?.*| # .*")


def commands_of(page: Path) -> Iterator[str]:
    """What stands after `hvdcomp` in blocks and spans of code, but for commands of older commits."""
    text = FORMER.sub("", page.read_text(encoding="utf-8"))
    blocks = [*FENCED.findall(text), *INDENTED.findall(FENCED.sub("", text))]
    lines = [line for block in blocks for line in re.sub(r"\\\n\s*", "", block).splitlines()]
    lines += [" ".join(span.split()) for span in SPAN.findall(FENCED.sub("", INDENTED.sub("", text)))]
    for line in lines:
        if found := COMMAND.search(line):
            yield ENDS.sub("", found[1])


def problem(line: str) -> str | None:
    """What is wrong with a command; None if nothing is."""
    words, command = shlex.split(line), click.Context(main)
    while isinstance(command.command, click.Group) and words and re.fullmatch(r"[a-z][\w-]*", words[0]):
        child = command.command.get_command(command, words[0])
        if child is None:
            return f"there is no command {words[0]}"
        command = click.Context(child, info_name=words.pop(0), parent=command)
    known = {name for one in command.command.get_params(command) for name in (*one.opts, *one.secondary_opts)}
    ends = [*(number for number, word in enumerate(words) if word == "--" or word.endswith(".py")), len(words)]
    own = words[: ends[0]]  # what follows is another program's
    unknown = [word for word in own if re.match("--?[a-z]", word) and word.partition("=")[0] not in known]
    return f"{command.info_name} has no option {', '.join(unknown)}" if unknown else None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_its_commands_exist_and_take_the_options(page: Path) -> None:
    wrong = {line: found for line in commands_of(page) if (found := problem(line)) is not None}
    assert wrong == {}


def test_a_wrong_command_is_seen() -> None:
    assert sum(len(list(commands_of(page))) for page in PAGES) > 200
    assert problem("train --compression topk:ratio=0.1 --no-such-option 3") == "train has no option --no-such-option"
    assert problem("bench no-such-thing") == "there is no command no-such-thing"
    assert problem("launch slurm --name first -- python train.py --epochs 3") is None
