"""The benchmark that looks for what grows: its rule, its cases, and a short run on real ranks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import soak
from hvdcomp.policies import POLICIES, parse_policy
from tests.loaded import ROOT


def looks(memory: float = 0, **last: int) -> list[dict[str, int]]:
    """Eighty looks, 100 steps apart, that grow by so many bytes of memory each; the last is as given."""
    same = {"open_files": 9, "log_files": 3, "log_bytes": 10**5, "weights": 1}
    seen = [{"step": 100 * place, "memory": int(10**8 + memory * place), **same} for place in range(1, 81)]
    return [*seen[:-1], {**seen[-1], **last}]


def test_what_is_flat_and_what_is_not() -> None:
    assert soak.what_grows(looks()) == []
    assert soak.what_grows(looks(10**5)) == []  # 2 MB from quarter to quarter
    assert soak.what_grows(looks(1.2 * 10**5)) == ["memory grew by 2.3 MiB in 2000 steps"]
    one_look = looks()
    one_look[-1]["memory"] *= 10
    assert soak.what_grows(one_look) == []
    assert soak.what_grows(looks(open_files=10)) == ["10 open files, 9 before"]
    assert soak.what_grows(looks(log_bytes=10**6)) == ["the decision log took 1000000 bytes"]


def test_ranks_with_other_weights_are_found() -> None:
    assert soak.where_ranks_differ([looks(), looks(10**6)]) == []
    other = looks()
    for one in other[40:]:
        one["weights"] = 2
    assert soak.where_ranks_differ([looks(), other, looks()]) == ["weights differ at step 4100"]


def test_all_ranks_draw_the_same_faults_and_each_of_them_happens() -> None:
    ranks = [soak.Random("topk"), soak.Random("topk")]
    drawn, others = ([soak.draw(random, 0.05, 2) for _ in range(2000)] for random in ranks)
    assert drawn == others
    happened = [pair for pair in drawn if pair[0] is not None]
    assert 60 < len(happened) < 140
    assert set(happened) == {(fault, rank) for fault in soak.FAULTS for rank in range(2)}


def test_every_policy_has_a_case() -> None:
    tried = {parse_policy(policy.format(calibration="x.json")).name for _, policy in soak.CASES.values() if policy}
    assert tried == {name for name, kind in POLICIES.items() if kind.__module__.startswith("hvdcomp.")}


def test_the_table_tells_what_grew_and_what_failed() -> None:
    cases = {
        "topk": {"ranks": [looks(), looks(10**6)], "grows": ["rank 1: memory"], "faults": {"left out": 3, "nan": 4}},
        "warmup": {"ranks": [], "grows": ["the ranks ended with status 1: see x"], "faults": {}},
        "auto": {"ranks": [looks()], "grows": [], "faults": {"left out": 0, "nan": 0}},
    }
    _, _, topk, warmup, auto = soak.table_of(cases)
    assert topk == "| topk | `topk:ratio=0.01` |  | 134.5 | 171.7 | 9 | 3 | 4 | rank 1: memory |"
    assert "`warmup:levels=0.25\\|0.05,epochs=1`" in warmup
    assert warmup.endswith("|  |  |  |  |  | the ranks ended with status 1: see x |")
    assert auto.endswith("| 95.4 | 95.4 | 9 | 3 | 0 | yes |")


def test_the_page_in_docs_begins_as_the_benchmark_writes_it() -> None:
    page = (ROOT / "docs" / "soak.md").read_text()
    names = re.findall(r"^\| ([^|]+) \| `", page, re.MULTILINE)
    written = soak.page_of({name: {"ranks": [], "grows": [], "faults": {}} for name in names}, 2000, 2, 0.05)
    written = re.sub("at commit `[^`]*`", "at commit `784ad0f`", written)
    assert page.partition("\n| case |")[0] == written.partition("\n| case |")[0]
    assert page.count(" yes |\n") == len(names) == 16


@pytest.mark.alone
@pytest.mark.thorough
def test_a_short_run_on_real_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "soak"
    command = [sys.executable, "-m", "benchmarks.soak", "--steps", "400", "--output", str(folder)]
    names = ["topk", "accordion", "accordion_batch_size", "gravac", "auto"]
    done = subprocess.run(
        [*command, *(word for name in names for word in ("--case", name))],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    report = json.loads((folder / "soak.json").read_text())
    assert done.returncode == any(case["grows"] for case in report["cases"].values()), done.stdout + done.stderr
    assert list(report["cases"]) == names
    for name, case in report["cases"].items():
        # In so few steps memory may still grow.
        assert all("memory" in words for words in case["grows"]), (name, case["grows"])
        assert [len(seen) for seen in case["ranks"]] == [80, 80]
        assert case["faults"]["left out"] >= case["faults"]["nan"] + case["faults"]["inf"] > 0, name
        assert case["ranks"][0][-1]["log_files"] >= (0 if name == "topk" else 2 if name == "accordion" else 1), name
        assert case["ranks"][1][-1]["log_files"] == 0
    page = (folder / "soak.md").read_text()
    assert page.startswith("# Long trainings\n")
    assert page.count("\n|") == 2 + len(names)
