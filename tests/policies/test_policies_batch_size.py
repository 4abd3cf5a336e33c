"""Policies of the batch size: when they grow it, that Accordion's never shrinks it, and what the learning rate does."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdcomp import PowerSGD, SpecError
from hvdcomp.policies import Policy
from hvdcomp.policies.batch_size import AccordionBatchSize, IncreaseBatchSize
from hvdcomp.policies.decisions import BatchSize
from hvdcomp.policies.request import LearningRates, Statistic, Statistics

norms_and_falls = st.lists(
    st.tuples(st.sampled_from([0.0, 0.5, 0.6, 1.0, 1.4, 1.5, 2.0]), st.booleans()), min_size=1, max_size=25
)


def accumulations(policy: AccordionBatchSize, norms: list[float], falls: list[bool]) -> list[int]:
    state = policy.initial_state(["w"])
    assert policy.decision(state) == BatchSize(1, 1.0)
    found = []
    for epoch, (norm, falls_now) in enumerate(zip(norms, falls, strict=True)):
        statistics = Statistics(
            step=epoch + 1, model_norm=norm, learning_rates=LearningRates((0.1,), (0.01 if falls_now else 0.1,))
        )
        state, decision = policy.decide(state, statistics)
        assert isinstance(decision, BatchSize)
        assert decision.learning_rate_factor == decision.accumulation
        found.append(decision.accumulation)
    return found


@given(history=norms_and_falls, interval=st.integers(1, 4))
def test_accordion_over_whole_histories(history: list, interval: int) -> None:
    """Large from the first boundary on at which the norm has changed by less than half and no decay follows."""
    norms, falls = [norm for norm, _ in history], [fall for _, fall in history]
    calm = [
        end
        for end in range(2 * interval, len(norms) + 1, interval)
        if norms[end - interval - 1] > 0
        and abs(norms[end - interval - 1] - norms[end - 1]) / norms[end - interval - 1] < 0.5
        and not falls[end - 1]
    ]
    expected = [8 if calm and end >= calm[0] else 1 for end in range(1, len(norms) + 1)]
    assert accumulations(AccordionBatchSize(low=512, high=4096, interval=interval), norms, falls) == expected


@pytest.mark.parametrize(
    ("what", "norms", "expected"),
    [
        ("first window", [1.0], [1]),
        ("no change", [1.0, 1.0], [1, 8]),
        ("equality at eta", [1.0, 0.5, 0.4], [1, 1, 8]),
        ("previous norm zero", [0.0, 0.0, 0.0], [1, 1, 1]),
        ("not finite", [1.0, math.nan, 1.0, 1.0], [1, 1, 1, 8]),
        ("only ever upward", [1.0, 1.0, 100.0, 0.0, math.nan], [1, 8, 8, 8, 8]),
    ],
)
def test_accordion_comparisons(what: str, norms: list[float], expected: list[int]) -> None:
    policy = AccordionBatchSize(low=512, high=4096, interval=1)
    assert accumulations(policy, norms, [False] * len(norms)) == expected, what


def test_accordion_never_shrinks_when_the_learning_rate_falls() -> None:
    policy = AccordionBatchSize(low=512, high=4096, interval=1)
    assert accumulations(policy, [1.0] * 4, [False, True, False, True]) == [1, 1, 8, 8]


def test_accordion_wants_nothing_between_boundaries_nor_once_grown() -> None:
    policy = AccordionBatchSize(low=1, high=2, interval=2)
    state, seen = policy.initial_state(["w"]), []
    for epoch in range(7):
        seen.append(policy.request(state).statistics)
        statistics = Statistics(step=epoch, model_norm=1.0, learning_rates=LearningRates((1.0,), (1.0,)))
        state, _ = policy.decide(state, statistics)
    both = {Statistic.MODEL_NORM, Statistic.LEARNING_RATES}
    assert seen == [set(), both, set(), both, set(), set(), set()]


def test_accordion_by_steps() -> None:
    assert accumulations(AccordionBatchSize(low=1, high=3, steps=100), [1.0, 2.0, 2.0], [False] * 3) == [1, 1, 3]


def increased(policy: IncreaseBatchSize, rates: list[float]) -> list[int]:
    """The accumulation after each epoch's end; rates[e] is of epoch e."""
    state, found = policy.initial_state(["w"]), []
    assert policy.decision(state) == BatchSize(1, 1.0)
    for epoch, (now, following) in enumerate(pairwise(rates)):
        statistics = Statistics(step=epoch, learning_rates=LearningRates((now,), (following,)))
        state, decision = policy.decide(state, statistics)
        assert isinstance(decision, BatchSize)
        assert decision.learning_rate_factor == decision.accumulation
        found.append(decision.accumulation)
    return found


@pytest.mark.parametrize(
    ("what", "rates", "expected"),
    [
        ("constant", [0.1, 0.1, 0.1], [1, 1]),
        ("the paper's decays by 5", [0.1, 0.02, 0.02, 0.004], [5, 5, 25]),
        ("no room: the learning rate decays instead", [0.1, 0.02, 0.004, 0.0008, 0.00016], [5, 25, 40, 40]),
        ("warm-up", [0.1, 0.2, 0.4, 0.4, 0.1], [1, 1, 1, 4]),
        ("not a whole number", [0.3, 0.2, 0.1, 0.08], [1, 3, 3]),
        ("warm restart", [0.4, 0.1, 0.4, 0.1], [4, 1, 4]),
        ("to zero", [0.1, 0.02, 0.0, 0.0], [5, 5, 5]),
        ("from zero", [0.0, 0.1, 0.05], [1, 2]),
    ],
)
def test_increase_where_the_schedule_decays(what: str, rates: list[float], expected: list[int]) -> None:
    assert increased(IncreaseBatchSize(low=128, high=128 * 40), rates) == expected, what


@given(st.lists(st.floats(1e-6, 10.0), min_size=2, max_size=20))
def test_the_rate_in_force_is_never_above_the_peak_nor_below_the_schedule(rates: list[float]) -> None:
    for end, accumulation in enumerate(increased(IncreaseBatchSize(low=1, high=50), rates), start=1):
        peak = max(rates[: end + 1])
        assert rates[end] <= rates[end] * accumulation <= peak * (1 + 1e-6)
        assert accumulation == 50 or rates[end] * (accumulation + 1) > peak * (1 - 1e-6)


def test_the_largest_of_several_groups_counts() -> None:
    policy = IncreaseBatchSize(low=1, high=100)
    statistics = Statistics(step=1, learning_rates=LearningRates((0.1, 0.01), (0.05, 0.0001)))
    assert policy.decide(policy.initial_state([]), statistics)[1] == BatchSize(2, 2.0)


@pytest.mark.parametrize("kind", [AccordionBatchSize, IncreaseBatchSize])
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"low": 512, "high": 512}, "low=512,high=512"),
        ({"low": 512, "high": 128}, "low=512,high=128"),
        ({"low": 0, "high": 128}, "low=0"),
        ({"low": 1, "high": 128.5}, r"high=128\.5"),
        ({"low": 1, "high": 2, "steps": -1}, "steps=-1"),
    ],
)
def test_bad_settings_are_refused(kind: type, settings: dict, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        kind(**settings)


def test_accordion_needs_a_multiple() -> None:
    with pytest.raises(SpecError, match="multiple of low"):
        AccordionBatchSize(low=100, high=250)
    with pytest.raises(SpecError, match="interval=0"):
        AccordionBatchSize(low=1, high=2, interval=0)


@pytest.mark.parametrize(
    "policy",
    [
        AccordionBatchSize(low=10, high=50),
        IncreaseBatchSize(low=10, high=50),
    ],
)
def test_an_epoch_has_room_for_the_largest_batch(policy: Policy) -> None:
    policy.check(5, PowerSGD(rank=2))
    with pytest.raises(SpecError, match="consists of 5 batches of the first size, but an epoch has only 4"):
        policy.check(4, PowerSGD(rank=2))
