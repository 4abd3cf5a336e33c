"""What all policies have in common: they are pure, stop and go on anywhere, and print as the spec that makes them."""

from __future__ import annotations

import copy
import dataclasses
import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdcomp import PowerSGD, SpecError, TopK
from hvdcomp.policies import POLICIES as REGISTRY
from hvdcomp.policies import parse_policy
from hvdcomp.policies.accordion import Accordion
from hvdcomp.policies.adaqs import AdaQS
from hvdcomp.policies.auto import Auto
from hvdcomp.policies.base import Policy
from hvdcomp.policies.batch_size import AccordionBatchSize, IncreaseBatchSize
from hvdcomp.policies.budget import Budget
from hvdcomp.policies.constant import Constant
from hvdcomp.policies.decisions import (
    BatchSize,
    Decision,
    Factors,
    Levels,
    Methods,
    MultiLevel,
    decision_from_json,
)
from hvdcomp.policies.gravac import GraVAC
from hvdcomp.policies.lgreco import LGreCo
from hvdcomp.policies.request import (
    Candidate,
    Candidates,
    GravacGains,
    LearningRates,
    LevelTable,
    Period,
    Request,
    Statistic,
    Statistics,
    Timing,
)
from hvdcomp.policies.schedules import Legacy, Schedule, WarmUp

TENSORS = ("conv", "fc")
KINDS: list[type[Policy]] = [kind for kind in REGISTRY.values() if issubclass(kind, Policy)]

POLICIES: list[Policy] = [
    *(parse_policy(example) for kind in KINDS for example in kind.examples),  # type: ignore[list-item]
    Accordion(low=0.99, high=0.1, interval=3),
    Accordion(low=2, high=1, steps=4, statistic="aggregated"),
    AccordionBatchSize(low=512, high=4096, interval=2),
    IncreaseBatchSize(low=128, high=2048),
    AdaQS(start=16, fall=0.2),
    GraVAC(min=10, max=200, window=2, omega=0.2, epsilon=0.4),
    GraVAC(min=10, max=200, window=3, omega=0.2, epsilon=0.4, scaling="geometric", smoothing=0.5),
    GraVAC(min=10, max=200, window=2, omega=0.2, epsilon=0.4, factor="elements", gain="raw"),
    LGreCo(interval=5, last=10, alpha=0.7, least=0.25, most=1, levels=3, statistic="aggregated", lag=0),
    Budget(factor=20, interval=7, last=2, least=0.5, most=1, levels=3, statistic="aggregated", lag=0),
    Budget(ms=15, calibration="c.json", model="m", batch=8, interval=5, critical=20, eta=0.25),
    Auto(calibration="cluster.json"),
    Auto(calibration="c.json", model="m", batch=8, window=3, every=6, margin=0.5, budget=0.5, drift=0.1),
]

CANDIDATES = Candidates(TENSORS, {"dense": Candidate(1.0, 0, "none"), "compressed": Candidate(0.9, 0, None)})

numbers = st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.8, 1.0, 2.0])
by_tensor = st.fixed_dictionaries(dict.fromkeys(TENSORS, numbers))
rates = st.builds(LearningRates, st.tuples(numbers, numbers), st.tuples(numbers, numbers))
moments = st.lists(
    st.tuples(by_tensor, numbers, by_tensor, rates, numbers, numbers, st.sampled_from([0.5, 1.0, 1.01, 3.0])),
    max_size=14,
)


def answer(policy: Policy, state: object, drawn: tuple, step: int) -> Statistics:
    """Statistics for one moment: exactly what the policy asks for in this state, and nothing more."""
    request = policy.request(state)
    assert request.statistics <= request.ever == policy.request(policy.initial_state(TENSORS)).ever
    norms, model_norm, ratios, learning_rates, gain, candidate_gain, seconds = drawn
    candidate = getattr(state, "candidate", None)
    known = {
        Statistic.NORMS: norms,
        Statistic.MODEL_NORM: model_norm,
        Statistic.MEAN_TO_STD: ratios,
        Statistic.LEARNING_RATES: learning_rates,
        Statistic.GAINS: GravacGains(gain, None if candidate is None else candidate_gain, ranks=20),
        Statistic.TIMING: Timing(640, seconds),
        Statistic.CANDIDATES: CANDIDATES,
        Statistic.STEP_TIMES: (model_norm, *norms.values(), seconds),
        Statistic.LEVEL_TABLE: LevelTable(
            {name: {1: norms[name], 2: norms[name] / 2, 4: ratios[name] / 4} for name in TENSORS},
            {name: {1: 100, 2: 200, 4: 400} for name in TENSORS},
            dict.fromkeys(TENSORS, 2),
            other_bytes=40,
            dense_bytes=1600,
            norm=model_norm,
        ),
        Statistic.EXCHANGE_SECONDS: {240: 0.01, 840: 0.03},
    }
    told = {each.value: known[each] for each in request.statistics}
    return Statistics(step=step, **told)


def run(policy: Policy, state: object, drawn: list[tuple], first: int = 0) -> tuple[object, list]:
    decisions = []
    for place, numbers_drawn in enumerate(drawn):
        state, decision = policy.decide(state, answer(policy, state, numbers_drawn, first + place))
        decisions.append(decision)
    return state, decisions


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@given(drawn=moments)
def test_stopped_anywhere_it_goes_on_as_if_it_had_not(policy: Policy, drawn: list[tuple]) -> None:
    end, expected = run(policy, policy.initial_state(TENSORS), drawn)
    for stop in range(len(drawn) + 1):
        stopped, before = run(policy, policy.initial_state(TENSORS), drawn[:stop])
        saved = json.dumps(policy.to_json(stopped), allow_nan=False)
        restored = policy.from_json(json.loads(saved))
        assert restored == stopped
        assert policy.decision(restored) == policy.decision(stopped)
        resumed, after = run(policy, restored, drawn[stop:], first=stop)
        assert before + after == expected
        assert resumed == end


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@given(drawn=moments)
def test_deciding_changes_nothing_it_was_given(policy: Policy, drawn: list[tuple]) -> None:
    state = policy.initial_state(TENSORS)
    for step, numbers_drawn in enumerate(drawn):
        statistics = answer(policy, state, numbers_drawn, step)
        kept = copy.deepcopy((state, statistics))
        following, decision = policy.decide(state, statistics)
        assert (state, statistics) == kept
        assert policy.decide(state, statistics) == (following, decision)
        assert policy.decision(following) == decision
        state = following


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_what_is_asked_for_and_missing_is_named(policy: Policy) -> None:
    state = policy.initial_state(TENSORS)
    for step in range(12):
        for each in policy.request(state).statistics:
            with pytest.raises(ValueError, match=f"{policy.name} needs .*{each.value}.* after step {step}"):
                policy.decide(state, Statistics(step=step))
        drawn = (dict.fromkeys(TENSORS, 1.0), 1.0, dict.fromkeys(TENSORS, 1.0), LearningRates((1.0,), (1.0,)), 1, 1, 1)
        state, _ = policy.decide(state, answer(policy, state, drawn, step))


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_state_of_another_policy_is_refused(policy: Policy) -> None:
    data = policy.to_json(policy.initial_state(TENSORS))
    for wrong in ({**data, "policy": "other"}, {**data, "more": 1}, {"policy": policy.name, "x": 1}, {}):
        with pytest.raises(ValueError, match=f"not a state of {policy.name}"):
            policy.from_json(wrong)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_policy_prints_as_the_spec_that_makes_it(policy: Policy) -> None:
    assert parse_policy(str(policy)) == policy


def test_all_policies_are_registered_under_their_names() -> None:
    schedules = {kind.name: kind for kind in (Legacy, Schedule, WarmUp)}
    assert {kind.name: kind for kind in KINDS} | schedules == REGISTRY
    assert {type(policy) for policy in POLICIES} == set(KINDS)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_lag(policy: Policy) -> None:
    if isinstance(policy, Auto):
        with pytest.raises(SpecError, match="auto: lag=0 is not allowed; it must be 1"):
            dataclasses.replace(policy, lag=0)
    elif isinstance(policy, GraVAC):
        with pytest.raises(SpecError, match="lag=0 of gravac was removed"):
            dataclasses.replace(policy, lag=0)
    else:
        assert dataclasses.replace(policy, lag=0).lag == 0
        assert parse_policy(str(dataclasses.replace(policy, lag=0))).lag == 0
    for lag in (2, -1, 0.5, True):
        with pytest.raises(SpecError, match=f"{policy.name}: lag={lag} is not allowed; it must be 0 or 1"):
            dataclasses.replace(policy, lag=lag)


@pytest.mark.parametrize(
    ("decision", "expected"),
    [
        (Levels({"a": 0.1, "b": None}), {"kind": "levels", "levels": {"a": 0.1, "b": None}}),
        (Factors({"a": 8.0}), {"kind": "factors", "factors": {"a": 8.0}}),
        (
            MultiLevel(10.0, None, "dense"),
            {"kind": "multilevel", "minimum": 10.0, "candidate": None, "send": "dense"},
        ),
        (
            MultiLevel(10.0, 20.0, "candidate", "elements", "raw"),
            {
                "kind": "multilevel",
                "minimum": 10.0,
                "candidate": 20.0,
                "send": "candidate",
                "factor": "elements",
                "gain": "raw",
            },
        ),
        (BatchSize(4, 4.0), {"kind": "batch_size", "accumulation": 4, "learning_rate_factor": 4.0}),
        (
            Methods({"a": None, "b": "fp16"}, "none"),
            {"kind": "methods", "methods": {"a": None, "b": "fp16"}, "others": "none"},
        ),
    ],
    ids=lambda value: value["kind"] if isinstance(value, dict) else "",
)
def test_decisions_as_json(decision: Decision, expected: dict) -> None:
    assert decision.to_json() == expected
    assert json.loads(json.dumps(decision.to_json(), allow_nan=False)) == expected
    assert decision_from_json(expected) == decision


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_states_have_text_for_keys(policy: Policy) -> None:
    """So that whatever writes them need not know which keys were numbers."""
    state = policy.initial_state(TENSORS)
    for step in range(6):
        data = policy.to_json(state)
        assert json.loads(json.dumps(data)) == json.loads(json.dumps(data, sort_keys=True))
        assert keys_of(data) == {str}
        drawn = ({"conv": 2.0, "fc": 1.0}, 1.0, dict.fromkeys(TENSORS, 1.0), LearningRates((1.0,), (1.0,)), 0.9, 0.8, 1)
        state, _ = policy.decide(state, answer(policy, state, drawn, step))


def keys_of(value: object) -> set[type]:
    """The types of all keys, however deep."""
    if not isinstance(value, dict):
        return set()
    return {type(key) for key in value}.union(*map(keys_of, value.values()))


def test_constant() -> None:
    policy = Constant(level=4)
    assert policy.request(policy.initial_state(["a"])) == Request()
    assert policy.decision(policy.initial_state(["a", "b"])) == Levels({"a": 4, "b": 4})
    assert Constant().decision(Constant().initial_state(["a"])) == Levels({"a": None})
    policy.check(None, PowerSGD(rank=2))
    with pytest.raises(SpecError, match="ratio=4"):
        policy.check(None, TopK(ratio=0.1))
    with pytest.raises(SpecError, match="level='high'"):
        Constant(level="high")  # type: ignore[arg-type]


def test_learning_rates() -> None:
    assert LearningRates((0.1,), (0.01,)).fall
    assert LearningRates((0.1, 0.1), (0.2, 0.05)).fall
    assert not LearningRates((0.1, 0.1), (0.1, 0.2)).fall
    for now, following in [((0.1,), (0.1, 0.1)), ((), ())]:
        with pytest.raises(ValueError, match="must have the same length"):
            LearningRates(now, following)


@pytest.mark.parametrize(
    ("policy", "period"),
    [
        (Accordion(low=2, high=1), Period(epochs=1)),
        (Accordion(low=2, high=1, steps=50), Period(steps=50)),
        (AccordionBatchSize(low=1, high=2), Period(epochs=1)),
        (IncreaseBatchSize(low=1, high=2, steps=7), Period(steps=7)),
        (AdaQS(start=4, fall=0.5, interval=3), Period(epochs=3)),
        (AdaQS(start=4, fall=0.5, steps=3), Period(steps=3)),
        (GraVAC(), Period(steps=10)),
        (Auto(calibration="cluster.json"), Period(until=1)),
    ],
    ids=str,
)
def test_when_it_decides(policy: Policy, period: Period) -> None:
    assert policy.request(policy.initial_state(TENSORS)).period == period
    compressor = PowerSGD(rank=2)
    policy.check(100, compressor)
    if period.epochs:
        with pytest.raises(SpecError, match="steps_per_epoch"):
            policy.check(None, compressor)
    else:
        policy.check(None, compressor)


def test_importing_them_imports_no_framework() -> None:
    code = "import sys, hvdcomp.policies; print(*{name.partition('.')[0] for name in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "hvdcomp" in loaded
    assert not {"torch", "tensorflow", "horovod", "mpi4py"} & set(loaded)
