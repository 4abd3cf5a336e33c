"""LocalSteps that choose the length of rounds themselves, against the rule in plain NumPy. Real ranks: `multirank`."""

from __future__ import annotations

import copy
import math
import threading
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hvdcomp import Compression, ConfigurationError, RankMismatchError, SpecError, TopK  # noqa: E402
from hvdcomp.communicators import SimulatedCommunicator, SimulatedGroup  # noqa: E402
from hvdcomp.torch import LocalSteps  # noqa: E402
from hvdcomp.torch.local_steps.auto import WIDTH, AutoRounds, RoundLength, sketch  # noqa: E402
from tests.torch.local_steps.test_local_steps import DIMENSIONS, RATE, Model, adamw, sgd, start_of, target_of  # noqa: E402

RANKS, START, STEP_S, EXCHANGE_S = 4, 4, 0.5, 1.0
RULE = "auto:start=4"
TIMES = threading.local()  # the seconds that a rank's thread has computed


def cost(kind: str, size: int, ranks: int) -> float:
    return EXCHANGE_S if size > 4000 else 0.0  # the matrix, and not what goes beside it


def group(ranks: int = RANKS) -> SimulatedGroup:
    return SimulatedGroup(ranks, [cost], lambda: getattr(TIMES, "seconds", 0.0))


def rate_of(step: int) -> float:
    """After a warm-up of 8 steps the learning rate halves every 40."""
    return RATE * min(1.0, step / 8) * 0.5 ** (step // 40)


def advance(model: Model, optimizer: Any, rank: int, first: int, count: int, shared: bool = False) -> list[int]:
    """Steps from number `first` on, a rank's own targets or those of rank 0; the steps after which a round ended."""
    ends = []
    for step in range(first, first + count):
        TIMES.seconds = getattr(TIMES, "seconds", 0.0) + STEP_S
        for each in optimizer.param_groups:
            each["lr"] = rate_of(step)
        optimizer.zero_grad()
        model.loss(0 if shared else rank).backward()
        optimizer.step()
        if optimizer.in_sync:
            ends.append(step)
    return ends


def rounds_of(ends: list[int]) -> list[int]:
    return np.diff([0, *ends]).tolist()


def decided(rounds: list[int], drifts: list[float], rates: list[float]) -> list[int]:
    """The lengths of the rounds by the rule, each from those before: what is decided after a round holds from the
    second after it."""
    lengths = [START, START]
    allowed = sum(drifts[n] / (rates[n] * max(rates[: n + 1])) for n in range(3)) / 3
    for n, (steps, drift, rate) in enumerate(zip(rounds, drifts, rates, strict=True)):
        by_time = math.ceil(EXCHANGE_S * 9 / STEP_S)
        by_drift = steps * math.sqrt(allowed * rate * max(rates[: n + 1]) / drift) if drift else math.inf
        lengths.append(START if n < 3 else max(1, steps // 2, min(by_time, int(min(by_drift, 2 * steps)), 2 * steps)))
    return lengths


def test_where_ranks_do_not_drift_a_round_is_as_long_as_its_exchange_asks_for() -> None:
    def work(communicator: SimulatedCommunicator) -> list[int]:
        model = Model()
        optimizer = LocalSteps(sgd(model), RULE, communicator=communicator)
        return rounds_of(advance(model, optimizer, communicator.rank, 1, 100, shared=True))

    first, *others = group().run(work)
    assert all(one == first for one in others)
    assert first == [4, 4, 4, 4, 4, 8, 8, 16, 16, 18]
    assert first == decided(first, [0.0] * len(first), [1.0] * len(first))[: len(first)]


def test_drift_makes_rounds_shorter_and_they_are_those_of_the_rule() -> None:
    """With targets of their own the ranks drift apart; a sketch estimates by how much."""

    def work(communicator: SimulatedCommunicator) -> list[int]:
        model = Model()
        optimizer = LocalSteps(sgd(model), RULE, communicator=communicator)
        return rounds_of(advance(model, optimizer, communicator.rank, 1, 240))

    first, *others = group().run(work)
    assert all(one == first for one in others)
    drifts, rates, step = [], [], 0
    outer = {name: start_of(name).astype(np.float64) for name in DIMENSIONS}
    velocity = {name: np.zeros_like(outer[name]) for name in outer}
    for steps in first:
        drift = 0.0
        for name in outer:
            local = [outer[name].copy() for _ in range(RANKS)]
            for number in range(step + 1, step + steps + 1):
                local = [one - rate_of(number) * (one - target_of(rank, name)) for rank, one in enumerate(local)]
            moved = [outer[name] - one for one in local]
            mean = sum(moved) / RANKS
            drift += sum(((one - mean) ** 2).sum() for one in moved) / RANKS
            velocity[name] = 0.9 * velocity[name] + mean
            outer[name] = outer[name] - 0.7 * (mean + 0.9 * velocity[name])
        step += steps
        drifts.append(drift)
        rates.append(rate_of(step))
    stated = decided(first, drifts, rates)[: len(first)]
    assert len(first) > 15
    np.testing.assert_allclose(first, stated, rtol=0.15, atol=1)
    assert first[-1] > 2 * START  # at a smaller rate
    assert max(first) < 18


def test_a_sketch_is_linear_and_tells_the_norm() -> None:
    generator = np.random.default_rng(0)
    shapes = [(40, 50), (3,), (), (WIDTH, 7)]
    x, y = ([torch.from_numpy(generator.normal(size=shape)) for shape in shapes] for _ in range(2))
    total = sketch([a + b for a, b in zip(x, y, strict=True)])
    assert total.shape == (WIDTH,)
    torch.testing.assert_close(total, sketch(x) + sketch(y))
    for vector in (x, [torch.ones(300, 300)], [torch.arange(5000.0)]):
        norm = sum(float((one.double() ** 2).sum()) for one in vector)
        assert abs(float(sketch(vector).dot(sketch(vector))) / norm - 1) < 4 * math.sqrt(2 / WIDTH)


def test_steps_at_rate_0_teach_nothing() -> None:
    length = RoundLength(4)
    length.learn(AutoRounds(), 4, 0.0, 0.0, 1.0, 1.0)
    assert length == RoundLength(4)


@pytest.mark.parametrize("at", [18, 24, 31], ids=["while it measures", "after an exchange", "within a round"])
def test_it_goes_on_bit_for_bit(at: int) -> None:
    def made(communicator: SimulatedCommunicator) -> tuple[Model, LocalSteps]:
        model = Model()
        compression = Compression(TopK(ratio=0.1), min_numel=0, min_ndim=0)
        return model, LocalSteps(adamw(model), RULE, compression=compression, communicator=communicator)

    def whole(communicator: SimulatedCommunicator) -> Any:
        model, optimizer = made(communicator)
        ends = advance(model, optimizer, communicator.rank, 1, at)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        return saved, ends + advance(model, optimizer, communicator.rank, at + 1, 90 - at), model.values()

    ranks = group(2).run(whole)

    def after(communicator: SimulatedCommunicator) -> Any:
        TIMES.seconds = 0.0
        model, optimizer = made(communicator)
        (weights, state), ends, _ = copy.deepcopy(ranks[communicator.rank])
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        ends = [end for end in ends if end <= at]
        return ends + advance(model, optimizer, communicator.rank, at + 1, 90 - at), model.values()

    for (_, ends, values), (ends_after, values_after) in zip(ranks, group(2).run(after), strict=True):
        assert ends == ends_after
        assert len(set(rounds_of(ends))) > 1
        for name in values:
            np.testing.assert_array_equal(values[name], values_after[name])


def test_a_new_rank_has_the_rounds_of_the_others() -> None:
    def before(communicator: SimulatedCommunicator) -> Any:
        model = Model()
        optimizer = LocalSteps(sgd(model), RULE, communicator=communicator)
        advance(model, optimizer, communicator.rank, 1, 25, shared=True)
        return copy.deepcopy(optimizer.state_dict())

    saved = group(2).run(before)[0]
    assert saved["local_steps"]["rounds"]["every"] == 8

    def after(communicator: SimulatedCommunicator) -> list[int]:
        TIMES.seconds = 0.0
        model = Model()
        optimizer = LocalSteps(sgd(model), RULE, communicator=communicator)
        optimizer.join(copy.deepcopy(saved))
        assert optimizer.every == 8
        return advance(model, optimizer, communicator.rank, 26, 25, shared=True)

    first, *others = group(3).run(after)
    assert first == [28, 36]
    assert all(one == first for one in others)


def test_exchange_ends_a_round_early_and_what_goes_beside_is_counted() -> None:
    def work(communicator: SimulatedCommunicator) -> tuple[list[int], int]:
        model = Model()
        optimizer = LocalSteps(sgd(model), RULE, communicator=communicator)
        advance(model, optimizer, communicator.rank, 1, 6)
        optimizer.exchange()
        assert optimizer.in_sync
        ends = advance(model, optimizer, communicator.rank, 7, 8)
        return ends, optimizer.compression.ledger.totals.bytes_sent

    ends, sent = group(2).run(work)[0]
    assert ends == [10, 14]
    assert sent == 4 * (4 * (24 * 60 + 7) + 4 + 8 + 8 * (2 + WIDTH))  # a flag, the presence, and the sketch


@pytest.mark.parametrize(
    ("every", "options", "error", "message"),
    [
        ("often", {}, SpecError, "choose one of: auto"),
        ("auto:share=1", {}, SpecError, "above 0 and below 1"),
        ("auto:start=0", {}, SpecError, "at least 1"),
        ("auto", {"fragments": 2}, ConfigurationError, "does not work with fragments"),
        ("auto", {"delay": 2}, ConfigurationError, "does not work with fragments"),
        ("auto", {"local_share": 0.5}, ConfigurationError, "does not work with fragments"),
    ],
)
def test_what_cannot_be_is_refused(every: str, options: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        SimulatedGroup(1).run(lambda ranks: LocalSteps(sgd(Model()), every, communicator=ranks, **options))


def test_ranks_that_were_told_different_rules_are_refused() -> None:
    def work(communicator: SimulatedCommunicator) -> None:
        model = Model()
        every = 4 if communicator.rank else RULE
        advance(model, LocalSteps(sgd(model), every, communicator=communicator), communicator.rank, 1, 1)

    with pytest.raises(RankMismatchError, match="every"):
        group(2).run(work)
