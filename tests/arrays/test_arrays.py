"""The array functions: each framework held against NumPy, and NumPy against what the docstrings say."""

from __future__ import annotations

import inspect
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hvdcomp.arrays import arrays_for, numpy_arrays
from hvdcomp.arrays.magnitudes import Magnitudes
from hvdcomp.arrays.types import AllFunctions, Array, dtype_bytes
from tests.harness import (
    EVERY_BACKEND,
    EVERY_DTYPE,
    INSTALLED,
    as_numpy,
    bits,
    dtype_of,
    make,
    replaced,
)

OTHERS = EVERY_BACKEND[1:]
FLOATS = ["float16", "float32", "float64"]
SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)
FILLED_SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=1, max_side=5)
SPECIAL = [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, -1e-45, 3.4e38, 65504.0, 65520.0, 2.0**-24, 1.0]


@st.composite
def arrays(draw: st.DrawFn, shapes: st.SearchStrategy = SHAPES, finite: bool = False) -> np.ndarray:
    """Arrays of all element types, with few distinct values (ties), zeros, subnormals and (unless finite) inf, NaN."""
    dtype = draw(st.sampled_from(FLOATS))
    width = {"float16": 16, "float32": 32, "float64": 64}[dtype]
    limit = 100.0 if finite else None
    elements = st.floats(-limit if limit else None, limit, width=width, allow_nan=not finite, allow_infinity=not finite)
    return draw(hnp.arrays(dtype, draw(shapes), elements=elements | st.sampled_from([0.0, 1.0, -1.0])))


def everywhere(x: np.ndarray) -> list[tuple[AllFunctions, Array]]:
    """The array functions of each framework, NumPy's first, and an array of its own with these values."""
    made = [make(backend, x, x.dtype.name) for backend in INSTALLED]
    return [(arrays_for(array), array) for array in made]


def same(*results: Array) -> None:
    """Equal shape, element type and values; NaN equals NaN, and zeros may differ in sign."""
    first = np.asarray(results[0])
    for other in results[1:]:
        assert first.dtype == as_numpy(other).dtype
        np.testing.assert_array_equal(first, as_numpy(other), strict=True)


def functions_of(module: ModuleType) -> dict[str, list[str]]:
    return {
        name: list(inspect.signature(function).parameters)
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__ and not name.startswith("_")
    }


def test_all_backends_define_the_same_functions_and_numpy_documents_them() -> None:
    expected = functions_of(numpy_arrays)
    for backend in INSTALLED:
        assert functions_of(arrays_for(make(backend, [0.0]))) == expected, backend
    for name in functions_of(numpy_arrays):
        assert getattr(numpy_arrays, name).__doc__, name


def test_the_protocols_list_every_function() -> None:
    listed = {
        name: list(inspect.signature(function).parameters)[1:]
        for name, function in inspect.getmembers(AllFunctions, inspect.isfunction)
        if not name.startswith("_")
    }
    assert listed == functions_of(numpy_arrays)


def test_each_array_finds_its_functions() -> None:
    assert arrays_for(np.zeros(1)) is numpy_arrays
    assert arrays_for(np.float32(1)) is numpy_arrays
    with pytest.raises(TypeError, match=r"builtins\.list; pass a NumPy array or a PyTorch tensor"):
        arrays_for([1.0])


def test_each_tensor_finds_its_functions() -> None:
    torch = pytest.importorskip("torch")
    assert arrays_for(torch.zeros(1)).__name__ == "hvdcomp.arrays.torch_arrays"
    assert arrays_for(torch.nn.Parameter(torch.zeros(1))).__name__ == "hvdcomp.arrays.torch_arrays"


@pytest.mark.parametrize(("backend", "dtype"), EVERY_DTYPE)
def test_descriptions(backend: str, dtype: str) -> None:
    x = make(backend, [[1.0, 2.0]], dtype)
    xp = arrays_for(x)
    assert xp.dtype_name(x) == dtype
    assert xp.as_bytes(x).shape[0] == 2 * dtype_bytes(dtype)
    assert xp.device(x) == "cpu"
    assert xp.astype(x, dtype) is x
    assert xp.dtype_name(xp.astype(x, "float64")) == "float64"
    zeros = xp.zeros((2, 3), like=x)
    assert xp.dtype_name(zeros) == dtype
    assert not as_numpy(zeros).any()
    assert zeros.shape == (2, 3)


@given(arrays())
def test_shapes_and_bytes(x: np.ndarray) -> None:
    found = everywhere(x)
    same(*(xp.flatten(array) for xp, array in found))
    same(*(xp.reshape(array, (x.size, 1)) for xp, array in found))
    for xp, array in found:
        packed = xp.as_bytes(array)
        assert tuple(packed.shape) == (x.nbytes,)
        assert bits(packed) == x.tobytes()
        back = xp.from_bytes(packed, like=array)
        assert tuple(back.shape) == x.shape
        assert bits(back) == x.tobytes()


@given(arrays(shapes=hnp.array_shapes(min_dims=2, max_dims=2, max_side=6)))
def test_row_major_order_of_transposed_input(x: np.ndarray) -> None:
    found = everywhere(x)
    same(*(array.T for _, array in found))
    same(*(xp.flatten(array.T) for xp, array in found))
    for xp, array in found:
        assert bits(xp.as_bytes(array.T)) == np.ascontiguousarray(x.T).tobytes()
    same(*(xp.concatenate([array, array], axis=1) for xp, array in found))


@given(st.lists(arrays(shapes=hnp.array_shapes(min_dims=1, max_dims=1, min_side=0)), min_size=1, max_size=4))
def test_concatenate_makes_fresh_storage(pieces: list[np.ndarray]) -> None:
    with np.errstate(over="ignore"):
        pieces = [piece.astype(np.float32) for piece in pieces]
    made = [[make(backend, piece) for piece in pieces] for backend in INSTALLED]
    same(*(arrays_for(each[0]).concatenate(each) for each in made))
    for xp, array in everywhere(np.ones(3)):
        alone = xp.concatenate([array])
        alone += 1
        assert as_numpy(array).tolist() == [1, 1, 1]


@given(
    hnp.arrays(np.float32, st.integers(0, 40), elements=st.floats(width=32) | st.sampled_from(SPECIAL).map(np.float32))
)
def test_bfloat16_bits_are_those_of_torch(x: np.ndarray) -> None:
    ours = numpy_arrays.to_bfloat16_bits(x)
    assert ours.dtype == np.int16
    nan = np.isnan(x)
    # Which NaN it is differs between torch's own code paths.
    assert np.isnan(numpy_arrays.from_bfloat16_bits(ours)[nan]).all()
    same(*(xp.to_bfloat16_bits(array) for xp, array in everywhere(x[~nan])))
    same(*(xp.from_bfloat16_bits(array) for xp, array in everywhere(ours)))


@pytest.mark.parametrize("backend", OTHERS)
def test_bfloat16_of_every_exponent_and_rounding_case(backend: str) -> None:
    """All 65536 upper halves, each with lower halves below, at and above the middle."""
    upper = np.repeat(np.arange(2**16, dtype=np.uint32) << 16, 5)
    x = (upper + np.tile(np.array([0, 1, 0x7FFF, 0x8000, 0x8001], np.uint32), 2**16)).view(np.float32)
    nan = np.isnan(x)
    ours = numpy_arrays.to_bfloat16_bits(x)
    other = make(backend, x)
    np.testing.assert_array_equal(ours[~nan], as_numpy(arrays_for(other).to_bfloat16_bits(other))[~nan])
    assert np.isnan(numpy_arrays.from_bfloat16_bits(ours)[nan]).all()


def test_every_bfloat16_pattern_goes_there_and_back() -> None:
    patterns = np.arange(-(2**15), 2**15).astype(np.int16)
    values, *others = (xp.from_bfloat16_bits(array) for xp, array in everywhere(patterns))
    same(values, *others)
    finite = ~np.isnan(values)
    np.testing.assert_array_equal(numpy_arrays.to_bfloat16_bits(values)[finite], patterns[finite])


@given(arrays(shapes=hnp.array_shapes(max_dims=1, max_side=40)), st.data())
def test_top_k(x: np.ndarray, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, x.size))
    key = np.where(np.isnan(x), np.inf, np.abs(x).astype(np.float64))
    rank = np.stack([np.isnan(x), key])  # NaN above inf
    expected = np.sort(np.lexsort(rank[::-1])[-k:])
    for xp, array in everywhere(x):
        indices = Magnitudes(xp, array, k).top(k)
        assert dtype_of(indices) == "int32"
        assert tuple(indices.shape) == (k,)
        chosen = as_numpy(indices)
        assert len(set(chosen.tolist())) == k
        assert np.isnan(x[chosen]).sum() == min(k, np.isnan(x).sum())
        np.testing.assert_array_equal(np.sort(key[chosen]), np.sort(key[expected]))


@pytest.mark.parametrize(("backend", "dtype"), EVERY_DTYPE)
def test_top_k_of_ties_is_exactly_k(backend: str, dtype: str) -> None:
    x = make(backend, np.tile([1.0, -1.0], 500), dtype)
    for k in (1, 7, 500, 999, 1000):
        indices = as_numpy(Magnitudes(arrays_for(x), x, k).top(k))
        assert len(np.unique(indices)) == k


@pytest.mark.parametrize("backend", EVERY_BACKEND)
@pytest.mark.parametrize("zeros", [0, 19_000])
def test_elements_set_aside_answer_as_all_do(zeros: int, backend: str) -> None:
    values = np.random.default_rng(2).laplace(size=20_000).astype(np.float32)
    values[:zeros] = 0
    x = make(backend, values, "float32")
    magnitudes = Magnitudes(arrays_for(x), x, 2000)
    assert magnitudes._set_aside is not None
    assert 2000 <= len(magnitudes._set_aside.values) < 6000
    for threshold in np.float32([0.5, 1.0, 1.5, 2.0, 2.3, 3.0, 5.0]):
        reaching = np.abs(values)[np.abs(values) >= threshold]
        assert magnitudes.count(threshold) == len(reaching)
        assert magnitudes.mean_excess(threshold) == pytest.approx((reaching - threshold).mean(), rel=1e-4)
    for k in (1, 1500, 2000):
        chosen = np.abs(values[as_numpy(magnitudes.top(k))])
        np.testing.assert_array_equal(np.sort(chosen), np.sort(np.abs(values))[-k:])


@given(arrays(shapes=hnp.array_shapes(max_dims=1, max_side=30), finite=True), st.data())
def test_take_and_add_at(x: np.ndarray, data: st.DataObject) -> None:
    indices = np.array(data.draw(st.lists(st.integers(0, x.size - 1), unique=True)), np.int32)
    results = []
    for xp, array in everywhere(x):
        places = xp.from_numpy(indices.copy(), like=array)
        taken = xp.take(array, places)
        taken += 1  # fresh storage: the vector stays
        assert bits(array) == x.tobytes()
        results.append((taken, xp.add_at(array, places, taken)))
    same(*(taken for taken, _ in results))
    same(*(added for _, added in results))
    expected = x.copy()
    expected[indices] = x[indices] + (x[indices] + x.dtype.type(1))
    np.testing.assert_array_equal(results[0][1], expected)


@given(st.lists(st.integers(0, 9)), st.sampled_from([np.int32, np.int64]))
def test_unique_and_counts(numbers: list[int], dtype: type) -> None:
    for xp, array in everywhere(np.array(numbers, dtype)):
        values, places = xp.unique(array)
        assert (xp.dtype_name(values), xp.dtype_name(places)) == (np.dtype(dtype).name, "int64")
        assert values.tolist() == sorted(set(numbers))
        assert values[places].tolist() == numbers
        assert xp.counts(array, 12).tolist() == [numbers.count(one) for one in range(12)]


@given(arrays(finite=True), st.floats(-2, 2, width=16))
def test_a_product_with_a_number_keeps_the_type(x: np.ndarray, factor: float) -> None:
    result, *others = (array * factor for _, array in everywhere(x))
    assert result.dtype == x.dtype
    same(result, *others)


@given(
    hnp.arrays(np.float64, hnp.array_shapes(min_dims=2, max_dims=2, max_side=8), elements=st.floats(-9, 9, width=16)),
    st.sampled_from(["float32", "float64"]),
)
def test_matrices(x: np.ndarray, dtype: str) -> None:
    x = x.astype(dtype)
    (_, a), *others = everywhere(x)
    tolerance = {"rtol": 1e-5 if dtype == "float32" else 1e-12, "atol": 1e-3 if dtype == "float32" else 1e-10}
    for _, b in others:
        np.testing.assert_allclose(a @ a.T, as_numpy(b @ b.T), **tolerance)


@given(arrays(finite=True), st.floats(0, 2, width=16))
def test_reciprocal_or_zero(x: np.ndarray, threshold: float) -> None:
    (_, a), *_ = found = everywhere(np.atleast_1d(x))
    thresholds = [array for _, array in everywhere(np.full_like(a, threshold))]
    with np.errstate(over="ignore"):
        results = [xp.reciprocal_or_zero(array, least) for (xp, array), least in zip(found, thresholds, strict=True)]
        expected = np.array([0 if not v > threshold else a.dtype.type(1) / v for v in a.flat], a.dtype)
    same(*results)
    np.testing.assert_array_equal(results[0].ravel(), expected)


@given(arrays(finite=True))
def test_where_broadcasts(x: np.ndarray) -> None:
    same(*(xp.where(array > 0, array, -array) for xp, array in everywhere(x)))


@given(st.lists(arrays(), min_size=1, max_size=5))
def test_poison_is_nan_exactly_where_something_is_not_finite(pieces: list[np.ndarray]) -> None:
    clean = all(np.isfinite(piece).all() for piece in pieces)
    for backend in INSTALLED:
        made = [make(backend, piece, piece.dtype.name) for piece in pieces]
        xp = arrays_for(made[0])
        element = xp.found_inf(made)
        assert xp.dtype_name(element) == "float32"
        assert tuple(element.shape) == (1,)
        assert (as_numpy(element)[0] == 0) if clean else np.isnan(as_numpy(element)[0])
        assert (element.item() == 0) is clean


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("backend", "dtype"), EVERY_DTYPE)
def test_poison_finds_one_bad_element_anywhere(backend: str, dtype: str, value: float) -> None:
    for place in (0, 500, 999):
        values = np.linspace(-60000, 60000, 1000)
        pieces = [make(backend, values, dtype), make(backend, np.ones((3, 0)), dtype), make(backend, values, dtype)]
        xp = arrays_for(pieces[0])
        assert xp.found_inf(pieces).item() == 0
        pieces[2] = replaced(pieces[2], (place,), value)
        assert xp.found_inf(pieces).item() != 0


@pytest.mark.parametrize(("backend", "dtype"), EVERY_DTYPE)
def test_select_and_spoil(backend: str, dtype: str) -> None:
    for shape in [(), (3,), (2, 0), (2, 3, 2, 2)]:
        x, y = (make(backend, np.full(shape, value), dtype) for value in (1.0, 2.0))
        xp = arrays_for(x)
        zero, nan = make(backend, [0.0]), make(backend, [np.nan])
        assert bits(xp.select(zero, x, y)) == bits(x)
        assert bits(xp.select(nan, x, y)) == bits(y)
        assert bits(xp.spoil(x, zero)) == bits(y - 1)
        spoiled = xp.spoil(x, nan)
        assert xp.dtype_name(spoiled) == dtype
        assert tuple(spoiled.shape) == shape
        assert np.isnan(as_numpy(spoiled)).sum() == (1 if spoiled.shape != (2, 0) else 0)


def test_spoil_any_layout() -> None:
    torch = pytest.importorskip("torch")
    from hvdcomp.arrays import torch_arrays

    for x in (torch.ones(2, 3, 4, 4).contiguous(memory_format=torch.channels_last), torch.ones(4, 6).t()):
        assert torch.isnan(torch_arrays.spoil(x, torch.tensor([np.nan]))).sum() == 1
    assert np.isnan(numpy_arrays.spoil(np.ones((4, 6)).T, np.array([np.nan], np.float32))).sum() == 1


@pytest.mark.parametrize("backend", EVERY_BACKEND)
@pytest.mark.parametrize("dtype", FLOATS)
def test_aligned_begins_with_a_cache_line_in_row_major_order(backend: str, dtype: str) -> None:
    storage = make(backend, np.arange(80.0), dtype)
    xp = arrays_for(storage)
    for begin in range(32):
        for turned in (False, True):
            x = xp.reshape(storage[begin : begin + 12], (3, 4))
            x = x.T if turned else x
            found = xp.aligned(x)
            assert (found.ctypes.data if backend == "numpy" else found.data_ptr()) % 64 == 0
            assert found.flags.c_contiguous if backend == "numpy" else found.is_contiguous()
            assert xp.dtype_name(found) == dtype
            np.testing.assert_array_equal(as_numpy(found), as_numpy(x))
            assert xp.aligned(found) is found


@pytest.mark.parametrize("backend", EVERY_BACKEND)
@pytest.mark.parametrize("dtype", FLOATS)
def test_like_original_takes_type_shape_and_layout(backend: str, dtype: str) -> None:
    values = np.arange(120.0).reshape(2, 3, 4, 5)
    for axes in [(0, 1, 2, 3), (0, 2, 3, 1), (3, 2, 1, 0)]:  # the second is channels_last, the third column-major
        stored = make(backend, np.zeros([values.shape[axis] for axis in axes]), dtype)
        back = tuple(np.argsort(axes))
        original = stored.transpose(back) if backend == "numpy" else stored.permute(back)
        result = arrays_for(original).like_original(make(backend, values.ravel()), original)
        assert result.dtype == original.dtype
        assert tuple(result.shape) == values.shape
        layout = ("strides",) if backend == "numpy" else ("stride",)
        for name in layout:
            ours, theirs = getattr(result, name), getattr(original, name)
            assert (ours() if callable(ours) else ours) == (theirs() if callable(theirs) else theirs)
        np.testing.assert_array_equal(as_numpy(result), values)


@pytest.mark.parametrize("backend", INSTALLED)
def test_a_change_in_place_is_refused_or_counted(backend: str) -> None:
    x = make(backend, np.ones((2, 3)), "float32")
    xp = arrays_for(x)
    given, before = xp.protected(x), xp.changes(x)
    assert xp.share_storage(given, x)
    assert xp.share_storage(xp.flatten(x), x)
    assert not xp.share_storage(given + 0, x)
    assert xp.changes(x) == before
    if backend == "numpy":
        with pytest.raises(ValueError, match="read-only"):
            given += 1
    else:
        given += 1
        assert xp.changes(x) != before


@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_marks_measure_time(backend: str) -> None:
    like = make(backend, [1.0])
    xp = arrays_for(like)
    first, second = xp.mark(like), xp.mark(like)
    assert 0 <= xp.seconds_between(first, second) < 1


def test_hadamard_and_dots_are_of_each_row() -> None:
    rng = np.random.default_rng(0)
    for size in (1, 2, 64, 1024):
        x, y = rng.standard_normal((2, 3, size)).astype(np.float32)
        matrix = np.ones((1, 1))
        while len(matrix) < size:
            matrix = np.kron([[1, 1], [1, -1]], matrix)
        for backend in INSTALLED:
            array, xp = make(backend, x), arrays_for(make(backend, x))
            np.testing.assert_allclose(as_numpy(xp.hadamard(array)), x @ matrix, rtol=1e-4, atol=1e-4)
            dots = as_numpy(xp.row_dots(array, make(backend, y)))
            assert dots.dtype == np.float64
            np.testing.assert_allclose(dots[:, 0], np.sum(x.astype(float) * y, 1), rtol=1e-12)
