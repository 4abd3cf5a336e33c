"""CompressedAdam against the algorithm in plain NumPy, and against AdamW. Real ranks: `multirank`."""

from __future__ import annotations

import copy
import functools
import linecache
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hvdcomp import (  # noqa: E402
    DGC,
    EDEN,
    QSGD,
    Accordion,
    ByName,
    Compression,
    ConfigurationError,
    EFSignSGD,
    ErrorFeedback,
    Int4,
    Int8,
    NoCompression,
    NoMemory,
    PowerSGD,
    SignSGD,
    SpecError,
    TernGrad,
    TopK,
    TwoLevel,
    settings,
)
from hvdcomp.bindings.adam import kind_of, refreshes_among  # noqa: E402
from hvdcomp.communicators import SimulatedCommunicator, SimulatedGroup  # noqa: E402
from hvdcomp.compressors import evidence, harm  # noqa: E402
from hvdcomp.torch import CompressedAdam, serve_simulated  # noqa: E402
from hvdcomp.torch.optimizers.learning_rate import ScaledSteps  # noqa: E402

RANKS, FREEZE_AFTER, STEPS = 3, 4, 12
SHAPE = (24, 60)
FLOOR = 0.01
RATE, BETAS, EPS, DECAY = 3e-3, (0.9, 0.95), 1e-8, 0.1
SETTINGS = {"lr": RATE, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}


class Model(torch.nn.Module):
    """A matrix, and a vector that is sent dense."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.matrix = torch.nn.Parameter(torch.randn(SHAPE, generator=generator))
        self.vector = torch.nn.Parameter(torch.randn(7, generator=generator))


def gradients_of(rank: int, step: int, shape: tuple[int, ...]) -> np.ndarray:
    """A part that all ranks and steps share, and noise of each."""
    shared = np.random.default_rng(5).normal(size=shape)
    return (shared + np.random.default_rng([rank, step]).normal(size=shape)).astype(np.float32)


def spoil_nothing(gradient: np.ndarray) -> np.ndarray:
    return gradient


def train(
    compression: Callable[[], Compression],
    optimizer: Callable[[Any], Any],
    steps: int = STEPS,
    change: Callable[[np.ndarray], np.ndarray] = spoil_nothing,
    passes: int = 1,
) -> list[tuple[dict[str, np.ndarray], Any, Any]]:
    """Trains a model on each rank; the weights, the optimizer and the compression of each."""

    def work(communicator: SimulatedCommunicator) -> tuple[dict[str, np.ndarray], Any, Any]:
        model, ours = Model(), compression()
        one = optimizer(model.parameters())
        exchange = serve_simulated(ours, model, communicator, one)
        for step in range(steps):
            one.zero_grad()
            for _ in range(passes):
                for parameter in model.parameters():
                    own = change(gradients_of(communicator.rank, step, tuple(parameter.shape)))
                    (parameter * torch.from_numpy(own) / passes).sum().backward()
            exchange()
            one.step()
        return {name: one.detach().numpy() for name, one in model.named_parameters()}, one, ours

    return SimulatedGroup(RANKS).run(work)


def top(x: np.ndarray, count: int) -> np.ndarray:
    sent = np.zeros_like(x)
    places = np.argsort(-np.abs(x), axis=None, kind="stable")[:count]
    sent.flat[places] = x.flat[places]
    return sent


def sign(x: np.ndarray) -> np.ndarray:
    return np.abs(x).mean() * np.where(x >= 0, 1, -1)


DUE = {4, 6, 10}  # of 0, 1, 2, 4, 6, 10, 14, ..., those that come after `FREEZE_AFTER`


def refreshing(parameters: Any) -> CompressedAdam:
    return CompressedAdam(parameters, **SETTINGS, freeze_after=FREEZE_AFTER, refreshes_per_gap=2)


def stated(
    w: np.ndarray, c: Callable[[np.ndarray], np.ndarray] | None, refreshes: set[int] = frozenset()
) -> np.ndarray:
    """1-bit Adam's algorithm 1 with AdamW's decay, any C and no second compression, and 0/1 Adam's refreshes of v.

    c: None for no compression. refreshes: T_v, of steps from 0 on.
    """
    b1, b2 = BETAS
    w = w.astype(np.float64)
    m, v = np.zeros_like(w), np.zeros_like(w)
    adapted = 0
    rests = [np.zeros_like(w) for _ in range(RANKS)]
    for t in range(1, STEPS + 1):
        own = [gradients_of(rank, t - 1, w.shape).astype(np.float64) for rank in range(RANKS)]
        if t <= FREEZE_AFTER or t - 1 in refreshes:
            g = sum(own) / RANKS
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
            adapted += 1
            if t > FREEZE_AFTER:
                v = np.maximum(v, FLOOR * v.mean())
            v_hat = v / (1 - b2**adapted)
            if t == FREEZE_AFTER:
                v = np.maximum(v, FLOOR * v.mean())
        else:
            momenta = [b1 * m + (1 - b1) * g + d for g, d in zip(own, rests, strict=True)]
            sent = momenta if c is None else [c(one) for one in momenta]
            rests = [one - s for one, s in zip(momenta, sent, strict=True)]
            m = sum(sent) / RANKS
            v_hat = v / (1 - b2**adapted)
        w = w - RATE * DECAY * w
        w = w - RATE * (m / (1 - b1**t)) / (np.sqrt(v_hat) + EPS)
    return w


@pytest.mark.parametrize(
    ("compressor", "c"),
    [(TopK(0.05), lambda x: top(x, -(-x.size * 5 // 100))), (EFSignSGD(), sign), (NoCompression(), None)],
    ids=["topk", "efsignsgd", "none"],
)
@pytest.mark.parametrize("passes", [1, 2])
def test_it_is_the_algorithm(compressor: Any, c: Any, passes: int) -> None:
    def adam(parameters: Any) -> CompressedAdam:
        return CompressedAdam(parameters, **SETTINGS, freeze_after=FREEZE_AFTER)

    done = train(lambda: Compression(compressor), adam, passes=passes)
    start = {name: one.detach().numpy() for name, one in Model().named_parameters()}
    for name, weights in done[0][0].items():
        expected = stated(start[name], c if name == "matrix" else None)
        np.testing.assert_allclose(weights, expected, rtol=2e-5, atol=2e-5)
        for others, _, _ in done[1:]:
            assert weights.tobytes() == others[name].tobytes()
    _, optimizer, ours = done[0]
    assert optimizer.frozen
    dense = 4 * (np.prod(SHAPE) + 7)
    sent = ours.ledger.totals.bytes_sent - FREEZE_AFTER * dense
    assert 0 <= sent < (STEPS - FREEZE_AFTER) * dense * (1.01 if c is None else 0.25)


def published(per_gap: int, steps: int) -> list[int]:
    """0/1 Adam's T_v: k[0] = 0, k[j + 1] - k[j] = 2**floor(j / kappa)."""
    k = [0]
    while k[-1] < steps:
        k.append(k[-1] + 2 ** ((len(k) - 1) // per_gap))
    return [one for one in k if one < steps]


@pytest.mark.parametrize("per_gap", [1, 2, 3, 16])
def test_the_schedule_of_refreshes_is_the_published_one(per_gap: int) -> None:
    for steps in range(700):
        assert refreshes_among(steps, per_gap) == len(published(per_gap, steps)), steps
    assert refreshes_among(700, None) == 0


@pytest.mark.parametrize(
    ("compressor", "c"),
    [(TopK(0.05), lambda x: top(x, -(-x.size * 5 // 100))), (EFSignSGD(), sign), (NoCompression(), None)],
    ids=["topk", "efsignsgd", "none"],
)
def test_refreshes_are_the_algorithm(compressor: Any, c: Any) -> None:
    done = train(lambda: Compression(compressor), refreshing)
    start = {name: one.detach().numpy() for name, one in Model().named_parameters()}
    for name, weights in done[0][0].items():
        expected = stated(start[name], c if name == "matrix" else None, DUE)
        np.testing.assert_allclose(weights, expected, rtol=2e-5, atol=2e-5)
        for others, _, _ in done[1:]:
            assert weights.tobytes() == others[name].tobytes()
    dense = 4 * (np.prod(SHAPE) + 7)
    whole = FREEZE_AFTER + len(DUE)
    sent = done[0][2].ledger.totals.bytes_sent - whole * dense
    assert 0 <= sent < (STEPS - whole) * dense * (1.01 if c is None else 0.25)


def test_with_a_refresh_in_every_step_and_nothing_lost_it_is_adamw() -> None:
    ours = train(
        lambda: Compression(NoCompression()),
        lambda given: CompressedAdam(given, **SETTINGS, freeze_after=1, floor=0.0, refreshes_per_gap=STEPS),
    )
    theirs = train(lambda: Compression(NoCompression()), lambda given: torch.optim.AdamW(given, **SETTINGS))
    for name, weights in ours[0][0].items():
        np.testing.assert_allclose(weights, theirs[0][0][name], rtol=1e-6, atol=1e-7)
    assert ours[0][1].frozen


def alone(optimizer: CompressedAdam, steps: range) -> list[bool]:
    """Steps of one rank; which of them were refreshes."""
    refreshes = []
    for step in steps:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.from_numpy(gradients_of(0, step, tuple(parameter.shape)))
        refreshes.append(optimizer.refreshes)
        optimizer.step()
    return refreshes


def test_a_state_with_refreshes_goes_on_bit_for_bit_and_an_older_one_begins_them() -> None:
    model, twin = Model(), Model()
    ours = refreshing(model.parameters())
    assert [step for step, one in enumerate(alone(ours, range(8))) if one] == [4, 6]
    twin.load_state_dict(model.state_dict())
    second = CompressedAdam(twin.parameters(), freeze_after=1)
    second.load_state_dict(copy.deepcopy(ours.state_dict()))
    assert alone(ours, range(8, STEPS)) == alone(second, range(8, STEPS)) == [False, False, True, False]
    assert torch.equal(model.matrix, twin.matrix)
    assert second.state[twin.matrix]["refreshes"] == len(DUE)

    older = CompressedAdam(Model().parameters(), **SETTINGS, freeze_after=FREEZE_AFTER)
    alone(older, range(6))
    state = older.state_dict()
    for group in state["param_groups"]:
        del group["refreshes_per_gap"]
    twin = Model()
    newer = refreshing(twin.parameters())
    newer.load_state_dict(state)
    before = newer.state[twin.matrix]["exp_avg_sq"].clone()
    assert alone(newer, range(6, 8)) == [True, False]
    assert newer.state[twin.matrix]["refreshes"] == 1
    assert not torch.equal(newer.state[twin.matrix]["exp_avg_sq"], before)


def test_what_has_its_first_gradient_at_a_refresh_moves_from_then_on() -> None:
    model = Model()
    optimizer = refreshing(model.parameters())
    start = model.matrix.detach().clone()
    for step in range(6):
        gradient = torch.ones(SHAPE)
        gradient[:3] = float(step == 4)  # a refresh
        gradient[5] = 0.0
        model.matrix.grad = gradient
        optimizer.step()
        kept = model.matrix.detach() / (1 - RATE * DECAY) ** (step + 1)
        moved = ~torch.isclose(kept, start, rtol=1e-5, atol=1e-6).all(dim=1)
        assert moved[:3].all() == (step >= 4)
        assert moved[3:5].all()
        assert not moved[5]


def test_before_it_freezes_it_is_adamw_bit_for_bit() -> None:
    ours = train(
        lambda: Compression(TopK(0.05)), lambda given: CompressedAdam(given, **SETTINGS, freeze_after=STEPS + 1)
    )
    theirs = train(lambda: Compression(NoCompression()), lambda given: torch.optim.AdamW(given, **SETTINGS))
    for name, weights in ours[0][0].items():
        assert weights.tobytes() == theirs[0][0][name].tobytes()
    assert not ours[0][1].frozen


def test_a_state_of_adamw_goes_on_and_a_state_of_its_own_goes_on_bit_for_bit() -> None:
    model, twin = Model(), Model()
    adamw, ours = torch.optim.AdamW(model.parameters(), **SETTINGS), None
    for step in range(STEPS):
        for one in (model, twin) if ours is not None else (model,):
            for parameter in one.parameters():
                parameter.grad = torch.from_numpy(gradients_of(0, step, tuple(parameter.shape)))
        if step == FREEZE_AFTER + 2:
            ours = CompressedAdam(model.parameters(), freeze_after=FREEZE_AFTER)
            ours.load_state_dict(adamw.state_dict())
            assert ours.frozen
            assert ours.param_groups[0]["lr"] == RATE
            adamw = ours
        if step == FREEZE_AFTER + 4:
            twin.load_state_dict(model.state_dict())
            second = CompressedAdam(twin.parameters(), freeze_after=1)
            second.load_state_dict(copy.deepcopy(ours.state_dict()))
            for parameter in twin.parameters():
                parameter.grad = torch.from_numpy(gradients_of(0, step, tuple(parameter.shape)))
        adamw.step()
        if step >= FREEZE_AFTER + 4:
            second.step()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, other)
    frozen = ours.state[model.matrix]
    assert frozen["frozen_at"] == FREEZE_AFTER + 2
    assert int(frozen["step"]) == STEPS


def test_what_never_had_a_gradient_stays_as_it_is_under_any_method() -> None:
    def without_rows(gradient: np.ndarray) -> np.ndarray:
        return gradient * (np.arange(len(gradient)) >= 5).reshape(-1, *[1] * (gradient.ndim - 1)).astype(np.float32)

    def adam(parameters: Any) -> CompressedAdam:
        return CompressedAdam(parameters, **{**SETTINGS, "weight_decay": 0.0}, freeze_after=FREEZE_AFTER)

    start = Model().matrix.detach().numpy()
    for compressor in (EFSignSGD(), Int8(), EDEN(), TopK(0.05)):
        weights = train(lambda one=compressor: Compression(one), adam, change=without_rows)[0][0]["matrix"]
        assert np.array_equal(weights[:5], start[:5])
        assert (weights[5:] != start[5:]).all()


def test_the_warm_up_has_a_compressor_of_its_own() -> None:
    ours = train(
        lambda: Compression(EFSignSGD()),
        lambda given: CompressedAdam(given, **SETTINGS, freeze_after=FREEZE_AFTER, warm_up="int8"),
        steps=FREEZE_AFTER,
    )[0][2]
    dense = FREEZE_AFTER * 4 * (np.prod(SHAPE) + 7)
    assert dense / 4.2 < ours.ledger.totals.bytes_sent < dense / 3.5


def test_momenta_follow_a_loss_scale() -> None:
    class Scaler(torch.amp.GradScaler):
        """One with a scale of its own for each step."""

        def __init__(self) -> None:
            super().__init__("cpu", init_scale=2.0**12)

    def work(communicator: SimulatedCommunicator) -> np.ndarray:
        model, scaler = Model(), Scaler()
        optimizer = CompressedAdam(model.parameters(), **SETTINGS, freeze_after=FREEZE_AFTER)
        compression = Compression(TopK(0.05), grad_scaler=scaler)
        exchange = serve_simulated(compression, model, communicator, optimizer)
        for step in range(STEPS):
            optimizer.zero_grad()
            for parameter in model.parameters():
                own = torch.from_numpy(gradients_of(communicator.rank, step, tuple(parameter.shape)))
                scaler.scale((parameter * own).sum()).backward()
            exchange()
            scaler.step(optimizer)
            scaler.update(2.0 ** (10 + step % 4))
        return model.matrix.detach().numpy()

    def adam(parameters: Any) -> CompressedAdam:
        return CompressedAdam(parameters, **SETTINGS, freeze_after=FREEZE_AFTER)

    scaled = SimulatedGroup(RANKS).run(work)[0]
    plain = train(lambda: Compression(TopK(0.05)), adam)[0][0]["matrix"]
    np.testing.assert_allclose(scaled, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, ConfigurationError, "freeze_after=None is not allowed; give the number of steps"),
        ({"freeze_after": 0}, ConfigurationError, "freeze_after=0 is not allowed"),
        ({"freeze_after": 2.5}, ConfigurationError, "freeze_after=2.5 is not allowed"),
        ({"freeze_after": 5, "local_steps": 0}, ConfigurationError, "local_steps=0 is not allowed"),
        ({"freeze_after": 5, "floor": -1}, ConfigurationError, "floor=-1 is not allowed; give a number from 0 to 1"),
        ({"freeze_after": 5, "warm_up": "int5"}, SpecError, "int5"),
        ({"freeze_after": 5, "refreshes_per_gap": 0}, ConfigurationError, "refreshes_per_gap=0 is not allowed"),
        ({"freeze_after": 5, "refreshes_per_gap": 1.5}, ConfigurationError, "refreshes_per_gap=1.5 is not allowed"),
        (
            {"freeze_after": 5, "refreshes_per_gap": 16, "local_steps": 4},
            ConfigurationError,
            "refreshes_per_gap=16 does not work with local_steps=4",
        ),
    ],
)
def test_bad_settings_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        CompressedAdam(Model().parameters(), **options)


@pytest.mark.parametrize(
    ("compressor", "message"),
    [(SignSGD(), "signsgd does not work with CompressedAdam"), (DGC(0.05), r"betas=\(0\.9, 0\.95\)")],
    ids=["signsgd", "dgc"],
)
def test_methods_that_make_no_momentum_are_refused(compressor: Any, message: str) -> None:
    def adam(parameters: Any) -> CompressedAdam:
        return CompressedAdam(parameters, **SETTINGS, freeze_after=FREEZE_AFTER)

    with pytest.raises((SpecError, ConfigurationError), match=message):
        train(lambda: Compression(compressor), adam)


NOISY = [  # method, beta1, local steps, compressor of the warm-up, memory, and whether noise grows without end
    (EDEN(bits=1), 0.9, 1, "none", None, True),
    (EDEN(bits=1), 0.9, 1, "int8", None, True),
    (EDEN(bits=1), 0.9, 1, "int4", NoMemory(), True),
    (EDEN(bits=1), 0.9, 2, "none", None, True),
    (EDEN(bits=1), 0.9, 4, "none", None, False),
    (EDEN(bits=1), 0.6, 1, "none", None, False),
    (EDEN(bits=1), 0.9, 1, "int4", None, False),  # whose error feedback goes on
    (EDEN(bits=1), 0.9, 1, "none", ErrorFeedback(), False),
    (EDEN(bits=2), 0.9, 1, "none", None, False),
    (EDEN(bits=2, exchange="scatter"), 0.9, 1, "none", None, False),
    (EDEN(bits=2, exchange="scatter", back=1), 0.9, 1, "none", None, True),
    (EDEN(bits=4), 0.9, 1, "none", None, False),
]


@pytest.mark.parametrize(("method", "b1", "local_steps", "warm_up", "memory", "grows"), NOISY)
def test_noise_that_would_grow_without_end_in_momenta_is_refused(
    method: EDEN, b1: float, local_steps: int, warm_up: str, memory: Any, grows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def norm_of(compressor: Any, steps: int) -> float:
        """Of the first moment of the matrix."""
        given = {**SETTINGS, "betas": (b1, 0.95), "freeze_after": FREEZE_AFTER, "local_steps": local_steps}
        adam = functools.partial(CompressedAdam, **given, warm_up=warm_up)
        _, optimizer, _ = train(lambda: Compression(compressor, memory=memory), adam, steps=steps)[0]
        return float(optimizer.state[optimizer.param_groups[0]["params"][0]]["exp_avg"].norm())

    share = "57%" if method.exchange == "gather" else "78%"
    said = f"{method} does not work .* noise whose .* is {share} of .* .beta1={b1}.* memory=error_feedback, or warm_up="
    with pytest.raises(SpecError, match=said) if grows else nullcontext():
        norm_of(method, 1)
    monkeypatch.setattr(settings, "require_bounded_noise", lambda *_: None)
    assert (norm_of(method, 60) > 4 * norm_of(NoCompression(), 60)) == grows


def stated_with_local_steps(
    start: dict[str, np.ndarray], c: dict[str, Callable[[np.ndarray], np.ndarray]], every: int
) -> dict[str, np.ndarray]:
    """0/1 Adam's algorithm 1 after its variance is frozen, with AdamW's decay, and any C."""
    b1, b2 = BETAS
    weights = {}
    for name, w in start.items():
        m, v, w = np.zeros_like(w, np.float64), np.zeros_like(w, np.float64), w.astype(np.float64)
        for t in range(1, FREEZE_AFTER + 1):
            g = sum(gradients_of(rank, t - 1, w.shape).astype(np.float64) for rank in range(RANKS)) / RANKS
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
            w = (1 - RATE * DECAY) * w - RATE * (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + EPS)
        scale = np.sqrt(np.maximum(v, 0.01 * v.mean()) / (1 - b2**FREEZE_AFTER)) + EPS
        anchor, own = w, [m] * RANKS
        moved, rests, rates = [np.zeros_like(w)] * RANKS, [np.zeros_like(w)] * RANKS, 0.0
        for t in range(FREEZE_AFTER + 1, STEPS + 1):
            rate = RATE / (1 - b1**t)
            own = [b1 * m + (1 - b1) * gradients_of(rank, t - 1, w.shape) for rank, m in enumerate(own)]
            moved = [u + rate * m for u, m in zip(moved, own, strict=True)]
            rates += rate
            anchor = (1 - RATE * DECAY) * anchor
            if t % every:
                continue
            wanted = [u / rates + d for u, d in zip(moved, rests, strict=True)]
            sent = [c[name](one) for one in wanted]
            rests = [one - s for one, s in zip(wanted, sent, strict=True)]
            m = sum(sent) / RANKS
            anchor = anchor - rates * m / scale
            own, moved, rates = [m] * RANKS, [np.zeros_like(w)] * RANKS, 0.0
        weights[name] = anchor
    return weights


def test_local_steps_are_the_algorithm() -> None:
    def adam(parameters: Any) -> CompressedAdam:
        return CompressedAdam(parameters, **SETTINGS, freeze_after=FREEZE_AFTER, local_steps=3)

    start = {name: one.detach().numpy() for name, one in Model().named_parameters()}
    for compressor, c in ((EFSignSGD(), sign), (NoCompression(), lambda x: x)):
        done = train(lambda one=compressor: Compression(one), adam)
        expected = stated_with_local_steps(start, {"matrix": c, "vector": lambda x: x}, 3)
        for name, weights in done[0][0].items():
            np.testing.assert_allclose(weights, expected[name], rtol=2e-5, atol=2e-5)
            for others, _, _ in done[1:]:
                assert weights.tobytes() == others[name].tobytes()
        assert done[0][1].in_sync
        totals, dense = done[0][2].ledger.totals, 4 * (np.prod(SHAPE) + 7)
        assert totals.dense_bytes == STEPS * dense
        if isinstance(compressor, NoCompression):  # steps 6, 9 and 12 of those after the fourth
            assert 0 <= totals.bytes_sent - (FREEZE_AFTER + 3) * dense < 100
    apart = train(lambda: Compression(EFSignSGD()), adam, steps=STEPS - 1)
    assert not apart[0][1].in_sync
    assert not np.array_equal(apart[0][0]["matrix"], apart[1][0]["matrix"])


def test_one_rank_goes_on_as_without_local_steps() -> None:
    weights, models = [], []
    for local_steps in (1, 3):
        model = Model()
        optimizer = CompressedAdam(model.parameters(), **SETTINGS, freeze_after=FREEZE_AFTER, local_steps=local_steps)
        for step in range(STEPS):
            for parameter in model.parameters():
                parameter.grad = torch.from_numpy(gradients_of(0, step, tuple(parameter.shape)))
            optimizer.step()
        weights.append(model.matrix.detach().numpy())
        models.append((model, optimizer))
    np.testing.assert_allclose(*weights, rtol=1e-6, atol=1e-7)
    model, optimizer = models[1]
    state = optimizer.state[model.matrix]
    assert torch.equal(state["anchor"], model.matrix)
    assert (state["rates"], state["moved"].count_nonzero()) == (0.0, 0)


def test_local_steps_do_not_go_with_a_policy() -> None:
    def adam(parameters: Any) -> CompressedAdam:
        return CompressedAdam(parameters, **SETTINGS, freeze_after=FREEZE_AFTER, local_steps=3)

    with pytest.raises(SpecError, match="local_steps=3 of CompressedAdam does not work with the policy accordion"):
        train(lambda: Compression(TopK(0.05), policy=Accordion(low=0.2, high=0.05), steps_per_epoch=4), adam)


def test_local_steps_of_an_even_number_do_not_go_with_low_rank_that_alternates() -> None:
    def adam(parameters: Any) -> CompressedAdam:
        return CompressedAdam(parameters, **SETTINGS, freeze_after=FREEZE_AFTER, local_steps=2)

    with pytest.raises(SpecError, match="local_steps=2 of CompressedAdam"):
        train(lambda: Compression(PowerSGD(rank=1, alternating=True)), adam)


def test_local_steps_do_not_go_with_a_loss_scaler() -> None:
    def adam(parameters: Any) -> CompressedAdam:
        return CompressedAdam(parameters, **SETTINGS, freeze_after=FREEZE_AFTER, local_steps=3)

    # A rank whose gradients overflow would skip a local step by itself, and exchange when others do not.
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(ConfigurationError, match=r"local_steps=3 does not work with a torch\.amp\.GradScaler"):
        train(lambda: Compression(EFSignSGD(), grad_scaler=scaler), adam)
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    train(lambda: Compression(EFSignSGD(), grad_scaler=disabled), adam, steps=1)


def test_a_policy_sets_levels_after_the_warm_up() -> None:
    def adam(parameters: Any) -> CompressedAdam:
        return CompressedAdam(parameters, **SETTINGS, freeze_after=FREEZE_AFTER)

    def compression() -> Compression:
        return Compression(TopK(0.05), policy=Accordion(low=0.2, high=0.05, interval=1), steps_per_epoch=2)

    dense = 4 * (np.prod(SHAPE) + 7)
    sent = [train(compression, adam, steps=steps)[0][2].ledger.totals.bytes_sent for steps in (FREEZE_AFTER, STEPS)]
    assert FREEZE_AFTER * dense <= sent[0] < FREEZE_AFTER * dense * 1.01
    assert 0.05 * dense < (sent[1] - sent[0]) / (STEPS - FREEZE_AFTER) < 0.5 * dense
    weights = [one[0]["matrix"] for one in train(compression, adam)]
    assert all(np.array_equal(one, weights[0]) for one in weights)


class Keeping(torch.optim.Optimizer):
    """Keeps tensors of these names for each parameter, and makes steps of SGD."""

    def __init__(self, parameters: Any, names: Sequence[str], lr: float | None) -> None:
        super().__init__(parameters, {"lr": lr})
        self._names = names

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].update({name: torch.zeros_like(parameter) for name in self._names})
            parameter -= (self.param_groups[0]["lr"] or 1e-3) * parameter.grad


class Muon(Keeping):
    pass


def keeping(*names: str, kind: type[Keeping] = Keeping) -> Callable[..., Keeping]:
    return functools.partial(kind, names=names)


def warnings_of(optimizer: Any, compressor: Any, steps: int = 3, **settings: Any) -> list[warnings.WarningMessage]:
    """The warnings of harm in a training."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(lambda: Compression(compressor, **settings), lambda given: optimizer(given, lr=1e-3), steps=steps)
    return [one for one in caught if " badly with " in str(one.message)]


@pytest.mark.usefixtures("at_one_rate")
@pytest.mark.parametrize(
    ("optimizer", "compressor", "said"),
    [
        (torch.optim.AdamW, TopK(0.05), "AdamW learns badly with topk:ratio=0.05. "),
        (torch.optim.AdamW, EFSignSGD(), "AdamW learns badly with efsignsgd. "),
        (torch.optim.Adam, ByName({"matrix": TopK(0.05), "*": NoCompression()}), "Adam learns badly with topk"),
        (torch.optim.AdamW, PowerSGD(rank=4), "8 % higher with powersgd:rank=4 in gpt, the loss was 0 % higher with"),
        (torch.optim.AdamW, TwoLevel(PowerSGD(rank=3)), "was 8 % higher with powersgd:rank=4"),
        (torch.optim.AdamW, TernGrad(), "was 8 % higher with terngrad"),
        (torch.optim.AdamW, Int8(), None),
        (torch.optim.AdamW, PowerSGD(rank=8), None),  # nothing as mild was measured, and rank 4 loses little
        (torch.optim.AdamW, QSGD(bits=8), None),
        (torch.optim.SGD, TopK(0.05), None),
        (functools.partial(CompressedAdam, freeze_after=2), TopK(0.05), None),
        (Muon, TopK(0.05), "Muon learns badly with topk:ratio=0.05. "),
        (Muon, PowerSGD(rank=4), None),
    ],
)
def test_what_an_optimizer_is_known_to_learn_badly_with_is_warned_of(
    optimizer: Any, compressor: Any, said: str | None
) -> None:
    if optimizer is Muon:
        optimizer = keeping("momentum_buffer", kind=Muon)
    # In the first step, as the class is known.
    caught = warnings_of(optimizer, compressor, steps=1)
    assert len(caught) == (said is not None)
    for one in caught:
        assert str(said) in str(one.message)
        assert one.filename == __file__
        assert linecache.getline(one.filename, one.lineno).strip() == "exchange()", "the line of the program"


@pytest.fixture
def measures(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Mapping[str, float]], None]]:
    """A function that replaces all results of training runs by the losses of methods with Adam in one training."""

    def replaces(lost: Mapping[str, float]) -> None:
        monkeypatch.setattr(evidence, "evidence", lambda: (evidence.Evidence("Adam", "gpt", "loss", lost),))
        harm._settings.cache_clear()

    yield replaces
    monkeypatch.undo()
    harm._settings.cache_clear()


@pytest.mark.parametrize(("of_one_bit", "warns"), [(None, False), (0.049, False), (0.051, True)])
def test_a_method_is_judged_once_its_trainings_are_measured(
    of_one_bit: float | None, warns: bool, measures: Callable[[Mapping[str, float]], None]
) -> None:
    measures({"int4": 0.003, **({} if of_one_bit is None else {"eden": 0.002, "eden:bits=1": of_one_bit})})
    caught = warnings_of(torch.optim.AdamW, EDEN(bits=1), steps=1)
    assert len(caught) == warns
    assert all("AdamW learns badly with eden:bits=1. " in str(one.message) for one in caught)
    assert warnings_of(torch.optim.AdamW, EDEN(), steps=1) == []
    assert warnings_of(torch.optim.AdamW, EDEN(bits=3), steps=1) == [], "a setting that was not measured"


@pytest.mark.parametrize(("gathered", "scattered"), [(0.003, 0.051), (0.051, 0.003)])
def test_a_method_whose_exchange_is_chosen_is_judged_by_the_worse_exchange(
    gathered: float, scattered: float, measures: Callable[[Mapping[str, float]], None]
) -> None:
    measures({"int4": gathered, "int4:exchange=scatter": scattered, "int4:block=64": 0.001})
    assert len(warnings_of(torch.optim.AdamW, Int4(exchange="auto"), steps=1)) == 1
    assert len(warnings_of(torch.optim.AdamW, Int4(), steps=1)) == (gathered > scattered)
    assert len(warnings_of(torch.optim.AdamW, Int4(exchange="scatter"), steps=1)) == (gathered < scattered)


@pytest.mark.usefixtures("at_one_rate")
@pytest.mark.parametrize(
    ("names", "keeps"),
    [
        (("exp_avg", "exp_avg_sq"), "a second moment of gradients, as AdamW does"),  # FusedAdam
        (("exp_avg", "exp_avg_sq", "GG", "Q"), "the same state as SOAP"),
        (("exp_avg_sq", "z"), "the same state as schedule-free AdamW"),
        (("exp_avg", "exp_avg_sq", "projector"), "the same state as GaLore"),
        (("state1", "state2"), "the same state as AdamW8bit"),  # and PagedAdamW of bitsandbytes
        (("exp_avg_sq_row", "exp_avg_sq_col"), None),  # Adafactor
        (("exp_avg", "exp_avg_sq_row", "exp_avg_sq_col"), "a second moment of gradients, as AdamW does"),  # CAME
        (("step", "row_var", "col_var"), None),  # PyTorch's Adafactor
        (("m", "v"), "a second moment of gradients, as AdamW does"),
        (("m", "v_mean"), "a second moment of gradients, as AdamW does"),  # Adam-mini
        (("v",), None),  # a velocity
        (("z",), None),
        (("exp_avg",), None),  # Lion, whose trainings have another learning rate for each method
        (("state1",), None),  # Lion8bit
        (("momentum_buffer",), None),
    ],
)
def test_an_unknown_optimizer_is_judged_by_what_it_keeps(names: tuple[str, ...], keeps: str | None) -> None:
    assert warnings_of(keeping(*names), TopK(0.05), steps=1) == [], "it has kept nothing yet"
    caught = warnings_of(keeping(*names), TopK(0.05))
    assert len(caught) == (keeps is not None)
    expected = f"Keeping keeps {keeps}, and such optimizers learn badly with topk:"
    assert all(expected in str(one.message) for one in caught)
    assert warnings_of(keeping(*names), Int8()) == []


def test_an_optimizer_is_judged_by_its_own_trainings_before_those_of_adam(monkeypatch: pytest.MonkeyPatch) -> None:
    of = functools.partial(evidence.Evidence, training="sorting", metric="accuracy", at_best_rates=True)
    found = (
        of("Adam", lost={"eden": 0.001, "topk:ratio=0.01": 0.3, "efsignsgd": 0.2, "int4": 0.0}),
        of("SOAP", lost={"eden": 0.08, "topk:ratio=0.01": 0.01, "int4": 0.004}),
        of("Adafactor", lost={"topk:ratio=0.01": -0.1}),
        of("Lion", lost={"topk:ratio=0.01": 0.4, "int4": 0.01}),
    )
    monkeypatch.setattr(evidence, "evidence", lambda: found)
    harm._settings.cache_clear()
    soap, adafactor, lion = keeping("exp_avg_sq", "GG"), keeping("row_var", "col_var"), keeping("exp_avg")
    try:
        (caught,) = warnings_of(soap, EDEN())
        assert (
            "Keeping keeps the same state as SOAP, and such optimizers learn badly with eden. In hvdcomp's own "
            "training runs, compared with uncompressed gradients: with SOAP, the accuracy was 8 points lower with eden "
            "in sorting, the accuracy was 0 points lower with int4 in sorting. Use int4 (docs/optimizers.md)"
        ) in str(caught.message)
        assert warnings_of(soap, TopK(0.01)) == [], "Adam's trainings do not count"
        (caught,) = warnings_of(soap, EFSignSGD())
        assert "with Adam, the accuracy was 20 points lower with efsignsgd in sorting" in str(caught.message)
        assert warnings_of(adafactor, TopK(0.01)) == warnings_of(adafactor, EFSignSGD()) == []
        (caught,) = warnings_of(lion, TopK(0.01))
        assert "with Lion, the accuracy was 40 points lower with topk:ratio=0.01" in str(caught.message)
        assert warnings_of(lion, EFSignSGD()) == [], "it was not measured with Lion, which has no second moment"
    finally:
        monkeypatch.undo()
        harm._settings.cache_clear()


@pytest.mark.usefixtures("at_one_rate")
def test_what_was_measured_with_error_feedback_says_nothing_of_a_method_without() -> None:
    assert warnings_of(torch.optim.AdamW, TopK(0.05), memory=NoMemory()) == []
    assert warnings_of(torch.optim.AdamW, TernGrad(), memory=ErrorFeedback()) == []


@pytest.mark.usefixtures("at_one_rate")
def test_muon_has_a_kind_of_its_own_once_methods_are_measured_at_their_best_rates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    muon = keeping("momentum_buffer", kind=Muon)([torch.zeros(2, requires_grad=True)], lr=1e-3)
    assert kind_of(muon) is None
    best = evidence.Evidence("Muon", "sorting-muon", "accuracy", {"topk:ratio=0.01": 0.061}, at_best_rates=True)
    monkeypatch.setattr(evidence, "evidence", lambda: (best,))
    harm._settings.cache_clear()
    assert kind_of(muon) == "Muon"
    (caught,) = warnings_of(keeping("momentum_buffer", kind=Muon), TopK(0.005), steps=1)
    assert "the accuracy was 6 points lower with topk:ratio=0.01 in sorting-muon. Use " in str(caught.message)


def test_an_optimizer_that_chooses_its_rate_itself_has_none_to_follow() -> None:
    adafactor = functools.partial(keeping("exp_avg_sq_row", "exp_avg_sq_col"), lr=None)
    train(lambda: Compression(Int8()), adafactor, steps=2)
    policy = Accordion(low=0.2, high=0.05)
    with pytest.raises(ConfigurationError, match="Keeping has lr=None, so it chooses its learning rate itself"):
        train(lambda: Compression(TopK(0.05), policy=policy, steps_per_epoch=2), adafactor, steps=2)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (functools.partial(torch.optim.SGD, lr=0.1), "SGD"),
        (torch.optim.AdamW, "Adam"),
        (functools.partial(CompressedAdam, freeze_after=2), "CompressedAdam"),
        (torch.optim.RMSprop, None),
    ],
)
def test_by_which_trainings_an_optimizer_is_judged(make: Any, kind: str | None) -> None:
    assert kind_of(make([torch.zeros(2, requires_grad=True)])) == kind
    assert kind_of(None) is None


@pytest.mark.parametrize("local_steps", [1, 4])
def test_its_state_has_the_same_entries_from_the_first_step_on(local_steps: int) -> None:
    """Horovod broadcasts a state entry by entry to ranks that have made one step, or none."""
    optimizer = one_parameter(local_steps=local_steps)
    entries = []
    for _ in range(8):
        step_of(optimizer)
        (state,) = optimizer.state.values()
        entries.append({name: type(entry) for name, entry in state.items()})
    assert optimizer.frozen
    assert entries == [entries[0]] * 8
    (group,) = optimizer.param_groups
    other = torch.optim.AdamW(group["params"])
    step_of(other)
    optimizer.load_state_dict(other.state_dict())
    assert {*next(iter(optimizer.state.values()))} == {*entries[0]}


def test_an_exchange_that_came_to_nothing_leaves_nothing_to_a_loaded_state() -> None:
    def move(given_up: bool) -> Any:
        optimizer = one_parameter(local_steps=2)
        for _ in range(FREEZE_AFTER):
            step_of(optimizer)
        state = copy.deepcopy(optimizer.state_dict())
        (parameter,) = optimizer.param_groups[0]["params"]
        before = parameter.detach().clone()
        if given_up:
            optimizer.momenta()
        optimizer.load_state_dict(state)
        step_of(optimizer)
        return parameter.detach() - before

    assert torch.equal(move(False), move(True))


def test_a_copy_makes_steps() -> None:
    optimizer = copy.deepcopy(one_parameter())
    for _ in range(FREEZE_AFTER + 2):
        step_of(optimizer)
    assert optimizer.frozen


def test_a_policys_factor_of_the_rate_holds_for_frozen_steps_beside_any_adamw() -> None:
    torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])  # lets AdamW's part of a step call the hooks, too
    moves = []
    for factor in (1.0, 4.0):
        optimizer = one_parameter(weight_decay=0.0)
        scaled = ScaledSteps(optimizer)
        (parameter,) = optimizer.param_groups[0]["params"]
        for _ in range(FREEZE_AFTER):
            step_of(optimizer)
        scaled.factor = factor
        scaled.begin_step()
        before = parameter.detach().clone()
        step_of(optimizer)
        moves.append(parameter.detach() - before)
        assert optimizer.param_groups[0]["lr"] == RATE
    assert torch.allclose(4 * moves[0], moves[1])


def test_groups_exchange_in_the_same_steps() -> None:
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "local_steps": length} for length in (1, 4)]
    with pytest.raises(ConfigurationError, match=r"its parameter groups have local_steps=\[1, 4\]"):
        CompressedAdam(groups, freeze_after=4)


@pytest.mark.parametrize("option", ["maximize", "amsgrad"])
def test_a_state_of_an_adamw_that_frozen_steps_would_not_follow_is_refused(option: str) -> None:
    optimizer = one_parameter()
    other = torch.optim.AdamW(optimizer.param_groups[0]["params"], **{option: True})
    step_of(other)
    with pytest.raises(ConfigurationError, match=f"{option}=True is not allowed"):
        optimizer.load_state_dict(other.state_dict())


def one_parameter(**options: Any) -> CompressedAdam:
    return CompressedAdam([torch.nn.Parameter(torch.ones(5))], **{**SETTINGS, **options}, freeze_after=FREEZE_AFTER)


def step_of(optimizer: Any) -> None:
    (parameter,) = optimizer.param_groups[0]["params"]
    parameter.grad = torch.arange(1.0, 6.0)
    optimizer.step()
