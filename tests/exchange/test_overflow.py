"""Numbers at the ends of what an element type holds: nothing that is kept stops being finite, and training goes on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvdcomp import ErrorFeedback, NoMemory
from hvdcomp.arrays import arrays_for
from hvdcomp.communicators.in_process import run_ranks
from hvdcomp.compressors.low_rank import orthogonalize
from hvdcomp.compressors.memory import without
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.compressors.protocol import Context, TensorInfo
from hvdcomp.exchange.engine import Engine
from tests.harness import (
    BACKENDS,
    DTYPES,
    INSTALLED,
    Run,
    SpyFeedback,
    as_numpy,
    assert_same_on_all_ranks,
    densify,
    infos,
    make,
    run_engines,
    states_of,
)

pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero) encountered:RuntimeWarning")
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def one_rank(spec: str, gradients: list[Any], memory: Any = None, dtype: str = "float32") -> Run:
    """One tensor through some steps."""
    shapes = {"w": gradients[0].shape}
    (run,) = run_engines(
        1, infos(shapes, dtype), parse_compressor(spec), lambda rank, step: {"w": gradients[step]}, len(gradients),
        memory=lambda: memory,
    )  # fmt: skip
    return run


@pytest.mark.parametrize("backend", [backend for backend in INSTALLED if "bfloat16" in DTYPES[backend]])
def test_bfloat16_gradients_beyond_half_precision(backend: str) -> None:
    """65504, the largest half-precision number, is 65536 in bfloat16, which half precision does not hold."""
    spy = SpyFeedback()
    values = [130560.0, -130560.0, 7.0, 0.0]
    gradients = [make(backend, values, "bfloat16")] + [make(backend, np.zeros(4), "bfloat16")] * 3
    run = one_rank("topk:ratio=0.5,values=fp16", gradients, spy, "bfloat16")
    for result, kept in zip(run.results, spy.log, strict=True):
        np.testing.assert_array_equal(as_numpy(result["w"]), densify(as_sparse(kept.sent), (4,)))
    assert as_numpy(run.results[0]["w"]).tolist() == [65280, -65280, 0, 0]
    assert sum(as_numpy(result["w"]) for result in run.results).tolist() == values  # all of it in the end


def as_sparse(sent: Any) -> Any:
    return type(sent)(*(make("numpy", as_numpy(part), str(as_numpy(part).dtype)) for part in sent))


@pytest.mark.parametrize("spec", ["efsignsgd", "onebit", "onebit:per_row=true"])
@every_backend
def test_means_of_magnitudes_whose_sum_overflows(backend: str, spec: str) -> None:
    values = np.where(np.random.default_rng(0).random((300, 200)) < 0.5, -1e35, 1e35)
    run = one_rank(spec, [make(backend, values)] * 2)
    for result in run.results:
        np.testing.assert_allclose(as_numpy(result["w"]), values, rtol=1e-4)


@pytest.mark.parametrize("exponent", [-44, -38, -23, -22, -21, 0, 18, 30, 36])
@every_backend
def test_powersgd_at_any_magnitude(backend: str, exponent: int) -> None:
    """A matrix of rank one arrives, whatever its magnitude, unless it is too small, and leaves a good warm start."""
    rng = np.random.default_rng(1)
    matrix = np.outer(rng.standard_normal(30), rng.standard_normal(20))
    spike, usual = make(backend, matrix * 10.0**exponent), make(backend, matrix)
    run = one_rank("powersgd:rank=2", [spike, spike, usual], NoMemory())
    if exponent > -30:
        np.testing.assert_allclose(as_numpy(run.results[1]["w"]) / 10.0**exponent, matrix, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(as_numpy(run.results[2]["w"]), matrix, rtol=1e-4, atol=1e-5)
    assert np.isfinite(as_numpy(run.engine.states["w"].compressor[0])).all()


@pytest.mark.parametrize("scale", [1e-45, 1e-39, 1e-37, 1e-25, 1.0, 1e25, 3e38])
@every_backend
def test_orthogonalize_gives_unit_columns_or_zeros(backend: str, scale: float) -> None:
    matrix = make(backend, np.random.default_rng(2).uniform(-1, 1, (50, 3)) * scale)
    columns = as_numpy(orthogonalize(arrays_for(matrix), matrix)).astype(float)
    gram = columns.T @ columns
    np.testing.assert_allclose(gram, np.eye(3) if 1e-30 < scale < 3e37 else gram * 0, atol=1e-5)


@pytest.mark.parametrize("spec", ["topk:ratio=0.3", "powersgd:rank=1", "onebit", "none"])
@every_backend
def test_a_sum_over_the_ranks_that_overflows_does_not_count(backend: str, spec: str) -> None:
    """The bias is 40000 on both ranks, in half precision, and is summed there."""

    def work(communicator: Any) -> list[Any]:
        tensors = [TensorInfo("b", (3,), "float16"), TensorInfo("w", (6, 4), "float16")]
        engine = Engine(communicator, tensors, parse_compressor(spec), min_numel=4, min_ndim=2)
        rng = np.random.default_rng(communicator.rank)
        seen = []
        for step, bias in enumerate([1.0, 40000.0, 1.0]):
            gradients = {"b": np.full(3, bias), "w": rng.standard_normal((6, 4))}
            before = states_of(engine)
            results = engine.step({name: make(backend, each, "float16") for name, each in gradients.items()})
            values = {name: as_numpy(result) for name, result in results.items()}
            seen.append(values)
            assert (engine.found_inf.item() == 0) == (step != 1)
            if step == 1:
                assert all(np.isnan(each).any() for each in values.values())
                assert states_of(engine) == before
            else:
                assert all(np.isfinite(each).all() for each in values.values())
        return seen

    first, second = run_ranks(2, work)
    for mine, theirs in zip(first, second, strict=True):
        for name, values in mine.items():
            np.testing.assert_array_equal(values, theirs[name])


@every_backend
def test_what_is_sent_of_one_rank_may_be_more_than_half_precision_holds(backend: str) -> None:
    """65000 is rounded up to 65536, infinite in half precision; the mean over four ranks is not."""

    def gradients(rank: int, step: int) -> dict[str, Any]:
        return {"w": make(backend, np.array([65000.0, 3.0] if rank == 1 else [0.0, 0.0]), "float16")}

    runs = run_engines(
        4, infos({"w": (2,)}, "float16"), parse_compressor("natural"), gradients, 1, memory=ErrorFeedback
    )
    assert_same_on_all_ranks(runs)
    values = as_numpy(runs[0].results[0]["w"])
    assert values[0] == 16384
    kept = as_numpy(runs[1].engine.states["w"].memory[0])
    assert kept[0] == float(np.float16(65000)) - 65536
    assert kept[1] == 3 - 4 * values[1]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@every_backend
def test_residuals_that_a_growing_loss_scale_would_make_infinite(backend: str, dtype: str) -> None:
    """In single precision, in which what half precision does not hold is kept."""
    values = np.array([60000.0, 40000.0, 1.0]) * (2.0**112 if dtype == "float32" else 1)
    run = one_rank("topk:ratio=0.3", [make(backend, values, dtype)], dtype=dtype)
    run.engine.scale_residuals(2.0)
    assert as_numpy(run.engine.states["w"].memory[0]).tolist() == [0, 0 if dtype == "float32" else 80000, 2 * values[2]]


@every_backend
def test_a_residual_that_overflows_loses_that_element(backend: str) -> None:
    x = np.full(4, 3e38)
    sent = make(backend, -x)
    kept = without(arrays_for(sent), make(backend, x), sent)
    assert as_numpy(kept).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("spec", ["mstopk:ratio=0.01", "redsync:ratio=0.01", "sidco:ratio=0.01", "dgc:ratio=0.01"])
@every_backend
def test_thresholds_are_found_where_sums_overflow(backend: str, spec: str) -> None:
    rng = np.random.default_rng(4)
    values = (rng.laplace(size=(400, 250)) * 1e36).astype(np.float32)
    x = make(backend, values)
    compressor = parse_compressor(spec)
    sent = compressor.preview(arrays_for(x), x, (), Context("w", 0, 0, 0, 1))
    best = np.sort(np.abs(values.reshape(-1)))[-1000:]
    chosen = np.abs(values.reshape(-1))[as_numpy(sent.indices)]
    assert np.sum(chosen / 1e36) > 0.9 * np.sum(best / 1e36)
