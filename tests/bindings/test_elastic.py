"""Elastic Horovod on real ranks: workers come and go, by the list of hosts and by SIGKILL, and training goes on."""

from __future__ import annotations

import json
import math
import os
import socket
from itertools import groupby
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.launched import run_ranks

pytestmark = [pytest.mark.alone, pytest.mark.thorough]

# What Horovod's launcher counts as this machine: it starts workers there without ssh, and gives up a host of which a
# worker was killed.
HERE, THERE = "localhost", "127.0.0.1"
DIRECT = {"min_numel": 0, "min_ndim": 1}
EVERY_EPOCH = {"policy": "accordion:low=4,high=1,interval=2", "steps_per_epoch": 10}
WAITS = 10  # seconds that Horovod waits for a rank that does not answer, by default 30


def third_host() -> str:
    """Another address of this machine."""
    for addresses in psutil.net_if_addrs().values():
        for one in addresses:
            if one.family == socket.AF_INET and one.address != "127.0.0.1":
                return one.address
    pytest.skip("this machine has no address but 127.0.0.1, and three hosts are needed")


def trained(folder: Path, module: str, hosts: str, count: int, phases: list[dict[str, Any]], **plan: Any) -> list[Any]:
    """Runs a training, of which every rank must end well; what its ranks wrote down."""
    listed, script, file = folder / "hosts", folder / "discover", folder / "plan.json"
    folder.mkdir(exist_ok=True)
    listed.write_text(hosts)
    script.write_text(f"#!/bin/sh\ncat {listed}\n")
    script.chmod(0o755)
    plan = {"options": DIRECT} | plan | {"folder": str(folder), "hosts": str(listed), "phases": phases}
    file.write_text(json.dumps(plan))
    environment = {"HOROVOD_GLOO_TIMEOUT_SECONDS": str(WAITS), "PYTHONPATH": os.getcwd()}
    arguments = ["-m", f"tests.multirank.{module}", str(file)]
    ended = run_ranks(count, "gloo", arguments, environment, timeout=300, hosts=script)
    assert ended.returncode == 0, ended.stdout[-6000:]
    rows = [json.loads(line) for each in folder.glob("*.jsonl") for line in each.read_text().splitlines()]
    assert any("right" in row for row in rows), ended.stdout[-6000:]
    return [{"said": ended.stdout}, *rows]


def by_step(rows: list[Any]) -> dict[tuple[int, int], list[Any]]:
    """What the ranks had after each step, by its number and how many they were."""
    steps: dict[tuple[int, int], list[Any]] = {}
    for row in rows:
        if "step" in row:
            steps.setdefault((row["step"], row["size"]), []).append(row)
    return dict(sorted(steps.items()))


def check(rows: list[Any], sizes: list[int]) -> None:
    """Weights and all else that is common are equal on all ranks after every step, and the ranks were so many."""
    steps = by_step(rows)
    for (step, size), ranks in steps.items():
        for what in ("weights", "levels", "accumulation", "engine_step"):
            assert len({json.dumps(one[what]) for one in ranks}) == 1, (step, size, what, ranks)
        assert all(math.isfinite(one["loss"]) for one in ranks)
    found = [size for _, size in steps]
    assert [size for size, _ in groupby(found)] == sizes
    # A step that a rank had made when another failed is made again: no step is left out.
    assert sorted({step for step, _ in steps}) == list(range(1, max(steps)[0] + 1))


def undisturbed(folder: Path, module: str, rows: list[Any], **plan: Any) -> float:
    """How many digits a training of two ranks has right after as many steps."""
    steps = max(row["step"] for row in rows if "step" in row)
    rows = trained(folder, module, f"{HERE}:2", 2, [{"sizes": [2], "steps": steps}], **plan)
    return rows[-1]["right"]


COMES_AND_GOES = [
    {"sizes": [2], "steps": 60, "hosts": f"{HERE}:2\n{THERE}:1"},
    {"sizes": [3], "steps": 60, "kill": [2]},
    {"sizes": [2], "steps": 60, "hosts": f"{HERE}:1"},
    {"sizes": [1], "steps": 20, "hosts": f"{HERE}:2"},
    {"sizes": [2], "steps": 400},  # until both trainings have learned what they can
]


WAYS = {
    "topk": ("topk:ratio=0.05", DIRECT),
    "powersgd with accordion": ("powersgd:rank=2", DIRECT | EVERY_EPOCH),
    "qsgd in scatter": ("qsgd:bits=4,exchange=scatter", DIRECT),
}


@pytest.mark.parametrize(
    ("module", "way"),
    [
        *(("elastic_torch", way) for way in WAYS),
        ("elastic_tensorflow", "powersgd with accordion"),  # which keeps the most
        ("elastic_keras", "topk"),
    ],
)
def test_workers_come_and_go(module, way, tmp_path):
    spec, options = WAYS[way]
    plan = {"compressor": spec, "options": options, "commit": 3}
    rows = trained(tmp_path / "disturbed", module, f"{HERE}:2", 2, COMES_AND_GOES, **plan)
    check(rows, [2, 3, 2, 1, 2])
    if "policy" in options:
        assert len({tuple(row["levels"]) for row in rows if "step" in row}) > 1  # it has decided
    right = {row["right"] for row in rows if "right" in row}
    assert len(right) == 1
    assert right.pop() >= undisturbed(tmp_path / "undisturbed", module, rows, **plan) - 0.01


@pytest.mark.parametrize("optimizer", ["adamw", "frozen", "local"])
def test_a_worker_joins_an_adam(optimizer, tmp_path):
    """With local steps the weights, which are compared after exchanges, are those of a common round from then on."""
    phases = [{"sizes": [2], "steps": 30, "hosts": f"{HERE}:2\n{THERE}:1"}, {"sizes": [3], "steps": 30}]
    plan = {"compressor": "efsignsgd", "optimizer": optimizer, "commit": 1 if optimizer == "local" else 2}
    rows = trained(tmp_path, "elastic_torch", f"{HERE}:2", 2, phases, **plan)
    check(rows, [2, 3])
    exchanges = [row["step"] for row in rows if row.get("size") == 3 and row["rank"] == 0 and row["weights"]]
    assert len(exchanges) >= (7 if optimizer == "local" else 30)


@pytest.mark.parametrize("module", ["elastic_torch", "elastic_tensorflow"])
def test_rank_0_is_killed(module, tmp_path):
    """Another one decides from then on, who has not seen the period under way."""
    hosts = f"{HERE}:1\n{THERE}:1\n{third_host()}:1"
    phases = [{"sizes": [3], "steps": 25, "kill": [0]}, {"sizes": [2], "steps": 60}]
    plan = {"compressor": "powersgd:rank=2", "options": DIRECT | EVERY_EPOCH}
    rows = trained(tmp_path, module, hosts, 3, phases, **plan)
    check(rows, [3, 2])
    assert "1 of 3 ranks are gone (0)" in rows[0]["said"]
    assert len({tuple(row["levels"]) for row in rows if row.get("size") == 2}) > 1


def test_the_batch_grows_while_workers_come_and_go(tmp_path):
    """A new rank reads how many passes to make before its first step."""
    options = DIRECT | {"policy": "increase_batch_size:low=32,high=64,steps=5"}
    phases = [
        {"sizes": [2], "steps": 20, "hosts": f"{HERE}:2\n{THERE}:1"},
        {"sizes": [3], "steps": 20, "kill": [2]},
        {"sizes": [2], "steps": 20},
    ]
    plan = {"compressor": "topk:ratio=0.05", "options": options, "decays_at": 8}
    rows = trained(tmp_path, "elastic_torch", f"{HERE}:2", 2, phases, **plan)
    check(rows, [2, 3, 2])
    assert {row["accumulation"] for row in rows if row.get("size") == 3} == {2}


def test_failure_before_the_first_commit(tmp_path):
    """All go back to the beginning, where nothing was held back."""
    hosts = f"{HERE}:1\n{THERE}:1\n{third_host()}:1"
    phases = [{"sizes": [3, 2], "steps": 4, "kill": [2]}, {"sizes": [2], "steps": 20}]
    rows = trained(tmp_path, "elastic_torch", hosts, 3, phases, compressor="topk:ratio=0.05", commit=0)
    steps = by_step(rows)
    assert [row["engine_step"] for row in steps[1, 2]] == [1, 1]
    for ranks in steps.values():
        assert len({json.dumps(one["weights"]) for one in ranks}) == 1


@pytest.mark.parametrize(
    ("local", "new"),
    # With an outer momentum of 0.9 and of so little sent the loss goes up and down, in a fixed number of ranks too.
    [
        ({"every": 7, "outer_momentum": 0.5}, 2),
        ({"every": 8, "outer_momentum": 0.5, "fragments": 2, "delay": 3, "local_share": 0.5}, 1),
    ],
    ids=["at once", "streaming"],
)
def test_local_steps_go_on_in_mid_round(local, new, tmp_path):
    """Those that go on have their own weights; new ones begin with the outer weights, and moments of rank 0. Where one
    of a host's ranks is killed, Horovod ends them all."""
    phases = [
        {"sizes": [2], "steps": 30, "hosts": f"{HERE}:2\n{THERE}:{new}"},
        {"sizes": [2 + new], "steps": 30, "kill": [2]},
        {"sizes": [2], "steps": 160},
    ]
    plan = {"compressor": "topk:ratio=0.05", "commit": 3, "local": local}
    rows = trained(tmp_path, "elastic_local_steps", f"{HERE}:2", 2, phases, **plan)
    check(rows, [2, 2 + new, 2])
    gone = ", ".join(map(str, range(2, 2 + new)))
    assert f"{new} of {2 + new} ranks are gone ({gone})" in rows[0]["said"]
    assert len({row["ends"] for row in rows if "ends" in row}) == 1
    assert min(row["right"] for row in rows if "right" in row) > 0.8
    logs = [[json.loads(line) for line in file.read_text().splitlines()] for file in tmp_path.glob("*.jsonl")]
    joined = [log for log in logs if log[0]["begins"] > 0]
    assert len(joined) == new
    (began,) = {log[0]["begins"] for log in joined}
    assert all(log[0]["at_outer"] and log[0]["moments"] for log in joined)
    others = [row for log in logs for row in log if log not in joined and row.get("begins") == began]
    assert len(others) >= 2
    in_round = "fragments" in local or began % local["every"] > 0
    assert all(row["at_outer"] != in_round for row in others)
