"""Chunked top-k against a plain NumPy statement of SparseLoCo's compression."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdcomp import ChunkedTopK, ErrorFeedback, NoMemory, SpecError
from hvdcomp.arrays import arrays_for
from hvdcomp.compressors.parsing import parse_compressor
from tests.harness import (
    BACKENDS,
    BACKENDS_AND_DTYPES,
    INSTALLED,
    as_numpy,
    assert_same_on_all_ranks,
    bits,
    densify,
    infos,
    make,
    run_engines,
)
from tests.lockstep import run_lockstep

TOLERANCE = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 1e-6, "float64": 1e-6}
SHAPES = [(16, 16), (7, 9), (1,), (5, 4, 3)]
VALUES = ["2bit", "sign", "fp16", "float32"]


def four_means(values: np.ndarray) -> np.ndarray:
    """What two bits leave of values."""
    sigma = values.std() or 1.0
    bins = np.clip(np.floor((values - values.mean()) / (6 * sigma / 4) + 2 + 0.5), 0, 3)
    return np.array([values[bins == one].mean() for one in bins])


def chunked(x: np.ndarray, chunk: int, k: int, values: str) -> np.ndarray:
    """C(x) in float64."""
    vector = np.asarray(x, np.float64).reshape(-1)
    kept: list[int] = []
    for start in range(0, len(vector), chunk):
        part = vector[start : start + chunk]
        count = math.ceil(k * len(part) / chunk)
        kept += list(start + np.argsort(-np.abs(part), kind="stable")[:count])
    result = np.zeros_like(vector)
    if values == "2bit":
        result[kept] = four_means(vector[kept])
    elif values == "sign":
        result[kept] = np.where(vector[kept] >= 0, 1, -1) * np.abs(vector[kept]).mean()
    else:
        result[kept] = vector[kept]
    return result.reshape(x.shape)


@pytest.mark.parametrize("spec", [
    "chunkedtopk", "chunkedtopk:chunk=64,k=9", "chunkedtopk:chunk=100,k=7,values=float32",
    "chunkedtopk:chunk=30,k=10,values=fp16", "chunkedtopk:chunk=8,k=1,values=sign",
    "chunkedtopk:chunk=33,k=4,values=sign",
])  # fmt: skip
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(("backend", "dtype"), BACKENDS_AND_DTYPES)
def test_results_are_those_of_the_paper(backend: str, dtype: str, ranks: int, spec: str) -> None:
    method: Any = parse_compressor(spec)
    tensors = infos({f"w{place}": shape for place, shape in enumerate(SHAPES)}, dtype)

    def gradients(rank: int, step: int) -> dict[str, Any]:
        """Of different magnitudes that every type holds, as which of equal elements is sent is left open."""
        rng = np.random.default_rng([rank, step])
        numbers = {one: (1 + rng.permutation(one.size)) * rng.choice([-1, 1], one.size) / 64 for one in tensors}
        return {one.name: make(backend, values.reshape(one.shape), dtype) for one, values in numbers.items()}

    runs = run_engines(ranks, tensors, method, gradients, steps=2, memory=NoMemory)
    assert_same_on_all_ranks(runs)
    for step in range(2):
        for one in tensors:
            sent = [
                chunked(as_numpy(gradients(rank, step)[one.name]), method.chunk, method.k, method.values)
                for rank in range(ranks)
            ]
            result = runs[0].results[step][one.name]
            assert arrays_for(result).dtype_name(result) == dtype
            tolerance = max(TOLERANCE[dtype], 1e-3 if method.values == "fp16" else 0)
            np.testing.assert_allclose(as_numpy(result), np.mean(sent, 0), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_example_by_hand(backend: str) -> None:
    """Two chunks of five. The largest two of each are 9, -8, 7 and -8: mean 0, sigma 8.03, two bins."""
    x = make(backend, [[9.0, -1.0, 0.0, 2.0, -8.0], [7.0, 0.0, 1.0, -8.0, 6.0]])
    (outcome,) = run_lockstep(ChunkedTopK(chunk=5, k=2), [x]).outcomes
    expected = [[8.0, 0, 0, 0, -8.0], [8.0, 0, 0, -8.0, 0]]
    np.testing.assert_array_equal(as_numpy(outcome.mean), expected)
    np.testing.assert_array_equal(densify(outcome.sent, (2, 5)), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_example_of_signs_by_hand(backend: str) -> None:
    """The largest of each chunk of four are -3, 5, the first of equal ones, and a zero, which counts as positive."""
    x = make(backend, [1.0, -3.0, 2.0, 0.0, 4.0, 5.0, -1.0, 0.5, 0.0, 0.0, 0.0, 0.0, -8.0])
    method = ChunkedTopK(chunk=4, k=1, values="sign")
    (outcome,) = run_lockstep(method, [x]).outcomes
    mean = as_numpy(outcome.mean)
    np.testing.assert_array_equal(mean[[1, 5, 12]], [-4, 4, -4])
    assert mean[8:12].sum() == 4
    assert np.count_nonzero(mean) == 4
    np.testing.assert_array_equal(densify(outcome.sent, (13,)), mean)


def test_bins_end_where_the_paper_has_them() -> None:
    """Sigma is 10.07: bins end at -22.6, -7.6 and 7.6. There is none for what is far above the mean alone."""
    values = np.array([-40.0] * 2 + [-20.0] * 3 + [-2.0, 2.0] * 40 + [20.0] * 3 + [40.0] * 2, np.float32)
    (outcome,) = run_lockstep(ChunkedTopK(chunk=len(values), k=len(values)), [values]).outcomes
    np.testing.assert_array_equal(outcome.mean, [-40] * 2 + [-20] * 3 + [0] * 80 + [28] * 5)


@pytest.mark.parametrize(("chunk", "k", "values", "size", "expected"), [
    (4096, 64, "2bit", 4096, 64 * 14 // 8 + 16),
    (4096, 64, "2bit", 3 * 4096 + 100, (3 * 64 + 2) + (3 * 64 + 2) // 2 + math.ceil((3 * 64 + 2) / 4) + 16),
    (4096, 64, "2bit", 1024, 16 * 12 // 8 + 16),  # ten bits tell 1024 places apart
    (4096, 64, "fp16", 8192, 2 * 64 * 28 // 8),
    (4096, 64, "float32", 8192, 2 * 64 * 44 // 8),
    (256, 8, "2bit", 1 << 20, 4096 * 8 * 10 // 8 + 16),
    (1 << 16, 1000, "float32", 1 << 17, 2 * 1000 * 6),
    (2, 1, "float32", 64, 32 * 4 + 4),
    *((2**bits, 1, "sign", 2**bits * 64, 64 * (bits + 1) // 8 + 4) for bits in range(1, 17)),
    (8, 1, "sign", 8 * 4096 + 3, 4097 * 2 // 8 + 1 + 2 * (4097 // 8 + 1) + 4),
    (64, 3, "sign", 100, 3 + 2 + 1 + 4),  # three of 64 elements and two of 36: planes of 4 and 2 bits, and signs
])  # fmt: skip
def test_places_values_and_four_means_are_all_that_travels(
    chunk: int, k: int, values: str, size: int, expected: int
) -> None:
    method = ChunkedTopK(chunk, k, values)
    x = np.random.default_rng(0).standard_normal(size).astype(np.float32)
    assert run_lockstep(method, [x]).bytes_sent() == method.payload_bytes((size,)) == expected


def test_as_many_times_fewer_bits_as_published() -> None:
    """146.3 but for the four means, which the published number leaves out."""
    published = 4096 * 32 / (64 * (12 + 2))
    assert round(published, 1) == 146.3
    shape = (4096, 4096)
    method = parse_compressor("chunkedtopk:chunk=4096,k=64,values=2bit")
    assert 4 * 4096**2 / (method.payload_bytes(shape) - 4 * 4) == published
    assert 4 * 4096**2 / method.payload_bytes(shape) == pytest.approx(published, rel=1e-4)
    assert method.payload_floats(shape) == 4 + 4096 * 64 * 2 / 32
    assert ChunkedTopK(8, 1, "sign").payload_floats(shape) == 1 + 4096 * 512 / 32


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("chunk", [2, 3, 16, 200, 256, 257, 1000, 4096, 65_536])
def test_places_of_any_number_of_bits_come_back(backend: str, chunk: int) -> None:
    """Where all elements are sent, all come back."""
    x = make(backend, np.random.default_rng(0).standard_normal(70_001))
    (outcome,) = run_lockstep(ChunkedTopK(chunk, chunk, "float32"), [x]).outcomes
    assert bits(outcome.mean) == bits(x)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [0.0, -0.1])
def test_of_equal_elements_each_chunk_sends_exactly_k(backend: str, value: float) -> None:
    x = make(backend, np.full(1000, value))
    (outcome,) = run_lockstep(ChunkedTopK(chunk=300, k=10), [x]).outcomes
    indices = np.sort(as_numpy(outcome.sent.indices))
    assert len(set(indices)) == len(indices)
    np.testing.assert_array_equal(np.bincount(indices // 300), [10, 10, 10, 4])
    np.testing.assert_array_equal(as_numpy(outcome.sent.values), np.float32(value))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_largest_numbers_do_not_overflow(backend: str) -> None:
    largest = np.finfo(np.float32).max
    x = np.array([largest, -largest] * 4, np.float32)
    (outcome,) = run_lockstep(ChunkedTopK(chunk=8, k=8), [make(backend, x)]).outcomes
    np.testing.assert_array_equal(as_numpy(outcome.mean), x)


@given(
    st.lists(st.integers(-1000, 1000) | st.sampled_from([-(2**20), 2**20]), min_size=1, max_size=70),
    st.integers(2, 40),
    st.data(),
)
def test_it_is_a_contraction(numbers: list[int], chunk: int, data: st.DataObject) -> None:
    """|x - C(x)| < |x|, for any x but 0: also for two values that cancel each other, and outliers."""
    x = np.array(numbers, np.float32)
    for values in VALUES:
        method = ChunkedTopK(chunk, data.draw(st.integers(1, chunk)), values)
        (outcome,) = run_lockstep(method, [x]).outcomes
        left = x.astype(float) - densify(outcome.sent, x.shape)
        assert np.sum(left**2) < np.sum(x.astype(float) ** 2) or not x.any()


@pytest.mark.parametrize(("chunk", "normal", "student"), [(4, 46, 55), (8, 60, 59), (16, 73, 64), (64, 89, 76)])
def test_errors_of_signs_are_those_of_the_page(chunk: int, normal: int, student: int) -> None:
    rng = np.random.default_rng(0)
    for x, percent in ((rng.standard_normal(1 << 20), normal), (rng.standard_t(3, 1 << 20), student)):
        (outcome,) = run_lockstep(ChunkedTopK(chunk, 1, "sign"), [x.astype(np.float32)]).outcomes
        assert 100 * np.sum((x - outcome.mean) ** 2) / np.sum(x**2) == pytest.approx(percent, abs=1.5)


@pytest.mark.skipif(len(INSTALLED) < 2, reason="needs PyTorch")
@pytest.mark.parametrize("values", VALUES)
def test_pytorch_sends_the_bytes_that_numpy_sends(values: str) -> None:
    method = ChunkedTopK(chunk=1000, k=30, values=values)
    for seed in range(20):
        x = np.random.default_rng(seed).standard_t(3, 50_001)
        ours, theirs = (run_lockstep(method, [make(backend, x)]) for backend in INSTALLED)
        assert ours.payloads() == theirs.payloads()
        assert bits(ours.outcomes[0].mean) == bits(theirs.outcomes[0].mean)


@given(st.integers(1, 10**6), st.floats(1, 1e5), st.sampled_from(VALUES))
def test_level_is_within_the_budget_and_wastes_little(size: int, factor: float, values: str) -> None:
    method = ChunkedTopK(values=values)
    level = method.level_for(factor, (size,))
    assert isinstance(level, int)
    budget = 4 * size / factor
    assert level == 1 or method.payload_bytes((size,), level) <= budget
    assert level == method.chunk or method.payload_bytes((size,), level + 1) > budget


def test_level_by_elements_is_their_share() -> None:
    assert ChunkedTopK().level_for_elements(64, (4096, 8)) == 64
    assert ChunkedTopK().level_for_elements(1, (4096, 8)) == 4096
    assert ChunkedTopK(chunk=100, k=5).level_for_elements(1000, (4096, 8)) == 1


def test_description() -> None:
    method = parse_compressor("chunkedtopk:chunk=4096,k=64,values=2bit")
    assert method == ChunkedTopK() == ChunkedTopK(chunk=4096, k=64, values="2bit")
    assert method.biased
    assert method.default_memory == ErrorFeedback()
    assert method.at_level(16) == ChunkedTopK(k=16)
    assert ChunkedTopK(values="fp16").nested
    assert not method.nested
    assert not ChunkedTopK(values="sign").nested
    assert parse_compressor("chunkedtopk:chunk=8,k=1,values=sign") == ChunkedTopK(8, 1, "sign")
    for settings, message in (
        ({"k": 0}, "k=0 is not allowed"),
        ({"chunk": 10, "k": 11}, "k=11 is not allowed; it must be at most chunk=10"),
        ({"chunk": 1}, "chunk=1 is not allowed"),
        ({"chunk": 65_537}, "chunk=65537 is not allowed"),
        ({"values": "4bit"}, "values='4bit' is not allowed"),
    ):
        with pytest.raises(SpecError, match=f"chunkedtopk: {message}"):
            ChunkedTopK(**settings)
