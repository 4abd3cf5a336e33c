"""`hvdcomp replay`, on logs of policies that were really driven, as they are and with one place changed."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import example, given
from hypothesis import strategies as st

from hvdcomp.adaptation.decision_log import DecisionLog, DecisionLogError, read_decisions
from hvdcomp.policies import POLICIES, Policy, parse_policy
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
from hvdcomp.tools.cli import main
from hvdcomp.tools.report.replay import replay
from tests.decision_lines import whole_lines, write_as_before
from tests.harness import fewer_examples

TENSORS = {"conv.weight": (32, 1, 3, 3), "fc.weight": (10, 128), "NaN": (10,)}  # a name is never taken for a number
EXAMPLES = [spec for kind in POLICIES.values() if issubclass(kind, Policy) for spec in kind.examples]
SPECS = [
    *EXAMPLES,
    "accordion:low=0.99,high=0.1,interval=3",
    "accordion:low=2,high=1,steps=4,statistic=aggregated",
    "accordion_batch_size:low=512,high=4096,interval=2,lag=0",
    "increase_batch_size:low=128,high=2048",
    "adaqs:start=16,fall=0.2",
    "gravac:min=10,max=200,window=2,omega=0.2,epsilon=0.4",
    "gravac:min=10,max=200,window=3,omega=0.2,epsilon=0.4,scaling=geometric,smoothing=0.5",
    "gravac:min=10,max=200,window=2,omega=0.2,epsilon=0.4,factor=elements,gain=raw",
    "lgreco:interval=1,alpha=1.5",
    "budget:factor=4,interval=3,last=1",
    "budget:error=0.5,interval=2,last=1",
    "budget:factor=4,critical=2,interval=1,last=1",
    "budget:ms=3,calibration=nowhere.json,interval=2,last=1",
    "auto:calibration=nowhere.json",  # what was in it stands in the log
    "auto:calibration=nowhere.json,window=3,every=5,budget=0.3",
]
each_spec = pytest.mark.parametrize(
    "spec", [pytest.param(spec, marks=[pytest.mark.thorough] * (spec not in EXAMPLES)) for spec in SPECS]
)


def policy_of(spec: str) -> Policy[Any]:
    policy = parse_policy(spec)
    assert isinstance(policy, Policy)
    return policy


def drawn_statistics(policy: Policy[Any], state: Any, step: int, draw: random.Random) -> Statistics:
    """Any numbers for what the policy wants; now and then such as are not finite."""

    def number() -> float:
        special = draw.choice([math.nan, math.inf, 0.0, 5e-324])
        return special if draw.random() < 0.1 else draw.choice([0.1, 0.5, 1.0, 2.0]) * draw.random()

    def by_tensor() -> dict[str, float]:
        return {name: number() for name in TENSORS}

    def rates() -> tuple[float, float]:
        return draw.choice([0.1, 0.1, 0.02, 1 / 3]), draw.random()

    def level_table() -> LevelTable:
        names, levels = list(TENSORS)[draw.randint(0, 1) :], (0.05, 0.1, 0.2)
        errors = {name: {level: number() for level in levels} for name in names}
        sent = {name: {level: draw.randint(1, 9) for level in levels} for name in names}
        own = dict.fromkeys(names, 0.1)
        return LevelTable(errors, sent, own, draw.randint(0, 9), draw.randint(1, 90), draw.random())

    asked = policy.request(state).statistics
    made: dict[Statistic, Callable[[], Any]] = {
        Statistic.NORMS: by_tensor,
        Statistic.MODEL_NORM: number,
        Statistic.MEAN_TO_STD: by_tensor,
        Statistic.LEARNING_RATES: lambda: LearningRates(rates(), rates()),
        Statistic.GAINS: lambda: GravacGains(number(), None if state.candidate is None else number(), ranks=20),
        Statistic.CANDIDATES: lambda: Candidates(
            tuple(sorted(TENSORS, key=lambda name: draw.random())),
            {name: Candidate(0.1 + draw.random(), 2, rest) for name, rest in (("dense", "none"), ("other", None))},
        ),
        Statistic.STEP_TIMES: lambda: tuple(number() for _ in range(draw.randint(0, 9))),
        Statistic.TIMING: lambda: Timing(draw.randint(1, 640), number(), number() / 10),
        Statistic.LEVEL_TABLE: level_table,
        Statistic.EXCHANGE_SECONDS: lambda: {draw.randint(1, 20): 0.01 * draw.random() for _ in range(3)},
    }
    known = {each.value: made[each]() for each in sorted(asked, key=lambda each: each.value)}
    return Statistics(step=step, epoch=draw.choice([None, step // 3]), **known)


def drive(
    path: Path, policy: Policy[Any], moments: int, seed: int, state: Any = None, first: int = 0, **limits: int
) -> Any:
    """Drives the policy, from its beginning or from a state, and logs it as a training does; returns the last state."""
    draw = random.Random(seed)
    state = policy.initial_state(tuple(TENSORS)) if state is None else state
    log = DecisionLog(path, **limits)
    log.start(
        step=first, epoch=0, policy=str(policy), compressor="topk:ratio=0.01", tensors=TENSORS, steps_per_epoch=3,
        ranks=2, state=policy.to_json(state), decision=policy.decision(state).to_json(),
    )  # fmt: skip
    for step in range(first + 1, first + moments + 1):
        statistics = drawn_statistics(policy, state, step, draw)
        state, decision = policy.decide(state, statistics)
        log.decision(
            step=step, epoch=None, from_step=step + policy.lag, statistics=statistics, state=policy.to_json(state),
            decision=decision.to_json(),
        )  # fmt: skip
    log.close()
    return state


def run(path: Path, *options: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(main, ["replay", str(path), *options])


def tamper(path: Path, line: int, place: tuple[str, ...], change: Any) -> Any:
    """Changes one value of a line, to what `change` gives or is; returns what stood there."""
    lines = whole_lines(path)
    inner = lines[line - 1]
    for key in place[:-1]:
        inner = inner[key]
    old = inner[place[-1]]
    inner[place[-1]] = change(old) if callable(change) else change
    write_as_before(path, lines)
    return old


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "decisions.jsonl"


@pytest.mark.parametrize("spec", SPECS)
@fewer_examples(3)
@given(moments=st.integers(0, 30), seed=st.integers(0, 2**32), stop=st.integers(0, 30))
@example(moments=0, seed=1979627, stop=15)  # step times of 5e-324 s, which no clock can tell
def test_all_is_made_again(spec: str, moments: int, seed: int, stop: int) -> None:
    policy = policy_of(spec)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "decisions.jsonl"
        state = drive(path, policy, stop, seed)
        drive(path, policy, moments, seed + 1, state, first=stop)
        done = replay(path)
        shown = run(path)
    assert (done.difference, done.starts, done.decisions) == (None, 2, stop + moments)
    assert done.policies == [str(policy)]
    assert (done.first_step, done.last_step) == ((1, stop + moments) if stop + moments else (None, None))
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.startswith(f"{policy}: {stop + moments} decision")
    assert "resumed 1x: all as logged\n" in shown.stdout
    assert shown.stdout.count("\n") == 1


@each_spec
def test_any_changed_decision_or_state_is_found_at_its_line(spec: str, tmp_path: Path) -> None:
    """One leaf after the other of each line's decision and state."""
    whole = tmp_path / "whole.jsonl"
    drive(whole, policy_of(spec), 8, seed=7)
    changed = tmp_path / "changed.jsonl"
    tried = 0
    for line, data in enumerate(whole_lines(whole), 1):
        leaves = [place for name in ("decision", "state") for place in leaves_of(data[name], (name,))]
        for place in random.Random(line).sample(leaves, min(6, len(leaves))):
            if place[-1] == "policy" and line == 1:
                continue  # that is an error: see below
            changed.write_bytes(whole.read_bytes())
            old = tamper(changed, line, place, other_than)
            tried += 1
            refusal = ""
            try:
                difference = replay(changed).difference
            except DecisionLogError as error:
                refusal = str(error)
            if refusal:  # no policy of this kind has such a state, whatever it decided
                assert (line, place[0]) == (1, "state")
                assert refusal.startswith(f"{changed}, line 1: ")
                assert place[-1] in refusal
                continue
            assert difference is not None
            assert difference.line == line
            assert difference.step == data["step"]
            if difference.refusal is None and line > 1:
                [part] = difference.parts
                assert part.place == place
                assert part.recomputed == old
    assert tried > 20


def leaves_of(value: Any, place: tuple[str, ...]) -> list[tuple[str, ...]]:
    if isinstance(value, dict):
        return [leaf for key, inner in value.items() for leaf in leaves_of(inner, (*place, key))]
    return [place]


def other_than(value: Any) -> Any:
    if isinstance(value, bool):
        return int(value)  # == cannot tell these apart
    if isinstance(value, int | float):
        return math.nextafter(value, math.inf)
    return [*value, 0.5] if isinstance(value, list) else "other" if isinstance(value, str) else 1.25


def test_a_changed_statistic_is_found_at_its_line(path: Path) -> None:
    drive(path, policy_of("accordion:low=4,high=1,steps=2"), 12, seed=3)
    tamper(path, 6, ("statistics", "norms", "fc.weight"), 123.5)
    shown = run(path)
    assert shown.exit_code == 1
    first, *parts = shown.stdout.splitlines()
    assert first == f"{path}, line 6, step 5: the policy's decision differs from the log"
    assert any(
        part.startswith("  state > previous > fc.weight: logged ") and part.endswith(", recomputed 123.5")
        for part in parts
    )
    assert not any("conv.weight" in part for part in parts)


def test_a_changed_state_of_the_start_is_found(path: Path) -> None:
    drive(path, policy_of("accordion:low=4,high=1"), 3, seed=0)
    tamper(path, 1, ("state", "previous", "fc.weight"), 0.5)
    shown = run(path)
    assert shown.exit_code == 1
    assert f"{path}, line 1, step 0: " in shown.stdout
    assert "  state > previous > fc.weight: logged 0.5, recomputed null\n" in shown.stdout


def test_what_one_side_lacks(path: Path) -> None:
    drive(path, policy_of("adaqs:start=16,fall=0.2"), 3, seed=0)
    tamper(path, 3, ("decision", "factors"), lambda factors: {"extra": 2.0, "NaN": factors["NaN"]} | {"fc.weight": 3.0})
    shown = run(path)
    assert shown.exit_code == 1
    assert "  decision > factors > extra: logged 2.0, recomputed nothing\n" in shown.stdout
    assert "  decision > factors > conv.weight: logged nothing, recomputed " in shown.stdout
    result = json.loads(run(path, "--json").stdout)
    assert result["same"] is False
    assert (result["decisions"], result["first_step"], result["last_step"]) == (1, 1, 1)
    parts = {part["place"][-1]: part for part in result["difference"]["parts"]}
    assert parts["extra"] == {"place": ["decision", "factors", "extra"], "logged": 2.0}
    assert parts["conv.weight"].keys() == {"place", "recomputed"}


def test_statistics_that_the_policy_refuses(path: Path) -> None:
    drive(path, policy_of("accordion:low=4,high=1,steps=2"), 3, seed=0)
    tamper(path, 3, ("statistics", "norms"), {"conv.weight": 1.0})
    shown = run(path)
    assert shown.exit_code == 1
    assert f"{path}, line 3, step 2: the policy refuses the logged statistics: ValueError: accordion" in shown.stdout
    assert "missing: NaN, fc.weight" in shown.stdout
    assert "missing" in json.loads(run(path, "--json").stdout)["difference"]["refusal"]


def test_a_resumed_state_that_a_policy_cannot_use(path: Path) -> None:
    policy = policy_of("accordion:low=4,high=1,steps=2")
    drive(path, policy, 2, seed=0, state=drive(path, policy, 2, seed=0), first=2)
    tamper(path, 4, ("state", "previous"), {})
    shown = run(path)
    assert shown.exit_code == 1
    assert f"{path}, line 5, step 3: the policy refuses" in shown.stdout


def test_a_run_resumed_from_a_state_that_is_not_finite(path: Path) -> None:
    policy = policy_of("increase_batch_size:low=128,high=2048")
    state = policy.from_json({"policy": policy.name, "peak": math.inf, "accumulation": 1})
    drive(path, policy, 5, seed=0, state=state, first=9)
    assert '"peak":"Infinity"' in path.read_text()
    assert replay(path).difference is None


def test_a_run_resumed_with_another_policy(path: Path) -> None:
    drive(path, policy_of("adaqs:start=16,fall=0.2"), 4, seed=0)
    drive(path, policy_of("gravac"), 5, seed=0, state=policy_of("gravac").initial_state(()), first=4)
    shown = run(path)
    assert shown.exit_code == 0
    both = "adaqs:start=16.0,fall=0.2 and gravac"
    assert shown.stdout == f"{both}: 9 decisions, steps 1 to 9, resumed 1x: all as logged\n"
    tamper(path, 11, ("decision", "send"), "other")
    assert f"{path}, line 11, step 9: " in run(path).stdout


def test_a_killed_run(path: Path) -> None:
    drive(path, policy_of("gravac"), 4, seed=0)
    path.write_bytes(path.read_bytes()[:-20])
    shown = run(path)
    assert shown.exit_code == 0
    assert shown.stdout == "gravac: 3 decisions, steps 1 to 3: all as logged\n"


def test_json(path: Path) -> None:
    drive(path, policy_of("gravac"), 4, seed=0)
    shown = run(path, "--json")
    assert shown.exit_code == 0
    assert json.loads(shown.stdout) == {
        "file": str(path), "same": True, "policies": ["gravac"], "starts": 1, "decisions": 4, "first_step": 1,
        "last_step": 4, "difference": None,
    }  # fmt: skip


def without_start(path: Path) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (Path.unlink, "does not exist"),
        (lambda path: path.write_text(""), "contains no complete line of a decision log"),
        (lambda path: path.write_text('{"kind": "sta'), "contains no complete line of a decision log"),
        (lambda path: path.write_text('{"step": 1, "loss": 2.3}\n'), "line 1: this is not a line of a decision log"),
        (lambda path: path.write_text("step,loss\n1,2.3\n"), "line 1: Expecting value"),
        (lambda path: path.write_text("[" * 100_000 + "\n"), "line 1: lists and objects are nested more than"),
        (without_start, "line 1: the first line of a decision log must be a start line"),
        (lambda path: tamper(path, 1, ("policy",), "acordion:low=1"), "line 1: unknown policy 'acordion'"),
        (lambda path: tamper(path, 1, ("policy",), "gravac:min=0.5"), "line 1: gravac: min=0.5 is not allowed"),
        (lambda path: tamper(path, 1, ("policy",), "warmup:dense_steps=5"), "is a schedule, which makes no decisions"),
        (lambda path: tamper(path, 1, ("policy",), "adaqs:start=16,fall=0.2"), "this is not a state of adaqs"),
        (lambda path: tamper(path, 1, ("state",), {}), "line 1: this is not a state of gravac"),
        (lambda path: tamper(path, 1, ("state", "gains"), 3), "line 1: "),
        (lambda path: tamper(path, 3, ("statistics", "gains"), 3), "line 3: gains: 3 must be an object"),
    ],
)  # fmt: skip
def test_what_cannot_be_replayed(path: Path, damage: Callable[[Path], Any], said: str) -> None:
    drive(path, policy_of("gravac"), 4, seed=0)
    damage(path)
    for options in ((), ("--json",)):
        shown = run(path, *options)
        assert shown.exit_code == 2
        assert isinstance(shown.exception, SystemExit)
        assert shown.stdout == ""
        assert said in " ".join(shown.stderr.split())
        assert str(path) in shown.stderr


def test_it_needs_no_framework(path: Path) -> None:
    drive(path, policy_of("gravac"), 2, seed=0)
    code = (
        "import sys; from click.testing import CliRunner; from hvdcomp.tools.cli import main\n"
        f"assert CliRunner().invoke(main, ['replay', {str(path)!r}]).exit_code == 0\n"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "hvdcomp" in loaded
    assert not {"torch", "tensorflow", "horovod", "mpi4py"} & set(loaded)


def test_a_log_read_line_by_line_is_what_was_driven(path: Path) -> None:
    """The log alone gives the statistics back: a state that is derived from them by hand is the one that is logged."""
    policy = policy_of("increase_batch_size:low=128,high=2048")
    state = policy.initial_state(())
    drive(path, policy, 20, seed=5, state=state)
    _, *made = read_decisions(path)
    peak = 0.0
    for record in made:
        rates = record.statistics.learning_rates  # type: ignore[union-attr]
        assert rates is not None
        peak = max(peak, *rates.now, *rates.next)
        assert record.state["peak"] == peak
