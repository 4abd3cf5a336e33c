"""The kernels of random-k, against the same tensors by themselves in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdcomp import RandomK, kernels
from tests.kernel_buckets import assert_as_by_themselves, run_buckets
from tests.kernel_calls import instruction_set  # noqa: F401
from tests.lockstep import run_lockstep

pytestmark = [
    pytest.mark.skipif(not kernels.available(), reason=f"no kernels: {kernels.why_not()}"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]

SIZES = st.lists(
    st.integers(1, 130) | st.sampled_from([511, 513, 4097, 65_535, 65_536, 65_537, 131_073]), min_size=1, max_size=4
)


def normal(seed: int, sizes: list[int], ranks: int, scale: float = 1) -> list[list[np.ndarray]]:
    random = np.random.default_rng(seed)
    return [[(random.standard_normal(size) * scale).astype(np.float32) for size in sizes] for _ in range(ranks)]


@given(
    seed=st.integers(0, 10**6),
    sizes=SIZES,
    ratio=st.sampled_from([1e-4, 0.01, 0.3, 0.77, 1.0]),
    unbiased=st.booleans(),
    values=st.sampled_from(["same", "fp16"]),
    scale=st.sampled_from([1e-7, 1.0, 1e6]),
    ranks=st.integers(1, 3),
    start=st.integers(0, 15),
)
def test_a_bucket_does_what_its_tensors_do_by_themselves(
    seed: int, sizes: list[int], ratio: float, unbiased: bool, values: str, scale: float, ranks: int, start: int
) -> None:
    scale = min(scale, 1e-3) if unbiased and values == "fp16" else scale  # beyond the bound: a test below
    compressors, xs = [RandomK(ratio, unbiased=unbiased, values=values)] * len(sizes), normal(seed, sizes, ranks, scale)
    keeps = bool(seed % 2)
    steps = run_buckets(compressors, xs, seed, keeps, start=start, threads=1 + seed % 3)
    assert_as_by_themselves(compressors, xs, steps, seed, keeps=keeps)
    assert not any(step.found_inf_after for step in steps)


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("values", ["same", "fp16"])
def test_every_instruction_set_gives_the_same(values: str) -> None:
    """On any number of elements from 1 to 70 and more, of all or of some."""
    for ratio in (0.3, 1.0):
        sizes = [*range(1, 70), 127, 128, 129, 70_001]
        compressors, xs = [RandomK(ratio, values=values)] * len(sizes), normal(3, sizes, 2)
        assert_as_by_themselves(compressors, xs, run_buckets(compressors, xs, 1, True), 1, keeps=True)


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("place", [0, 511, 65_999])
@pytest.mark.parametrize("keeps", [False, True])
def test_what_is_not_finite_is_found_drawn_or_not(keeps: bool, place: int, value: float) -> None:
    (xs,) = normal(1, [5, 66_000, 9], 1)
    xs[1][place] = value
    for ratio in (0.001, 1.0):
        (step,) = run_buckets([RandomK(ratio)] * 3, [xs], keeps=keeps)
        assert step.found_inf


@pytest.mark.parametrize("place", [0, 511, 65_999])
def test_what_overflows_is_found(place: int) -> None:
    """Where elements are scaled, and where the ranks' are added."""
    (xs,) = normal(1, [5, 66_000, 9], 1)
    xs[1][place] = 3e38
    assert all(step.found_inf_after for step in run_buckets([RandomK(1.0)] * 3, [xs, xs]))
    few = [RandomK(0.9999, unbiased=True)] * 3  # six of 66,000 elements are not sent, the others grow by 1e-4
    assert not run_buckets(few, [xs])[0].found_inf
    xs[1][place] = np.finfo(np.float32).max
    (step,) = run_buckets(few, [xs])
    assert step.found_inf
    assert not np.isfinite(step.means[1][place])


def test_values_in_half_precision_are_held_to_what_all_ranks_can_add() -> None:
    x = np.float32([4e4, -4e4, 1e30, -1e30, 1, -1, 3e4, -3e4])
    steps = run_buckets([RandomK(1.0, values="fp16")], [[x], [x]])
    for step in steps:
        np.testing.assert_array_equal(step.means[0], np.clip(x, -16376, 16376))
        assert not step.found_inf_after


@pytest.mark.usefixtures("instruction_set")
def test_an_unbiased_value_that_would_be_clipped_counts_as_not_finite_unless_the_excess_is_kept() -> None:
    """A step without it is better than a mean that is always too small."""
    method = RandomK(1.0, unbiased=True, values="fp16")
    for value, beyond in ((16376, False), (-16376, False), (16400, True), (-16400, True)):
        x = np.float32([1, value, 2])
        for keeps in (False, True):
            steps = run_buckets([method], [[x], [x]], keeps=keeps)
            assert [step.found_inf for step in steps] == [beyond and not keeps] * 2
            assert not any(step.found_inf_after for step in steps)
        np.testing.assert_array_equal(steps[0].x[0], x - np.clip(x, -16376, 16376))
        (mean,) = {outcome.mean.tobytes() for outcome in run_lockstep(method, [x, x], 0, 5, "t").outcomes}
        assert np.isfinite(np.frombuffer(mean, np.float32)).tolist() == [True, not beyond, True]
