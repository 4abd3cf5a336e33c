"""`hvdcomp advise --map` and `--optimizer`, the verdict in words, and the count beside the encode times of 2021."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.times import other_card
from hvdcomp.compressors.evidence import DIVERGED, lost_with
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.perfmodel import Adviser, Calibration, EncodeTime, Setting, load, presets, quality, save
from hvdcomp.perfmodel.advice import FREE
from hvdcomp.perfmodel.cards import CARDS
from hvdcomp.perfmodel.count import OF_2021, counts
from hvdcomp.perfmodel.kernel_times import KERNELS, encode_time, host_s
from hvdcomp.perfmodel.map import MAP_RANKS, MAP_RATES, cells
from hvdcomp.perfmodel.quality import HARMLESS
from hvdcomp.perfmodel.rates import GBPS
from tests.perfmodel.test_advise import DOCS, as_json, calibrated, error, named, run

TIMES = {"randomk:ratio=0.01": EncodeTime(0.07), "int8": EncodeTime(0.08)}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "mine.json"
    save(calibrated(encode=TIMES), file)
    return file


# The map --------------------------------------------------------------------------------------------------------------


def test_a_cell_is_what_advise_says_of_its_set_up() -> None:
    known = calibrated(encode=TIMES)
    rows = list(cells(known, specs=list(TIMES)))
    assert [(row["ranks"], row["gbps"]) for row in rows] == [(ranks, rate) for ranks in MAP_RANKS for rate in MAP_RATES]
    adviser = Adviser(known, specs=list(TIMES))
    for row in rows:
        advice = adviser.advise(Setting(row["ranks"], row["gbps"] * GBPS))
        assert row["pays"] == (advice.take not in FREE)
        fastest = min(set(advice.methods) - set(FREE), key=lambda spec: advice.methods[spec].step_s)
        assert row["method"] == fastest
        free = advice.methods[advice.free or ""].step_s
        assert row["gain_percent"] == pytest.approx(100 * (free / advice.methods[fastest].step_s - 1), abs=0.06)
    assert {row["pays"] for row in rows} == {True, False}
    assert any(0 < row["gain_percent"] < 100 * adviser.error for row in rows)


def test_the_map_is_drawn_and_written(file: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "here.png"
    result = run("--map", "--calibration", file, "--output", picture, "--world-size", "8", *named(*TIMES), width=120)
    assert result.exit_code == 0, result.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    rows = list(csv.DictReader(picture.with_suffix(".csv").read_text().splitlines()))
    assert [row["gbps"] for row in rows] == list(map(str, MAP_RATES))
    line = next(line for line in result.stdout.splitlines() if line.lstrip().startswith("m "))
    assert f"{1 + float(rows[0]['gain_percent']) / 100:.1f} randomk" in line
    assert line.rstrip().endswith("-"), "at 400 Gb/s nothing pays"


def test_what_a_map_cannot_use_is_refused(file: Path) -> None:
    assert "--map uses a fixed list of set-ups: leave out --model" in error("--map", "--model", "m")
    assert "unknown compressor 'foo'" in error("--map", "--calibration", file, "--compressor", "foo")
    missing = file.parent / "no" / "x.png"
    assert "cannot be written: No such file" in error("--map", "--calibration", file, "--output", missing)


# The optimizer --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("said", "known"), [("AdamW", "Adam"), ("sgd", "SGD"), ("muon", "Muon")])
def test_an_optimizer_leaves_methods_that_keep_the_quality(said: str, known: str) -> None:
    report = as_json("--calibration", "h100x8", "--model", "dlrm", "--optimizer", said)
    compared = {spec: row for spec, row in report["methods"].items() if spec not in FREE}
    assert {row["why_not"] is None for row in compared.values()} == {True, False}
    for spec, row in compared.items():
        lost = lost_with(parse_compressor(spec), known)
        assert (row["why_not"] is None) == (lost is not None and lost <= HARMLESS)
    assert report["optimizer"] == known
    assert compared["topk:ratio=0.01"]["why_not"].startswith("lost quality in hvdcomp's own training runs: ")
    assert f"with {known}" in compared["dgc:ratio=0.01"]["why_not"]


def test_if_no_compressor_is_left_that_is_said(file: Path) -> None:
    asked = ("--calibration", file, "--compressor", "randomk:ratio=0.01", "--optimizer", "adam")
    report = as_json(*asked)
    assert report["methods"]["randomk:ratio=0.01"]["why_not"]
    assert {report["winner"], report["take"], *report["alike"]} <= set(FREE)
    words = " ".join(run(*asked).stdout.split())
    assert "None of the compressors that can be compared lost at most 2% of quality with Adam" in words


# Without an optimizer -------------------------------------------------------------------------------------------------


def test_a_method_that_loses_much_is_listed_and_not_recommended(tmp_path: Path) -> None:
    """randomk is the fastest of all, and lost 40 % with SGD and 35 % with Adam; signsgd was never trained; terngrad
    lost 8 % with Adam, and nothing with SGD."""
    file, specs = tmp_path / "mine.json", ("randomk:ratio=0.01", "signsgd", "terngrad")
    save(calibrated(encode={spec: EncodeTime(0.01 * place) for place, spec in enumerate(specs)}), file)
    asked = ("--calibration", file, "--world-size", "2", "--bandwidth", "1")
    report = as_json(*asked)
    randomk, signsgd, terngrad = (report["methods"][spec] for spec in specs)
    assert randomk["step_ms"] == min(row["step_ms"] for row in report["methods"].values())
    assert (report["winner"], report["take"]) == ("terngrad", "terngrad")
    assert not {"randomk:ratio=0.01", "signsgd"} & set(report["alike"])
    assert terngrad["why_not"] is None
    assert signsgd["why_not"] == "not included in hvdcomp's own training runs"
    assert randomk["why_not"] == "lost quality in hvdcomp's own training runs: 40.5% with SGD, 35.3% with Adam"
    few, whole = (run(*asked, *more, width=120).stdout for more in ((), ("--all",)))
    assert "The fastest compressor is terngrad:" in few
    assert "name it with --optimizer" in few
    assert "randomk" not in few
    assert f"* Not recommended: randomk:ratio=0.01 ({randomk['why_not']})" in whole
    assert [line for line in whole.splitlines() if line.split()[:2] == ["randomk:ratio=0.01", "*"]]
    (row, *_) = cells(load(str(file)), (2,))
    assert row["method"] == "terngrad"
    (counted,) = counts(load(str(file)))
    assert counted["often"].startswith("terngrad")
    chosen = as_json(*asked, "--compressor", "randomk:ratio=0.01", "--compressor", "terngrad")
    assert chosen["winner"] == "randomk:ratio=0.01", "whoever names it knows what it costs"


@pytest.mark.parametrize(
    ("losses", "reason"),
    [
        ({"SGD": 0.09, "Adam": 0.4}, None),
        ({"SGD": 0.4, "Adam": -0.01}, None),
        ({"SGD": 0.1, "Adam": 0.4}, "lost quality in hvdcomp's own training runs: 10.0% with SGD, 40.0% with Adam"),
        ({"Adam": DIVERGED}, "lost quality in hvdcomp's own training runs: diverged with Adam"),
        ({"Muon": 0.0}, "not included in hvdcomp's own training runs"),
    ],
)
def test_one_common_optimizer_is_enough(
    losses: dict[str, float], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quality, "lost_with", lambda _compressor, optimizer: losses.get(optimizer))
    assert quality.why_not(parse_compressor("int4")) == reason


# The verdict ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("encode_s", "answer", "over_dense", "over_fp16"),
    [
        (0.05, "Compression makes training faster here", "1.92 times faster than dense", "1.28 times faster than fp16"),
        (
            0.09,
            "makes training faster here only in comparison with dense gradients",
            "1.53 times faster than dense",
            "1.02 times faster than fp16 gradients, which is within",
        ),
        (0.5, "does not make training faster", "2.0 times slower than dense", "3.0 times slower than fp16 gradients."),
    ],
)
def test_the_verdict_comes_first_and_is_of_each_rival(
    encode_s: float, answer: str, over_dense: str, over_fp16: str, tmp_path: Path
) -> None:
    """At 4 Gb/s dense takes 300 ms, fp16 200, and signsgd 106 + its encode time."""
    file = tmp_path / "here.json"
    save(calibrated(encode={"signsgd": EncodeTime(encode_s)}), file)
    for more in ((), ("--all",)):
        asked = ("--calibration", file, "--world-size", "2", "--bandwidth", "4", "--compressor", "signsgd", *more)
        lines = run(*asked, width=120).stdout.splitlines()
        first = next(place for place, line in enumerate(lines) if answer in line)
        assert first <= 1
        assert "The fastest compressor is signsgd:" in lines[first]
        assert over_dense in lines[first + 1]
        assert over_fp16 in lines[first + 2]


def test_a_method_has_three_lines_and_all_has_the_table(file: Path) -> None:
    asked = ("--calibration", file, "--world-size", "2", "--bandwidth", "1", *named(*TIMES))
    lines = run(*asked, width=120).stdout.splitlines()
    at = next(place for place, line in enumerate(lines) if line.startswith("randomk:ratio=0.01: "))
    assert lines[at] == "randomk:ratio=0.01: 178.0 ms, 5.1 times faster than dense"
    assert lines[at + 1] == "    in ms: compute 100.0, encode 70.0, network 8.0, latency 0.0; limited by compute"
    assert lines[at + 2].startswith("    faster than dense below ")
    assert " Gb/s; sends 1.0 MB of gradients; needs 4.0 bytes" in lines[at + 2]
    assert not [line for line in lines if line.lstrip().startswith("method")]
    assert (
        lines[-1]
        == "Add --all to see all 4 methods and 0 notes about estimates (~) and about what this advice leaves out."
    )
    whole = run(*asked, "--all", width=120).stdout
    assert [line for line in whole.splitlines() if line.lstrip().startswith("method")]
    assert "--all" not in whole


# The count ------------------------------------------------------------------------------------------------------------


def only(known: Calibration, model: str) -> Calibration:
    return replace(known, models={model: known.models[model]})


def test_the_count_has_a_column_for_the_encode_times_of_2021() -> None:
    """Both columns are those of an adviser with these times, on the V100 of the paper."""
    published = only(load(OF_2021), "resnet50")
    specs = ["powersgd:rank=4", "signsgd"]
    (row,) = counts(published, specs)
    facts = published.models["resnet50"]
    ours = {spec: encode_time(spec, CARDS["v100"], 25_557_032) for spec in specs}
    kernels = replace(published, models={"resnet50": replace(facts, compute=replace(facts.compute, encode=ours))})
    for known, key in ((kernels, "compressor_taken"), (published, "compressor_taken_2021")):
        adviser = Adviser(known, "resnet50", specs)
        found = [
            adviser.advise(Setting(ranks, batch_size=batch)).take not in FREE
            for ranks in (8, 16, 32, 64, 96, 128)
            for batch in (16, 32, 64, 128)
        ]
        assert row[key] == sum(found)
    assert row["compressor_taken"] > row["compressor_taken_2021"]


def test_on_another_card_the_times_of_2021_follow_the_bandwidth() -> None:
    """79 ms of BERT-base, by the elements and from 900 to 3,350 GB/s; but no less than the host's time."""
    known, spec = only(load("h100x8"), "gpt2"), "powersgd:rank=4"
    (row,) = counts(known, [spec])
    facts = known.models["gpt2"]
    seconds = 0.079 * 124_439_808 / 109_482_240 * 900 / 3350
    then = {spec: EncodeTime(seconds, host_s=host_s(KERNELS[spec]))}
    facts = replace(facts, compute=replace(facts.compute, encode=then))
    adviser = Adviser(replace(known, models={"gpt2": facts}), "gpt2", [spec])
    gains = []
    for ranks in (8, 16, 32, 64, 96, 128):
        setting = Setting(ranks, batch_size=np.array([8, 16, 32, 64]))
        free = np.minimum(adviser.step_s("none", setting), adviser.step_s("fp16", setting))
        gains.append(free / adviser.step_s(spec, setting) - 1)
    assert row["largest_gain_percent_2021"] == pytest.approx(100 * float(np.max(gains)), abs=0.06)
    assert row["largest_gain_percent_2021"] < row["largest_gain_percent"]
    (own,) = counts(calibrated(encode=TIMES))
    assert own["compressor_taken_2021"] is None, "no card, no times of 2021"


# The manual -----------------------------------------------------------------------------------------------------------

CARDS_OF_PAGE = ("h100x8", "h200x8", "a100x8", "v100x8", "rtx4090x2", "l4x8", "a10gx8")


def table_of_page(heading: str) -> list[list[str]]:
    """The rows of the first table after a heading."""
    page = (DOCS / "will-it-pay.md").read_text().partition(f"\n## {heading}\n")[2]
    lines = [line for line in page.partition("\n## ")[0].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def stored(name: str) -> list[dict[str, str]]:
    return list(csv.DictReader((DOCS / name).read_text().splitlines()))


def test_the_table_of_cards_is_that_of_the_maps() -> None:
    maps = {card: stored(f"will-it-pay/{card}-adamw.csv") for card in CARDS_OF_PAGE}
    models = dict.fromkeys(row["model"] for row in maps["h100x8"])
    rows = table_of_page("Other cards")
    assert len(rows) == len(models)
    for (_, *links), model in zip(rows, models, strict=True):
        for link, card in zip(links, CARDS_OF_PAGE, strict=True):
            here = [row for row in maps[card] if row["model"] == model]
            paying = [int(row["gbps"]) for row in here if row["pays"] == "True"]
            assert link == (str(max(paying)) if here else "-"), (model, card)
            assert paying == [rate for rate in MAP_RATES if rate <= max(paying, default=0)], "not below a gap"


def test_the_table_of_counts_is_that_of_the_files() -> None:
    files = [stored("performance-model/count.csv"), stored("will-it-pay/count-adamw.csv")]
    rows = table_of_page('"6 of 200" today')
    assert len(rows) == len(presets())
    for preset, _, setups, *counted in rows:
        (name,) = (name for name in presets() if preset.startswith(f"`{name}`"))
        here = [[row for row in file if row["calibration"] == name] for file in files]
        keys = ("compressor_taken", "compressor_taken_2021")
        assert int(setups) == sum(int(row["setups"]) for row in here[0])
        assert list(map(int, counted)) == [sum(int(row[key]) for row in file) for file in here for key in keys]


def test_the_errors_of_the_rule_are_those_of_the_page() -> None:
    for (asked, known, median, largest), cards in zip(
        table_of_page("Encode times on cards that we did not measure"),
        (("h100", "h200"), ("h200", "h100")),
        strict=True,
    ):
        assert (asked.lower(), known.lower()) == cards
        found = list(other_card.predictions(cards[1], cards[0]))
        assert median == f"{100 * other_card.median_error(found):.1f} %"
        assert largest == f"{100 * max(abs(one.error) for one in found):.1f} %"


@pytest.mark.thorough
def test_the_map_of_the_manual_is_what_its_command_makes() -> None:
    made = cells(load("h100x8"), (64,), optimizer="Adam")
    assert [{key: str(value) for key, value in row.items()} for row in made] == stored("will-it-pay/h100x8-adamw.csv")
