"""What all commands share of a terminal: tables that are not cut off, closed pipes, and names that are nearly right."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from hvdcomp.perfmodel.rates import parse_gbps, parse_rate
from hvdcomp.specs.suggestions import did_you_mean
from hvdcomp.tools.cli import main
from hvdcomp.tools.terminal import make_console, make_table, print_table

CELLS = ("[red]a_very_long_name_of_a_run[/red]", "12345.678", "some words that need more than one line")


def printed(width: int) -> list[str]:
    table = make_table("name", "time\nms", "remark", numbers=["time\nms"])
    table.add_row(*CELLS)
    console = make_console(width=width)
    with console.capture() as capture:
        print_table(console, table, "a title")
    return capture.get().splitlines()


@pytest.mark.parametrize("width", [12, 30, 40, 41, 60, 200])
def test_a_table_is_folded_or_shown_row_by_row_but_never_cut_off(width: int) -> None:
    title, *lines = printed(width)
    assert title == "a title"
    assert max(map(len, lines)) <= width
    words = "".join("".join(line.split()) for line in lines)
    for letters in CELLS[:2] if width > 40 else CELLS:
        assert all(letter in words for letter in letters.replace(" ", ""))
    assert "12345.678" in words
    assert ("timems:" in words) == (width < 41), "row by row where it is too narrow"


def test_a_pipe_has_no_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    with open(os.devnull, "w") as pipe:
        assert make_console(file=pipe).width > 10_000
        monkeypatch.setenv("COLUMNS", "40")
        assert make_console(file=pipe).width == 40
    assert isinstance(make_console(force_terminal=True, width=70), Console)


@pytest.mark.parametrize("arguments", [["compressors"], ["advise"], ["--help"], ["compressors", "--json"]])
def test_a_closed_pipe_is_no_error_to_speak_of(arguments: list[str]) -> None:
    """As with `hvdcomp ... | head -0`."""
    reader, writer = os.pipe()
    os.close(reader)  # before the command can write
    command = [sys.executable, "-c", "from hvdcomp.tools.cli import main; main()", *arguments]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_did_you_mean() -> None:
    assert did_you_mean("TopK", ["topk", "none"]) == " (did you mean 'topk'?)"
    assert did_you_mean("quux", ["topk", "none"]) == ""


@pytest.mark.parametrize(
    ("words", "meant"),
    [("advize", "advise"), ("launch slrum", "slurm"), ("bench encoed", "encode"), ("launch slurm staus 1", "status")],
)
def test_a_command_that_is_nearly_right(words: str, meant: str) -> None:
    result = CliRunner().invoke(main, words.split())
    assert result.exit_code == 2
    assert f"(did you mean {meant!r}?); the commands are: " in result.stderr


def test_rates() -> None:
    assert [parse_rate(text) for text in ("100mbit", " 2.5Gbit", "1kbit", "8bit")] == [1e8, 2.5e9, 1e3, 8]
    assert [parse_gbps(text) for text in ("10", "0.5", "500mbit", "1e1")] == [10, 0.5, 0.5, 10]
    for text in ("", "10", "1gb", "mbit", "-1mbit", "0mbit", "1 gbit/s"):
        with pytest.raises(ValueError, match="is not a rate; write it as tc does"):
            parse_rate(text)
    for text in ("0", "-1", "nan", "inf", "fast"):
        with pytest.raises(ValueError, match=r"100mbit"):
            parse_gbps(text)


def test_a_shell_completes_options_of_a_command_that_is_imported_when_it_is_run() -> None:
    words = {"COMP_WORDS": "hvdcomp advise --co", "COMP_CWORD": "2", "_HVDCOMP_COMPLETE": "bash_complete"}
    done = subprocess.run(
        [str(Path(sys.executable).parent / "hvdcomp")], env={**os.environ, **words}, capture_output=True, text=True
    )
    assert done.stdout.split() == ["plain,--compressor", "plain,--count"], done.stderr
