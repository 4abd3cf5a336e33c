"""Accordion's decisions, against its rule written out over whole histories."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdcomp import NoCompression, PowerSGD, SpecError, TopK
from hvdcomp.policies.accordion import Accordion
from hvdcomp.policies.decisions import Levels
from hvdcomp.policies.request import LearningRates, Statistic, Statistics

LOW, HIGH = 2, 1


def expected_level(norms: list[float], falls: list[bool], end: int, interval: int, eta: float) -> int:
    """The level after the end of epoch number `end` (from 1); norms[e - 1], falls[e - 1] are of the end of epoch e."""
    boundary = end - end % interval  # the last periodic decision
    if boundary <= interval:  # there was none, or it had nothing to compare with
        return LOW
    if any(falls[boundary - 1 : end]):  # at it or since
        return LOW
    before, after = norms[boundary - interval - 1], norms[boundary - 1]
    if before == 0 or abs(before - after) / before >= eta:
        return LOW
    return HIGH


def levels(
    policy: Accordion, norms: list[float], rates: list[float] | None = None, only_when_asked_for: bool = True
) -> list[int]:
    """The level after each epoch's end; rates[e] is of epoch e, and one more of the epoch after the last."""
    rates = rates or [0.1] * (len(norms) + 1)
    state = policy.initial_state(["w"])
    assert policy.decision(state) == Levels({"w": LOW})
    found = []
    for epoch, norm in enumerate(norms):
        asked = Statistic.NORMS in policy.request(state).statistics
        statistics = Statistics(
            step=100 * (epoch + 1),
            epoch=epoch + 1,
            learning_rates=LearningRates((rates[epoch],), (rates[epoch + 1],)),
            norms={"w": norm} if asked or not only_when_asked_for else None,
        )
        state, decision = policy.decide(state, statistics)
        assert isinstance(decision, Levels)
        found.append(decision.levels["w"])
    return found


@given(
    histories=st.lists(
        st.tuples(st.sampled_from([0.0, 0.5, 0.6, 1.0, 1.4, 1.5, 2.0, 3.0]), st.sampled_from([0.1, 0.1, 0.1, 0.01])),
        min_size=1,
        max_size=25,
    ),
    interval=st.integers(1, 5),
    eta=st.sampled_from([0.25, 0.5, 1.0]),
    always=st.booleans(),
)
def test_the_rule_over_whole_histories(histories: list, interval: int, eta: float, always: bool) -> None:
    norms = [norm for norm, _ in histories]
    rates = [rate for _, rate in histories] + [0.1]
    falls = [after < before for before, after in pairwise(rates)]
    policy = Accordion(low=LOW, high=HIGH, interval=interval, eta=eta)
    expected = [expected_level(norms, falls, end, interval, eta) for end in range(1, len(norms) + 1)]
    assert levels(policy, norms, rates, only_when_asked_for=not always) == expected


@pytest.mark.parametrize(
    ("what", "norms", "expected"),
    [
        ("the first window is low", [1.0], [LOW]),
        ("no change", [1.0, 1.0], [LOW, HIGH]),
        ("equality at eta is critical", [1.0, 0.5], [LOW, LOW]),
        ("equality at eta, rising", [1.0, 1.5], [LOW, LOW]),
        ("just below eta", [1.0, 0.5000001], [LOW, HIGH]),
        ("just above, rising", [1.0, 1.4999999], [LOW, HIGH]),
        ("previous norm zero", [0.0, 1.0], [LOW, LOW]),
        ("both zero", [0.0, 0.0], [LOW, LOW]),
        ("current norm zero", [1.0, 0.0], [LOW, LOW]),
        ("against the previous window, not the first", [1.0, 2.0, 2.0], [LOW, LOW, HIGH]),
        ("not finite, and nothing to compare with after it", [1.0, math.nan, 1.0, 1.0], [LOW, LOW, LOW, HIGH]),
        ("infinite", [1.0, math.inf, 1.0, 1.0], [LOW, LOW, LOW, HIGH]),
        ("not finite at first", [math.nan, 1.0, 1.0], [LOW, LOW, HIGH]),
    ],
)
def test_comparisons(what: str, norms: list[float], expected: list[int]) -> None:
    assert levels(Accordion(low=LOW, high=HIGH, interval=1), norms) == expected, what


def test_every_tenth_epoch_by_default() -> None:
    policy = Accordion(low=LOW, high=HIGH)
    wild = [float(2 ** (epoch % 7)) for epoch in range(9)]  # norms between boundaries do not matter
    norms = [*wild, 1.0, *wild, 1.4, *wild, 2.1, *wild, 2.1]
    found = levels(policy, norms, only_when_asked_for=False)
    assert found == [LOW] * 19 + [HIGH] * 10 + [LOW] * 10 + [HIGH]


def test_norms_are_asked_for_at_boundaries_only() -> None:
    policy = Accordion(low=LOW, high=HIGH, interval=3)
    state = policy.initial_state(["w"])
    seen = []
    for epoch in range(7):
        seen.append(Statistic.NORMS in policy.request(state).statistics)
        assert Statistic.LEARNING_RATES in policy.request(state).statistics
        statistics = Statistics(step=epoch, learning_rates=LearningRates((1.0,), (1.0,)), norms={"w": 1.0})
        state, _ = policy.decide(state, statistics)
    assert seen == [False, False, True, False, False, True, False]


@pytest.mark.parametrize(
    ("what", "falls_after", "expected"),
    [
        ("off a boundary: until the next", 5, [LOW] * 3 + [HIGH] + [LOW] + [HIGH] * 4),
        ("at a boundary: over the norms, until the next", 4, [LOW] * 3 + [LOW] * 2 + [HIGH] * 4),
        ("just before one: for one epoch", 7, [LOW] * 3 + [HIGH] * 3 + [LOW] + [HIGH] * 2),
        ("in the first window", 1, [LOW] * 3 + [HIGH] * 6),
    ],
)
def test_a_learning_rate_that_falls(what: str, falls_after: int, expected: list[int]) -> None:
    rates = [1.0 if epoch <= falls_after else 0.1 for epoch in range(1, 11)]
    assert levels(Accordion(low=LOW, high=HIGH, interval=2), [1.0] * 9, rates) == expected, what


def test_a_learning_rate_that_rises_does_nothing() -> None:
    rates = [0.1 * (epoch + 1) for epoch in range(10)]
    assert levels(Accordion(low=LOW, high=HIGH, interval=2), [1.0] * 9, rates) == [LOW] * 3 + [HIGH] * 6


def test_each_tensor_by_itself_and_the_learning_rate_for_all() -> None:
    policy = Accordion(low=0.99, high=0.1, interval=1)
    state = policy.initial_state(["a", "b"])
    history = [
        ({"a": 1.0, "b": 1.0}, 1.0, {"a": 0.99, "b": 0.99}),
        ({"a": 1.1, "b": 5.0}, 1.0, {"a": 0.1, "b": 0.99}),
        ({"a": 5.0, "b": 5.1}, 1.0, {"a": 0.99, "b": 0.1}),
        ({"a": 5.0, "b": 5.1}, 0.5, {"a": 0.99, "b": 0.99}),
        ({"a": 5.0, "b": 5.1}, 1.0, {"a": 0.1, "b": 0.1}),
    ]
    for step, (norms, following, expected) in enumerate(history):
        statistics = Statistics(step=step, learning_rates=LearningRates((1.0,), (following,)), norms=norms)
        state, decision = policy.decide(state, statistics)
        assert decision == Levels(expected)


def test_by_steps_every_window_is_compared() -> None:
    assert levels(Accordion(low=LOW, high=HIGH, steps=50), [1.0, 1.0, 1.6, 1.6]) == [LOW, HIGH, LOW, HIGH]
    rates = [1.0, 1.0, 0.1, 0.1, 0.1]
    assert levels(Accordion(low=LOW, high=HIGH, steps=50), [1.0] * 4, rates) == [LOW, LOW, HIGH, HIGH]


def test_whose_gradients() -> None:
    for source in ("local", "aggregated"):
        policy = Accordion(low=2, high=1, statistic=source)
        assert policy.request(policy.initial_state(["w"])).source == source
    assert Accordion(low=2, high=1).statistic == "local"


@pytest.mark.parametrize("norms", [{"a": 1.0}, {"a": 1.0, "b": 1.0, "c": 1.0}, {}])
def test_norms_of_other_tensors_are_refused(norms: dict[str, float]) -> None:
    policy = Accordion(low=2, high=1, interval=1)
    statistics = Statistics(step=1, learning_rates=LearningRates((1.0,), (1.0,)), norms=norms)
    with pytest.raises(ValueError, match=r"norms of different tensors.*(missing: .*b|not expected: c)"):
        policy.decide(policy.initial_state(["a", "b"]), statistics)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"low": 0.1, "high": 0.99}, "low=0.1,high=0.99"),
        ({"low": 2, "high": 2}, "low=2,high=2"),
        ({"low": "a", "high": 2}, "low='a'"),
        ({"low": 2, "high": math.nan}, "high=nan"),
        ({"low": 2, "high": 1, "eta": 0}, "eta=0"),
        ({"low": 2, "high": 1, "eta": math.nan}, "eta=nan"),
        ({"low": 2, "high": 1, "interval": 0}, "interval=0"),
        ({"low": 2, "high": 1, "interval": 2.5}, "interval=2.5"),
        ({"low": 2, "high": 1, "steps": -1}, "steps=-1"),
        ({"low": 2, "high": 1, "steps": 5, "interval": 5}, "not both"),
        ({"low": 2, "high": 1, "statistic": "global"}, "statistic='global' .* local or aggregated"),
    ],
)
def test_bad_settings_are_refused(settings: dict, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        Accordion(**settings)


def test_both_levels_must_suit_the_compressor() -> None:
    Accordion(low=0.99, high=0.1).check(10, TopK(ratio=0.5))
    with pytest.raises(SpecError, match="ratio=2"):
        Accordion(low=2, high=0.1).check(10, TopK(ratio=0.5))
    with pytest.raises(SpecError, match=r"rank=0\.5"):
        Accordion(low=2, high=0.5).check(10, PowerSGD(rank=2))
    with pytest.raises(SpecError, match="no level"):
        Accordion(low=2, high=1).check(10, NoCompression())
