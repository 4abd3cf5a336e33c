"""EDEN against a plain statement with the matrix written out, and the errors that are known before the gradient is."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hvdcomp import EDEN, SpecError
from hvdcomp.arrays import numpy_arrays
from hvdcomp.communicators.loopback import LoopbackCommunicator
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.compressors.protocol import Context, TensorInfo
from hvdcomp.compressors.quantization_rotated import ERRORS, LEVELS
from hvdcomp.compressors.randomness import random_words, shared_key
from hvdcomp.exchange.engine import Engine
from tests.harness import INSTALLED, as_numpy, make
from tests.lockstep import run_lockstep


def signs_of(context: Context, count: int) -> np.ndarray:
    """The diagonal of D: word i holds the signs of elements 32 i to 32 i + 31, the first in its lowest bit."""
    key = shared_key(context, "eden")
    words = random_words(numpy_arrays, key, count // 32, np.zeros(1, np.float32)).view(np.uint32)
    return np.array([-1.0 if word >> place & 1 else 1.0 for word in words.tolist() for place in range(32)])


def hadamard_matrix(size: int) -> np.ndarray:
    return np.ones((1, 1)) if size == 1 else np.kron([[1, 1], [1, -1]], hadamard_matrix(size // 2))


def stated(method: EDEN, x: np.ndarray, context: Context) -> np.ndarray:
    """C(x) of a vector as section 3 of the paper has it, in float64."""
    padded = np.zeros(-(-len(x) // method.block) * method.block)
    padded[: len(x)] = x
    signs, matrix = signs_of(context, len(padded)), hadamard_matrix(method.block) / math.sqrt(method.block)
    levels = np.array([*(-level for level in LEVELS[method.bits]), *LEVELS[method.bits]])
    result = np.zeros_like(padded)
    for start in range(0, len(padded), method.block):
        part = slice(start, start + method.block)
        z = matrix @ (signs[part] * padded[part])
        if not z.any():
            continue
        nearest = np.abs(z[:, None] / math.sqrt(np.mean(z**2)) - levels).argmin(1)
        q = levels[nearest]
        result[part] = signs[part] * (matrix @ (z @ z / (z @ q) * q))
    return result[: len(x)]


@pytest.mark.parametrize("size", [1, 31, 512, 1024, 1500, 4096])
@pytest.mark.parametrize("spec", ["eden:bits=1", "eden", "eden:bits=3,block=512", "eden:bits=4"])
def test_it_does_what_the_paper_says(spec: str, size: int) -> None:
    method = parse_compressor(spec)
    assert isinstance(method, EDEN)
    x = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    expected = stated(method, x.astype(np.float64), Context("w", 5, 0, 0, 1))
    for backend in INSTALLED:
        exchanged = run_lockstep(method, [make(backend, x)], step=5)
        blocks = -(-size // method.block)
        assert exchanged.bytes_sent() == blocks * (4 + method.bits * method.block // 8) == method.payload_bytes((size,))
        np.testing.assert_allclose(as_numpy(exchanged.outcomes[0].sent), expected, rtol=1e-4, atol=1e-5)


def sent(method: EDEN, x: np.ndarray, step: int = 0) -> np.ndarray:
    return as_numpy(run_lockstep(method, [x], step=step).outcomes[0].sent).astype(np.float64)


@pytest.mark.parametrize("bits", ERRORS)
def test_the_error_is_known_beforehand(bits: int) -> None:
    x = np.random.default_rng(bits).standard_normal(300 * 1024).astype(np.float32)
    error = np.sum((sent(EDEN(bits=bits), x) - x) ** 2) / np.sum(x.astype(np.float64) ** 2)
    assert error == pytest.approx(ERRORS[bits], rel=0.01)


KINDS = {
    "normal": lambda rng: rng.standard_normal(1024),
    "equal": lambda rng: np.full(1024, 0.3),
    "heavy tails": lambda rng: rng.standard_t(3, 1024),
    "one large": lambda rng: np.where(np.arange(1024) == 77, 10.0, rng.standard_normal(1024)),
    "a short tail": lambda rng: rng.standard_normal(100),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", ERRORS)
def test_the_mean_of_many_draws_is_the_gradient(bits: int, kind: str) -> None:
    """The error of the mean of n independent draws is the error of one over sqrt(n). With one bit the scale is unbiased
    for rotations drawn from all there are: with these the bias may be a few per cent of the error of a draw."""
    x = KINDS[kind](np.random.default_rng(0)).astype(np.float32)
    draws = np.array([sent(EDEN(bits=bits), x, step) for step in range(400)])
    one = np.sqrt(np.mean(np.sum((draws - x) ** 2, 1)))
    of_mean = np.sqrt(np.sum((draws.mean(0) - x) ** 2))
    assert of_mean <= one * (1.1 / math.sqrt(len(draws)) + (0.05 if bits == 1 else 0.01)) + 1e-6 * np.abs(x).max()


@pytest.mark.parametrize(("bits", "least", "most"), [(1, -0.02, 0.02), (2, 1.3, 1.5), (3, 0.97, 1.03)])
def test_what_an_element_a_hundred_times_as_large_leaves_of_the_others(bits: int, least: float, most: float) -> None:
    """In the mean of many draws, as docs/compressors.md says."""
    x = np.random.default_rng(0).standard_normal(1024).astype(np.float32)
    x[77] = 0
    mean = np.mean([sent(EDEN(bits=bits), np.where(np.arange(1024) == 77, 100, x), step) for step in range(400)], 0)
    assert least < mean @ x / (x @ x) < most


def test_a_single_spike_is_exact() -> None:
    x = np.zeros(2048, np.float32)
    x[[5, 2000]] = 3.25, -1e20
    np.testing.assert_allclose(sent(EDEN(bits=1), x), x, rtol=1e-6)


def test_blocks_of_zeros_stay_zeros() -> None:
    x = np.zeros(4096, np.float32)
    x[1024:2048] = np.random.default_rng(0).standard_normal(1024)
    result = sent(EDEN(), x)
    assert not result[:1024].any()
    assert not result[2048:].any()
    assert np.count_nonzero(result[1024:2048]) > 1000


def test_all_ranks_rotate_alike_and_the_mean_is_rotated_back_once() -> None:
    """What ranks with opposite gradients send cancels, which other rotations on each rank would not do."""
    x = np.random.default_rng(1).standard_normal(3000).astype(np.float32)
    outcomes = run_lockstep(EDEN(bits=1), [x, -x, x]).outcomes
    assert len({as_numpy(outcome.mean).tobytes() for outcome in outcomes}) == 1
    np.testing.assert_allclose(as_numpy(outcomes[0].mean), as_numpy(outcomes[0].sent) / 3, rtol=1e-4, atol=1e-5)


def test_sums_that_overflow_do_not_count() -> None:
    """Of finite numbers, whose rotation is not."""
    engine = Engine(LoopbackCommunicator(), [TensorInfo("w", (1024,))], EDEN(), min_numel=0, min_ndim=0)
    with np.errstate(all="ignore"):
        result = engine.step({"w": np.full(1024, 3e38, np.float32) * signs_of(Context("w", 0, 0, 0, 1), 1024)})["w"]
    assert not np.isfinite(result).all()


@pytest.mark.parametrize("spec", ["eden:bits=0", "eden:bits=5", "eden:block=1000", "eden:block=4096"])
def test_what_is_not_allowed_is_said(spec: str) -> None:
    with pytest.raises(SpecError, match="is not allowed; it must be"):
        parse_compressor(spec)
