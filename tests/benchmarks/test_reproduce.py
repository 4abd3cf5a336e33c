"""`benchmarks.reproduce`: every table and figure has a row, and what is said of it follows from its numbers."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks.reproduce import (
    PAPERS,
    Curve,
    Outcome,
    Row,
    accordion,
    artifacts,
    bagpipe,
    compared,
    controls,
    counted,
    gravac,
    predicted,
    read,
    run,
    timed,
    workloads,
    write,
)
from benchmarks.reproduce.__main__ import main
from benchmarks.reproduce.compared import Compared, Trained, Trainings
from benchmarks.reproduce.outcome import AS_PUBLISHED, IN_PART, NOT_CONFIRMED, NOT_HELD, NOT_SHOWN, VERDICTS
from benchmarks.reproduce.page import number, page, rows_as_csv
from benchmarks.reproduce.workloads import Workload
from hvdcomp.tools.train.options import TrainingOptions
from hvdcomp.tools.train.ranks import RunRefused

pytest.importorskip("torch")

TABLES_AND_FIGURES = {"accordion": (10, 20), "utility": (3, 21), "gravac": (4, 11), "bagpipe": (0, 0)}
"""How many of them each paper has."""
IMAGES, TEXT = (workloads.small(kind, quick=True) for kind in ("images", "text"))
CHEAP = [
    name for name, one in artifacts().items() if one.counterpart in {**predicted.COUNTERPARTS, **counted.COUNTERPARTS}
]


def test_a_training_that_diverged_is_as_good_as_guessing() -> None:
    """Its summary may have the accuracy of an earlier epoch."""
    assert compared._quality({"status": "diverged", "accuracy": 0.9}, IMAGES.chance) == 10
    assert compared._quality({"status": "diverged", "accuracy": None}, IMAGES.chance) == 10
    assert compared._quality({"status": "finished", "accuracy": 0.9}, IMAGES.chance) == 90
    assert compared._quality({"status": "diverged", "perplexity": None}, TEXT.chance) == 256
    assert compared._quality({"status": "finished", "perplexity": 7.0}, TEXT.chance) == 7


@pytest.mark.parametrize("paper", PAPERS)
def test_every_table_and_figure_has_an_entry(paper: str) -> None:
    tables, figures = TABLES_AND_FIGURES[paper]
    wanted = {f"{paper}-table{n + 1}": f"table {n + 1}" for n in range(tables)}
    wanted |= {f"{paper}-fig{n + 1}": f"figure {n + 1}" for n in range(figures)}
    there = {name: one.place for name, one in artifacts().items() if one.paper == paper}
    assert {name: there.get(name) for name in wanted} == wanted


@pytest.mark.parametrize("name", artifacts())
def test_an_entry_has_a_counterpart_or_says_why_not(name: str) -> None:
    artifact = artifacts()[name]
    known = (module.COUNTERPARTS for module in (counted, predicted, timed, accordion, gravac))
    assert artifact.shows
    if artifact.counterpart is None:
        assert artifact.why
    else:
        assert artifact.why is None
        assert sum(artifact.counterpart in one for one in known) == 1


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of all artifacts, some of which rest on the same."""
    return tmp_path_factory.mktemp("trainings")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in CHEAP else pytest.mark.thorough)
        for name, one in artifacts().items()
        if one.counterpart
    ],
)
def test_what_has_a_counterpart_is_found_and_kept(
    name: str, trainings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Together, that is `python -m benchmarks.reproduce --quick` of everything, with one seed in place of three."""
    if name not in CHEAP:
        pytest.importorskip("mnist1d", reason="mnist1d is not installed: pip install 'hvdcomp[mnist1d]'")
    monkeypatch.setattr(compared, "QUICK_SEEDS", 1)
    found = run(artifacts()[name], quick=True, runs=tmp_path if name in CHEAP else trainings)
    assert found.rows
    assert found.verdict in VERDICTS
    assert found.about["command"] == f"python -m benchmarks.reproduce {name} --quick"
    numbers = [row.ours for row in found.rows if row.ours is not None]
    assert all(map(math.isfinite, numbers))
    for row in found.rows:
        if row.share is not None:
            assert row.holds is None, "a control says nothing of the paper"
            assert 0.8 <= row.share <= 1.25, row.note
    again = read(write(found, tmp_path))
    assert (again.verdict, [row.what for row in again.rows]) == (found.verdict, [row.what for row in found.rows])
    assert list(tmp_path.iterdir()) == [tmp_path / f"{name}.json"], "no training was made"


@pytest.mark.parametrize("name", CHEAP)
def test_what_the_page_has_of_counts_and_predictions_is_what_comes_of_them_today(name: str, tmp_path: Path) -> None:
    shown = read(Path(__file__).parents[2] / "docs" / "reproduction" / f"{name}.json")
    found = read(write(run(artifacts()[name], quick=True, runs=tmp_path), tmp_path))
    assert found.verdict == shown.verdict
    numbers = [[(row.what, row.ours) for row in outcome.rows if row.half is None] for outcome in (shown, found)]
    trained = {row.what for row in shown.rows if row.half is not None}
    assert [row for row in numbers[1] if row[0] not in trained] == numbers[0]


@pytest.mark.parametrize(("number", "count"), [(1, 6), (2, 4), (3, 6), (4, 4), (5, 6), (6, 6)])
def test_floats_of_fixed_levels_are_those_of_accordions_tables(number: int, count: int) -> None:
    """From shapes alone: PowerSGD's to the digits that are printed."""
    rows = counted.floats_sent(artifacts()[f"accordion-table{number}"])
    assert len(rows) == count
    for row in rows:
        other = number == 1 and row.what.startswith("SENet")  # what the authors sent of it, shapes do not say
        assert row.holds is not other, row
        if number < 3 and not other:
            assert row.ours == pytest.approx(row.published, abs=0.1), row


def test_shapes_are_those_of_the_papers() -> None:
    for name, unknown in (("accordion-table8", []), ("accordion-table9", ["SENet"])):
        rows = counted.parameters(artifacts()[name]).rows
        assert len(rows) == 6
        assert [row.what for row in rows if row.ours is None] == unknown
        assert all(row.ours == row.published for row in rows if row.ours is not None)


def test_rows_that_are_looked_up_again_are_counted() -> None:
    batches = [[[1, 2, 3], [3, 4]], [[3, 5], [1, 6]], [[1, 2], [9]]]
    arrays = [[np.array(keys) for keys in batch] for batch in batches]
    assert bagpipe.urgent_share(arrays) == (3 + 1) / (5 + 4)  # 1 and 3, 3; then 1
    assert bagpipe.hit_share(arrays, 1) == (2 + 1) / (4 + 3)  # 1 and 3; then 1
    assert bagpipe.hit_share(arrays, 2) == 2 / 3  # 1 and 2


def test_looking_ahead_is_faster_but_not_as_much_as_bagpipe() -> None:
    outcome = run(artifacts()["bagpipe-abstract"], quick=True, runs=Path())
    found = {row.what: row.ours for row in outcome.rows}
    assert outcome.verdict == IN_PART
    assert 0.85 < found["share of accesses to 1 % of the rows"] < 0.95
    hits = outcome.curves["share of rows in the cache"][0].y
    assert list(hits) == sorted(hits)
    assert 1.2 < found["times as fast by looking ahead, of a step of which embeddings are 75%"] < 2


def _verdict(*rows: Row) -> str:
    return Outcome(name="a", rows=rows).verdict


def test_the_verdict_follows_from_the_rows() -> None:
    yes, no, silent = (Row(what="a", published=1, ours=1, holds=holds) for holds in (True, False, None))
    left_open = Row(what="a", published=1, ours=1, open=True)
    lacking = Row(what="a", published=1)
    assert _verdict(yes, silent) == AS_PUBLISHED
    assert _verdict(yes, no) == _verdict(yes, left_open) == _verdict(yes, lacking) == IN_PART
    assert _verdict(no, silent) == _verdict(no, left_open) == NOT_HELD
    lost, kept = (Row(what="a", published=1, ours=1, holds=holds, main=True) for holds in (False, True))
    assert _verdict(yes, lost) == NOT_HELD
    unsaid = Row(what="a", published=1, ours=1, open=True, main=True)
    assert _verdict(yes, lost, kept) == _verdict(no, kept) == _verdict(kept, unsaid) == IN_PART
    assert _verdict(lost, unsaid) == NOT_HELD
    assert _verdict(left_open, silent) == _verdict(yes, unsaid) == _verdict(no, unsaid) == NOT_CONFIRMED
    assert _verdict() == _verdict(silent) == NOT_SHOWN


def _runs(*qualities: float, training: str = "images compression=none") -> list[Trained]:
    return [Trained(training, quality, floats=100.0, seconds=2.0) for quality in qualities]


@pytest.mark.parametrize(
    ("claim", "better", "holds"),
    [
        ("worse", (-5, -4, -6), True),
        ("worse", (5, 4, 6), False),
        ("worse", (-5, 4, 0), None),
        ("better", (5, 4, 6), True),
        ("better", (-5, -4, -6), False),
        ("no loss", (0, 0.1, -0.1), True),
        ("no loss", (5, 4, 6), True),
        ("no loss", (-5, -4, -6), False),
        ("no loss", (-3, 3, 0), None),
        ("no loss", (-1.6, -1.3, -1.0), None),
        ("no loss", (-1.6, -1.5, -1.55), False),
        ("no loss", (-0.8, -0.7, -0.75), True),
        ("", (5, 4, 6), None),
    ],
)
def test_a_claim_of_quality_holds_if_its_interval_says_so(claim: str, better: tuple[float, ...], holds: bool) -> None:
    found = Compared(IMAGES, {"a": _runs(*(80 + one for one in better)), "b": _runs(80, 80, 80)})
    row = found.gain("a", "b", claim)
    assert row.ours == pytest.approx(sum(better) / 3)
    assert row.holds is holds
    assert row.open == (holds is None and claim != "")


def test_a_claim_with_a_margin_of_its_own_is_judged_by_it() -> None:
    found = Compared(IMAGES, {"a": _runs(77.7, 77.6, 77.5), "b": _runs(80, 80, 80)})
    row = found.gain("a", "b", "no loss", margin=2.7)
    assert row.what == "a - b (points: no more than 2.7 lost)"
    assert row.holds is True
    assert found.gain("a", "b", "no loss", margin=2.4).open
    assert found.gain("a", "b", "no loss", margin=2.1).holds is False


def test_a_row_names_its_trainings_and_what_only_guesses() -> None:
    a, b = "images compression=none lr=9", "images compression=none"
    found = Compared(IMAGES, {"a": _runs(9.8, 10.3, training=a), "b": _runs(80, 80, training=b)})
    row = found.gain("a", "b", "no loss", note="said before")
    assert row.trainings == (a, b)
    assert row.note == "said before; a: no better than guessing at the end"
    assert found.quality("a").trainings == (a,)
    for other in (found.times_as_fast("a", "b"), found.times_fewer_floats("a", "b")):
        assert other.trainings == (a, b)
    text = Compared(TEXT, {"a": _runs(256), "b": _runs(20)})
    assert text.is_guessing("a")
    assert not text.is_guessing("b")


def test_a_row_is_judged_by_its_numbers_whatever_a_file_says(tmp_path: Path) -> None:
    """So that a change of the rules needs no new trainings."""
    row = Row(what="a - b (points: no more than 1 lost)", ours=-1.34, half=0.57, more_than=-1.0, main=True)
    file = write(Outcome(name="accordion-fig1", rows=[row]), tmp_path)
    content = json.loads(file.read_text())
    assert (content["verdict"], content["rows"][0]["open"]) == (NOT_CONFIRMED, True)
    content["rows"][0] |= {"holds": False, "open": False}
    file.write_text(json.dumps(content))
    assert read(file).rows[0].open
    assert read(file).verdict == NOT_CONFIRMED


def test_of_perplexity_less_is_better() -> None:
    found = Compared(TEXT, {"a": _runs(10, 10.1, 9.9), "b": _runs(20, 20, 20)})
    assert found.gain("a", "b", "better").holds is True
    assert found.gain("b", "a", "worse").holds is True


def test_what_a_policy_recovers_is_its_share_of_the_gap() -> None:
    found = Compared(IMAGES, {"low": _runs(90, 92), "high": _runs(80, 82), "a": _runs(85, 88)})
    assert found.recovered("a").ours == pytest.approx(55)
    assert found.recovered("low", 100).holds is None
    assert Compared(IMAGES, {"low": _runs(80), "high": _runs(80), "a": _runs(85)}).recovered("a").ours is None


class _Linear(Trainings):
    """Trainings that send 10 floats of small tensors, and 1000 times the ratio, or 100 times the rank, besides."""

    def train(self, workload: Workload, compression: str, policy: str | None = None, *_: Any, **changes: Any) -> Any:
        name, _, level = compression.partition("=")
        if policy is not None:  # ranks 1 and 4, by the steps that it says
            first, second = (int(step) for step in policy.rpartition("=")[2].split("|"))
            floats = 10 + 100 + 300 * (second - first) / 1000
        elif compression == "none":
            floats = 1010 * 50 / (2 * changes["batch_size"])
        else:
            floats = 10 + float(level) * (100 if name.endswith("rank") else 1000)
        return [Trained(compression, 80, floats, 2.0)]


def test_controls_send_as_many_floats_as_the_policy(tmp_path: Path) -> None:
    t = _Linear(tmp_path, quick=True)
    steps = [0.0] * 1000

    def trained(floats: float) -> list[Trained]:
        return [Trained("a", 80, floats, 2.0, sent=steps)]

    ranks = Compared(IMAGES, {"low": trained(410), "high": trained(110), "p": trained(185), "more": trained(820)})
    for policy, label in (("p", "low in mid-training like p"), ("more", "fixed rank like more")):
        beside, row = controls.of_levels(t, ranks, policy, "powersgd")
        assert beside.floats(label) == pytest.approx(ranks.floats(policy), rel=0.02)
        assert row.control
        assert row.share == pytest.approx(1, rel=0.02)
    ratios = Compared(IMAGES, {"low": trained(60), "high": trained(12), "p": trained(20)})
    beside, _ = controls.of_levels(t, ratios, "p", "topk")
    assert beside.floats("fixed ratio like p") == pytest.approx(20, rel=0.01)
    sparse = Compared(IMAGES, {"dense": trained(1010), "p": trained(15)})
    beside, row = controls.of_sparsity(t, sparse, "p", "dgc")
    assert beside.floats("fixed ratio like p") == pytest.approx(15, rel=0.01)
    assert "`dgc:ratio=0.005` sends 100% of p's floats" in row.note
    nothing_saved = Compared(IMAGES, {"dense": trained(1010), "p": trained(1010)})
    assert controls.of_sparsity(t, nothing_saved, "p", "randomk")[0].floats("fixed ratio like p") == 1010
    batches = Compared(IMAGES, {"small": trained(1010), "p": trained(400)})
    beside, _ = controls.of_batch_size(t, batches, "p", rate=0.05)
    assert beside.floats("fixed batch like p") == pytest.approx(400, rel=0.02)


@pytest.mark.parametrize(
    "name", [name for name, one in artifacts().items() if one.counterpart in accordion.COUNTERPARTS]
)
def test_accordions_own_trainings_are_those_of_its_table_7(name: str, tmp_path: Path) -> None:
    artifact = artifacts()[name]
    kind = artifact.settings.get("workload", "images")
    workload = Trainings(tmp_path, quick=False, data=tmp_path).of(artifact, kind)
    options = TrainingOptions(**workload.options, simulate_ranks=workload.ranks).resolved()
    assert options.batch_size is not None
    if kind == "images":
        assert (options.epochs, options.milestones, options.batch_size * workload.ranks) == (300, (150, 250), 512)
        assert (options.lr, options.warm_up, options.weight_decay) == (0.4, 5, 5e-4)
        assert options.data == artifact.settings.get("data", "cifar10")
        assert options.model == {"VGG-19bn": "vgg19_bn"}.get(artifact.settings.get("network", ""), "resnet18")
    else:
        assert (options.epochs, options.milestones, options.batch_size * workload.ranks) == (90, (60, 80), 80)
        assert (options.data, options.lr) == ("wikitext2", 10)
    assert options.nesterov
    assert "interval=10" in workload.accordion("powersgd")
    assert Trainings(tmp_path, quick=False, data=tmp_path).of(artifacts()["gravac-fig7"]) == workloads.small(
        "images", quick=False
    ), "GraVAC's trainings are small ones"


@pytest.mark.thorough
def test_trainings_on_published_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compared, "QUICK_SEEDS", 2)
    data = tmp_path / "wikitext-2"
    data.mkdir()
    text = " the cat <unk> on the mat , and the dog at the door .\n" * 2000
    for part in ("train", "test", "valid"):
        (data / f"wiki.{part}.tokens").write_text(text)
    found = tmp_path / "found"
    words = ["accordion-fig11", "--quick", "--data-dir", str(tmp_path), "--output", str(found)]
    done = CliRunner().invoke(main, [*words, "--epochs", "3"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    outcome = read(found / "accordion-fig11.json")
    assert "an LSTM on WikiText-2, 3 epochs, 4 simulated ranks, 2 seeds" in outcome.ours
    assert outcome.about["command"].endswith(f"accordion-fig11 --quick --data-dir {tmp_path} --epochs 3")
    lacking = CliRunner().invoke(main, ["accordion-fig9", *words[1:], "--epochs", "1"])
    assert lacking.exit_code == 1
    assert "contains no CIFAR-100" in lacking.output


def test_epochs_need_data() -> None:
    done = CliRunner().invoke(main, ["accordion-fig9", "--epochs", "3"])
    assert (done.exit_code, "with --data-dir" in done.output) == (2, True)


def test_numbers_are_shown_with_what_they_mean() -> None:
    assert [number(one) for one in (None, 0, 11173962, 4.17e11, 2418.444, 0.372, 46)] == [
        "-", "0", "11,173,962", "4.17e+11", "2,418", "0.37", "46",
    ]  # fmt: skip


def test_the_page_has_every_name_and_first_what_does_not_hold() -> None:
    about = {"command": "python -m benchmarks.reproduce utility-fig9", "commit": "abc"}
    found = {
        name: Outcome(name=name, rows=[Row(what="a", published=2, ours=1, holds=holds)], about=about)
        for name, holds in (("utility-fig2", True), ("gravac-fig3", False))
    }
    text, rows = page(found), list(csv.DictReader(io.StringIO(rows_as_csv(found))))
    for name in artifacts():
        assert f"`{name}`" in text or f"[{name}](" in text
    places = [text.index(name) for name in ("[gravac-fig3]", "`utility-fig2`", "`accordion-table1`")]
    assert places == sorted(places)
    assert text.index("## Not run yet") < text.index("`accordion-table1`") < text.index("## Cannot be shown here")
    assert {row["name"] for row in rows} == artifacts().keys()
    (sketch,) = [row for row in rows if row["name"] == "utility-fig1"]
    assert "it is a sketch" in sketch["why"]


def test_the_page_tells_what_decides_and_the_csv_all_rows() -> None:
    rows = [
        Row(what="main", published=1, ours=2, holds=False, main=True),
        Row(what="unsure", published=1, ours=2, half=3, open=True, main=True),
        Row(what="lost", published=1, ours=2, holds=False),
        Row(what="beside", ours=2, note="the control: levels=1|4"),
        Row(what="held", published=1, ours=1, holds=True),
    ]
    about = {"command": "python -m benchmarks.reproduce utility-fig2", "commit": "abc"}
    text = page({"utility-fig2": Outcome(name="utility-fig2", rows=rows, about=about)})
    assert " | main | 1 | 2 | - |" in text
    assert " | unsure | 1 | 2 ± 3 (open) | - |" in text
    assert not any(f" | {what} | " in text for what in ("lost", "beside", "held"))
    found = {"utility-fig2": Outcome(name="utility-fig2", rows=rows[2:], about=about)}
    assert re.search(r"\(reproduction/utility-fig2.json\) \| 1 \| 1 \| 0 \|$", page(found), re.MULTILINE)
    told = [row for row in csv.DictReader(io.StringIO(rows_as_csv(found))) if row["name"] == "utility-fig2"]
    assert [row["what"] for row in told] == ["lost", "beside", "held"]
    assert told[1]["note"] == "the control: levels=1|4"
    assert told[0]["command"] == about["command"]


def test_the_page_counts_distinct_trainings() -> None:
    """Three results of two comparisons are no three findings."""
    pairs = ("images a", "images b"), ("images c|d", "images b")
    rows = [Row(what="a", ours=-1.0, half=0.5, more_than=-1.0, trainings=pair) for pair in pairs]
    names = {"accordion-fig1": rows[:1], "accordion-fig2": rows[:1], "accordion-table1": rows}
    text = page({name: Outcome(name=name, rows=found) for name, found in names.items()})
    assert "These 4 rows use 2 comparisons of 3 distinct training runs of 1 network." in text
    assert re.search(r"^\| Agarwal et al. 2021, Accordion .* \| 3 \|$", text, re.MULTILINE)
    section = text[text.index("## Not confirmed by a small training") : text.index("## Not run yet")]
    numbers = [line.split(" | ")[-1].rstrip(" |") for line in section.splitlines() if "-1 ± 0.50 (open)" in line]
    assert numbers == ["1", "2", "1", "1"], "in the order of the papers"
    assert "| 2 | `images c\\|d` | `images b` |" in text
    assert "Agarwal et al. 2022" in text
    told = list(csv.DictReader(io.StringIO(rows_as_csv({"accordion-fig1": Outcome(name="a", rows=rows)}))))
    assert told[0]["trainings"] == "images a; images b"


def test_stored_rows_are_judged_by_their_labels() -> None:
    """What is written beside a number is what it was judged by."""
    labels = 0
    for file in sorted((Path(__file__).parents[2] / "docs" / "reproduction").glob("*.json")):
        for row in read(file).rows:
            if (lost := re.search(r"no more than ([\d.]+) lost", row.what)) is None:
                continue
            assert row.ours is not None
            assert row.half is not None
            labels += 1
            least, most = row.ours - row.half + float(lost[1]), row.ours + row.half + float(lost[1])
            assert (row.holds, row.open) == (
                (True, False) if least > 0 else (False, False) if most < 0 else (None, True)
            )
    assert labels > 30


def test_the_page_has_each_control_once() -> None:
    control = {"control": "`topk:ratio=0.1`", "share": 0.99}
    rows = [
        Row(what="LSTM: A - fixed (%)", ours=2.0, half=1.0, **control),
        Row(what="B - fixed (points)", ours=-2.0, half=1.0, **control),
        Row(what="C - fixed (points)", ours=2.0, half=3.0, **control),
        Row(what="D - fixed (points)", ours=9.0, half=1.0, **{**control, "share": 0.84}),
    ]
    text = page({name: Outcome(name=name, rows=rows) for name in ("gravac-fig7", "gravac-fig8")})
    assert "better than the control in 1 of 3 comparisons, and worse in 1." in text
    assert text.count("| A - fixed (%) | `topk:ratio=0.1` | 99% | 2 ± 1 | 5 |") == 1
    assert "| C - fixed (points) | `topk:ratio=0.1` | 99% | 2 ± 3 | 25 |" in text
    assert text.count("| D - fixed (points) | `topk:ratio=0.1` | 84% | 9 ± 1 | 5 |") == 1
    assert "Policies compared" not in page({"gravac-fig7": Outcome(name="gravac-fig7", rows=[Row(what="a", ours=1)])})


def test_the_page_in_docs_is_that_of_the_results_beside_it() -> None:
    docs = Path(__file__).parents[2] / "docs"
    found = {file.stem: read(file) for file in sorted((docs / "reproduction").glob("*.json"))}
    assert found.keys() <= artifacts().keys()
    for name, outcome in found.items():
        stored = json.loads((docs / "reproduction" / f"{name}.json").read_text())
        assert stored["verdict"] == outcome.verdict
        answers = [(row["holds"], row["open"]) for row in stored["rows"]]
        assert answers == [(row.holds, row.open) for row in outcome.rows]
        assert all(row.trainings for row in outcome.rows if row.half is not None)
    assert (docs / "reproduction.md").read_text() == page(found)
    assert (docs / "reproduction.csv").read_text() == rows_as_csv(found)


def test_the_command_lists_prints_and_writes(tmp_path: Path) -> None:
    listed = CliRunner().invoke(main, [], env={"COLUMNS": "200"})
    assert listed.exit_code == 0
    assert all(name in listed.output for name in artifacts())
    folder = tmp_path / "found"
    words = ["utility-fig9", "utility-fig1", "--output", str(folder), "--page", str(tmp_path / "page.md")]
    done = CliRunner().invoke(main, words, env={"COLUMNS": "200"}, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "batch 16: PowerSGD rank 4 is faster by (%)" in done.output
    assert "utility-fig9: in part" in done.output
    assert "utility-fig1: cannot be shown here, because it is a sketch" in done.output
    assert (folder / "utility-fig9.png").read_bytes().startswith(b"\x89PNG")
    assert "[utility-fig9](" in (tmp_path / "page.md").read_text()
    assert "\nutility-fig9," in (tmp_path / "page.csv").read_text()


def test_an_unknown_name_is_refused_with_the_way_out() -> None:
    done = CliRunner().invoke(main, ["accordion-fig99"])
    assert (done.exit_code, "`python -m benchmarks.reproduce` lists all names" in done.output) == (2, True)


def test_curves_without_a_number_are_drawn(tmp_path: Path) -> None:
    from benchmarks.reproduce.plot import draw

    curves = {"y": [Curve(label="a", x=[1, 2], y=[None, 3.0])], "bars": [Curve(label="b", x=["one"], y=[None])]}
    draw(Outcome(name="a", curves=curves, x="x"), "title", tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000


@pytest.mark.thorough
def test_a_full_run_compares_all_pairs_of_factor_and_gain(trainings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mnist1d", reason="mnist1d is not installed: pip install 'hvdcomp[mnist1d]'")
    monkeypatch.setattr(compared, "SEEDS", 1)
    short = workloads.small("images", quick=True)
    monkeypatch.setattr(workloads, "small", lambda kind, quick: short)
    found = run(artifacts()["gravac-fig10"], quick=False, runs=trainings)
    others = [row.what for row in found.rows if "factor=" in row.what]
    for pair in ("elements, gain=error_feedback", "bytes, gain=raw", "bytes, gain=error_feedback"):
        assert len([what for what in others if what.startswith(f"GraVAC, factor={pair}")]) == 2
    assert len(others) == 6


@pytest.mark.thorough
def test_a_training_is_made_once_and_its_policy_is_seen(trainings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mnist1d", reason="mnist1d is not installed: pip install 'hvdcomp[mnist1d]'")
    monkeypatch.setattr(compared, "QUICK_SEEDS", 1)
    found = run(artifacts()["accordion-fig18"], quick=True, runs=trainings)
    (rank, *_) = found.curves["rank"]
    assert set(rank.y) == {1.0, 4.0}, "Accordion chose both levels"
    for file in trainings.rglob("run.json"):
        file.write_text(json.dumps({**json.loads(file.read_text()), "commit": "then"}))
    again = run(artifacts()["accordion-fig18"], quick=True, runs=trainings)
    assert again.rows == found.rows
    assert again.about["commit"] == "then"


def test_a_training_that_fails_is_named_with_its_log(tmp_path: Path) -> None:
    with pytest.raises(RunRefused, match=r"ratio=2.* seed 0: .*ratio=2.*log\.txt"):
        Trainings(tmp_path, quick=True).train(workloads.small("text", quick=True), "topk:ratio=2", seeds=1)
