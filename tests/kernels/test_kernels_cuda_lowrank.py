"""PowerSGD's kernels for CUDA devices in Triton's interpreter, each against a few lines of NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from hvdcomp import PowerSGD
from hvdcomp.arrays import numpy_arrays
from hvdcomp.compressors.bucket import Bucket
from hvdcomp.compressors.low_rank import nonzero_columns, orthogonalize
from hvdcomp.compressors.memory import NoMemory
from hvdcomp.compressors.protocol import TensorInfo
from hvdcomp.kernels import cuda
from tests.interpreted import needs_triton
from tests.kernel_calls import degenerate_columns

torch = pytest.importorskip("torch")
pytestmark = [
    needs_triton,
    pytest.mark.usefixtures("in_interpreter"),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning"),
]


class Matrices:
    """A bucket of matrices, and its kernels; factors are lists of arrays (length, rank)."""

    def __init__(self, matrices: Sequence[np.ndarray], rank: int) -> None:
        self.matrices = [torch.from_numpy(np.ascontiguousarray(one, np.float32)) for one in matrices]
        shapes = [tuple(one.shape) for one in matrices]
        self.ranks = [min(rank, *shape) for shape in shapes]
        ends = np.cumsum(np.array(shapes) * np.array(self.ranks)[:, None], axis=0)
        tensors = [TensorInfo(f"t{place}", shape) for place, shape in enumerate(shapes)]
        self.bucket = Bucket(tensors, [PowerSGD(rank)] * len(shapes), NoMemory(), torch.device("cpu"))
        segments = self.bucket.segments
        segments["count"] = self.ranks
        segments["p_factor"][1:], segments["q_factor"][1:] = ends[:-1].T
        segments["columns"] = [columns for _, columns in shapes]
        segments["gradient"] = [one.data_ptr() for one in self.matrices]
        self.lengths = list(zip(*shapes, strict=True))

    def multiply(self, factors: Sequence[np.ndarray], of_rows: bool) -> tuple[Any, ...]:
        """Q = M' P of P if `of_rows`, else P = M Q of Q: the orthonormal factors, the products, and the flag."""
        read = torch.from_numpy(np.concatenate([one.astype(np.float32).T.reshape(-1) for one in factors]))
        unit = torch.full_like(read, 7)
        product = torch.full((int(np.dot(self.lengths[of_rows], self.ranks)),), 7.0)
        self.bucket.kernels.begin(None, False)
        flag = self.bucket.call("lowrank_q" if of_rows else "lowrank_p", read, unit, product, True)
        return self._apart(unit, self.lengths[not of_rows]), self._apart(product, self.lengths[of_rows]), flag

    def _apart(self, vector: Any, lengths: Sequence[int]) -> list[np.ndarray]:
        ends = np.cumsum(np.multiply(lengths, self.ranks))[:-1]
        parts = np.split(vector.numpy(), ends)
        return [part.reshape(rank, -1).T for part, rank in zip(parts, self.ranks, strict=True)]


def orthonormal(factor: np.ndarray, of_rows: bool = False) -> np.ndarray:
    """What the kernels make of one factor."""
    length, rank = factor.shape
    matrices = Matrices([np.zeros((length, rank) if of_rows else (rank, length))], rank)
    (unit,), _, _ = matrices.multiply([factor], of_rows)
    return unit


def ill_conditioned(length: int, rank: int, condition: float) -> np.ndarray:
    """A factor whose singular values fall from 1 to 1 / condition."""
    rng = np.random.default_rng(length * rank)
    left, right = (np.linalg.qr(rng.normal(size=(n, rank)))[0] for n in (length, rank))
    found: np.ndarray = ((left * np.geomspace(1, 1 / condition, rank)) @ right).astype(np.float32)
    return found


@pytest.mark.parametrize(
    ("length", "rank", "condition"),
    [
        (700, 4, 1e4),
        *(
            pytest.param(length, rank, condition, marks=pytest.mark.thorough)
            for length, rank in [(1, 1), (5, 1), (5, 2), (9, 7), (1_500, 3), (33, 8), (200, 17), (64, 32)]
            for condition in (1.0, 1e3, 1e5)
        ),
        pytest.param(30_522, 4, 1e5, marks=pytest.mark.thorough),
    ],
)
@pytest.mark.parametrize("of_rows", [False, True])
def test_columns_are_orthonormal_and_span_the_same(length: int, rank: int, condition: float, of_rows: bool) -> None:
    """More nearly so than by modified Gram-Schmidt in single precision, and as QR does it in double precision."""
    factor = ill_conditioned(length, rank, condition)
    unit = orthonormal(factor, of_rows).astype(float)
    expected = np.linalg.qr(factor.astype(float))[0]
    expected *= np.sign((expected * factor).sum(0))
    np.testing.assert_allclose(unit, expected, rtol=0, atol=1e-7 + 1e-17 * condition**2)

    def error(columns: np.ndarray) -> float:
        return float(np.abs(columns.T.astype(float) @ columns - np.eye(rank)).max())

    assert error(unit) <= 1e-7 + 1e-15 * condition**2
    assert error(unit) <= error(orthogonalize(numpy_arrays, factor)) + 1e-7


@pytest.mark.parametrize("length", [40, *(pytest.param(n, marks=pytest.mark.thorough) for n in (9, 1_025))])
def test_columns_that_say_nothing_become_zero(length: int) -> None:
    start = degenerate_columns(length)
    unit = orthonormal(start)
    with np.errstate(over="ignore"):
        expected = orthogonalize(numpy_arrays, start)
    stand = expected.any(axis=0)
    assert not stand[[2, 4, 5, 7]].any()
    assert (unit.any(axis=0) == stand).all()
    np.testing.assert_allclose(unit.T.astype(float) @ unit, np.diag(stand.astype(float)), atol=2e-7)
    np.testing.assert_allclose(unit, expected, atol=1e-4)


def test_what_is_left_of_a_column_counts_as_it_does_in_gram_schmidt() -> None:
    """Just above the threshold, and just below; and no noise stands where two columns nearly depend on each other."""
    first, second, third = np.linalg.qr(np.random.default_rng(0).normal(size=(300, 3)))[0].T
    for share, stands in ((1.3e-5, True), (0.7e-5, False)):
        factor = np.stack([first, first + share * second, third], 1).astype(np.float32)
        for found in (orthonormal(factor), orthogonalize(numpy_arrays, factor)):
            assert found.any(axis=0).tolist() == [True, stands, True]
    factor = np.stack([first, first + 2e-5 * second, second + 1e-2 * third, third], 1).astype(np.float32)
    unit = orthonormal(factor).astype(float)
    np.testing.assert_allclose(unit.T @ unit, np.diag(unit.any(axis=0).astype(float)), atol=1e-2)


SHAPES = [(1, 5), (5, 1), (3, 1_100), (1_030, 3), (20, 70), (9, 7)]


@pytest.mark.parametrize("rank", [2, *(pytest.param(rank, marks=pytest.mark.thorough) for rank in (1, 5, 20, 32))])
def test_products(rank: int) -> None:
    """Of matrices of all forms, in one bucket: P = M Q and Q = M' P of orthonormal factors, and P Q'."""
    shapes = SHAPES[2::2] if rank == 2 else [*SHAPES, (40, 50)]
    rng = np.random.default_rng(rank)
    matrices = Matrices([rng.normal(size=shape) for shape in shapes], rank)
    for of_rows in (False, True):
        start = [
            rng.normal(size=(length, r))
            for length, r in zip(matrices.lengths[not of_rows], matrices.ranks, strict=True)
        ]
        units, products, flag = matrices.multiply(start, of_rows)
        assert flag.item() == 0
        for matrix, unit, product, factor in zip(matrices.matrices, units, products, start, strict=True):
            np.testing.assert_allclose(unit.T.astype(float) @ unit, np.eye(unit.shape[1]), atol=2e-7)
            np.testing.assert_allclose(unit @ (unit.T @ factor), factor, atol=1e-5)
            wide = matrix.numpy().astype(float)
            np.testing.assert_allclose(product, (wide.T if of_rows else wide) @ unit, atol=3e-5)


@pytest.mark.parametrize("of_rows", [False, True])
def test_what_is_not_finite_is_found(of_rows: bool) -> None:
    """In a matrix; and in a factor, where it makes the product NaN."""
    for value in (np.inf, np.nan):
        matrix = np.ones((5, 4), np.float32)
        matrix[2, 3] = value
        matrices = Matrices([np.ones((2, 2)), matrix], 2)
        factors = [np.eye(5, 2) if of_rows else np.eye(4, 2)] * 2
        factors[0] = np.eye(2)
        assert np.isnan(matrices.multiply(factors, of_rows)[2].item())
        matrices = Matrices([np.ones((5, 4))], 2)
        factors[1][1, 1] = value
        _, (product,), flag = matrices.multiply(factors[1:], of_rows)
        assert np.isnan(product).any()
        assert np.isnan(flag.item())
        assert matrices.multiply([np.zeros_like(factors[1])], of_rows)[2].item() == 0


@pytest.mark.parametrize("length", [40, *(pytest.param(n, marks=pytest.mark.thorough) for n in (1, 1_025))])
def test_a_warm_start_keeps_what_a_new_column_cannot_give(length: int) -> None:
    old, new = np.random.default_rng(0).normal(size=(2, length, 5)).astype(np.float32)
    new[:, 1], new[:, 2], new[:, 3] = 0, new[:, 2] * np.float32(1e38), new[:, 3] * np.float32(1e-36)
    new[0, 4] = np.nan
    other = np.ones((3, 3), np.float32)
    matrices = Matrices([np.ones((5, length)), np.ones((3, 3))], 5)
    matrices.ranks[0] = 5
    first, second = matrices.bucket.segments
    first["count"], second["p_factor"], second["q_factor"] = 5, 25, 5 * length
    given = [
        torch.from_numpy(np.concatenate([a.T.reshape(-1), b.reshape(-1)])) for a, b in ((new, other), (old, other))
    ]
    found = torch.empty_like(given[0])
    matrices.bucket.kernels.begin(None, False)
    matrices.bucket.call("lowrank_keep", *given, found, 0)
    kept = found[: 5 * length].numpy().reshape(5, length).T
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(kept, nonzero_columns(numpy_arrays, new, old))
    assert [bool((kept[:, k] == old[:, k]).all()) for k in range(5)] == [False, True, True, True, True]
    assert (found[5 * length :] == 1).all()


def test_tensors_of_a_higher_rank_than_kernels_are_made_for_go_one_by_one() -> None:
    assert cuda.takes(PowerSGD(32), 1 << 20)
    assert not cuda.takes(PowerSGD(33), 1 << 20)
