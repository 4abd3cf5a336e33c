"""How many collectives Horovod really runs for a model of many tensors, counted in Horovod's own timeline."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.launched import run_forked_ranks

pytest.importorskip("horovod", reason="Horovod is not built here: run `hvdcomp build-horovod`")

pytestmark = pytest.mark.alone

STEPS = 20


def collectives_by_tensor(timeline: Path) -> Counter[str]:
    """How often each named tensor was reduced or gathered, from a Chrome trace as Horovod writes it."""
    text = timeline.read_text().rstrip().rstrip(",")
    events = json.loads(text if text.endswith("]") else text + "]")
    names = {event["pid"]: event["args"].get("name", "") for event in events if event.get("name") == "process_name"}
    return Counter(
        names[event["pid"]]
        for event in events
        if event.get("ph") == "B" and event.get("name") in ("ALLREDUCE", "ALLGATHER")
    )


@pytest.mark.parametrize(
    ("spec", "expected"), [("topk:ratio=0.01", 2), pytest.param("powersgd:rank=2", 2, marks=pytest.mark.thorough)]
)
def test_161_tensors_take_few_collectives(spec: str, expected: int, tmp_path: Path) -> None:
    timeline = tmp_path / "timeline.json"
    finished = run_forked_ranks(
        2, "gloo", ["-m", "tests.multirank.timeline", spec], {"HOROVOD_TIMELINE": str(timeline)}, timeout=180
    )
    assert finished.returncode == 0, finished.stdout[-3000:]
    counted = collectives_by_tensor(timeline)
    ours = {name: count for name, count in counted.items() if "hvdcomp.round" in name}
    per_tensor = [count for name, count in counted.items() if "layers." in name]
    assert len(per_tensor) == 161, "Horovod names the numbers that ride along after the parameters"
    assert set(per_tensor) == {STEPS}
    assert set(ours.values()) == {STEPS}, ours
    assert len(ours) == expected
