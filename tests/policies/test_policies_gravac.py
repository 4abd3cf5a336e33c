"""GraVAC's decisions, against its algorithm written as one loop, and its rules one by one."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdcomp import NoCompression, SpecError, TopK
from hvdcomp.policies.decisions import MultiLevel
from hvdcomp.policies.gravac import GraVAC, GraVACState, error_gain, raw_gain
from hvdcomp.policies.request import GravacGains, Period, Statistics, Timing

SAMPLES, RANKS = 640, 20  # N b, N

Step = tuple[float, float, float]  # gain of the minimum, gain of the candidate, seconds


def algorithm(policy: GraVAC, draws: list[Step]) -> list[tuple[float, float | None, float]]:
    """For each step the minimum, the candidate (theta_s times the minimum) and the factor that was sent (1: dense)."""
    exponents = [1, 2, 4, 8] if policy.scaling == "exponential" else list(range(1, 12))
    ladder = sorted({min(policy.max, policy.min * 2**exponent) for exponent in exponents} - {policy.min})
    theta_min, theta = policy.min, ladder[0] if ladder else None
    delta: dict[float, float] = {}  # of what is compressed to
    throughput: dict[float, float] = {}
    searching, sent, log = True, 1.0, []

    def choice() -> float:
        if theta is not None and theta in delta and delta[theta] >= policy.epsilon:
            return theta
        return theta_min if theta_min in delta and delta[theta_min] >= policy.epsilon else 1.0

    for number, (gain_min, gain_c, seconds) in enumerate(draws, start=1):
        for cf, new in ((theta_min, gain_min), (theta, gain_c)):
            if cf is not None:
                delta[cf] = new if cf not in delta else RANKS / 100 * new + (1 - RANKS / 100) * delta[cf]
        log.append((theta_min, theta, sent))
        throughput[sent] = SAMPLES / seconds * (1.0 if sent == 1 else delta[sent])

        if searching and number % policy.window == 0:
            if theta is not None:
                evaluated, higher = theta, [cf for cf in ladder if cf > theta]
                theta = higher[0] if higher else theta
                if delta[theta_min] > 0 and abs(delta[theta_min] - delta[evaluated]) / delta[theta_min] <= policy.omega:
                    theta_min = evaluated
                    theta = None if theta == theta_min else theta
            second, first = ([(0.0, 0.0)] * 2 + sorted((t, -cf) for cf, t in throughput.items() if cf > 1))[-2:]
            if second[0] > 0 and abs(first[0] - second[0]) / second[0] <= policy.omega:
                searching = False
                theta = min(-first[1], -second[1])
                if theta <= theta_min:
                    theta_min, theta = theta, None
            delta = {cf: value for cf, value in delta.items() if cf in (theta_min, theta)}
        sent = choice()
    return log


def drive(policy: GraVAC, draws: list[Step]) -> list[tuple[float, float | None, float]]:
    """The same of the policy, as a training would run it."""
    state = policy.initial_state([])
    decision = policy.decision(state)
    log = []
    for step, (gain_min, gain_c, seconds) in enumerate(draws):
        gains = GravacGains(gain_min, None if decision.candidate is None else gain_c, RANKS)
        timing = Timing(SAMPLES, seconds)
        log.append((decision.minimum, decision.candidate, decision.sent))
        state, decision = policy.decide(state, Statistics(step=step, gains=gains, timing=timing))
    return log


gains_drawn = st.sampled_from([0.0, 0.3, 0.5, 0.7, 0.71, 0.9, 0.905, 1.0])
steps_drawn = st.lists(st.tuples(gains_drawn, gains_drawn, st.sampled_from([0.5, 0.9, 1.0, 1.005, 2.0])), max_size=40)


@given(
    draws=steps_drawn,
    ends=st.sampled_from([(10, 1000), (10, 2000), (1.5, 100), (10, 25), (10, 20), (10, 15), (10, 10)]),
    window=st.integers(1, 5),
    scaling=st.sampled_from(["exponential", "geometric"]),
    omega=st.sampled_from([0.0, 0.01, 0.3]),
    epsilon=st.sampled_from([0.3, 0.7, 0.9]),
)
def test_the_algorithm_as_one_loop(
    draws: list[Step], ends: tuple, window: int, scaling: str, omega: float, epsilon: float
) -> None:
    policy = GraVAC(min=ends[0], max=ends[1], window=window, scaling=scaling, omega=omega, epsilon=epsilon)
    assert drive(policy, draws) == algorithm(policy, draws)


@given(draws=steps_drawn, every=st.integers(2, 4), windows=st.integers(1, 3), epsilon=st.sampled_from([0.3, 0.7]))
def test_gains_of_one_in_several_steps(draws: list[Step], every: int, windows: int, epsilon: float) -> None:
    """Told of one step in each period, it decides what the algorithm does that sees nothing else, with windows as many
    times shorter; the weight of a new gain is what a gain that stays would have had after as many steps."""
    seldom = GraVAC(window=every * windows, every=every, epsilon=epsilon)
    assert seldom.request(seldom.initial_state(())).period == Period(steps=every)
    weight = 1 - (1 - RANKS / 100) ** every
    assert drive(seldom, draws) == drive(GraVAC(window=windows, smoothing=weight, epsilon=epsilon), draws)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (20, 40, 160, 1000)),
        ({"scaling": "geometric", "max": 2000}, (20, 40, 80, 160, 320, 640, 1280, 2000)),
        ({"scaling": "geometric", "min": 1.5, "max": 48}, (3, 6, 12, 24, 48)),
        ({"max": 20}, (20,)),
        ({"max": 15}, (15,)),
        ({"max": 10}, ()),
        ({"min": 2, "max": 1e12}, (4, 8, 32, 512, 131072, 8589934592, 1e12)),
    ],
)
def test_candidates(settings: dict, expected: tuple) -> None:
    assert GraVAC(**settings).candidates == expected


def test_windows_by_default() -> None:
    for scaling, window in (("exponential", 500), ("geometric", 2000)):
        log = drive(GraVAC(scaling=scaling, every=1), [(0.9, 0.8, 1.0)] * (window + 1))
        assert [entry[1] for entry in log] == [20] * window + [40]
        log = drive(GraVAC(scaling=scaling), [(0.9, 0.8, 1.0)] * (window // 10 + 1))
        assert [entry[1] for entry in log] == [20] * (window // 10) + [40]


@pytest.mark.parametrize(
    ("settings", "every"),
    [
        ({}, 10),
        ({"window": 100}, 10),
        ({"window": 90}, 1),
        ({"window": 505}, 1),
        ({"every": 1}, 1),
        ({"window": 90, "every": 45}, 45),
    ],
)
def test_how_often_gains_are_measured(settings: dict, every: int) -> None:
    policy = GraVAC(**settings)
    assert policy.request(policy.initial_state(())).period == Period(steps=every)


def test_the_first_step() -> None:
    """Nothing is known yet, so it is dense."""
    assert [sent for _, _, sent in drive(GraVAC(), [(0.9, 0.8, 1.0)] * 2)] == [1, 20]


@pytest.mark.parametrize(
    ("gain_min", "gain_c", "send"),
    [
        (0.9, 0.7, "candidate"),
        (0.9, math.nextafter(0.7, 0), "minimum"),
        (0.7, 0.1, "minimum"),
        (math.nextafter(0.7, 0), 0.1, "dense"),
        (0.1, 0.8, "candidate"),
        (0.0, 0.0, "dense"),
    ],
)
def test_what_is_sent(gain_min: float, gain_c: float, send: str) -> None:
    policy = GraVAC()
    statistics = Statistics(step=1, gains=GravacGains(gain_min, gain_c, 4), timing=Timing(SAMPLES, 1.0))
    _, decision = policy.decide(policy.initial_state([]), statistics)
    assert decision == MultiLevel(10, 20, send)
    assert decision.sent == {"dense": 1, "minimum": 10, "candidate": 20}[send]


@pytest.mark.parametrize(
    ("ranks", "smoothing", "weight"), [(4, None, 0.04), (100, None, 1), (512, None, 1), (4, 0.5, 0.5)]
)
def test_smoothing(ranks: int, smoothing: float | None, weight: float) -> None:
    policy = GraVAC(smoothing=smoothing, every=1)
    state = policy.initial_state([])
    expected = 0.8
    for step, new in enumerate([0.8, 0.4, 0.9, 0.1]):
        expected = expected + weight * (new - expected)
        gains = GravacGains(new, new / 2, ranks)
        state, _ = policy.decide(state, Statistics(step=step, gains=gains, timing=Timing(1, 1.0)))
    assert state.gains == pytest.approx({10: expected, 20: expected / 2})


def test_a_gradient_that_is_not_finite_leaves_the_gains() -> None:
    policy = GraVAC(window=2)
    state = policy.initial_state([])
    told = [GravacGains(0.9, 0.8, 4), GravacGains(math.nan, math.nan, 4), GravacGains(0.9, math.inf, 4)]
    for step, gains in enumerate(told):
        state, decision = policy.decide(state, Statistics(step, gains=gains, timing=Timing(1, 1.0)))
    assert state.gains == {10: 0.9}  # the second window's candidate has none yet
    assert decision == MultiLevel(10, 40, "minimum")
    assert state.steps == 3


def record(policy: GraVAC, send: str, timing: Timing) -> GraVACState:
    state = GraVACState(10.0, 20.0, send, gains={10.0: 0.9, 20.0: 0.8})  # type: ignore[arg-type]
    return policy.decide(state, Statistics(step=1, gains=GravacGains(0.9, 0.8, 100), timing=timing))[0]


@pytest.mark.parametrize(
    ("send", "expected"),
    [
        ("candidate", {20.0: 640 / 1.5 * 0.8}),
        ("minimum", {10.0: 640 / 1.5 * 0.9}),
        ("dense", {1.0: 640 / 1.5}),
    ],
)
def test_throughput_leaves_out_what_a_steady_state_would_not_do(send: str, expected: dict) -> None:
    timing = Timing(samples=640, seconds=2.0, evaluation_seconds=0.5)
    assert record(GraVAC(), send, timing).throughput == expected


def test_a_time_that_cannot_be_is_left_out() -> None:
    for timing in (Timing(640, 0.5, 0.5), Timing(640, -1.0), Timing(640, math.nan)):
        assert record(GraVAC(), "candidate", timing).throughput == {}


def at_window_end(
    state: GraVACState, omega: float = 0.01, gains: tuple = (0.9, 0.8), **settings: object
) -> GraVACState:
    """The state after the step that ends a window, which is dense and so adds only T[1]."""
    policy = GraVAC(window=1, omega=omega, scaling="geometric", **settings)  # type: ignore[arg-type]
    told = GravacGains(gains[0], gains[1] if state.candidate else None, 100)
    return policy.decide(state, Statistics(step=1, gains=told, timing=Timing(1, 1.0)))[0]


@pytest.mark.parametrize(
    ("gains", "omega", "promoted"),
    [
        ((0.5, 0.5), 0.0, True),
        ((0.5, 0.375), 0.25, True),  # equality at omega
        ((0.5, 0.374), 0.25, False),
        ((0.5, 0.625), 0.25, True),  # the candidate may keep more
        ((0.0, 0.0), 0.25, False),  # nothing to compare with
    ],
)
def test_the_minimum_is_promoted_to_what_was_evaluated(gains: tuple, omega: float, promoted: bool) -> None:
    state = at_window_end(GraVACState(10.0, 20.0, "dense"), gains=gains, omega=omega)
    assert (state.minimum, state.candidate) == ((20.0, 40.0) if promoted else (10.0, 40.0))
    assert state.gains == ({20.0: gains[1]} if promoted else {10.0: gains[0]})
    assert not state.ended


def test_the_last_candidate_stays_or_is_promoted_and_nothing_is_evaluated_any_more() -> None:
    stays = at_window_end(GraVACState(10.0, 1000.0, "dense"), gains=(0.9, 0.8))
    assert (stays.minimum, stays.candidate, stays.gains) == (10.0, 1000.0, {10.0: 0.9, 1000.0: 0.8})
    alone = at_window_end(GraVACState(10.0, 1000.0, "dense"), gains=(0.9, 0.9))
    assert (alone.minimum, alone.candidate, alone.gains) == (1000.0, None, {1000.0: 0.9})
    assert GraVAC().decision(alone) == MultiLevel(1000.0, None, "minimum")
    # With the only factor keeping too little, steps are dense.
    later = at_window_end(alone, gains=(0.1, None))
    assert GraVAC().decision(later) == MultiLevel(1000.0, None, "dense")


@pytest.mark.parametrize(
    ("throughput", "omega", "ideal"),
    [
        ({10.0: 100.0}, 0.5, None),  # one is not two
        ({1.0: 100.0, 10.0: 100.0}, 0.5, None),  # dense left out
        ({10.0: 100.0, 20.0: 125.0}, 0.25, 10.0),  # equality at omega
        ({10.0: 100.0, 20.0: 125.1}, 0.25, None),
        ({10.0: 125.0, 20.0: 100.0}, 0.25, 10.0),  # the lower factor, even if it is the faster
        ({10.0: 100.0, 20.0: 101.0, 40.0: 200.0}, 0.25, None),  # only the two best count
        ({10.0: 10.0, 20.0: 199.0, 40.0: 200.0}, 0.25, 20.0),
        ({10.0: 10.0, 40.0: 199.0, 20.0: 200.0}, 0.25, 20.0),
        ({10.0: 200.0, 20.0: 200.0, 40.0: 200.0}, 0.0, 10.0),
        ({10.0: 0.0, 20.0: 0.0}, 0.25, None),
    ],
)
def test_where_the_search_ends(throughput: dict, omega: float, ideal: float | None) -> None:
    state = at_window_end(GraVACState(10.0, 40.0, "dense", throughput=throughput), omega=omega, gains=(0.9, 0.1))
    assert state.ended == (ideal is not None)
    candidate = {None: 80.0, 10.0: None}.get(ideal, ideal)
    assert (state.minimum, state.candidate) == (10.0, candidate)


def test_an_ideal_below_the_minimum_is_all_there_is() -> None:
    state = GraVACState(40.0, 80.0, "dense", throughput={10.0: 500.0, 20.0: 500.0, 40.0: 10.0})
    state = at_window_end(state, omega=0.0)
    assert (state.minimum, state.candidate, state.ended) == (10.0, None, True)
    assert (state.gains, state.send) == ({}, "dense")


def test_after_the_search_nothing_moves() -> None:
    state = GraVACState(10.0, 20.0, "dense", throughput={10.0: 1.0, 20.0: 9.0, 40.0: 9.0}, ended=True)
    for _ in range(5):
        state = at_window_end(state, gains=(0.9, 0.9))
        assert (state.minimum, state.candidate, state.send) == (10.0, 20.0, "candidate")


def test_the_ideal_keeps_its_gain_if_it_was_the_one_evaluated() -> None:
    state = GraVACState(10.0, 20.0, "dense", throughput={20.0: 9.0, 40.0: 9.0})
    state = at_window_end(state, gains=(0.9, 0.8))
    assert (state.candidate, state.gains, state.send) == (20.0, {10.0: 0.9, 20.0: 0.8}, "candidate")


@pytest.mark.parametrize(("candidate", "told"), [(20.0, None), (None, 0.5)])
def test_gains_must_be_of_what_was_compressed(candidate: float | None, told: float | None) -> None:
    statistics = Statistics(step=1, gains=GravacGains(0.9, told, 4), timing=Timing(1, 1.0))
    with pytest.raises(ValueError, match="gravac: the candidate is"):
        GraVAC().decide(GraVACState(10.0, candidate, "dense"), statistics)


def test_multi_level_top_k_trains_at_the_factor_that_its_gains_allow() -> None:
    """A gradient whose energy is known: 1 % of the elements hold 90 % of it."""
    rng = np.random.default_rng(0)
    policy = GraVAC(epsilon=0.7, window=5, scaling="geometric", max=1280)
    state = policy.initial_state([])
    decision = policy.decision(state)
    sent = []
    for step in range(60):
        x = np.concatenate([np.full(128, 3.0), np.full(12800 - 128, 0.1)]) * rng.choice([-1, 1], 12800)

        def top(values: np.ndarray, cf: float) -> np.ndarray:
            keep = np.argsort(-np.abs(values), kind="stable")[: math.ceil(12800 / cf)]
            return np.where(np.isin(np.arange(12800), keep), values, 0.0)

        first = top(x, decision.minimum)
        second = None if decision.candidate is None else top(first, decision.candidate)
        gains = [None if c is None else np.sum(c**2) / np.sum(x**2) for c in (first, second)]
        for c, found in zip((first, second), gains, strict=True):
            assert found is None or found == pytest.approx(error_gain(np.sum(x**2), np.sum((x - c) ** 2)))
        sent.append(decision.sent)
        seconds = 1.0 + 1.0 / decision.sent
        told = Statistics(step, gains=GravacGains(gains[0], gains[1], 4), timing=Timing(64, seconds))
        state, decision = policy.decide(state, told)
    # Each of 20, 40 and 80 keeps the large elements, 90 to 91 %, and is promoted; 160 keeps 57 %, below epsilon.
    assert sent == sorted(sent)
    assert set(sent) == {1, 20, 40, 80}
    assert sent[16:] == [80] * 44
    assert (decision.minimum, decision.candidate, state.ended) == (80, 1280, False)


def test_the_gain() -> None:
    assert error_gain(0.0, 0.0) == 1.0
    assert error_gain(4.0, 1.0) == 0.75
    assert error_gain(4.0, 40.0) == 0.0  # unscaled signs of a small gradient
    assert error_gain(4.0, 0.0) == 1.0
    assert error_gain(0.0, 1.0) == 0.0
    assert math.isnan(error_gain(math.nan, 1.0))
    assert math.isnan(error_gain(math.inf, math.inf))


def test_the_gain_against_the_gradient_alone() -> None:
    assert raw_gain(0.0, 0.0, 0.0) == 1.0  # nothing to send
    assert raw_gain(4.0, 1.0, 4.0) == error_gain(4.0, 1.0) == 0.75
    assert raw_gain(4.0, 1.0, 1.0) == 3.0
    assert raw_gain(4.0, 40.0, 1.0) == 0.0
    assert raw_gain(4.0, 1.0, 8.0) == 0.375  # the residual was against the gradient
    assert raw_gain(0.0, 0.0, 1.0) == 0.0
    assert raw_gain(0.0, 1.0, 0.0) == 0.0
    for energies in ((4.0, 1.0, 0.0), (math.nan, 1.0, 1.0), (4.0, 1.0, math.inf), (4.0, math.nan, 1.0)):
        assert math.isnan(raw_gain(*energies))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"min": 1}, "min=1 "),
        ({"min": math.nan}, "min=nan"),
        ({"min": 20, "max": 10}, "min=20,max=10"),
        ({"max": math.inf}, "max=inf"),
        ({"max": 1e13}, r"max=10000000000000\.0 .* at most 1e12"),
        ({"epsilon": 0}, "epsilon=0"),
        ({"epsilon": 1.5}, r"epsilon=1\.5"),
        ({"omega": -0.1}, r"omega=-0\.1"),
        ({"scaling": "linear"}, "scaling='linear' .* exponential or geometric"),
        ({"window": 0}, "window=0"),
        ({"window": 2.5}, r"window=2\.5"),
        ({"smoothing": 0}, "smoothing=0"),
        ({"every": 0}, "every=0"),
        ({"lag": 0}, "lag=0 of gravac was removed"),
        ({"every": 3}, "every=3 .* a divisor of the window, 500 steps"),
        ({"smoothing": 2}, "smoothing=2"),
        ({"lag": 2}, "lag=2"),
        ({"factor": "floats"}, "factor='floats' .* bytes or elements"),
        ({"factor": None}, "factor=None"),
        ({"gain": "code"}, "gain='code' .* error_feedback or raw"),
    ],
)
def test_bad_settings_are_refused(settings: dict, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        GraVAC(**settings)


def test_it_needs_a_compressor_with_a_level() -> None:
    GraVAC().check(None, TopK(ratio=0.1))
    with pytest.raises(SpecError, match="no single level"):
        GraVAC().check(None, NoCompression())
