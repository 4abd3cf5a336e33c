"""`hvdcomp compressors`: complete, true to the classes, and what docs/compressors.md holds."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from hvdcomp.compressors import COMPRESSORS, MEMORIES
from hvdcomp.compressors.evidence import FIRST
from hvdcomp.compressors.harm import harm_with
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.tools.cli import main
from hvdcomp.tools.commands.compressors import BEGIN, END

MANUAL = Path(__file__).parents[2] / "docs" / "compressors.md"


def run(*arguments: str, width: int = 80) -> Result:
    return CliRunner().invoke(main, ["compressors", *arguments], env={"COLUMNS": str(width)})


def listed() -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in json.loads(run("--json").stdout)}


def test_json_lists_every_compressor() -> None:
    entries = listed()
    assert list(entries) == list(COMPRESSORS)
    for name, entry in entries.items():
        compressor = parse_compressor(entry["example"])
        assert compressor.name == name
        assert entry["sends"]
        assert re.fullmatch(r"(allreduce|allgather)(, (allreduce|allgather))*", entry["collective"])
        assert entry["biased"] == compressor.biased
        assert entry["memory"] in MEMORIES
        assert entry["level"] == compressor.level_name
        for parameter in entry["parameters"]:
            if not parameter["required"]:
                assert parameter["default"] == getattr(compressor, parameter["name"])


def test_json_of_one_with_everything() -> None:
    entry = listed()["powersgd"]
    meanings = [parameter.pop("meaning") for parameter in entry["parameters"]]
    assert meanings[0].startswith("the number of columns of the factors P and Q.")
    whole, switch = "it must be a whole number of at least 1 and ", "it must be true or false"
    positive = "it must be positive (1 is usual)"
    assert entry == {
        "name": "powersgd",
        "summary": "Runs one warm-started power iteration per training step (Vogels et al. 2019, arXiv:1905.13727, "
        "algorithm 1).",
        "example": "powersgd:rank=4",
        "examples": list(COMPRESSORS["powersgd"].examples),
        "parameters": [
            {"name": "rank", "type": "int", "required": True, "default": None, "allowed": f"{whole}below 2**63"},
            {"name": "min_rate", "type": "float", "required": False, "default": 1.0, "allowed": positive},
            {"name": "iterations", "type": "int", "required": False, "default": 1, "allowed": f"{whole}at most 100"},
            {"name": "alternating", "type": "bool", "required": False, "default": False, "allowed": switch},
        ],
        "level": "rank",
        "sends": "the factors P (rows x rank) and Q (columns x rank); only one of the two per step if alternating",
        "collective": "allreduce, allreduce",
        "biased": True,
        "biased_when": {},
        "memory": "error_feedback",
        "reference": "Vogels et al. 2019, arXiv:1905.13727",
    }
    assert listed()["randomk"]["biased_when"] == {"unbiased=True": False}
    assert listed()["int4"]["biased_when"] == {"rounding=stochastic": False}


@pytest.mark.parametrize("width", [80, 200])
def test_terminal_table_shows_all(width: int) -> None:
    result = run(width=width)
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= width
    words = result.stdout.split()
    for name, entry in listed().items():
        assert name in words
        for parameter in entry["parameters"]:
            assert any(word.startswith(parameter["name"]) for word in words)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_one_is_shown_with_all_there_is_to_know(width: int) -> None:
    for name, entry in listed().items():
        result = run(name, width=width)
        assert result.exit_code == 0
        assert max(map(len, result.stdout.splitlines())) <= width
        words = "".join(result.stdout.split())
        about = [entry["summary"], entry["sends"], entry["memory"], *entry["examples"], *entry["reference"].split("; ")]
        if width == 200:  # no cell goes on in the next line
            about += [parameter["meaning"] for parameter in entry["parameters"]]
        assert all("".join(text.split()) in words for text in about)
        for parameter in entry["parameters"]:
            assert parameter["name"] in words
            assert parameter["meaning"], "every parameter's docstring says what it is"
            assert parameter["allowed"], "and what is refused says what is allowed"


def test_one_as_json_and_one_that_does_not_exist() -> None:
    assert json.loads(run("topk", "--json").stdout) == [listed()["topk"]]
    unknown = run("topkk")
    assert unknown.exit_code == 2
    assert "there is no compressor 'topkk' (did you mean 'topk'?); the compressors are: none, fp16," in unknown.stderr
    assert run("topk", "--markdown").exit_code == 2


def test_the_manual_holds_the_table() -> None:
    _, begin, rest = MANUAL.read_text(encoding="utf-8").partition(f"{BEGIN}\n")
    table, end, _ = rest.partition(END)
    assert begin
    assert end
    assert table == run("--markdown").stdout, "run: hvdcomp compressors --markdown docs/compressors.md"
    for name in COMPRESSORS:
        assert f"| `{name}` |" in table


def test_markdown_replaces_what_is_between_the_markers(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Before\n{BEGIN}\nold\n{END}\nafter\n", encoding="utf-8")
    for _ in range(2):
        assert run("--markdown", str(page)).exit_code == 0
        table = run("--markdown").stdout
        assert page.read_text(encoding="utf-8") == f"# Before\n{BEGIN}\n{table}{END}\nafter\n"


def test_every_line_of_the_markdown_table_has_as_many_cells() -> None:
    lines = run("--markdown").stdout.splitlines()
    assert len(lines) == 2 + len(COMPRESSORS)
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {9}


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "cannot be read"), ("nothing\n", "no markers for the table"), (f"{BEGIN}\n", "no markers for the table")],
)
def test_markdown_into_a_file_without_a_place_for_it(tmp_path: Path, text: str | None, message: str) -> None:
    page = tmp_path / "page.md"
    if text is not None:
        page.write_text(text, encoding="utf-8")
    result = run("--markdown", str(page))
    assert result.exit_code == 1
    assert message in result.stderr
    assert not page.exists() or page.read_text(encoding="utf-8") == text


def test_json_and_markdown_exclude_each_other() -> None:
    result = run("--json", "--markdown")
    assert result.exit_code == 2
    assert "cannot be used together" in result.stderr


def test_the_list_says_what_to_try_first() -> None:
    said = " ".join(run().stdout.split()).partition("Methods to try first:")[2]
    for optimizer, specs in FIRST.items():
        assert (f"with {optimizer} " in said) == bool(specs)
        for spec in specs:
            assert spec in said
            compressor = parse_compressor(spec)
            harm = harm_with(compressor, "Adam", compressor.default_memory.keeps > 0)
            assert optimizer != "Adam" or harm is None, spec
