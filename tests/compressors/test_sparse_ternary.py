"""Sparse ternary compression against a plain NumPy statement of the paper's algorithm 1."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdcomp import ErrorFeedback, NoMemory, SparseTernary, SpecError
from hvdcomp.arrays import arrays_for
from hvdcomp.compressors.parsing import parse_compressor
from tests.harness import (
    BACKENDS,
    BACKENDS_AND_DTYPES,
    as_numpy,
    assert_same_on_all_ranks,
    densify,
    infos,
    make,
    run_engines,
)
from tests.lockstep import run_lockstep

TOLERANCE = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 1e-6, "float64": 1e-6}


def ternary(x: np.ndarray, k: int) -> np.ndarray:
    """C(x) in float64."""
    vector = np.asarray(x, np.float64).reshape(-1)
    kept = np.argsort(-np.abs(vector), kind="stable")[:k]
    result = np.zeros_like(vector)
    result[kept] = np.where(vector[kept] >= 0, 1, -1) * np.abs(vector[kept]).mean()
    return result.reshape(x.shape)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(("backend", "dtype"), BACKENDS_AND_DTYPES)
def test_results_are_those_of_the_paper(backend: str, dtype: str, size: int) -> None:
    def gradients(rank: int, step: int) -> dict[str, Any]:
        return {"w": make(backend, np.random.default_rng([rank, step]).standard_normal((15, 20)), dtype)}

    runs = run_engines(size, infos({"w": (15, 20)}, dtype), SparseTernary(0.1), gradients, steps=2, memory=NoMemory)
    assert_same_on_all_ranks(runs)
    for step in range(2):
        expected = np.mean([ternary(as_numpy(gradients(rank, step)["w"]), 30) for rank in range(size)], 0)
        result = runs[0].results[step]["w"]
        assert arrays_for(result).dtype_name(result) == dtype
        np.testing.assert_allclose(as_numpy(result), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_example_by_hand(backend: str) -> None:
    x = make(backend, [[4.0, -1.0, 0.0], [0.5, -2.0, 1.5]])
    (outcome,) = run_lockstep(SparseTernary(0.5), [x]).outcomes
    expected = [[2.5, 0, 0], [0, -2.5, 2.5]]
    np.testing.assert_array_equal(as_numpy(outcome.mean), expected)
    np.testing.assert_array_equal(densify(outcome.sent, (2, 3)), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_largest_numbers_do_not_overflow(backend: str) -> None:
    largest = np.finfo(np.float32).max
    (outcome,) = run_lockstep(SparseTernary(1.0), [make(backend, np.array([largest, -largest] * 4))]).outcomes
    np.testing.assert_array_equal(as_numpy(outcome.mean), np.array([largest, -largest] * 4, np.float32))


@pytest.mark.parametrize(("d", "k", "index_bytes"), [(100, 9, 18), (65536, 7, 14), (65537, 3, 12), (200_000, 99, 214)])
def test_places_signs_and_one_magnitude_are_all_that_travels(d: int, k: int, index_bytes: int) -> None:
    x = np.random.default_rng(0).standard_normal(d).astype(np.float32)
    method = SparseTernary(k / d)
    assert run_lockstep(method, [x]).bytes_sent() == method.payload_bytes((d,)) == index_bytes + math.ceil(k / 8) + 4
    assert method.payload_floats((d,)) == 1 + k / 32


@given(st.integers(1, 10**6), st.floats(1, 1e5))
def test_level_is_within_the_budget_and_wastes_little(d: int, factor: float) -> None:
    method = SparseTernary(0.5)
    level = method.level_for(factor, (d,))
    assert isinstance(level, float)
    budget, smallest = 4 * d / factor, 1 / d
    assert level == pytest.approx(smallest) or method.payload_bytes((d,), level) <= budget
    more = level + 8 / d
    assert more >= 1 or method.payload_bytes((d,), more) > budget * (1 - 1e-9)


def test_description() -> None:
    method = parse_compressor("stc:ratio=0.25")
    assert method == SparseTernary(ratio=0.25)
    assert method.biased
    assert method.default_memory == ErrorFeedback()
    with pytest.raises(SpecError, match="stc: ratio=0 is not allowed"):
        SparseTernary(0)
