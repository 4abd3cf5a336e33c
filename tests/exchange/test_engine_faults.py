"""Gradients that are not finite, or do not stay so: all ranks see it, and nothing that is kept is touched."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvdcomp import ErrorFeedback
from hvdcomp.communicators.in_process import run_ranks
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.exchange.engine import Engine
from tests.harness import BACKENDS, SPECS, Run, as_numpy, bits, infos, make, replaced, run_engines, states_of

SHAPES = {"conv": (4, 3, 2, 2), "linear": (6, 8), "bias": (6,), "scale": ()}
# NumPy warns where infinities meet; these tests want them to.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
every_spec = pytest.mark.parametrize("spec", SPECS)
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def gradients_of(backend: str, rank: int, step: int) -> dict[str, Any]:
    rng = np.random.default_rng([rank, step])
    return {name: make(backend, rng.normal(size=shape)) for name, shape in SHAPES.items()}


def results_of(run: Run) -> list[dict[str, bytes]]:
    return [{name: bits(x) for name, x in step.items()} for step in run.results]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("size", [1, 3])
@every_spec
@every_backend
def test_a_non_finite_gradient_reaches_all_ranks_and_no_state(backend: str, spec: str, size: int, bad: float) -> None:
    """Step 2 holds one bad element in one tensor of one rank; the others then go on as if it had not been."""
    compressor = parse_compressor(spec)

    def work(communicator: Any, fault: bool) -> Run:
        engine = Engine(communicator, infos(SHAPES), compressor, min_numel=0, min_ndim=0, memory=ErrorFeedback())
        results = []
        for step in range(5):
            gradients = gradients_of(backend, communicator.rank, step)
            if step != 2:
                results.append(engine.step(gradients))
            elif not fault:
                engine.step_number += 1  # what RandomK draws depends on it
            else:
                if communicator.rank == size - 1:
                    gradients["linear"] = replaced(gradients["linear"], (3, 5), bad)
                before = states_of(engine)
                spoiled = engine.step(gradients)
                assert set(spoiled) == set(SHAPES)
                for name, result in spoiled.items():
                    assert np.isnan(as_numpy(result)).any(), name
                    assert tuple(result.shape) == SHAPES[name]
                assert states_of(engine) == before
        return Run(engine, results)

    faulty = run_ranks(size, lambda communicator: work(communicator, True))
    clean = run_ranks(size, lambda communicator: work(communicator, False))
    for one, other in zip(faulty, clean, strict=True):
        assert results_of(one) == results_of(other)
        assert states_of(one.engine) == states_of(other.engine)
    assert all(np.isfinite(as_numpy(x)).all() for result in faulty[0].results for x in result.values())


@every_spec
@every_backend
def test_a_non_finite_first_step_and_a_non_finite_flush(backend: str, spec: str) -> None:
    """Nothing is kept of a first step that failed, and a dense step that failed has not sent the residual."""
    values = [np.full((4, 4), np.nan), np.arange(16.0).reshape(4, 4), np.full((4, 4), np.inf), np.zeros((4, 4))]
    plans = [spec, spec, "none", "none"]

    def plan(engine: Engine, step: int) -> None:
        engine.set_plan({"w": parse_compressor(plans[step])})

    (run,) = run_engines(
        1, infos({"w": (4, 4)}), parse_compressor(spec), lambda r, s: {"w": make(backend, values[s])}, 4,
        before=plan, memory=ErrorFeedback,
    )  # fmt: skip
    assert np.isnan(as_numpy(run.results[0]["w"])).any()
    assert np.isnan(as_numpy(run.results[2]["w"])).any()
    np.testing.assert_allclose(as_numpy(run.results[1]["w"]) + as_numpy(run.results[3]["w"]), values[1], atol=1e-5)
    assert not run.engine.has_residuals


@every_backend
def test_finite_gradients_that_half_precision_cannot_hold(backend: str) -> None:
    """fp16 makes 70000 infinite: the step then counts as non-finite on all ranks, and error feedback is unharmed."""
    values = [np.full(4, 1.0001), np.array([1.0, 70000, 1, 1]), np.full(4, 1.0001)]
    runs = run_engines(
        2, infos({"w": (4,), "v": (3,)}), parse_compressor("fp16"),
        lambda r, s: {"w": make(backend, values[s] if r else values[0]), "v": make(backend, np.ones(3))}, 3,
        memory=ErrorFeedback,
    )  # fmt: skip
    for run in runs:
        assert np.isnan(as_numpy(run.results[1]["w"])).any()
        assert np.isnan(as_numpy(run.results[1]["v"])).any()
        np.testing.assert_allclose(as_numpy(run.results[2]["w"]), 1.0001, atol=1e-3)
        np.testing.assert_allclose(as_numpy(run.engine.states["w"].memory[0]), 0, atol=1e-3)


@pytest.mark.parametrize("spec", ["topk:ratio=0.3", "randomk:ratio=0.3"])
@every_backend
def test_a_sum_with_the_residual_that_overflows_is_not_kept(backend: str, spec: str) -> None:
    """Gradients near the largest number: gradient and residual are finite, but not their sum."""
    g = np.full((4, 4), 2e38) * np.sign(np.random.default_rng(0).normal(size=(4, 4)))
    factors = [1, 1, 0]
    (run,) = run_engines(
        1, infos({"w": (4, 4)}), parse_compressor(spec),
        lambda r, s: {"w": make(backend, g * factors[s])}, 3, memory=ErrorFeedback,
        before=lambda engine, step: engine.set_plan({"w": parse_compressor(spec)}),
    )  # fmt: skip
    assert np.isfinite(as_numpy(run.results[0]["w"])).all()
    assert np.isnan(as_numpy(run.results[1]["w"])).any()
    assert np.isfinite(as_numpy(run.results[2]["w"])).all()
    assert np.isfinite(as_numpy(run.engine.states["w"].memory[0])).all()
