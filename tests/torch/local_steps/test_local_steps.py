"""LocalSteps against DiLoCo in plain NumPy, and what is known of it in closed form. Real ranks: `multirank`."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hvdcomp import (  # noqa: E402
    DGC,
    Accordion,
    ChunkedTopK,
    Compression,
    ConfigurationError,
    EFSignSGD,
    PowerSGD,
    RankMismatchError,
    SignSGD,
    SpecError,
    TopK,
    TwoLevel,
    WarmUp,
)
from hvdcomp.communicators import SimulatedCommunicator, SimulatedGroup  # noqa: E402
from hvdcomp.torch import CompressedAdam, LocalSteps  # noqa: E402

RANKS, EVERY, STEPS, RATE = 4, 3, 12, 0.05
SHAPE = (24, 60)
DIMENSIONS = {"matrix": SHAPE, "vector": (7,)}


def start_of(name: str) -> np.ndarray:
    return np.random.default_rng(len(name)).normal(size=DIMENSIONS[name]).astype(np.float32)


def target_of(rank: int, name: str) -> np.ndarray:
    """Of the squared distance that is the loss of a rank: a part that all share, and one of its own."""
    shared = np.random.default_rng(5).normal(size=DIMENSIONS[name])
    return (shared + np.random.default_rng(rank).normal(size=DIMENSIONS[name])).astype(np.float32)


class Model(torch.nn.Module):
    """A matrix, and a vector that is sent dense."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = torch.nn.Parameter(torch.from_numpy(start_of("matrix")))
        self.vector = torch.nn.Parameter(torch.from_numpy(start_of("vector")))

    def loss(self, rank: int) -> Any:
        parts = [(one - torch.from_numpy(target_of(rank, name))) ** 2 for name, one in self.named_parameters()]
        return sum(part.sum() for part in parts) / 2

    def values(self) -> dict[str, np.ndarray]:
        return {name: one.detach().numpy().copy() for name, one in self.named_parameters()}


def sgd(model: Model) -> Any:
    return torch.optim.SGD(model.parameters(), lr=RATE)


def adamw(model: Model) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95))


def advance(model: Model, optimizer: Any, rank: int, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model.loss(rank).backward()
        optimizer.step()


def train(
    compression: Callable[[], Compression] | None = None,
    inner: Callable[[Model], Any] = sgd,
    steps: int = STEPS,
    ranks: int = RANKS,
    **options: Any,
) -> list[tuple[dict[str, np.ndarray], LocalSteps]]:
    """Trains a model on each rank; its weights, and its optimizer."""

    def work(communicator: SimulatedCommunicator) -> tuple[dict[str, np.ndarray], LocalSteps]:
        model = Model()
        given = {"every": EVERY, **options, "communicator": communicator}
        optimizer = LocalSteps(inner(model), compression=compression and compression(), **given)
        advance(model, optimizer, communicator.rank, steps)
        return model.values(), optimizer

    return list(SimulatedGroup(ranks).run(work))


def top(x: np.ndarray, count: int) -> np.ndarray:
    sent = np.zeros_like(x)
    places = np.argsort(-np.abs(x), axis=None, kind="stable")[:count]
    sent.flat[places] = x.flat[places]
    return sent


def stated(
    name: str, c: Callable[[np.ndarray], np.ndarray], lr: float = 0.7, momentum: float = 0.9, nesterov: bool = True
) -> np.ndarray:
    """DiLoCo's algorithm 1 with inner SGD, and error feedback of what C has not sent."""
    anchor = start_of(name).astype(np.float64)
    velocity = np.zeros_like(anchor)
    rests = [np.zeros_like(anchor) for _ in range(RANKS)]
    for _ in range(STEPS // EVERY):
        sent = []
        for rank in range(RANKS):
            w = anchor.copy()
            for _ in range(EVERY):
                w -= RATE * (w - target_of(rank, name))
            x = anchor - w + rests[rank]
            sent.append(c(x))
            rests[rank] = x - sent[rank]
        mean = sum(sent) / RANKS
        velocity = momentum * velocity + mean
        anchor = anchor - lr * (mean + momentum * velocity if nesterov else velocity)
    return anchor


def everything(x: np.ndarray) -> np.ndarray:
    return x


@pytest.mark.parametrize(
    ("compression", "c"),
    [
        (None, everything),
        (lambda: Compression(TopK(ratio=0.1)), lambda x: top(x, round(0.1 * x.size))),
        (lambda: Compression(EFSignSGD()), lambda x: np.abs(x).mean() * np.where(x >= 0, 1, -1)),
    ],
)
@pytest.mark.parametrize(("lr", "momentum", "nesterov"), [(0.7, 0.9, True), (0.5, 0.5, False), (1.0, 0.0, True)])
def test_it_is_the_algorithm(compression: Any, c: Any, lr: float, momentum: float, nesterov: bool) -> None:
    results = train(compression, outer_lr=lr, outer_momentum=momentum, nesterov=nesterov)
    for values, _ in results:
        np.testing.assert_allclose(values["matrix"], stated("matrix", c, lr, momentum, nesterov), rtol=1e-4, atol=1e-5)
        dense = stated("vector", everything, lr, momentum, nesterov)
        np.testing.assert_allclose(values["vector"], dense, rtol=1e-4, atol=1e-5)


def test_one_step_averaged_is_the_mean_of_the_weights_after_it() -> None:
    results = train(inner=adamw, steps=1, every=1, outer_lr=1, outer_momentum=0)
    alone = []
    for rank in range(RANKS):
        model = Model()
        advance(model, adamw(model), rank, 1)
        alone.append(model.values())
    for name in DIMENSIONS:
        mean = sum(one[name].astype(np.float64) for one in alone) / RANKS
        for values, _ in results:
            np.testing.assert_allclose(values[name], mean, rtol=1e-6, atol=1e-6)


def test_the_weights_of_a_linear_model_are_those_of_the_closed_form() -> None:
    """The distance e of the weights to the mean target, and the velocity v, after each round are a matrix times those
    before: a round of gradient descent keeps a share q of the distance to a rank's own target, and (1 - q) e is moved.
    """
    lr, momentum = 0.7, 0.9
    moved = 1 - (1 - RATE) ** EVERY
    round_ = np.array([[1 - lr * (1 + momentum) * moved, -lr * momentum**2], [moved, momentum]])
    factor = np.linalg.matrix_power(round_, STEPS // EVERY)[0, 0]
    for values, _ in train():
        for name, value in values.items():
            centre = sum(target_of(rank, name).astype(np.float64) for rank in range(RANKS)) / RANKS
            np.testing.assert_allclose(value, centre + factor * (start_of(name) - centre), rtol=1e-4, atol=1e-5)


def test_one_rank_gains_from_the_outer_step() -> None:
    """Nesterov momentum around local steps helps one worker as well (SNOO, arXiv:2510.15830): slow directions move
    0.7 / (1 - 0.9) times as far."""

    def loss(outer_lr: float, outer_momentum: float) -> float:
        model = torch.nn.Parameter(torch.ones(8))
        sharpness = torch.logspace(-3, 0, 8)

        def work(communicator: SimulatedCommunicator) -> float:
            optimizer: Any = torch.optim.SGD([model], lr=0.1)
            optimizer = LocalSteps(
                optimizer, 5, outer_lr=outer_lr, outer_momentum=outer_momentum, communicator=communicator
            )
            for _ in range(1000):  # 200 rounds
                optimizer.zero_grad()
                (sharpness * model**2).sum().div(2).backward()
                optimizer.step()
            return float((sharpness * model.detach() ** 2).sum() / 2)

        return SimulatedGroup(1).run(work)[0]

    assert loss(0.7, 0.9) < 0.5 * loss(1.0, 0.0)


def test_ranks_differ_between_two_exchanges_and_are_equal_after_each() -> None:
    seen: dict[int, list[np.ndarray]] = {}

    def work(communicator: SimulatedCommunicator) -> None:
        model = Model()
        optimizer = LocalSteps(adamw(model), EVERY, communicator=communicator)
        for step in range(1, 7):
            advance(model, optimizer, communicator.rank, 1)
            assert optimizer.in_sync == (step % EVERY == 0)
            seen.setdefault(step, []).append(model.values()["matrix"])
        advance(model, optimizer, communicator.rank, 1)
        optimizer.exchange()
        assert optimizer.in_sync
        seen.setdefault(8, []).append(model.values()["matrix"])

    SimulatedGroup(2).run(work)
    for step, (first, second) in seen.items():
        assert np.array_equal(first, second) == (step % EVERY == 0 or step == 8), step


def test_bytes_are_those_of_the_exchanges() -> None:
    ((_, optimizer), *_) = train(lambda: Compression(TopK(ratio=0.1)))
    steps = optimizer.compression.ledger.steps
    totals, last = optimizer.compression.ledger.totals, optimizer.compression.ledger.last
    assert steps == STEPS
    assert last is not None
    assert totals.bytes_sent == last.bytes_sent * STEPS // EVERY > 0
    assert totals.dense_bytes == 4 * STEPS * (24 * 60 + 7)


@pytest.mark.parametrize("at", [4, 6], ids=["between two exchanges", "after one"])
def test_it_goes_on_bit_for_bit(at: int) -> None:
    """With Adam's moments, residuals, the outer momentum, and a schedule of the learning rate and one of levels."""

    def made(model: Model, communicator: SimulatedCommunicator) -> tuple[Any, Any]:
        compression = Compression(
            TopK(ratio=0.05), policy=WarmUp(levels=(0.5,), epochs=1), steps_per_epoch=5, min_numel=0, min_ndim=0
        )
        optimizer = LocalSteps(adamw(model), EVERY, compression=compression, communicator=communicator)
        return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)

    def run(model: Model, optimizer: Any, scheduler: Any, rank: int, steps: int) -> None:
        for _ in range(steps):
            advance(model, optimizer, rank, 1)
            scheduler.step()

    def whole(communicator: SimulatedCommunicator) -> dict[str, np.ndarray]:
        model = Model()
        run(model, *made(model, communicator), communicator.rank, STEPS)
        return model.values()

    def before(communicator: SimulatedCommunicator) -> Any:
        model = Model()
        optimizer, scheduler = made(model, communicator)
        run(model, optimizer, scheduler, communicator.rank, at)
        return copy.deepcopy([model.state_dict(), optimizer.state_dict(), scheduler.state_dict()])

    saved = SimulatedGroup(RANKS).run(before)

    def after(communicator: SimulatedCommunicator) -> dict[str, np.ndarray]:
        model = Model()
        optimizer, scheduler = made(model, communicator)
        for one, state in zip((model, optimizer, scheduler), saved[communicator.rank], strict=True):
            one.load_state_dict(state)
        assert optimizer.in_sync == (at % EVERY == 0)
        run(model, optimizer, scheduler, communicator.rank, STEPS - at)
        return model.values()

    for one, other in zip(SimulatedGroup(RANKS).run(whole), SimulatedGroup(RANKS).run(after), strict=True):
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])


def test_all_ranks_can_go_on_from_what_rank_0_saved_between_two_exchanges() -> None:
    def made(communicator: SimulatedCommunicator) -> tuple[Model, LocalSteps]:
        model = Model()
        compression = Compression(TopK(ratio=0.1))
        return model, LocalSteps(adamw(model), EVERY, compression=compression, communicator=communicator)

    def before(communicator: SimulatedCommunicator) -> Any:
        model, optimizer = made(communicator)
        advance(model, optimizer, communicator.rank, EVERY + 1)
        return copy.deepcopy([model.state_dict(), optimizer.state_dict()])

    saved, _ = SimulatedGroup(2).run(before)

    def after(communicator: SimulatedCommunicator) -> np.ndarray:
        model, optimizer = made(communicator)
        model.load_state_dict(copy.deepcopy(saved[0]))
        optimizer.load_state_dict(copy.deepcopy(saved[1]))
        assert not optimizer.in_sync
        advance(model, optimizer, communicator.rank, EVERY - 1)
        assert optimizer.in_sync
        return model.values()["matrix"]

    with pytest.warns(UserWarning, match="residuals of this rank start at zero"):
        np.testing.assert_array_equal(*SimulatedGroup(2).run(after))


def test_a_schedule_sets_the_rate_of_the_inner_optimizer() -> None:
    model = Model()

    def work(communicator: SimulatedCommunicator) -> None:
        inner = sgd(model)
        optimizer = LocalSteps(inner, communicator=communicator)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        advance(model, optimizer, 0, 1)
        scheduler.step()
        assert inner.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == RATE / 2
        assert optimizer.outer.param_groups[0]["lr"] == 0.7

    SimulatedGroup(1).run(work)


def test_a_state_of_the_inner_optimizer_begins_anew() -> None:
    model = Model()
    inner = adamw(model)
    advance(model, inner, 0, 2)

    def work(communicator: SimulatedCommunicator) -> Any:
        again = Model()
        optimizer = LocalSteps(adamw(again), EVERY, communicator=communicator)
        again.load_state_dict(model.state_dict())  # after it was made: the first step begins where the model is
        optimizer.load_state_dict(copy.deepcopy(inner.state_dict()))
        assert optimizer.in_sync
        assert optimizer.state is optimizer.inner.state
        advance(again, optimizer, communicator.rank, EVERY)
        return again.values()["matrix"]

    first, second = SimulatedGroup(2).run(work)
    np.testing.assert_array_equal(first, second)
    assert np.abs(first - model.values()["matrix"]).max() < 10 * EVERY * RATE


def test_weights_that_are_not_finite_stop_all_ranks_and_are_not_exchanged() -> None:
    def work(communicator: SimulatedCommunicator) -> tuple[str, bool, bool]:
        model = Model()
        optimizer = LocalSteps(adamw(model), EVERY, compression=Compression(TopK(ratio=0.1)), communicator=communicator)
        advance(model, optimizer, communicator.rank, EVERY + 1)
        before = copy.deepcopy(optimizer.state_dict()["local_steps"])
        optimizer.zero_grad()
        model.loss(communicator.rank).backward()
        if communicator.rank == 1:
            model.vector.grad[2] = torch.nan
        optimizer.step()
        with pytest.raises(ConfigurationError) as told:
            advance(model, optimizer, communicator.rank, 1)
        after = optimizer.state_dict()["local_steps"]
        kept = [*before["anchors"], before["outer"]["state"][0]["momentum_buffer"], *_residuals(before)]
        now = [*after["anchors"], after["outer"]["state"][0]["momentum_buffer"], *_residuals(after)]
        same = all(torch.equal(one, other) for one, other in zip(kept, now, strict=True))
        return str(told.value), same, bool(np.isfinite(model.values()["vector"]).all())

    results = SimulatedGroup(RANKS).run(work)
    for rank, (message, same, finite) in enumerate(results):
        assert same
        assert finite == (rank != 1)
        assert ("on this rank in 0.1" if rank == 1 else "on another rank") in message
        assert "smaller learning rate" in message


def _residuals(own: dict[str, Any]) -> list[Any]:
    residuals = own["compression"]["own"]["residuals"]
    return [array for kept in residuals.values() for array in kept["arrays"]]


def test_names_are_those_that_the_compression_or_the_optimizer_was_given() -> None:
    def work(communicator: SimulatedCommunicator) -> list[list[str]]:
        model = Model()
        named = Compression(TopK(ratio=0.1), named_parameters=model.named_parameters())
        found = [LocalSteps(sgd(model), compression=named, communicator=communicator)]
        if torch.__version__ >= (2, 6):
            inner = torch.optim.SGD(model.named_parameters(), lr=RATE)
            found.append(LocalSteps(inner, communicator=communicator))
        found.append(LocalSteps(sgd(model), communicator=communicator))
        return [list(one.compression._binding.engine.tensors) for one in found]

    (names,) = SimulatedGroup(1).run(work)
    assert all(one == ["matrix", "vector"] for one in names[:-1])
    assert names[-1] == ["0.0", "0.1"]


def test_presets_are_as_published() -> None:
    def work(communicator: SimulatedCommunicator) -> list[Any]:
        first = LocalSteps.diloco(sgd(Model()), communicator=communicator)
        model = Model()
        second = LocalSteps.sparseloco(sgd(model), named_parameters=model.named_parameters(), communicator=communicator)
        advance(model, second, 0, 30)
        told = [[one.every, *(one.outer.param_groups[0][name] for name in ("lr", "momentum", "nesterov"))]
                for one in (first, second)]  # fmt: skip
        return [*told, str(second.compression.plan["matrix"]), second.compression.settings.memory]

    (found,) = SimulatedGroup(1).run(work)
    assert found[:2] == [[500, 0.7, 0.9, True], [30, 1.0, 0.0, False]]
    assert found[2] == "chunkedtopk"
    assert found[3].decay == 0.95


def adaptive() -> Compression:
    return Compression(TopK(ratio=0.1), policy=Accordion(low=0.1, high=0.01), steps_per_epoch=3)


def _refused(make: Callable[[Any], Any], error: type[Exception] = ConfigurationError) -> str:
    with pytest.raises(error) as told:
        SimulatedGroup(2).run(make)
    return str(told.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every=0"),
        ({"outer_lr": 0}, "outer_lr=0"),
        ({"outer_momentum": 1}, "outer_momentum=1"),
        ({"compression": "topk"}, "from_spec"),
        ({"compression": lambda: Compression(SignSGD())}, "efsignsgd"),
        ({"compression": lambda: Compression(TopK(ratio=0.1), bucket_bytes=1)}, "bucket_bytes"),
        ({"compression": lambda: Compression(TopK(ratio=0.1), overlap=True)}, "overlap"),
        ({"compression": lambda: adaptive()}, "schedule of levels"),
        (
            {"compression": lambda: Compression(TopK(ratio=0.1), grad_scaler=torch.amp.GradScaler("cpu"))},
            "leave out grad_scaler=",
        ),
        (
            {"compression": lambda: Compression(TopK(ratio=0.1), named_parameters=[("one", Model().vector)])},
            "lacks 2",
        ),
    ],
    ids=lambda one: "" if isinstance(one, str) else next(iter(one)),
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    def make(communicator: SimulatedCommunicator) -> Any:
        given = {name: one() if callable(one) else one for name, one in options.items()}
        return LocalSteps(sgd(Model()), communicator=communicator, **given)

    assert message in _refused(make)


@pytest.mark.parametrize("every", [1, 2, 3, "auto"])
def test_low_rank_that_alternates_sends_both_factors_or_is_refused(every: int | str) -> None:
    """By the number of the step it sends P or Q; the same one in every exchange would never leave its first columns."""
    compression = Compression(PowerSGD(rank=1, alternating=True), min_numel=0)

    def make(communicator: SimulatedCommunicator) -> LocalSteps:
        return LocalSteps(sgd(Model()), every, compression=copy.deepcopy(compression), communicator=communicator)

    if every in (1, 3):
        SimulatedGroup(2).run(make)
    else:
        assert f"every={every!r} of LocalSteps" in _refused(make, SpecError)


def test_an_optimizer_that_exchanges_by_itself_is_refused() -> None:
    def of(inner: Callable[[Any], Any]) -> str:
        return _refused(lambda communicator: LocalSteps(inner(communicator), communicator=communicator))

    assert "exchanges gradients by itself" in of(lambda _: CompressedAdam(Model().parameters(), freeze_after=3))
    assert "exchanges gradients by itself" in of(lambda ranks: LocalSteps(sgd(Model()), communicator=ranks))
    assert "was given a Model" in of(lambda _: Model())


def test_what_only_a_step_can_tell_is_refused_on_every_rank() -> None:
    def step(communicator: Any, seed: int = 0, compression: Any = None, **options: Any) -> None:
        model = Model()
        with torch.no_grad():
            model.vector += seed
        optimizer = LocalSteps(sgd(model), communicator=communicator, compression=compression, **options)
        advance(model, optimizer, communicator.rank, 1)

    assert "every" in _refused(lambda one: step(one, every=2 + one.rank), RankMismatchError)
    assert "outer lr" in _refused(lambda one: step(one, outer_lr=0.5 + one.rank), RankMismatchError)
    assert "the same random seed" in _refused(lambda one: step(one, seed=one.rank), RankMismatchError)
    assert "already applies momentum" in _refused(lambda one: step(one, compression=Compression(DGC(ratio=0.1))))


@pytest.mark.parametrize(("ranks", "error"), [((1,), RankMismatchError), ((0, 1), ConfigurationError)])
def test_a_group_that_the_inner_optimizer_gets_before_the_first_step_is_refused_on_every_rank(
    ranks: tuple[int, ...], error: type[Exception]
) -> None:
    told: dict[int, str] = {}

    def step(communicator: SimulatedCommunicator) -> None:
        model = Model()
        inner = sgd(model)
        optimizer = LocalSteps(inner, communicator=communicator)
        if communicator.rank in ranks:
            inner.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
        with optimizer.outer_weights():
            assert model.vector.isfinite().all()
        with pytest.raises(error) as refused:
            advance(model, optimizer, communicator.rank, 1)
        told[communicator.rank] = str(refused.value)

    SimulatedGroup(2).run(step)
    assert all("add all parameter groups to the inner optimizer before you pass" in told[rank] for rank in (0, 1))


def test_what_comes_too_late_is_refused() -> None:
    def work(communicator: SimulatedCommunicator) -> None:
        model = Model()
        optimizer = LocalSteps(sgd(model), communicator=communicator)
        state = optimizer.state_dict()
        assert "local_steps" not in state
        with pytest.raises(ConfigurationError, match="add all parameter groups to the inner optimizer before"):
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
        advance(model, optimizer, 0, 1)
        optimizer.inner.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
        with pytest.raises(ConfigurationError, match="add all parameter groups to the inner optimizer before"):
            optimizer.exchange()
        del optimizer.inner.param_groups[-1]
        with pytest.raises(ConfigurationError, match="before the first step"):
            optimizer.load_state_dict(state)
        other = LocalSteps(torch.optim.SGD([model.vector], lr=0.1), communicator=communicator)
        with pytest.raises(ConfigurationError, match="same model"):
            other.load_state_dict(optimizer.state_dict())

    SimulatedGroup(1).run(work)


@pytest.mark.parametrize(
    ("compressor", "options", "warns"),
    [
        (TopK(ratio=0.1), {}, True),
        (ChunkedTopK(), {}, True),
        (TwoLevel(TopK(ratio=0.1)), {}, True),
        (TopK(ratio=0.2), {}, False),
        (TopK(ratio=0.05), {"outer_momentum": 0.5}, False),
        (EFSignSGD(), {}, False),
    ],
)
def test_much_momentum_of_few_elements_is_warned_of(compressor: Any, options: dict[str, Any], warns: bool) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        train(lambda: Compression(compressor), steps=1, ranks=2, **options)
    messages = [str(one.message) for one in told if "outer momentum of 0.9" in str(one.message)]
    assert len(messages) == warns  # on rank 0


@pytest.mark.parametrize("unscales", [False, True], ids=["scaled", "unscaled"])
def test_with_a_loss_scaler_a_rank_leaves_out_its_own_steps_alone(unscales: bool) -> None:
    """Bit for bit what happens without a scaler where that rank has no gradients in the same step."""
    overflows = {(1, 0), (3, 0), (3, 1)}  # steps and ranks

    def trained(scaled: bool) -> Callable[[SimulatedCommunicator], tuple[dict[str, np.ndarray], float]]:
        def work(communicator: SimulatedCommunicator) -> tuple[dict[str, np.ndarray], float]:
            model = Model()
            compression = Compression(TopK(ratio=0.2))
            optimizer = LocalSteps(adamw(model), EVERY, compression=compression, communicator=communicator)
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=1000, enabled=scaled)
            for step in range(STEPS):
                optimizer.zero_grad()
                scaler.scale(model.loss(communicator.rank)).backward()
                if (step, communicator.rank) in overflows:
                    model.vector.grad[0] = torch.inf
                    if not scaled:
                        optimizer.zero_grad()
                if unscales:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
            return model.values(), scaler.get_scale()

        return work

    plain, scaled = (list(SimulatedGroup(RANKS).run(trained(one))) for one in (False, True))
    for rank, ((values, _), (same, scale)) in enumerate(zip(plain, scaled, strict=True)):
        assert all(np.array_equal(values[name], same[name]) for name in values)
        assert scale == 2.0 ** (12 - sum(rank == other for _, other in overflows)), "its own"
    assert all(np.array_equal(scaled[0][0][name], scaled[1][0][name]) for name in scaled[0][0])


def test_without_ranks_it_says_how_to_start_them() -> None:
    with pytest.raises(ConfigurationError, match="torchrun"):
        LocalSteps(sgd(Model()))


def test_an_exchange_of_ranks_that_are_in_sync_changes_nothing() -> None:
    def work(communicator: SimulatedCommunicator) -> None:
        model = Model()
        optimizer = LocalSteps(sgd(model), EVERY, communicator=communicator)
        advance(model, optimizer, communicator.rank, EVERY)
        before, steps = model.values(), optimizer.compression.ledger.steps
        optimizer.exchange()
        assert all((before[name] == value).all() for name, value in model.values().items())
        assert optimizer.compression.ledger.steps == steps

    SimulatedGroup(2).run(work)


def test_a_state_loaded_into_the_inner_optimizer_is_shared() -> None:
    def work(communicator: SimulatedCommunicator) -> None:
        model = Model()
        inner = sgd(model)
        optimizer = LocalSteps(inner, EVERY, communicator=communicator)
        inner.load_state_dict(inner.state_dict())
        assert optimizer.param_groups is inner.param_groups
        optimizer.param_groups[0]["lr"] = 0.001  # as a scheduler does
        assert inner.param_groups[0]["lr"] == 0.001

    SimulatedGroup(1).run(work)


def test_names_that_two_parameters_share_are_refused() -> None:
    def work(communicator: SimulatedCommunicator) -> None:
        groups = [{"params": list(model.named_parameters())} for model in (Model(), Model())]
        with pytest.raises(ConfigurationError, match=r"the same name: matrix, vector\. Use"):
            LocalSteps(torch.optim.SGD(groups, lr=RATE), communicator=communicator)

    SimulatedGroup(1).run(work)


def test_a_copy_says_that_it_exchanges_with_nobody() -> None:
    def work(communicator: SimulatedCommunicator) -> None:
        model = Model()
        other = pickle.loads(pickle.dumps(LocalSteps(sgd(model), communicator=communicator)))
        with pytest.raises(ConfigurationError, match="make a new LocalSteps from the inner optimizer"):
            other.step()

    SimulatedGroup(1).run(work)
