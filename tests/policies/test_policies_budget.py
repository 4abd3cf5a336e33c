"""Budgets against brute force, and against the algorithm in plain NumPy on ranks."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdcomp import EDEN, SpecError
from hvdcomp.communicators.in_process import InProcessCommunicator, run_ranks
from hvdcomp.compressors.quantization_rotated import ERRORS as KNOWN
from hvdcomp.errors import ConfigurationError
from hvdcomp.perfmodel.shapes import tensors_of
from hvdcomp.policies import parse_policy
from hvdcomp.policies.budget import Budget, bytes_within
from hvdcomp.policies.decisions import Levels
from hvdcomp.policies.optimal_levels import PARTS, least_error
from hvdcomp.policies.request import LearningRates, LevelTable, Period, Statistic, Statistics
from tests.driven import Driven
from tests.harness import in_turns
from tests.policies.test_policies_lgreco import errors_of_levels, level_table, sizes_of_levels, topk_error, uneven

Table = Mapping[str, Mapping[Any, Any]]

RATIOS = (0.1, 0.01, 0.1 / math.sqrt(10), 0.1 * math.sqrt(10), 1.0)  # of "budget:levels=5" around topk:ratio=0.1


@given(errors=errors_of_levels, sizes=sizes_of_levels, share=st.sampled_from([0.1, 0.3, 0.5, 0.8, 1.0]))
def test_the_choice_is_that_of_trying_all(errors: Table, sizes: Table, share: float) -> None:
    limit = share * sum(max(found.values()) for found in sizes.values())
    found = least_error(level_table(errors, sizes), limit)
    parts, total = np.zeros(1), np.zeros(1)
    for name, own in errors.items():
        parts = np.add.outer(parts, np.ceil(np.array([sizes[name][level] for level in own]) / limit * PARTS)).ravel()
        total = np.add.outer(total, np.array(list(own.values()))).ravel()
    if not (parts <= PARTS).any():
        assert found is None
        return
    assert found is not None
    assert math.fsum(errors[name][level] for name, level in found.items()) == pytest.approx(
        total[parts <= PARTS].min(), abs=1e-9
    )
    assert sum(sizes[name][level] for name, level in found.items()) <= limit * (1 + 1e-12)


def least_error_of_mixtures(sent: Table, errors: Table, limit: float) -> float:
    """The least total error within a limit of bytes if any part of a tensor could be sent at any level: errors and
    bytes lie on straight lines between those of neighboring levels, and the steepest lines are followed first."""
    lines = [
        ((errors[name][less] - errors[name][more]) / (sent[name][more] - sent[name][less]), name, more)
        for name, levels in sent.items()
        for less, more in itertools.pairwise(sorted(levels))
    ]
    error = sum(errors[name][min(levels)] for name, levels in sent.items())
    left = limit - sum(levels[min(levels)] for levels in sent.values())
    for slope, name, more in sorted(lines, reverse=True):
        used = min(left, sent[name][more] - sent[name][more - 1])
        error, left = error - slope * used, left - used
    return error


@pytest.mark.parametrize(("model", "short", "gain"), [("gpt", 0.0075, 0.017), ("resnet50", 0.006, 0.014)])
def test_a_fraction_of_a_bit_would_save_little(model: str, short: float, gain: float) -> None:
    """As docs/policy-budget.md says. If some blocks of a tensor had one bit more than the others, its squared error
    would lie on the straight line between two levels, and its error, the root of that, not below a straight line."""
    if model == "gpt":
        torch_models = pytest.importorskip("hvdcomp.tools.train.models_torch", reason="needs torch")
        network = torch_models.build_model("gpt", channels=1, size=64, classes=256)
        shapes = [tuple(parameter.shape) for parameter in network.parameters()]
    else:
        shapes = [tensor.shape for tensor in tensors_of(model)]
    dense_bytes = sum(4 * math.prod(shape) for shape in shapes)
    matrices = {f"{place}": shape for place, shape in enumerate(shapes) if len(shape) > 1}
    sent = {name: {bits: EDEN(bits).payload_bytes(shape) for bits in KNOWN} for name, shape in matrices.items()}
    errors = {
        name: {bits: math.sqrt(share * math.prod(shape)) for bits, share in KNOWN.items()}
        for name, shape in matrices.items()
    }
    other_bytes = sum(4 * math.prod(shape) for shape in shapes if len(shape) == 1)
    least_bytes = other_bytes + sum(levels[1] for levels in sent.values())
    table = LevelTable(errors, sent, dict.fromkeys(sent, 2), other_bytes, dense_bytes)
    shortest, gains = 0.0, []
    for factor in np.arange(8, min(31, dense_bytes / least_bytes), 0.5):
        policy = Budget(factor=float(factor))
        levels = policy.choose(table, Statistics(1, level_table=table), policy.initial_state(list(sent)))
        used = sum(sent[name][level] for name, level in levels.items())
        error = sum(errors[name][level] for name, level in levels.items())
        shortest = max(shortest, 1 - (used + other_bytes) / (dense_bytes / factor))
        gains.append(1 - least_error_of_mixtures(sent, errors, used) / error)
    assert 0.9 * short < shortest < short
    assert 0.9 * gain < max(gains) < gain
    assert np.median(gains) < 0.004


ERRORS = {"a": {4: 8.0, 2: 10.0, 8: 4.0}, "b": {4: 0.5, 2: 1.0, 8: 0.25}}


def told(sent: int, norm: float = 1.0, errors: Table = ERRORS) -> Statistics:
    """Two tensors: "a" loses much with few bytes, "b" next to nothing; `sent` is a tenth of the dense bytes."""
    sizes = {name: {level: 100 * level for level in (4, 2, 8)} for name in "ab"}
    table = LevelTable(errors, sizes, {"a": 4, "b": 4}, other_bytes=100, dense_bytes=10 * sent, norm=norm)
    return Statistics(10, level_table=table)


def test_bytes_go_where_they_keep_most() -> None:
    policy = Budget(factor=10)
    state = policy.initial_state(["a", "b"])
    assert policy.decision(state) == Levels({"a": None, "b": None})
    # 900 bytes, of which 100 are of other tensors: as many as both have at level 4.
    _, decision = policy.decide(state, told(900 + 200))
    assert decision == Levels({"a": 8, "b": 2})
    _, decision = policy.decide(state, told(1701))
    assert decision == Levels({"a": 8, "b": 8})
    _, decision = policy.decide(state, told(899))
    assert decision == Levels({"a": 4, "b": 2})
    for out_of_reach in (499, 50):  # even the lowest levels send more: then these
        assert policy.decide(state, told(out_of_reach))[1] == Levels({"a": 2, "b": 2})


def test_an_error_budget_is_a_share_of_the_norms() -> None:
    policy = Budget(error=0.5)
    state = policy.initial_state(["a", "b", "c"])
    assert policy.request(state).statistics == {Statistic.LEVEL_TABLE}
    assert policy.request(state).scaled
    _, decision = policy.decide(state, told(900, norm=17.25))  # c had no gradient
    assert decision == Levels({"a": 4, "b": 4, "c": None})
    _, decision = policy.decide(state, told(900, norm=7.0))  # 3.5: nothing loses so little
    assert decision == Levels({"a": 8, "b": 8, "c": None})


MS = Budget(ms=20, calibration="cluster.json")


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({300: 0.01, 900: 0.018, 1200: 0.024}, {"a": 4, "b": 4}),  # 1000 bytes, of which 100 are of other tensors
        ({300: 0.01, 900: 0.01, 1300: 0.022}, {"a": 8, "b": 2}),  # 1233 bytes
        ({300: 0.01, 900: 0.018}, {"a": 8, "b": 8}),  # nothing takes so long
        ({300: 0.019, 900: 0.0201}, {"a": 4, "b": 2}),  # 845 bytes
        ({300: 0.021, 900: 0.019, 1200: 0.03}, {"a": 4, "b": 4}),  # 927 bytes take less than 300: encoding does
        ({300: 0.021, 900: 0.03}, {"a": 2, "b": 2}),  # another calibration than the one that was checked
    ],
)
def test_milliseconds_are_the_bytes_that_take_so_long(seconds: dict[int, float], chosen: dict[str, int]) -> None:
    state = MS.initial_state(["a", "b"])
    assert MS.request(state).statistics == {Statistic.LEVEL_TABLE, Statistic.EXCHANGE_SECONDS}
    _, decision = MS.decide(state, dataclasses.replace(told(900), exchange_seconds=seconds))
    assert decision == Levels(chosen)
    with pytest.raises(ValueError, match="budget needs the statistics exchange_seconds to decide after step 10"):
        MS.decide(state, told(900))


@given(
    points=st.dictionaries(st.integers(0, 1000), st.integers(0, 20), min_size=1, max_size=6),
    limit=st.integers(0, 21),
)
def test_no_more_bytes_than_those_take_no_longer(points: dict[int, int], limit: int) -> None:
    """Against a look at every hundredth of a byte."""
    found = bytes_within(points, limit)
    known = sorted(points)
    every = np.linspace(known[0], known[-1], 100 * (known[-1] - known[0]) + 1)
    within = every[np.interp(every, known, [points[sent] for sent in known]) <= limit + 1e-9]
    if points[known[-1]] <= limit:
        assert found == math.inf
    else:
        assert found == pytest.approx(within.max() if within.size else 0.0, abs=0.011)


def test_a_time_that_no_level_reaches_is_refused_with_what_is_reached() -> None:
    MS.require_reachable({300: 0.02, 900: 0.03})
    for seconds in ({300: 0.0215, 900: 0.03}, {300: 0.03, 900: 0.0215}):
        with pytest.raises(ConfigurationError) as raised:
            MS.require_reachable(seconds)
        fastest = min(seconds, key=seconds.__getitem__)
        assert str(raised.value) == (
            "budget:ms=20,calibration=cluster.json cannot be reached: according to cluster.json, the fastest exchange "
            f"that the policy can choose takes 21.5 ms per step, with {fastest} bytes from each rank. Give a larger "
            "ms, give a compressor that sends less, or set least, the smallest factor of the compressors' own levels, "
            "below 0.1"
        )


# Two limits ----------------------------------------------------------------------------------------------------------


REGIMES = [  # norm of the model, learning rates, and whether the regime is critical with eta=0.3
    (8.0, (0.1, 0.1), True),  # nothing to compare with
    (6.0, (0.1, 0.1), False),  # falls by a quarter
    (4.2, (0.1, 0.1), True),  # by exactly 0.3
    (4.0, (0.1, 0.05), True),  # the learning rate falls
    (3.9, (0.05, 0.1), False),  # it rises
    (math.inf, (0.1, 0.1), True),
    (4.0, (0.1, 0.1), True),  # not compared with what is not finite
    (4.0, (0.1, 0.1), False),
]


@pytest.mark.parametrize(
    ("limits", "rest"),
    [
        ("factor=10,critical=6", {}),
        ("ms=20,calibration=c.json,critical=30", {"exchange_seconds": {0: 0.0, 900: 0.02, 1500: 0.03, 1800: 0.9}}),
        ("error=0.43,critical=0.23", {}),
    ],
)
def test_accordions_rule_chooses_between_two_limits(limits: str, rest: dict[str, Any]) -> None:
    policy = parse_policy(f"budget:eta=0.3,{limits}")
    assert isinstance(policy, Budget)
    state = policy.initial_state(["a", "b"])
    rule = {Statistic.MODEL_NORM, Statistic.LEARNING_RATES}
    assert rule < policy.request(state).statistics == policy.request(state).ever
    previous = None
    for norm, (now, following), critical in REGIMES:
        finite = previous is not None and math.isfinite(norm)
        assert critical == (following < now or not finite or round(abs(previous - norm) / previous, 9) >= 0.3)
        rates = LearningRates((now,), (following,))
        statistics = dataclasses.replace(told(900, norm=20.0), model_norm=norm, learning_rates=rates, **rest)
        state, decision = policy.decide(state, statistics)
        assert state.critical == critical
        # 800 bytes beside those of other tensors, or 1400: then "a", which loses much, has more.
        assert decision == Levels({"a": 8, "b": 4} if critical else {"a": 4, "b": 4}), (norm, now, following)
        assert policy.from_json(json.loads(json.dumps(policy.to_json(state)))) == state
        assert decision.row(json.loads(json.dumps(policy.to_json(state))), ["a", "b"])["critical"] == critical
        previous = norm if math.isfinite(norm) else None


def test_a_state_without_a_rule_is_as_it_was_and_is_read_as_it_was() -> None:
    policy = Budget(factor=10)
    state, _ = policy.decide(policy.initial_state(["a", "b"]), told(900))
    written = {"policy": "budget", "levels": {"a": 4, "b": 4}}
    assert policy.to_json(state) == written
    assert policy.from_json(written) == state
    for wrong in ({**written, "more": 1}, {"policy": "budget", "critical": True}):
        with pytest.raises(ValueError, match="this is not a state of budget"):
            policy.from_json(wrong)


# When it decides, and what is refused ---------------------------------------------------------------------------------


def test_it_decides_early_and_then_at_every_interval() -> None:
    policy = Budget(factor=10, interval=50, last=5)
    state = policy.initial_state(["a", "b"])
    assert policy.request(state).period == Period(steps=5, last=5)
    bad = told(900, errors={"a": {4: math.nan, 2: 1.0, 8: 1.0}, "b": {4: 1.0, 2: 1.0, 8: 1.0}})
    same, _ = policy.decide(state, bad)
    assert policy.request(same).period == Period(steps=5, last=5)
    state, _ = policy.decide(state, told(900))
    assert policy.request(state).period == Period(steps=50, last=5)
    assert policy.from_json(policy.to_json(state)) == state
    assert Budget(factor=10, interval=3).first_request.period == Period(steps=3, last=3)


@pytest.mark.parametrize(("interval", "first"), [(9, 9), (10, 5), (50, 5), (5, 5), (3, 3)])
def test_norms_that_are_compared_are_of_as_many_steps(interval: int, first: int) -> None:
    """A first decision after 5 of 9 steps would leave 4 to the second, whose norm would seem to have fallen."""
    period = Budget(factor=10, critical=6, interval=interval, last=5).first_request.period
    assert period == Period(steps=first, last=min(5, interval))
    assert Budget(factor=10, interval=9, last=5).first_request.period == Period(steps=5, last=5)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("budget", "give exactly one of three settings: factor .*, error .* or ms .* You gave none"),
        ("budget:factor=9,error=0.5", "exactly one of .* You gave factor=9.0 and error=0.5"),
        ("budget:factor=9,ms=20,calibration=c.json", "exactly one of .* You gave factor=9.0 and ms=20.0"),
        ("budget:ms=20", "ms=20.0 needs calibration=FILE, the name of a preset or of a file from `hvdcomp calibrate`"),
        ("budget:ms=-1,calibration=c.json", "ms=-1.0 is not allowed; it must be above 0"),
        ("budget:factor=9,calibration=c.json,batch=8", "batch=8 can be used only with ms, not with factor=9.0"),
        ("budget:factor=1", "factor=1.0 is not allowed; it must be above 1"),
        ("budget:factor=-3", "factor=-3.0 is not allowed"),
        ("budget:error=1", "error=1.0 is not allowed; it must be above 0 and below 1"),
        ("budget:factor=9,eta=0.3", "eta=0.3 is used only with critical .the limit in critical regimes.; give both"),
        ("budget:factor=9,critical=9", "critical=9.0 .* must be less than factor=9.0 and more than 1, because"),
        ("budget:factor=9,critical=1", "critical=1.0 .* must be less than factor=9.0 and more than 1"),
        ("budget:error=0.5,critical=0.6", "critical=0.6 .* must be less than error=0.5, because critical regimes must"),
        ("budget:ms=20,calibration=c.json,critical=10", "critical=10.0 .* must be more than ms=20.0, because critical"),
        ("budget:factor=9,critical=-3", "critical=-3.0 is not allowed; it must be a limit above 0"),
        ("budget:factor=9,least=1,most=1", "Give least below 1, or most above 1"),
    ],
)
def test_what_is_refused(spec: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        parse_policy(spec)


DENSE = sum(4 * gradient.size for gradient in uneven(0, 0).values())


def plain(allowed_bytes: float, steps: tuple[int, ...]) -> dict[str, float]:
    """The levels that rank 0 decides by the gradients of some steps: all choices tried, in plain NumPy."""
    means = {name: np.mean([uneven(0, step)[name] for step in steps], 0) for name in ("conv", "linear")}
    ratios = [float(f"{ratio:.4g}") for ratio in RATIOS]
    rms = {name: math.sqrt(np.mean(mean.astype(float) ** 2)) for name, mean in means.items()}
    errors = {name: [topk_error(mean, ratio) / rms[name] for ratio in ratios] for name, mean in means.items()}
    sizes = {name: [6 * math.ceil(ratio * mean.size) for ratio in ratios] for name, mean in means.items()}
    for name, mean in means.items():
        sizes[name][4] = 4 * mean.size  # all elements go without indices
    bias = 4 * uneven(0, 0)["bias"].size
    limit = allowed_bytes - bias

    def sent(choice: tuple[int, ...]) -> int:
        return sum(math.ceil(sizes[name][at] / limit * PARTS) for name, at in zip(means, choice, strict=True))

    def lost(choice: tuple[int, ...]) -> float:
        return sum(errors[name][place] for name, place in zip(means, choice, strict=True))

    allowed = [choice for choice in itertools.product(range(5), repeat=2) if sent(choice) <= PARTS]
    return {name: ratios[place] for name, place in zip(means, min(allowed, key=lost), strict=True)}


SECONDS = {0: 0.001, DENSE // 2: 0.005, DENSE: 0.007}  # 2 ms: a quarter of the half
LIMITS = {"factor=8": DENSE / 8, "ms=2,calibration=nowhere.json": (DENSE // 2) / 4}


@pytest.mark.parametrize(("lag", "limit", "backend"), in_turns(itertools.product([0, 1], LIMITS)))
def test_all_ranks_obey_what_plain_numpy_finds_on_rank_0(lag: int, limit: str, backend: str) -> None:
    policy = parse_policy(f"budget:{limit},interval=4,last=2,levels=5,lag={lag}")
    assert isinstance(policy, Budget)

    def work(communicator: InProcessCommunicator) -> Driven:
        told = {"gradients": uneven, "exchange_seconds": SECONDS}
        return Driven(communicator, policy, backend, spec="topk:ratio=0.1", **told).run(10)

    first, second = run_ranks(2, work)
    assert first.plans == second.plans
    assert first.result_bits() == second.result_bits()
    for step, found in enumerate(first.plans):
        # The first decision comes after two steps, and the others after 4 and 8.
        last = 2 if 2 <= step < 4 else step // 4 * 4
        right = plain(LIMITS[limit], (last - 2, last - 1)) if last else {"conv": 0.1, "linear": 0.1}
        assert found == {name: f"topk:ratio={ratio}" for name, ratio in right.items()} | {"bias": "none"}, step
    # What is accumulated after a step, before the last one of a period takes it away.
    assert first.observed == [step == 0 or step % 4 == 2 for step in range(10)]
    assert not any(second.observed)
