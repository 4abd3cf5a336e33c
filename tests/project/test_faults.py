"""`make faults` in its short form; and that what is not as documented is reported as failed."""

from __future__ import annotations

import csv
import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from hvdcomp.files import csv_of
from tests.faults import __main__ as command
from tests.faults import report
from tests.faults.table import Fault, Row, all_faults, run_row
from tests.faults.victim import FAULT, WEIGHTS
from tests.faults.world import NotHere, World


class OfShell(World):
    """A world whose ranks are a line of the shell. Its fault happens at once."""

    def command(self, arguments: Sequence[str]) -> list[str]:
        return ["sh", "-c", *arguments]


def fault_of(
    script: str,
    within: float = 60,
    happens: bool = True,
    waits: bool = False,
    look: Callable[[World], None] | None = None,
) -> Fault:
    def run(world: World) -> str:
        if happens:
            (world.folder / FAULT).write_text(json.dumps({"at": time.monotonic()}))
        ended = world.run([script], faulty=True, waits=waits)
        if look is not None:
            look(world)
        return f"ended with {ended.code}"

    return Fault("a fault", "a group", "It ends.", within, run, ("ddp",), world=OfShell)


def write_weights(world: World, *digests: str) -> None:
    for rank, digest in enumerate(digests):
        (world.folder / WEIGHTS.format(rank)).write_text(f"1 {64 * 'a'}\n2 {64 * digest}\n3 {digest}")
    world.weights()


@pytest.mark.parametrize(
    ("fault", "happened"),
    [
        (fault_of("exit 3"), None),
        (fault_of("exec sleep 1000", within=0.5, waits=True), None),
        (fault_of("true", look=lambda world: write_weights(world, "b", "b")), None),
        (fault_of("true", happens=False), "the fault did not happen"),
        (fault_of("sleep 1000", within=0.5), "the ranks still ran"),
        (fault_of("setsid sleep 1000 & exit 3", within=2), "processes were left"),
        (fault_of("exit 3", waits=True), "expected to wait"),
        (fault_of("true", look=lambda world: write_weights(world, "b", "c")), "the weights differ after step 2"),
    ],
)
def test_what_is_not_as_documented_is_reported(fault: Fault, happened: str | None, tmp_path: Path) -> None:
    """No process is left, whatever was."""
    worlds: list[World] = []

    def make(transport: str, folder: Path, within: float) -> World:
        worlds.append(OfShell(transport, folder, within))
        return worlds[0]

    row = run_row(dataclasses.replace(fault, world=make), "ddp", tmp_path / "row")
    assert row.passed == (happened is None), row
    assert (happened or "ended with") in row.happened
    assert worlds[0].left() == {}


def test_rows_that_are_run_anew_take_the_place_of_old_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = [fault_of("true"), Fault("another", "a group", "It ends.", 1, lambda world: "well", ("gloo", "mpi"))]
    monkeypatch.setattr(command, "all_faults", lambda: faults)
    rest = ("It ends.", "badly | so", None, 1, False)
    old = [Row("another", "a group", over, *rest) for over in ("mpi", "gone", "gloo")]
    report.write(tmp_path, "make faults", old)
    done = CliRunner().invoke(command.main, ["--row", "another", "--transport", "gloo", "--output", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert [(row.transport, row.happened) for row in report.read(tmp_path)] == [("gloo", "well"), ("mpi", "badly | so")]
    page = (tmp_path / "faults.md").read_text()
    assert "1 of 2 rows are as documented" in page
    assert "- **FAILED**: another, over mpi: badly | so" in page
    assert "| another (gloo, mpi) | It ends. | - |" in page
    assert "[faults.csv](faults.csv)" in page
    with (tmp_path / "faults.csv").open(newline="") as file:
        rows = [(row["fault"], row["transport"], row["happened"], row["passed"]) for row in csv.DictReader(file)]
    assert rows == [("another", "gloo", "well", "True"), ("another", "mpi", "badly | so", "False")]
    resumed = CliRunner().invoke(command.main, ["--resume", "--row", "another", "--output", str(tmp_path)])
    assert "[1/1] another, over mpi" in resumed.output
    assert [(row.transport, row.happened) for row in report.read(tmp_path)] == [("gloo", "well"), ("mpi", "well")]
    failed = CliRunner().invoke(command.main, ["--row", "none", "--output", str(tmp_path)])
    assert failed.exit_code == 2


def test_faults_with_the_same_documented_outcome_share_a_line(tmp_path: Path) -> None:
    rows = [
        Row(fault, group, transport, documented, "well", seconds, within, True)
        for fault, group, transport, documented, seconds, within in [
            ("a", "files", "gloo", "It ends.", 1.0, 60),
            ("a", "files", "ddp", "It ends.", None, 60),
            ("b | b", "files", "mpi", "It ends.", 2.5, 20),
            ("c", "clocks", "gloo", "It ends.", None, 60),
            *((f"d{number}", "clocks", "mpi", "It waits.", float(number), 60) for number in range(report.NAMED + 1)),
        ]
    ]
    report.write(tmp_path, "make faults", rows)
    page = (tmp_path / "faults.md").read_text()
    lines = page.splitlines()
    assert lines[lines.index("|---|---|--:|") : lines.index("## How this page was made") - 1] == [
        "|---|---|--:|",
        "| a (gloo, ddp); b \\| b (mpi) | It ends. | 2.5 of 20 |",
        "| c (gloo) | It ends. | - |",
        "| d0 (mpi); 3 more | It waits. | 3.0 of 60 |",
    ]
    assert "8 of 8 rows are as documented" in page
    assert "FAILED" not in page


def test_the_page_in_docs_is_that_of_the_rows_beside_it_in_the_words_of_the_table() -> None:
    folder = Path(__file__).parents[2] / "docs" / "faults"
    document, rows = json.loads((folder / "faults.json").read_text()), report.read(folder)
    documented = {(fault.name, transport): fault.documented for fault in all_faults() for transport in fault.transports}
    assert [row for row in rows if row.documented != documented[row.fault, row.transport]] == []
    assert (folder / "faults.md").read_text() == report.as_markdown(document["command"], document, rows)
    assert (folder / "faults.csv").read_bytes() == csv_of([row.as_json() for row in rows])


@pytest.mark.alone
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("fault", "transport"),
    [
        pytest.param(fault, over, marks=[pytest.mark.cluster] * (fault.group == "network"), id=f"{fault.name}, {over}")
        for fault, over in command.chosen_rows(all_faults(), short=True)
    ],
)
def test_the_short_form_of_the_table(fault: Fault, transport: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    if transport != "ddp":
        pytest.importorskip("horovod.torch", reason="Horovod is not built here: run `hvdcomp build-horovod`")
    try:
        row = run_row(fault, transport, tmp_path / "row")
    except NotHere as reason:
        pytest.skip(str(reason))
    assert row.passed, row.happened
