"""AdaQS's decisions, against its rule written out for one tensor."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdcomp import NoCompression, SpecError, TopK
from hvdcomp.policies.adaqs import AdaQS
from hvdcomp.policies.decisions import Factors
from hvdcomp.policies.request import Statistic, Statistics


def factors(policy: AdaQS, ratios: list[float]) -> list[float]:
    state = policy.initial_state(["w"])
    assert policy.decision(state) == Factors({"w": policy.start})
    found = []
    for step, ratio in enumerate(ratios):
        state, decision = policy.decide(state, Statistics(step=step, mean_to_std={"w": ratio}))
        assert isinstance(decision, Factors)
        found.append(decision.factors["w"])
    return found


@given(
    st.lists(st.floats(0.0, 4.0), max_size=30),
    st.sampled_from([0.1, 0.25, 0.5, 0.9]),
    st.sampled_from([1.0, 2.0, 3.0]),
)
def test_the_rule_for_one_tensor(ratios: list[float], fall: float, floor: float) -> None:
    factor, last_change, expected = 32.0, 0.0, []
    for ratio in ratios:
        if last_change == 0:
            last_change = ratio
        elif (last_change - ratio) / last_change >= fall and factor > floor:
            factor = max(factor / 2, floor)
            last_change = ratio
        expected.append(factor)
    assert factors(AdaQS(start=32, fall=fall, floor=floor), ratios) == expected


@pytest.mark.parametrize(
    ("what", "ratios", "expected"),
    [
        ("equality", [1.0, 0.75], [16, 8]),
        ("just not", [1.0, 0.7500001], [16, 16]),
        ("since the last change, not since the last look", [1.0, 0.9, 0.8, 0.7, 0.6, 0.5], [16, 16, 16, 8, 8, 4]),
        ("once, however far it falls", [1.0, 0.001, 0.001], [16, 8, 8]),
        ("a rise does not raise the reference", [1.0, 4.0, 0.8, 0.75], [16, 16, 16, 8]),
        ("down to the floor", [1.0, 0.7, 0.4, 0.2, 0.1, 0.05], [16, 8, 4, 3, 3, 3]),
        ("from zero nothing falls", [0.0, 0.0, 1.0, 0.5], [16, 16, 16, 8]),
        ("to zero, and on from the next", [1.0, 0.0, 1.0, 0.5], [16, 8, 8, 4]),
        ("infinite at first", [math.inf, 1.0, 0.5], [16, 16, 8]),
        ("not finite is passed over", [math.nan, 1.0, math.inf, math.nan, 0.5], [16, 16, 16, 16, 8]),
    ],
)
def test_histories(what: str, ratios: list[float], expected: list[float]) -> None:
    assert factors(AdaQS(start=16, fall=0.25, floor=3), ratios) == expected, what


def test_each_tensor_by_itself_until_none_can_change() -> None:
    policy = AdaQS(start=4, fall=0.5, floor=2, steps=10)
    state = policy.initial_state(["a", "b"])
    history = [
        ({"a": 1.0, "b": 1.0}, {"a": 4.0, "b": 4.0}),
        ({"a": 0.5, "b": 0.9}, {"a": 2.0, "b": 4.0}),
        ({"a": 0.1, "b": 0.5}, {"a": 2.0, "b": 2.0}),
    ]
    for step, (ratios, expected) in enumerate(history):
        assert policy.request(state).statistics == {Statistic.MEAN_TO_STD}
        state, decision = policy.decide(state, Statistics(step=step, mean_to_std=ratios))
        assert decision == Factors(expected)
    assert policy.request(state).statistics == set()
    assert policy.decide(state, Statistics(step=9)) == (state, Factors({"a": 2.0, "b": 2.0}))


def test_ratios_of_other_tensors_are_refused() -> None:
    policy = AdaQS(start=4, fall=0.5)
    with pytest.raises(ValueError, match="missing: b; not expected: c"):
        policy.decide(policy.initial_state(["a", "b"]), Statistics(step=1, mean_to_std={"a": 1.0, "c": 1.0}))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"start": 1, "fall": 0.5}, "start=1 "),
        ({"start": math.inf, "fall": 0.5}, "start=inf"),
        ({"start": 4, "fall": 0}, "fall=0"),
        ({"start": 4, "fall": 1}, "fall=1"),
        ({"start": 4, "fall": math.nan}, "fall=nan"),
        ({"start": 4, "fall": 0.5, "floor": 0.5}, r"floor=0\.5"),
        ({"start": 4, "fall": 0.5, "floor": 4}, "start=4"),
        ({"start": 4, "fall": 0.5, "interval": 0}, "interval=0"),
        ({"start": 4, "fall": 0.5, "interval": 3, "steps": 3}, "not both"),
        ({"start": 4, "fall": 0.5, "statistic": "mine"}, "statistic='mine'"),
    ],
)
def test_bad_settings_are_refused(settings: dict, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        AdaQS(**settings)


def test_it_needs_a_compressor_with_a_level() -> None:
    AdaQS(start=4, fall=0.5).check(10, TopK(ratio=0.1))
    with pytest.raises(SpecError, match="no single level"):
        AdaQS(start=4, fall=0.5).check(10, NoCompression())
