"""The benchmark of best learning rates: its search ends between two worse rates, and its page compares at these."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks import pages
from benchmarks.best_rates import __main__ as command
from benchmarks.best_rates import rows, search
from benchmarks.quality import equal_bytes
from hvdcomp.tools.train.options import TrainingOptions

Loss = Callable[[Any], float | None]


def _written(run: Any, loss: float | None) -> None:
    """A run's summary and its last evaluation, as `hvdcomp train` leaves them; None for one that diverged."""
    run.folder.mkdir(parents=True, exist_ok=True)
    options = {**TrainingOptions(**run.options).resolved().as_json(), "backend": "simulated"}
    status = "diverged" if loss is None else "finished"
    factor = {"none": 1.0, "eden:bits=1": 23.5}.get(run.spec, 13.0)
    summary = {"status": status, "options": options, "bytes_sent": 1e6 / factor, "compression_factor": factor}
    (run.folder / "summary.json").write_text(json.dumps(summary))
    (run.folder / "evaluations.jsonl").write_text(json.dumps({"accuracy": loss, "loss": loss}) + "\n")
    (run.folder / "run.json").write_text(json.dumps({"commit": "abc", "seconds": 1.0, "error": None}))


def _trainer(loss: Loss, order: list[Any]) -> Callable[[Sequence[Any]], list[Any]]:
    def train(todo: Sequence[Any]) -> list[Any]:
        for run in todo:
            assert run.record is None, "nothing is trained twice"
            _written(run, loss(run))
        order.extend(todo)
        return []

    return train


@pytest.mark.thorough
def test_every_method_can_be_trained(tmp_path: Path) -> None:
    for workload in rows.WORKLOADS:
        methods = rows.methods_of(workload)
        assert methods[0] == "none"
        for spec in methods:
            TrainingOptions(**rows.RateRun(workload, 0, tmp_path, spec, 1).options).resolved()
        for spec in rows.PAIRS:
            for rival in rows.rivals_of(workload, spec):
                sent, others = (equal_bytes.payload_bytes(rows.WORKLOADS[workload], s) for s in (spec, rival))
                assert rival == "terngrad" or others >= sent, "the rival sends no less"


_QUICK = ("sorting", "sorting-muon", "heavy-tails", "heavy-tails-muon", "shapes")


@pytest.mark.parametrize("workload", _QUICK)
def test_quick_workloads_have_harsh_methods_and_another_optimizer_in_place_of_adamw(
    workload: str, tmp_path: Path
) -> None:
    methods = rows.methods_of(workload)
    assert methods[:6] == ["none", "int8", "int4", "eden", "eden:bits=1", "terngrad"]
    assert "topk:ratio=0.01" in methods
    options = {
        spec: TrainingOptions(**rows.RateRun(workload, 0, tmp_path, spec, 0).options).resolved() for spec in methods
    }
    given = rows.WORKLOADS[workload]
    frozen = {spec for spec in methods if options[spec].optimizer == "compressed-adam"}
    assert frozen == (set(rows.FROZEN) if given["optimizer"] == "adamw" else set())
    for spec in methods:
        own = options[spec]
        if spec in rows.STEPS:
            continue
        assert own.lr == given["lr"]
        assert own.compression == spec.removeprefix("compressed-adam ").removeprefix("budget ")
        assert own.optimizer == ("compressed-adam" if spec in frozen else given["optimizer"])
    if frozen:
        assert options["compressed-adam none"].freeze_compression == "none", "it compresses nothing"
    assert {rows.name_of(spec) for spec in frozen} <= {"compressed-adam"}
    assert rows.is_accuracy(workload) == (not workload.startswith("heavy-tails"))


@pytest.mark.parametrize(("workload", "least"), [("sorting", 16), ("heavy-tails", 11.5), ("shapes", 13)])
def test_powersgd_of_quick_workloads_sends_about_as_little_as_terngrad(workload: str, least: float) -> None:
    options = rows.WORKLOADS[workload]
    (powersgd,) = (spec for spec in rows.methods_of(workload) if spec.startswith("powersgd"))
    dense, sent, ternary = (equal_bytes.payload_bytes(options, spec) for spec in ("none", powersgd, "terngrad"))
    assert least < dense / sent < 1.35 * dense / ternary


@pytest.mark.parametrize("workload", ["heavy-tails", "sorting", "shapes"])
def test_the_policy_budget_is_compared_with_a_fixed_level_of_equal_bytes(workload: str, tmp_path: Path) -> None:
    (name,) = (spec for spec in rows.methods_of(workload) if spec in rows.BUDGETS)
    (fixed,) = rows.rivals_of(workload, name)
    options = rows.RateRun(workload, 0, tmp_path, name, 0).options
    dense, sent = (equal_bytes.payload_bytes(rows.WORKLOADS[workload], spec) for spec in ("none", fixed))
    assert options["compression"] == fixed
    assert options["policy"] == f"budget:factor={dense / sent:.4g}"
    assert dense / sent > 20


@pytest.mark.parametrize("best", [-5, 0, 4])
def test_the_search_ends_between_two_worse_rates(tmp_path: Path, best: int) -> None:
    order: list[Any] = []

    def loss(run: Any) -> float | None:
        at = best if run.spec == "none" else best + 2
        return None if run.doublings > at + 1 else 2.0 + abs(run.doublings - at)

    methods = ["none", "eden"]
    assert not search.search("gpt", methods, tmp_path, _trainer(loss, order))
    start = search.grid_of("gpt", "none", tmp_path, 0)
    assert (start.best, start.next) == (best, ())
    assert {best - 1, best, best + 1} <= set(start.lost)
    assert start.lost[best + 1] == pytest.approx(50)
    assert {run.seed for run in order} == {0, 1, 2}
    eden = search.grid_of("gpt", "eden", tmp_path, best)
    assert eden.best == best + 2
    assert min(run.doublings for run in order if run.spec == "eden") == best - 1, "it begins around that of dense"


def test_the_search_of_a_noisy_workload_goes_by_the_mean_over_its_seeds(tmp_path: Path) -> None:
    order: list[Any] = []
    by_chance = {(0, 1): -0.5, (3, -1): 0.5}  # of these seeds and doublings

    def loss(run: Any) -> float:
        return 2.0 + 0.2 * abs(run.doublings) + by_chance.get((run.seed, run.doublings), 0.0)

    search.search("heavy-tails", [], tmp_path, _trainer(loss, order))
    grid = search.grid_of("heavy-tails", "none", tmp_path, 0)
    assert (grid.best, grid.next, grid.trained) == (0, (), len(order))
    assert grid.lost[1] == pytest.approx(100 * 0.1 / 2)
    assert {run.seed for run in order} == {0, 1, 2, 3, 4}
    assert len(order) == 15


@pytest.mark.parametrize(("lost", "best"), [(0.09, 0), (0.11, 1)])
def test_of_equally_good_rates_the_lowest_is_used(tmp_path: Path, lost: float, best: int) -> None:
    losses = {0: 2.0 * (1 + lost / 100), 1: 2.0}
    assert not search.search("heavy-tails", [], tmp_path, _trainer(lambda run: losses.get(run.doublings, 3.0), []))
    grid = search.grid_of("heavy-tails", "none", tmp_path, 0)
    assert (grid.best, grid.next, grid.is_inside) == (best, (), True)
    assert set(grid.lost) == {-1, 0, 1, 2}, "both are between two worse rates"


def test_the_search_ends_where_every_rate_diverges(tmp_path: Path) -> None:
    order: list[Any] = []
    loss: Loss = lambda run: None if run.spec == "eden" or run.doublings > -2 else 2.0  # noqa: E731
    search.search("gpt", ["eden"], tmp_path, _trainer(loss, order))
    tried = {run.doublings for run in order if run.spec == "eden"}
    assert min(tried) == -search.FARTHEST
    assert search.grid_of("gpt", "eden", tmp_path, 0).next == ()


SEEDS = (101, 102, 103, 104, 105)


def _page(runs: Path, file: Path) -> str:
    words = ["--page-only", "--runs", str(runs), "--table", str(file)]
    done = CliRunner().invoke(command.main, words)
    assert done.exit_code == 0, done.output
    return file.read_text()


def test_the_page_compares_each_at_its_own_best_rate(tmp_path: Path) -> None:
    runs, file, order = tmp_path / "runs", tmp_path / "page.md", []
    best = {"none": 1, "eden": 2}

    def loss(run: Any) -> float | None:
        chance = 0.01 * (run.seed - 103)
        worse = {"none": 0.0, "eden": 0.01, "terngrad": 0.2}.get(run.spec, 0.1)
        return (2.0 + chance) * (1 + worse) * 1.005 ** abs(run.doublings - best.get(run.spec, 1))

    train = _trainer(loss, order)
    methods = rows.methods_of("gpt")
    search.search("gpt", methods, runs, train)
    train(search.at_best_rates("gpt", methods, runs, SEEDS))
    rest = search.at_rate_of_dense("gpt", methods, runs, SEEDS)
    train([run for run in rest if run.record is None])
    page = _page(runs, file)
    assert "at commit `abc`" in page
    assert f"| gpt | {len(methods)} | 0 | 0 |" in page
    assert "| `none` | 1.0 | 0.004 | 2.0000 ± 0.0196 |" in page
    row = "| `eden` | 13.0 | 0.008 | 2.0200 ± 0.0198 | +1.00 ± 0.00 | +1.50 ± 0.00 | 0.004 to 0.016 |"
    assert row in page, [line for line in page.splitlines() if line.startswith("| `eden`")]
    better = [line for line in page.splitlines() if line.startswith("| `eden` | `terngrad`")]
    assert better == ["| `eden` | `terngrad` | 100% | -15.83 ± 0.00 | **better** |"]
    assert "gpt,eden:bits=1,4,23.5" in file.with_suffix(".csv").read_text()
    assert f"**How many training runs**: {len(order)} runs, in" in page
    searched = sum(run.seed not in SEEDS for run in order)
    assert f"The search for learning rates used {searched} of these runs." in " ".join(page.split())


def test_the_page_shows_no_figures_of_a_row_that_is_not_complete(tmp_path: Path) -> None:
    runs, file = tmp_path / "runs", tmp_path / "page.md"

    def loss(run: Any) -> float | None:
        return None if run.spec == "int8" else 2.0 + abs(run.doublings) / 10

    train = _trainer(loss, [])
    find = lambda *methods: search.search("heavy-tails", methods, runs, train)  # noqa: E731
    own = lambda spec, seeds: [rows.RateRun("heavy-tails", seed, runs, spec, 0) for seed in seeds]  # noqa: E731
    find("none", "eden", "int8")
    seeds = search.seeds_of("heavy-tails", SEEDS)
    assert seeds == tuple(range(101, 131))
    train(own("none", seeds[:-1]) + own("eden", seeds))
    searched = search.search_seeds_of("heavy-tails")
    train([rows.RateRun("heavy-tails", seed, runs, "int4", at) for at in (0, 1) for seed in searched])
    train([rows.RateRun("heavy-tails", 0, runs, "terngrad", at) for at in (-1, 0, 1)])
    page = " ".join(_page(runs, file).split())
    assert "| heavy-tails | 0 | 5 | 12 |" in page
    assert page.count(" is complete yet.") == len(rows.WORKLOADS)
    assert "- The row `none` still lacks 1 of 30 held-out seeds." in page
    assert "- The row `eden` still lacks a complete row of dense training." in page
    assert "- The row `int4` still lacks a worse learning rate on either side of the best of 2 rates, 30 of" in page
    assert "- The row `int8` still lacks a best learning rate less than 8 factors of two away from the first" in page
    assert "- The row `terngrad` still lacks a learning rate that was trained with all seeds of the search and" in page
    assert "- These rows have no training run yet: `eden:bits=1`, `powersgd:rank=4`" in page
    assert "| `eden` |" not in page
    train(own("none", seeds[-1:]))
    page = " ".join(_page(runs, file).split())
    assert "| heavy-tails | 2 | 3 | 12 |" in page
    assert "| `eden` | 13.0 | 0.016 | 2.0000 ± 0.0000 | +0.00 ± 0.00 |" in page
    assert "heavy-tails,int8,4,,,,,,,,,,,,," in file.with_suffix(".csv").read_text()


def test_the_verdict_is_by_the_interval() -> None:
    assert pages.verdict([1.0, 1.1, 0.9]) == "**better**"
    assert pages.verdict([-1.0, -1.1, -0.9]) == "worse"
    assert pages.verdict([-1.0, 1.1, 0.2]) == "no difference shown"
    assert pages.verdict([-1.0]) == "one seed says nothing"


def test_accuracy_is_lost_in_points() -> None:
    assert rows.lost_beside("mnist1d", 88.0, 90.0) == 2.0
    assert rows.lost_beside("gpt", 2.2, 2.0) == pytest.approx(10)
    assert math.isnan(rows.lost_beside("gpt", math.nan, 2.0))


def test_the_seeds_of_the_search_are_not_reported(tmp_path: Path) -> None:
    done = CliRunner().invoke(command.main, ["--page-only", "--runs", str(tmp_path), "--seeds", "0,1"])
    assert done.exit_code == 2
    assert "0 may be a seed of the search; give other seeds, from 101 on" in done.output
    done = CliRunner().invoke(command.main, ["--page-only", "--runs", str(tmp_path)])
    assert "there is no finished training in" in done.output
    done = CliRunner().invoke(command.main, ["--dry-run", "--runs", str(tmp_path), "--only", "edn"])
    assert done.exit_code == 2
    assert "edn is not a row of the benchmark; choose from none, eden" in done.output
