"""`python -m benchmarks.steps`: predicted beside measured, from made-up steps and on a real emulated cluster."""

from __future__ import annotations

import csv
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.steps import clusters as runs
from benchmarks.steps import worker
from benchmarks.steps.__main__ import _steps_command, main
from benchmarks.steps.compare import choices, compare, errors, gains
from benchmarks.steps.files import auto_summary, markdown, summary, write
from benchmarks.steps.places import Hosts, Place, parse_hosts, place_of
from hvdcomp.compressors.protocol import TensorInfo
from hvdcomp.errors import SpecError
from hvdcomp.perfmodel import Calibration, CollectiveCost, Compute, EncodeTime, ModelFacts, Network, as_json
from hvdcomp.tools.bench.compare_worker import able_to_take_turns
from hvdcomp.tools.bench.trainings import OVERLAPS, Times, trainings_of
from tests.launched import run_forked_ranks
from tests.loaded import ROOT

SPECS = ["topk:ratio=0.01", "powersgd:rank=4"]
MEASURED = {"none": 120.0, "hvd.fp16": 80.0, "topk:ratio=0.01": 40.0, "powersgd:rank=4": 50.0}


def result(hosts: int = 2) -> dict[str, Any]:
    """What a cluster's ranks would write: 4 MB at 1e8 bytes/s between two ranks take 40 ms."""
    encode = {"topk:ratio=0.01": EncodeTime(0.02), "powersgd:rank=4": EncodeTime(0.01)}
    facts = ModelFacts((TensorInfo("w", (1000, 1000)),), Compute(0.05, 0.01, encode=encode, ready=((1.0, 1.0),)), 1e9)
    cost = CollectiveCost("ring", 0.0, 1e8)
    calibration = Calibration("made up", Network(cost, cost), {"m": facts}, {"ranks": "2"})
    steps = {
        method: {"median_ms": time, "quartiles_ms": [0.9 * time, 1.1 * time], "bytes_per_step": 1.0}
        for method, time in {"compute": 60.0, **MEASURED}.items()
    }
    place = {"hosts": hosts, "rate": "1gbit", "model": "m"}
    measured = {"calibration": as_json(calibration), "noisy": {}, "steps": steps, "alone": "compute", "auto": "auto"}
    measured["commit"] = "abc123"
    return place | measured


def test_rows_hold_what_was_predicted_and_measured() -> None:
    rows = {row.method: row for row in compare(result())}
    assert list(rows) == list(MEASURED)
    assert rows["none"].predicted_ms == pytest.approx(60 + 40)
    assert rows["none"].error == pytest.approx(100 / 120 - 1)
    assert rows["none"].compute_error == pytest.approx(0.0)  # 60 ms
    assert rows["hvd.fp16"].predicted_ms == pytest.approx(60 + 20)
    assert rows["topk:ratio=0.01"].predicted_ms == pytest.approx(60 + 20 + 10_000 * 8 / 1e5, rel=0.01)
    assert rows["topk:ratio=0.01"].noise == pytest.approx(0.2)
    median, worst = errors(list(rows.values()))
    assert worst.method == "topk:ratio=0.01"
    assert 0 < median < abs(worst.error)


def test_compressors_without_overlap_are_rows_of_their_own() -> None:
    spec = "topk:ratio=0.01"
    run = {**result(), "early_bytes": 1e6}
    late = {"method": spec, "overlap_bytes": 0, "median_ms": 30.0, "quartiles_ms": [29.0, 31.0], "bytes_per_step": 1.0}
    run["steps"][f"{spec}, at the end"] = late
    run["calibration"]["models"]["m"]["ready"] = [[0.5, 0.5], [1.0, 1.0]]
    rows = {row.method: row for row in compare(run)}
    assert list(rows) == [*MEASURED, f"{spec}, at the end"]
    one, other = rows[spec], rows[f"{spec}, at the end"]
    assert (one.spec, one.overlap, other.spec, other.overlap) == (spec, True, spec, False)
    small = {row.method: row for row in compare({**run, "early_bytes": 4e6})}  # as much as all gradients
    assert not small[spec].overlap
    assert one.predicted_ms < other.predicted_ms == {row.method: row for row in compare(result())}[spec].predicted_ms
    assert all(rows[stock].overlap for stock in ("none", "hvd.fp16"))
    (gain,) = gains(list(rows.values()))
    assert (gain.best, gain.overlap) == (f"{spec}, at the end", False)


def test_a_row_says_how_most_of_it_travels() -> None:
    run = result()
    run["steps"]["qsgd:bits=4,exchange=scatter"] = run["steps"]["qsgd:bits=4"] = run["steps"]["powersgd:rank=4"]
    encode = run["calibration"]["models"]["m"]["encode"]
    encode["qsgd:bits=4"] = encode["powersgd:rank=4"]
    assert {row.method: row.way for row in compare(run)} == {
        "none": "allreduce", "hvd.fp16": "allreduce", "topk:ratio=0.01": "gather", "powersgd:rank=4": "allreduce",
        "qsgd:bits=4,exchange=scatter": "scatter", "qsgd:bits=4": "gather",
    }  # fmt: skip
    page = markdown("steps", compare(run), {"command": "c", "runs": [run]})
    assert "\n| an all-gather or allreduce | 3 | " in page
    assert "\n| scattered payloads | 1 | " in page
    assert "\n| no overlap | 4 | " in page  # nothing says that this run had any
    assert "\n| overlap | " not in page


def test_two_levels_are_predicted_from_what_is_known_of_nodes() -> None:
    run = {**result(), "ranks_per_host": 2}
    cost = {"algorithm": "ring", "latency_s": 0.0, "bytes_per_s": 1e8}
    among = {"allreduce": cost, "allgather": cost, "reducescatter": cost}
    run["calibration"]["network"]["levels"] = {"ranks_per_node": 2, "node": among, "across": among}
    run["calibration"]["machine"]["ranks"] = "4"
    flat, both = "topk:ratio=0.01", "two_level(topk:ratio=0.01)"
    run["steps"][both] = run["steps"][flat]
    rows = {row.method: row for row in compare(run)}
    assert rows[both].way == "two levels"
    assert rows[both].encode_ms == pytest.approx(rows[flat].encode_ms / 2)
    # A reduce-scatter and an allgather of 4 MB in the node, half of it each way, and half a payload to the other node.
    assert rows[both].network_ms == pytest.approx(20 + 20 + rows[flat].network_ms / 3 / 2, rel=0.02)
    page = markdown("steps", list(rows.values()), {"command": "c", "runs": [run]})
    assert "\n| two levels | 1 | " in page


def test_hosts_are_written_with_their_ranks() -> None:
    assert [parse_hosts(text) for text in ("2", "4x1", "2x16")] == [Hosts(2), Hosts(4), Hosts(2, 16)]
    assert [str(one) for one in (Hosts(2), Hosts(2, 16))] == ["2", "2x16"]
    for wrong in ("2x0", "x2", "2x", "-2", "2x2x2", ""):
        with pytest.raises(ValueError, match="2x4 for 2 hosts with 4 ranks"):
            parse_hosts(wrong)
    several = {**result(), "ranks_per_host": 2}
    assert place_of(several).in_words() == "m, 2 hosts of 2 ranks, 1gbit"
    assert place_of(result()).in_words() == "m, 2 hosts, 1gbit"  # as it was kept before
    assert [gain.cluster for gain in gains(compare(result()) + compare(several))] == [Hosts(2), Hosts(2, 2)]


def test_two_levels_are_left_out_where_hosts_have_one_rank() -> None:
    specs = ("topk:ratio=0.01", "two_level(topk:ratio=0.01)", "by_size(1000:topk:ratio=0.01|two_level(qsgd:bits=4))")
    options = runs.Options(("mlp",), specs[:2], 4, 60.0)
    assert options.compressors_on(Hosts(2)) == specs[:1]
    assert options.compressors_on(Hosts(2, 2)) == specs[:2]
    said = runs.left_out([Hosts(2), Hosts(4), Hosts(2, 2)], options)
    assert said.startswith(
        "Two-level compressors are left out on 2 hosts and 4 hosts, because these clusters have only"
    )
    assert said.endswith(": two_level(topk:ratio=0.01).")
    assert runs.left_out([Hosts(2, 2)], options) == ""
    assert runs.left_out([Hosts(2)], runs.Options(("mlp",), specs[:1], 4, 60.0)) == ""


class Started:
    """In place of a cluster: keeps with what the ranks were started, and writes what they would write."""

    def __init__(self) -> None:
        self.command: list[str] = []
        self.options: dict[str, Any] = {}

    def run(self, command: list[str], **options: Any) -> int:
        self.command, self.options = command, options
        Path(command[command.index("--output") + 1]).write_text(json.dumps({"steps": {}}))
        return 0


@pytest.mark.parametrize(("hosts", "ranks", "sets"), [(Hosts(3), 3, None), (Hosts(3, 2), 6, "1")])
def test_ranks_are_started_on_all_hosts_and_may_make_groups(
    monkeypatch: pytest.MonkeyPatch, hosts: Hosts, ranks: int, sets: str | None
) -> None:
    cluster = Started()
    monkeypatch.setattr(runs, "Cluster", lambda *_: nullcontext(cluster))
    specs = ("topk:ratio=0.01", "two_level(topk:ratio=0.01)")
    options = runs.Options(("lstm",), specs, 4, 60.0, overlap="both")
    (found,) = runs.measure([hosts], ["1gbit"], options, lambda _: None)
    assert found.pop("commit")
    assert found == {"hosts": 3, "ranks_per_host": hosts.ranks, "rate": "1gbit", "model": "lstm", "steps": {}}
    assert cluster.options["ranks"] == ranks
    assert cluster.options["env"].get("HOROVOD_DYNAMIC_PROCESS_SETS") == sets
    assert int(cluster.options["env"]["HOROVOD_CACHE_CAPACITY"]) > 20 * 200  # methods, and tensors of each
    words = cluster.command
    given = tuple(words[place + 1] for place, word in enumerate(words) if word == "--compressor")
    assert given == (specs if sets else specs[:1])
    assert words[words.index("--overlap") + 1] == "both"


def test_an_unknown_method_is_refused_before_anything_starts() -> None:
    pytest.importorskip("torch")
    result = CliRunner().invoke(worker.main, ["--method", "topkk", "--output", "x.json"])
    assert result.exit_code == 2
    assert "topkk" in result.output
    assert "hvd.fp16" in result.output


def test_trainings_have_a_form_for_each_overlap_but_casts_have_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def names(methods: list[str], overlap: str) -> list[str]:
        return [one.times.name for one in trainings_of(carrier, "mlp", methods, OVERLAPS[overlap], 4, 0)]

    class Named:
        numel = 10**7

        def __init__(
            self, _carrier: Any, method: str, _model: str, _batch: int, _seed: int, overlap_bytes: int | None = None,
            device: str = "",
        ) -> None:  # fmt: skip
            self.times = Times(method, overlap_bytes)
            self.device = device

    carrier: Any = SimpleNamespace(early_bytes=5 * 10**6)
    monkeypatch.setattr("hvdcomp.tools.bench.trainings.Training", Named)
    methods = ["none", "hvd.fp16", "fp16", "qsgd:bits=4"]
    once = ["compute", *methods[:3]]
    assert names(methods, "on") == [*once, "qsgd:bits=4"]
    assert names(methods, "off") == [*once, "qsgd:bits=4, at the end"]
    assert names(methods, "both") == [*once, "qsgd:bits=4", "qsgd:bits=4, at the end"]
    assert [one.times.name for one in trainings_of(carrier, "mlp", methods[2:], (5000, 0), 4, 0)][2:] == [
        "qsgd:bits=4, 5,000", "qsgd:bits=4, at the end"
    ]  # fmt: skip
    there: list[Any] = trainings_of(carrier, "mlp", methods, (None,), 4, 0, "cuda:1")
    assert {one.device for one in there} == {"cuda:1"}
    Named.numel = 10**6  # of which nothing is sent early
    assert names(methods, "both") == [*once, "qsgd:bits=4"]


def test_gains_and_files(tmp_path: Path) -> None:
    rows = compare(result()) + compare(result(4))
    assert [(gain.hosts, gain.best, gain.over_dense, gain.over_fp16, gain.predicted_best) for gain in gains(rows)] == [
        (2, "topk:ratio=0.01", 3.0, 2.0, "powersgd:rank=4"),
        (4, "topk:ratio=0.01", 3.0, 2.0, "powersgd:rank=4"),
    ]
    noisy = {"m, passes": {"seconds": 0.1, "spread": 0.42}}
    details = {"command": "python -m benchmarks.steps", "left_out": "two are", "runs": [{**result(), "noisy": noisy}]}
    files = write(tmp_path, "steps", rows, details)
    endings = (".json", ".csv", ".md", ".png", "-gains.csv", "-speed.png")
    assert [file.name for file in files] == [f"steps{ending}" for ending in endings]
    assert len(json.loads(files[0].read_text())["rows"]) == len(rows)
    with files[1].open() as stream:
        assert [float(row["measured_ms"]) for row in csv.DictReader(stream)] == [row.measured_ms for row in rows]
    text = files[2].read_text()
    assert "Made by `python -m benchmarks.steps`, at commit `abc123`. Before" in text
    assert set(summary(rows)) < set(text.splitlines())
    assert "faster of dense gradients and fp16:\n\n| model | 1gbit |\n| --- | --- |\n| m | 2.00 |" in text
    assert "The predictions name the fastest compressor in 0 of 2 settings." in text
    right = [replace(row, predicted_ms=row.measured_ms) for row in rows[: len(rows) // 2]]
    assert summary([*right, *rows[len(rows) // 2 :]])[1].endswith(" in 1 of 2 settings.")
    assert "two are" in text.splitlines()
    assert "| topk:ratio=0.01 | 2 | 2 | " in text  # the fastest in both, and its errors
    assert "| powersgd:rank=4 | 2 | 0 | " in text
    assert "| none | 2 |  | " in text
    assert all(f"[{file.name}]({file.name})" in text for file in (files[1], files[4]))
    with files[4].open() as stream:
        fastest = list(csv.DictReader(stream))
    names = ("hosts", "rate", "model", "best", "over_dense", "over_fp16", "over_stock", "predicted_best")
    assert [tuple(row[name] for name in names) for row in fastest] == [
        (hosts, "1gbit", "m", "topk:ratio=0.01", "3.0", "2.0", "2.0", "powersgd:rank=4") for hosts in ("2", "4")
    ]
    assert "1 number is noisy: the medians of repeated measurements differ by more than 15%." in text
    assert "The largest difference is 42% (m, passes; m, 2 hosts, 1gbit)." in text
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in (files[3], files[5]))


@pytest.mark.parametrize("folder", ["", "exchange", "exchange/overlap", "steps-resnet20"])
def test_the_page_in_docs_is_that_of_the_measurements_beside_it(folder: str) -> None:
    file = ROOT / "docs" / folder / "steps-measured.json"
    details = json.loads(file.read_text())
    rows = [row for run in details["runs"] for row in compare(run)]
    assert file.with_suffix(".md").read_text() == markdown("steps-measured", rows, details)


def with_auto(turns: dict[str, list[list[float]]], best: str) -> dict[str, Any]:
    """The same of a cluster on which `auto` took turns with the best static choice, and with dense or not."""
    run = result()
    run["steps"]["auto"] = {
        "median_ms": 42.0, "quartiles_ms": [41.0, 43.0], "bytes_per_step": 1.0, "compressors": SPECS,
        "chosen": "compressed", "predicted_ms": 45.0, "best": best, "against": turns,
    }  # fmt: skip
    return run


def test_auto_is_held_against_the_best_static_choice_turn_by_turn() -> None:
    turns = {"auto": [[41.0], [90.0, 44.0, 43.0], [42.0]], "topk:ratio=0.01": [[40.0], [44.0], [40.0]]}
    run = with_auto(turns, "topk:ratio=0.01")
    (found,) = choices([run])
    assert (found.best, found.chosen) == ("topk:ratio=0.01", "compressed")
    assert found.compressors == tuple(SPECS)
    assert found.over_best == pytest.approx(41 / 40)  # the middle of 41/40, 44/44 and 42/40
    assert found.over_dense == pytest.approx(42 / 120)  # far behind: it took no turns
    assert [row.method for row in compare(run)] == list(MEASURED)  # it is no static choice itself
    near = with_auto({**turns, "none": [[41.0], [40.0], [42.0]]}, "topk:ratio=0.01")
    (close,) = choices([near])
    assert close.over_dense == pytest.approx(1.0)
    said = auto_summary([found, close])
    assert "1.025 times as long as with the best static choice" in said
    assert "gradients, a step with auto takes 1.000 times as long in the worst setting (m, 2 hosts, 1gbit)" in said
    assert choices([result()]) == []
    del run["steps"]["auto"]["compressors"]
    run["steps"]["auto"]["compressor"] = "efsignsgd"  # as it was kept when there was one
    assert choices([run])[0].compressors == ("efsignsgd",)


def test_auto_is_given_what_goes_with_the_faster_ones() -> None:
    topk, qsgd, power = "topk:ratio=0.01", "qsgd:bits=4", "two_level(powersgd:rank=4)"
    assert able_to_take_turns([topk, qsgd, power]) == [topk, power]  # what topk keeps would grow in qsgd
    assert able_to_take_turns([qsgd, topk, power, "natural"]) == [qsgd, "natural"]
    assert able_to_take_turns([topk]) == [topk]


def test_ddp_is_started_and_compared_as_horovod_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cluster = Started()
    monkeypatch.setattr(runs, "Cluster", lambda *_: nullcontext(cluster))
    options = runs.Options(("lstm",), ("two_level(topk:ratio=0.01)",), 4, 60.0, backend="ddp")
    (found,) = runs.measure([Hosts(3, 2)], ["1gbit"], options, lambda _: None)
    assert found["steps"] == {}
    assert cluster.options["backend"] == "torch"
    assert not any(name.startswith("HOROVOD") for name in cluster.options["env"])
    words = cluster.command
    assert words[words.index("--backend") + 1] == "ddp"
    assert "--compressor" in words
    command = _steps_command([Hosts(3, 2)], ("1gbit",), options, tmp_path)
    assert "--backend ddp" in command
    other = runs.Options(("lstm",), options.compressors, 4, 60.0)
    assert _steps_command([Hosts(3, 2)], ("1gbit",), other, tmp_path) == command.replace(" --backend ddp", "")


def test_the_fp16_of_ddp_is_one_that_gains_are_over() -> None:
    run = result()
    run["steps"] = {name.replace("hvd.", "ddp."): one for name, one in run["steps"].items()}
    rows = compare(run)
    assert [row.spec for row in rows[:2]] == ["none", "fp16"]
    assert gains(rows)[0].over_fp16 == gains(compare(result()))[0].over_fp16 == 2.0


def test_each_library_has_casts_of_its_own() -> None:
    worker.check_method("ddp.fp16", "ddp")
    worker.check_method("topk:ratio=0.01", "ddp")
    with pytest.raises(SpecError, match=r"or give a method of the library: none, ddp\.fp16"):
        worker.check_method("hvd.fp16", "ddp")


_WORKER_OPTIONS = ["--model", "mlp", "--batch-size", "4"]


@pytest.mark.alone
@pytest.mark.thorough
def test_the_ranks_of_ddp_measure_what_is_compared(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    file = tmp_path / "x.json"
    words = [*_WORKER_OPTIONS, "--compressor", "topk:ratio=0.01", "--seconds", "1", "--attempts", "2"]
    program = ["-m", "hvdcomp.tools.bench.compare_worker", *words, "--output", str(file)]
    done = run_forked_ranks(2, "torchrun", program, timeout=300)
    assert done.returncode == 0, done.stdout
    run = {**json.loads(file.read_text()), "hosts": 1, "ranks_per_host": 2, "rate": "none", "model": "mlp"}
    assert run["calibration"]["machine"]["backend"] == "ddp"
    assert run["early_bytes"] == 1_000_000
    again = "calibrating again (2 of 2)" in done.stdout
    assert len(run["repeated"]) in ((0, 2) if again else (0,))
    assert run["repeated"][-1:] in ([], [run["calibration"]])
    rows = compare(run)
    assert [row.method for row in rows] == ["none", "ddp.fp16", "topk:ratio=0.01"]
    assert rows[0].bytes_per_step == 2 * rows[1].bytes_per_step > 25 * rows[2].bytes_per_step
    assert all(row.predicted_ms > row.compute_ms > 0 for row in rows)
    assert len(gains(rows)) == 1
    (auto,) = choices([run])
    assert auto.compressors == ("topk:ratio=0.01",)
    assert auto.rounds >= 1


@pytest.mark.alone
@pytest.mark.thorough
def test_steps_are_measured_under_torchrun(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    file = tmp_path / "steps.json"
    words = [*_WORKER_OPTIONS, "--rounds", "1", "--steps", "2", "--overlap", "0", "--overlap", "1500000"]
    program = ["-m", "benchmarks.steps.worker", *words, "--output", str(file)]
    done = run_forked_ranks(2, "torchrun", program, timeout=300)
    assert done.returncode == 0, done.stdout
    found = json.loads(file.read_text())
    assert (found["backend"], found["ranks"]) == ("ddp", 2)
    assert "horovod" not in found["versions"]
    names = [(one["method"], one["overlap_bytes"]) for one in found["methods"]]
    own = [(spec, least) for spec in ("topk:ratio=0.01", "powersgd:rank=4") for least in (0, 1_500_000)]
    assert names == [("none", None), ("ddp.fp16", None), *own]
    assert all(len(one["step_ms"]) == 1 and len(one["step_ms"][0]) == 2 for one in found["methods"])


def test_turns_are_short_where_steps_are_long() -> None:
    torch = pytest.importorskip("torch")
    assert torch is not None
    from hvdcomp.tools.bench.workload import turn_of

    assert [turn_of(seconds) for seconds in (10.0, 0.25, 0.1, 0.05, 0.001)] == [(0, 1), (0, 1), (1, 2), (1, 5), (1, 8)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--rate", "fast"), "fast"),
        (("--hosts", "two"), "two"),
        (("--hosts", "1"), "2 to"),
        (("--hosts", "2x0"), "2x0"),
        (("--model", "mlpp"), "mlpp"),
        (("--model", "cnn@digits,lstm@digits"), "lstm@digits"),
        (("--overlap", "no"), "'on', 'off', 'both'"),
        (("--compressor", "topkk"), "topkk"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(options: tuple[str, ...], words: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(main, [*options, "--output", str(tmp_path)])
    assert done.exit_code != 0
    assert words in done.output


def kept(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "steps-measured.json").read_text())["runs"]


class Failing:
    """In place of the clusters' runs: all settings give the same result, until one fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails_at: str | None) -> None:
        self.made: list[str] = []
        self._fails_at = fails_at
        monkeypatch.setattr(runs, "check", lambda hosts, rates: None)
        monkeypatch.setattr(runs, "Cluster", self.cluster)
        monkeypatch.setattr(runs, "_run", self._run)

    @contextmanager
    def cluster(self, hosts: int, rate: str) -> Iterator[None]:
        yield None

    def _run(self, cluster: None, place: Place, options: Any, show: Any) -> dict[str, Any]:
        name = f"{place.cluster} {place.rate}"
        if name == self._fails_at:
            raise runs.StepsError("a rank left")
        self.made.append(name)
        return json.loads(json.dumps(result()).replace('"m"', f'"{place.model}"')) | asdict(place)


def test_a_failed_run_is_resumed_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--hosts", "2,2x2", "--rate", "1gbit,10gbit", "--model", "lstm", "--output", str(tmp_path)]
    first = Failing(monkeypatch, fails_at="2x2 1gbit")
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 1
    assert "a rank left" in done.output
    assert "--resume" in done.output
    assert first.made == ["2 1gbit", "2 10gbit"]
    assert len(kept(tmp_path)) == 2
    refused = CliRunner().invoke(main, [*words, "--resume", "--seconds", "1"])
    assert refused.exit_code == 1
    assert "was made by another command" in refused.output
    assert len(kept(tmp_path)) == 2
    second = Failing(monkeypatch, fails_at=None)
    done = CliRunner().invoke(main, [*words, "--resume"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert second.made == ["2x2 1gbit", "2x2 10gbit"]
    assert [(run["ranks_per_host"], run["rate"]) for run in kept(tmp_path)] == [
        (1, "1gbit"), (1, "10gbit"), (2, "1gbit"), (2, "10gbit")
    ]  # fmt: skip
    again = Failing(monkeypatch, fails_at=None)
    assert CliRunner().invoke(main, words).exit_code == 0
    assert len(again.made) == 4  # without --resume all is measured anew


def test_tables_and_pictures_are_made_again_without_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("nothing is left to measure")

    monkeypatch.setattr(runs, "check", never)
    monkeypatch.setattr(runs, "Cluster", never)
    monkeypatch.setattr(runs, "measure", lambda *_: iter(()))
    words = ["--hosts", "2", "--rate", "1gbit", "--model", "mlp", "--output", str(tmp_path)]
    made = runs.Options(("mlp",), ("topk:ratio=0.01", "powersgd:rank=4", "efsignsgd"), 4, 60.0)
    run = json.loads(json.dumps(result()).replace('"m"', '"mlp"'))
    details = {"command": _steps_command([Hosts(2)], ("1gbit",), made, tmp_path)}
    (tmp_path / "steps-measured.json").write_text(json.dumps({**details, "runs": [run]}))
    done = CliRunner().invoke(main, [*words, "--resume"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "2,1,1gbit,mlp,none," in (tmp_path / "steps-measured.csv").read_text()
    assert "| none | 1 |  | " in (tmp_path / "steps-measured.md").read_text()
    assert "2,1,1gbit,mlp,topk:ratio=0.01," in (tmp_path / "steps-measured-gains.csv").read_text()
    assert (tmp_path / "steps-measured-speed.png").exists()


def test_a_file_of_something_else_is_not_resumed(tmp_path: Path) -> None:
    file = tmp_path / "steps-measured.json"
    assert runs.earlier(file, "python -m benchmarks.steps") == []
    file.write_text("[1, 2")
    with pytest.raises(runs.StepsError, match="Leave out --resume"):
        runs.earlier(file, "python -m benchmarks.steps")


def test_what_a_failed_run_said_first_is_kept() -> None:
    said = [f"{number}\n" for number in range(100)]
    lines = runs._shortened(said).splitlines()
    assert (lines[0], lines[29], lines[31], lines[-1]) == ("0", "29", "85", "99")
    assert "55 lines left out" in lines[30]
    assert runs._shortened(said[:45]).splitlines() == [line.strip() for line in said[:45]]


def _why_no_cluster() -> str | None:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "the emulated cluster needs root and iproute2"
    from hvdcomp.tools.bench.cluster import Cluster, ClusterError

    try:
        with Cluster(2, "1gbit"):
            return None
    except ClusterError as error:
        return f"no emulated cluster can be made here: {error}"


@pytest.mark.cluster
def test_a_small_setting_from_end_to_end(tmp_path: Path) -> None:
    pytest.importorskip("horovod.torch")
    reason = _why_no_cluster()
    if reason is not None:
        pytest.skip(reason)
    options = ["--hosts", "2", "--rate", "1gbit", "--model", "mlp", "--compressor", "topk:ratio=0.01", "--seconds", "1"]
    done = CliRunner().invoke(main, [*options, "--output", str(tmp_path)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "steps-measured.json").read_text())
    assert [row["method"] for row in found["rows"]] == ["none", "hvd.fp16", "topk:ratio=0.01"]
    (auto,) = found["auto"]
    assert (auto["compressors"], auto["best"]) == (["topk:ratio=0.01"], "topk:ratio=0.01")
    assert "compressed" in auto["chosen"]
    assert 0 < auto["over_dense"] < 1
    assert 0 < auto["over_best"] < 2
    dense, fp16, topk = found["rows"]
    assert dense["bytes_per_step"] == 2 * fp16["bytes_per_step"] > 25 * topk["bytes_per_step"]
    # The link's own time cannot be undercut, neither by what was measured nor by what is predicted from it.
    link_ms = 8000 * dense["bytes_per_step"] / 1e9
    assert dense["measured_ms"] > 0.9 * link_ms
    assert dense["predicted_ms"] > 0.9 * link_ms
    assert found["gains"][0]["best"] == "topk:ratio=0.01"
    assert "python -m benchmarks.steps --hosts 2 --rate 1gbit" in (tmp_path / "steps-measured.md").read_text()
