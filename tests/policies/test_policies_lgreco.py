"""L-GreCo against brute force, and against the algorithm in plain NumPy."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hvdcomp import ByName, PowerSGD, SignSGD, SpecError, TopK, TwoLevel
from hvdcomp.adaptation.level_errors import LevelErrors
from hvdcomp.adaptation.plans import Plans, levelled_tensors
from hvdcomp.communicators.in_process import InProcessCommunicator, run_ranks
from hvdcomp.communicators.loopback import LoopbackCommunicator
from hvdcomp.compressors import Compressor, TensorInfo
from hvdcomp.compressors.parsing import parse_compressor, parse_memory
from hvdcomp.exchange.engine import Engine
from hvdcomp.perfmodel import Compute, Setting, exchange_of_plan, network_of_link, predict
from hvdcomp.policies import parse_policy
from hvdcomp.policies.decisions import Levels
from hvdcomp.policies.lgreco import LGreCo, cheapest
from hvdcomp.policies.optimal_levels import PARTS, TensorLevels
from hvdcomp.policies.request import LevelTable, Period, Request, Statistic, Statistics
from hvdcomp.settings import check_policy
from tests.driven import SHAPES, Driven, random_gradients
from tests.harness import BACKENDS, EXAMPLES, in_turns, infos, make

Table = Mapping[str, Mapping[Any, Any]]

NAMES = tuple("abcdef")
OWN, OTHERS = 4, (2, 3, 8)  # the own level and the others of each tensor


# Choosing -------------------------------------------------------------------------------------------------------------


def best_by_trying(errors: Table, sizes: Table, alpha: float) -> int | None:
    """The fewest bytes of all choices whose rounded errors are within the budget; None if there is none."""
    budget = alpha * math.fsum(errors[name][OWN] for name in NAMES)
    parts = np.zeros(1)
    total = np.zeros(1, int)
    for name in NAMES:
        error = np.array(list(errors[name].values()))
        mine = np.ceil(error / budget * PARTS) if budget else np.where(error > 0, np.inf, 0.0)
        parts = np.add.outer(parts, mine).ravel()
        total = np.add.outer(total, np.array([sizes[name][level] for level in errors[name]])).ravel()
    assert len(total) == 4**6
    return int(total[parts <= PARTS].min()) if (parts <= PARTS).any() else None


def in_all(table: Table, levels: Mapping[str, Any]) -> Any:
    return math.fsum(table[name][level] for name, level in levels.items())


def level_table(errors: Table, sizes: Table, own: Any = OWN) -> LevelTable:
    """Of tensors with the same own level, beside which nothing is sent."""
    return LevelTable(errors, sizes, dict.fromkeys(errors, own), other_bytes=0, dense_bytes=10**12)


errors_of_levels = st.fixed_dictionaries({
    name: st.fixed_dictionaries(dict.fromkeys((OWN, *OTHERS), st.just(0.0) | st.floats(1e-3, 1e3))) for name in NAMES
})  # fmt: skip
sizes_of_levels = st.fixed_dictionaries({
    name: st.fixed_dictionaries(dict.fromkeys((OWN, *OTHERS), st.integers(1, 20) | st.integers(1, 10**9)))
    for name in NAMES
})  # fmt: skip
alphas = st.sampled_from([1.0, 1.0, 0.3, 0.9, 1.5, 20.0])


@given(errors=errors_of_levels, sizes=sizes_of_levels, alpha=alphas)
@example(
    errors={name: {OWN: 1.0, 2: 2.0, 3: 1.5, 8: 0.5} for name in NAMES},
    sizes={name: {OWN: 4 * size, 2: 2 * size, 3: 3 * size, 8: 8 * size} for size, name in enumerate(NAMES, 1)},
    alpha=1.0,
)
def test_the_choice_is_that_of_trying_all(errors: Table, sizes: Table, alpha: float) -> None:
    own = dict.fromkeys(NAMES, OWN)
    found = cheapest(level_table(errors, sizes), alpha)
    assert found.keys() == set(NAMES)
    best = best_by_trying(errors, sizes, alpha)
    budget = alpha * in_all(errors, own)
    if alpha >= 1:  # where rounding up leaves nothing that is better, or nothing at all, the own levels stay
        best = in_all(sizes, own) if best is None else min(best, in_all(sizes, own))
    if best is None:
        assert all(errors[name][level] == min(errors[name].values()) for name, level in found.items())
    else:
        assert in_all(sizes, found) == best
        assert in_all(errors, found) <= budget * (1 + 1e-12)
    if alpha >= 1:
        assert in_all(sizes, found) <= in_all(sizes, own)


def test_of_two_levels_with_as_many_bytes_the_one_that_loses_less_is_taken() -> None:
    errors = {"a": {4: 1.0, 2: 0.5, 3: 0.25}, "b": {4: 1.0, 2: 1.0, 3: 1.25}}
    sizes = {"a": {4: 9, 2: 5, 3: 5}, "b": {4: 9, 2: 9, 3: 9}}
    assert cheapest(level_table(errors, sizes), 1.0)["a"] == 3


def told(errors: Table, sizes: Table | None = None) -> Statistics:
    sizes = sizes or {name: {level: 100 * level for level in found} for name, found in errors.items()}
    return Statistics(7, level_table=level_table(errors, sizes))


def test_what_is_not_finite_changes_nothing_and_what_is_not_told_keeps_its_level() -> None:
    policy = LGreCo()
    state = policy.initial_state(["a", "b", "c"])
    assert policy.decision(state) == Levels({"a": None, "b": None, "c": None})
    # What b gains at level 8, a may lose at level 2; c had no gradient.
    errors = {"a": {2: 1.5, 4: 1.0, 8: 0.9}, "b": {2: 9.0, 4: 5.0, 8: 1.0}}
    state, decision = policy.decide(state, told(errors, {"a": {2: 100, 4: 900, 8: 990}, "b": {2: 5, 4: 10, 8: 20}}))
    assert decision == Levels({"a": 2, "b": 8, "c": None})
    for bad in (math.nan, math.inf):
        assert policy.decide(state, told({**errors, "a": {2: bad, 4: 1.0, 8: 0.5}}))[0] == state
    state, decision = policy.decide(state, told({"c": {2: 1.0, 4: 1.0}}))
    assert decision == Levels({"a": 2, "b": 8, "c": 2})
    assert policy.from_json(policy.to_json(state)) == state


def test_statistics_that_do_not_belong_together_are_refused() -> None:
    policy = LGreCo()
    state = TensorLevels({"a": None})
    whole = told({"a": {2: 1.0, 4: 1.0}})
    for wrong, words in (
        (dataclasses.replace(whole, level_table=None), "needs the statistics level_table"),
        (told({"b": {2: 1.0, 4: 1.0}}), "not expected: b"),
    ):
        with pytest.raises(ValueError, match=words):
            policy.decide(state, wrong)
    errors = {"a": {2: 1.0, 4: 1.0}}
    for sent, own in (({"a": {2: 8}}, {"a": 4}), ({}, {"a": 4}), (errors, {}), (errors, {"a": 3})):
        with pytest.raises(ValueError, match="errors, sent and own must have the same levels for a"):
            LevelTable(errors, sent, own, 0, 0)


# Bytes stand for time -------------------------------------------------------------------------------------------------

LEVELLED = [spec for spec in EXAMPLES if parse_compressor(spec).level is not None]
MATRICES = [TensorInfo("a", (64, 500)), TensorInfo("b", (300, 700)), TensorInfo("c", (40, 50))]


def bytes_and_seconds(methods: Sequence[Compressor], ranks: int) -> tuple[int, float]:
    """Of a step in which each matrix has its method: the bytes of a rank, and the predicted time."""
    plan = {tensor.name: method.route(tensor) for tensor, method in zip(MATRICES, methods, strict=True)}
    exchange = exchange_of_plan(MATRICES, plan, overlapped=False, ranks=ranks)
    parts = predict(network_of_link(1e8, 1e-4), Compute(0.01), exchange, 25e6, Setting(ranks))
    sent = sum(plan[one.name].payload_bytes(one.shape, dtype=one.dtype, ranks=ranks) for one in MATRICES)
    return sent, float(parts.total)


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("spec", LEVELLED)
def test_of_one_method_a_byte_takes_as_long_at_every_level_of_every_tensor(spec: str, ranks: int) -> None:
    """So the fewest bytes take the least time, and a calibration could change no choice of levels."""
    own = parse_compressor(spec)
    assert own.level is not None
    levels = {max(1, round(own.level * f)) if isinstance(own.level, int) else own.level * f for f in (0.5, 1, 1.5, 2)}
    choices = itertools.product([own.at_level(level) for level in sorted(levels)], repeat=len(MATRICES))
    sent, seconds = map(np.array, zip(*(bytes_and_seconds(one, ranks) for one in choices), strict=True))
    assert len(set(sent.tolist())) > 5
    least, most = np.argmin(sent), np.argmax(sent)
    line = np.interp(sent, sent[[least, most]], seconds[[least, most]])
    np.testing.assert_allclose(seconds, line, rtol=1e-12)
    assert seconds[least] < seconds[most]


def test_of_several_methods_a_byte_may_take_longer_with_one_than_with_the_other() -> None:
    """What the reference says beside: eight ranks receive seven times what is gathered, and less than twice a sum."""
    rank, ratio = PowerSGD(rank=4), TopK(ratio=0.01)
    start, more_of_sums, more_gathered = (
        bytes_and_seconds(methods, 8)
        for methods in ((ratio, rank, ratio), (ratio, PowerSGD(rank=5), ratio), (ratio, rank, TopK(ratio=0.02)))
    )
    slopes = [(one[1] - start[1]) / (one[0] - start[0]) for one in (more_of_sums, more_gathered)]
    np.testing.assert_allclose(np.array(slopes) * 1e8 / 8, [2 * 7 / 8, 7])


# Settings -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "right"),
    [
        ({}, (0.5, 2 ** (-2 / 3), 2 ** (-1 / 3), 1.0, 2 ** (1 / 3), 2 ** (2 / 3), 2.0)),
        ({"levels": 3}, (0.5, 1.0, 2.0)),
        ({"levels": 4, "least": 0.25, "most": 2}, (0.25, 0.5, 1.0, 2.0)),
        ({"levels": 4, "least": 1, "most": 8}, (1.0, 2.0, 4.0, 8.0)),
        ({"levels": 3, "least": 0.25, "most": 1}, (0.25, 0.5, 1.0)),
    ],
)
def test_levels_are_a_geometric_sequence_with_the_own_one(settings: dict[str, Any], right: tuple[float, ...]) -> None:
    assert LGreCo(**settings).around == pytest.approx(right)
    assert LGreCo(**settings).around.count(1.0) == 1


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("lgreco:interval=0", "interval=0 is not allowed; it must be a whole number of at least 1"),
        ("lgreco:last=0", "last=0"),
        ("lgreco:alpha=0", "alpha=0.0 is not allowed; it must be a number above 0"),
        ("lgreco:least=0", "least=0.0"),
        ("lgreco:least=1.5", "least=1.5 is not allowed; it must be a factor from 1e-6 to 1"),
        ("lgreco:most=0.5", "most=0.5"),
        ("lgreco:levels=2", "levels=2 is not allowed; it must be a whole number from 3 to 64"),
        ("lgreco:statistic=all", "statistic='all'"),
        ("lgreco:least=1,most=1", "Give least below 1, or most above 1"),
    ],
)
def test_what_is_refused(spec: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        parse_policy(spec)


def test_some_tensor_needs_a_method_with_a_level() -> None:
    mixed = ByName({"conv": TopK(0.1), "linear": PowerSGD(2), "*": SignSGD()})
    for compressor in (TopK(0.1), mixed, TwoLevel(mixed)):
        check_policy(LGreCo(), None, compressor, None)
    for compressor in (SignSGD(), ByName({"conv": SignSGD(), "*": parse_compressor("fp16")})):
        with pytest.raises(SpecError, match="lgreco: the compressor has no level that can be set"):
            check_policy(LGreCo(), None, compressor, None)


def test_it_looks_at_the_last_gradients_of_the_interval() -> None:
    asked = frozenset({Statistic.LEVEL_TABLE})
    policy = LGreCo(statistic="aggregated")
    assert policy.first_request == Request(asked, Period(steps=100, last=10), "aggregated", around=policy.around)
    assert LGreCo(interval=5).first_request.period == Period(steps=5, last=5)


# Measuring ------------------------------------------------------------------------------------------------------------


def engine_of(spec: str, memory: Any = None, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> Engine:
    return Engine(LoopbackCommunicator(), infos(shapes), parse_compressor(spec), memory, min_numel=16)


def measured(
    engine: Engine, sums: Mapping[str, Any], around: tuple[float, ...], steps: int = 1, scaled: bool = False
) -> LevelTable:
    names = levelled_tensors(engine)
    request = Request(frozenset({Statistic.LEVEL_TABLE}), Period(steps=9, last=steps), around=around, scaled=scaled)
    return LevelErrors(Plans(engine, names)).of_sums(sums, request)


def topk_error(x: np.ndarray, ratio: float) -> float:
    """What the largest elements leave over."""
    k = max(1, math.ceil(ratio * x.size))
    return float(np.linalg.norm(np.sort(np.abs(x).ravel())[: x.size - k].astype(float)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_errors_are_those_of_the_mean_at_the_levels_of_each_tensors_own_method(backend: str) -> None:
    engine = engine_of('{"conv": "topk:ratio=0.1", "linear": "powersgd:rank=2", "*": "signsgd"}')
    sums = random_gradients(0, 0)
    found = measured(engine, {name: make(backend, x) for name, x in sums.items()}, (0.5, 1.0, 2.0), steps=4)
    assert found.own == {"conv": 0.1, "linear": 2}
    errors, sizes = found.errors, found.sent
    assert errors["conv"] == pytest.approx(
        {ratio: topk_error(sums["conv"] / 4, ratio) for ratio in (0.1, 0.05, 0.2)}, rel=1e-5
    )
    assert sizes["conv"] == {0.1: 29 * 6, 0.05: 15 * 6, 0.2: 58 * 6}
    assert sizes["linear"] == {rank: 4 * 40 * rank for rank in (2, 1, 4)}
    whole = np.linalg.norm(sums["linear"] / 4)
    assert 0 < errors["linear"][4] < errors["linear"][2] < errors["linear"][1] < whole
    # Nothing of a step has changed: not even what PowerSGD begins with.
    assert not engine.has_residuals
    assert engine.step_number == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_scaled_errors_are_in_units_of_the_root_mean_square_of_the_mean(backend: str) -> None:
    sums = random_gradients(0, 0)
    sums["linear"] *= np.float32(1e-3)
    given = {name: make(backend, x) for name, x in sums.items()}
    engine = engine_of("topk:ratio=0.1")
    plain, scaled = (measured(engine, given, (0.5, 1.0, 2.0), steps=4, scaled=scaled) for scaled in (False, True))
    names = ["conv", "linear"]
    for name in names:
        rms = math.sqrt(np.mean((sums[name] / 4).astype(float) ** 2))
        assert scaled.errors[name] == pytest.approx({k: x / rms for k, x in plain.errors[name].items()}, rel=1e-5)
    assert plain.norm is None
    assert scaled.norm == pytest.approx(sum(math.sqrt(sums[name].size) for name in names), rel=1e-5)
    given["conv"] = make(backend, np.zeros_like(sums["conv"]))
    scaled = measured(engine, given, (0.5, 1.0, 2.0), scaled=True)
    assert set(scaled.errors["conv"].values()) == {0.0}
    assert scaled.norm == pytest.approx(math.sqrt(sums["linear"].size), rel=1e-5)
    large = np.ones_like(sums["linear"])
    large[0, 0] = 1e25  # the square of the norm is beyond single precision, that of the error is not
    scaled = measured(engine_of("powersgd:rank=2"), {"linear": make(backend, large)}, (0.5, 1.0), scaled=True)
    assert 0.0 not in scaled.errors["linear"].values(), "no level sends all"


def test_levels_that_a_method_does_not_have_are_left_out() -> None:
    sums = random_gradients(0, 0)

    def levels(spec: str, around: tuple[float, ...], memory: Any = None) -> list[Any]:
        return list(measured(engine_of(spec, memory), sums, around).errors.get("linear", {}))

    assert levels("topk:ratio=0.6", (0.5, 1.0, 2.0)) == [0.6, 0.3]
    assert levels("powersgd:rank=1", (0.5, 1.0, 2.0)) == [1, 2]
    assert levels("powersgd:rank=2", LGreCo().around) == [2, 1, 3, 4]
    assert levels("qsgd:bits=8", (0.5, 1.0, 2.0)) == [8, 4]
    assert levels("globalqsgd:bits=2", (0.5, 1.0, 2.0)) == [2, 4]
    assert levels("qsgd:bits=8", (0.5, 1.0), parse_memory("error_feedback")) == [8]  # residuals would grow
    assert levels("signsgd", (0.5, 1.0, 2.0)) == []
    # At its own rank it saves nothing of this tensor, at half of it it does.
    found = measured(engine_of("powersgd:rank=16"), sums, (0.5, 1.0))
    assert found.errors["linear"] == {16: 0.0, 8: pytest.approx(found.errors["linear"][8])}
    assert found.sent["linear"] == {16: 4 * 384, 8: 4 * 40 * 8}


def test_a_tensor_without_a_gradient_is_left_out_and_what_is_not_finite_is_told() -> None:
    sums = random_gradients(0, 0)
    sums["linear"][0, 0] = np.inf
    del sums["conv"]
    with np.errstate(invalid="ignore"):
        found = measured(engine_of("topk:ratio=0.1"), sums, (0.5, 1.0))
    assert list(found.own) == list(found.sent) == ["linear"]
    assert not any(map(math.isfinite, found.errors["linear"].values()))
    nothing = LevelTable({}, {}, {}, other_bytes=174 + 234 + 24, dense_bytes=2712)
    assert measured(engine_of("topk:ratio=0.1"), {}, (0.5, 1.0)) == nothing


# On ranks -------------------------------------------------------------------------------------------------------------


def uneven(rank: int, step: int) -> dict[str, np.ndarray]:
    """At first all that there is of one tensor lies in a few elements."""
    found = random_gradients(rank, step)
    if step < 7:
        found["conv"].ravel()[10:] = 0
    return found


def plain(step: int) -> dict[str, float]:
    """The levels that rank 0 decides after so many steps: L-GreCo in plain NumPy, all choices tried."""
    means = {name: np.mean([uneven(0, step - back)[name] for back in (1, 2)], 0) for name in ("conv", "linear")}
    ratios = (0.1, 0.05, 0.2)
    errors = {name: [topk_error(mean, ratio) for ratio in ratios] for name, mean in means.items()}
    sizes = {name: [6 * math.ceil(ratio * mean.size) for ratio in ratios] for name, mean in means.items()}
    budget = sum(found[0] for found in errors.values())

    def parts(choice: tuple[int, ...]) -> int:
        return sum(math.ceil(errors[name][place] / budget * PARTS) for name, place in zip(means, choice, strict=True))

    def bytes_of(choice: tuple[int, ...]) -> int:
        return sum(sizes[name][place] for name, place in zip(means, choice, strict=True))

    allowed = [choice for choice in itertools.product(range(3), repeat=2) if parts(choice) <= PARTS]
    best = min([(0, 0), *allowed], key=bytes_of)
    return {name: ratios[place] for name, place in zip(means, best, strict=True)}


@pytest.mark.parametrize(("lag", "backend"), in_turns([0, 1]))
def test_all_ranks_obey_what_plain_numpy_finds_on_rank_0(lag: int, backend: str) -> None:
    policy = LGreCo(interval=4, last=2, levels=3, lag=lag)

    def work(communicator: InProcessCommunicator) -> Driven:
        return Driven(communicator, policy, backend, spec="topk:ratio=0.1", gradients=uneven).run(13)

    first, second = run_ranks(2, work)
    assert first.plans == second.plans
    assert first.result_bits() == second.result_bits()
    for step, found in enumerate(first.plans):
        decided = step // 4 * 4
        right = plain(decided) if decided else {"conv": 0.1, "linear": 0.1}
        assert found == {name: f"topk:ratio={ratio}" for name, ratio in right.items()} | {"bias": "none"}, step
    assert [plain(step)["conv"] for step in (4, 8, 12)] == [0.05, 0.1, 0.1]
    # Gradients are added up in the last two steps of each period alone, on rank 0.
    assert first.observed == [step % 4 == 2 for step in range(13)]
    assert not any(second.observed)


def test_mixed_methods_are_levelled_each_in_its_own_terms() -> None:
    spec = '{"conv": "topk:ratio=0.1", "linear": "powersgd:rank=2", "*": "none"}'

    def gradients(rank: int, step: int) -> dict[str, np.ndarray]:
        found = uneven(rank, step)
        rng = np.random.default_rng(1)
        found["linear"] = (5 * np.outer(rng.standard_normal(16), rng.standard_normal(24))).astype(np.float32)
        return found

    def work(communicator: InProcessCommunicator) -> Driven:
        return Driven(communicator, LGreCo(interval=3), "numpy", spec=spec, gradients=gradients).run(4)

    first, second = run_ranks(2, work)
    assert first.plans == second.plans
    # The linear layer has rank 1, of which more bytes lose nothing.
    assert first.plans[3]["linear"] == "powersgd:rank=1"
    assert first.plans[3]["conv"].startswith("topk:ratio=")
    assert first.plans[3]["bias"] == "none"


def test_a_rank_0_that_came_in_the_middle_of_an_interval_decides_at_the_end_of_the_next() -> None:
    """As elastic ranks go on: with the policy's state, but without the gradients of before."""

    def work(communicator: InProcessCommunicator) -> tuple[list[Any], list[Any]]:
        policy = LGreCo(interval=4, last=2, alpha=1.1)
        before = Driven(communicator, policy, "numpy", spec="topk:ratio=0.1", gradients=uneven).run(7)
        shared = before.state()["shared"]
        shared["coordinator"] = {**shared["coordinator"], "partial": True}
        state = {"shared": shared, "own": {**before.state()["own"], "coordinator": None}}
        after = Driven(communicator, policy, "numpy", spec="topk:ratio=0.1", gradients=uneven, state=state).run(7)
        return before.plans, after.plans

    first, second = run_ranks(2, work)
    assert first == second
    before, after = first
    assert before[0] != before[4] == before[-1]
    assert after[:5] == [before[-1]] * 5
    assert after[5] == after[6] != before[-1]
