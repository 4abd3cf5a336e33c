"""What reaches a policy: coordinators driven by hand on ranks in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from hvdcomp.policies.decisions import BatchSize, MultiLevel
from hvdcomp.policies.request import Period, Request, Statistic
from tests.adaptation.test_step_counter import loop
from tests.driven import COMPRESSED, SHAPES, random_gradients
from tests.harness import BACKENDS, make
from tests.spy_policy import EPOCH, at_ratio, drive
from tests.two_levels import Model

every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_lag = pytest.mark.parametrize("lag", [0, 1])
RATES, NORMS = Statistic.LEARNING_RATES, Statistic.NORMS


def norms_of(gradients: Sequence[Mapping[str, np.ndarray]], weights: Sequence[float] | None = None) -> dict[str, float]:
    """The norms of sums of gradients."""
    factors = weights or [1.0] * len(gradients)
    return {
        name: float(np.linalg.norm(sum(w * g[name].astype(float) for w, g in zip(factors, gradients, strict=True))))
        for name in SHAPES
    }


def model_norm(norms: Mapping[str, float]) -> float:
    return float(np.linalg.norm(list(norms.values())))


# What is accumulated -------------------------------------------------------------------------------------------------


@every_backend
def test_gradients_past_the_engine_count_unless_one_is_not_finite(backend: str) -> None:
    policy = {"asked": frozenset({NORMS}), "often": Period(steps=3), "decisions": at_ratio(0.5)}
    (run, _), _ = drive(policy, backend, 0)
    values = random_gradients(0, 0)
    spoilt = {name: one.copy() for name, one in values.items()}
    spoilt["conv"][0] = np.inf
    for factor, gradients in ((2.0, values), (1.0, spoilt), (1.0, {}), (0.5, values)):
        run.coordinator.observe({name: make(backend, one) for name, one in gradients.items()}, factor)
    told = run.coordinator.observers.statistics(Request(frozenset({NORMS})), 1)["norms"]
    right = norms_of([values], [2.5])
    assert told == pytest.approx({name: right[name] for name in COMPRESSED}, rel=1e-5)


@every_lag
@pytest.mark.parametrize("source", ["local", "aggregated"])
@pytest.mark.parametrize("with_rates", [False, True])
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize(
    ("often", "length"), [(Period(steps=1), 1), (Period(steps=3), 3), (Period(epochs=1), 4), (Period(epochs=2), 8)]
)
def test_norms_are_those_of_exactly_the_steps_of_the_period(
    often: Period, length: int, every: int, with_rates: bool, source: str, lag: int
) -> None:
    """Only where they are asked for, only on rank 0, and nothing is accumulated otherwise."""
    periods = 2 * every + 1
    steps = periods * length + 1
    asked = {NORMS, Statistic.MODEL_NORM, Statistic.MEAN_TO_STD} | ({RATES} if with_rates else set())
    policy = {
        "asked": frozenset(asked), "often": often, "every": every, "of": source, "lag": lag,
        "decisions": at_ratio(0.5, 0.1, 0.25),
    }  # fmt: skip
    (first, spy), (second, other) = drive(policy, "numpy", steps)
    assert not other.seen
    assert not any(second.observed)
    waits = 0 if lag and not with_rates else 1  # steps after a period until its decision is made
    assert len(spy.seen) == (steps - waits) // length
    sources = {"local": [random_gradients(0, step) for step in range(steps)], "aggregated": first.results}[source]
    for number, told in enumerate(spy.seen, 1):
        assert told.step == number * length
        assert told.epoch == number * length // EPOCH
        if number % every:
            assert (told.norms, told.model_norm, told.mean_to_std) == (None, None, None)
            continue
        of_period = sources[(number - 1) * length : number * length]
        right = norms_of(of_period)
        assert told.norms == pytest.approx({name: right[name] for name in COMPRESSED}, rel=1e-5)
        assert told.model_norm == pytest.approx(model_norm(right), rel=1e-5)  # of all tensors, small ones too
        sums = {name: sum(g[name].astype(float) for g in of_period) for name in COMPRESSED}
        ratios = {name: abs(x.mean()) / x.std() for name, x in sums.items()}
        assert told.mean_to_std == pytest.approx(ratios, rel=1e-3)
    for step, holds in enumerate(first.observed):
        period, place = divmod(step + 1, length)
        assert holds == ((period + 1) % every == 0 and place > 0), step


@every_backend
@every_lag
def test_both_backends_tell_the_same(backend: str, lag: int) -> None:
    """For the other tests here NumPy will do."""
    policy = {
        "asked": frozenset({NORMS, RATES}), "often": Period(epochs=1), "lag": lag, "decisions": at_ratio(0.5, 0.1),
    }  # fmt: skip
    (_, spy), _ = drive(policy, backend, 9)
    for number, told in enumerate(spy.seen):
        right = norms_of([random_gradients(0, step) for step in range(4 * number, 4 * number + 4)])
        assert told.norms == pytest.approx({name: right[name] for name in COMPRESSED}, rel=1e-5)
    assert len(spy.seen) == 2


@every_lag
@pytest.mark.parametrize("asked", [frozenset(), frozenset({RATES})])
def test_who_asks_for_nothing_accumulates_nothing(asked: frozenset[Statistic], lag: int) -> None:
    policy = {"asked": asked, "often": Period(steps=2), "lag": lag, "decisions": at_ratio(0.5, 0.1)}
    for driven, spy in drive(policy, "numpy", 7):
        assert not any(driven.observed)
        assert all((told.norms, told.model_norm) == (None, None) for told in spy.seen)


@every_lag
@pytest.mark.parametrize("source", ["local", "aggregated"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy warns of what is meant to happen here
def test_a_step_that_does_not_count_is_not_accumulated(source: str, lag: int) -> None:
    """A gradient of rank 1 overflows in the second of three steps."""

    def gradients(rank: int, step: int) -> dict[str, np.ndarray]:
        found = random_gradients(rank, step)
        if (rank, step) == (1, 1):
            found["conv"][0, 0, 0, 0] = np.inf
        return found

    policy = {"asked": frozenset({NORMS}), "often": Period(steps=3), "lag": lag, "of": source,
              "decisions": at_ratio(0.5, 0.1)}  # fmt: skip
    (first, spy), _ = drive(policy, "numpy", 4, gradients=gradients)
    seen = {"local": [random_gradients(0, step) for step in range(3)], "aggregated": first.results}[source]
    right = norms_of([seen[0], seen[2]])
    assert spy.seen[0].norms == pytest.approx({name: right[name] for name in COMPRESSED}, rel=1e-5)


@every_lag
def test_gradients_weigh_as_many_batches_as_they_are_the_mean_of(lag: int) -> None:
    """The batch grows after the first period of three steps; with learning rates, a step later at lag 1."""
    policy = {
        "asked": frozenset({Statistic.MODEL_NORM, RATES}), "often": Period(steps=3), "lag": lag,
        "decisions": [BatchSize(1, 1.0), BatchSize(3, 3.0), BatchSize(4, 4.0)],
    }  # fmt: skip
    runs = drive(policy, "numpy", 10)
    expected = [1] * (3 + lag) + [3] * 3 + [4] * (3 - lag)
    for driven, _ in runs:
        assert driven.batches[:9] == expected
    weights = [float(batches) for batches in expected]
    for number, told in enumerate(runs[0][1].seen):
        steps = range(3 * number, 3 * number + 3)
        right = norms_of([random_gradients(0, step) for step in steps], [weights[step] for step in steps])
        assert told.model_norm == pytest.approx(model_norm(right), rel=1e-5)


@every_lag
@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_epochs_are_those_of_a_loop_that_follows_the_batch_size(steps: int, lag: int) -> None:
    """Batches of 1, 3 and 4 times the first, in epochs of 4 of those: what does not fill a step is dropped."""
    policy = {
        "asked": frozenset({RATES}), "often": Period(steps=steps), "lag": lag,
        "decisions": [BatchSize(count, float(count)) for count in (1, 3, 4)],
    }  # fmt: skip
    for total in range(1, 3 * steps):
        for driven, _ in drive(policy, "numpy", total):
            last = loop(EPOCH, driven.batches)[-1]
            assert driven.coordinator.progress.epoch == last.epoch + last.last


# Learning rates -------------------------------------------------------------------------------------------------------


@every_lag
@pytest.mark.parametrize("batches", [False, True])
@pytest.mark.parametrize(("often", "length"), [(Period(steps=1), 1), (Period(steps=3), 3), (Period(epochs=1), 4)])
def test_learning_rates_are_those_of_the_first_step_of_this_period_and_of_the_next(
    often: Period, length: int, batches: bool, lag: int
) -> None:
    """One group falls in some step, in the middle of a period or with its first step, the other one rises there."""
    decisions = [BatchSize(1, 1.0)] if batches else at_ratio(0.5, 0.1)
    policy = {"asked": frozenset({RATES}), "often": often, "lag": lag, "decisions": decisions}
    steps = 3 * length + 1
    for change in range(1, steps):

        def rates(step: int, change: int = change) -> tuple[float, ...]:
            return (0.25, 1.0) if step < change else (0.5, 0.125)

        (_, spy), (_, other) = drive(policy, "numpy", steps, rates=rates)
        assert not other.seen
        assert [told.step for told in spy.seen] == [length, 2 * length, 3 * length]
        for number, told in enumerate(spy.seen):
            assert told.learning_rates is not None
            assert told.learning_rates.now == rates(number * length)
            assert told.learning_rates.next == rates((number + 1) * length)
            assert told.learning_rates.fall == (number * length < change <= (number + 1) * length)


@every_lag
@pytest.mark.parametrize("asked", [{RATES}, {NORMS}])
def test_groups_of_parameters_may_be_added_within_a_period(asked: set[Statistic], lag: int) -> None:
    policy = {"asked": frozenset(asked), "often": Period(steps=3), "lag": lag, "decisions": at_ratio(0.5)}
    (_, spy), _ = drive(policy, "numpy", 7, rates=lambda step: (0.5,) if step < 2 else (0.25, 0.125))
    first, second = spy.seen
    if RATES in asked:
        assert (first.learning_rates.now, first.learning_rates.next) == ((0.5, 0.125), (0.25, 0.125))
        assert (second.learning_rates.now, second.learning_rates.next) == ((0.25, 0.125), (0.25, 0.125))


# Gains and times ------------------------------------------------------------------------------------------------------


@every_backend
def test_gains_and_times_are_of_the_step_that_ended(backend: str) -> None:
    """After each step its own gains, of two ranks; what is sent alternates."""
    policy = {
        "asked": frozenset({Statistic.GAINS, Statistic.TIMING}), "often": Period(steps=1),
        "decisions": [MultiLevel(3.0, 16.0, "dense"), MultiLevel(3.0, 16.0, "candidate"),
                      MultiLevel(4.0, 8.0, "minimum")],
    }  # fmt: skip
    (driven, spy), (_, other) = drive(policy, backend, 7)
    assert not other.seen
    model = Model(0)
    for step, told in enumerate(spy.seen):
        decision = policy["decisions"][step % 3]
        model.begin(step, decision.minimum, decision.candidate)
        assert told.step == step + 1
        assert told.gains is not None
        assert told.timing is not None
        assert (told.gains.minimum, told.gains.candidate) == pytest.approx(model.gains(), rel=1e-5)
        assert told.gains.ranks == told.timing.samples == 2
        assert np.isnan(told.timing.seconds) if step == 0 else told.timing.seconds > told.timing.evaluation_seconds > 0
        model.send(decision.send)
    assert len(spy.seen) == 7
    assert all(driven.needed_engine)


def test_gains_are_those_of_the_last_step_of_a_period_and_times_of_all_its_steps() -> None:
    """The others are measured nowhere; dense ones are then left to Horovod, once nothing is left to be sent."""
    sends = ["candidate", "dense", "minimum", "dense"]
    policy = {
        "asked": frozenset({Statistic.GAINS, Statistic.TIMING}), "often": Period(steps=3),
        "decisions": [MultiLevel(3.0, 16.0, send) for send in sends],  # type: ignore[arg-type]
    }  # fmt: skip
    now = 0.0

    def clock() -> float:
        return now

    def gradients(rank: int, step: int) -> dict[str, np.ndarray]:
        nonlocal now
        now += 1 + step if rank == 0 else 0
        return random_gradients(rank, step)

    (driven, spy), (_, other) = drive(policy, "numpy", 13, clock=clock, gradients=gradients)
    assert not other.seen
    assert [told.step for told in spy.seen] == [3, 6, 9, 12]
    model = Model(0)
    for step in range(12):
        model.begin(step, 3.0, 16.0)
        if step % 3 == 2:
            told = spy.seen[step // 3]
            assert told.gains is not None
            assert told.timing is not None
            assert (told.gains.minimum, told.gains.candidate) == pytest.approx(model.gains(), rel=1e-5)
            assert told.timing.samples == 3 * 2
        model.send(sends[step // 3])
    assert spy.seen[1].timing is not None
    assert spy.seen[1].timing.seconds == 4 + 5 + 6
    assert driven.needed_engine == [step % 3 == 2 for step in range(13)]
