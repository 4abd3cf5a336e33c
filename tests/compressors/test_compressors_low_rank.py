"""PowerSGD with several iterations or alternating factors, and ATOMO, against plain NumPy statements of the papers.

What PowerSGD does by default is tested in test_powersgd.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdcomp import ATOMO, ErrorFeedback, NoCompression, NoMemory, PowerSGD, SpecError
from hvdcomp.arrays import arrays_for, numpy_arrays
from hvdcomp.arrays.types import matrix_shape
from hvdcomp.compressors import Compressor
from hvdcomp.compressors.low_rank_sampling import sampled_triplets
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.compressors.protocol import Context, TensorInfo
from hvdcomp.compressors.randomness import rank_generator
from tests.harness import (
    BACKENDS,
    BACKENDS_AND_DTYPES,
    SpyFeedback,
    as_numpy,
    assert_same_on_all_ranks,
    bits,
    infos,
    make,
    run_engines,
    set_to,
    states_of,
)
from tests.lockstep import run_lockstep

ALTERNATING = PowerSGD(rank=2, alternating=True)
THRICE = PowerSGD(rank=2, iterations=3)
COMPRESSORS = [ALTERNATING, THRICE, ATOMO(rank=2)]
SHAPES = st.lists(st.integers(1, 7), min_size=0, max_size=4).map(tuple)


def random_gradients(
    shape: tuple[int, ...], backend: str = "numpy", dtype: str = "float32", seed: int = 0
) -> Callable[[int, int], dict[str, Any]]:
    """Standard normal gradients of one tensor, different on every rank and step."""

    def gradients(rank: int, step: int) -> dict[str, Any]:
        drawn = np.random.default_rng([seed, rank, step]).standard_normal(shape)
        return {"w": make(backend, drawn, dtype)}

    return gradients


def force(compressor: Compressor) -> Callable[[Any, int], None]:
    """Compresses even where the compressor would rather send the tensor dense."""
    return lambda engine, step: set_to(engine, compressor)


def first_state(compressor: Compressor, shape: tuple[int, ...], dtype: str) -> list[np.ndarray]:
    state = compressor.prepare(numpy_arrays, np.zeros(shape, dtype), (), Context("w", 0, 0, 0, 1))
    return [np.array(factor, np.float64) for factor in state]


def projection(matrix: np.ndarray) -> np.ndarray:
    """Onto the span of the columns; of rank-deficient columns too."""
    u, sigma, _ = np.linalg.svd(matrix, full_matrices=False)
    u = u[:, sigma > 1e-9 * max(sigma.max(), 1e-300)]
    return u @ u.T


# PowerSGD ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", [(6, 9), (8, 3, 2), (5, 1), (1, 5)])
def test_alternating_is_one_multiplication_with_the_last_factor(
    backend: str, ranks: int, shape: tuple[int, ...]
) -> None:
    gradients = random_gradients(shape, backend, "float64")
    runs = run_engines(ranks, infos({"w": shape}, "float64"), ALTERNATING, gradients, 6, before=force(ALTERNATING))
    assert_same_on_all_ranks(runs)
    q, p = first_state(ALTERNATING, shape, "float64")
    residuals = np.zeros((ranks, *matrix_shape(shape)))
    for step in range(6):
        x = np.array([as_numpy(gradients(rank, step)["w"]).reshape(matrix_shape(shape)) for rank in range(ranks)])
        x += residuals
        mean = x.mean(axis=0)
        if step % 2 == 0:
            result = mean @ projection(q)
            p = result @ q  # the columns of P; only their span matters
        else:
            result = projection(p) @ mean
            q = result.T @ p
        residuals = x - result
        for rank, run in enumerate(runs):
            np.testing.assert_allclose(as_numpy(run.results[step]["w"]).reshape(mean.shape), result, atol=1e-9)
            if step == 5:
                (kept,) = run.engine.states["w"].memory
                np.testing.assert_allclose(as_numpy(kept).reshape(mean.shape), residuals[rank], atol=1e-9)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("iterations", [1, 2, 4])
def test_iterations_are_repeated_power_iteration(backend: str, ranks: int, iterations: int) -> None:
    shape = (7, 10)
    compressor = PowerSGD(rank=2, iterations=iterations)
    gradients = random_gradients(shape, backend, "float64")
    runs = run_engines(
        ranks, infos({"w": shape}, "float64"), compressor, gradients, 3, before=force(compressor), memory=NoMemory
    )
    assert_same_on_all_ranks(runs)
    (q,) = first_state(compressor, shape, "float64")
    for step in range(3):
        mean = np.mean([as_numpy(gradients(rank, step)["w"]) for rank in range(ranks)], axis=0)
        for _ in range(iterations):
            p, _ = np.linalg.qr(mean @ q)
            q = mean.T @ p
        np.testing.assert_allclose(as_numpy(runs[0].results[step]["w"]), p @ q.T, atol=1e-9)


def low_rank_plus_noise(shape: tuple[int, int], rank: int) -> np.ndarray:
    generator = np.random.default_rng(5)
    left, right = generator.standard_normal((shape[0], rank)), generator.standard_normal((rank, shape[1]))
    return left @ right + 0.05 * generator.standard_normal(shape)


@pytest.mark.parametrize("backend", BACKENDS)
def test_alternating_converges_to_the_best_approximation_of_a_fixed_matrix(backend: str) -> None:
    matrix = low_rank_plus_noise((20, 30), 3)
    compressor = PowerSGD(rank=3, alternating=True)
    runs = run_engines(
        2,
        infos({"w": matrix.shape}),
        compressor,
        lambda rank, step: {"w": make(backend, matrix)},
        12,
        memory=NoMemory,
    )
    u, sigma, vt = np.linalg.svd(matrix, full_matrices=False)
    best = (u[:, :3] * sigma[:3]) @ vt[:3]
    errors = [np.linalg.norm(as_numpy(result["w"]) - matrix) for result in runs[0].results]
    assert errors[0] > 5 * np.linalg.norm(sigma[3:])
    assert errors[-1] == pytest.approx(np.linalg.norm(sigma[3:]), rel=1e-4)
    np.testing.assert_allclose(as_numpy(runs[0].results[-1]["w"]), best, atol=2e-3 * sigma[0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("compressor", [ALTERNATING, THRICE])
def test_error_feedback_sends_all_of_a_fixed_matrix_in_time(backend: str, compressor: Compressor) -> None:
    matrix = np.random.default_rng(1).standard_normal((12, 18))  # full rank: rank 2 alone would lose most of it
    steps = 300
    (run,) = run_engines(
        1, infos({"w": matrix.shape}), compressor, lambda rank, step: {"w": make(backend, matrix)}, steps
    )
    mean = sum(as_numpy(result["w"]).astype(np.float64) for result in run.results) / steps
    (residual,) = run.engine.states["w"].memory
    best = np.linalg.norm(np.linalg.svd(matrix, compute_uv=False)[2:])
    np.testing.assert_allclose(mean + as_numpy(residual) / steps, matrix, atol=1e-4)
    assert np.linalg.norm(mean - matrix) < 0.1 * best


def test_several_iterations_are_nearer_to_the_best_approximation() -> None:
    matrix = np.random.default_rng(2).standard_normal((20, 30))
    errors = []
    for iterations in (1, 2, 8):
        kind = PowerSGD(rank=3, iterations=iterations)
        (run,) = run_engines(1, infos({"w": matrix.shape}), kind, lambda r, s: {"w": matrix}, before=force(kind))
        errors.append(np.linalg.norm(run.results[0]["w"] - matrix))
    assert errors[0] > errors[1] > errors[2] > np.linalg.norm(np.linalg.svd(matrix, compute_uv=False)[3:])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_changed_rank_keeps_the_leading_columns_of_both_factors(backend: str) -> None:
    seen: list[list[np.ndarray]] = []
    levels = [3, 3, 2, 2, 4]

    def before(engine: Any, step: int) -> None:
        seen.append([as_numpy(factor) for factor in engine.states["w"].compressor])
        set_to(engine, replace(ALTERNATING, rank=levels[step]))

    shape = (9, 11)
    (run,) = run_engines(1, infos({"w": shape}), ALTERNATING, random_gradients(shape, backend), 5, before=before)
    seen.append([as_numpy(factor) for factor in run.engine.states["w"].compressor])
    for step, rank in enumerate(levels):
        q, p = seen[step + 1]
        assert q.shape == (11, rank)
        assert p.shape == (9, rank)
        old_q, old_p = seen[step] or first_state(replace(ALTERNATING, rank=3), shape, "float32")
        untouched, old = (q, old_q) if step % 2 == 0 else (p, old_p)
        common = min(rank, old.shape[1])
        np.testing.assert_array_equal(untouched[:, :common], old[:, :common].astype(np.float32))
    new_q = seen[-1][0][:, 2:]
    np.testing.assert_array_equal(new_q, first_state(replace(ALTERNATING, rank=4), shape, "float32")[0][:, 2:])


def test_alternating_can_be_switched_on_and_off() -> None:
    kinds = [PowerSGD(2), PowerSGD(2), ALTERNATING, ALTERNATING, PowerSGD(2)]
    shape = (9, 11)
    q_before: list[np.ndarray] = []

    def before(engine: Any, step: int) -> None:
        if step in (2, 4):
            q_before.append(engine.states["w"].compressor[0].copy())
        set_to(engine, kinds[step])

    def gradients(rank: int, step: int) -> dict[str, Any]:
        return {"w": np.zeros(shape, np.float32)} if step in (2, 4) else random_gradients(shape)(rank, step)

    (run,) = run_engines(1, infos({"w": shape}), PowerSGD(2), gradients, 5, before=before, memory=NoMemory)
    (q,) = run.engine.states["w"].compressor
    np.testing.assert_array_equal(q, q_before[1])  # a zero gradient leaves the factors alone, so q is what it was
    assert not np.array_equal(q_before[0], q_before[1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_one_gradient_does_not_cost_the_other_columns(backend: str) -> None:
    """Columns that one gradient leaves dependent must work again when the gradient has full rank."""
    thin = np.outer(np.arange(1.0, 10), np.arange(1.0, 12))
    full = np.random.default_rng(3).standard_normal((9, 11))
    (run,) = run_engines(
        1,
        infos({"w": (9, 11)}),
        ALTERNATING,
        lambda rank, step: {"w": make(backend, thin if step < 4 else full)},
        8,
        memory=NoMemory,
    )
    ranks = [np.linalg.matrix_rank(as_numpy(result["w"]), tol=1e-3) for result in run.results]
    assert ranks[1:4] == [1, 1, 1]
    assert ranks[-1] == 2
    np.testing.assert_allclose(as_numpy(run.results[1]["w"]), thin, rtol=1e-4)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"rank": 2, "iterations": 0}, "iterations=0"),
        ({"rank": 2, "iterations": 1.5}, "iterations=1.5"),
        ({"rank": 2, "alternating": 1}, "alternating=1"),
        ({"rank": 2, "alternating": True, "iterations": 2}, "iterations=2"),
    ],
)
def test_powersgd_refuses(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(SpecError, match=named):
        PowerSGD(**settings)


def test_specs_round_trip() -> None:
    for compressor in (*COMPRESSORS, PowerSGD(4), PowerSGD(3, min_rate=2.0, iterations=2)):
        assert parse_compressor(str(compressor)) == compressor
    assert parse_compressor("powersgd:rank=2,alternating=true") == ALTERNATING


def test_what_iterations_cost_decides_what_goes_dense() -> None:
    tensor = TensorInfo("w", (32, 32))
    assert PowerSGD(8).route(tensor) == PowerSGD(8)  # 512 of 1024 floats
    assert PowerSGD(8, iterations=2).route(tensor) == NoCompression()
    assert PowerSGD(16).route(tensor) == NoCompression()
    assert PowerSGD(16, alternating=True).route(tensor) == PowerSGD(16, alternating=True)
    assert ATOMO(15).route(tensor) == ATOMO(15)
    assert ATOMO(16).route(tensor) == NoCompression()


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS_AND_DTYPES)
@pytest.mark.parametrize("shape", [(5, 21), (7, 100), (144, 64)])
def test_atomo_gives_the_same_bits_wherever_a_gradient_lies(backend: str, dtype: str, shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(0).standard_normal(shape)
    size = values.size
    storage = make(backend, np.zeros(size + 256), dtype)
    xp, found = arrays_for(storage), set()
    for begin in [*range(32), *range(32, 257, 25)]:
        gradient = xp.reshape(storage[begin : begin + size], shape)
        gradient[...] = make(backend, values, dtype)
        exchanged = run_lockstep(ATOMO(rank=2), [gradient])
        found.add((bits(exchanged.outcomes[0].mean), *exchanged.payloads()))
    assert len(found) == 1


# Bytes, rounds, memory ---------------------------------------------------------------------------------------------


@given(SHAPES, st.integers(1, 5), st.integers(1, 3))
@settings(max_examples=40)
def test_payload_is_what_the_ledger_counts(shape: tuple[int, ...], rank: int, iterations: int) -> None:
    gradients = random_gradients(shape)
    rows, columns = matrix_shape(shape)
    columns_sent = min(rank, rows, columns)
    for compressor in (PowerSGD(rank, iterations=iterations), PowerSGD(rank, alternating=True), ATOMO(rank)):
        sent: list[int] = []

        def before(engine: Any, step: int, compressor: Compressor = compressor, sent: list[int] = sent) -> None:
            if step:
                sent.append(engine.ledger.last.tensors["w"].bytes_sent)
            set_to(engine, compressor)

        (run,) = run_engines(1, infos({"w": shape}), compressor, gradients, 4, before=before)
        before(run.engine, 4)
        if compressor == PowerSGD(rank, alternating=True):
            assert sent == [4 * rows * columns_sent, 4 * columns * columns_sent] * 2
        assert sum(sent) == 4 * compressor.payload_bytes(shape)
        assert compressor.payload_bytes(shape) == compressor.payload_bytes(shape, rank)
        assert compressor.payload_floats(shape) * 4 == compressor.payload_bytes(shape)
        assert run.engine.ledger.totals.floats_sent * 4 == sum(sent)


@given(SHAPES, st.floats(1, 200))
def test_a_level_costs_no_more_than_asked_for(shape: tuple[int, ...], factor: float) -> None:
    rows, columns = matrix_shape(shape)
    dense = 4 * rows * columns
    for compressor in COMPRESSORS:
        rank = compressor.level_for(factor, shape)
        assert isinstance(rank, int)
        assert 1 <= rank <= min(rows, columns)
        assert rank == 1 or compressor.payload_bytes(shape, rank) <= dense / factor
        if rank < min(rows, columns):
            assert compressor.payload_bytes(shape, rank + 1) > dense / factor


@pytest.mark.parametrize(
    ("compressor", "kinds"),
    [
        (ALTERNATING, ["allreduce mean"]),
        (PowerSGD(2, iterations=2), ["allreduce mean"] * 4),
        (ATOMO(2), ["allgather"]),
    ],
)
def test_collectives_of_a_step(compressor: Compressor, kinds: list[str]) -> None:
    shape = (9, 11)
    runs = run_engines(2, infos({"w": shape}), compressor, random_gradients(shape), 3, before=force(compressor))
    for run in runs:
        assert [started[0] for started in run.engine.communicator.started] == kinds * 3


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS_AND_DTYPES)
@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_zeros_stay_zeros_and_are_no_dead_end(backend: str, dtype: str, compressor: Compressor) -> None:
    shape = (6, 8)
    matrix = np.outer(np.arange(1.0, 7), np.ones(8))

    def gradients(rank: int, step: int) -> dict[str, Any]:
        return {"w": make(backend, matrix if step in (2, 5, 6) else np.zeros(shape), dtype)}

    runs = run_engines(
        2, infos({"w": shape}, dtype), compressor, gradients, 7, before=force(compressor), memory=NoMemory
    )
    for step in (0, 1, 3, 4):
        assert (as_numpy(runs[0].results[step]["w"]) == 0).all()
    for step in (2, 5):
        assert (as_numpy(runs[0].results[step]["w"]) != 0).any()
    # Rank one is well within rank two: once each factor was computed, nothing is lost.
    np.testing.assert_allclose(as_numpy(runs[0].results[6]["w"]), matrix, rtol=2e-2 if "16" in dtype else 1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("compressor", [*COMPRESSORS, ATOMO(50), PowerSGD(50, alternating=True)])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (1, 9), (9, 1), (1, 1), (3, 2, 2), (2, 1, 1, 3)])
def test_any_shape(backend: str, compressor: Compressor, shape: tuple[int, ...]) -> None:
    gradients = random_gradients(shape, backend)
    runs = run_engines(2, infos({"w": shape}), compressor, gradients, 4, before=force(compressor), memory=NoMemory)
    assert_same_on_all_ranks(runs)
    for step in range(4):
        result = as_numpy(runs[0].results[step]["w"])
        assert result.shape == shape
        assert np.isfinite(result).all()
        # Even steps keep what lies in the span of Q, odd steps what lies in that of P: all, where the span is full.
        full = matrix_shape(shape)[1 - step % 2] == min(matrix_shape(shape))
        if compressor.level == 50 and (full or isinstance(compressor, ATOMO)):
            mean = np.mean([as_numpy(gradients(rank, step)["w"]) for rank in range(2)], axis=0)
            np.testing.assert_allclose(result, mean, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("compressor", COMPRESSORS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_gradient_that_is_not_finite_spoils_nothing(backend: str, compressor: Compressor) -> None:
    shape = (6, 8)
    states = []

    def gradients(rank: int, step: int) -> dict[str, Any]:
        drawn = random_gradients(shape)(rank, step)["w"]
        if step in (1, 2) and rank == 1:
            drawn[2, 3] = np.nan
        return {"w": make(backend, drawn)}

    def before(engine: Any, step: int) -> None:
        set_to(engine, compressor)
        if engine.communicator.rank == 0:
            states.append((states_of(engine), engine.ledger.totals.bytes_sent))

    runs = run_engines(2, infos({"w": shape}), compressor, gradients, 5, before=before, memory=ErrorFeedback)
    for run in runs:
        for step, result in enumerate(run.results):
            assert np.isnan(as_numpy(result["w"])).any() == (step in (1, 2))
    assert states[1][0] == states[2][0] == states[3][0] != states[4][0]
    assert states[3][1] - states[1][1] == states[4][1] - states[2][1]  # bytes of one even and one odd step


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("compressor", COMPRESSORS)
@pytest.mark.parametrize("magnitude", [1e30, 3e38, 1e-30, 1e-44])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_extreme_values_do_not_raise(backend: str, compressor: Compressor, magnitude: float) -> None:
    gradient = np.full((6, 8), magnitude)
    run_engines(
        1, infos({"w": (6, 8)}), compressor, lambda r, s: {"w": make(backend, gradient)}, 2, before=force(compressor)
    )


# ATOMO -------------------------------------------------------------------------------------------------------------


def paper_probabilities(sigma: np.ndarray, budget: int) -> np.ndarray:
    """Algorithm 1 of the paper, for values in descending order."""
    p = np.zeros(len(sigma))
    s: float = budget
    for i in range(len(sigma)):
        if sigma[i] * s <= sigma[i:].sum():
            total = sigma[i:].sum()
            p[i:] = sigma[i:] * s / total if total > 0 else 0
            break
        p[i] = 1
        s -= 1
    return p


def paper_atomo(matrix: np.ndarray, rank: int, offset: float) -> np.ndarray:
    """The chosen triplets over their probabilities, from a singular value decomposition in double precision."""
    u, sigma, vt = np.linalg.svd(matrix.astype(np.float64), full_matrices=False)
    p = paper_probabilities(sigma, min(rank, len(sigma)))
    result = np.zeros(matrix.shape)
    end = 0.0
    for i in range(len(sigma)):
        begin, end = end, end + p[i]
        if np.floor(end - offset) > np.floor(begin - offset):  # a point offset + whole number lies in [begin, end)
            result += sigma[i] / p[i] * np.outer(u[:, i], vt[i])
    return result


# No positive one vanishes beside the others' sum: those are rounding errors, and drawn with another probability.
SIGMAS = st.lists(st.floats(1e-4, 100) | st.just(0.0), min_size=1, max_size=8).map(
    lambda values: np.array(sorted(values)[::-1])
)


@given(SIGMAS, st.data())
@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=40)
def test_atomo_draws_with_the_probabilities_of_the_paper(backend: str, sigma: np.ndarray, data: st.DataObject) -> None:
    """Over all offsets (a fine grid of them), each triplet is drawn as often as the paper says, and weighs 1 / p."""
    count = data.draw(st.integers(1, len(sigma)))
    expected = paper_probabilities(sigma, count)
    like = make(backend, sigma, "float64")
    grid = 100
    drawn = np.zeros(len(sigma))
    for i in range(grid):
        chosen, weights = map(as_numpy, sampled_triplets(arrays_for(like), like, count, (i + 0.5) / grid))
        assert chosen.shape == weights.shape == (count,)
        real = weights > 0
        assert len(set(chosen[real])) == real.sum()
        np.testing.assert_allclose(weights[real], 1 / expected[chosen[real]], rtol=1e-6)
        drawn[chosen[real]] += 1
    np.testing.assert_allclose(drawn / grid, expected, atol=2 / grid)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (5, 2, 3), (1, 7), (7, 1)])
def test_atomo_is_the_mean_of_what_the_ranks_drew(backend: str, ranks: int, shape: tuple[int, ...]) -> None:
    compressor = ATOMO(2)
    gradients = random_gradients(shape, backend)
    runs = run_engines(ranks, infos({"w": shape}), compressor, gradients, 3, before=force(compressor), seed=4)
    assert_same_on_all_ranks(runs)
    for step in range(3):
        expected = np.zeros(matrix_shape(shape))
        for rank in range(ranks):
            offset = rank_generator(Context("w", step, 4, rank, ranks), "atomo").random()
            matrix = as_numpy(gradients(rank, step)["w"]).reshape(matrix_shape(shape))
            expected += paper_atomo(matrix, 2, offset) / ranks
        np.testing.assert_allclose(as_numpy(runs[0].results[step]["w"]), expected.reshape(shape), atol=2e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_atomo_is_unbiased_and_as_accurate_as_the_paper_says(backend: str) -> None:
    """Over 2000 steps of one gradient, by tests that a right implementation with other seeds would fail with
    probability 1e-5 (error of the mean, in 10 directions, each beyond 5 standard errors: 6e-7 each) and about 1e-6
    (mean squared error beyond 5 standard errors)."""
    matrix = np.random.default_rng(7).standard_normal((6, 10)) @ np.diag(2.0 ** -np.arange(10))
    steps, rank = 2000, 3
    gradient = make(backend, matrix)
    (run,) = run_engines(
        1, infos({"w": matrix.shape}), ATOMO(rank), lambda r, s: {"w": gradient}, steps, before=force(ATOMO(rank))
    )
    errors = np.array([as_numpy(result["w"]) - matrix for result in run.results])
    directions = np.random.default_rng(8).standard_normal((10, *matrix.shape))
    along = np.einsum("sij,dij->ds", errors, directions)
    assert (np.abs(along.mean(axis=1)) < 5 * along.std(axis=1) / np.sqrt(steps)).all()
    squared = (errors**2).sum(axis=(1, 2))
    sigma = np.linalg.svd(matrix, compute_uv=False)
    variance = (sigma**2 * (1 / paper_probabilities(sigma, rank) - 1)).sum()
    assert abs(squared.mean() - variance) < 5 * squared.std() / np.sqrt(steps)
    assert np.std(squared) > 0


def test_atomo_ranks_and_steps_draw_for_themselves() -> None:
    gradient = np.random.default_rng(9).standard_normal((8, 8)).astype(np.float32)
    runs = run_engines(2, infos({"w": (8, 8)}), ATOMO(1), lambda rank, step: {"w": gradient}, 20, memory=SpyFeedback)
    assert isinstance(runs[0].engine.memory, SpyFeedback)
    first, second = ([as_numpy(kept.sent) for kept in run.engine.memory.log] for run in runs)
    assert sum(not np.allclose(a, b) for a, b in zip(first, second, strict=True)) > 5
    alone = run_engines(1, infos({"w": (8, 8)}), ATOMO(1), lambda rank, step: {"w": gradient}, 20)[0].results
    assert len({result["w"].tobytes() for result in alone}) > 3


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS_AND_DTYPES)
def test_atomo_with_every_triplet_loses_nothing(backend: str, dtype: str) -> None:
    shape = (5, 8)
    gradients = random_gradients(shape, backend, dtype)
    (run,) = run_engines(1, infos({"w": shape}, dtype), ATOMO(5), gradients, 3, before=force(ATOMO(5)))
    tolerance = {"float64": 1e-12, "float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}[dtype]
    for step, result in enumerate(run.results):
        np.testing.assert_allclose(
            as_numpy(result["w"]), as_numpy(gradients(0, step)["w"]), rtol=tolerance, atol=tolerance
        )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("values", [np.ones((6, 8)), np.outer(np.arange(6), np.arange(8)), np.eye(6, 8)[:, ::-1] * 0.3])
def test_atomo_of_rank_deficient_and_constant_gradients(backend: str, values: np.ndarray) -> None:
    """As many triplets as the gradient has are exact; with fewer, what is sent keeps the sum of the probabilities."""
    rank = int(np.linalg.matrix_rank(values))
    for count in {rank, 2}:
        kind = ATOMO(count)
        (run,) = run_engines(
            1, infos({"w": (6, 8)}), kind, lambda r, s: {"w": make(backend, values)}, 3, before=force(kind)
        )
        for result in run.results:
            if count >= rank:
                np.testing.assert_allclose(as_numpy(result["w"]), values, atol=1e-4)
            else:
                assert np.linalg.matrix_rank(as_numpy(result["w"]), tol=1e-4) == count


def test_atomo_refuses() -> None:
    for rank in (0, -1, 1.5, True):
        with pytest.raises(SpecError, match=f"rank={rank}"):
            ATOMO(rank)  # type: ignore[arg-type]
    assert not ATOMO(2).biased
    assert ATOMO(2).default_memory == NoMemory()


# The array functions that ATOMO brought ----------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_array_functions(backend: str) -> None:
    x = make(backend, np.random.default_rng(0).standard_normal((5, 5)), "float64")
    xp = arrays_for(x)
    symmetric = as_numpy(x) @ as_numpy(x).T
    # Of a gradient of a small network, for which MKL's iteration in single precision does not converge.
    hard = np.load(Path(__file__).parents[1] / "data" / "eigh_does_not_converge.npz")["matrix"]
    vectors = as_numpy(xp.eigenvectors(make(backend, symmetric, "float64")))
    np.testing.assert_allclose(vectors @ vectors.T, np.eye(5), atol=1e-12)
    diagonal = np.diag(vectors @ symmetric @ vectors.T)
    np.testing.assert_allclose(vectors @ symmetric @ vectors.T, np.diag(diagonal), atol=1e-12)
    assert (np.diff(diagonal) < 0).all()
    vectors = as_numpy(xp.eigenvectors(make(backend, hard, "float32")))
    np.testing.assert_allclose(vectors @ vectors.T, np.eye(len(hard)), atol=1e-5)
    broken = make(backend, [np.nan, 1.5, np.inf, -np.inf, -2.0])
    assert as_numpy(xp.finite_or_zero(broken)).tolist() == [0, 1.5, 0, 0, -2]
    bounds = make(backend, [0.5, 0.5, 2.0], "float64")
    points = make(backend, [0.0, 0.5, 1.99, 2.0, 7.0], "float64")
    assert as_numpy(xp.interval_index(bounds, points)).tolist() == [0, 2, 2, 2, 2]
    assert as_numpy(points.cumsum(0)).tolist() == [0, 0.5, 2.49, 4.49, 11.49]
