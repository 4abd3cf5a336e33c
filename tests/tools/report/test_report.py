"""`hvdcomp report`, on run folders written here in the form that `hvdcomp train` writes."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

from hvdcomp.tools.cli import main
from hvdcomp.tools.report.curves import draw_section, smooth
from hvdcomp.tools.report.headline import headline
from hvdcomp.tools.report.runs import RunError, find_runs
from hvdcomp.tools.report.series import series_cells
from hvdcomp.tools.report.table import cells, make_sections

HOSTILE = "topk<script>alert(1)</script>\"'[red]$x_$\x1b[31m"


def write_run(
    folder: Path,
    spec: str = "none",
    *,
    seed: int = 0,
    steps: int = 60,
    factor: float = 1.0,
    ms: float = 20.0,
    metric: str = "accuracy",
    finished: bool = True,
    phases: bool = True,
    **summary: object,
) -> Path:
    """Write the run of a model of 4 MB whose loss decays; its step takes `ms` and sends 4 MB / `factor`."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    sent = int(4e6 / factor)
    losses = 2.3 * np.exp(-np.arange(steps) / 25) + 0.1 + rng.normal(0, 0.05, steps)
    with (folder / "steps.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            record = {
                "step": step, "epoch": (step - 1) // 20 + 1, "loss": losses[step - 1], "learning_rate": 0.1,
                "ms": ms + abs(rng.normal(0, 0.02 * ms)), "bytes_sent": sent, "dense_bytes": 4_000_000,
                "floats_sent": sent // 4, "encode_ms": 1.5 if phases else None,
                "communicate_ms": 6.0 if phases else None, "decode_ms": 0.5 if phases else None,
            }  # fmt: skip
            file.write(json.dumps(record) + "\n")
    quality = 0.0
    with (folder / "epochs.jsonl").open("w") as file:
        for epoch in range(1, steps // 20 + 1):
            loss = float(losses[epoch * 20 - 1])
            quality = 1 - loss / 3 if metric == "accuracy" else float(np.exp(loss) * 20)
            record = {
                "epoch": epoch, "step": epoch * 20, "train_loss": loss, "test_loss": loss, metric: quality,
                "seconds": epoch * 0.02 * ms, "bytes_sent": epoch * 20 * sent,
            }  # fmt: skip
            file.write(json.dumps(record) + "\n")
    if finished:
        record = {
            "status": "finished", "model": "mlp", "data": "digits", metric: quality, "loss": losses[-1],
            "steps": steps, "world_size": 4, "ms_per_step": ms, "bytes_sent": steps * sent,
            "dense_bytes": steps * 4_000_000, "bytes_sent_per_step": sent, "compression_factor": factor,
            "weights_sha256": ["ab" * 32] * 4, "identical": True, "spec": spec, "seed": seed,
            "options": {"batch_size": 32, "seed": seed, "output": str(folder)}, "parameters": 1_000_000,
            "versions": {"torch": "2.5.0", "horovod": "0.28.1"}, "controller": "gloo",
        }  # fmt: skip
        (folder / "summary.json").write_text(json.dumps(record | summary))
    return folder


def report(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(main, ["report", *map(str, arguments)])


def read_table(*folders: Path, baseline: str | None = None) -> list[dict]:
    runs, _ = find_runs(folders)
    return [row for section in make_sections(runs, baseline) for row in section.rows]


def test_table_of_finished_runs(tmp_path):
    write_run(tmp_path / "dense", ms=20.0)
    write_run(tmp_path / "topk", "topk:ratio=0.01", factor=50, ms=10.0, identical=False)
    dense, topk = read_table(tmp_path)
    assert (dense["run"], topk["run"]) == ("dense", "topk")
    assert dense["speed_vs_baseline"] == 1.0
    assert topk["speed_vs_baseline"] == 2.0
    assert topk["bytes_sent_per_step"] == 80_000
    assert cells(topk)[:2] == ["topk", "topk:ratio=0.01"]
    assert cells(topk)[4:] == ["80.0 kB", "50.0x", "10.0", "2.00x", "NO", "1.50 / 6.00 / 0.50"]
    accuracy = json.loads((tmp_path / "topk/summary.json").read_text())["accuracy"]
    assert cells(topk)[3] == f"{100 * accuracy:.2f}"


def test_seeds_are_grouped_with_mean_and_spread(tmp_path):
    for seed, ms in enumerate((10.0, 11.0, 15.0)):
        write_run(tmp_path / f"qsgd-{seed}", "qsgd:bits=4", seed=seed, ms=ms, accuracy=0.9 + seed / 100)
    other = {"batch_size": 64, "seed": 0}
    write_run(tmp_path / "qsgd-large-batch", "qsgd:bits=4", ms=30.0, options=other)
    (section,) = make_sections(find_runs([tmp_path])[0])
    assert [group.label for group in section.groups] == [
        "qsgd:bits=4 (batch_size=32)",
        "qsgd:bits=4 (batch_size=64)",
    ]
    mean, *seeds, alone = section.rows
    assert [row["kind"] for row in section.rows] == ["mean", "seed", "seed", "seed", "run"]
    assert [row["seed"] for row in section.rows] == [None, 0, 1, 2, 0]
    assert (mean["ms_per_step"], mean["ms_per_step_min"], mean["ms_per_step_max"]) == (12.0, 10.0, 15.0)
    assert mean["quality"] == pytest.approx(0.91)
    assert cells(mean)[0] == "mean of 3 runs"
    assert cells(mean)[3] == "91.00 (90.00-92.00)"
    assert cells(mean)[4] == "4.0 MB"
    assert [row["ms_per_step"] for row in seeds] == [10.0, 11.0, 15.0]
    assert alone["ms_per_step"] == 30.0


def sentences(*folders: Path) -> list[str]:
    (section,) = make_sections(find_runs(folders)[0])
    return headline(section)


def test_the_headline_says_who_won(tmp_path):
    write_run(tmp_path / "dense", accuracy=0.98)
    assert sentences(tmp_path) == []  # nothing to compare
    write_run(tmp_path / "fp16", "fp16", factor=2, accuracy=0.985)
    write_run(tmp_path / "topk", "topk:ratio=0.01", factor=50, accuracy=0.9701)
    write_run(tmp_path / "less", "topk:ratio=0.001", factor=400, accuracy=0.9699)  # more than a point below
    write_run(tmp_path / "diverged", "signsgd", factor=900, status="diverged", accuracy=None)
    (tmp_path / "diverged" / "epochs.jsonl").write_text("")
    write_run(tmp_path / "stopped", "onebit", factor=950, status="stopped", accuracy=0.99)
    assert sentences(tmp_path) == [
        "topk:ratio=0.01 sent 50.0 times fewer bytes than dense training, and ended at 97.01% accuracy; dense training "
        "ended at 98.00% accuracy.",
        "topk:ratio=0.001 sent the fewest bytes, 400.0 times fewer than dense training, but ended at 96.99% accuracy.",
        "fp16 had the best result, 98.50% accuracy, and sent 2.0 times fewer bytes than dense training.",
    ]


def test_a_headline_where_nothing_is_as_good_as_dense(tmp_path):
    common = {"metric": "perplexity", "model": "lstm", "data": "text"}
    write_run(tmp_path / "dense", perplexity=5.0, **common)
    write_run(tmp_path / "topk", "topk:ratio=0.01", factor=50, perplexity=5.51, **common)
    assert sentences(tmp_path) == [
        "None of the methods that sent fewer bytes ended within 10% of dense training (a perplexity of 5.00).",
        "topk:ratio=0.01 sent the fewest bytes, 50.0 times fewer than dense training, but ended at a perplexity of "
        "5.51.",
    ]


def test_a_headline_of_regressions(tmp_path):
    common = {"metric": "rmse", "model": "mlp", "data": "heavy-tails"}
    write_run(tmp_path / "dense", rmse=0.3458, **common)
    write_run(tmp_path / "int4", "int4", factor=7, rmse=0.3461, **common)
    assert sentences(tmp_path) == [
        "int4 sent 7.0 times fewer bytes than dense training, and ended at an RMSE of 0.3461; dense training ended at "
        "an RMSE of 0.3458."
    ]
    rows = read_table(tmp_path / "int4")
    assert [cells(row)[3] for row in rows] == ["0.3461"]


def test_unfinished_run_with_truncated_last_line(tmp_path):
    folder = write_run(tmp_path / "killed", factor=10, ms=20.0, finished=False, phases=False)
    steps = folder / "steps.jsonl"
    steps.write_bytes(steps.read_bytes()[:-40])
    (run,), _ = find_runs([folder])
    assert run.steps["step"].tolist() == list(range(1, 60))
    (row,) = read_table(folder)
    assert row["status"] == "unfinished"
    assert row["quality"] == run.evaluations["accuracy"][-1]
    assert row["compression_factor"] == pytest.approx(10)
    assert 20 <= row["ms_per_step"] < 22
    shown = cells(row)
    assert shown[0] == "killed (unfinished)"
    assert shown[1] == shown[7] == shown[8] == shown[9] == "-"


def test_damage_before_the_last_line_is_an_error(tmp_path):
    folder = write_run(tmp_path / "run")
    lines = (folder / "steps.jsonl").read_text().split("\n")
    lines[4] = lines[4][:20]
    (folder / "steps.jsonl").write_text("\n".join(lines))
    with pytest.raises(RunError, match=r"steps\.jsonl, line 5 is not a record"):
        find_runs([folder])


@pytest.mark.parametrize("content", ['{"status": "fini', "[1, 2]"])
def test_damaged_summary_is_an_error(tmp_path, content):
    folder = write_run(tmp_path / "run")
    (folder / "summary.json").write_text(content)
    result = report(folder)
    assert result.exit_code == 1
    assert str(folder / "summary.json") in result.output


@pytest.mark.parametrize("key", ["ms_per_step", "accuracy"])
def test_value_that_is_no_number_is_an_error(tmp_path, key):
    folder = write_run(tmp_path / "run", **{key: "high"})
    result = report(folder, "--output", tmp_path / "out")
    assert result.exit_code == 1
    assert f'{key}: "high" is not a number; remove the file to read the run as unfinished' in result.output


@pytest.mark.parametrize(
    ("name", "wrong", "said"),
    [
        ("summary.json", {"ms_per_step": "5"}, 'ms_per_step: "5" is not a number'),
        ("summary.json", {"world_size": True}, "world_size: true is not a number"),
        ("summary.json", {"accuracy": [1]}, "accuracy: [1] is not a number"),
        ("summary.json", {"seed": 10**400}, "is too large a number"),
        ("summary.json", {"model": {"a": 1}}, "model: {'a': 1} must be text"),
        ("summary.json", {"options": [1]}, "options: [1] must be a table"),
        ("steps.jsonl", {"loss": "0.5"}, 'steps.jsonl, line 2 is not a record of a run: "0.5" is not a number'),
        ("steps.jsonl", {"ms": 10**400}, "is too large a number"),
        ("steps.jsonl", [1, 2], "line 2 is not a record of a run: [1, 2]"),
        ("steps.jsonl", {"step": None}, 'line 2 is not a record of a run: {"step": null, "epoch": 1, "loss"'),
        ("epochs.jsonl", {"step": None}, "... has no step"),
        ("steps.jsonl", {"step": 1e308}, "1e+308 is not the number of a step"),
        ("summary.json", {"until": "accuracy=0.9"}, "until: 'accuracy=0.9' must be a table"),
        ("summary.json", {"until": {"target": "speed=2", "reached": False}}, "'speed=2' is not a target"),
        ("summary.json", {"until": {"target": "loss=2", "reached": 1}}, "until: reached: 1 must be"),
        ("summary.json", {"until": {"target": "loss=2", "reached": True, "step": "9"}}, '"9" is not a number'),
        ("epochs.jsonl", {"accuracy": {}}, "line 2 is not a record of a run: {} is not a number"),
    ],
)
def test_wrong_but_valid_json_is_refused(tmp_path, name, wrong, said):
    folder = write_run(tmp_path / "run")
    path = folder / name
    if name == "summary.json":
        path.write_text(json.dumps(json.loads(path.read_text()) | wrong))
    else:
        lines = path.read_text().splitlines()
        lines[1] = json.dumps(wrong if isinstance(wrong, list) else json.loads(lines[1]) | wrong)
        path.write_text("\n".join(lines) + "\n")
    with pytest.raises(RunError) as caught:
        find_runs([folder])
    assert str(path) in str(caught.value)
    assert said in str(caught.value)


def test_a_last_line_that_is_whole_and_wrong_is_refused(tmp_path):
    folder = write_run(tmp_path / "run")
    with (folder / "steps.jsonl").open("a") as file:
        file.write("[1, 2]")
    with pytest.raises(RunError, match=r"line 61 is not a record of a run: \[1, 2\]"):
        find_runs([folder])


def test_names_that_look_like_formulas_are_text_in_the_csv(tmp_path):
    write_run(tmp_path / "runs" / "=cmd()", "@SUM(A1)", status="-1")
    result = report(tmp_path / "runs", "--output", tmp_path / "out")
    assert result.exit_code == 0, result.output
    with (tmp_path / "out/report.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["run"], row["spec"], row["status"]) == ("'=cmd()", "'@SUM(A1)", "'-1")


@pytest.mark.thorough
def test_a_full_disk_leaves_an_earlier_report_as_it_was(tmp_path):
    run = write_run(tmp_path / "run")
    assert report(run, "--output", tmp_path / "out").exit_code == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    program = (
        "import resource, sys; from hvdcomp.tools.cli import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20000, resource.RLIM_INFINITY)); main()"
    )
    write_run(tmp_path / "other", "topk:ratio=0.01")
    command = [sys.executable, "-c", program, "report", run, tmp_path / "other", "--output", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("Error: the report cannot be written: File too large")
    assert "Traceback" not in done.stderr
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def test_baseline_is_missing_named_or_unknown(tmp_path):
    write_run(tmp_path / "topk", "topk:ratio=0.01", ms=10.0)
    write_run(tmp_path / "fp16", "fp16", ms=15.0)
    assert [row["speed_vs_baseline"] for row in read_table(tmp_path)] == [None, None]
    for name in ("fp16", "topk:ratio=0.01"):
        speeds = {row["spec"]: row["speed_vs_baseline"] for row in read_table(tmp_path, baseline=name)}
        assert speeds[name] == 1.0
    write_run(tmp_path / "dense-of-8", "none", ms=5.0, world_size=8)
    speeds = {row["run"]: row["speed_vs_baseline"] for row in read_table(tmp_path)}
    assert speeds == {"dense-of-8": 1.0, "fp16": None, "topk": None}
    result = report(tmp_path, "--baseline", "nothing", "--output", tmp_path / "out")
    assert result.exit_code == 1
    assert "'nothing'" in result.output
    assert "fp16" in result.output
    assert not (tmp_path / "out").exists()


def test_baseline_has_the_same_batch_size(tmp_path):
    write_run(tmp_path / "dense-32", ms=20.0)
    write_run(tmp_path / "dense-64", ms=40.0, options={"batch_size": 64})
    write_run(tmp_path / "topk-64", "topk:ratio=0.01", ms=10.0, options={"batch_size": 64})
    write_run(tmp_path / "topk-16", "topk:ratio=0.01", ms=10.0, options={"batch_size": 16})
    speeds = {row["run"]: row["speed_vs_baseline"] for row in read_table(tmp_path)}
    assert speeds == {"dense-32": 1.0, "dense-64": 1.0, "topk-16": None, "topk-64": 4.0}


def test_folders_that_are_no_runs(tmp_path):
    run = write_run(tmp_path / "runs" / "dense")
    (tmp_path / "runs" / "notes").mkdir()
    for name, message in [("runs/notes", "no training run"), ("gone", "does not exist")]:
        path = tmp_path / name
        result = report(run, path, "--output", tmp_path / "out")
        assert result.exit_code == 1
        assert str(path) in result.output
        assert message in result.output
    # Found by recursion, "notes" is passed over; and no run is listed twice.
    runs, _ = find_runs([tmp_path / "runs", run])
    assert [run.name for run in runs] == ["dense"]


@pytest.mark.thorough
def test_own_files_are_ignored_when_a_report_is_made_again(tmp_path):
    write_run(tmp_path / "dense")
    for _ in range(2):
        result = report(*tmp_path.iterdir(), "--output", tmp_path / "report")
        assert result.exit_code == 0, result.output
    assert "left out" in result.output
    result = report(tmp_path / "dense", *(tmp_path / "report").iterdir(), "--output", tmp_path / "report")
    assert result.exit_code == 0, result.output
    result = report(tmp_path / "report", "--output", tmp_path / "report")
    assert result.exit_code == 1
    assert "no training runs" in result.output


def test_json_and_csv_say_what_the_table_says(tmp_path):
    write_run(tmp_path / "runs" / "dense")
    for seed in (0, 1):
        name = tmp_path / "runs" / f"topk-{seed}"
        write_run(name, "topk:ratio=0.01", seed=seed, factor=50, ms=9.0 + seed)
    write_run(tmp_path / "runs" / "lm", "fp16", model="lstm", data="text", metric="perplexity")
    write_run(tmp_path / "runs" / "going", finished=False)
    result = report(tmp_path / "runs", "--output", tmp_path / "out")
    assert result.exit_code == 0, result.output
    expected = read_table(tmp_path / "runs")
    sections = make_sections(find_runs([tmp_path / "runs"])[0])
    series = [row for section in sections for row in section.series]
    document = json.loads((tmp_path / "out/report.json").read_text())
    assert (document["rows"], document["series"]) == (expected, series)
    for name, rows in (("report.csv", expected), ("series.csv", series)):
        with (tmp_path / "out" / name).open(newline="") as file:
            written = list(csv.DictReader(file))
        assert written == [{key: "" if v is None else str(v) for key, v in row.items()} for row in rows]
    page = (tmp_path / "out/report.html").read_text()
    for row in expected:
        for text in cells(row)[:2] + cells(row)[4:6]:
            for part in re.split(r" \(|\)", text):
                assert part in result.output
                assert part in page
    figures = sorted(path.name for path in (tmp_path / "out").glob("*.png"))
    curves = {f"{what}-{against}" for what in ("accuracy", "perplexity", "loss") for against in ("bytes", "steps")}
    assert {name[2:-4] for name in figures} == {*curves, "time"}
    assert len(figures) == 15  # three sections of five: classification, language model, not yet known
    for name in figures:
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")
        assert (tmp_path / "out" / name).with_suffix(".svg").stat().st_size > 1000
    assert page.count("data:image/svg+xml;base64,") == 15
    # The headline comes before the table. On a narrow screen a row is a card, without the line of headings above.
    (sentence,) = headline(sections[0])
    assert sentence in " ".join(result.output.split())
    assert 0 < page.index(sentence) < page.index("<table")
    shown = re.findall(r'<td data-heading="([^"]+)"[^>]*>([^<]*)<', page)
    named = []
    for one in sections:
        if one.has_series:
            for row in one.series:
                named += zip(one.series_headings[1:], series_cells(row, one.series_headings)[1:], strict=True)
        for row in sorted(one.rows, key=lambda row: row["kind"] == "seed"):  # each seed's are unfolded below the others
            named += zip(one.headings[2:], cells(row)[2:], strict=True)
    assert shown == [(heading, text.partition(" (")[0]) for heading, text in named]


def test_hostile_strings_are_harmless(tmp_path):
    folder = tmp_path / "<script>alert(2)</script>"
    write_run(folder, HOSTILE, model="<img src=x onerror=alert(3)>", options={HOSTILE: [HOSTILE]})
    write_run(tmp_path / "_other", "_$\\frac{", model="<img src=x onerror=alert(3)>", options={"x": "\ud800"})
    result = report(folder, tmp_path / "_other", "--output", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "\x1b[31m" not in result.output
    assert "[red]$x_$" in result.output
    page = (tmp_path / "out/report.html").read_text()
    assert "<script" not in page
    assert "<img src=x" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "http://" not in page
    assert "https://" not in page
    for path in (tmp_path / "out").glob("*.svg"):
        assert "<script" not in path.read_text()


def test_diverged_and_empty_runs_are_drawn(tmp_path):
    write_run(tmp_path / "good")
    bad = write_run(tmp_path / "bad", "topk:ratio=0.01", status="diverged", accuracy=None, loss=float("nan"))
    text = re.sub(r'("step": (?:4|5)\d, .*?"loss": )[-.\de]+', r"\1NaN", (bad / "steps.jsonl").read_text())
    (bad / "steps.jsonl").write_text(text)
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "steps.jsonl").touch()
    (bad / "epochs.jsonl").write_text("")
    assert [section.title for section in make_sections(find_runs([bad, tmp_path / "good"])[0])] == ["mlp on digits"]
    result = report(tmp_path, "--output", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "bad (diverged)" in result.output
    assert "empty (unfinished)" in result.output
    json.loads((tmp_path / "out/report.json").read_text(), parse_constant=pytest.fail)


def test_times_leave_out_the_first_epoch(tmp_path):
    run = write_run(tmp_path / "run", finished=False)
    lines = [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]
    for line in lines:
        line["ms"] = line["encode_ms"] = 900.0 if line["epoch"] == 1 else 30.0
    (run / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (row,) = read_table(run)
    assert (row["ms_per_step"], row["encode_ms"]) == (30.0, 30.0)
    (run / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[:5]))
    (row,) = read_table(run)
    assert row["ms_per_step"] == 900.0


def test_one_rank_sends_nothing(tmp_path):
    run = write_run(tmp_path / "alone", world_size=1, bytes_sent_per_step=0, compression_factor=None)
    for name in ("steps", "epochs"):
        text = re.sub(r'"(bytes_sent|dense_bytes)": \d+', r'"\1": 0', (run / f"{name}.jsonl").read_text())
        (run / f"{name}.jsonl").write_text(text)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = report(run, "--output", tmp_path / "out")
    assert result.exit_code == 0, result.output
    (row,) = read_table(run)
    assert cells(row)[4:6] == ["0 bytes", "-"]


def test_bytes_within_a_node_are_told_apart(tmp_path):
    write_run(tmp_path / "flat", "topk:ratio=0.01", factor=50)
    sent = {"bytes_sent_per_step": 5_020_000, "bytes_in_node_per_step": 5e6}
    write_run(tmp_path / "two", "two_level(topk:ratio=0.01)", factor=200, **sent)
    flat, two = read_table(tmp_path)
    assert cells(flat)[4:6] == ["80.0 kB", "50.0x"]
    assert cells(two)[4:6] == ["5.0 MB (5.0 MB in the node)", "200x"]


def test_without_a_summary_bytes_within_a_node_do_not_count_either(tmp_path):
    run = write_run(tmp_path / "run", finished=False, factor=0.8)
    (row,) = read_table(run)
    assert (row["bytes_in_node_per_step"], row["compression_factor"]) == (None, 0.8)  # before they were written
    lines = [json.loads(line) | {"bytes_in_node": 4_900_000} for line in (run / "steps.jsonl").read_text().splitlines()]
    (run / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (row,) = read_table(run)
    assert (row["bytes_in_node_per_step"], row["compression_factor"]) == (4_900_000, 40)


def test_only_a_diverging_loss_is_cut_off(tmp_path):
    run = write_run(tmp_path / "run")
    for name, key in (("steps", "loss"), ("epochs", "accuracy")):
        lines = [json.loads(line) for line in (run / f"{name}.jsonl").read_text().splitlines()]
        lines[0][key], lines[-1][key] = (2.0, 1e20) if key == "loss" else (0.1, 0.9)
        (run / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (section,) = make_sections(find_runs([run])[0])
    figures = {name: figure for name, _, figure in draw_section(section)}
    assert next(iter(figures)) == "accuracy-bytes", "what each byte bought comes first"
    for against in ("bytes", "steps"):
        assert figures[f"loss-{against}"].axes[0].get_ylim() == (0, 6.0)
        assert "cut off" in figures[f"loss-{against}"].axes[0].get_ylabel()
        assert figures[f"accuracy-{against}"].axes[0].get_ylim()[1] > 90


def test_smoothing_is_a_running_mean_that_leaves_gaps():
    values = np.arange(100.0)
    assert smooth(values**2)[50] == pytest.approx(2500 + 2 / 3)  # a window of three
    values[50] = np.nan
    result = smooth(values)
    assert np.isnan(result[50])
    assert result[51] == pytest.approx(51.5)
    assert smooth(np.array([])).size == 0
