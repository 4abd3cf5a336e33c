"""The benchmark of DDP's communication hooks: what is compared with what, its files, and an emulated cluster."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.steps.places import Place
from benchmarks.times import ddp_hooks
from tests.loaded import ROOT
from tests.tools.bench.test_cluster import _why_not

MEASURED = {
    "compute": [10.0], "DDP": [80.0], "none": [100.0], "fp16_compress_hook": [40.0], "fp16": [50.0], "bf16": [32.0],
    "powerSGD_hook": [24.0], "powersgd:rank=4": [12.0], "int8": [20.0], "topk:ratio=0.01": [16.0],
}  # fmt: skip


def run(rate: str = "1gbit", **times: list[float]) -> dict[str, Any]:
    """What the ranks would write: two rounds of a step of each method, the second twice as slow for all."""
    methods = [
        {
            "method": method,
            "step_ms": [[time[0]], [2 * time[-1]]],
            "median_ms": 1.5 * time[0],
            "quartiles_ms": [time[0], 2 * time[0]],
            "wire_bytes": 100.0 * time[0],
            "ledger_bytes": None if method in ("compute", "DDP") or "hook" in method else 90.0,
        }
        for method, time in {**MEASURED, **times}.items()
    ]
    return {
        "commit": "abc123",
        "hosts": 2,
        "ranks_per_host": 1,
        "rate": rate,
        "model": "mlp",
        "parameters": 1000,
        "versions": {"torch": "2"},
        "refused": {"bf16_compress_hook": "TypeError: not with `gloo`"},
        "methods": methods,
    }


def test_methods_are_compared_with_the_fastest_hook_of_like_accuracy() -> None:
    rows = {row.method: row for row in ddp_hooks.rows_of(run())}
    assert list(rows) == list(MEASURED)
    assert {method: (row.hook, row.over_hook) for method, row in rows.items() if row.hook} == {
        "none": ("DDP", 0.8),
        "fp16": ("fp16_compress_hook", 0.8),
        "bf16": ("fp16_compress_hook", 1.25),
        "powersgd:rank=4": ("powerSGD_hook", 2.0),
    }
    assert rows["int8"].kind == "8 bit"  # of which no hook ran
    assert (rows["topk:ratio=0.01"].kind, rows["topk:ratio=0.01"].over_ddp) == ("", 5.0)
    assert [method for method, row in rows.items() if row.theirs] == ["DDP", "fp16_compress_hook", "powerSGD_hook"]
    assert (rows["compute"].over_ddp, rows["DDP"].over_ddp) == (None, None)
    best = ddp_hooks.best_of_kinds(list(rows.values()))
    assert [(row.kind, row.method) for row in best] == [
        ("dense", "none"), ("cast", "bf16"), ("low rank", "powersgd:rank=4")
    ]  # fmt: skip
    said = ddp_hooks.summary(list(rows.values()))
    assert "In 2 of 3 comparisons, hvdcomp's fastest method is faster" in said
    assert "The smallest speedup is 0.80, of `none` over `DDP` (mlp, 2 hosts, 1gbit)." in said


def test_ratios_are_those_of_rounds() -> None:
    rows = {row.method: row for row in ddp_hooks.rows_of(run(fp16=[50.0, 20.0]))}
    assert rows["fp16"].over_hook == pytest.approx((40 / 50 + 80 / 40) / 2)
    assert rows["fp16"].over_hook_error > 0.1
    assert rows["bf16"].over_hook_error == 0


def test_the_page_in_docs_is_that_of_the_measurements_beside_it() -> None:
    file = ROOT / "docs" / "ddp-hooks" / "ddp-hooks.json"
    details = json.loads(file.read_text())
    assert file.with_suffix(".md").read_text() == ddp_hooks.markdown(details["runs"], details)


def test_the_page_has_the_least_and_the_largest_ratio_of_each_method() -> None:
    runs = [run("10gbit"), run(bf16=[64.0]), run(), run("100mbit", bf16=[16.0])]
    page = ddp_hooks.markdown(runs, {"command": "c", "cores": 2, "batch_size": 4})
    assert "| method | 100mbit | 1gbit | 10gbit | over the hook |" in page
    assert "| fp16_compress_hook | 2.00 | 2.00 | 2.00 |  |" in page
    assert "| bf16 | 5.00 | 1.25 to 2.50 | 2.50 | fp16_compress_hook: 0.62 to 2.50 |" in page
    assert "| topk:ratio=0.01 | 5.00 | 5.00 | 5.00 |  |" in page
    assert "| DDP |" not in page
    assert "| compute |" not in page


def test_every_default_method_is_known_and_its_hooks_are_the_workers() -> None:
    pytest.importorskip("torch")
    from benchmarks.times import ddp_hooks_worker as worker

    assert (ddp_hooks.COMPUTE, ddp_hooks.DENSE) == (worker.COMPUTE, worker.DENSE)
    assert set(ddp_hooks.THEIRS) == {worker.DENSE, *worker.HOOKS}
    kinds = {method: ddp_hooks.kind_of(method) for method in ddp_hooks.METHODS}
    assert set(ddp_hooks.THEIRS) < set(kinds)
    alone = ["powersgd:rank=4,alternating=true", "topk:ratio=0.01", "int4", "efsignsgd"]
    assert [method for method, kind in kinds.items() if not kind] == alone


class Measured:
    """In place of clusters: notes the settings, and fails at one."""

    def __init__(self, module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rates: list[str] = []
        self.broken = ""
        self._error = module.StepsError
        monkeypatch.setattr(module, "measure", self._measure)
        monkeypatch.setattr(module, "check", lambda *_: None)

    def _measure(self, places: list[Place], *_: Any) -> Any:
        for place in places:
            if place.rate == self.broken:
                raise self._error("the link is cut")
            self.rates.append(place.rate)
            yield run(place.rate)


def test_an_interrupted_benchmark_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measured = Measured(ddp_hooks, monkeypatch)
    words = ["--hosts", "2", "--rate", "100mbit,1gbit", "--model", "mlp", "--output", str(tmp_path)]

    def invoke(*more: str) -> Any:
        return CliRunner().invoke(ddp_hooks.main, [*words, *more])

    measured.broken = "1gbit"
    failed = invoke()
    assert failed.exit_code == 1
    assert "the link is cut" in failed.output
    measured.broken = ""
    assert "another command" in invoke("--resume", "--seconds", "1").output
    assert invoke("--resume").exit_code == 0
    assert measured.rates == ["100mbit", "1gbit"]
    found = json.loads((tmp_path / "ddp-hooks.json").read_text())
    assert [one["rate"] for one in found["runs"]] == measured.rates
    with (tmp_path / "ddp-hooks.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows] == 2 * list(MEASURED)
    (bf16,) = (row for row in rows if (row["rate"], row["method"]) == ("100mbit", "bf16"))
    assert (bf16["hosts"], bf16["model"], bf16["kind"], bf16["hook"]) == ("2", "mlp", "cast", "fp16_compress_hook")
    assert (bf16["over_ddp"], bf16["over_hook"], bf16["over_hook_error"]) == ("2.5", "1.25", "0.0")
    page = (tmp_path / "ddp-hooks.md").read_text()
    assert "| method | 100mbit | 1gbit | over the hook |" in page
    assert "| bf16 | 2.50 | 2.50 | fp16_compress_hook: 1.25 |" in page
    assert "[ddp-hooks.csv](ddp-hooks.csv)" in page
    assert "- bf16_compress_hook (everywhere): `TypeError: not with 'gloo'`" in page
    assert "batch size 4" in page


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--method", "topkk"], "unknown compressor 'topkk'"),
        (["--method", "fp32_hook"], "or give a method of PyTorch: DDP, fp16_compress_hook"),
        (["--model", "resnet19"], "resnet19"),
        (["--hosts", "2y2"], "2x4 for 2 hosts"),
    ],
)
def test_what_cannot_be_measured_is_refused_at_once(words: list[str], message: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(ddp_hooks.main, [*words, "--output", str(tmp_path)])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


@pytest.mark.cluster
def test_a_small_setting_from_end_to_end(tmp_path: Path) -> None:
    reason = _why_not()
    if reason is not None:
        pytest.skip(reason)
    methods = ("DDP", "fp16_compress_hook", "powerSGD_hook", "batched_powerSGD_hook", "fp16", "topk:ratio=0.01")
    words = [word for method in methods for word in ("--method", method)]
    words += ["--hosts", "2", "--rate", "1gbit", "--model", "mlp", "--seconds", "0", "--output", str(tmp_path)]
    done = CliRunner().invoke(ddp_hooks.main, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "ddp-hooks.json").read_text())
    rows = {row["method"]: row for row in found["rows"]}
    refused = found["runs"][0]["refused"]
    assert [*rows, *refused] == ["compute", *(name for name in methods if name not in refused), *refused]
    assert set(refused) <= {"batched_powerSGD_hook"}
    dense = 4 * found["runs"][0]["parameters"]
    # A ring of two sends the gradient once. Headers take a part of it, and packets of acknowledgement come on top.
    assert dense < rows["DDP"]["wire_bytes"] < 1.15 * dense
    for method in ("fp16_compress_hook", "fp16"):
        assert dense / 2 < rows[method]["wire_bytes"] < 1.15 * dense / 2
    for method in ("powerSGD_hook", "topk:ratio=0.01"):
        assert 0 < rows[method]["wire_bytes"] < dense / 20
    assert rows["topk:ratio=0.01"]["ledger_bytes"] < rows["topk:ratio=0.01"]["wire_bytes"]
    assert rows["DDP"]["median_ms"] > 0.9 * 8000 * dense / 1e9  # the link's own time
    assert rows["fp16"]["hook"] == "fp16_compress_hook"
