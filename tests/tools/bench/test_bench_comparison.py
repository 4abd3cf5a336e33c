"""`hvdcomp bench encode`: the command, which rows it compares, and what it writes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from hvdcomp.compressors import COMPRESSORS, EXAMPLES
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.tools.bench.encode.comparison import rows
from hvdcomp.tools.bench.encode.gradients import FRAMEWORKS
from hvdcomp.tools.bench.encode.measurement import Measurement, MeasurementError, Request, Spread, measure
from hvdcomp.tools.bench.encode.output import number
from hvdcomp.tools.bench.encode.peers import FP16, PEERS, POWERSGD
from hvdcomp.tools.cli import main


def made(request: Request, step_ms: float = 50.0, copy_ms: float = 10.0) -> Measurement:
    """A measurement that nobody made."""
    step, copy, ratio = (Spread(value, value, value) for value in (step_ms, copy_ms, step_ms / copy_ms))
    return Measurement(request, turns=5, step_ms=step, copy_ms=copy, ratio_to_copy=ratio, cpu_ms=step, bytes_sent=1000)


class Machine:
    """Measures in place of a real one: the copies' milliseconds by method and number of threads, one after the other.

    Attributes:
        asked: what was measured, in order.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **copies: list[float]) -> None:
        pytest.importorskip("torch")
        self.asked: list[Request] = []
        self._copies = copies
        monkeypatch.setattr("hvdcomp.tools.commands.bench_encode.measure", self.measure)

    def measure(self, request: Request) -> Measurement:
        self.asked.append(request)
        copies = self._copies.get(request.method)
        return made(request, copy_ms=copies.pop(0) if copies else 10.0)


def encode(*words: str) -> Result:
    return CliRunner().invoke(main, ["bench", "encode", *words])


# Which rows are compared.


def test_rows_are_held_against_the_hook_with_the_same_threads() -> None:
    found = rows(
        [
            made(Request("topk", "resnet20", threads=1), step_ms=3.0),
            made(Request("topk", "resnet20", "tensorflow", threads=2), step_ms=3.0),
            made(Request("topk", "resnet20", threads=4), step_ms=3.0),
            made(Request(POWERSGD, "resnet20", threads=1), step_ms=6.0),
            made(Request(POWERSGD, "resnet20", threads=2), step_ms=4.0),
        ]
    )
    assert [row.ratio_to_peer for row in found] == [0.5, 0.75, None, 1.0, 1.0]


@pytest.mark.parametrize(
    ("copies", "apart"),
    [
        ([10.0, 11.4, 10.5], []),
        ([10.0, 11.6, 10.5], [1]),
        ([10.0, 11.6, 12.0, 4.0], [0, 3]),  # the fastest need not be right
        ([10.0], []),
    ],
)
def test_rows_apart_from_most_are_unsteady(copies: list[float], apart: list[int]) -> None:
    found = rows([made(Request("none", "resnet20"), copy_ms=copy) for copy in copies])
    assert [place for place, row in enumerate(found) if not row.steady] == apart


def test_rows_whose_steps_were_interrupted_are_unsteady_and_compared_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = {  # milliseconds: quartiles and median, and the processor time
        "none": (Spread(50.0, 60.0, 64.0), 60.0),
        "fp16": (Spread(50.0, 60.0, 66.0), 60.0),
        "natural": (Spread(60.0, 60.0, 60.0), 53.0),
        "signsgd": (Spread(60.0, 60.0, 60.0), 51.0),
    }

    def measured(request: Request) -> Measurement:
        step, processor = steps[request.method]
        return replace(made(request), step_ms=step, cpu_ms=Spread(processor, processor, processor))

    monkeypatch.setattr("hvdcomp.tools.commands.bench_encode.measure", measured)
    methods = [word for spec in steps for word in ("--method", spec)]
    result = encode("--framework", "numpy", "--no-peers", *methods, "--output", str(tmp_path))
    assert result.exit_code == 0, result.output
    kept = json.loads((tmp_path / "encode.json").read_text())
    assert [one["steady"] for one in kept["measurements"]] == [True, False, True, False]
    assert "| fp16 (unsteady) |" in (tmp_path / "encode.md").read_text()


def test_copies_of_other_frameworks_and_threads_are_other_work() -> None:
    requests = [Request("none", "resnet20", framework, threads=count) for framework in FRAMEWORKS for count in (1, 2)]
    assert all(row.steady for row in rows([made(one, copy_ms=2.0**n) for n, one in enumerate(requests)]))


@pytest.mark.parametrize(("slower", "published"), [(11.4, True), (11.6, False)])
def test_methods_are_not_compared_where_the_machine_was_not_equally_fast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slower: float, published: bool
) -> None:
    """The copy that takes turns with each method may differ by 15 percent between them."""
    copies = {"none": [10.0] * 3, "fp16": [slower] * 3, "signsgd": [10.5] * 3}
    Machine(monkeypatch, **copies)
    words = [word for spec in copies for word in ("--method", spec)] + ["--no-peers", "--retries", "0"]
    file = tmp_path / "rows.json"
    result = encode(*words, "--output", str(tmp_path / "out"), "--json", str(file))
    assert result.exit_code == (0 if published else 1), result.output
    assert (tmp_path / "out" / "encode.json").exists() == published
    kept = json.loads(file.read_text())
    assert (kept["refused"] is None) == published
    assert [one["steady"] for one in kept["measurements"]] == [True, published, True]
    assert ("fp16 (unsteady)" in result.output) == (not published)
    if not published:
        said = " ".join(result.stderr.split())
        assert (
            "10 ms while none was measured, and 11.6 ms while fp16 was measured, which is 16% more; at most 15% more"
            in said
        )
        assert "unusually fast or slow for these methods: fp16. " in said
        assert said in f"Error: {kept['refused']}. Nothing was written to {tmp_path / 'out'}."
    shown = encode(*words)
    assert shown.exit_code == 0
    assert ("cannot be compared" in shown.stderr) == (not published)
    assert encode(*words, "--json", str(file)).exit_code == (0 if published else 1)


@pytest.mark.parametrize(("retries", "again"), [("0", 0), ("1", 1), ("3", 2)])
def test_unsteady_rows_are_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, retries: str, again: int
) -> None:
    machine = Machine(monkeypatch, fp16=[20.0, 15.0, 10.0])
    methods = [word for spec in ("none", "fp16", "signsgd") for word in ("--method", spec)]
    file = tmp_path / "rows.json"
    result = encode(*methods, "--no-peers", "--retries", retries, "--json", str(file))
    assert [one.method for one in machine.asked] == ["none", "fp16", "signsgd", *["fp16"] * again]
    kept = json.loads(file.read_text())["measurements"]
    assert [one["copy_ms"] for one in kept] == [10.0, [20.0, 15.0, 10.0][again], 10.0]
    assert result.exit_code == (0 if again == 2 else 1)


# The command.


def test_without_a_choice_every_form_of_every_compressor_and_the_peers_are_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(monkeypatch)
    assert encode("--threads", "1,2").exit_code == 0
    assert [one.method for one in machine.asked if one.threads == 1] == [*EXAMPLES, *PEERS]
    assert [one.threads for one in machine.asked] == [1, 2] * (len(EXAMPLES) + len(PEERS))
    assert {parse_compressor(spec).name for spec in EXAMPLES} == set(COMPRESSORS)


def test_peers_are_of_pytorch_whatever_the_framework(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    words = ("--framework", "numpy", "--method", "none")
    assert encode(*words).exit_code == 0
    assert [(one.method, one.framework) for one in machine.asked] == [
        ("none", "numpy"), (POWERSGD, "torch"), (FP16, "torch")
    ]  # fmt: skip
    machine.asked.clear()
    assert encode(*words, "--no-peers").exit_code == 0
    assert [one.method for one in machine.asked] == ["none"]


@pytest.mark.thorough
def test_the_command_writes_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    steady = Spread(9.0, 9.0, 9.0)  # on a busy machine two copies differ by more than what may be published
    monkeypatch.setattr(
        "hvdcomp.tools.commands.bench_encode.measure", lambda request: replace(measure(request), copy_ms=steady)
    )
    words = ("--model", "resnet20", "--threads", "1", "--repeats", "1", "--seconds", "0", "--no-peers")
    result = encode(*words, "--output", str(tmp_path), "--method", "topk:ratio=0.01", "--method", "none")
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "encode.json").read_text())
    assert written["facts"]["cpu"]
    assert written["facts"]["versions"]["numpy"] == np.__version__
    assert written["options"]["model"] == "resnet20"
    measured = written["measurements"]
    assert [(one["method"], one["threads"]) for one in measured] == [("topk:ratio=0.01", 1), ("none", 1)]
    for one in measured:
        assert one["step_ms"] > 0
        assert one["ratio_to_copy"] > 0
        assert len(one["step_ms_quartiles"]) == len(one["ratio_to_copy_quartiles"]) == 2
        assert one["ratio_to_peer"] is None
    assert measured[0]["compression_factor"] > 40
    steady = measured[0]["steady"]  # which a busy machine may not be
    assert f"| topk:ratio=0.01{'' if steady else ' (unsteady)'} |" in (tmp_path / "encode.md").read_text()
    assert (tmp_path / "encode.png").read_bytes().startswith(b"\x89PNG")


def test_an_earlier_comparison_stands_beside_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step_ms = 50.0
    monkeypatch.setattr("hvdcomp.tools.commands.bench_encode.measure", lambda request: made(request, step_ms))
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    words = ("--framework", "numpy", "--no-peers", "--method", "none")
    assert "times as fast" not in encode(*words, "--threads", "1", "--json", str(old)).output
    step_ms = 20.0
    result = encode(*words, "--threads", "1,2", "--json", str(new), "--before", str(old), "--output", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert [one["before_ms"] for one in json.loads(new.read_text())["measurements"]] == [50.0, None]
    heading, _, *lines = (tmp_path / "encode.md").read_text().splitlines()[2:]
    assert heading.endswith("| before, ms | times as fast |")
    assert [line.split(" | ")[-2:] for line in lines] == [["50", "2.5 |"], ["-", "- |"]]
    assert "times as fast" in result.output


@pytest.mark.parametrize("text", ["{", "[]", '{"measurements": [{"method": "none"}]}'])
def test_what_is_no_earlier_comparison_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    machine = Machine(monkeypatch)
    (tmp_path / "old.json").write_text(text)
    result = encode("--before", str(tmp_path / "old.json"))
    assert result.exit_code == 2
    assert "is not a file that --json wrote: " in " ".join(result.stderr.split())
    assert not machine.asked


def test_rows_that_were_measured_before_one_failed_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(request: Request) -> Measurement:
        if request.method == "fp16":
            raise MeasurementError("fp16 is broken")
        return made(request)

    monkeypatch.setattr("hvdcomp.tools.commands.bench_encode.measure", measured)
    file = tmp_path / "rows.json"
    words = ("--framework", "numpy", "--no-peers", "--method", "none", "--method", "fp16", "--json", str(file))
    result = encode(*words)
    assert result.exit_code == 1
    assert "fp16 is broken" in result.stderr
    kept = json.loads(file.read_text())
    assert [one["method"] for one in kept["measurements"]] == ["none"]
    assert kept["refused"] == "not all methods have been measured"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--method", "topq"], "unknown compressor 'topq'"),
        (["--threads", "1,none"], "'1,none' is not a list of positive integers; separate"),
        (["--threads", "0"], "'0' is not a list of positive integers"),
        (["--framework", "numpy", "--device", "cuda"], "--device cuda does not work with --framework numpy"),
        (["--json", "/proc/nowhere/rows.json"], "/proc/nowhere/rows.json cannot be written"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is(
    monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    machine = Machine(monkeypatch)
    result = encode(*words)
    assert result.exit_code in (1, 2)
    assert said in " ".join(result.stderr.split())
    assert not machine.asked


def test_cuda_is_refused_where_pytorch_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = encode("--device", "cuda")
    assert result.exit_code == 2
    assert "needs a GPU, and torch.cuda.is_available() is False" in result.stderr
    assert not machine.asked


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (1234.5, "1234"), (10.0, "10"), (2.54, "2.5"), (0.123, "0.12"), (0.0123, "0.012")]
)
def test_numbers_have_two_digits(value: Any, text: str) -> None:
    assert number(value) == text
