"""`LocalSteps.compressed` against its algorithm in plain NumPy: steps of the weights with error feedback."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hvdcomp import ChunkedTopK, Compressor, NoCompression  # noqa: E402
from hvdcomp.communicators import SimulatedCommunicator, SimulatedGroup  # noqa: E402
from hvdcomp.torch import LocalSteps, MuonWithAdamW  # noqa: E402
from tests.torch.local_steps.test_local_steps import (  # noqa: E402
    DIMENSIONS,
    RANKS,
    RATE,
    Model,
    adamw,
    advance,
    sgd,
    start_of,
    target_of,
)

STEPS = 8
SIGNS_OF_EIGHT = ChunkedTopK(chunk=8, k=1, values="sign")


def muon(model: Model) -> Any:
    groups = [{"params": [model.matrix], "use_muon": True}, {"params": [model.vector]}]
    return MuonWithAdamW(groups, lr=RATE)


def signs(x: np.ndarray) -> np.ndarray:
    return np.abs(x).mean() * np.where(x >= 0, 1, -1)


def one_of_eight(x: np.ndarray) -> np.ndarray:
    """The sign of the largest of each 8 neighbors in the last dimension; the magnitude is the mean of all these."""
    chunks = x.reshape(-1, 8)
    rows, places = np.arange(len(chunks)), np.abs(chunks).argmax(axis=1)
    largest = chunks[rows, places]
    sent = np.zeros_like(chunks)
    sent[rows, places] = np.abs(largest).mean() * np.where(largest >= 0, 1, -1)
    return sent.reshape(x.shape)


def eight_bits(x: np.ndarray) -> np.ndarray:
    scale = np.abs(x).max() / 127
    return np.rint(x / scale) * scale if scale else x


def stated(c: Callable[[np.ndarray], np.ndarray], name: str, every: int) -> np.ndarray:
    """y = e + (w - W), q = C(y), e = y - q, and w moves by the mean of q; inside, SGD."""
    w = start_of(name).astype(np.float64)
    kept = [np.zeros_like(w) for _ in range(RANKS)]
    for _ in range(STEPS // every):
        sent = []
        for rank in range(RANKS):
            own = w.copy()
            for _ in range(every):
                own -= RATE * (own - target_of(rank, name))
            y = kept[rank] + w - own
            sent.append(c(y))
            kept[rank] = y - sent[rank]
        w = w - sum(sent) / RANKS
    return w


def trained(
    inner: Callable[[Model], Any], every: int, compressor: Compressor | None = None, ranks: int = RANKS
) -> list[tuple[Model, LocalSteps, dict[str, np.ndarray]]]:
    """A model after `STEPS` steps on each rank, its optimizer, and how far each tensor's own steps went together."""

    def work(communicator: SimulatedCommunicator) -> tuple[Model, LocalSteps, dict[str, np.ndarray]]:
        model = Model()
        optimizer = LocalSteps.compressed(
            inner(model), every, compressor, model.named_parameters(), communicator=communicator
        )
        gone = {name: np.zeros(shape) for name, shape in DIMENSIONS.items()}
        before = model.values()

        def note(*_: Any) -> None:
            for name, value in model.values().items():
                gone[name] += before[name].astype(np.float64) - value

        optimizer.inner.register_step_post_hook(note)
        for _ in range(STEPS):
            before.update(model.values())
            advance(model, optimizer, communicator.rank, 1)
        return model, optimizer, gone

    return list(SimulatedGroup(ranks).run(work))


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize(("compressor", "c"), [(None, signs), (SIGNS_OF_EIGHT, one_of_eight)])
def test_it_is_the_algorithm(compressor: Compressor | None, c: Any, every: int) -> None:
    matrix, vector = stated(c, "matrix", every), stated(eight_bits, "vector", every)
    for model, _, _ in trained(sgd, every, compressor):
        np.testing.assert_allclose(model.values()["matrix"], matrix, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(model.values()["vector"], vector, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("inner", [adamw, muon])
def test_what_was_sent_and_what_is_kept_are_all_steps(inner: Any, every: int) -> None:
    results = trained(inner, every)
    weights = [model.values() for model, _, _ in results]
    for name in DIMENSIONS:
        kept = [
            optimizer.compression.state_dict()["own"]["residuals"][name]["arrays"][0] for _, optimizer, _ in results
        ]
        steps = [gone[name] for _, _, gone in results]
        sent = start_of(name) - weights[0][name].astype(np.float64)
        remaining = [gone - np.asarray(rest).reshape(gone.shape) for gone, rest in zip(steps, kept, strict=True)]
        assert np.abs(sent).max() > 0.01
        np.testing.assert_allclose(sent, sum(remaining) / RANKS, atol=2e-6)
        assert all(np.array_equal(weights[0][name], other[name]) for other in weights)


def test_with_an_exchange_after_each_step_the_ranks_are_always_equal() -> None:
    seen: list[list[bytes]] = [[] for _ in range(STEPS)]

    def work(communicator: SimulatedCommunicator) -> None:
        model = Model()
        optimizer = LocalSteps.compressed(muon(model), 1, communicator=communicator)
        for step in range(STEPS):
            advance(model, optimizer, communicator.rank, 1)
            assert optimizer.in_sync
            seen[step].append(model.matrix.detach().numpy().tobytes())

    SimulatedGroup(RANKS).run(work)
    assert all(len(set(step)) == 1 for step in seen)
    assert len({step[0] for step in seen}) == STEPS


def test_one_rank_without_compression_is_the_inner_optimizer() -> None:
    alone = Model()
    advance(alone, muon(alone), 0, STEPS)
    ((model, _, _),) = trained(muon, 1, NoCompression(), ranks=1)
    assert torch.equal(model.matrix, alone.matrix)
    assert torch.equal(model.vector, alone.vector)


def test_a_matrix_is_sent_in_signs_and_a_vector_in_bytes() -> None:
    (_, optimizer, _), *_ = trained(muon, 4)
    last = optimizer.compression.ledger.last
    assert last is not None
    matrix, vector = (int(np.prod(shape)) for shape in DIMENSIONS.values())
    assert {name: str(one) for name, one in optimizer.compression.plan.items()} == {
        "matrix": "efsignsgd",
        "vector": "int8",
    }
    costs = {name: cost.bytes_sent for part in last.parts for name, cost in part.items()}
    assert costs == {"matrix": matrix // 8 + 4, "vector": vector + 4}


@pytest.mark.parametrize("at", [3, 5])
def test_it_continues_bit_for_bit_within_a_round(at: int) -> None:
    def made(model: Model, communicator: SimulatedCommunicator) -> LocalSteps:
        return LocalSteps.compressed(muon(model), 4, SIGNS_OF_EIGHT, communicator=communicator)

    def whole(communicator: SimulatedCommunicator) -> Any:
        model = Model()
        optimizer = made(model, communicator)
        advance(model, optimizer, communicator.rank, at)
        saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
        advance(model, optimizer, communicator.rank, STEPS + 1 - at)
        optimizer.exchange()  # a last round of one step
        return saved, model.values()

    results = SimulatedGroup(RANKS).run(whole)

    def resumed(communicator: SimulatedCommunicator) -> dict[str, np.ndarray]:
        model = Model()
        optimizer = made(model, communicator)
        weights, state = results[communicator.rank][0]
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        advance(model, optimizer, communicator.rank, STEPS + 1 - at)
        optimizer.exchange()
        return model.values()

    for (_, expected), values in zip(results, SimulatedGroup(RANKS).run(resumed), strict=True):
        assert all(np.array_equal(expected[name], values[name]) for name in DIMENSIONS)
