"""The beginning of README: its commands, run as they stand there, and the table of methods, which says what was
measured."""

from __future__ import annotations

import csv
import itertools
import os
import re
import subprocess
from pathlib import Path

import pytest

from benchmarks.best_rates import which_method
from tests.docs.test_docs import ROOT
from tests.package_index import fresh_environment, pip_with_index
from tests.readme import README

TEXT = README.read_text(encoding="utf-8")
TABLE = TEXT.partition("<!-- which method -->")[2].partition("\n\n")[0].strip()
FIRST_STEPS = TEXT.partition("<!-- first steps -->")[2].partition("<!-- end of first steps -->")[0]
(COMMANDS, *_) = re.findall(r"^(?: {4}.*\n)+", FIRST_STEPS, re.MULTILINE)
WITHOUT_HOROVOD = ["pip install -e '.[torch,train]'", "hvdcomp demo"]
# Which trainings of docs/convergence.csv a row of the table is about, if it was measured at one learning rate.
TRAININGS = {
    "SGD with momentum": ("mnist1d", "lstm"),
    "SGD, if `terngrad` sends too much": ("mnist1d", "lstm"),
    "Adam or AdamW, as for most transformers": ("gpt",),
    "Adam or AdamW, to be safe": ("gpt",),
    "Adam or AdamW, if `int4` sends too much": ("gpt-frozen",),
    "Adam or AdamW, if `efsignsgd` sends too much": ("gpt-local",),
}


def test_the_first_commands_clone_show_and_test() -> None:
    commands = [line.partition("#")[0].strip() for line in COMMANDS.splitlines()]
    assert commands == ["git clone ADDRESS hvdcomp", "cd hvdcomp", "make demo", "make test"]
    targets = re.findall(r"^([a-z-]+): setup .*## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert {"demo", "test"} <= set(targets), "they set everything up"
    for command in WITHOUT_HOROVOD:
        assert f"`{command}`" in FIRST_STEPS


@pytest.mark.parametrize("page", [README, *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.name)
def test_no_page_installs_hvdcomp_from_an_index(page: Path) -> None:
    """No index has it. The messages of a program may name an extra so: they come from an installed hvdcomp."""
    assert not re.search(r"pip install[^`\n]* '?hvdcomp\b", page.read_text(encoding="utf-8"))


def test_the_table_of_methods_is_made_from_the_trainings_at_best_rates() -> None:
    """If not: `python -m benchmarks.best_rates.which_method`."""
    assert which_method.table_of(which_method.RUNS).strip() == TABLE


SPEEDS = TEXT.partition("## How much faster")[2].partition("\n## ")[0]
MEASURED_MODELS = {"mlp": "mlp (fully connected)", "resnet18": "ResNet-18", "resnet20": "ResNet-20"}
RATES = {"100mbit": "100 Mb/s", "1gbit": "1 Gb/s"}


def test_the_speedups_are_those_of_the_measured_steps() -> None:
    with (ROOT / "docs" / "steps-measured.csv").open(encoding="utf-8", newline="") as file:
        ms = {(row["model"], row["rate"], row["method"]): float(row["measured_ms"]) for row in csv.DictReader(file)}
    for (model, name), (rate, words) in itertools.product(MEASURED_MODELS.items(), RATES.items()):
        speedups = [
            f"{ms[model, rate, base] / ms[model, rate, method]:.1f}"
            for method in ("eden:bits=1,exchange=auto", "int4:exchange=auto")
            for base in ("none", "hvd.fp16")
        ]
        assert f"| {name} | {words} | {' | '.join(speedups)} |" in SPEEDS


def test_rows_at_one_learning_rate_pair_bytes_and_quality_of_the_same_trainings() -> None:
    with (ROOT / "docs" / "convergence.csv").open(encoding="utf-8", newline="") as file:
        measured = {(row["workload"], row["method"]): row for row in csv.DictReader(file)}
    rows = [row for rows in which_method.AT_ONE_RATE.values() for row in rows]
    assert {situation for situation, *_ in rows} == TRAININGS.keys()
    for situation, method, factor, quality in rows:
        (spec,) = re.findall(r"`([a-z].*?)`", method)
        trainings = [measured[workload, spec] for workload in TRAININGS[situation]]
        factors = sorted(float(one["factor"]) for one in trainings)
        said = [f"{number:.0f}" if number > 5 else f"{number:.1f}" for number in factors]
        assert factor == " to ".join(dict.fromkeys(said)), spec
        lost = [f"{abs(float(one['lost'])):.{digits}f}" for one in trainings for digits in (0, 1)]
        for number in re.findall(r"([\d.]+) (?:%|points)", quality):
            assert number in lost, (spec, quality)
        if quality.startswith("nothing"):
            best = min(trainings, key=lambda one: float(one["lost"]) - float(one["lost_half"]))
            assert float(best["lost"]) - float(best["lost_half"]) <= 0, spec


@pytest.mark.thorough
@pytest.mark.alone
@pytest.mark.network
@pytest.mark.timeout(7200)
def test_its_first_commands_run_in_an_empty_folder(tmp_path: Path) -> None:
    """As they stand there, on the commit that is checked out. Of `make test` the part `lint` is enough: the others are
    what continuous integration runs. Built wheels of Horovod come from the cache, if they are there."""
    if not (ROOT / ".git").exists():
        pytest.skip("this is no git checkout, of which there could be a clone")
    pip_with_index(fresh_environment(tmp_path / "index"), tmp_path / "reached")
    done = _run(COMMANDS.replace("ADDRESS", str(ROOT)), tmp_path, PARTS="lint")
    assert (tmp_path / "hvdcomp" / "runs" / "demo" / "report.html").is_file(), done
    assert re.search(r"lint +passed", done), done


@pytest.mark.thorough
@pytest.mark.alone
@pytest.mark.network
@pytest.mark.timeout(1800)
def test_without_horovod_a_clone_is_all_that_a_first_result_takes(tmp_path: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("this is no git checkout, of which there could be a clone")
    python = fresh_environment(tmp_path / "venv")
    pip_with_index(python, tmp_path / "reached")
    clone = [f"git clone {ROOT} hvdcomp", "cd hvdcomp"]
    done = _run(
        "\n".join(clone + WITHOUT_HOROVOD), tmp_path,
        PATH=f"{python.parent}:{os.environ['PATH']}", PIP_CONSTRAINT=str(ROOT / "constraints.txt"),
    )  # fmt: skip
    assert (tmp_path / "hvdcomp" / "runs" / "demo" / "report.html").is_file(), done


def _run(commands: str, folder: Path, **variables: str) -> str:
    """What commands print, in an environment that knows nothing of this checkout."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MAKEFLAGS", "MAKELEVEL")
    }
    done = subprocess.run(
        ["bash", "-e"], input=commands, cwd=folder, env={**environment, **variables}, capture_output=True, text=True
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout
