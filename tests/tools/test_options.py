"""Options that are declared once: their command line, and the checks of single values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import click
import pytest
from click.testing import CliRunner

from hvdcomp.tools.commands.declared import declared_flags, declared_options
from hvdcomp.tools.options import at_least, below, between, check, may_change, of_older_runs, option, required


@dataclass(frozen=True)
class Settings:
    color: str = option("red", "Color.", choices=("red", "blue"))
    count: int | None = option(None, "Count.", at_least(1), metavar="N", may_change=True)
    share: float = option(0.5, "Share.", below(0, 1), before=1.0)
    port: int | None = option(None, "Port.", between(1, 9), shown=False)
    ends: tuple[float, ...] = option((), "Ends.", items="numbers, such as 3,4")
    every: int | str = option(1, "Every.")
    folder: Path | None = option(None, "Folder.")
    quiet: bool = option(False, "Quiet.", may_change=True)
    derived: int = 7


@click.command()
@declared_options(Settings, unset="depends")
def command(**options: Any) -> None:
    click.echo(repr(Settings(**options)))


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(command, words)
    return done.exit_code, done.output


def test_without_options_everything_has_its_default() -> None:
    assert run() == (0, f"{Settings()!r}\n")


def test_a_text_is_read_by_the_type() -> None:
    words = "--color blue --count 3 --share 0.25 --ends 1,2.5 --every auto --folder here --quiet"
    expected = Settings("blue", 3, 0.25, None, (1.0, 2.5), "auto", Path("here"), True)
    assert run(*words.split()) == (0, f"{expected!r}\n")
    assert "every=5," in run("--every", "5")[1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--ends 1,x", "'1,x' is not a list of numbers, such as 3,4"),
        ("--count x", "'x' is not a valid integer"),
        ("--color green", "'green' is not one of 'red', 'blue'"),
        ("--derived 3", "No such option"),
    ],
)
def test_a_text_of_another_type_is_refused(words: str, said: str) -> None:
    code, output = run(*words.split())
    assert code == 2
    assert said in output


def test_the_help_shows_defaults_and_what_stands_for_none() -> None:
    lines = [" ".join(line.split()) for line in run("--help")[1].splitlines()]
    assert "--color [red|blue] Color. [default: red]" in lines
    assert "--count N Count. [default: (depends)]" in lines
    assert "--port INTEGER Port." in lines
    assert "--quiet Quiet." in lines


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"color": "green"}, "--color 'green' is unknown; choose one of red, blue"),
        ({"count": 0}, "--count 0 must be at least 1"),
        ({"share": 1.0}, "--share 1.0 must be at least 0 and less than 1"),
        ({"share": float("nan")}, "--share nan must be at least 0 and less than 1"),
        ({"port": 10}, "--port 10 must be from 1 to 9"),
    ],
)
def test_a_value_out_of_range_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(KeyError) as caught:
        check(Settings(**given), KeyError, {})
    assert caught.value.args == (said,)


def test_choices_can_be_others_than_the_command_line_offers() -> None:
    check(Settings("green"), KeyError, {"color": ("green",)})
    with pytest.raises(KeyError, match="choose one of green"):
        check(Settings("red"), KeyError, {"color": ("green",)})


def test_what_a_resumed_run_may_change_and_what_older_runs_did() -> None:
    assert may_change(Settings) == {"count", "quiet"}
    older = {"color": "red", "count": None, "share": 1.0, "port": None, "ends": (), "every": 1}
    assert of_older_runs(Settings) == {**older, "folder": None, "quiet": False}


@dataclass(frozen=True)
class Job:
    image: str = required("Image.")
    mode: Literal["a", "b"] = option("a", "Mode.")
    mounts: tuple[str, ...] = option((), "Mount; repeatable.", flags=("--mounts", "--mount"))
    again: bool = option(True, "Again.", flags=("--again/--once",))


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ("", {}),
        (
            "--image x --mode b --mount 1 --mounts 2 --once",
            {"image": "x", "mode": "b", "mounts": ("1", "2"), "again": False},
        ),
    ],
)
def test_flags_beside_a_file_have_no_defaults(words: str, given: dict[str, Any]) -> None:
    """What is not given is None, also where the setting has a default or is required."""

    @click.command()
    @declared_flags(Job)
    def launch(**flags: Any) -> None:
        assert flags == {"image": None, "mode": None, "mounts": None, "again": None, **given}

    done = CliRunner().invoke(launch, words.split())
    assert done.exit_code == 0, done.exception
