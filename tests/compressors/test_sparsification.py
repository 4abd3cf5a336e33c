"""Top-k and random-k, against plain NumPy statements of the two methods."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdcomp import ErrorFeedback, NoMemory, RandomK, SparseTernary, SpecError, TopK
from hvdcomp.compressors.protocol import SparseVector
from hvdcomp.compressors.sparse_payload import elements_kept
from tests.harness import (
    BACKENDS,
    BACKENDS_AND_DTYPES,
    SpyFeedback,
    as_numpy,
    assert_same_on_all_ranks,
    densify,
    infos,
    make,
    run_engines,
)

STEPS = 4
ITEM_SIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


def k_of(ratio: float, d: int) -> int:
    """k = max(1, ceil(ratio d)) of the ratio as it is written in decimals."""
    return min(d, max(1, math.ceil(Fraction(str(ratio)) * d)))


def topk_bytes(k: int, d: int, item_size: int = 4) -> int:
    """Values and indices: two bytes an index, in blocks of 65536 whose counts take four each, or four an index."""
    blocks = math.ceil(d / 65536)
    return k * item_size + min(2 * k + (4 * blocks if blocks > 1 else 0), 4 * k)


def gradient_of(shape: tuple[int, ...], rank: int, step: int) -> np.ndarray:
    return np.random.default_rng([7, rank, step]).normal(size=shape)


def oracle(
    shape: tuple[int, ...], dtype: str, size: int, choose: Callable[[np.ndarray, int], np.ndarray]
) -> list[np.ndarray]:
    """The mean of each step, when every rank sends x at the flat indices that `choose` gives for (x, step)."""
    residual = [np.zeros(int(np.prod(shape)), dtype) for _ in range(size)]
    means = []
    for step in range(STEPS):
        total = np.zeros(int(np.prod(shape)), np.float64)
        for rank in range(size):
            x = gradient_of(shape, rank, step).astype(dtype).ravel() + residual[rank]
            sent = np.zeros_like(x)
            indices = choose(x, step)
            sent[indices] = x[indices]
            residual[rank] = x - sent
            total += sent
        means.append((total / size).reshape(shape))
    return means


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_topk_with_error_feedback(backend: str, dtype: str, size: int) -> None:
    shape, ratio = (5, 4, 6), 0.1
    k = k_of(ratio, 120)
    expected = oracle(shape, dtype, size, lambda x, step: np.argsort(-np.abs(x), kind="stable")[:k])
    runs = run_engines(
        size, infos({"w": shape}, dtype), TopK(ratio),
        lambda rank, step: {"w": make(backend, gradient_of(shape, rank, step), dtype)}, STEPS,
    )  # fmt: skip
    assert_same_on_all_ranks(runs)
    for step in range(STEPS):
        tolerance = {"float16": 1e-3, "float32": 1e-6, "float64": 1e-14}[dtype]
        np.testing.assert_allclose(as_numpy(runs[0].results[step]["w"]), expected[step], rtol=tolerance, atol=tolerance)
        assert runs[0].engine.planner.memory_for(TopK(ratio)) == ErrorFeedback()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_randomk_with_error_feedback(backend: str, dtype: str, size: int) -> None:
    """Which indices were drawn is read off the spy; that they are the same on all ranks, fixed the oracle."""
    shape, ratio = (5, 4, 6), 0.1
    runs = run_engines(
        size, infos({"w": shape}, dtype), RandomK(ratio),
        lambda rank, step: {"w": make(backend, gradient_of(shape, rank, step), dtype)}, STEPS, memory=SpyFeedback,
    )  # fmt: skip
    assert_same_on_all_ranks(runs)
    drawn = [[as_numpy(kept.sent.indices) for kept in run.engine.memory.log] for run in runs]
    for step in range(STEPS):
        assert drawn[0][step].dtype == np.int32
        assert len(set(drawn[0][step].tolist())) == k_of(ratio, 120) == 12
        for rank in range(size):
            np.testing.assert_array_equal(drawn[rank][step], drawn[0][step])
    assert len({indices.tobytes() for indices in drawn[0]}) == STEPS  # others at each step
    expected = oracle(shape, dtype, size, lambda x, step: drawn[0][step])
    tolerance = {"float16": 2e-3, "float32": 1e-6, "float64": 1e-14}[dtype]
    for step in range(STEPS):
        np.testing.assert_allclose(as_numpy(runs[0].results[step]["w"]), expected[step], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("spec", [TopK(0.25), RandomK(0.25)], ids=str)
@pytest.mark.parametrize(("backend", "dtype"), BACKENDS_AND_DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (9,), (4, 11), (2, 3, 2, 2)])
def test_payload_and_mean(backend: str, dtype: str, spec: TopK | RandomK, shape: tuple[int, ...], size: int) -> None:
    runs = run_engines(
        size, infos({"w": shape}, dtype), spec,
        lambda rank, step: {"w": make(backend, gradient_of(shape, rank, step), dtype)}, memory=SpyFeedback,
    )  # fmt: skip
    assert_same_on_all_ranks(runs)
    k = k_of(spec.ratio, int(np.prod(shape)))
    cost = runs[0].engine.ledger.last.tensors["w"]
    if spec.name == "topk":
        expected = topk_bytes(k, int(np.prod(shape)), ITEM_SIZE[dtype])
    else:
        expected = k * (4 if dtype == "bfloat16" else ITEM_SIZE[dtype])  # Horovod cannot add bfloat16
    assert cost.bytes_sent == spec.payload_bytes(shape, dtype=dtype) == expected
    assert cost.floats_sent == spec.payload_floats(shape) == k
    sent = [run.engine.memory.log[0].sent for run in runs]
    assert all(isinstance(one, SparseVector) and len(one.values) == k for one in sent)
    mean = sum(densify(one, shape).astype(np.float64) for one in sent) / size
    tolerance = {"float16": 2e-3, "bfloat16": 1e-2, "float32": 1e-6, "float64": 1e-15}[dtype]
    np.testing.assert_allclose(as_numpy(runs[0].results[0]["w"]), mean, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS_AND_DTYPES)
@pytest.mark.parametrize("values", [np.ones(1000), np.zeros(1000), np.tile([2.0, -2.0, 1.0, 0.0], 250)])
def test_topk_sends_exactly_k_of_ties(backend: str, dtype: str, values: np.ndarray) -> None:
    k = 37
    (run,) = run_engines(
        1, infos({"w": (1000,)}, dtype), TopK(0.037), lambda r, s: {"w": make(backend, values, dtype)},
        memory=SpyFeedback,
    )  # fmt: skip
    sent = run.engine.memory.log[0].sent
    assert len(set(as_numpy(sent.indices).tolist())) == k
    np.testing.assert_array_equal(np.sort(np.abs(as_numpy(sent.values))), np.sort(np.abs(values))[-k:])
    assert np.count_nonzero(as_numpy(run.results[0]["w"])) == (k if values.any() else 0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("method", [TopK, RandomK])
def test_ratio_one_sends_everything(backend: str, method: type[TopK] | type[RandomK]) -> None:
    values = np.arange(1.0, 13.0).reshape(3, 4)
    runs = run_engines(2, infos({"w": (3, 4)}), method(1.0), lambda r, s: {"w": make(backend, values * (1 - r))}, 2)
    np.testing.assert_array_equal(as_numpy(runs[1].results[1]["w"]), values / 2)
    assert not as_numpy(runs[0].engine.states["w"].memory[0]).any()


@given(st.integers(1, 10**9), st.integers(1, 10**6))
def test_k_is_what_the_decimal_ratio_says(d: int, millionths: int) -> None:
    ratio = millionths / 10**6
    assert elements_kept(ratio, d) == k_of(ratio, d)


def test_k_of_written_ratios() -> None:
    for d, ratio, k in [(100, 0.07, 7), (100, 0.29, 29), (1000, 0.01, 10), (1001, 0.01, 11), (5, 0.01, 1), (1, 1, 1)]:
        assert elements_kept(ratio, d) == k


@given(st.integers(1, 10**8), st.floats(1, 10**5))
def test_levels_for_a_compression_factor(d: int, factor: float) -> None:
    """The payload is never above what the factor allows, and one element more would be, unless one is the least."""
    for method, bytes_of in ((TopK(0.5), topk_bytes), (RandomK(0.5), lambda k, d: 4 * k)):
        level = method.level_for(factor, (d,))
        k = method.payload_floats((d,), level)
        payload = method.payload_bytes((d,), level)
        assert payload == method.at_level(level).payload_bytes((d,)) == bytes_of(k, d)
        assert payload <= 4 * d / factor * (1 + 1e-9) or k == 1
        assert k == d or bytes_of(k + 1, d) > 4 * d / factor * (1 - 1e-9)


@given(st.integers(1, 10**8), st.floats(1, 10**5))
def test_levels_for_a_factor_of_elements(d: int, factor: float) -> None:
    """A factor of 10 keeps a tenth of the elements, however values and indices travel; at least one."""
    for method in (TopK(0.5), TopK(0.5, values="fp16"), RandomK(0.5), RandomK(0.5, values="fp16"), SparseTernary(0.5)):
        level = method.level_for_elements(factor, (d,))
        assert isinstance(level, float)
        assert elements_kept(level, d) == max(1, math.floor(d / factor))
        with pytest.raises(SpecError, match=r"compression factor 0\.5 is not allowed"):
            method.level_for_elements(0.5, (d,))


@pytest.mark.parametrize("k", [1, 5, 6, 7, 4000])
@pytest.mark.parametrize("backend", BACKENDS)
def test_indices_of_large_tensors(backend: str, k: int) -> None:
    """Three blocks of 16-bit indices, the last of them short; elements at every block's edges."""
    d = 2 * 65536 + 7
    edges = [0, 65535, 65536, 131071, 131072, d - 1]
    values = np.random.default_rng(0).normal(size=(2, d)).astype(np.float32)
    values[:, edges] += 50 * np.arange(1, 7)
    runs = run_engines(2, infos({"w": (d,)}), TopK(k / d), lambda r, s: {"w": make(backend, values[r])})
    assert_same_on_all_ranks(runs)
    assert runs[0].engine.ledger.last.tensors["w"].bytes_sent == topk_bytes(k, d) == TopK(k / d).payload_bytes((d,))
    expected = np.zeros(d)
    for mine in values:
        largest = np.argsort(-np.abs(mine), kind="stable")[:k]
        expected[largest] += mine[largest] / 2
    np.testing.assert_allclose(as_numpy(runs[0].results[0]["w"]), expected, rtol=1e-6)


@pytest.mark.parametrize("method", [TopK, RandomK])
def test_wrong_ratios(method: type[TopK] | type[RandomK]) -> None:
    for ratio in (0, -0.1, 1.01, float("nan"), float("inf"), "0.1", True, None):
        with pytest.raises(
            SpecError, match=rf"{method.name}: ratio={ratio!r} is not allowed; .* above 0 and at most 1"
        ):
            method(ratio)
    with pytest.raises(SpecError, match="above 0 and at most 1"):
        method(0.5).at_level(2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_unbiased_randomk_has_the_gradient_as_its_mean(backend: str) -> None:
    steps, d, ratio = 3000, 40, 0.25
    g = np.linspace(-2, 2, d)
    (run,) = run_engines(
        1, infos({"w": (d,)}, "float64"), RandomK(ratio, unbiased=True),
        lambda r, s: {"w": make(backend, g, "float64")}, steps,
    )  # fmt: skip
    assert run.engine.planner.memory_for(RandomK(ratio, unbiased=True)) == NoMemory()
    mean = np.mean([as_numpy(result["w"]) for result in run.results], axis=0)
    # Each element is g d/k with probability k/d: variance g^2 (d/k - 1). 5 standard errors: 40 pass with 0.99997.
    assert (np.abs(mean - g) <= 5 * np.abs(g) * math.sqrt((1 / ratio - 1) / steps) + 1e-12).all()
    values = as_numpy(run.results[0]["w"])
    np.testing.assert_allclose(values[values != 0], g[values != 0] / ratio)


def test_biased_flags() -> None:
    assert TopK(0.1).biased
    assert RandomK(0.1).biased
    assert not RandomK(0.1, unbiased=True).biased
    with pytest.raises(SpecError, match="unbiased=1 is not allowed"):
        RandomK(0.1, unbiased=1)  # type: ignore[arg-type]
