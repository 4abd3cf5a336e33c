"""Sums of gradients and the energy that compression loses, against NumPy in double precision."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hvdcomp.adaptation.gradient_sums import AccumulatedGradients
from tests.harness import BACKENDS, BACKENDS_AND_DTYPES, as_numpy, bits, dtype_of, make

SHAPES = {"conv": (4, 3, 2, 2), "linear": (6, 8), "one": (1,), "scalar": ()}
PRECISION = {"float16": 1e-5, "bfloat16": 1e-5, "float32": 1e-5, "float64": 1e-12}

every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_dtype = pytest.mark.parametrize(("backend", "dtype"), BACKENDS_AND_DTYPES)


def element(backend: str, value: float) -> Any:
    return make(backend, [value])


def wide(x: Any) -> np.ndarray:
    return as_numpy(x).astype(np.float64)


def accumulated(backend: str, values: Any, dtype: str = "float32", name: str = "w") -> AccumulatedGradients:
    sums = AccumulatedGradients()
    sums.add({name: make(backend, values, dtype)}, 1.0)
    return sums


# Each step: factor, whether it is poisoned, and which tensors have a gradient.
steps_of = st.lists(
    st.tuples(st.sampled_from([1.0, 3.0, 0.25, 1 / 1024]), st.booleans(), st.sets(st.sampled_from(sorted(SHAPES)))),
    max_size=6,
)


@every_dtype
@settings(max_examples=25)
@given(steps=steps_of, seed=st.integers(0, 2**16))
def test_sums_are_weighted_sums_of_the_steps_that_count(
    backend: str, dtype: str, steps: list[tuple[float, bool, set[str]]], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    sums = AccumulatedGradients()
    expected: dict[str, np.ndarray] = {}
    size: dict[str, np.ndarray] = {}
    for factor, poisoned, names in steps:
        gradients = {name: make(backend, rng.normal(size=SHAPES[name]), dtype) for name in sorted(names)}
        before = {name: bits(x) for name, x in gradients.items()}
        sums.add(gradients, factor, element(backend, np.nan if poisoned else 0.0))
        assert {name: bits(x) for name, x in gradients.items()} == before
        for name, gradient in gradients.items():
            term = wide(gradient) * (0.0 if poisoned else factor)
            expected[name] = expected.get(name, 0.0) + term
            size[name] = size.get(name, 0.0) + np.abs(term)
            gradient[...] = 1e4  # what was added is not looked at again
    assert set(sums.sums) == set(expected)
    for name, total in sums.sums.items():
        assert dtype_of(total) == ("float64" if dtype == "float64" else "float32")
        assert tuple(total.shape) == SHAPES[name]
        assert (np.abs(wide(total) - expected[name]) <= PRECISION[dtype] * size[name]).all()
    norms = sums.norms(list(SHAPES))
    assert set(norms) == set(SHAPES)
    for name in SHAPES:
        right = np.linalg.norm(expected.get(name, np.zeros(1)))
        tolerance = PRECISION[dtype] * (np.linalg.norm(size[name]) if name in size else 1)
        assert isinstance(norms[name], float)
        assert abs(norms[name] - right) <= tolerance
    every = np.concatenate([np.zeros(1), *[x.reshape(-1) for x in expected.values()]])
    bound = np.linalg.norm(np.concatenate([np.zeros(1), *[x.reshape(-1) for x in size.values()]]))
    assert abs(sums.model_norm() - np.linalg.norm(every)) <= PRECISION[dtype] * bound


@pytest.mark.parametrize(("backend", "dtype"), [case for case in BACKENDS_AND_DTYPES if "16" in case.values[1]])
def test_half_precision_neither_overflows_nor_swallows_small_steps(backend: str, dtype: str) -> None:
    sums = AccumulatedGradients()
    for _ in range(20):
        sums.add({"large": make(backend, np.full((3, 3), 60000.0), dtype)}, 4.0)
    rounded = wide(make(backend, 60000.0, dtype))
    np.testing.assert_allclose(wide(sums.sums["large"]), np.full((3, 3), 80 * rounded), rtol=1e-6)
    sums.clear()
    for _ in range(3000):  # from 256 or 2048 on, half-precision sums would not grow any more
        sums.add({"ones": make(backend, np.ones(2), dtype)}, 1.0)
    assert sums.norms(["ones"])["ones"] == pytest.approx(3000 * np.sqrt(2))


@every_backend
def test_a_poisoned_step_changes_nothing_even_as_the_first(backend: str) -> None:
    sums = AccumulatedGradients()
    bad = {"w": make(backend, [np.inf, np.nan])}
    sums.add(bad, 1.0, element(backend, np.nan))
    assert sums.norms(["w"]) == {"w": 0.0}
    sums.add({"w": make(backend, [3.0, 4.0])}, 1.0, element(backend, 0.0))
    sums.add(bad, 1.0, element(backend, np.nan))
    assert sums.norms(["w"]) == {"w": 5.0}
    sums.add(bad, 1.0)  # where nobody knows whether the step counts, it shows
    assert not np.isfinite(sums.norms(["w"])["w"])


@every_backend
def test_clear_starts_anew_and_nothing_gives_zero(backend: str) -> None:
    sums = accumulated(backend, [3.0, 4.0])
    sums.clear()
    assert sums.sums == {}
    assert sums.model_norm() == 0.0
    assert sums.norms(["w", "v"]) == {"w": 0.0, "v": 0.0}
    sums.add({}, 1.0, element(backend, 0.0))
    assert sums.sums == {}
    sums.add({"w": make(backend, [0.0, 2.0])}, 1.0)
    assert sums.norms(["w"]) == {"w": 2.0}


@every_backend
def test_norms_are_of_the_named_tensors_and_the_models_norm_of_all(backend: str) -> None:
    sums = AccumulatedGradients()
    sums.add({"a": make(backend, [3.0]), "b": make(backend, [[4.0]]), "c": make(backend, 12.0)}, 1.0)
    assert sums.norms(["c", "a", "missing"]) == {"c": 12.0, "a": 3.0, "missing": 0.0}
    assert sums.model_norm() == 13.0


@every_dtype
@settings(max_examples=25)
@given(
    size=st.integers(2, 200),
    mean=st.sampled_from([0.0, 1e-3, -1.0, 5.0]),
    seed=st.integers(0, 2**16),
)
def test_mean_to_std_is_that_of_numpy(backend: str, dtype: str, size: int, mean: float, seed: int) -> None:
    values = make(backend, np.random.default_rng(seed).normal(mean, 1.0, size), dtype)
    sums = accumulated(backend, wide(values), dtype)
    (ratio,) = sums.mean_to_std(["w"]).values()
    exact = wide(values)
    assume(exact.std() > 0)  # two of low precision may be equal, which the next test is about
    # What can be lost is a rounding error of the elements' size, not of the mean, which may be zero.
    bound = PRECISION[dtype] * (1 + np.abs(exact).max() / exact.std()) * (1 + abs(exact.mean()) / exact.std())
    assert abs(ratio - abs(exact.mean()) / exact.std()) <= bound


@every_dtype
def test_mean_to_std_of_one_element_equal_elements_zeros_and_nothing(backend: str, dtype: str) -> None:
    for values in ([7.0], [-0.5] * 16, 0.75):
        (ratio,) = accumulated(backend, values, dtype).mean_to_std(["w"]).values()
        assert ratio == np.inf, values
    for values in ([0.0], np.zeros((4, 4))):
        assert np.isnan(accumulated(backend, values, dtype).mean_to_std(["w"])["w"])
    both = accumulated(backend, [1.0, 3.0], dtype).mean_to_std(["missing", "w"])
    assert both["w"] == 2.0
    assert np.isnan(both["missing"])
