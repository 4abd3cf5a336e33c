"""`hvdcomp report` on several seeds of a method: means and intervals, targets, and curves with bands."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from hvdcomp.tools.cli import main
from hvdcomp.tools.report.bands import Curve, band_of
from hvdcomp.tools.report.curves import draw_section
from hvdcomp.tools.report.headline import headline
from hvdcomp.tools.report.runs import RunError, find_runs
from hvdcomp.tools.report.series import series_cells
from hvdcomp.tools.report.table import Section, make_sections
from hvdcomp.tools.train.spread import estimate, seeds_needed
from tests.tools.report.test_report import report, write_run

BATCH = {"batch_size": 32}
ACCURACIES = (0.1, 0.5, 0.8)


def write_seed(
    folder: Path,
    spec: str = "none",
    *,
    seed: int = 0,
    accuracies: tuple[float, ...] = ACCURACIES,
    seconds: float = 1.0,
    target: str | None = "accuracy=0.8",
    options: dict[str, Any] | None = None,
    **summary: Any,
) -> Path:
    """A run with an evaluation every 20 steps, each after so many more seconds; the last may reach the target.

    It sends 4 MB / `factor` a step.
    """
    reached = target is not None and accuracies[-1] >= float(target.partition("=")[2])
    sent = int(20 * 4e6 / summary.get("factor", 1.0))
    count = len(accuracies)
    last = {"step": 20 * count, "trained_seconds": seconds * count, "bytes_sent": sent * count}
    until = None if target is None else {"target": target, "reached": reached, **(last if reached else {})}
    write_run(
        folder, spec, seed=seed, steps=20 * count,
        **{"until": until, "trained_seconds": seconds * count, "accuracy": accuracies[-1], "ranks_per_host": 4,
           "options": {**BATCH, "seed": seed, "output": str(folder), "until": target, **(options or {})}, **summary},
    )  # fmt: skip
    with (folder / "evaluations.jsonl").open("w") as file:
        for number, accuracy in enumerate(accuracies, start=1):
            record = {
                "step": 20 * number, "epoch": number, "part": "validation", "loss": 2 - accuracy, "accuracy": accuracy,
                "trained_seconds": seconds * number, "bytes_sent": sent * number,
            }  # fmt: skip
            file.write(json.dumps(record) + "\n")
    return folder


def section_of(*folders: Path) -> Section:
    (section,) = make_sections(find_runs(folders)[0])
    return section


def shown(section: Section) -> list[dict[str, str]]:
    headings = section.series_headings
    return [dict(zip(headings, series_cells(row, headings), strict=True)) for row in section.series]


def figures_of(section: Section) -> dict[str, tuple[str, Figure]]:
    return {name: (caption, figure) for name, caption, figure in draw_section(section)}


def test_the_interval_is_students() -> None:
    stats = pytest.importorskip("scipy.stats")
    assert estimate([]) is None
    assert estimate([3.0]).half is None
    for count in range(2, 31):
        values = np.random.default_rng(count).normal(size=count)
        known = estimate(values.tolist())
        low, high = stats.t.interval(0.95, count - 1, loc=values.mean(), scale=stats.sem(values))
        assert known.mean == pytest.approx(values.mean())
        assert known.half == pytest.approx((high - low) / 2, rel=3e-4)  # the table has three decimals
    beyond = np.random.default_rng(0).normal(size=100)
    assert estimate(beyond.tolist()).half == pytest.approx(2.045 * stats.sem(beyond))


@pytest.mark.parametrize("wanted", [0.2, 0.5, 1.0, 5.0])
def test_the_seeds_that_an_interval_needs(wanted: float) -> None:
    stats = pytest.importorskip("scipy.stats")

    def half_of(number: int) -> float:
        """Half the interval of values with the standard deviation 1."""
        return float(stats.t.ppf(0.975, min(number, 30) - 1) / np.sqrt(number))

    needed = seeds_needed(half_of(5), 5, wanted)
    assert half_of(needed) <= wanted * 1.001
    assert needed == 2 or half_of(needed - 1) > wanted * 0.999


def test_a_series_is_shown_by_mean_and_interval(tmp_path: Path) -> None:
    for seed, accuracy in enumerate((0.80, 0.82, 0.84)):
        checkpoints = {"checkpoint_folder": str(tmp_path / "checkpoints" / str(seed))}
        write_seed(
            tmp_path / f"topk-{seed}", "topk:ratio=0.01", seed=seed, accuracies=(0.5, accuracy), target=None, factor=50,
            loss=0.5 + seed / 10, options=checkpoints,
        )  # fmt: skip
    write_seed(
        tmp_path / "diverged", "topk:ratio=0.01", seed=3, accuracies=(0.1,), target=None, status="diverged",
        options={"checkpoint_folder": None},
    )  # fmt: skip
    section = section_of(tmp_path)
    (row,) = section.series
    assert (row["series"], row["seeds"], row["runs"], row["target"]) == ("topk:ratio=0.01", 4, 4, None)
    assert row["quality"] == pytest.approx(0.82)
    assert row["quality_ci95"] == pytest.approx(4.303 * 0.02 / math.sqrt(3))
    assert shown(section) == [
        {
            "Series": "topk:ratio=0.01", "Seeds": "4 (1 diverged)", "Loss": "0.600 (±0.248)",
            "Accuracy %": "82.00 (±4.97)", "Sent in total": "3.2 MB", "CF": "50.0x", "Seconds": "2.00",
        }
    ]  # fmt: skip


def test_a_seed_that_was_run_again_is_no_further_sample(tmp_path: Path) -> None:
    for name, seed, loss in (("a", 0, 1.0), ("b", 1, 2.0), ("b-again", 1, 2.2)):
        write_seed(tmp_path / name, seed=seed, loss=loss, target=None)
    (row,) = section_of(tmp_path).series
    assert (row["seeds"], row["runs"]) == (2, 3)
    assert row["loss"] == pytest.approx(1.55)
    assert row["loss_ci95"] == pytest.approx(12.706 * 1.1 / 2)
    assert shown(section_of(tmp_path))[0]["Seeds"] == "2 (3 runs)"


def test_what_a_target_took_is_compared_with_dense_and_fp16(tmp_path: Path) -> None:
    write_seed(tmp_path / "dense-0", seed=0, seconds=4.0)
    write_seed(tmp_path / "dense-1", seed=1, seconds=6.0)
    write_seed(tmp_path / "slow", options={"lr": 0.001}, seconds=9.0)  # the fastest of several counts
    write_seed(tmp_path / "fp16", "fp16", seconds=2.5, factor=2)
    write_seed(tmp_path / "topk-0", "topk:ratio=0.01", seconds=1.0, factor=50)
    write_seed(tmp_path / "topk-1", "topk:ratio=0.01", seed=1, accuracies=(0.1, 0.2), seconds=0.1, factor=50)
    write_seed(tmp_path / "other-target", "signsgd", target="accuracy=0.7", seconds=0.1)
    write_seed(tmp_path / "other-link", "int8", options={"simulate_ranks": 4, "link": "1gbit"}, seconds=0.1)
    rows = {row["Series"].partition(" (")[0]: row for row in shown(section_of(tmp_path)) if "lr=" not in row["Series"]}
    topk, dense, fp16 = rows["topk:ratio=0.01"], rows["none"], rows["fp16"]
    assert (topk["Target reached"], topk["Steps to target"]) == ("1 of 2 (accuracy=0.8)", "60.0")
    assert (topk["Sent to target"], topk["Seconds to target"]) == ("4.8 MB", "3.00")
    assert (dense["Target reached"], dense["Seconds to target"]) == ("2 of 2 (accuracy=0.8)", "15.0 (±38.1)")
    # The other seed of topk never got there.
    assert (topk["Speed to target vs none"], topk["Speed to target vs fp16"]) == ("5.00x*", "2.50x*")
    assert (fp16["Speed to target vs none"], dense["Speed to target vs fp16"]) == ("2.00x", "0.50x")
    for name in ("signsgd", "int8"):
        assert rows[name]["Speed to target vs none"] == "-", "another target, another link"


def test_a_reference_is_plain_and_preferably_always_there(tmp_path: Path) -> None:
    write_seed(tmp_path / "dense-0", seed=0, seconds=5.0)
    write_seed(tmp_path / "lucky-0", seed=0, seconds=1.0, options={"lr": 0.9})
    write_seed(tmp_path / "lucky-1", seed=1, accuracies=(0.1,), options={"lr": 0.9})
    write_seed(tmp_path / "frozen", seconds=1.0, options={"optimizer": "compressed-adam"})
    write_seed(tmp_path / "policy", seconds=1.0, options={"policy": "batch_size"})
    write_seed(tmp_path / "int8", "int8", seconds=2.0)
    (found,) = (row for row in section_of(tmp_path).series if row["spec"] == "int8")
    assert found["speed_to_target_vs_none"] == pytest.approx(2.5)
    assert found["speed_to_target_vs_none_over"] == "all runs"
    assert found["speed_to_target_vs_fp16"] is None
    assert "Speed to target vs fp16" not in section_of(tmp_path).series_headings


def test_the_headline_says_who_was_first_at_the_target(tmp_path: Path) -> None:
    write_seed(tmp_path / "dense", seconds=4.0)
    write_seed(tmp_path / "topk", "topk:ratio=0.01", seconds=1.0, factor=50)
    write_seed(tmp_path / "dgc", "dgc:ratio=0.001", seconds=1.0, factor=100, accuracies=(0.1, 0.2, 0.3, 0.4, 0.8))
    assert headline(section_of(tmp_path)) == [
        "topk:ratio=0.01 reached accuracy=0.8 first, in 3.00 seconds of training, 4.0 times faster than dense "
        "training.",
        "dgc:ratio=0.001 sent the fewest bytes to reach accuracy=0.8, 4.0 MB, 60.0 times fewer than dense training.",
    ]
    write_seed(tmp_path / "int8", "int8", seconds=0.1, target="accuracy=0.7")
    assert headline(section_of(tmp_path)) == [], "different targets are not compared"


def test_without_seeds_or_targets_there_is_no_table_of_series(tmp_path: Path) -> None:
    write_seed(tmp_path / "dense", target=None)
    assert not section_of(tmp_path).has_series
    (row,) = section_of(tmp_path).series
    assert (row["seeds"], row["loss_ci95"]) == (1, None)
    write_seed(tmp_path / "topk", "topk:ratio=0.01")
    assert section_of(tmp_path).has_series


def test_a_band_is_over_the_steps_that_all_seeds_have() -> None:
    one = Curve(np.array([1.0, 2, 3, 4]), np.array([10.0, 20, 30, 40]), np.array([1.0, 2, 3, 4]))
    two = Curve(np.array([2.0, 4, 5]), np.array([22.0, 42, 52]), np.array([4.0, 4, 9]))
    band = band_of([one, two])
    assert (band.x.tolist(), band.mean.tolist()) == ([21.0, 41.0], [3.0, 4.0])
    assert (band.low.tolist(), band.high.tolist()) == ([2.0, 4.0], [4.0, 4.0])


def test_curves_have_bands_over_bytes_and_seconds_and_the_target(tmp_path: Path) -> None:
    write_seed(tmp_path / "dense", seconds=4.0)
    write_seed(tmp_path / "topk-0", "topk:ratio=0.01", seed=0, factor=50, accuracies=(0.1, 0.5, 0.8))
    write_seed(tmp_path / "topk-1", "topk:ratio=0.01", seed=1, factor=50, accuracies=(0.3, 0.6, 0.7, 0.8), seconds=2.0)
    write_seed(tmp_path / "lost", "topk:ratio=0.01", seed=2, factor=50, accuracies=(0.1,), status="diverged")
    figures = figures_of(section_of(tmp_path))
    for against, dense_x, topk_x in (
        ("bytes", [80.0, 160.0, 240.0], [1.6, 3.2, 4.8]),
        ("seconds", [4.0, 8.0, 12.0], [1.5, 3.0, 4.5]),
    ):
        caption, figure = figures[f"accuracy-{against}"]
        (axes,) = figure.axes
        assert axes.get_ylabel() == "validation accuracy (%)"
        assert axes.get_xscale() == ("log" if against == "bytes" else "linear")
        lines = [line for line in axes.lines if len(line.get_xdata()) == 3]
        assert [line.get_xdata().tolist() for line in lines] == [pytest.approx(dense_x), pytest.approx(topk_x)]
        assert lines[1].get_ydata().tolist() == pytest.approx([20, 55, 75])
        dots = [line.get_ydata().item() for line in axes.lines if len(line.get_xdata()) == 1]
        assert dots == pytest.approx([80, 10, 80, 80]), "where each run ended, the diverged one too"
        (band,) = (shape for shape in axes.collections if isinstance(shape, PolyCollection))
        outline = band.get_paths()[0].vertices[:, 1]
        assert {round(y) for y in outline} == {10, 30, 50, 60, 70, 80}
        (target,) = (line for line in axes.lines if list(line.get_ydata()) == [80, 80])
        assert list(target.get_xdata()) == [0, 1]
        assert "Band: lowest to highest" in caption
        assert caption.endswith("Horizontal line: the target, accuracy=0.8.")
    assert figures["loss-bytes"][1].axes[0].collections, "the training loss has bands too"


def test_seeds_without_a_common_step_have_a_line_each(tmp_path: Path) -> None:
    write_seed(tmp_path / "one", seed=0)
    file = write_seed(tmp_path / "two", seed=1) / "evaluations.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(record | {"step": record["step"] + 1}) + "\n" for record in records))
    (axes,) = figures_of(section_of(tmp_path))["accuracy-bytes"][1].axes
    assert [line.get_ydata().tolist() for line in axes.lines if len(line.get_xdata()) == 3] == [[10, 50, 80]] * 2


def test_a_loss_that_is_the_target_is_drawn_with_it(tmp_path: Path) -> None:
    write_seed(tmp_path / "dense", target="loss=1.3")
    figures = figures_of(section_of(tmp_path))
    assert "target" not in figures["accuracy-bytes"][0]
    caption, figure = figures["evaluated-loss-bytes"]
    assert caption.startswith("Validation loss against")
    assert any(list(line.get_ydata()) == [1.3, 1.3] for line in figure.axes[0].lines)


def test_runs_of_earlier_versions_have_no_curve_over_seconds(tmp_path: Path) -> None:
    write_run(tmp_path / "dense")
    figures = figures_of(section_of(tmp_path))
    assert "accuracy-seconds" not in figures
    assert figures["accuracy-bytes"][1].axes[0].get_ylabel() == "test accuracy (%)"


def test_a_wrong_part_of_the_data_is_refused(tmp_path: Path) -> None:
    file = write_seed(tmp_path / "dense") / "evaluations.jsonl"
    file.write_text(file.read_text().replace("validation", "training", 1))
    with pytest.raises(RunError, match=r'line 1 is not a record of a run: "training" is not a part of the data'):
        find_runs([tmp_path])


def test_real_ranks_share_a_machine_and_simulated_ones_do_not(tmp_path: Path) -> None:
    write_seed(tmp_path / "real")
    simulated = {"backend": "simulated", "ranks_per_host": 1}
    links = {"simulate_ranks": 4, "link": "100mbit"}
    write_seed(tmp_path / "simulated" / "one", options=links, ms=50.0, **simulated)
    real, predicted, both = (section_of(place) for place in (tmp_path / "real", tmp_path / "simulated", tmp_path))
    says = "the time of computation is measured, and the time of exchanges is predicted for 100mbit"
    assert "share one machine" in " ".join(real.notes())
    assert says not in " ".join(real.notes())
    assert says in " ".join(predicted.notes())
    assert "share one machine" not in " ".join(predicted.notes())
    assert says in figures_of(predicted)["accuracy-seconds"][0]
    assert "The 4 real ranks of a run share one machine" in " ".join(both.notes())
    assert says in " ".join(both.notes())
    assert [row["series"] for row in both.series] == ["none (ranks=4)", "none (link=100mbit, ranks=4 simulated)"]
    assert [row["speed_vs_baseline"] for row in both.rows] == [1.0, 1.0], "each has its own baseline"
    write_seed(tmp_path / "simulated" / "two", options={**links, "link": None}, **simulated)
    assert f"{says} and a link that takes no time" in " ".join(section_of(tmp_path / "simulated").notes())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds of `hvdcomp train` on simulated ranks, to a target."""
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    folder = tmp_path_factory.mktemp("trained")
    for seed in ("0", "1"):
        words = (
            "train --simulate-ranks 2 --link 100mbit --model mlp --data digits --validation-samples 200 --epochs 1 "
            "--until accuracy=0.5 --evaluate-every 5 --compression topk:ratio=0.01 --no-progress --seed"
        )
        result = CliRunner().invoke(main, [*words.split(), seed, "--output", str(folder / f"topk-{seed}")])
        assert result.exit_code == 0, result.output
    return folder


def test_two_seeds_that_were_really_trained(trained: Path, tmp_path: Path) -> None:
    result = report(trained, "--output", tmp_path / "out")
    assert result.exit_code == 0, result.output
    (row,) = json.loads((tmp_path / "out/report.json").read_text())["series"]
    summaries = [json.loads((trained / f"topk-{seed}" / "summary.json").read_text()) for seed in (0, 1)]
    assert (row["seeds"], row["reached"], row["target"]) == (2, 2, "accuracy=0.5")
    for key, name in (("loss", "loss"), ("quality", "accuracy"), ("trained_seconds", "trained_seconds")):
        assert row[key] == pytest.approx(np.mean([summary[name] for summary in summaries]))
    assert row["steps_to_target"] == np.mean([summary["until"]["step"] for summary in summaries])
    assert row["bytes_to_target"] == np.mean([summary["until"]["bytes_sent"] for summary in summaries])
    said = " ".join(result.output.split())
    assert "the time of computation is measured, and the time of exchanges is predicted for 100mbit" in said
    assert "share one machine" not in result.output
    page = (tmp_path / "out/report.html").read_text()
    assert re.search(r'data-heading="Target reached" class="number">2 of 2<small>accuracy=0.5</small>', page)
    for against in ("bytes", "seconds"):
        assert (tmp_path / "out" / f"1-accuracy-{against}.png").read_bytes().startswith(b"\x89PNG")
        assert re.search(rf"<img[^>]*alt=\"Validation accuracy \(%\) against the [^\"]*{against}", page)
