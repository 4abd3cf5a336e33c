"""README's table of methods by rule, the order of the trainings that decide it, and the figures behind the advice."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.best_rates import optimizers, plan, rows, rule, search, which_method
from benchmarks.best_rates.__main__ import main
from benchmarks.quality.equal_bytes import payload_bytes
from hvdcomp.files import csv_of
from hvdcomp.tools.train.options import TrainingOptions

SEEDS = (101, 102, 103, 104, 105)
FACTORS = {
    "none": 1.0,
    "topk:ratio=0.01": 40.0,
    "eden:bits=1": 22.0,
    "terngrad": 14.0,
    "eden": 13.0,
    "int4": 7.0,
    "int8": 3.8,
}
ADAMW = ("heavy-tails", "sorting", "gpt")


class Records:
    """Writes trainings.csv as if rows had been trained.

    Attributes:
        runs: the folder of the file.
    """

    def __init__(self, runs: Path) -> None:
        self.runs = runs
        self._rows: list[dict[str, Any]] = []

    def add(self, workload: str, method: str, lost: float | Callable[[int], float], seeds: Any = None) -> None:
        """A row with its best rate at the workload's own, the search of which is complete.

        Args:
            lost: percent of the loss or points of accuracy, also by seed; nan if it diverged.
            seeds: those of the figures; None for all that the row needs.
        """
        for at in (-1, 0, 1):
            for seed in search.search_seeds_of(workload):
                self._train(workload, method, seed, at, 10.0 * abs(at))
        for seed in search.seeds_of(workload, SEEDS) if seeds is None else seeds:
            self._train(workload, method, seed, 0, lost(seed) if callable(lost) else lost)
        self.write()

    def _train(self, workload: str, method: str, seed: int, doublings: int, lost: float) -> None:
        run = rows.RateRun(workload, seed, self.runs, method, doublings)
        accuracy = rows.is_accuracy(workload)
        quality = {"accuracy": 0.9 - lost / 100, "loss": 0.3} if accuracy else {"loss": 2 * (1 + lost / 100)}
        if math.isnan(lost):
            quality = {}
        record = {"workload": workload, "label": run.label, "seed": seed, "settings": run.settings, "commit": "abc"}
        figures = {"factor": FACTORS.get(method, 18.0), "bytes_sent": 1, "loss": quality.get("loss")}
        self._rows.append({**record, "seconds": 8.0, **figures, "accuracy": quality.get("accuracy")})

    def write(self) -> None:
        self.runs.mkdir(exist_ok=True)
        (self.runs / "trainings.csv").write_bytes(csv_of(self._rows))


@pytest.fixture
def records(tmp_path: Path) -> Records:
    return Records(tmp_path / "runs")


def _with_dense(records: Records, lost: Mapping[str, float], workloads: tuple[str, ...] = ADAMW) -> None:
    """Rows that lose as much on every workload, and dense training."""
    for workload in workloads:
        records.add(workload, "none", 0.0)
        for method, amount in lost.items():
            records.add(workload, method, amount)


def _adam(records: Records) -> list[tuple[str, str, str, str]]:
    (situation,) = (one for one in which_method.SITUATIONS if one.optimizer == "Adam")
    found: list[tuple[str, str, str, str]] = which_method.rows_of(situation, records.runs)
    return found


def test_the_fewest_bytes_within_one_percent_come_first_and_within_three_next(records: Records) -> None:
    _with_dense(records, {"eden:bits=1": 2.0, "terngrad": 0.4, "eden": -0.3, "int4": 0.0, "int8": 0.0})
    first, second = _adam(records)
    assert first[:3] == ("Adam or AdamW", "`terngrad`", "14")
    assert first[3] == (
        "at most 1 % or point on each task (a regression with outliers: loss 0.4 ± 0.0 % higher; a transformer that "
        "sorts: accuracy 0.4 ± 0.0 points lower; a GPT: loss 0.4 ± 0.0 % higher)"
    )
    assert second[:3] == ("Adam or AdamW, if `terngrad` sends too much", "`eden:bits=1`", "22")
    assert which_method.evidence_of(records.runs)["first"] == {"Adam": ["terngrad", "eden:bits=1"]}


def test_the_upper_end_of_the_interval_decides(records: Records) -> None:
    _with_dense(records, {"terngrad": 0.4, "int4": 0.0, "int8": 0.0, "eden": 5.0})
    noisy: Callable[[int], float] = lambda seed: 2.4 if seed % 2 else -1.6  # noqa: E731
    records.add("heavy-tails", "terngrad", noisy)  # in place of the row before; 0.4 ± 0.8
    records.add("sorting", "eden:bits=1", 3.1)
    names = [row[1] for row in _adam(records)]
    assert names == ["`int4`", "`terngrad`"]


def test_one_task_or_one_training_that_diverges_is_enough_to_be_out(records: Records) -> None:
    records.add("heavy-tails", "none", 0.0)
    for method in ("eden:bits=1,scaled=True", "eden:bits=1", "eden:scaled=True"):
        records.add("heavy-tails", method, 3.1)
    records.add("heavy-tails", "terngrad", lambda seed: math.nan if seed == 104 else 0.0)
    records.add("heavy-tails", "eden", 0.0)
    (situation,) = (one for one in rule.SITUATIONS if one.optimizer == "Adam")
    standings = rule.standings_of(situation, records.runs)
    expected = ["eden", "eden:bits=3,scaled=True", "eden:bits=3", "int4", "int8"]
    assert [standing.method for standing in rule.undecided(standings)] == expected
    assert standings[2].open == ("sorting", "gpt")
    assert rule.chosen(standings) == {}


def test_a_method_that_cannot_change_the_choice_does_not_delay_it(records: Records) -> None:
    """Here, `terngrad` sends more bytes than the method within 3 %, and cannot be within 1 %."""
    lost = dict.fromkeys(rows.CANDIDATES["adamw"], 5.0) | {"eden:bits=1": 2.0}
    del lost["terngrad"]
    _with_dense(records, lost)
    (situation,) = (one for one in rule.SITUATIONS if one.optimizer == "Adam")
    for lost, undecided in ((0.5, ["terngrad"]), (2.0, [])):
        records.add("heavy-tails", "terngrad", lost)
        standings = rule.standings_of(situation, records.runs)
        assert [standing.method for standing in rule.undecided(standings)] == undecided
        assert rule.chosen(standings)[3.0].method == "eden:bits=1"


def test_rows_at_one_rate_stay_until_the_rule_chooses(records: Records) -> None:
    _with_dense(records, {"terngrad": 0.0}, ("heavy-tails", "sorting"))
    records.add("gpt", "terngrad", 0.0)
    records.add("gpt", "none", 0.0, seeds=SEEDS[:4])  # so that no row of the GPT is complete
    rows = _adam(records)
    assert [row[1] for row in rows] == ["`int4`", "`int8`"]
    assert all(row[3].endswith(" (measured at one learning rate only)") for row in rows)
    records.add("gpt", "none", 0.0)
    assert [row[1] for row in _adam(records)] == ["`terngrad`"]


def test_what_is_not_measured_is_named(records: Records) -> None:
    (muon,) = (one for one in which_method.SITUATIONS if one.optimizer == "Muon")
    (row,) = which_method.rows_of(muon, records.runs)
    assert row[1] == "not measured yet"
    others = "`eden:bits=1`, `terngrad` and 3 others"
    assert row[3] == f"we are still measuring {others}, each at its own best learning rate"


def test_a_situation_in_which_every_method_loses_too_much_says_so(records: Records) -> None:
    _with_dense(records, dict.fromkeys(rows.CANDIDATES["adamw"], 4.0), ("heavy-tails",))
    assert _adam(records) == [
        ("Adam or AdamW", "none", "1", "each method may lose more than 3 % or 3 points on some task")
    ]
    assert which_method.evidence_of(records.runs)["first"] == {"Adam": []}


def test_the_command_writes_the_table_and_the_evidence(records: Records, tmp_path: Path) -> None:
    _with_dense(records, {"terngrad": 0.4, "eden": 0.5})
    records.add("sorting", "compressed-adam efsignsgd", 6.0)
    records.add("sorting", "compressed-adam none", -1.0)
    records.add("sorting", "int4", lambda seed: math.nan if seed == 101 else 0.0)
    records.add("sorting", "int8", 0.0, seeds=SEEDS[:4])
    readme, evidence = tmp_path / "README.md", tmp_path / "evidence.json"
    readme.write_text("before\n<!-- which method -->\n| old |\n\nafter\n")
    words = ["--runs", str(records.runs), "--readme", str(readme), "--evidence", str(evidence)]
    done = CliRunner().invoke(which_method.main, words)
    assert done.exit_code == 0, done.output
    assert readme.read_text() == f"before\n<!-- which method -->\n{which_method.table_of(records.runs)}\nafter\n"
    found = json.loads(evidence.read_text())
    assert {"optimizer": "Adam", "training": "gpt", "metric": "loss", "lost": {"eden": 0.005, "terngrad": 0.004}} in (
        found["trainings"]
    )
    of_sorting = {
        record["optimizer"]: record["lost"] for record in found["trainings"] if record["training"] == "sorting"
    }
    assert of_sorting == {
        "Adam": {"eden": 0.005, "int4": None, "terngrad": 0.004},
        "CompressedAdam": {"efsignsgd": 0.06},
    }
    readme.write_text("no table")
    done = CliRunner().invoke(which_method.main, words)
    assert done.exit_code == 1
    assert "README lacks the line <!-- which method -->" in done.output


def test_a_method_counts_once_all_its_tasks_are_measured_or_one_shows_harm(records: Records) -> None:
    def lost(training: str) -> dict[str, float]:
        trainings = which_method.evidence_of(records.runs)["trainings"]
        return next((one["lost"] for one in trainings if one["training"] == training), {})

    _with_dense(records, {"eden": 0.5, "terngrad": 4.0}, ("heavy-tails", "heavy-tails-soap"))
    assert lost("heavy-tails") == {"terngrad": 0.04}, "an easy task says nothing of others"
    _with_dense(records, {"eden": 1.0}, ("sorting", "sorting-soap"))
    assert lost("heavy-tails-soap") == {"eden": 0.005, "terngrad": 0.04}
    assert lost("sorting-soap") == {"eden": 0.01}
    assert lost("sorting") == {}
    _with_dense(records, {"eden": 0.7}, ("gpt",))
    assert lost("heavy-tails") == {"eden": 0.005, "terngrad": 0.04}
    assert lost("gpt") == {"eden": 0.007}


def test_steps_as_the_preset_makes_them_are_evidence_of_steps_only(records: Records) -> None:
    muon = ("heavy-tails-muon", "sorting-muon", "gpt-muon")
    _with_dense(records, {"local-steps=4 efsignsgd": 1.0, "sparseloco": 0.5}, muon[:2])
    assert which_method.evidence_of(records.runs)["steps"] == []
    _with_dense(records, {"local-steps=4 efsignsgd": 2.0, "diloco int8": 0.5, "sparseloco": 0.5}, muon[2:])
    found = which_method.evidence_of(records.runs)
    assert found["trainings"] == []
    common = {"optimizer": "Muon", "every": 4}
    assert sorted(found["steps"], key=lambda one: str(one["training"])) == [
        {**common, "training": "gpt-muon", "metric": "loss", "lost": {"efsignsgd": 0.02}},
        {**common, "training": "heavy-tails-muon", "metric": "loss", "lost": {"efsignsgd": 0.01}},
        {**common, "training": "sorting-muon", "metric": "accuracy", "lost": {"efsignsgd": 0.01}},
    ]


# The order of the trainings.


def test_quick_tasks_of_readme_come_first_and_spare_the_slow_ones(records: Records) -> None:
    records.add("heavy-tails", "none", 0.0)
    records.add("heavy-tails", "eden:bits=1,scaled=True", 9.0)
    records.add("heavy-tails", "eden:bits=1", 9.0)
    items = plan.items(records.runs)
    needed = [item for item in items if item.stage == 0]
    of_adam = [item for item in needed if item.workload in ADAMW]
    places = list(dict.fromkeys(item.workload for item in of_adam))
    assert places == list(ADAMW)
    assert [item.method for item in of_adam if item.workload == "gpt"] == [
        "none", "terngrad", "eden:scaled=True", "eden", "eden:bits=3,scaled=True", "eden:bits=3", "int4", "int8",
        "compressed-adam efsignsgd", "compressed-adam none",
    ]  # fmt: skip
    assert plan.Item(1, plan.OWN, "gpt", "eden:bits=1") in items, "the page has it all the same"
    assert len({item.key for item in items}) == len(items)
    stages = [item.stage for item in items]
    assert stages == sorted(stages)
    assert {item.kind for item in items if item.stage == 4} == {rows.MANY_RANKS}


def test_slow_rows_are_trained_one_after_the_other(records: Records) -> None:
    items = plan.items(records.runs)
    done: list[Any] = []
    groups = []
    while group := plan.next_items(items, done):
        assert len({item.group for item in group}) == 1
        groups.append(group)
        done += group
    assert sorted(map(str, done)) == sorted(map(str, items))
    assert [item.method for item in groups[0]][:2] == ["none", "topk:ratio=0.01"]
    assert all(len(group) == 1 for group in groups if group[0].stage == 0 and group[0].workload in ("gpt", "lstm"))


def test_long_trainings_are_of_complete_rows_that_readme_names(records: Records) -> None:
    _with_dense(records, {"terngrad": 0.4, "eden:bits=1": 4.0, "int4": 0.0})
    long = [item for item in plan.items(records.runs) if item.kind == rows.LONG and item.workload == "sorting"]
    assert [item.method for item in long][:2] == ["none", "terngrad"]
    runs = plan.variant_runs("sorting", rows.LONG, ["none", "terngrad", "eden"], records.runs)
    assert [(run.workload, run.spec, run.seed) for run in runs] == [
        ("sorting-long", "none", 101), ("sorting-long", "terngrad", 101),
        ("sorting-long", "none", 102), ("sorting-long", "terngrad", 102),
    ]  # fmt: skip
    assert {run.options["steps"] for run in runs} == {900}


def test_what_is_left_is_estimated_from_the_records(records: Records) -> None:
    item = plan.Item(0, plan.OWN, "sorting", "none")
    assert plan.missing_trainings(item, records.runs) == 4 * 5 + 10
    records.add("sorting", "none", 0.0, seeds=SEEDS[:2])
    assert plan.missing_trainings(item, records.runs) == 8
    records.add("sorting", "none", 0.0)
    assert plan.missing_trainings(item, records.runs) == 0
    same = plan.Item(3, plan.SAME, "sorting", "eden")
    assert plan.missing_trainings(same, records.runs) == 5
    assert plan.seconds_of("sorting", records.runs) == (8, 8)
    assert plan.seconds_of("sorting-muon-long", records.runs) == (24, 24)
    assert plan.seconds_of("gpt-16", records.runs) == (400, 400)
    both = [item, plan.Item(0, plan.OWN, "sorting", "eden")]
    first = plan.estimates(both, records.runs)[0]
    assert (first.rows, first.trainings) == (1, 30)
    assert first.least == first.usual == pytest.approx(30 * 8 / 3600)


def test_a_dry_run_prints_the_next_trainings_and_the_hours(records: Records) -> None:
    records.add("sorting-muon", "none", 0.0)
    words = ["--dry-run", "--runs", str(records.runs), "--workload", "sorting-muon", "--only", "local-steps"]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    assert done.output.count("hvdcomp train ") == 60, "four rows at three rates, with five seeds"
    in_lines = done.output.splitlines()
    signs = [line for line in in_lines if "--compression efsignsgd" in line and "--local-steps 4" in line]
    assert [line.partition("--lr ")[2].split()[0] for line in signs] == ["0.008"] * 5 + ["0.016"] * 5 + ["0.032"] * 5
    assert all("--evaluate-every 300" in line for line in signs)
    assert "1. what README's table needs: 4 rows, about 120 trainings, 0.3 to 0.3 hours of a core" in done.output
    assert "All 6 stages together take" in done.output


# The rows.


def test_steps_of_muon_can_be_trained_and_end_a_round_with_the_last_step(tmp_path: Path) -> None:
    of_muon = [name for name in rows.TRAINED if rows.TRAINED[name]["optimizer"] == "muon"]
    of_muon = [name for name in of_muon if not name.endswith(rows.MANY_RANKS)]
    assert len(of_muon) == 6
    for workload in of_muon:
        for method in rows.STEPS:
            options = TrainingOptions(**rows.RateRun(workload, 101, tmp_path, method, 1).options).resolved()
            assert options.steps_alone
            assert options.steps is not None
            assert options.steps % options.local_steps == 0
            assert options.evaluate_every == options.steps
            assert options.lr == 2 * rows.TRAINED[workload]["lr"]
    assert "local-steps=4 efsignsgd" in rows.methods_of("sorting-muon")
    assert not set(rows.STEPS) & set(rows.methods_of("sorting"))
    assert {rows.name_of(method) for method in rows.STEPS} == {"local-steps", "diloco", "sparseloco"}


def test_diloco_and_sparseloco_send_about_as_few_bytes_as_signs() -> None:

    def factor(workload: str, method: str) -> float:
        options = {**rows.TRAINED[workload], **rows.changes_of(workload, method)}
        sent = payload_bytes(options, options["compression"]) / options["local_steps"]
        return float(payload_bytes(rows.TRAINED[workload], "none") / sent)

    workloads = ("sorting-muon", "heavy-tails-muon")
    factors = {method: [factor(workload, method) for workload in workloads] for method in rows.STEPS}
    for rival in ("diloco int8", "sparseloco"):
        for own, others in zip(factors[rival], factors["local-steps=4 efsignsgd"], strict=True):
            assert 0.8 < own / others < 1.2
    means = [math.prod(values) for values in factors.values()]
    assert means == sorted(means, reverse=True), "from the fewest bytes to the most"


@pytest.mark.parametrize(("optimizer", "workload"), [("sgd", "shapes"), ("adamw", "sorting"), ("muon", "sorting-muon")])
def test_candidates_are_ordered_by_their_bytes(optimizer: str, workload: str) -> None:
    sent = [payload_bytes(rows.WORKLOADS[workload], spec) for spec in rows.CANDIDATES[optimizer]]
    assert sent == sorted(sent)


def test_the_search_of_compressed_steps_begins_at_twice_the_rate_of_dense_training(records: Records) -> None:
    records.add("sorting-muon", "none", 0.0)
    starts = {method: search.start_of("sorting-muon", method, records.runs) for method in ("eden", "sparseloco")}
    assert starts == {"eden": 0, "sparseloco": 1}
    assert search.start_of("sorting-muon", "local-steps=4 efsignsgd", records.runs) == 1
    assert search.start_of("sorting-muon", "diloco int8", records.runs) == 0
    assert search.start_of("gpt-muon", "none", records.runs) == 3


def test_a_variant_has_three_times_the_steps_or_four_times_the_ranks() -> None:
    for name, options in rows.VARIANTS.items():
        workload, _, kind = name.rpartition("-")
        base = rows.WORKLOADS[workload]
        if kind == "long":
            other = {"steps": 3 * base["steps"], "evaluate_every": 3 * base["evaluate_every"]}
        else:
            other = {"simulate_ranks": 4 * base["simulate_ranks"]}
        assert options == {**base, **other}


# Optimizers of other packages.


def test_the_page_of_optimizers_names_by_the_rule_what_to_use(records: Records, tmp_path: Path) -> None:
    for workload, losses in (("heavy-tails-soap", (30.0, 2.0, 0.5)), ("sorting-soap", (40.0, 0.5, 0.0))):
        records.add(workload, "none", 0.0)
        for method, lost in zip(("topk:ratio=0.01", "eden:bits=1", "eden"), losses, strict=True):
            records.add(workload, method, lost)
    records.add("heavy-tails-lion", "none", 0.0)
    records.add("heavy-tails-lion", "eden", math.nan)
    file = tmp_path / "optimizers.md"
    done = CliRunner().invoke(optimizers.main, ["--runs", str(records.runs), "--table", str(file)])
    assert done.exit_code == 0, done.output
    page = file.read_text()
    assert "| SOAP | `eden` (13 times fewer) | `eden:bits=1` (22 times fewer) |  |" in page
    first, second = page.partition("## sorting")[::2]
    assert "| SOAP | 0.008 | 2.0000 ± 0.0000 | +30.0 ± 0.0 | +2.0 ± 0.0 | +0.5 ± 0.0 | not measured |" in first
    assert "| SOAP | 0.004 | 90.00 ± 0.00 | +40.0 ± 0.0 | +0.5 ± 0.0 | +0.0 ± 0.0 | not measured |" in second
    assert "| Lion | 0.002 | 2.0000 ± 0.0000 | not measured | not measured | 5 diverged | not measured |" in first
    assert "Lion" not in second.partition("## How")[0], "without uncompressed training there is nothing to compare with"


@pytest.mark.parametrize("workload", rows.WORKLOADS_OF_OTHERS)
def test_a_workload_of_another_optimizer_is_that_of_adamw_with_this_optimizer(workload: str, tmp_path: Path) -> None:
    task = next(task for task in rows.TASKS_OF_OTHERS if workload.startswith(task))
    options = TrainingOptions(**rows.RateRun(workload, 0, tmp_path, "eden", 0).options).resolved()
    like = TrainingOptions(**rows.RateRun(task, 0, tmp_path, "eden", 0).options).resolved()
    differing = {name for name, value in vars(like).items() if vars(options)[name] != value}
    assert differing <= {"optimizer", "lr", "schedule"}
    assert "optimizer" in differing
    assert ("schedule" in differing) == workload.endswith("schedule-free"), "which has no schedule"


def test_galore_projects_hidden_matrices_to_a_quarter_of_their_rank() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("pytorch_optimizer", reason="pip install pytorch-optimizer")
    from benchmarks.best_rates.galore import galore

    shapes = ((64, 192), (192, 64), (1, 64), (256, 128), (64,))
    parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    found = galore([{"params": parameters[:-1], "weight_decay": 0.1}, {"params": parameters[-1:]}], 0.01)
    of_shape = {tuple(one.shape): group for group in found.param_groups for one in group["params"]}
    assert {shape: group.get("rank") for shape, group in of_shape.items()} == dict(
        zip(shapes, (16, 16, None, 32, None), strict=True)
    )
    assert all(group["weight_decay"] == 0.1 for shape, group in of_shape.items() if shape != (64,))
