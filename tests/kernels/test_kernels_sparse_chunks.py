"""Kernels of the sparsifiers that choose in blocks or chunks: bit by bit what each tensor does by itself in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvdcomp import ARCTopK, ChunkedTopK, MomentumCorrection, TopKC, kernels
from hvdcomp.arrays import numpy_arrays
from hvdcomp.compressors.bucket import Bucket
from hvdcomp.compressors.protocol import Context, TensorInfo
from tests.harness import some_of
from tests.kernel_buckets import assert_as_by_themselves, run_buckets
from tests.kernel_calls import instruction_set  # noqa: F401
from tests.lockstep import run_lockstep

pytestmark = [
    pytest.mark.skipif(not kernels.available(), reason=f"no kernels: {kernels.why_not()}"),
    pytest.mark.usefixtures("instruction_set"),
]
SHAPES = [(1,), (3, 7), (64, 65), (2, 40_001), (65_537,), (300, 301)]
"""Smaller than a block or chunk, ends within one, and more than a task."""

FORMS = (
    TopKC(0.1), TopKC(0.01, chunk=7), TopKC(0.3, chunk=5000), TopKC(0.9, chunk=1), TopKC(0.4, chunk=70_000),
    ARCTopK(0.3), ARCTopK(0.1, sketch=1), ARCTopK(0.5, sketch=19),
    ChunkedTopK(), ChunkedTopK(2, 1), ChunkedTopK(100, 7, "fp16"), ChunkedTopK(65_536, 3000, "float32"),
    ChunkedTopK(300, 300), ChunkedTopK(513, 200, "float32"), ChunkedTopK(255, 3),
    ChunkedTopK(8, 1, "sign"), ChunkedTopK(64, 1, "sign"), ChunkedTopK(4, 3, "sign"), ChunkedTopK(5000, 77, "sign"),
)  # fmt: skip


def numbers(shape: tuple[int, ...], *seed: int) -> np.ndarray:
    """Of different magnitudes, as which of equal elements is sent is left open."""
    random, size = np.random.default_rng(seed), int(np.prod(shape))
    return ((1 + random.permutation(size)) * random.choice([-1, 1], size) / 8192).reshape(shape).astype(np.float32)


@pytest.mark.parametrize(("method", "ranks_threads_start"), some_of(2, FORMS, [(1, 1, 0), (3, 3, 1)]), ids=str)
def test_a_bucket_does_what_its_tensors_do_by_themselves(
    method: Any, ranks_threads_start: tuple[int, int, int]
) -> None:
    """With a level of its own for each tensor, and with and without a memory, and another source than x."""
    ranks, threads, start = ranks_threads_start
    levels = [method.level / (1 + place) if isinstance(method.level, float) else max(1, method.level - place)
              for place in range(len(SHAPES))]  # fmt: skip
    methods = [method.at_level(level) for level in levels]
    xs, sources = (
        [[numbers(shape, kind, rank, place) for place, shape in enumerate(SHAPES)] for rank in range(ranks)]
        for kind in range(2)
    )
    for keeps in (False, True):
        steps = run_buckets(methods, xs, 3, keeps, threads=threads, start=start)
        assert_as_by_themselves(methods, xs, steps, 3, keeps=keeps)
        assert not any(one.found_inf_after for one in steps)
    if ranks == 1:  # run_buckets takes the same sources for all of them
        steps = run_buckets(methods, xs, 3, sources=sources[0])
        assert_as_by_themselves(methods, xs, steps, 3, sources)


@pytest.mark.parametrize("method", [TopKC(0.1, chunk=30), ChunkedTopK(300, 30), ChunkedTopK(5000, 500),
                                    ChunkedTopK(10, 1)])  # fmt: skip
@pytest.mark.parametrize("value", [0.0, -0.0, 0.1])
def test_of_equal_ones_the_first_are_sent(method: Any, value: float) -> None:
    """And zeros keep their signs in what is left, and have none in the mean, as in NumPy."""
    x = np.full(20_000, np.float32(value))
    (step,) = run_buckets([method], [[x]], keeps=True)
    chunk = 20_000 if isinstance(method, TopKC) else method.chunk
    sent = np.arange(len(x)) % chunk < np.ceil(0.1 * np.minimum(chunk, len(x) - np.arange(len(x)) // chunk * chunk))
    if isinstance(method, TopKC):
        sent = np.arange(len(x)) < 67 * 30  # a tenth, in whole chunks
    assert step.means[0].tobytes() == np.where(sent, x + 0, np.float32(0)).tobytes()
    assert step.x[0].tobytes() == np.where(sent, x - (x + 0), x).tobytes()


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_chunk_of_zeros_sends_its_first_as_plus_the_mean_magnitude(zero: float) -> None:
    x = np.full(30, np.float32(zero))
    x[3] = -2
    (step,) = run_buckets([ChunkedTopK(8, 1, "sign")], [[x]], keeps=True)
    sent = np.zeros_like(x)
    sent[[3, 8, 16, 24]] = [-0.5, 0.5, 0.5, 0.5]
    np.testing.assert_array_equal(step.means[0], sent)
    np.testing.assert_array_equal(step.x[0], x - sent)


@pytest.mark.parametrize("method", [TopKC(0.1), ARCTopK(0.1), ChunkedTopK(), ChunkedTopK(values="fp16"),
                                    ChunkedTopK(8, 1, "sign")], ids=str)  # fmt: skip
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan, -np.nan])
def test_what_is_not_finite_is_found_and_does_no_harm(method: Any, bad: float) -> None:
    for place in (0, 4095, 4096, 69_999):
        x = numbers((70, 1000), place)
        x.reshape(-1)[place] = bad
        (step,) = run_buckets([method, method], [[numbers((5, 9)), x]], keeps=True)
        assert step.found_inf


@pytest.mark.parametrize("method", [TopKC(1.0), ChunkedTopK(4, 4, "float32")])
def test_a_mean_that_overflows_is_found(method: Any) -> None:
    """Three thirds of the largest float are above it where each is rounded up."""
    x = np.full((4, 4), np.finfo(np.float32).max)
    for step in run_buckets([method], [[x]] * 3):
        assert not step.found_inf
        assert step.found_inf_after == (not np.isfinite(step.means[0]).all())


def test_momentum_ends_where_chunks_sent_an_element() -> None:
    method, memory = ChunkedTopK(100, 7), MomentumCorrection(0.9)
    gradient = numbers((10_001,), 1)
    bucket = Bucket([TensorInfo("w", gradient.shape)], [method], memory)
    bucket.begin(Context("", 0, 0, 0, 1))
    arrays = {name: np.zeros_like(gradient) for name in ("result", "x", "next_velocity")} | {"gradient": gradient}
    for name, array in arrays.items():
        bucket.segments[name] = array.ctypes.data
    next(method.aggregate_bucket(bucket))
    x, state = memory.compensate(numpy_arrays, gradient, memory.prepare(numpy_arrays, gradient, ()))
    sent = run_lockstep(method, [x]).outcomes[0].sent
    velocity, residual = memory.update(numpy_arrays, x, sent, state)
    np.testing.assert_array_equal(arrays["x"], residual)
    np.testing.assert_array_equal(arrays["next_velocity"], velocity)
