"""The kernels of PowerSGD, each against a few lines of NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdcomp import PowerSGD, kernels
from hvdcomp.arrays import numpy_arrays
from hvdcomp.arrays.types import matrix_shape
from hvdcomp.compressors.bucket import Bucket, BucketStates
from hvdcomp.compressors.low_rank import nonzero_columns, orthogonalize
from hvdcomp.compressors.memory import ErrorFeedback, NoMemory
from hvdcomp.compressors.protocol import Context, TensorInfo
from hvdcomp.kernels.tables import PRODUCT, Table, Tasks, product
from tests.kernel_calls import degenerate_columns, instruction_set

__all__ = ["instruction_set"]

pytestmark = [
    pytest.mark.skipif(not kernels.available(), reason=f"no kernels: {kernels.why_not()}"),
    pytest.mark.usefixtures("instruction_set"),
]

SHAPES = st.one_of(
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.sampled_from([(3, 1500), (2, 2049), (1030, 3), (70, 1024), (300, 270), (5, 3, 7, 2), (9,), ()]),
)


class Step:
    """A step of a bucket on one of two ranks; the other one sends what `other` makes of it."""

    def __init__(self, matrices: list[np.ndarray], states: list[tuple[np.ndarray, ...]], compressor: PowerSGD,
                 step: int = 0, keeps: bool = True) -> None:  # fmt: skip
        tensors = [TensorInfo(f"t{place}", one.shape) for place, one in enumerate(matrices)]
        self.matrices = matrices
        bucket = Bucket(tensors, [compressor] * len(tensors), ErrorFeedback() if keeps else NoMemory())
        bucket.context = Context("", step, 0, 0, 1)
        bucket.states = BucketStates(states)
        bucket.table.bucket.threads = 2
        self.results = [np.full(one.size, 7, np.float32) for one in matrices]
        self.x = [np.full(one.size, 7, np.float32) for one in matrices]
        bucket.segments["gradient"] = [one.ctypes.data for one in matrices]
        bucket.segments["result"] = [one.ctypes.data for one in self.results]
        bucket.segments["x"] = [one.ctypes.data for one in self.x] if keeps else 0
        self.bucket = bucket
        self.sent: list[np.ndarray] = []
        generator = compressor.aggregate_bucket(bucket)
        answer = None
        try:
            while True:
                self.sent.append(generator.send(answer).array.copy())
                answer = self.sent[-1].copy()
        except StopIteration as stop:
            self.found_inf_after = stop.value

    def left(self, place: int) -> np.ndarray:
        """What is left of x after sending: as NumPy takes it off, and as the kernels do when they make the next x."""
        segment = self.bucket.segments[place]
        assert segment["sent_rule"] == PRODUCT
        in_numpy = self.x[place] - product(segment["sent_product"], self.x[place].size)
        size = in_numpy.size
        table = Table([size])
        nothing, made = np.zeros(size, np.float32), np.empty(size, np.float32)
        (row,) = table.segments
        row["gradient"], row["kept"], row["x"] = nothing.ctypes.data, self.x[place].ctypes.data, made.ctypes.data
        table.segments["rule"], table.segments["product"] = PRODUCT, segment["sent_product"]
        library = kernels.library()
        assert library is not None
        library.hvd_make_x(table.address)
        assert np.array_equal(made, in_numpy)
        return in_numpy

    def state(self, place: int) -> tuple[np.ndarray, ...]:
        assert self.bucket.states is not None
        self.bucket.states.commit()
        arrays = tuple(array.copy() for array in self.bucket.states.arrays(place))
        self.bucket.states.commit()
        return arrays


def columns(vector: np.ndarray, lengths: list[int], ranks: list[int]) -> list[np.ndarray]:
    """The factors that lie behind each other in a vector, (length, rank) each."""
    ends = np.cumsum([length * rank for length, rank in zip(lengths, ranks, strict=True)])
    return [
        vector[end - length * rank : end].reshape(rank, length).T
        for end, length, rank in zip(ends, lengths, ranks, strict=True)
    ]


def case(shapes: list[tuple[int, ...]], rank: int, seed: int) -> tuple[list[np.ndarray], list[tuple[np.ndarray, ...]]]:
    """Matrices and warm starts."""
    rng = np.random.default_rng(seed)
    matrices = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    starts = []
    for shape in map(matrix_shape, shapes):
        r = min(rank, *shape)
        starts.append(tuple(rng.normal(size=(length, r)).astype(np.float32) for length in reversed(shape)))
    return matrices, starts


@settings(max_examples=25)
@given(st.lists(SHAPES, min_size=1, max_size=4), st.integers(1, 9), st.integers(0, 99), st.booleans())
def test_products(shapes: list[tuple[int, ...]], rank: int, seed: int, keeps: bool) -> None:
    matrices, starts = case(shapes, rank, seed)
    step = Step(matrices, [start[:1] for start in starts], PowerSGD(rank), keeps=keeps)
    assert not step.bucket.found_inf
    assert not step.found_inf_after
    rows, widths = zip(*map(matrix_shape, shapes), strict=True)
    ranks = [start[0].shape[1] for start in starts]
    sent_p, sent_q = (
        columns(vector, list(lengths), ranks) for vector, lengths in zip(step.sent, (rows, widths), strict=True)
    )
    for place, (matrix, (start, _)) in enumerate(zip(matrices, starts, strict=True)):
        wide = matrix.reshape(rows[place], widths[place]).astype(float)
        unit = orthogonalize(numpy_arrays, start.astype(float))
        np.testing.assert_allclose(sent_p[place], wide @ unit, rtol=0, atol=2e-5 * np.abs(wide).max() * len(unit))
        unit = orthogonalize(numpy_arrays, sent_p[place])
        close = {"rtol": 0, "atol": 3e-5 * np.abs(wide).max() * len(unit)}
        if np.linalg.cond(sent_p[place].astype(float)) < 1e3:  # which says that its columns say what these are
            np.testing.assert_allclose(sent_q[place], wide.T @ unit, **close)
        # What is sent arrives, and what does not is kept, to the last bit.
        result = step.results[place].reshape(wide.shape)
        assert np.linalg.matrix_rank(result) <= ranks[place]
        np.testing.assert_allclose(result @ np.linalg.pinv(sent_q[place].T.astype(float)) @ sent_q[place].T, result,
                                   rtol=0, atol=1e-3 * np.abs(result).max())  # fmt: skip
        if keeps:
            assert np.array_equal(step.left(place), matrix.reshape(-1) - step.results[place])
        assert np.array_equal(step.state(place)[0], sent_q[place])


@settings(max_examples=15)
@given(st.lists(SHAPES, min_size=1, max_size=3), st.integers(1, 5), st.integers(0, 99), st.booleans())
def test_one_factor_a_step(shapes: list[tuple[int, ...]], rank: int, seed: int, even: bool) -> None:
    matrices, starts = case(shapes, rank, seed)
    step = Step(matrices, starts, PowerSGD(rank, alternating=True), step=4 if even else 5)
    (sent,) = step.sent
    rows, widths = zip(*map(matrix_shape, shapes), strict=True)
    new = columns(sent, list(rows if even else widths), [start[0].shape[1] for start in starts])
    for place, (matrix, (q, p)) in enumerate(zip(matrices, starts, strict=True)):
        wide = matrix.reshape(rows[place], widths[place]).astype(float)
        unit = orthogonalize(numpy_arrays, (q if even else p).astype(float))
        expected = wide @ unit @ unit.T if even else unit @ unit.T @ wide
        kept = (q, new[place]) if even else (new[place], p)
        close = {"rtol": 0, "atol": 3e-5 * np.abs(wide).max() * len(unit)}
        np.testing.assert_allclose(new[place], (wide if even else wide.T) @ unit, **close)
        np.testing.assert_allclose(step.results[place].reshape(wide.shape), expected, **close)
        assert np.array_equal(step.left(place), matrix.reshape(-1) - step.results[place])
        for found, one in zip(step.state(place), kept, strict=True):
            assert np.array_equal(found, one)


@pytest.mark.parametrize("length", [1, 3, 15, 16, 17, 100, 1025])
def test_columns_that_say_nothing_become_zero(length: int) -> None:
    start = degenerate_columns(length)
    bucket = Bucket([TensorInfo("w", (1000, length))], [PowerSGD(9)], NoMemory())
    bucket.segments["count"], bucket.segments["columns"] = 9, length
    matrix, unit = np.zeros((1000, length), np.float32), np.empty((9, length), np.float32)
    p = np.empty(9000, np.float32)
    bucket.segments["gradient"] = matrix.ctypes.data
    bucket.call("lowrank_p", bucket.table.tasks[:0], 0, np.ascontiguousarray(start.T), unit, p, 1)
    with np.errstate(over="ignore"):
        expected = orthogonalize(numpy_arrays, start)
    lost = [k for k in range(9) if not expected[:, k].any()]
    assert {2, 4, 5} <= set(lost)
    assert length < 2 or 7 in lost
    for k in lost:
        assert not unit[k].any()
    gram = unit.astype(float) @ unit.T
    np.testing.assert_allclose(gram, np.diag([float(k not in lost) for k in range(9)]), atol=1e-5)


@pytest.mark.parametrize("length", [5, 64, 1025])
def test_a_warm_start_keeps_what_a_new_column_cannot_give(length: int) -> None:
    rng = np.random.default_rng(0)
    old, new = rng.normal(size=(2, length, 5)).astype(np.float32)
    new[:, 1], new[:, 2], new[:, 3] = 0, new[:, 2] * np.float32(1e38), new[:, 3] * np.float32(1e-36)
    new[1, 4] = np.nan
    bucket = Bucket([TensorInfo("w", (7, length))], [PowerSGD(5)], NoMemory())
    bucket.segments["count"], bucket.segments["columns"] = 5, length
    found = np.empty((5, length), np.float32)
    bucket.call("lowrank_keep", np.ascontiguousarray(new.T), np.ascontiguousarray(old.T), found, 0)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(found.T, nonzero_columns(numpy_arrays, new, old))
    assert [bool((found[k] == old[:, k]).all()) for k in range(5)] == [False, True, True, True, True]


@settings(max_examples=20)
@given(SHAPES, st.integers(1, 6), st.integers(0, 99), st.sampled_from([np.inf, -np.inf, np.nan]), st.booleans())
def test_what_is_not_finite_is_found(shape: tuple[int, ...], rank: int, seed: int, value: float, odd: bool) -> None:
    matrices, starts = case([(4, 6), shape], rank, seed)
    place = np.random.default_rng(seed).integers(matrices[1].size)
    matrices[1].reshape(-1)[place] = value
    compressor = PowerSGD(rank, alternating=odd)
    step = Step(matrices, starts if odd else [start[:1] for start in starts], compressor, step=int(odd))
    assert step.bucket.found_inf


@pytest.mark.parametrize("columns_of_one", [3, 40, 1500])
def test_a_product_that_overflows_is_found(columns_of_one: int) -> None:
    """The gradients and the warm start are finite, P is not."""
    huge = np.full((8, columns_of_one), 3e38, np.float32)
    start = np.ones((columns_of_one, 1), np.float32)
    step = Step([huge], [(start,)], PowerSGD(1))
    assert step.bucket.found_inf
    step = Step([np.full((8, columns_of_one), 1e30, np.float32)], [(start,)], PowerSGD(1))
    assert not step.bucket.found_inf
    assert not step.found_inf_after
    np.testing.assert_allclose(step.results[0], 1e30, rtol=1e-5)


@pytest.mark.parametrize("columns_of_one", [2100, 2101])
def test_large_buckets(columns_of_one: int) -> None:
    """Whose results are written past the caches where a row begins at a vector's boundary."""
    (matrix,), ((start, _),) = case([(1024, columns_of_one)], 4, 0)
    step = Step([matrix], [(start,)], PowerSGD(4))
    p, q = (vector.reshape(4, -1).T for vector in step.sent)
    unit = orthogonalize(numpy_arrays, p.copy())
    np.testing.assert_allclose(step.results[0].reshape(matrix.shape), unit @ q.T, rtol=0, atol=1e-4)
    assert np.array_equal(step.left(0), matrix.reshape(-1) - step.results[0])
    assert not step.found_inf_after


@pytest.mark.parametrize("columns_of_one", [5, 16, 40, 2049])
def test_a_result_that_is_not_finite_is_found(columns_of_one: int) -> None:
    """Another rank may send what makes it so: one factor of one column, at each end."""
    for place in (0, columns_of_one - 1):
        bucket = Bucket([TensorInfo("w", (3, columns_of_one))], [PowerSGD(1)], NoMemory())
        bucket.segments["count"], bucket.segments["columns"] = 1, columns_of_one
        result, p, q = np.zeros((3, columns_of_one), np.float32), np.ones(3, np.float32), np.ones(columns_of_one, "f4")
        bucket.segments["result"] = result.ctypes.data
        rows = Tasks([(3, 2)])
        assert not bucket.call("lowrank_decode", *rows.passed, p, q)
        assert (result == 1).all()
        q[place] = np.inf
        assert bucket.call("lowrank_decode", *rows.passed, p, q)
