"""Accordion's automatic levels: which factors are chosen from which measurements, and that the rest is Accordion."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdcomp import NoCompression, SpecError, TopK
from hvdcomp.policies.accordion_auto import AutoAccordion
from hvdcomp.policies.decisions import Decision, Factors, Probe
from hvdcomp.policies.request import LearningRates, Statistic, Statistics
from tests.test_policies_accordion import LOW as CRITICAL
from tests.test_policies_accordion import expected_level

CANDIDATES = (2.0, 4.0, 8.0, 16.0)
NAN, INF = math.nan, math.inf

Periods = list[list[float | None]]
"""Of one tensor, the gain of each candidate in each probed period; None for no entry."""


def oracle(periods: Periods, costs: list[float], keep_low: float, keep_high: float) -> tuple[float, float]:
    """The factors of low and high compression, as documented, with nothing but loops over the candidates."""
    gains = np.array([[NAN if gain is None else gain for gain in period] for period in periods], dtype=float)
    gains[~np.isfinite(gains)] = NAN
    known = ~np.isnan(gains).all(axis=0)
    mean = np.full(len(CANDIDATES), -1.0)
    mean[known] = np.nanmean(gains[:, known], axis=0)
    useful = np.array(
        [all(costs[place] < other for other in [1.0, *costs[:place]]) for place in range(len(CANDIDATES))]
    )
    factors, mean = np.array(CANDIDATES)[useful], mean[useful]
    if not factors.size:
        return 1.0, 1.0
    low = factors[mean >= keep_low].max() if (mean >= keep_low).any() else factors.min()
    high = factors[mean >= keep_high].max() if (mean >= keep_high).any() else factors.min()
    beyond = factors[factors > low]
    return float(low), float(max(high, beyond.min()) if beyond.size else low)


def moment(
    gains: dict[str, dict[float, float]] | None = None,
    costs: dict[str, dict[float, float]] | None = None,
    norms: dict[str, float] | None = None,
    rates: tuple[float, float] = (0.1, 0.1),
    step: int = 1,
) -> Statistics:
    learning_rates = LearningRates(rates[:1], rates[1:])
    return Statistics(step, level_gains=gains, level_costs=costs, norms=norms, learning_rates=learning_rates)


def table(values: list[float | None]) -> dict[float, float]:
    return {cf: value for cf, value in zip(CANDIDATES, values, strict=True) if value is not None}


def chosen(
    periods: Periods, costs: list[float] | None = None, keep_low: float = 0.75, keep_high: float = 0.25
) -> tuple[float, float]:
    """The two factors that one tensor gets, as decisions show them."""
    policy = AutoAccordion(
        largest=16, probe=len(periods), keep_low=keep_low, keep_high=keep_high, interval=len(periods) + 1
    )
    state = policy.initial_state(["w"])
    costs_of = {"w": table([1 / cf for cf in CANDIDATES] if costs is None else list(costs))}
    for gains in periods:
        assert policy.decision(state) == Probe(CANDIDATES, 10, 2.0)
        state, decision = policy.decide(state, moment({"w": table(gains)}, costs_of))
    found = [decision]  # low, because nothing was compared yet
    calm = {"w": 1.0}
    for _ in range(2 * (len(periods) + 1) - len(periods)):  # until norms were compared with equal ones
        state, decision = policy.decide(state, moment(norms=calm))
    found.append(decision)
    factors = [each.factors["w"] for each in found if isinstance(each, Factors)]
    return factors[0], factors[1]


gain_drawn = st.sampled_from([0.0, 0.1, 0.25, 0.3, 0.5, 0.75, 0.9, 1.0, NAN, INF, -INF, None])
cost_drawn = st.sampled_from([0.01, 0.1, 0.25, 0.5, 0.99, 1.0, 2.0])


@given(
    periods=st.lists(st.lists(gain_drawn, min_size=4, max_size=4), min_size=1, max_size=3),
    costs=st.lists(cost_drawn, min_size=4, max_size=4) | st.just([0.5, 0.25, 0.125, 0.0625]),
    keep=st.sampled_from([(0.75, 0.25), (0.5, 0.5), (1.0, 0.1), (0.5, 0.25)]),
)
def test_the_choice_against_its_definition(periods: Periods, costs: list[float], keep: tuple[float, float]) -> None:
    assert chosen(periods, costs, *keep) == oracle(periods, costs, *keep)


@pytest.mark.parametrize(
    ("what", "gains", "costs", "expected"),
    [
        ("the largest that keep enough", [0.9, 0.8, 0.4, 0.1], None, (4, 8)),
        ("equality keeps enough", [0.9, 0.75, 0.25, 0.1], None, (4, 8)),
        ("just below does not", [0.9, math.nextafter(0.75, 0), math.nextafter(0.25, 0), 0.1], None, (2, 4)),
        ("nothing keeps enough", [0.2, 0.1, 0.0, 0.0], None, (2, 4)),
        ("only enough for high", [0.5, 0.4, 0.3, 0.1], None, (2, 8)),
        ("high goes beyond low", [0.9, 0.8, 0.1, 0.0], None, (4, 8)),
        ("but no further than there are candidates", [0.9, 0.9, 0.9, 0.8], None, (16, 16)),
        ("gains that do not fall steadily", [0.1, 0.8, 0.1, 0.3], None, (4, 16)),
        ("a cost that is no less", [0.9, 0.8, 0.8, 0.1], [0.5, 0.25, 0.25, 0.1], (4, 16)),
        ("a cost that is more", [0.9, 0.9, 0.9, 0.3], [0.5, 0.6, 0.55, 0.1], (2, 16)),
        ("less than a pointless one is not enough", [0.9, 0.9, 0.9, 0.3], [0.5, 0.8, 0.6, 0.1], (2, 16)),
        ("no less than dense at first", [0.9, 0.9, 0.4, 0.1], [1.5, 1.0, 0.9, 0.5], (8, 16)),
        ("one is left", [0.9, 0.9, 0.1, 0.1], [1.5, 1.0, 0.9, 0.9], (8, 8)),
        ("all are pointless", [0.9, 0.8, 0.4, 0.1], [1.5, 1.0, 1.0, 2.0], (1, 1)),
        ("none is finite", [NAN, NAN, INF, -INF], None, (2, 4)),
        ("none is there", [None] * 4, None, (2, 4)),
        ("one is not finite", [0.9, NAN, 0.8, 0.3], None, (8, 16)),
        ("none is there, and the first is pointless", [None] * 4, [1.0, 0.9, 0.8, 0.7], (4, 8)),
        ("a cost that is not a number is no use", [0.9, 0.9, 0.3, 0.1], [0.5, NAN, 0.25, 0.1], (2, 8)),
    ],
)
def test_choices(what: str, gains: list[float | None], costs: list[float] | None, expected: tuple[int, int]) -> None:
    assert chosen([gains], costs) == expected, what


def test_gains_of_several_periods_are_averaged() -> None:
    assert chosen([[1.0, 1.0, 0.5, 0.0], [1.0, 0.5, 0.0, 0.0]]) == (4, 8)  # 1, 0.75, 0.25, 0
    assert chosen([[1.0, 1.0, 0.4, 0.0], [1.0, 0.4, 0.0, 0.0]]) == (2, 4)  # 1, 0.7, 0.2, 0
    assert chosen([[1.0, 0.8, 0.3, 0.0], [NAN, NAN, None, NAN]]) == (4, 8)  # what is not finite is left out


def test_costs_that_are_not_known_are_those_aimed_at() -> None:
    policy = AutoAccordion(largest=16)
    for costs, expected in (({}, 2.0), ({"w": {2.0: 1.0}}, 4.0)):
        _, decision = policy.decide(policy.initial_state(["w"]), moment({}, costs))
        assert decision == Factors({"w": expected})


def test_costs_stay_known_from_the_periods_before() -> None:
    policy = AutoAccordion(largest=16, probe=2)
    state, _ = policy.decide(policy.initial_state(["w"]), moment({}, {"w": table([1.0, 0.9, 0.8, 0.7])}))
    _, decision = policy.decide(state, moment({}, {}))
    assert decision == Factors({"w": 4.0})


def test_each_tensor_by_itself() -> None:
    policy = AutoAccordion(largest=16, interval=1)
    state = policy.initial_state(["a", "b", "none", "small"])
    gains = {"a": table([0.9, 0.8, 0.5, 0.1]), "b": table([0.6, 0.2, 0.1, 0.0]), "small": table([1.0] * 4)}
    costs = {name: table([0.5, 0.25, 0.125, 0.0625]) for name in "ab"} | {"small": table([1.0] * 4)}
    norms = {"a": 1.0, "b": 1.0, "none": 0.0, "small": 1.0}
    state, decision = policy.decide(state, moment(gains, costs, norms))
    assert decision == Factors({"a": 4.0, "b": 2.0, "none": 2.0, "small": 1.0})
    state, decision = policy.decide(state, moment(norms={**norms, "b": 9.0}))
    assert decision == Factors({"a": 8.0, "b": 2.0, "none": 2.0, "small": 1.0})  # none: a norm of 0 is critical
    state, decision = policy.decide(state, moment(norms={"a": 9.0, "b": 9.0, "none": 1.0, "small": 9.0}))
    state, decision = policy.decide(state, moment(norms={"a": 9.0, "b": 9.0, "none": 1.0, "small": 9.0}))
    assert decision == Factors({"a": 8.0, "b": 4.0, "none": 4.0, "small": 1.0})
    assert policy.decide(state, moment(norms=dict.fromkeys(norms, 9.0), rates=(0.1, 0.01)))[1] == Factors(
        {"a": 4.0, "b": 2.0, "none": 2.0, "small": 1.0}
    )


GAINS, COSTS = {"w": table([0.9, 0.8, 0.5, 0.1])}, {"w": table([0.5, 0.25, 0.125, 0.0625])}  # low 4, high 8


def decisions(policy: AutoAccordion, norms: list[float], rates: list[float], restart: bool = False) -> list[Decision]:
    """The decision after each epoch's end; rates[e] is of epoch e. With `restart`, each from a state kept as JSON."""
    state, found = policy.initial_state(["w"]), []
    for epoch, (norm, following) in enumerate(zip(norms, pairwise(rates), strict=True)):
        asked = policy.request(state).statistics
        probing = Statistic.LEVEL_GAINS in asked
        told = moment(
            GAINS if probing else None,
            COSTS if probing else None,
            {"w": norm} if Statistic.NORMS in asked else None,
            following,
            step=epoch,
        )
        state, decision = policy.decide(state, told)
        if restart:
            state = policy.from_json(json.loads(json.dumps(policy.to_json(state), allow_nan=False)))
            assert policy.decision(state) == decision
        found.append(decision)
    return found


@given(
    histories=st.lists(
        st.tuples(st.sampled_from([0.0, 0.5, 0.6, 1.0, 1.4, 1.5, 2.0]), st.sampled_from([0.1, 0.1, 0.1, 0.01])),
        min_size=1,
        max_size=20,
    ),
    interval=st.integers(1, 4),
    probe=st.integers(1, 5),
    eta=st.sampled_from([0.25, 0.5, 1.0]),
    restart=st.booleans(),
)
def test_whole_histories(histories: list, interval: int, probe: int, eta: float, restart: bool) -> None:
    """After the probed epochs it is low when and only when plain Accordion is, which counts those epochs too."""
    norms = [norm for norm, _ in histories]
    rates = [rate for _, rate in histories] + [0.1]
    falls = [after < before for before, after in pairwise(rates)]
    policy = AutoAccordion(largest=16, probe=probe, interval=interval, eta=eta)
    for end, decision in enumerate(decisions(policy, norms, rates, restart), start=1):
        if end < probe:
            assert decision == Probe(CANDIDATES, 10, 2.0)
        else:
            low = expected_level(norms, falls, end, interval, eta) == CRITICAL
            assert decision == Factors({"w": 4.0 if low else 8.0})


L, H, P = 4.0, 8.0, None


@pytest.mark.parametrize(
    ("what", "norms", "falls_after", "settings", "expected"),
    [
        ("calm", [1.0] * 4, None, {"interval": 1}, [L, H, H, H]),
        ("equality at eta", [1.0, 0.5, 0.75], None, {"interval": 1}, [L, L, L]),
        ("just below eta", [1.0, 0.5000001], None, {"interval": 1}, [L, H]),
        ("another eta", [1.0, 0.5, 0.5], None, {"interval": 1, "eta": 0.51}, [L, H, H]),
        ("previous norm zero", [0.0, 1.0, 1.0], None, {"interval": 1}, [L, L, H]),
        ("compared while probing", [1.0, 1.0, 1.0], None, {"interval": 1, "probe": 2}, [P, H, H]),
        ("every second epoch", [1.0] * 5, None, {"interval": 2}, [L, L, L, H, H]),
        ("falls off a boundary", [1.0] * 7, 5, {"interval": 2}, [L, L, L, H, L, H, H]),
        ("falls at a boundary", [1.0] * 7, 4, {"interval": 2}, [L, L, L, L, L, H, H]),
        ("falls while probing", [1.0] * 4, 1, {"interval": 1, "probe": 2}, [P, H, H, H]),
        ("falls as probing ends", [1.0] * 4, 2, {"interval": 1, "probe": 2}, [P, L, H, H]),
        ("by steps", [1.0] * 4, None, {"steps": 50, "probe": 3}, [P, P, H, H]),
    ],
)
def test_regimes(what: str, norms: list, falls_after: int | None, settings: dict, expected: list) -> None:
    rates = [0.1 if falls_after is None or epoch <= falls_after else 0.01 for epoch in range(1, len(norms) + 2)]
    policy = AutoAccordion(largest=16, **settings)
    right = [Probe(CANDIDATES, 10, 2.0) if factor is P else Factors({"w": factor}) for factor in expected]
    assert decisions(policy, norms, rates) == right, what


def test_what_is_asked_for() -> None:
    policy = AutoAccordion(interval=2, probe=3)
    state, seen = policy.initial_state(["w"]), []
    for _ in range(6):
        seen.append({each.value for each in policy.request(state).statistics} - {"learning_rates"})
        assert Statistic.LEARNING_RATES in policy.request(state).statistics
        state, _ = policy.decide(state, moment(GAINS, COSTS, {"w": 1.0}))
    assert seen == [{"level_gains"}, {"level_gains", "norms"}, {"level_gains"}, {"norms"}, set(), {"norms"}]


def test_what_is_probed() -> None:
    policy = AutoAccordion(smallest=3, largest=20, every=4)
    assert policy.decision(policy.initial_state(["w"])) == Probe((3.0, 6.0, 12.0), every=4, send=3.0)
    assert AutoAccordion().candidates == (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def test_measurements_are_kept_only_until_the_choice() -> None:
    policy = AutoAccordion(largest=16, probe=2)
    state, _ = policy.decide(policy.initial_state(["w"]), moment(GAINS, COSTS))
    assert policy.to_json(state)["gains"] == {"w": {"2.0": (0.9,), "4.0": (0.8,), "8.0": (0.5,), "16.0": (0.1,)}}
    assert policy.from_json(policy.to_json(state)) == state
    state, _ = policy.decide(state, moment(GAINS, COSTS))
    assert (state.gains, state.costs, state.low, state.high) == ({}, {}, {"w": 4.0}, {"w": 8.0})


def test_without_tensors() -> None:
    policy = AutoAccordion()
    _, decision = policy.decide(policy.initial_state([]), moment({}, {}))
    assert decision == Factors({})


@pytest.mark.parametrize(
    ("gains", "costs", "words"),
    [
        (GAINS, None, "needs level_costs"),
        ({**GAINS, "v": {}}, COSTS, "level gains of other tensors .* not expected: v"),
        (GAINS, {**COSTS, "v": {}}, "level costs of other tensors .* not expected: v"),
    ],
)
def test_measurements_that_cannot_be(gains: dict, costs: dict | None, words: str) -> None:
    policy = AutoAccordion()
    with pytest.raises(ValueError, match=words):
        policy.decide(policy.initial_state(["w"]), moment(gains, costs))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"probe": 0}, "probe=0 .* at least 1"),
        ({"every": 0}, "every=0 .* at least 1"),
        ({"keep_low": 0}, "keep_low=0 .* above 0 and at most 1"),
        ({"keep_low": 1.5}, r"keep_low=1\.5"),
        ({"keep_high": NAN}, "keep_high=nan"),
        ({"keep_low": 0.3, "keep_high": 0.4}, r"keep_low=0\.3,keep_high=0\.4 .* must not be above"),
        ({"smallest": 1}, "smallest=1 .* above 1"),
        ({"largest": INF}, "largest=inf"),
        ({"largest": 3}, r"smallest=2\.0,largest=3 .* at least twice"),
        ({"eta": 0}, "eta=0"),
        ({"steps": 5, "interval": 5}, "not both"),
    ],
)
def test_bad_settings_are_refused(settings: dict, words: str) -> None:
    with pytest.raises(SpecError, match=f"accordion:auto: .*{words}"):
        AutoAccordion(**settings)


def test_it_needs_a_compressor_with_a_level() -> None:
    AutoAccordion().check(10, TopK(ratio=0.1))
    with pytest.raises(SpecError, match="no single level"):
        AutoAccordion().check(10, NoCompression())
    with pytest.raises(SpecError, match="steps_per_epoch"):
        AutoAccordion().check(None, TopK(ratio=0.1))
