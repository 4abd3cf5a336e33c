"""The kernels of the quantizers, against the same tensors by themselves in NumPy."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hvdcomp import EDEN, FP8, QSGD, Compressor, GlobalQSGD, Int4, Int8, Natural, TernGrad, kernels
from tests.harness import fewer_examples, some_of
from tests.kernel_buckets import assert_as_by_themselves, run_buckets
from tests.kernel_calls import instruction_set  # noqa: F401

pytestmark = pytest.mark.skipif(not kernels.available(), reason=f"no kernels: {kernels.why_not()}")

SIZES = st.lists(
    st.integers(1, 70) | st.integers(500, 1600) | st.sampled_from([511, 512, 513, 4096, 4097, 8200, 66_000]),
    min_size=1, max_size=4,
)  # fmt: skip

KINDS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "normal": lambda random, size: random.standard_normal(size) * 1e-3,
    "some zero": lambda random, size: random.standard_normal(size) * (random.random(size) < 0.3),
    "zero": lambda random, size: np.zeros(size) * random.choice([-1, 1], size),
    "equal": lambda random, size: np.full(size, random.standard_normal()),
    "large": lambda random, size: random.uniform(-1e36, 1e36, size),
    "denormal": lambda random, size: random.standard_normal(size) * 1e-40,
    "small": lambda random, size: random.standard_normal(size) * 1e-28,
    "of many sizes": lambda random, size: random.standard_normal(size) * 10.0 ** random.uniform(-30, 30, size),
}


def draw(seed: int, kind: str, sizes: list[int], ranks: int) -> list[list[np.ndarray]]:
    random = np.random.default_rng(seed)
    return [[KINDS[kind](random, size).astype(np.float32) for size in sizes] for _ in range(ranks)]


def of_levels(seed: int, length: int, count: int) -> list[Compressor]:
    return [QSGD(bits=int(bits), bucket=length) for bits in np.random.default_rng(seed).integers(1, 9, count)]


MAKERS: dict[str, Callable[[int, int], list[Compressor]]] = {
    **{
        f"qsgd of {length}": lambda seed, count, length=length: of_levels(seed, length, count)
        for length in (1, 7, 64, 512, 1000, 4096, 5000, 2**40)
    },
    **{
        str(one): lambda seed, count, one=one: [one] * count
        for one in (
            Int8(),
            Int8(rounding="stochastic"),
            Int8(block=5000),
            Int4(),
            Int4(block=7),
            Int4(rounding="stochastic"),
            FP8(),
            FP8(rounding="stochastic"),
            FP8(format="e5m2"),
            FP8(block=100, rounding="stochastic", format="e5m2"),
        )
    },
    "terngrad": lambda seed, count: [TernGrad()] * count,
    "terngrad without clipping": lambda seed, count: [TernGrad(clip=0)] * count,
    "natural": lambda seed, count: [Natural()] * count,
    **{
        f"eden of {block}": lambda seed, count, block=block: [
            EDEN(bits=int(bits), block=block) for bits in np.random.default_rng(seed).integers(1, 5, count)
        ]
        for block in (512, 1024)
    },
    "globalqsgd": lambda seed, count: [
        GlobalQSGD(bits=int(bits)) for bits in np.random.default_rng(seed).integers(3, 17, count)
    ],
}


@pytest.mark.parametrize(("method", "kind"), some_of(3, MAKERS, KINDS))
@fewer_examples(3)
@given(seed=st.integers(0, 10**6), sizes=SIZES, ranks=st.integers(1, 3), start=st.integers(0, 15))
@example(seed=2, sizes=[1600], ranks=1, start=0)  # of equal numbers, a norm halfway between two float32
def test_a_bucket_does_what_its_tensors_do_by_themselves(
    method: str, kind: str, seed: int, sizes: list[int], ranks: int, start: int
) -> None:
    compressors, xs = MAKERS[method](seed, len(sizes)), draw(seed, kind, sizes, ranks)
    keeps, threads = bool(seed % 2), 1 + seed % 3
    steps = run_buckets(compressors, xs, seed, keeps, start=start, threads=threads)
    assert_as_by_themselves(compressors, xs, steps, seed, keeps=keeps)
    for step in steps:  # a mean of very large numbers may be infinite
        assert step.found_inf_after == (not all(np.isfinite(mean).all() for mean in step.means))


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("method", MAKERS)
def test_every_instruction_set_gives_the_same(method: str) -> None:
    sizes = [3, 70_001, 513, 4096, 1]
    compressors, xs = MAKERS[method](3, len(sizes)), draw(7, "of many sizes", sizes, 2)
    steps = run_buckets(compressors, xs, 1, True)
    assert_as_by_themselves(compressors, xs, steps, 1, keeps=True)


@pytest.mark.parametrize("method", MAKERS)
def test_another_thing_may_be_compressed_in_place_of_x(method: str) -> None:
    """What was sent of it is taken off x."""
    sizes = [3, 66_000, 513]
    compressors, xs = MAKERS[method](3, len(sizes)), draw(7, "normal", sizes, 1)
    (sources,) = draw(8, "normal", sizes, 1)
    steps = run_buckets(compressors, xs, 1, True, sources=sources)
    # The mean of one rank is what it sent.
    for place, (x, left, sent) in enumerate(zip(xs[0], steps[0].x, steps[0].means, strict=True)):
        np.testing.assert_array_equal(left, x - sent, str(place))
    assert_as_by_themselves(compressors, xs, steps, 1, sources=[sources])


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("method", MAKERS)
def test_what_is_not_finite_is_found(method: str) -> None:
    sizes = [5, 66_000, 9]
    for value, place, keeps in itertools.product([np.inf, -np.inf, np.nan], [0, 511, 65_999], [False, True]):
        xs = draw(1, "normal", sizes, 1)
        xs[0][1][place] = value
        with np.errstate(all="ignore"):
            (step,) = run_buckets(MAKERS[method](2, len(sizes)), xs, keeps=keeps)
        assert step.found_inf, (value, place, keeps)


def test_scales_beyond_float32_are_found_in_the_result() -> None:
    xs = [[np.full(512, 3e38, np.float32)]]
    with np.errstate(all="ignore"):
        (step,) = run_buckets([QSGD(bits=4)], xs)
    assert not step.found_inf
    assert step.found_inf_after


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize(
    ("method", "largest"), [(Int4(), 7), (Int8(), 127), (FP8(), 448), (FP8(format="e5m2"), 57344)], ids=str
)
def test_ties_are_rounded_as_by_themselves(method: Compressor, largest: int) -> None:
    """Halves between whole numbers, and between floats of few bits."""
    floats = np.multiply.outer(2.0 ** np.arange(-18, 16), 1 + np.arange(32) / 32).reshape(-1)
    x = np.concatenate([np.arange(2 * min(largest, 127)) / 2, floats[floats < largest]]).astype(np.float32)
    x = np.concatenate([x, -x])
    x[::64] = largest
    assert_as_by_themselves([method], [[x]], run_buckets([method], [[x]]))


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("method", ["qsgd of 512", "natural"])
def test_large_buckets_go_past_the_caches(method: str) -> None:
    """From 8 MB on, with parts shorter than a cache line and ends within one."""
    sizes = [3, 2_097_169, 29]
    compressors, xs = MAKERS[method](3, len(sizes)), draw(7, "normal", sizes, 1)
    assert_as_by_themselves(compressors, xs, run_buckets(compressors, xs, start=1))


@pytest.mark.usefixtures("instruction_set")
def test_natural_compression_of_the_largest_magnitudes() -> None:
    """Nothing is rounded up to infinity; but two ranks may add up to it, which is found."""
    x = np.float32([1, -1]).repeat(600) * np.float32(2.0**127) * np.linspace(1, 1.999, 1200, dtype=np.float32)
    steps = run_buckets([Natural()], [[x]])
    assert_as_by_themselves([Natural()], [[x]], steps)
    np.testing.assert_array_equal(np.abs(steps[0].means[0]), np.float32(2.0**127))
    assert not steps[0].found_inf_after
    with np.errstate(over="ignore"):
        assert all(step.found_inf_after for step in run_buckets([Natural()], [[x], [x]]))
