"""What all schedulers are told of a job: checked values, the settings file, and the size that was promised."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdcomp.errors import ConfigurationError
from hvdcomp.tools.launch.job import Job, read_settings
from hvdcomp.tools.launch.promise import check_size
from hvdcomp.tools.launch.rank import from_variable, to_variable

JOB: dict[str, Any] = {"name": "run", "command": ("python3", "train.py"), "ranks": 2}


@dataclass(frozen=True)
class Settings:
    job: Job
    partition: str
    nodes: int = 1
    hours: float | None = None
    exclusive: bool = False
    folder: Path = Path("out")
    mode: Literal["fast", "slow"] = "fast"
    modules: tuple[str, ...] = ()
    limits: Mapping[str, int] = field(default_factory=dict)


FILE = """
[job]
name = "run"
command = ["python3", "train.py", "two words"]
ranks = 4
environment = { A = "1", B = "2" }

[batch]
partition = "gpu"
nodes = 2
hours = 3
exclusive = true
folder = "a/b"
mode = "slow"
modules = ["x", "y"]
limits = { files = 9 }

[another]
anything = 1
"""


def read(tmp_path: Path, text: str = FILE, **flags: Any) -> Settings:
    file = tmp_path / "job.toml"
    file.write_text(text)
    return read_settings(file, "batch", Settings, flags)


def test_a_file_says_everything(tmp_path: Path) -> None:
    job = Job("run", ("python3", "train.py", "two words"), 4, {"A": "1", "B": "2"})
    expected = Settings(job, "gpu", 2, 3.0, True, Path("a/b"), "slow", ("x", "y"), {"files": 9})
    read_back = read(tmp_path)
    assert read_back == expected


def test_flags_say_everything() -> None:
    assert read_settings(None, "batch", Settings, {**JOB, "partition": "gpu"}) == Settings(Job(**JOB), "gpu")


def test_flags_win_and_mappings_are_joined(tmp_path: Path) -> None:
    settings = read(tmp_path, ranks=8, nodes=None, command=("x",), environment={"B": "3", "C": "4"}, exclusive=False)
    assert settings.job == Job("run", ("x",), 8, {"A": "1", "B": "3", "C": "4"})
    assert (settings.nodes, settings.exclusive) == (2, False)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("nodes =", "nods =", "no setting 'nods'; the settings are: exclusive, folder, hours, limits, mode, modules,"),
        ("ranks =", "rank =", "[job]: there is no setting 'rank'; the settings are: backend, command, environment,"),
        ("nodes = 2", 'nodes = "2"', "batch.nodes: '2' must be a whole number"),
        ("nodes = 2", "nodes = 2.0", "batch.nodes: 2.0 must be a whole number"),
        ("nodes = 2", "nodes = true", "batch.nodes: True must be a whole number"),
        ("hours = 3", 'hours = "3"', "batch.hours: '3' must be a number"),
        ("exclusive = true", "exclusive = 1", "batch.exclusive: 1 must be true or false"),
        ('partition = "gpu"', "partition = 1", "batch.partition: 1 must be text in quotes"),
        ('partition = "gpu"', "", "partition must be set: give the flag, or set partition in the table [batch] in"),
        ('mode = "slow"', 'mode = "sloww"', "batch.mode: 'sloww' is not one of fast, slow"),
        ('["x", "y"]', '"x y"', "batch.modules: 'x y' must be a list"),
        ('["x", "y"]', '["x", 1]', "batch.modules[1]: 1 must be text"),
        ("{ files = 9 }", "9", "batch.limits: 9 must be a table"),
        ("{ files = 9 }", '{ files = "9" }', "batch.limits.files: '9' must be a whole number"),
        (
            '["python3", "train.py", "two words"]',
            '"python3 train.py"',
            "job.command: 'python3 train.py' must be a list",
        ),
        ('B = "2"', "B = 2", "job.environment.B: 2 must be text"),
        ("ranks = 4", 'ranks = 4\nbackend = "ddp"', "job.backend: 'ddp' is not one of horovod, torch"),
        ("[another]", "[job]", "is not valid TOML"),
        ("[job]", "job = 1\n[jobs]", "job must be a table"),
        ('folder = "a/b"', "folder = 1", "batch.folder: 1 must be"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert old in FILE
    with pytest.raises(ConfigurationError) as raised:
        read(tmp_path, FILE.replace(old, new, 1))
    assert said in str(raised.value)


def test_unknown_flags_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="flags: there is no setting 'nods'"):
        read(tmp_path, nods=1)
    with pytest.raises(ConfigurationError, match="cannot be read: No such file"):
        read_settings(tmp_path / "none.toml", "batch", Settings, {})
    (tmp_path / "latin.toml").write_bytes(b'[job]\nname = "\xe9"\n')
    with pytest.raises(ConfigurationError, match="not UTF-8"):
        read_settings(tmp_path / "latin.toml", "batch", Settings, {})


def test_all_that_is_missing_is_said_at_once() -> None:
    with pytest.raises(ConfigurationError) as raised:
        read_settings(None, "batch", Settings, {"ranks": 2})
    assert str(raised.value) == (
        "name, command, partition must be set: give the flags, or set name, command in the table [job] and partition "
        "in the table [batch] in a settings file"
    )


def test_ranks_may_follow_from_what_the_scheduler_is_told() -> None:
    def twice(given: Mapping[str, Any]) -> int | None:
        return 2 * given["nodes"] if "nodes" in given else None

    flags = {"name": "run", "command": ("x",), "partition": "gpu"}
    assert read_settings(None, "batch", Settings, {**flags, "nodes": 3}, twice).job.ranks == 6
    assert read_settings(None, "batch", Settings, {**flags, "nodes": 3, "ranks": 1}, twice).job.ranks == 1
    with pytest.raises(ConfigurationError, match="ranks must be set"):
        read_settings(None, "batch", Settings, flags, twice)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"name": ""}, "name: ''"),
        ({"name": "a/b"}, "name: 'a/b' is not a valid name"),
        ({"name": "a%j"}, "letters, digits, underscores, hyphens and dots"),
        ({"name": "-a"}, "the first and the last character must not be a hyphen or a dot"),
        ({"name": ".a"}, "the first and the last character must not be a hyphen or a dot"),
        ({"name": "a-"}, "the first and the last character must not be a hyphen or a dot"),
        ({"name": "ä"}, "name: 'ä' is not a valid name"),
        ({"name": "a\n"}, "name: 'a\\n'"),
        ({"name": "a" * 41}, "at most 40"),
        ({"command": ()}, "command: the command is empty"),
        ({"command": ("", "a")}, "command: the command is empty"),
        ({"command": ("a", "b\0c")}, "NUL"),
        ({"command": ("a", "\ud800")}, "not valid Unicode"),
        ({"ranks": 0}, "ranks: 0"),
        ({"ranks": -3}, "ranks: -3"),
        ({"environment": {"A-B": "1"}}, "environment: 'A-B' is not the name of a variable"),
        ({"environment": {"1A": "1"}}, "no digit first"),
        ({"environment": {"A\n": "1"}}, "is not the name of a variable"),
        ({"environment": {"A": "\0"}}, "environment: A: '\\x00' has a NUL"),
        ({"environment": {"LOCAL_RANK": "0"}, "backend": "torch"}, "environment: hvdcomp sets LOCAL_RANK for each"),
    ],
)
def test_a_job_that_no_scheduler_can_take_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        Job(**{**JOB, **values})
    assert said in str(raised.value)


def test_only_a_rank_s_own_variables_are_refused_and_for_torch_alone() -> None:
    assert Job(**JOB, environment={"RANK": "0"}).environment == {"RANK": "0"}
    assert Job(**JOB, environment={"MASTER_PORT": "7"}, backend="torch").environment == {"MASTER_PORT": "7"}


def test_ranks_start_with_the_command_or_with_what_becomes_it() -> None:
    assert Job(**JOB).program == JOB["command"]
    assert Job(**JOB, backend="torch").program == ("python3", "-m", "hvdcomp.tools.launch.torch_rank", *JOB["command"])


def test_the_longest_name_is_taken() -> None:
    assert Job(**{**JOB, "name": "0" + "a-" * 19 + "9"}).name.endswith("9")


@pytest.mark.parametrize("name", ["my_run", "ResNet.50", "_", "run-1_b"])
def test_names_need_not_be_host_names(name: str) -> None:
    """Kubernetes alone makes host names of them."""
    assert Job(**{**JOB, "name": name}).name == name


@pytest.mark.parametrize(
    ("environment", "size", "promised"),
    [
        ({}, 1, None),
        ({"HVDCOMP_EXPECTED_SIZE": "4"}, 4, None),
        ({"HVDCOMP_EXPECTED_SIZE": "4"}, 1, "HVDCOMP_EXPECTED_SIZE=4, but the training found 1 rank:"),
        ({"HVDCOMP_EXPECTED_SIZE": "4"}, 2, "HVDCOMP_EXPECTED_SIZE=4, but the training found 2 ranks:"),
        ({"HVDCOMP_EXPECTED_SIZE": "4"}, 8, "HVDCOMP_EXPECTED_SIZE=4, but the training found 8 ranks:"),
        ({"HVDCOMP_EXPECTED_SIZE": "4", "OMPI_COMM_WORLD_SIZE": "8"}, 4, None),
        ({"HVDCOMP_EXPECTED_SIZE": "many"}, 4, "'many' is not a number of ranks"),
        ({"HVDCOMP_EXPECTED_SIZE": "0"}, 1, "'0' is not a number of ranks"),
        ({"HVDCOMP_EXPECTED_SIZE": ""}, 1, None),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, 1, "OMPI_COMM_WORLD_SIZE=4, but the training found 1 rank:"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, 2, None),
        ({"SLURM_STEP_NUM_TASKS": "4"}, 1, "SLURM_STEP_NUM_TASKS=4, but the training found 1 rank:"),
        ({"SLURM_NTASKS": "4"}, 1, None),
        ({"HOROVOD_SIZE": "1", "SLURM_STEP_NUM_TASKS": "4"}, 1, None),
        ({"WORLD_SIZE": "4"}, 1, "WORLD_SIZE=4, but the training found 1 rank:"),  # Horovod, started by torchrun
        ({"WORLD_SIZE": "4"}, 4, None),
        ({"WORLD_SIZE": "1", "SLURM_STEP_NUM_TASKS": "4"}, 1, None),  # four trainings of one rank each
        ({"HOROVOD_SIZE": "1", "WORLD_SIZE": "4"}, 1, None),
        ({"OMPI_COMM_WORLD_SIZE": "junk", "SLURM_STEP_NUM_TASKS": "2"}, 1, "SLURM_STEP_NUM_TASKS=2"),
    ],
)
def test_the_size_that_was_promised(environment: dict[str, str], size: int, promised: str | None) -> None:
    if promised is None:
        check_size(size, environment)
        return
    with pytest.raises(ConfigurationError) as raised:
        check_size(size, environment)
    assert promised in str(raised.value)


def test_the_size_is_promised_by_the_process_s_own_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVDCOMP_EXPECTED_SIZE", "3")
    with pytest.raises(ConfigurationError, match="found 2 ranks"):
        check_size(2)


def run_rank(**variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "HVDCOMP_EXPECTED_SIZE"}
    command = [sys.executable, "-m", "hvdcomp.tools.launch.rank"]
    return subprocess.run(command, env=kept | variables, capture_output=True, text=True, check=False, timeout=60)


def test_a_rank_becomes_its_program() -> None:
    program = "import os, sys; print(sys.argv[1:], 'HVDCOMP_COMMAND' in os.environ); sys.exit(7)"
    done = run_rank(HVDCOMP_COMMAND=to_variable([sys.executable, "-c", program, "a b", ":", "--mca", "$(x)\n"]))
    assert done.returncode == 7
    assert done.stdout == "['a b', ':', '--mca', '$(x)\\n'] False\n"


@pytest.mark.parametrize(
    ("variables", "status", "said"),
    [
        ({}, 125, "HVDCOMP_COMMAND='' is not a command"),
        ({"HVDCOMP_COMMAND": "python3 train.py"}, 125, "it must be a JSON list"),
        ({"HVDCOMP_COMMAND": "[]"}, 125, "it must be a JSON list"),
        ({"HVDCOMP_COMMAND": '["a", 1]'}, 125, "it must be a JSON list"),
        ({"HVDCOMP_COMMAND": '["no-such-program-here"]'}, 127, "no-such-program-here cannot be run: No such file"),
        ({"HVDCOMP_COMMAND": '["/"]'}, 126, "/ cannot be run"),
        (
            {"HVDCOMP_COMMAND": '["true"]', "HVDCOMP_EXPECTED_SIZE": "4", "OMPI_COMM_WORLD_SIZE": "2"},
            125,
            "mpirun started a different number of ranks",
        ),
    ],
)
def test_a_rank_that_cannot_start_says_why(variables: dict[str, str], status: int, said: str) -> None:
    done = run_rank(**variables)
    assert done.returncode == status
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@given(command=st.lists(st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0")), min_size=1))
def test_any_command_survives_its_variable(command: list[str]) -> None:
    assert from_variable(to_variable(command)) == command
