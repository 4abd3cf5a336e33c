"""PowerSGD against algorithm 1 of its paper in NumPy, and against PyTorch's own implementation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdcomp import ErrorFeedback, NoCompression, NoMemory, PowerSGD, SpecError
from hvdcomp.arrays import arrays_for
from hvdcomp.arrays.types import matrix_shape
from hvdcomp.communicators.in_process import run_ranks
from hvdcomp.compressors.low_rank import orthogonalize
from hvdcomp.compressors.protocol import Context, TensorInfo
from hvdcomp.exchange.engine import Engine
from hvdcomp.exchange.tensor_state import TensorState
from tests.harness import (
    BACKENDS,
    BACKENDS_AND_DTYPES,
    Run,
    SpyFeedback,
    as_numpy,
    assert_same_on_all_ranks,
    bits,
    dtype_of,
    infos,
    make,
    run_engines,
    set_to,
)

TOLERANCE = {"float16": 2e-2, "bfloat16": 1e-1, "float32": 2e-4, "float64": 1e-9}


def gradient_of(shape: tuple[int, ...], rank: int, step: int) -> np.ndarray:
    """A matrix with a spectrum that falls off, as gradients have, and noise of each rank's own."""
    rows, columns = matrix_shape(shape)
    common = np.random.default_rng([3, step]).normal(size=(rows, 3))
    common = common @ np.random.default_rng(5).normal(size=(3, columns))
    return (common + 0.3 * np.random.default_rng([rank, step]).normal(size=(rows, columns))).reshape(shape)


def oracle(start: np.ndarray, gradients: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Algorithm 1 of Vogels et al. 2019 with error feedback, for gradients (rank, step, rows, columns)."""
    q = start
    residuals = np.zeros_like(gradients[:, 0])
    results = []
    for step in range(gradients.shape[1]):
        x = gradients[:, step] + residuals
        p = np.linalg.qr(np.mean(x @ np.linalg.qr(q)[0], axis=0))[0]
        q = np.mean(np.swapaxes(x, 1, 2) @ p, axis=0)
        results.append(p @ q.T)
        residuals = x - results[-1]
    return np.array(results), residuals


def begin_from(start: np.ndarray, backend: str, dtype: str) -> Any:
    """Gives an engine its first Q."""

    def before(engine: Engine, step: int) -> None:
        if step == 0:
            for name in engine.tensors:
                engine.states[name] = TensorState(method="powersgd", compressor=(make(backend, start, dtype),))

    return before


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("rank", [1, 2, 4])
@pytest.mark.parametrize(("backend", "dtype"), BACKENDS_AND_DTYPES)
def test_algorithm_1(backend: str, dtype: str, rank: int, size: int) -> None:
    shape, steps = (8, 3, 5), 5
    wide = "float64" if dtype == "float64" else "float32"
    gradients = np.array([[gradient_of(shape, r, s) for s in range(steps)] for r in range(size)])
    gradients = as_numpy(make(backend, gradients, dtype)).astype(float)  # as rounded to the element type
    start = np.random.default_rng(11).normal(size=(15, rank))
    runs = run_engines(
        size, infos({"w": shape}, dtype), PowerSGD(rank),
        lambda r, s: {"w": make(backend, gradients[r, s], dtype)}, steps, before=begin_from(start, backend, wide),
    )  # fmt: skip
    assert_same_on_all_ranks(runs)
    expected, residuals = oracle(start, gradients.reshape(size, steps, 8, 15))
    tolerance = TOLERANCE[dtype] * 5
    for step in range(steps):
        result = runs[0].results[step]["w"]
        assert dtype_of(result) == dtype
        np.testing.assert_allclose(as_numpy(result), expected[step].reshape(shape), rtol=0, atol=tolerance)
    for r, run in enumerate(runs):
        assert run.engine.planner.memory_for(PowerSGD(rank)) == ErrorFeedback()
        kept = as_numpy(run.engine.states["w"].memory[0])
        np.testing.assert_allclose(kept, residuals[r].reshape(shape), rtol=0, atol=tolerance)


@pytest.fixture(scope="module")
def torch_recordings(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What two processes with torch's DDP and PowerSGD hook saw, by (matrix rank, dtype)."""
    torch = pytest.importorskip("torch")
    from tests import torch_powersgd

    folder = tmp_path_factory.mktemp("torch_powersgd")
    cases = [(1, "float64"), (2, "float64"), (4, "float64"), (2, "float32")]
    torch.multiprocessing.spawn(
        torch_powersgd.record, args=(str(folder), cases), nprocs=torch_powersgd.WORLD_SIZE, join=True
    )
    return [torch.load(Path(folder, f"rank{rank}.pt")) for rank in range(torch_powersgd.WORLD_SIZE)]


@pytest.mark.parametrize(("rank", "dtype"), [(1, "float64"), (2, "float64"), (4, "float64"), (2, "float32")])
def test_agrees_with_torch_over_20_steps(torch_recordings: list[dict], rank: int, dtype: str) -> None:
    recordings = [recording[rank, dtype] for recording in torch_recordings]
    shapes = {name: tuple(gradient.shape) for name, gradient in recordings[0]["gradients"][0].items()}
    compressed = [name for name in recordings[0]["order"] if len(shapes[name]) == 2]

    def work(communicator: Any) -> Run:
        mine = recordings[communicator.rank]
        engine = Engine(communicator, infos(shapes, dtype), PowerSGD(rank), min_numel=0)
        assert [engine.plan[name] for name in sorted(shapes)] == [NoCompression(), PowerSGD(rank), PowerSGD(rank)]
        q, error = mine["start"]["q"], mine["start"]["error"]
        for name in mine["order"]:
            rows, columns = matrix_shape(shapes[name])
            residual, error = error[: rows * columns].view(shapes[name]), error[rows * columns :]
            if name in compressed:
                start, q = q[: columns * rank].view(columns, rank), q[columns * rank :]
                engine.states[name] = TensorState((residual.clone(),), ErrorFeedback(), "powersgd", (start.clone(),))
        assert len(q) == len(error) == 0
        return Run(engine, [engine.step(gradients) for gradients in mine["gradients"]])

    runs = run_ranks(len(recordings), work)
    assert_same_on_all_ranks(runs)
    tolerance = 1e-8 if dtype == "float64" else 5e-4  # the last bits grow from step to step
    assert len(runs[0].results) == 20
    for step, result in enumerate(runs[0].results):
        for name in shapes:
            theirs = recordings[0]["results"][step][name]
            np.testing.assert_allclose(
                as_numpy(result[name]), as_numpy(theirs), rtol=0, atol=tolerance * float(theirs.abs().max())
            )
    for run, mine in zip(runs, recordings, strict=True):
        end = 0
        for name in mine["order"]:
            start, end = end, end + int(np.prod(shapes[name]))
            if name in compressed:
                theirs = mine["error"][start:end].view(shapes[name])
                ours = run.engine.states[name].memory[0]
                np.testing.assert_allclose(
                    as_numpy(ours), as_numpy(theirs), rtol=0, atol=tolerance * float(theirs.abs().max())
                )


@pytest.mark.parametrize("true_rank", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_matrix_of_low_rank_arrives_whole(backend: str, dtype: str, true_rank: int) -> None:
    """Every rank of matrix up to that of the compressor, in turns, so that columns of Q fall empty and come back."""
    rng = np.random.default_rng(0)
    matrices = [rng.normal(size=(9, r)) @ rng.normal(size=(r, 7)) for r in (true_rank, 1, true_rank, 3, 1, 3, 2)]
    (run,) = run_engines(
        1, infos({"w": (9, 7)}, dtype), PowerSGD(3), lambda r, s: {"w": make(backend, matrices[s], dtype)},
        len(matrices), memory=NoMemory, before=lambda engine, step: set_to(engine, PowerSGD(3)),
    )  # fmt: skip
    for result, matrix in zip(run.results, matrices, strict=True):
        np.testing.assert_allclose(as_numpy(result["w"]), matrix, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("shape", [(), (1,), (5,), (1, 6), (6, 1), (2, 2), (3, 2, 2)])
@pytest.mark.parametrize(("backend", "dtype"), BACKENDS_AND_DTYPES)
def test_full_rank_and_above_is_exact(backend: str, dtype: str, shape: tuple[int, ...]) -> None:
    g = as_numpy(make(backend, gradient_of(shape, 0, 0), dtype))
    runs = run_engines(
        2, infos({"w": shape}, dtype), PowerSGD(8), lambda r, s: {"w": make(backend, g * (1 - r), dtype)}, 2,
        before=lambda engine, step: set_to(engine, PowerSGD(8)),
    )  # fmt: skip
    assert_same_on_all_ranks(runs)
    for result in runs[0].results:
        np.testing.assert_allclose(as_numpy(result["w"]), g / 2, rtol=0, atol=TOLERANCE[dtype] * 3)


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS_AND_DTYPES)
def test_zero_gradients_give_zero_and_do_not_stop_what_follows(backend: str, dtype: str) -> None:
    g = gradient_of((6, 8), 0, 0)
    low = np.linalg.svd(g)
    g = low.U[:, :2] * low.S[:2] @ low.Vh[:2]
    factors = [0, 0, 1, 0, 0, 0, 1]
    (run,) = run_engines(
        1, infos({"w": (6, 8)}, dtype), PowerSGD(2), lambda r, s: {"w": make(backend, g * factors[s], dtype)},
        len(factors), memory=NoMemory,
    )  # fmt: skip
    for factor, result in zip(factors, run.results, strict=True):
        np.testing.assert_allclose(as_numpy(result["w"]), g * factor, rtol=0, atol=TOLERANCE[dtype] * 5 * factor)
    assert np.isfinite(as_numpy(run.engine.states["w"].compressor[0])).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_constant_and_duplicate_columns_are_no_nan(backend: str) -> None:
    tensors = {"ones": np.ones((6, 8)), "one row": np.eye(6, 8)[:1].repeat(6, 0), "one element": np.eye(6, 8) * 0}
    tensors["one element"][2, 3] = 5
    (run,) = run_engines(
        1, infos(dict.fromkeys(tensors, (6, 8))), PowerSGD(3),
        lambda r, s: {name: make(backend, value) for name, value in tensors.items()}, 4,
        before=lambda engine, step: set_to(engine, PowerSGD(3)),
    )  # fmt: skip
    for name, value in tensors.items():
        np.testing.assert_allclose(as_numpy(run.results[0][name]), value, atol=1e-5)
        np.testing.assert_allclose(as_numpy(run.results[-1][name]), value, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_orthogonalize(backend: str, dtype: str) -> None:
    matrix = np.random.default_rng(0).normal(size=(20, 5))
    matrix[:, 2] = matrix[:, 0] - 2 * matrix[:, 1]
    matrix[:, 4] = 0
    x = make(backend, matrix, dtype)
    result = orthogonalize(arrays_for(x), x)
    assert bits(x) == bits(make(backend, matrix, dtype))
    gram = as_numpy(result).T @ as_numpy(result)
    np.testing.assert_allclose(gram, np.diag([1, 1, 0, 1, 0]), atol=1e-5 if dtype == "float32" else 1e-12)
    onto = as_numpy(result) @ (as_numpy(result).T @ matrix)
    np.testing.assert_allclose(onto, matrix, atol=1e-4 if dtype == "float32" else 1e-12)  # same span


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_change_of_rank_keeps_the_leading_columns(backend: str) -> None:
    x = make(backend, np.zeros((6, 9)))
    xp, context = arrays_for(x), Context("w", 3, 0, 0, 2)
    kept = make(backend, np.random.default_rng(0).normal(size=(9, 3)))
    assert bits(PowerSGD(3).prepare(xp, x, (kept,), context)[0]) == bits(kept)
    (fewer,) = PowerSGD(2).prepare(xp, x, (kept,), context)
    np.testing.assert_array_equal(as_numpy(fewer), as_numpy(kept)[:, :2])
    (more,) = PowerSGD(5).prepare(xp, x, (kept,), context)
    assert tuple(more.shape) == (9, 5)
    np.testing.assert_array_equal(as_numpy(more)[:, :3], as_numpy(kept))
    assert np.linalg.matrix_rank(as_numpy(more)) == 5
    other_rank = Context("w", 8, 0, 1, 2)
    assert bits(PowerSGD(5).prepare(xp, x, (kept,), other_rank)[0]) == bits(more)  # alike on all ranks, at any step
    assert PowerSGD(50).prepare(xp, x, (kept,), context)[0].shape[1] == 6  # no more than the matrix has rows


@pytest.mark.parametrize("backend", BACKENDS)
def test_levels_may_change_at_any_step(backend: str) -> None:
    ranks = [2, 4, 1, 3]
    runs = run_engines(
        2, infos({"w": (12, 10)}), PowerSGD(2), lambda r, s: {"w": make(backend, gradient_of((12, 10), r, s))},
        len(ranks), before=lambda engine, step: engine.set_level(ranks[step]), memory=SpyFeedback,
    )  # fmt: skip
    assert_same_on_all_ranks(runs)
    for rank, result, kept in zip(ranks, runs[0].results, runs[0].engine.memory.log, strict=True):
        assert np.linalg.matrix_rank(as_numpy(result["w"]).astype(float), tol=1e-3) == rank
        assert bits(kept.sent) == bits(result["w"])
    assert runs[0].engine.ledger.tensors["w"].floats_sent == 22 * sum(ranks)


@pytest.mark.parametrize("shape", [(8, 15), (8, 3, 5), (40, 2)])
@pytest.mark.parametrize(("backend", "dtype"), BACKENDS_AND_DTYPES)
def test_bytes(backend: str, dtype: str, shape: tuple[int, ...]) -> None:
    for rank in (1, 2, 3):
        (run,) = run_engines(
            1, infos({"w": shape}, dtype), PowerSGD(rank),
            lambda r, s: {"w": make(backend, gradient_of(shape, r, s), dtype)},
            before=lambda engine, step, rank=rank: set_to(engine, PowerSGD(rank)),
        )  # fmt: skip
        rows, columns = matrix_shape(shape)
        cost = run.engine.ledger.last.tensors["w"]
        floats = (rows + columns) * min(rank, rows, columns)
        assert cost.floats_sent == PowerSGD(rank).payload_floats(shape) == floats
        expected = floats * (8 if dtype == "float64" else 4)
        assert cost.bytes_sent == PowerSGD(rank).payload_bytes(shape, dtype=dtype) == expected
        assert PowerSGD(7).payload_bytes(shape, rank, dtype) == cost.bytes_sent


@given(st.integers(1, 3000), st.integers(1, 3000), st.floats(1, 10**4))
def test_levels_for_a_compression_factor(rows: int, columns: int, factor: float) -> None:
    level = PowerSGD(1).level_for(factor, (rows, columns))
    assert isinstance(level, int)
    assert 1 <= level <= min(rows, columns)
    allowed = 4 * rows * columns / factor
    assert PowerSGD(level).payload_bytes((rows, columns)) <= allowed * (1 + 1e-9) or level == 1
    if level < min(rows, columns):
        assert PowerSGD(level + 1).payload_bytes((rows, columns)) > allowed * (1 - 1e-9)


def test_only_what_gets_smaller_is_compressed() -> None:
    assert PowerSGD(2).route(TensorInfo("w", (10, 10))) == PowerSGD(2)  # 40 < 100
    assert PowerSGD(5).route(TensorInfo("w", (10, 10))) == NoCompression()  # 100 = 100
    assert PowerSGD(2, min_rate=2.5).route(TensorInfo("w", (10, 10))) == NoCompression()  # 40 = 100 / 2.5
    assert PowerSGD(2, min_rate=2.4).route(TensorInfo("w", (10, 10))) == PowerSGD(2, min_rate=2.4)
    assert PowerSGD(1).route(TensorInfo("w", (0, 10))) == NoCompression()


def test_wrong_settings() -> None:
    for rank in (0, -1, 1.5, True, "2"):
        with pytest.raises(SpecError, match=rf"powersgd: rank={rank!r} is not allowed; .* whole number of at least 1"):
            PowerSGD(rank)  # type: ignore[arg-type]
    for min_rate in (0, -1.0, float("nan")):
        with pytest.raises(SpecError, match=r"min_rate=.* is not allowed; it must be positive"):
            PowerSGD(1, min_rate=min_rate)
