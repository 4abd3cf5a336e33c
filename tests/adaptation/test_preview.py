"""What every compressor would send: previews beside the real thing."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest

from hvdcomp.adaptation.energies import Energies
from hvdcomp.adaptation.look import Look, observe
from hvdcomp.arrays import arrays_for
from hvdcomp.communicators import LoopbackCommunicator
from hvdcomp.communicators.in_process import InProcessCommunicator, run_ranks
from hvdcomp.compressors.memory import ErrorFeedback, Memory, MomentumCorrection, NoMemory
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.exchange.engine import Engine
from tests.harness import (
    BACKENDS,
    BACKENDS_AND_DTYPES,
    EXAMPLES,
    SpyFeedback,
    as_numpy,
    densify,
    infos,
    make,
    previews_of,
    run_engines,
    states_of,
    torch,
)

every_backend = pytest.mark.parametrize("backend", BACKENDS)
MATRIX = (37, 29)  # nothing divides it
SHAPES = {"w": MATRIX, "v": (5, 3)}


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

    def look(x_of: Look) -> dict[str, Any]:
        xp, x = x_of.xp, x_of["w"]
        before = (states_of(engine), engine.step_number, engine.ledger.steps, as_numpy(x).tobytes(), random_states())
        twice = [previews_of(engine).kept_alone(xp, {"w": x}, engine.plan, engine.context(""))["w"] for _ in range(2)]
        first, again = (densify(sent, MATRIX) for sent in twice)
        after = (states_of(engine), engine.step_number, engine.ledger.steps, as_numpy(x).tobytes(), random_states())
        assert before == after
        np.testing.assert_array_equal(first, again)
        previews.append(first)
        lost = previews_of(engine).lost(x_of, engine.plan, ["w"]).total()
        energies.append((x_of.energies(["w"]).total(), lost, np.sum((numbers(x) - first) ** 2)))
        return {}

    def before(made: Engine, step: int) -> None:
        nonlocal engine
        engine = made
        observe(engine, look)

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
        spy, previews, given = SpyFeedback(), [], []
        engine = Engine(communicator, infos({"w": MATRIX}), parse_compressor(spec), memory=spy, seed=3, min_numel=0)

        def look(x_of: Look) -> dict[str, Any]:
            previews.append(densify(previews_of(engine).kept(x_of, engine.plan, ["w"])["w"], MATRIX).tobytes())
            return {}

        observe(engine, look)
        for step in range(3):
            given.append(np.random.default_rng([communicator.rank, step]).normal(size=MATRIX))
            engine.step({"w": make(backend, given[-1])})
        if spec == "none":
            return previews == [np.float32(own).tobytes() for own in given]
        return previews == [densify(kept.sent, MATRIX).tobytes() for kept in spy.log]

    assert run_ranks(2, work) == [parse_compressor(spec).sent_is_own] * 2


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS_AND_DTYPES)
@pytest.mark.parametrize("clip", [0.0, 2.0])
def test_energies_of_the_gradients_alone_leave_out_what_the_memory_adds(clip: float, backend: str, dtype: str) -> None:
    """In buckets, and one by one; of the gradients as the memory takes them, clipped."""
    memory = MomentumCorrection(0.9, clip=clip)
    method = parse_compressor("topk:ratio=0.1")
    engine = Engine(LoopbackCommunicator(), infos(SHAPES, dtype), method, memory, min_numel=0)
    seen: list[tuple[dict[str, float], dict[str, float]]] = []

    def look(x_of: Look) -> dict[str, Any]:
        seen.append((x_of.gradient_energies(["w"]).numbers(), x_of.energies(["w"]).numbers()))
        return {}

    observe(engine, look)
    for step in range(3):
        random = np.random.default_rng(step)
        gradients = {name: make(backend, random.normal(size=shape), dtype) for name, shape in SHAPES.items()}
        given = {name: numbers(x) for name, x in gradients.items()}
        norm = math.sqrt(sum(np.sum(each**2) for each in given.values()))
        engine.begin()
        engine.step(gradients)
        alone, of_x = seen[-1]
        factor = min(1.0, clip / norm) if clip else 1.0
        assert alone == {"w": pytest.approx(factor**2 * np.sum(given["w"] ** 2), rel=1e-3)}
        assert (of_x["w"] > 1.1 * alone["w"]) == (step > 0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("memory", [NoMemory(), ErrorFeedback(0.5)])
@pytest.mark.parametrize("spec", [spec for spec in EXAMPLES if parse_compressor(spec).biased])
def test_what_a_step_tells_of_what_it_has_lost(spec: str, memory: Memory, backend: str) -> None:
    """It is what a preview loses, where this rank's C(x) follows from its x; and looking changes nothing."""

    def work(communicator: InProcessCommunicator) -> None:
        watched, plain = (
            Engine(communicator, infos(SHAPES), parse_compressor(spec), memory, min_numel=0) for _ in range(2)
        )
        sums: list[tuple[Energies, set[str], Energies]] = []

        def look(x_of: Look) -> dict[str, Any]:
            found, told = x_of.lost_when_sent(["w"])
            sums.append((found, told, previews_of(watched).lost(x_of, watched.plan, sorted(told))))
            assert found.total() == 0
            return {}

        observe(watched, look)
        for step in range(3):
            results = []
            for engine in (watched, plain):
                engine.begin()
                random = np.random.default_rng([communicator.rank, step])
                gradients = {name: make(backend, random.normal(size=shape)) for name, shape in SHAPES.items()}
                results.append([as_numpy(x).tobytes() for x in engine.step(gradients).values()])
            assert results[0] == results[1]
            assert states_of(watched) == states_of(plain)
            found, told, right = sums[-1]
            assert told <= {"w"}
            assert found.total() == pytest.approx(right.total(), rel=1e-9)
            assert bool(told) == (found.total() > 0)
        if not isinstance(memory, NoMemory) and parse_compressor(spec).sent_is_own:
            assert all(told for _, told, _ in sums)

    run_ranks(2, work)


@every_backend
def test_a_preview_of_powersgd_starts_from_the_warm_columns_whatever_its_rank(backend: str) -> None:
    (run,) = run_engines(
        1, infos({"w": MATRIX}), parse_compressor("powersgd:rank=3"),
        lambda rank, step: {"w": make(backend, np.random.default_rng(step).normal(size=MATRIX))}, 2, seed=1,
    )  # fmt: skip
    (q,) = run.engine.states["w"].compressor
    x = make(backend, np.random.default_rng(9).normal(size=MATRIX))
    for rank in (1, 2, 3):
        compressors = {"w": parse_compressor(f"powersgd:rank={rank}")}
        sent = previews_of(run.engine).kept_alone(arrays_for(x), {"w": x}, compressors, run.engine.context(""))["w"]
        m = numbers(x)
        start, _ = np.linalg.qr(numbers(q)[:, :rank])
        p, _ = np.linalg.qr(m @ start)
        np.testing.assert_allclose(as_numpy(sent), p @ (p.T @ m), atol=1e-4)
