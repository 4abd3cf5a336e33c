"""Which elements random-k draws: all choices of k elements equally likely, in tensors of any size.

Each statistic has a known distribution where the draw is fair. It is compared with a bound that a fair draw exceeds
with a probability below 1e-6; seeds are fixed.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdcomp import NoMemory, RandomK, kernels
from hvdcomp.arrays import numpy_arrays
from hvdcomp.compressors.bucket import Bucket
from hvdcomp.compressors.protocol import Context, TensorInfo
from hvdcomp.compressors.randomness import distinct_indices, shared_key
from tests.harness import BACKENDS, as_numpy, infos, make, run_engines

needs_kernels = pytest.mark.skipif(not kernels.available(), reason=f"no kernels: {kernels.why_not()}")


def draw(step: int, name: str = "w", seed: int = 0, rank: int = 0, count: int = 20, size: int = 100) -> np.ndarray:
    key = shared_key(Context(name, step, seed, rank, 4), "randomk")
    return distinct_indices(numpy_arrays, key, count, size, like=np.zeros(1))


def draw_many(count: int, size: int, draws: int) -> np.ndarray:
    """(draws, count), drawn by the kernels, which take a thousandth of the time. Tensors' names say their size."""
    tensors = min(draws, 1000)
    compressor = RandomK(float(Fraction(count, size)))
    bucket = Bucket([TensorInfo(f"{size} {i}", (size,)) for i in range(tensors)], [compressor] * tensors, NoMemory())
    gradient = np.zeros(size, np.float32)
    bucket.segments["gradient"] = gradient.ctypes.data
    found = []
    for step in range(draws // tensors):
        bucket.context = Context("", step, 0, 0, 1)
        next(compressor.aggregate_bucket(bucket))
        found.append(bucket.layout.places.reshape(tensors, -1).copy())
    drawn = np.concatenate(found)
    assert drawn.shape == (draws, count)
    return drawn


def deviations(statistic: float, freedom: int) -> float:
    """By how many standard deviations a chi-square is too large (Wilson and Hilferty's approximation)."""
    return float(((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom)))


HIGHEST = 4.8  # standard deviations; 8e-7 of the normal distribution lie above


def chi_square_of_elements(drawn: np.ndarray, size: int) -> tuple[float, int]:
    """Of how often each element was drawn, with its degrees of freedom.

    An element is in a draw with probability p = k / n, and two are negatively correlated, by -1 / (n - 1): in the n - 1
    dimensions that are left, each has the variance p (1 - p) n / (n - 1).
    """
    draws, count = drawn.shape
    hits = np.bincount(drawn.reshape(-1), minlength=size)
    p = count / size
    return float(((hits - draws * p) ** 2).sum() / (draws * p * (1 - p) * size / (size - 1))), size - 1


def chi_square_of_pairs(drawn: np.ndarray, size: int) -> tuple[float, int]:
    """Of how often each pair was drawn together, beyond what follows from how often its elements were drawn.

    Counts of pairs have the variance v, those of pairs that share an element the covariance c1, and those of other
    pairs c0. What is orthogonal to the counts of elements has n (n - 3) / 2 dimensions, and in each the variance
    v - 2 c1 + c0 (the eigenvalues of the Johnson scheme of pairs).
    """
    draws, count = drawn.shape
    together = np.zeros((size, size))
    for start in range(0, draws, 100_000):
        some = drawn[start : start + 100_000].astype(np.int64)
        member = np.zeros((len(some), size), np.float32)
        np.put_along_axis(member, some, 1, axis=1)
        together += member.T @ member
    np.fill_diagonal(together, 0)
    rows = together.sum(axis=0)
    beyond = together - (rows[:, None] + rows) / (size - 2) + rows.sum() / ((size - 1) * (size - 2))
    chance = [math.perm(count, m) / math.perm(size, m) for m in range(5)]
    v, c1, c0 = chance[2] - chance[2] ** 2, chance[3] - chance[2] ** 2, chance[4] - chance[2] ** 2
    upper = beyond[np.triu_indices(size, 1)]
    return float((upper**2).sum() / (draws * (v - 2 * c1 + c0))), size * (size - 3) // 2


@needs_kernels
@pytest.mark.parametrize(
    ("count", "size", "draws"),
    [
        *((count, size, 200_000) for count, size in [(1, 2), (1, 3), (2, 5), (3, 7), (3, 17), (11, 33), (19, 77)]),
        *(  # as many as six rounds need to be seen
            pytest.param(count, size, 1_500_000, marks=pytest.mark.thorough) for count, size in [(8, 16), (2, 64)]
        ),
    ],
)
def test_each_element_and_each_pair_of_a_small_tensor_is_equally_likely(count: int, size: int, draws: int) -> None:
    drawn = draw_many(count, size, draws)
    assert deviations(*chi_square_of_elements(drawn, size)) < HIGHEST
    if 2 <= count <= size - 2 and size > 4:
        assert deviations(*chi_square_of_pairs(drawn, size)) < HIGHEST


@needs_kernels
def test_each_element_is_equally_likely_in_tensors_of_all_sizes() -> None:
    """From 2 to 100 elements; the sum of independent chi-squares is one."""
    for share in (0.01, 0.4, 0.99):
        found = []
        for size in range(2, 101):
            count = min(size - 1, math.ceil(share * size))
            found.append(chi_square_of_elements(draw_many(count, size, 4000), size))
        assert deviations(*np.sum(found, axis=0)) < HIGHEST, share


@needs_kernels
def test_each_element_of_thousands_and_each_distance_are_equally_likely() -> None:
    count, size, draws = 30, 3001, 20_000
    drawn = draw_many(count, size, draws)
    assert deviations(*chi_square_of_elements(drawn, size)) < HIGHEST
    first, second = np.triu_indices(count, 1)
    apart = (drawn[:, first].astype(np.int64) - drawn[:, second]) % size
    hits = np.bincount(np.minimum(apart, size - apart).reshape(-1), minlength=size // 2 + 1)[1:]
    expected = draws * len(first) / (size // 2)
    assert deviations(float(((hits - expected) ** 2).sum() / expected), size // 2 - 1) < HIGHEST


@needs_kernels
def test_kernels_draw_what_numpy_draws() -> None:
    for size in [*range(1, 101), 3001, 65_536]:
        for count in {1, (size + 1) // 2, size}:
            for step, found in enumerate(draw_many(count, size, 1)):
                np.testing.assert_array_equal(np.sort(found), draw(step, f"{size} 0", count=count, size=size))


def test_what_is_drawn_depends_on_seed_name_and_step_but_not_on_rank() -> None:
    first = draw(0)
    assert first.dtype == np.int32
    for rank in range(4):
        np.testing.assert_array_equal(draw(0, rank=rank), first)
    for other in (draw(1), draw(0, name="v"), draw(0, seed=1)):
        assert other.tolist() != first.tolist()


@pytest.mark.parametrize("backend", BACKENDS)
def test_randomk_draws_anew_for_each_tensor_step_and_seed(backend: str) -> None:
    drawn = set()
    for seed in (0, 1):
        (run,) = run_engines(
            1, infos({"v": (200,), "w": (200,)}), RandomK(0.1),
            lambda rank, step: {name: make(backend, np.ones(200)) for name in ("v", "w")}, 3,
            seed=seed, memory=NoMemory,
        )  # fmt: skip
        for result in run.results:
            drawn |= {tuple(np.flatnonzero(as_numpy(result[name]))) for name in ("v", "w")}
    assert {len(indices) for indices in drawn} == {20}
    assert len(drawn) == 2 * 3 * 2


@given(st.integers(1, 30000), st.data())
def test_what_is_drawn_is_distinct_and_in_range(size: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, size))
    indices = draw(0, count=count, size=size)
    assert len(indices) == count
    assert (np.diff(indices) > 0).all()
    assert indices[0] >= 0
    assert indices[-1] < size
