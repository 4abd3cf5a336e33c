"""`auto` on trainings whose step times are made up: what it ends at, what its search costs, when it searches again."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hvdcomp import SpecError
from hvdcomp.policies.auto import _AGAIN, SETTLING, WARM_UP, Auto
from hvdcomp.policies.auto_state import NOTICEABLE, PATIENCE, AutoState
from hvdcomp.policies.decisions import Methods
from hvdcomp.policies.request import Candidate, Candidates, Period, Statistics

TENSORS = ("conv", "fc", "head")
KINDS = {"dense": (0, "none"), "fp16": (0, "fp16"), "compressed": (0, None), "compressed and dense": (2, "none")}
FLUSH = 1.4  # the first step after a change takes this many times as long as a later one
AUTO = Auto(calibration="cluster.json")

Times = Mapping[str, float | Callable[[int], float]]


def candidates_with(predicted: Mapping[str, float]) -> Candidates:
    candidates = {name: Candidate(seconds, *KINDS[name]) for name, seconds in predicted.items()}
    return Candidates(("fc", "conv", "head"), candidates)


@dataclass
class Run:
    """A training under the policy: what each step sent and took, and the state after each decision."""

    times: Times
    policy: Auto = AUTO
    sent: list[str] = field(default_factory=list)
    took: list[float] = field(default_factory=list)
    states: list[tuple[int, AutoState]] = field(default_factory=list)

    def go(
        self, predicted: Mapping[str, float], steps: int, restart: Callable[[int], bool] = lambda step: False
    ) -> Run:
        policy = self.policy
        state, _ = policy.decide(policy.initial_state(TENSORS), Statistics(0, candidates=candidates_with(predicted)))
        self.states = [(0, state)]
        told: list[float] = []
        for step in range(steps):
            self.sent.append(state.chosen)
            seconds = self.static(state.chosen, step)
            self.took.append(seconds * (FLUSH if step and state.since == step else 1))
            told.append(self.took[-1] if step else float("nan"))
            if policy.request(state).period == Period(until=step + 1):
                state, decision = policy.decide(state, Statistics(step + 1, step_times=tuple(told)))
                assert policy.decision(state) == decision
                assert state.until > step + 1
                assert state.why
                self.states.append((step + 1, state))
                told.clear()
            if restart(step):
                state = policy.from_json(json.loads(json.dumps(policy.to_json(state), allow_nan=False)))
        return self

    def static(self, name: str, step: int) -> float:
        known = self.times[name]
        return known(step) if callable(known) else known

    def over(self, name: str) -> float:
        """How much longer the training took than with one candidate throughout, as a ratio."""
        return sum(self.took) / sum(self.static(name, step) for step in range(len(self.took)))

    def stays(self) -> str:
        """What the last steps are sent with, but for a trial that is under way."""
        last = self.states[-1][1]
        return last.trial.rival if last.trial.trying else last.chosen

    def reasons(self) -> str:
        return "\n".join(state.why for _, state in self.states)


FAST_DENSE = {"dense": 1.0, "fp16": 1.1, "compressed": 1.3, "compressed and dense": 1.2}


# What it decides ------------------------------------------------------------------------------------------------------


def test_before_candidates_are_told_everything_is_dense_and_they_are_all_it_asks_for() -> None:
    state = AUTO.initial_state(TENSORS)
    assert AUTO.decision(state) == Methods({}, "none")
    assert {each.value for each in AUTO.request(state).statistics} == {"candidates"}
    state, _ = AUTO.decide(state, Statistics(0, candidates=candidates_with(FAST_DENSE)))
    assert {each.value for each in AUTO.request(state).statistics} == {"step_times"}


@pytest.mark.parametrize(
    ("fastest", "decision"),
    [
        ("dense", Methods({}, "none")),
        ("fp16", Methods({}, "fp16")),
        ("compressed", Methods({}, None)),
        ("compressed and dense", Methods({"fc": None, "conv": None}, "none")),
    ],
)
def test_it_begins_with_the_fastest_by_the_model(fastest: str, decision: Methods) -> None:
    predicted = dict.fromkeys(KINDS, 0.5) | {fastest: 0.4}
    state, made = AUTO.decide(AUTO.initial_state(TENSORS), Statistics(0, candidates=candidates_with(predicted)))
    assert made == decision
    assert state.why == f"begins with {fastest}: predicted 400 ms, the fastest of 4"


def test_the_steps_of_a_history_by_hand() -> None:
    """Window 5, two steps not counted, twelve in the beginning; fp16 is near by the model, and faster."""
    times = {"dense": 1.0, "fp16": 0.9, "compressed": 3.0}
    run = Run(times).go({"dense": 1.0, "fp16": 1.05, "compressed": 1.1}, 60)
    assert WARM_UP == 10
    assert run.sent[:17] == ["dense"] * 17
    assert run.sent[17:24] == ["fp16"] * 7  # within a tenth: tried at no price
    assert run.sent[24:31] == ["dense"] * 7  # as fast as before
    assert run.sent[31:38] == ["fp16"] * 7
    assert run.sent[38:42] == ["compressed"] * 4  # two settle, two count, and are hopeless
    assert run.sent[42:] == ["fp16"] * 18
    last = run.states[-1][1]
    found = {name: one.seconds for name, one in last.measured.items()}
    assert found["fp16"] / found["dense"] == pytest.approx((5 * 0.9 + 2 * 1.05) / 7)  # the prediction weighs two steps
    assert found["compressed"] / found["fp16"] == pytest.approx(3.0 / 0.9)  # and nothing where a trial contradicts it
    doubt = last.measured["compressed"].error / found["compressed"]
    assert doubt == pytest.approx(0.05)  # no trial says more, however alike its steps
    assert last.measured["compressed"].steps == 2
    # Four steps of compressed, the first of 4.2, instead of four of fp16; and two after each other change: 1.4
    # and 1 instead of 1 each, twice 1.26 and 0.9 instead of what fp16 was taken for by then.
    taken = (5 * 0.9 + 2 * 1.05) / 7, (10 * 0.9 + 2 * 1.05) / 12
    assert last.spent == pytest.approx(4.2 + 3 * 3.0 - 4 * 0.9 + 0.4 + 2 * (1.26 + 0.9) - 2 * sum(taken))
    assert "tries fp16: 1050 ms expected, dense takes 1000 ms" in run.reasons()
    assert "compares fp16 with dense before and after" in run.reasons()
    assert "fp16 is the fastest measured: 917.6 ms, then dense: 973.3 ms" in run.reasons()


def test_what_is_far_off_by_the_model_is_tried_only_when_that_is_cheap() -> None:
    predicted = {"dense": 3.0, "fp16": 2.0, "compressed": 1.0}
    short = Run(predicted).go(predicted, 300)
    assert set(short.sent) == {"compressed"}
    long = Run(predicted).go(predicted, 4000)
    assert set(long.sent) == {"compressed", "dense", "fp16"}
    assert long.sent.count("dense") % (SETTLING + 2) == 0, "a trial ends when it is hopeless"
    assert long.over("compressed") < 1 + 1.2 * AUTO.budget


def test_steps_that_settle_do_not_count() -> None:
    run = Run({"dense": 1.0, "fp16": lambda step: 5.0 if step in (17, 18) else 0.5}).go({"dense": 1.0, "fp16": 1.0}, 40)
    assert run.sent[-1] == "fp16"


def test_a_slow_beginning_is_not_held_against_what_is_tried_first() -> None:
    run = Run({"dense": lambda step: 1.0 if step >= WARM_UP else 9.0, "fp16": 1.2}).go({"dense": 1.0, "fp16": 1.0}, 80)
    assert run.sent[-1] == "dense"
    assert run.states[-1][1].measured["dense"].seconds == pytest.approx(1.0)


def test_times_that_cannot_be_are_left_out() -> None:
    """A clock that stands still for a while: nothing is compared with what was not measured."""
    times = {"dense": lambda step: 0.0 if step < 90 else 1.0, "fp16": lambda step: 0.0 if step < 90 else 0.5}
    run = Run(times).go({"dense": 1.0, "fp16": 1.0}, 160)
    assert run.sent[:90] == ["dense"] * 90
    assert run.sent[-1] == "fp16"
    slow = Run({"dense": 1.0, "fp16": lambda step: 0.9 if step >= 24 else 0.0}).go({"dense": 1.0, "fp16": 1.0}, 160)
    assert slow.sent[-1] == "fp16"
    late = Run({"dense": lambda step: 1.0 if step not in range(24, 50) else 0.0, "fp16": 0.9}).go(
        {"dense": 1.0, "fp16": 1.0}, 160
    )
    assert late.sent[-1] == "fp16"


def test_one_slow_step_does_not_end_a_trial() -> None:
    run = Run({"dense": 1.0, "fp16": lambda step: 9.0 if step in (19, 22) else 0.5}).go({"dense": 1.0, "fp16": 1.0}, 40)
    assert run.sent[-1] == "fp16"
    assert run.states[-1][1].measured["fp16"].seconds == pytest.approx(0.5)


@pytest.mark.parametrize("fast", [0.1, 0.6])
def test_what_is_far_better_is_not_left_for_a_second_look(fast: float) -> None:
    run = Run({"dense": 1.0, "compressed": fast}).go({"dense": 1.0, "compressed": 1.05}, 60)
    assert run.sent == ["dense"] * 17 + ["compressed"] * 43


def test_machines_that_are_not_equally_fast_cost_little_beyond_the_best() -> None:
    """Every so often all steps take 1.35 times as long for some time, and each is a tenth longer or shorter by chance.

    Of trainings of 600 steps. With trials that are compared with steps of any other time it is 2.9 %.
    """
    worlds = ([1, 1.1, 1.3, 1.07], [1.04, 1, 1.3, 1.07], [1.6, 1.3, 1, 1.05], [1.5, 1.2, 1.03, 1])
    steps, over = 600, []
    for number, values in enumerate(worlds * 30):
        base = dict(zip(KINDS, values, strict=True))
        rng = np.random.default_rng(number)
        lengths = 1 + rng.exponential(40, steps).astype(int)
        slow = np.repeat(np.arange(steps) % 2, lengths)[:steps]
        speed = {name: 1.35**slow * np.exp(0.1 * rng.standard_normal(steps)) for name in KINDS}
        predicted = {name: value * np.exp(0.1 * rng.standard_normal()) for name, value in base.items()}
        times = {name: lambda step, one=value * speed[name]: float(one[step]) for name, value in base.items()}
        run = Run(times).go(predicted, steps)
        over.append(np.mean([base[name] for name in run.sent]) / min(base.values()) - 1)
    assert np.mean(over) < 0.023


def test_a_trial_that_was_unlucky_does_not_outweigh_the_prediction_for_good() -> None:
    """The first trial finds the faster one 12 % slower, as other work of the machine may make it."""
    times = {"dense": 1.0, "fp16": lambda step: 1.12 if step < 60 else 0.95}
    run = Run(times).go({"dense": 1.0, "fp16": 1.0}, 3000)
    assert run.stays() == "fp16"
    assert run.sent[1000:].count("dense") <= 2000 // (_AGAIN * AUTO.window) * (SETTLING + AUTO.window)


def test_a_single_candidate_stays() -> None:
    assert set(Run({"dense": 1.0}).go({"dense": 1.0}, 100).sent) == {"dense"}


def test_candidates_as_fast_as_each_other_are_measured_again_but_not_for_ever() -> None:
    def shaky(phase: int) -> Callable[[int], float]:
        return lambda step: 1.0 + 0.05 * ((step * 7 + phase) % 5 - 2)

    run = Run({"dense": shaky(0), "fp16": shaky(3)}).go({"dense": 1.0, "fp16": 1.0}, 4000)
    looks = [step for step, state in run.states if "tries" in state.why]
    assert 2 <= len([step for step in looks if step < 1000]) <= 16
    assert any("too near" in state.why for _, state in run.states)
    late = np.diff([step for step in looks if step >= 1500])
    assert late.min() >= _AGAIN * AUTO.window, "but once in a long time"


# What it costs --------------------------------------------------------------------------------------------------------

seconds = st.floats(0.5, 2.0)


@given(
    times=st.fixed_dictionaries(dict.fromkeys(KINDS, seconds)),
    wrong=st.fixed_dictionaries(dict.fromkeys(KINDS, st.floats(0.95, 1.05))),
    scale=st.sampled_from([0.2, 1.0, 4.0]),
)
def test_with_a_model_that_is_nearly_right_it_is_within_5_percent_of_the_best(
    times: dict[str, float], wrong: dict[str, float], scale: float
) -> None:
    """In 600 steps, also where all predictions are too low or too high alike, as for another batch size."""
    predicted = {name: times[name] * wrong[name] * scale for name in times}
    run = Run(times).go(predicted, 600)
    best = min(times, key=lambda name: times[name])
    assert run.over(best) <= 1.05  # 4.6 % where all four are within 3 % of each other, which takes most trials


@given(
    times=st.fixed_dictionaries(dict.fromkeys(KINDS, seconds)),
    predicted=st.fixed_dictionaries(dict.fromkeys(KINDS, seconds)),
)
@example(
    times={"dense": 2.0, "fp16": 1.4375, "compressed": 2.0, "compressed and dense": 1.453125},
    predicted=dict.fromkeys(KINDS, 1.0),
)
def test_it_ends_at_the_best_of_those_within_the_margin_whatever_the_model(
    times: dict[str, float], predicted: dict[str, float]
) -> None:
    """And of those and dense. What else was tried is never better than what it stays with, but for a difference that
    may be chance."""
    run = Run(times).go(predicted, 20_000)
    first = min(predicted, key=lambda name: predicted[name])
    near = {name for name in KINDS if predicted[name] <= predicted[first] * (1 + AUTO.margin)} | {"dense"}
    last = run.states[-1][1]
    assert near <= set(last.measured)
    assert times[run.stays()] <= min(times[name] for name in last.measured) * (1 + 2 * NOTICEABLE)


@given(
    times=st.fixed_dictionaries(dict.fromkeys(KINDS, seconds)),
    predicted=st.fixed_dictionaries(dict.fromkeys(KINDS, seconds)),
    steps=st.integers(100, 2000),
)
def test_trials_cost_no_more_than_the_budget_and_one_surprise(
    times: dict[str, float], predicted: dict[str, float], steps: int
) -> None:
    """Of the time spent with something slower than what was known to be best, whatever the model says.

    A trial begins while the account is within the budget, or at no price. Each can surprise once.
    """
    run = Run(times).go(predicted, steps)
    last = run.states[-1][1]
    longest = (SETTLING + AUTO.window) * (max(times.values()) * FLUSH - min(times.values()))
    tried = len(last.measured)
    assert last.spent <= AUTO.budget * sum(run.took) + tried * longest
    assert last.elapsed == pytest.approx(sum(run.took[1 : run.states[-1][0]]))


# Drift ----------------------------------------------------------------------------------------------------------------


def test_a_network_that_slows_down_makes_it_search_again() -> None:
    times: Times = {"dense": lambda step: 1.0 if step < 200 else 3.0, "compressed": 1.3}
    run = Run(times).go({"dense": 1.0, "compressed": 1.3}, 400)
    assert set(run.sent[150:200]) == {"dense"}
    assert run.sent.index("compressed", 200) <= 200 + (PATIENCE + 1) * AUTO.every + SETTLING
    assert set(run.sent[320:]) == {"compressed"}
    assert "steps take 3000 ms, 1000 ms before: looks once more at dense" in run.reasons()
    assert "steps have changed; tries compressed" in run.reasons()


def test_what_becomes_faster_unseen_is_found() -> None:
    """Where nothing changes for the candidate in force, as when a network becomes faster for all others."""
    times: Times = {"dense": lambda step: 2.0 if step < 500 else 0.7, "compressed": 1.0, "fp16": 1.1}
    run = Run(times).go({"dense": 2.0, "compressed": 1.0, "fp16": 1.1}, 3000)
    assert set(run.sent[300:500]) == {"compressed"}
    assert run.stays() == "dense"
    assert set(run.sent[2000:]) == {"dense"} or run.over("dense") < 1.01
    assert run.states[-1][1].spent <= AUTO.budget * sum(run.took) + 10


@pytest.mark.parametrize(("wrong", "changes_at"), [(1.05, 600), (1.5, 10_000)])
def test_it_ends_near_the_best_in_nearly_all_trainings(wrong: float, changes_at: int) -> None:
    """Of 60 with any times: all of them change in mid-run, or predictions are wrong by up to a half."""
    over = []
    for number in range(60):
        rng = np.random.default_rng(number)
        worlds = rng.uniform(0.5, 2.0, (2, len(KINDS)))
        noise = np.exp(0.02 * rng.standard_normal((len(KINDS), 3000)))
        predicted = dict(zip(KINDS, worlds[0] * wrong ** rng.uniform(-1, 1, len(KINDS)), strict=True))

        def takes(place: int, worlds: np.ndarray = worlds, noise: np.ndarray = noise) -> Callable[[int], float]:
            return lambda step: float(worlds[int(step >= changes_at), place] * noise[place, step])

        run = Run({name: takes(place) for place, name in enumerate(KINDS)}).go(predicted, 3000)
        last = dict(zip(KINDS, worlds[int(changes_at < 3000)], strict=True))
        over.append(last[run.stays()] / min(last.values()) - 1)
    assert np.mean(np.array(over) <= 0.03) >= 0.95


def test_less_than_the_drift_and_a_single_look_change_nothing() -> None:
    for slower in (lambda step: 1.0 if step < 200 else 1.14, lambda step: 3.0 if 300 <= step < 315 else 1.0):
        run = Run({"dense": slower, "compressed": 1.2}).go({"dense": 1.0, "compressed": 1.2}, 600)
        assert "compressed" in run.sent[:200]
        assert "steps have changed" not in run.reasons()
        assert run.sent[200:].count("compressed") <= SETTLING + AUTO.window, "tried again once"


@pytest.mark.parametrize(("scale", "steps"), [(1.0, 20), (0.05, 20), (0.002, 500)])
def test_while_it_stays_it_looks_no_more_often_than_once_a_second(scale: float, steps: int) -> None:
    times = {name: scale * seconds for name, seconds in FAST_DENSE.items()}
    run = Run(times).go(times, 3000)
    step, state = run.states[-1]
    assert state.chosen == "dense"
    assert not state.trial.trying
    assert state.until - step == steps


def test_steps_whose_times_scatter_are_not_taken_for_a_change() -> None:
    def restless(step: int) -> float:
        return float(np.random.default_rng(step).lognormal(sigma=0.5))

    run = Run({"dense": restless, "compressed": lambda step: 1.2 * restless(step)})
    run.go({"dense": 1.0, "compressed": 1.2}, 6000)
    assert "steps have changed" not in run.reasons()


def test_steps_that_change_for_ever_are_followed_more_and_more_patiently() -> None:
    def turns(step: int) -> float:
        return 1.0 if step // 100 % 2 else 1.5

    run = Run({"dense": turns, "fp16": lambda step: turns(step) * 1.1}).go({"dense": 1.0, "fp16": 1.1}, 6000)
    assert run.over("dense") < 1.02
    assert run.states[-1][1].patience > PATIENCE


# Restarts, and what cannot be -----------------------------------------------------------------------------------------


@given(
    times=st.fixed_dictionaries(dict.fromkeys(KINDS, seconds)),
    predicted=st.fixed_dictionaries(dict.fromkeys(KINDS, seconds)),
    stops=st.sets(st.integers(0, 150), max_size=20),
)
def test_stopped_anywhere_it_goes_on_as_if_it_had_not(
    times: dict[str, float], predicted: dict[str, float], stops: set[int]
) -> None:
    whole = Run(times).go(predicted, 150)
    stopped = Run(times).go(predicted, 150, stops.__contains__)
    assert stopped.sent == whole.sent
    assert stopped.states == whole.states


def test_steps_that_were_not_timed_are_made_up_for() -> None:
    """After a restart the first step has no time."""
    told = candidates_with({"dense": 1.0, "fp16": 1.0})
    state, _ = AUTO.decide(AUTO.initial_state(TENSORS), Statistics(0, candidates=told))
    nan = float("nan")
    state, _ = AUTO.decide(state, Statistics(14, step_times=(nan, *[1.0] * 11, nan, 1.0)))
    assert (state.chosen, state.until, state.trial.times) == ("dense", 18, (1.0,))
    state, _ = AUTO.decide(state, Statistics(18, step_times=(1.0, 1.0, 1.0, 0.0)))
    assert (state.chosen, state.until) == ("dense", 19)
    state, _ = AUTO.decide(state, Statistics(19, step_times=(1.0,)))
    assert (state.chosen, state.trial.trying) == ("fp16", True)


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (Candidates(("conv", "fc"), {"dense": Candidate(1.0, 0, "none")}), "candidates of different tensors .*: head"),
        (Candidates(TENSORS, {}), "needs candidates"),
        (Candidates(TENSORS, {"dense": Candidate(float("nan"), 0, "none")}), "positive finite times"),
        (Candidates(TENSORS, {"dense": Candidate(0.0, 0, "none")}), "positive finite times"),
    ],
)
def test_candidates_that_cannot_be(told: Candidates, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        AUTO.decide(AUTO.initial_state(TENSORS), Statistics(0, candidates=told))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"calibration": ""}, "calibration='' .* a calibration file"),
        ({"window": 2}, "window=2 .* at least 3"),
        ({"every": 4}, "every=4 .* at least 5"),
        ({"batch": -1}, "batch=-1 .* at least 0"),
        ({"margin": 0}, "margin=0 .* above 0"),
        ({"drift": float("nan")}, "drift=nan"),
        ({"budget": 1}, "budget=1 .* below 1"),
        ({"lag": 0}, "lag=0 .* must be 1"),
    ],
)
def test_bad_settings_are_refused(settings: dict, words: str) -> None:
    with pytest.raises(SpecError, match=f"auto: {words}"):
        Auto(**{"calibration": "cluster.json", **settings})
