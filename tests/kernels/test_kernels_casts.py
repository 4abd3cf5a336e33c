"""The kernels of the casts, against the same tensors by themselves in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdcomp import BF16, FP16, Compressor, NoCompression, kernels
from tests.kernel_buckets import assert_as_by_themselves, run_buckets
from tests.kernel_calls import instruction_set  # noqa: F401

pytestmark = [
    pytest.mark.skipif(not kernels.available(), reason=f"no kernels: {kernels.why_not()}"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]

METHODS = [
    NoCompression(), FP16(), FP16(exchange="gather"), FP16("stochastic", exchange="gather"), BF16(), BF16("stochastic"),
]  # fmt: skip
SIZES = st.lists(st.integers(1, 70) | st.sampled_from([512, 513, 4097, 66_000]), min_size=1, max_size=4)


def every_kind(random: np.random.Generator, size: int) -> np.ndarray:
    """Floats by their bits, below 65520, with their ties, zeros and denormals."""
    bits = random.integers(0, 2**32, size, np.uint32)
    bits[random.random(size) < 0.3] &= np.uint32(0xFFFF8000)  # halfway between two of bfloat16, or one of them
    bits[random.random(size) < 0.3] &= np.uint32(0xFFFFF000)  # the same of half precision
    bits[random.random(size) < 0.1] &= np.uint32(0x807FFFFF)
    x = bits.view(np.float32)
    small = random.standard_normal(size).astype(np.float32) * np.float32(2.0**-15)
    return np.where(np.abs(x) < 65520, x, small).astype(np.float32)


@pytest.mark.parametrize("method", METHODS, ids=str)
@given(seed=st.integers(0, 10**6), sizes=SIZES, ranks=st.integers(1, 3), start=st.integers(0, 15))
def test_a_bucket_does_what_its_tensors_do_by_themselves(
    method: Compressor, seed: int, sizes: list[int], ranks: int, start: int
) -> None:
    random = np.random.default_rng(seed)
    xs = [[every_kind(random, size) for size in sizes] for _ in range(ranks)]
    keeps = bool(seed % 2) and not method.lossless
    steps = run_buckets([method] * len(sizes), xs, seed, keeps, start=start, threads=1 + seed % 3)
    assert_as_by_themselves([method] * len(sizes), xs, steps, seed, keeps=keeps)
    for step in steps:  # two ranks' sum overflows in half precision
        assert step.found_inf_after == (not all(np.isfinite(mean).all() for mean in step.means))


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_every_instruction_set_gives_the_same(method: Compressor) -> None:
    random = np.random.default_rng(0)
    xs = [[every_kind(random, size) for size in (66_000, 1, 77)] for _ in range(2)]
    assert_as_by_themselves([method] * 3, xs, run_buckets([method] * 3, xs))


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("place", [0, 30_000, 65_999])
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_what_is_not_finite_is_found(method: Compressor, place: int, value: float) -> None:
    x = np.ones(66_000, np.float32)
    x[place] = value
    (step,) = run_buckets([method] * 2, [[np.ones(3, np.float32), x]])
    assert step.found_inf


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize(
    ("method", "largest", "beyond"),
    [
        (FP16(), 65519.99, 65520.0), (FP16("stochastic", exchange="gather"), 65519.99, 65520.0),
        (BF16(), 3.396e38, 3.4e38), (BF16("stochastic"), 3.396e38, 3.4e38),
    ],
    ids=str,
)  # fmt: skip
def test_what_becomes_infinite_in_16_bits_is_found(method: Compressor, largest: float, beyond: float) -> None:
    for length in (1, 40):
        for value, found in ((largest, False), (-largest, False), (beyond, True), (-beyond, True)):
            with np.errstate(over="ignore"):
                (step,) = run_buckets([method], [[np.full(length, value, np.float32)]])
            assert step.found_inf is found


@pytest.mark.parametrize("place", [0, 4095, 30_000, 65_999])
@pytest.mark.parametrize(("method", "value"), [(NoCompression(), 3e38), (FP16(), 65_000), (BF16(), 3e38)], ids=str)
def test_a_sum_that_overflows_is_found(method: Compressor, value: float, place: int) -> None:
    x = np.ones(66_000, np.float32)
    x[place] = value
    for step in run_buckets([method] * 2, [[x, np.ones(3, np.float32)]] * 2):
        assert not step.found_inf
        assert step.found_inf_after


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("start", [0, 1, 15])
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_large_buckets_go_past_the_caches(method: Compressor, start: int) -> None:
    """From 8 MB on, with parts shorter than a cache line and ends within one."""
    random = np.random.default_rng(0)
    xs = [[random.standard_normal(size).astype(np.float32) for size in (3, 2_097_169, 29)]]
    assert_as_by_themselves([method] * 3, xs, run_buckets([method] * 3, xs, start=start))
