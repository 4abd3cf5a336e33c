"""Checkpoints and decision logs that an earlier version wrote are read, and written in the same form.

`python -m tests.adaptation.test_written_before` writes tests/data/written_before.json anew. The present one was written
when the coordinator was still one class. Keep it as long as checkpoints and logs of that time are to be read.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdcomp.adaptation.decision_log import DecisionLog, DecisionLogError
from hvdcomp.communicators.in_process import InProcessCommunicator, run_ranks
from hvdcomp.errors import ConfigurationError, SpecError
from hvdcomp.policies import Policy, parse_policy
from hvdcomp.policies.request import Candidate, Candidates
from hvdcomp.tools.report.decisions import load_decisions
from hvdcomp.tools.report.replay import replay
from tests.decision_lines import whole_lines, write_as_before
from tests.driven import Driven

FILE = Path(__file__).parents[1] / "data" / "written_before.json"
SHAPES = {"conv": (4, 6), "linear": (5, 5), "bias": (6,)}
STEPS = 16
STOPS = {
    "accordion:low=0.5,high=0.1,steps=3,eta=0.9": 6,
    "accordion_batch_size:low=16,high=32,steps=3,eta=0.9": 6,
    "increase_batch_size:low=16,high=64,steps=3": 12,
    "adaqs:start=8,fall=0.01,steps=3": 5,
    "gravac:min=2,max=8,window=4,omega=0,epsilon=0.5,smoothing=0.3,every=2": 6,
    "constant:level=0.5": 5,
    "auto:calibration=nowhere.json,window=3,every=6": 5,
}
"""By policy, the steps after which its checkpoint was written."""
POLICIES = list(STOPS)
NO_BETTER = "because no measurement showed that it is better than a fixed level that sends the same number of bytes"
REMOVED = {
    "accordion:auto,interval=1,largest=8,eta=0.9,every=2": (
        f"the policy accordion:auto was removed, {NO_BETTER}; use budget:factor=50"
    ),
    "accordion_joint:low=0.5,high=0.1,batch_low=16,batch_high=32,steps=3,eta=0.9": (
        f"the policy accordion_joint was removed, {NO_BETTER}; use accordion for levels, or "
        "accordion_batch_size for the batch"
    ),
    "gravac:min=2,max=8,window=4,omega=0,epsilon=0.5,smoothing=0.3,lag=0": (
        "lag=0 of gravac was removed, because it made all ranks wait for a device in the middle of each step; use "
        "gravac without lag, and every=1 for a decision after each step"
    ),
}
"""What that version wrote of policies that are no more, and what is said of them."""
CANDIDATES = Candidates(
    ("linear", "conv"),
    {"dense": Candidate(1.0, 0, "none"), "compressed": Candidate(0.9, 1, "fp16")},
)


def gradients(rank: int, step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng([rank, step])
    return {name: 0.9**step * rng.standard_normal(shape, dtype=np.float32) for name, shape in SHAPES.items()}


def drive(spec: str, log: Path | None, steps: int, states: list[Any] | None = None) -> list[tuple[Driven, Any]]:
    """Two ranks that make some steps, from the beginning or from the states of a checkpoint; and their checkpoints."""

    def work(communicator: InProcessCommunicator) -> tuple[Driven, Any]:
        policy = parse_policy(spec)
        assert isinstance(policy, Policy)
        ticks = count()
        driven = Driven(
            communicator,
            policy,
            "numpy",
            steps_per_epoch=4,
            rates=lambda step: (1.0 if step < 11 else 0.5,),
            gradients=gradients,
            log=None if log is None else DecisionLog(log),
            state=None if states is None else with_arrays(states[communicator.rank]),
            shapes=SHAPES,
            candidates=CANDIDATES,
            clock=lambda: float(next(ticks)),
        ).run(steps)
        return driven, without_arrays(driven.state())

    return list(run_ranks(2, work))


def without_arrays(value: Any) -> Any:
    """A checkpoint as JSON."""
    if isinstance(value, np.ndarray):
        return {"dtype": str(value.dtype), "array": value.tolist()}
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else f"number {key}": without_arrays(each) for key, each in value.items()}
    return [without_arrays(each) for each in value] if isinstance(value, list | tuple) else value


def with_arrays(value: Any) -> Any:
    """The checkpoint that `without_arrays` was given."""
    if isinstance(value, Mapping) and value.keys() == {"dtype", "array"}:
        return np.array(value["array"], value["dtype"])
    if isinstance(value, Mapping):
        return {
            float(key.removeprefix("number ")) if key.startswith("number ") else key: with_arrays(each)
            for key, each in value.items()
        }
    return [with_arrays(each) for each in value] if isinstance(value, list) else value


def record(spec: str, folder: Path) -> dict[str, Any]:
    """A checkpoint of each rank after some steps, the log of all, and what the others did."""
    log = folder / "decisions.jsonl"
    stopped = drive(spec, None, STOPS[spec])
    ((whole, _), _) = drive(spec, log, STEPS)
    return {
        "states": [state for _, state in stopped],
        "log": whole_lines(log),
        "plans": whole.plans,
        "batches": whole.batches,
    }


def form(value: Any) -> Any:
    """The keys and types of JSON. A number may be whole or not, or a text if it is not finite; so may the version."""
    if isinstance(value, dict):
        return {key: form(each) for key, each in value.items() if key != "hvdcomp"}
    if isinstance(value, list):
        return [form(each) for each in value]
    return "number" if isinstance(value, int | float) or value in ("NaN", "Infinity") else value


@pytest.fixture(scope="module")
def written() -> dict[str, Any]:
    return dict(json.loads(FILE.read_text()))


@pytest.mark.parametrize("spec", POLICIES)
def test_a_checkpoint_goes_on_as_it_did_then(spec: str, written: dict[str, Any]) -> None:
    then = written[spec]
    for resumed, _ in drive(spec, None, STEPS - STOPS[spec], then["states"]):
        assert resumed.plans == then["plans"][STOPS[spec] :]
        assert resumed.batches == then["batches"][STOPS[spec] :]


@pytest.mark.parametrize("spec", POLICIES)
def test_a_log_is_made_again_and_shown(spec: str, written: dict[str, Any], tmp_path: Path) -> None:
    log, lines = tmp_path / "decisions.jsonl", written[spec]["log"]
    write_as_before(log, lines)
    again = replay(log)
    assert again.difference is None
    assert again.decisions == len(lines) - 1
    shown = load_decisions(log)
    assert shown is not None
    assert shown.count == len(lines) - 1


@pytest.mark.parametrize("spec", POLICIES)
def test_the_same_training_writes_the_same_form(spec: str, written: dict[str, Any], tmp_path: Path) -> None:
    now = record(spec, tmp_path)
    assert now["plans"] == written[spec]["plans"]
    assert form(now["log"]) == form(written[spec]["log"])
    for state in now["states"]:
        del state["shared"]["coordinator"]["steps_per_epoch"]  # what earlier versions passed over
    then = json.loads(json.dumps(written[spec]["states"]))
    for state in then:
        assert state["own"]["coordinator"].pop("probe") is None  # what a policy that is no more had measured
    assert form(now["states"]) == form(then)


@pytest.mark.parametrize("spec", REMOVED)
def test_what_a_policy_that_is_no_more_wrote_is_refused_with_the_way_out(
    spec: str, written: dict[str, Any], tmp_path: Path
) -> None:
    """Also where the training goes on with another policy."""
    said = re.escape(REMOVED[spec])
    with pytest.raises(SpecError, match=f"^{re.escape(repr(spec))}: {said}"):
        parse_policy(f" {spec}")
    log = tmp_path / "decisions.jsonl"
    write_as_before(log, written[spec]["log"])
    with pytest.raises(DecisionLogError, match=f"line 1: .*{said}"):
        replay(log)
    shown = load_decisions(log)
    assert shown is not None
    assert shown.left_out == f"{shown.policy!r}: {REMOVED[spec]}"
    assert (shown.policy, shown.count) == (written[spec]["log"][0]["policy"], None)
    with pytest.raises(ConfigurationError, match=f"policy that hvdcomp no longer has: .*{said}"):
        drive("accordion:low=0.5,high=0.1,steps=3", None, 1, written[spec]["states"])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        found = json.loads(FILE.read_text())  # with what nobody can write any more
        for number, one in enumerate(POLICIES):
            (folder := Path(place) / str(number)).mkdir()
            found[one] = record(one, folder)
        FILE.write_text(json.dumps(found, indent=None) + "\n")
