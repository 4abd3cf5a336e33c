"""The files of a decision log: how large they become, and how a log goes on in a new one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hvdcomp
from hvdcomp.adaptation.decision_log import DecisionLog, DecisionLogError, Start, read_decisions
from hvdcomp.errors import SpecError
from hvdcomp.files import put_aside_before
from hvdcomp.perfmodel.shapes import tensors_of
from hvdcomp.policies import POLICIES, Policy
from hvdcomp.policies.request import (
    Candidate,
    Candidates,
    GravacGains,
    LearningRates,
    LevelTable,
    Statistic,
    Statistics,
    Timing,
)
from hvdcomp.tools.report.decisions import load_decisions
from hvdcomp.tools.report.replay import replay
from hvdcomp.tools.train.options import SetupError
from hvdcomp.tools.train.outputs import RunWriter, check_output
from tests.adaptation.test_decision_log import fill_up
from tests.adaptation.test_replay import drive, each_spec, policy_of
from tests.decision_lines import whole_lines, write_as_before

TENSORS = {tensor.name: tensor.shape for tensor in tensors_of("resnet50")}
LEVELS = (4, 2, 3, 5, 6, 8)
LIMITS = {
    "accordion:low=4,high=1,steps=10": 3600,
    "accordion_batch_size:low=512,high=4096,steps=10": 320,
    "increase_batch_size:low=128,high=2048": 320,
    "adaqs:start=64,fall=0.2,steps=10": 3800,
    "gravac:min=10,max=1000": 550,
    "lgreco": 17_000,
    "budget:factor=50": 17_000,
    "budget:ms=20,calibration=nowhere.json": 17_300,
    "budget:factor=50,critical=10": 17_100,
    "auto:calibration=nowhere.json": 1700,
}
OTHER_BUDGETS = {"budget:ms=20,calibration=nowhere.json", "budget:factor=50,critical=10"}  # log as budget:factor=50
"""By policy, bytes of a decision, on average over 60. Where it looks at tensors, the first versions took 26 000."""


def known(policy: Policy[Any], state: Any, step: int, random: np.random.Generator) -> Statistics:
    """What a training might tell of ResNet-50: norms and ratios that fall slowly, and are noisy."""

    def by_tensor() -> dict[str, float]:
        return {name: float(0.99**step * (1 + place) * random.uniform(0.8, 1)) for place, name in enumerate(TENSORS)}

    def candidates() -> Candidates:
        order = tuple(np.array(list(TENSORS))[random.permutation(len(TENSORS))].tolist())
        rests = {"dense": "none", "fp16": "fp16", "compressed": "fp16", "compressed and dense": "none"}
        return Candidates(order, {name: Candidate(random.uniform(0.09, 0.1), 54, rest) for name, rest in rests.items()})

    told: dict[Statistic, Callable[[], Any]] = {
        Statistic.NORMS: by_tensor,
        Statistic.MEAN_TO_STD: by_tensor,
        Statistic.MODEL_NORM: lambda: float(0.99**step * random.uniform(0.8, 1)),
        Statistic.LEARNING_RATES: lambda: LearningRates((0.1,), (0.1,) if step % 200 else (0.01,)),
        Statistic.GAINS: lambda: GravacGains(random.uniform(), state.candidate and random.uniform(), ranks=16),
        Statistic.TIMING: lambda: Timing(640, random.uniform(), random.uniform()),
        Statistic.CANDIDATES: candidates,
        Statistic.STEP_TIMES: lambda: tuple(random.uniform(0.098, 0.1, 20).tolist()),
        Statistic.LEVEL_TABLE: lambda: LevelTable(
            {name: {level: float(f"{random.uniform() / level:.6g}") for level in LEVELS} for name in TENSORS},
            {name: {level: 4096 * level for level in LEVELS} for name in TENSORS},
            dict.fromkeys(TENSORS, LEVELS[0]),
            other_bytes=4096,
            dense_bytes=4096 * 64 * len(TENSORS),
            norm=float(f"{random.uniform():.6g}") if policy.name == "budget" else None,
        ),
        Statistic.EXCHANGE_SECONDS: lambda: {
            4096 * len(TENSORS) * level: float(f"{0.001 + 0.004 * level:.6g}") for level in range(1, 14)
        },
    }
    found = {each.value: told[each]() for each in policy.request(state).statistics}
    return Statistics(step=step, epoch=step // 100, **found)


def sizes_of_lines(path: Path, policy: Policy[Any], moments: int) -> list[int]:
    """The bytes of the lines that so many decisions of a policy make of ResNet-50, the start line first."""
    random = np.random.default_rng(1)
    state, step = policy.initial_state(tuple(TENSORS)), 0
    log = DecisionLog(path)
    log.start(
        step=0, epoch=0, policy=str(policy), compressor="powersgd:rank=4", tensors=TENSORS, steps_per_epoch=100,
        ranks=16, state=policy.to_json(state), decision=policy.decision(state).to_json(),
    )  # fmt: skip
    for _ in range(moments):
        period = policy.request(state).period
        assert period is not None
        step = max(step + (period.steps or 100 * period.epochs), period.until)
        told = known(policy, state, step, random)
        state, decision = policy.decide(state, told)
        log.decision(
            step=step, epoch=step // 100, from_step=step + policy.lag, statistics=told, state=policy.to_json(state),
            decision=decision.to_json(),
        )  # fmt: skip
    log.close()
    return [len(line) for line in path.read_bytes().splitlines(keepends=True)]


@pytest.mark.parametrize(
    "spec", [pytest.param(spec, marks=[pytest.mark.thorough] * (spec in OTHER_BUDGETS)) for spec in LIMITS]
)
def test_a_decision_about_resnet50_takes_few_bytes(spec: str, tmp_path: Path) -> None:
    assert len(TENSORS) == 161
    path = tmp_path / "decisions.jsonl"
    start, *decisions = sizes_of_lines(path, policy_of(spec), 60)
    assert start < 11_000
    assert np.mean(decisions) < LIMITS[spec]
    assert replay(path).difference is None
    before = tmp_path / "before.jsonl"
    write_as_before(before, whole_lines(path))
    assert whole_lines(before) == whole_lines(path)


def test_every_policy_has_a_limit() -> None:
    named = {spec.partition(":")[0] for spec in LIMITS}
    decide = {name for name, kind in POLICIES.items() if issubclass(kind, Policy)}
    assert named == decide - {"constant"}, "constant never decides"


def decided(path: Path) -> list[dict[str, Any]]:
    return [line for line in whole_lines(path) if line["kind"] == "decision"]


@each_spec
def test_a_log_of_many_files_is_the_same_as_one_of_a_single_file(spec: str, tmp_path: Path) -> None:
    policy, one, many = policy_of(spec), tmp_path / "one.jsonl", tmp_path / "many.jsonl"
    for path, limits in ((one, {}), (many, {"file_bytes": 2000, "files": 100})):
        state = drive(path, policy, 11, 3, **limits)
        drive(path, policy, 30, 4, state, first=11, **limits)
    files = [*put_aside_before(many).values(), many]
    assert len(files) > 3
    assert decided(many) == decided(one)
    whole, parts = replay(one), replay(many)
    assert (parts.difference, parts.starts, parts.decisions) == (None, 2, 41) == (None, whole.starts, whole.decisions)
    newest = tmp_path / "newest.jsonl"
    newest.write_bytes(many.read_bytes())
    alone = [replay(file) for file in [*files[:-1], newest]]
    assert all(each.difference is None and each.decisions for each in alone)
    assert sum(each.decisions for each in alone) == 41
    shown, told = load_decisions(many), load_decisions(one)
    assert shown is not None
    assert told is not None
    assert (shown.count, shown.end) == (told.count, told.end) == (41, 41)
    for name, values in vars(told).items():
        np.testing.assert_equal(vars(shown)[name], values, err_msg=name)


def test_a_full_file_is_put_aside_and_the_oldest_goes(tmp_path: Path) -> None:
    path = tmp_path / "run.1" / "decisions.jsonl"
    policy = policy_of("accordion:low=4,high=1,steps=2")
    drive(path, policy, 200, 5, file_bytes=3000, files=4)
    aside = put_aside_before(path)
    first, *others = aside
    assert first > 3
    assert others == [first + 1, first + 2]
    assert [file.name for file in aside.values()] == [f"decisions.{number}.jsonl" for number in aside]
    assert sorted(path.parent.iterdir()) == sorted([*aside.values(), path])
    for file in aside.values():
        lines = file.read_bytes().splitlines(keepends=True)
        assert file.stat().st_size >= 3000 > file.stat().st_size - len(lines[-1])
        start, *rest = read_decisions(file)
        assert isinstance(start, Start)
        assert start.continues
        assert len(rest) > 3
    done = replay(path)
    assert (done.difference, done.starts, done.last_step) == (None, 1, 200)
    assert done.first_step is not None
    assert done.decisions == 200 - done.first_step + 1 < 200
    log = load_decisions(path)
    assert log is not None
    assert log.steps.tolist() == list(range(done.first_step, 202))


def test_a_run_that_is_resumed_goes_on_in_the_file_unless_that_is_full(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    policy = policy_of("gravac")
    state = drive(path, policy, 3, 1, file_bytes=10**6)
    state = drive(path, policy, 3, 2, state, first=3, file_bytes=10**6)
    assert put_aside_before(path) == {}
    drive(path, policy, 3, 3, state, first=6, file_bytes=100)
    assert (tmp_path / "decisions.1.jsonl").read_bytes().count(b"start") == 2
    first = next(iter(read_decisions(tmp_path / "decisions.2.jsonl")))
    assert isinstance(first, Start)
    assert (first.step, first.continues) == (6, False)
    assert replay(path).starts == 3


def test_a_file_that_begins_within_the_first_step(tmp_path: Path) -> None:
    """Which obeys a decision, and is not what a training begins with."""
    policy, path = policy_of("gravac"), tmp_path / "decisions.jsonl"
    drive(path, policy, 2, 1, file_bytes=1)
    files = [*put_aside_before(path).values(), path]
    start, *_ = read_decisions(files[1])
    assert isinstance(start, Start)
    files[1].write_text(files[1].read_text().replace(f'"step":{start.step},', '"step":0,', 1))
    alone = tmp_path / "alone.jsonl"
    alone.write_bytes(files[1].read_bytes())
    done = replay(alone)
    assert (done.difference, done.starts, done.decisions) == (None, 1, 1)


def test_a_log_of_an_earlier_version_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    policy = policy_of("accordion:low=4,high=1,steps=2")
    state = drive(path, policy, 5, 1)
    write_as_before(path, whole_lines(path))
    drive(path, policy, 5, 2, state, first=5)
    lines = path.read_bytes().splitlines()
    assert lines[1].startswith(b'{"kind": "decision", "step": 1')
    assert lines[-1].startswith(b'{"kind":"decision","step":10')
    done = replay(path)
    assert (done.difference, done.starts, done.decisions) == (None, 2, 10)
    log = load_decisions(path)
    assert log is not None
    assert log.count == 10


def test_what_stands_between_two_files_is_missed(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    drive(path, policy_of("gravac"), 40, 1, file_bytes=1500)
    assert len(put_aside_before(path)) > 3
    changed = tmp_path / "decisions.2.jsonl"
    before = changed.read_bytes()
    changed.write_bytes(before[: before.rindex(b'{"kind"')])
    difference = replay(path).difference
    assert difference is not None
    assert (difference.file, difference.line) == (tmp_path / "decisions.3.jsonl", 1)
    changed.write_bytes(before[:-30])  # its last line alone is lost
    assert sum(1 for _ in read_decisions(path)) == 40 + len(put_aside_before(path))
    changed.unlink()
    with pytest.raises(DecisionLogError, match=r"between decisions\.1\.jsonl and decisions\.3\.jsonl is missing"):
        replay(path)


def test_a_run_killed_as_it_began_a_new_file(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    policy = policy_of("gravac")
    drive(path, policy, 6, 1, file_bytes=10**6)
    path.rename(tmp_path / "decisions.1.jsonl")
    path.write_bytes(b'{"kind":"start","for')
    assert replay(path).decisions == 6
    drive(path, policy, 6, 1)
    assert replay(path).decisions == 12


def test_a_disk_that_is_full_when_a_new_file_begins(tmp_path: Path) -> None:
    """In a process of its own, whose files cannot become as large as a start line: a real error of a real write."""
    path = tmp_path / "decisions.jsonl"
    before = "log = DecisionLog(path, file_bytes=1)\nlog.start(**START)\nlog.decision(**MADE)"
    fill_up(path, before, "50", "log.decision(**MADE)")
    assert path.read_bytes() == b""
    assert [type(record).__name__ for record in read_decisions(path)] == ["Start", "Decided"]


@pytest.mark.parametrize(("before", "after"), [(0, 5), (7, 40), (40, 0), (40, 60)])
def test_a_run_goes_on_from_a_checkpoint_before_files_were_put_aside(tmp_path: Path, before: int, after: int) -> None:
    """Decisions that were made after the checkpoint are gone, in whatever file they were."""
    path, policy = tmp_path / "decisions.jsonl", policy_of("gravac")
    writer = RunWriter(tmp_path, tensorboard=False)
    state = drive(path, policy, before, 1, file_bytes=1500, files=99) if before else None
    sizes, then = writer.sizes(), {file.name: file.read_bytes() for file in tmp_path.glob("decisions*")}
    drive(path, policy, after, 2, state, first=before, file_bytes=1500, files=99)
    check_output(tmp_path, False, json.loads(json.dumps(sizes)))
    RunWriter(tmp_path, tensorboard=False, sizes=sizes)
    assert {file.name: file.read_bytes() for file in tmp_path.glob("decisions*")} == then
    drive(path, policy, 10, 3, state, first=before, file_bytes=1500, files=99)
    assert replay(path).decisions == before + 10


def test_an_output_that_holds_files_of_a_log_is_not_overwritten_unasked(tmp_path: Path) -> None:
    drive(tmp_path / "decisions.jsonl", policy_of("gravac"), 30, 1, file_bytes=1500)
    (tmp_path / "decisions.jsonl").unlink()
    with pytest.raises(SetupError, match=r"already contains a run \(decisions.1.jsonl\)"):
        check_output(tmp_path, overwrite=False)
    RunWriter(tmp_path, tensorboard=False)
    assert list(tmp_path.glob("decisions*")) == []


def test_a_checkpoint_whose_place_in_the_log_was_removed_since_is_refused(tmp_path: Path) -> None:
    path, policy = tmp_path / "decisions.jsonl", policy_of("gravac")
    writer = RunWriter(tmp_path, tensorboard=False)
    state = drive(path, policy, 3, 1, file_bytes=1500, files=2)
    sizes = writer.sizes()
    drive(path, policy, 60, 2, state, first=3, file_bytes=1500, files=2)
    with pytest.raises(SetupError, match=r"decisions\.jsonl does not belong to the run"):
        check_output(tmp_path, False, sizes)


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"decision_log_bytes": 0}, "decision_log_bytes=0 is not allowed; give a whole number of at least 1"),
        ({"decision_log_bytes": 1e6}, "decision_log_bytes=1000000.0 is not allowed"),
        ({"decision_log_files": 1}, "decision_log_files=1 is not allowed; give a whole number of at least 2"),
    ],
)
def test_limits_that_cannot_be(limits: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        hvdcomp.Compression(hvdcomp.TopK(ratio=0.01), decision_log="decisions.jsonl", **limits)
