"""What every compressor would send: previews beside the real thing."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from hvdcomp.adaptation.gradient_sums import error_energy
from hvdcomp.arrays import arrays_for
from hvdcomp.communicators.in_process import InProcessCommunicator, run_ranks
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.exchange.engine import Engine
from tests.harness import BACKENDS, EXAMPLES, SpyFeedback, as_numpy, densify, infos, make, run_engines, states_of, torch

every_backend = pytest.mark.parametrize("backend", BACKENDS)
MATRIX = (37, 29)  # nothing divides it


def numbers(x: Any) -> np.ndarray:
    return as_numpy(x).astype(np.float64)


def random_states() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state()[1].tolist(), torch and torch.get_rng_state().tolist()


@every_backend
@pytest.mark.parametrize("spec", EXAMPLES)
def test_a_preview_is_what_one_rank_then_sends_and_leaves_no_trace(spec: str, backend: str) -> None:
    """In three steps, so that random choices, residuals, warm starts and alternation are those of the step."""
    gradients = [np.random.default_rng(step).normal(size=MATRIX) for step in range(3)]
    spy = SpyFeedback()
    previews: list[Any] = []
    energies: list[tuple[float, float, float]] = []

    def look(xp: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
        x = inputs["w"]
        before = (states_of(engine), engine.step_number, engine.ledger.steps, as_numpy(x).tobytes(), random_states())
        twice = [engine.preview(xp, {"w": x}, engine.plan)["w"] for _ in range(2)]
        first, again = (densify(sent, MATRIX) for sent in twice)
        after = (states_of(engine), engine.step_number, engine.ledger.steps, as_numpy(x).tobytes(), random_states())
        assert before == after
        np.testing.assert_array_equal(first, again)
        previews.append(first)
        energy = xp.norm([x]) ** 2
        lost = float(error_energy(xp, x, energy, twice[0]))
        energies.append((float(energy), lost, float(np.sum((numbers(x) - first) ** 2))))
        return {}

    def before(made: Engine, step: int) -> None:
        nonlocal engine
        engine = made
        engine.before_compress = look

    engine: Engine
    run_engines(
        1, infos({"w": MATRIX}), parse_compressor(spec), lambda rank, step: {"w": make(backend, gradients[step])}, 3,
        before=before, memory=lambda: spy, seed=5,
    )  # fmt: skip
    assert len(previews) == 3
    if spec == "none":
        np.testing.assert_array_equal(previews, np.asarray(gradients, np.float32))
    else:
        for preview, kept in zip(previews, spy.log, strict=True):
            np.testing.assert_array_equal(preview, densify(kept.sent, MATRIX))
    for energy, lost, right in energies:
        assert abs(lost - right) <= 1e-5 * max(energy, right)


@every_backend
@pytest.mark.parametrize("spec", EXAMPLES)
def test_with_other_ranks_what_is_sent_is_the_preview_where_the_compressor_says_so(spec: str, backend: str) -> None:
    """On each of two ranks, bit for bit; where ranks act on each other's parts it is something else."""

    def work(communicator: InProcessCommunicator) -> bool:
        spy, same = SpyFeedback(), []
        engine = Engine(communicator, infos({"w": MATRIX}), parse_compressor(spec), memory=spy, seed=3, min_numel=0)

        def look(xp: Any, sent: Mapping[str, tuple[Any, Any]]) -> None:
            x, kept = sent["w"]
            preview = engine.preview(xp, {"w": x}, engine.plan)["w"]
            same.append(densify(preview, MATRIX).tobytes() == densify(kept, MATRIX).tobytes())

        engine.after_sent = look
        for step in range(3):
            values = np.random.default_rng([communicator.rank, step]).normal(size=MATRIX)
            engine.step({"w": make(backend, values)})
        assert len(same) == 3
        return all(same)

    assert run_ranks(2, work) == [parse_compressor(spec).sent_is_own] * 2


@every_backend
@pytest.mark.parametrize("spec", EXAMPLES)
def test_after_sent_sees_what_is_sent_before_memories_are_updated(spec: str, backend: str) -> None:
    """Also where `before_compress` has something else compressed in place of x."""

    def work(communicator: InProcessCommunicator) -> list[Any]:
        watched = communicator.rank == 0
        spy = SpyFeedback()
        engine = Engine(communicator, infos({"w": MATRIX}), parse_compressor(spec), memory=spy, seed=3, min_numel=0)
        seen: list[tuple[np.ndarray, np.ndarray]] = []

        def look(xp: Any, sent: Mapping[str, tuple[Any, Any]]) -> None:
            x, kept = sent["w"]
            seen.append((as_numpy(x), densify(kept, MATRIX)))
            assert states_of(engine) == before

        engine.before_compress = lambda xp, inputs: {"w": inputs["w"] * 0.5}
        engine.after_sent = look if watched else None
        results = []
        for step in range(3):
            before = states_of(engine)
            values = np.random.default_rng([step, communicator.rank]).normal(size=MATRIX)
            results.append(as_numpy(engine.step({"w": make(backend, values)})["w"]).tobytes())
        assert len(seen) == 3 * watched
        for kept, (x, sent) in zip(spy.log, seen, strict=False):
            np.testing.assert_array_equal(x, as_numpy(kept.x))
            np.testing.assert_array_equal(sent, densify(kept.sent, MATRIX))
        return results

    first, second = run_ranks(2, work)
    assert first == second


@every_backend
def test_a_preview_of_powersgd_starts_from_the_warm_columns_whatever_its_rank(backend: str) -> None:
    (run,) = run_engines(
        1, infos({"w": MATRIX}), parse_compressor("powersgd:rank=3"),
        lambda rank, step: {"w": make(backend, np.random.default_rng(step).normal(size=MATRIX))}, 2, seed=1,
    )  # fmt: skip
    (q,) = run.engine.states["w"].compressor
    x = make(backend, np.random.default_rng(9).normal(size=MATRIX))
    for rank in (1, 2, 3):
        sent = run.engine.preview(arrays_for(x), {"w": x}, {"w": parse_compressor(f"powersgd:rank={rank}")})["w"]
        m = numbers(x)
        start, _ = np.linalg.qr(numbers(q)[:, :rank])
        p, _ = np.linalg.qr(m @ start)
        np.testing.assert_allclose(as_numpy(sent), p @ (p.T @ m), atol=1e-4)
