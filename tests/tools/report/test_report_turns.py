"""`hvdcomp report --turns`: steps that were measured in turns, and what is predicted for slower networks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

from hvdcomp.compressors.protocol import TensorInfo
from hvdcomp.perfmodel import Calibration, CollectiveCost, Compute, EncodeTime, ModelFacts, Network, as_json
from hvdcomp.tools.report.curves import draw_section
from hvdcomp.tools.report.page import as_text
from hvdcomp.tools.report.runs import find_runs
from hvdcomp.tools.report.table import cells, make_sections
from hvdcomp.tools.report.turns import load_turns
from tests.tools.report.test_report import report, write_run

MS = {"compute": 60.0, "none": 120.0, "hvd.fp16": 80.0, "topk:ratio=0.01": 40.0}


def write_turns(file: Path, model: str = "mlp@digits", backward_s: float = 0.05, **changes: Any) -> Path:
    """Steps of write_run's model: 4 MB, between four ranks of one machine, repeatable within 10 percent."""
    encode = {"topk:ratio=0.01": EncodeTime(0.02)}
    compute = Compute(backward_s, 0.01, encode=encode, ready=((1.0, 1.0),), batch_size=32)
    facts = ModelFacts((TensorInfo("w", (1000, 1000)),), compute, 1e9)
    cost = CollectiveCost("ring", 0.0, 1e9, transfer=((1e4, 1.0), (1e6, 2.0)))  # how the machine itself is slow
    calibration = Calibration("made up", Network(cost, cost), {model: facts}, {"ranks": "4"}, noise=0.1)
    steps = {method: {"median_ms": ms} for method, ms in MS.items()}
    content = {"calibration": as_json(calibration), "steps": steps, "alone": "compute", "auto": "auto", **changes}
    file.write_text(json.dumps(content))
    return file


def write_runs(folder: Path) -> None:
    """Trainings whose own times say the opposite of those in turns."""
    common = {"framework": "torch", "backward_passes_per_step": 1, "policy": None}
    write_run(folder / "dense", ms=10.0, ranks_per_host=4, options={"batch_size": 32, **common})
    write_run(
        folder / "topk", "topk:ratio=0.01", factor=50, ms=30.0, ranks_per_host=4, options={"batch_size": 32, **common}
    )
    tensorflow = {**common, "batch_size": 32, "framework": "tensorflow"}
    write_run(folder / "tensorflow", "topk:ratio=0.01", ms=25.0, ranks_per_host=4, options=tensorflow)


def test_steps_in_turns_count_and_predictions_stand_beside_them(tmp_path: Path) -> None:
    write_runs(tmp_path / "runs")
    options = {"batch_size": 32, "simulate_ranks": 4, "link": None}
    write_run(tmp_path / "runs" / "simulated", "topk:ratio=0.01", backend="simulated", options=options)
    turns = load_turns(write_turns(tmp_path / "turns.json"))
    (section,) = make_sections(find_runs([tmp_path / "runs"])[0], turns=turns)
    rows = {row["run"]: row for row in section.rows}
    names = ("dense", "topk", "tensorflow", "simulated")
    assert [rows[name]["turns_ms"] for name in names] == [120.0, 40.0, None, None]
    assert rows["topk"]["ms_per_step"] == 30.0
    assert rows["topk"]["speed_vs_baseline"] == 3.0
    assert rows["tensorflow"]["speed_vs_baseline"] is None
    # A ring of four: 1.5 times 4 MB over each link, and thrice what is gathered.
    assert rows["dense"]["predicted_ms_1gbit"] == pytest.approx(60 + 48)
    assert rows["dense"]["predicted_ms_100mbit"] == pytest.approx(60 + 480)
    gathered = 10_000 * (4 + 2)  # values, and indices of two bytes
    assert rows["topk"]["predicted_ms_100mbit"] == pytest.approx(60 + 20 + 3 * gathered / 1.25e4, rel=0.01)
    shown = {
        name: dict(zip(section.headings, cells(row, True, section.on_links), strict=True)) for name, row in rows.items()
    }
    (predicted,) = [heading for heading in section.headings if heading.startswith("Predicted")]
    assert [shown[name]["ms per step"] for name in ("dense", "topk", "tensorflow")] == ["120", "40.0", "25.0*"]
    assert [shown[name][predicted] for name in ("dense", "tensorflow")] == ["540 / 108", "-"]


def test_compressors_that_send_all_at_the_end_are_left_out(tmp_path: Path) -> None:
    late = {"method": "topk:ratio=0.01", "overlap_bytes": 0, "median_ms": 50.0}
    steps = {**{method: {"median_ms": ms} for method, ms in MS.items()}, "topk:ratio=0.01, at the end": late}
    found = load_turns(write_turns(tmp_path / "turns.json", steps=steps))
    assert found == load_turns(write_turns(tmp_path / "turns.json"))


def test_table_and_page_say_what_the_times_are_of(tmp_path: Path) -> None:
    write_runs(tmp_path / "runs")
    alone = report(tmp_path / "runs", "--output", tmp_path / "alone")
    assert "Predicted" not in alone.output
    turns = write_turns(tmp_path / "turns.json")
    result = report(tmp_path / "runs", "--turns", turns, "--output", tmp_path / "out")
    assert result.exit_code == 0, result.output
    page = (tmp_path / "out" / "report.html").read_text()
    for text in (" ".join(result.output.split()), " ".join(page.split())):
        assert "The 4 ranks of a run share one machine" in text
        assert "The step times of 4 ranks with a link of 100 Mb/s or 1 Gb/s" in text
        assert "Predictions may be wrong by 10%; ignore smaller differences" in text
        assert "On a link of 100 Mb/s, a step of topk:ratio=0.01 (framework=torch) is predicted to take" in text
        assert "times faster than dense training." in text
        assert "without the slow link, topk:ratio=0.01 (framework=torch) is faster than dense training (3.00x)." in text
        assert "540 / 108" in text
        assert "25.0*" in text
    heading = next(line for line in result.output.splitlines() if "Predicted" in line)
    assert heading.strip() == "Predicted", "its words stand below each other, or the table is too wide"
    assert "The 4 ranks of a run share one machine" in " ".join(alone.output.split())
    (tmp_path / "apart").mkdir()
    write_run(tmp_path / "apart" / "dense", ranks_per_host=2)
    assert "share one machine" not in report(tmp_path / "apart", "--output", tmp_path / "out2").output


def test_steps_that_were_measured_on_a_link_take_the_place_of_its_predictions(tmp_path: Path) -> None:
    write_runs(tmp_path / "runs")
    here = write_turns(tmp_path / "turns.json")
    steps = {method: {"median_ms": ms} for method, ms in {**MS, "none": 500.0, "topk:ratio=0.01": 50.0}.items()}
    there = write_turns(tmp_path / "slow.json", rate="100mbit", steps=steps)
    result = report(tmp_path / "runs", "--turns", there, "--turns", here, "--output", tmp_path / "out")
    assert result.exit_code == 0, result.output
    page = (tmp_path / "out" / "report.html").read_text().replace("\u00a0", " ")
    for text in (" ".join(result.output.split()), " ".join(page.split())):
        assert "On a link of 100 Mb/s, a step of topk:ratio=0.01 (framework=torch) took 50 ms instead of 500" in text
        assert "without the slow link, topk:ratio=0.01 (framework=torch) is faster than dense training (3.00x)." in text
        assert "Measured at 100 Mb/s: the same steps of the same ranks, each rank on an emulated host" in text
        assert "The step times of 4 ranks with a link of 1 Gb/s between them" in text
    for heading, dense, topk in (("Measured ms at 100 Mb/s", "500", "50.0"), ("Predicted ms at 1 Gb/s", "108", "81.4")):
        assert heading in page
        assert f">{dense}<" in page
        assert f">{topk}<" in page
    assert "here, with all methods in turn, and measured for links of 100 Mb/s, and predicted for links of" in page
    rows = {row["run"]: row for row in json.loads((tmp_path / "out" / "report.json").read_text())["rows"]}
    assert [rows[name]["measured_ms_100mbit"] for name in ("dense", "topk", "tensorflow")] == [500.0, 50.0, None]
    assert rows["dense"]["predicted_ms_100mbit"] == pytest.approx(540)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "Give one file without --rate, and at most one file for each --rate"),
        ({"rate": "100mbit", "model": "cnn@digits"}, "must have the same model, data"),
        ({"rate": "10mbit"}, "has links of '10mbit'; a report can only show 100mbit or 1gbit"),
    ],
)
def test_files_that_do_not_belong_together_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write_runs(tmp_path / "runs")
    files = write_turns(tmp_path / "turns.json"), write_turns(tmp_path / "other.json", **changes)
    result = report(tmp_path / "runs", *(word for file in files for word in ("--turns", file)))
    assert result.exit_code == 1
    assert message in " ".join(result.output.split())


def test_predictions_from_noise_are_withheld(tmp_path: Path) -> None:
    """The allreduce may be wrong by 21 ms: little in a dense step of 540 ms, much in shorter ones."""
    write_runs(tmp_path / "runs")
    noisy = {
        "network, allreduce of 64 bytes": {"seconds": 0.001, "spread": 21.3},
        "network, allgather of 4 KiB": {"seconds": 0.001, "spread": 0.2},
    }
    noise = load_turns(write_turns(tmp_path / "turns.json", noisy=noisy))
    assert list(noise.predicted_ms["none"]) == ["100mbit"]
    assert noise.predicted_ms["topk:ratio=0.01"] == {}
    assert noise.noise == 0.1
    assert noise.doubt == pytest.approx(0.0213 / (0.08 + 3 * 6e4 / 1.25e8), rel=0.01)
    (section,) = make_sections(find_runs([tmp_path / "runs"])[0], turns=noise)
    dense, _, topk = (cells(row, section.in_turns, section.on_links) for row in section.rows)
    place = next(place for place, heading in enumerate(section.headings) if heading.startswith("Predicted"))
    assert (dense[place], topk[place]) == ("540 / -", "- / -")
    note = section.notes()[-1]
    assert "2 of its measurements differed by more than 15%" in note
    assert "The most important is network, allreduce of 64 bytes, which differed by 2130%." in note
    assert "Predictions that may be wrong by more than 15% are left out" in note
    assert "time" in [name for name, _, _ in draw_section(section)]


def test_without_a_prediction_that_can_be_trusted_there_is_no_column(tmp_path: Path) -> None:
    write_runs(tmp_path / "runs")
    noisy = {"cnn@digits, passes": {"seconds": 1.0, "spread": 2.0}}
    turns = write_turns(tmp_path / "turns.json", noisy=noisy)
    result = report(tmp_path / "runs", "--turns", turns, "--output", tmp_path / "out")
    assert result.exit_code == 0, result.output
    page = (tmp_path / "out" / "report.html").read_text()
    for text in (" ".join(result.output.split()), " ".join(page.split())):
        assert "Predicted" not in text
        assert "There is no prediction for a link of 100 Mb/s, because this machine was too busy" in text
        assert "There are no predictions for links of 100 Mb/s or 1 Gb/s" in text
        assert "The most important is cnn@digits, passes, which differed by 200%." in text
        assert "ignore smaller differences" not in text
    rows = json.loads((tmp_path / "out" / "report.json").read_text())["rows"]
    assert {row["predicted_ms_1gbit"] for row in rows} == {None}
    assert [row["turns_ms"] for row in rows] == [120.0, None, 40.0]


def test_calibrations_that_were_repeated_are_compared_by_what_they_predict(tmp_path: Path) -> None:
    """What is noisy in each does not matter where they predict the same; where they do not, nothing is predicted."""
    files = [write_turns(tmp_path / f"{number}.json", backward_s=s) for number, s in enumerate((0.05, 0.06, 0.12))]
    repeated = [json.loads(file.read_bytes())["calibration"] for file in files]
    noisy = {"mlp@digits, passes": {"seconds": 1.0, "spread": 2.0}}
    found = load_turns(write_turns(tmp_path / "turns.json", noisy=noisy, repeated=repeated))
    assert found.calibrations == 3
    assert found.predicted_ms["none"] == {"100mbit": pytest.approx(70 + 480)}
    assert found.predicted_ms["topk:ratio=0.01"] == {}
    assert found.noise == pytest.approx(70 / 550)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "mlp"}, "measure it as mlp@digits"),
        ({"model": "cnn@digits"}, "no run matches the steps that were measured in turn"),
        ({"steps": {}}, "no run matches the steps that were measured in turn"),
        ({"calibration": {}}, "does not contain steps measured in turn"),
        ({"noisy": {"passes": {"seconds": 1.0}}}, "does not contain steps measured in turn"),
        ({"noisy": {"passes": {"seconds": 1.0, "spread": float("nan")}}}, "does not contain steps measured in turn"),
        ({"steps": {"none": {"median_ms": None}}}, "does not contain steps measured in turn"),
        ({"steps": {"none": {"median_ms": -1}}}, "a time is not a positive number"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write_runs(tmp_path / "runs")
    result = report(tmp_path / "runs", "--turns", write_turns(tmp_path / "turns.json", **changes))
    assert result.exit_code == 1
    assert message in " ".join(result.output.split())


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    write_runs(tmp_path / "runs")
    result = report(tmp_path / "runs", "--turns", tmp_path / "none.json")
    assert result.exit_code == 1
    assert "none.json" in result.output


def test_the_page_shows_no_raw_values(tmp_path: Path) -> None:
    options = {"gamma": 0.1 + 0.2, "memory": None, "milestones": [], "nesterov": True, "batch_size": 32}
    write_run(tmp_path / "run", options=options, note=None, loss=1 / 3)
    result = report(tmp_path / "run", "--output", tmp_path / "out")
    assert result.exit_code == 0, result.output
    page = (tmp_path / "out" / "report.html").read_text()
    for raw in ("0.30000000000000004", "0.3333333333333333", "None", "True", "[]"):
        assert raw not in page
    assert "<code>0.3</code>" in page
    assert as_text({"a": [1.5, None], "b": {}}) == "a 1.5, -, b -"
