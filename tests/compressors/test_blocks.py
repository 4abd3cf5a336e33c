"""int8, int4 and fp8 against plain statements in float64: every number that a code can stand for, and the nearest."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdcomp import FP8, ErrorFeedback, Int4, Int8, NoMemory, SpecError
from hvdcomp.arrays import arrays_for, numpy_arrays
from hvdcomp.arrays.types import number_of_elements
from hvdcomp.communicators.loopback import LoopbackCommunicator
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.compressors.protocol import Context
from hvdcomp.compressors.quantization_blocks import BlockQuantizer
from hvdcomp.compressors.randomness import random_words, rank_key
from hvdcomp.exchange.engine import Engine
from tests.harness import INSTALLED, as_numpy, infos, make, torch
from tests.lockstep import run_lockstep

SETTINGS = [Int8(), Int4(), FP8(), Int8(block=7), Int4(block=64), FP8(format="e5m2"), FP8(block=5)]
BORDER = 1e-6  # where float32 may decide otherwise than float64, relative to the element


def floats(bits_of_exponent: int, bits_of_mantissa: int, largest: float) -> np.ndarray:
    """The numbers from 0 to the largest, by the paper's definition (section 3)."""
    bias = 2 ** (bits_of_exponent - 1) - 1
    mantissas = np.arange(2**bits_of_mantissa) / 2**bits_of_mantissa
    found = [mantissas * 2.0 ** (1 - bias)]
    found += [(1 + mantissas) * 2.0 ** (exponent - bias) for exponent in range(1, 2**bits_of_exponent)]
    numbers = np.concatenate(found)
    return numbers[numbers <= largest]


def numbers_of(method: BlockQuantizer) -> np.ndarray:
    """What codes stand for, not below 0, where the block's largest magnitude is 1."""
    if isinstance(method, FP8):
        found = floats(4, 3, 448) if method.format == "e4m3" else floats(5, 2, 57344)
    else:
        found = np.arange(2.0 ** (method.bits - 1))
    return found / found[-1]


def stated(method: BlockQuantizer, x: np.ndarray, u: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """C(x) of a vector, and which elements are not on the border between two codes.

    Args:
        u: uniform numbers in [0, 1) by which to round; None for the nearest.
    """
    numbers, result, sure = numbers_of(method), np.zeros(len(x)), np.ones(len(x), bool)
    for start in range(0, len(x), method.block):
        part = slice(start, start + method.block)
        scale = np.abs(x[part]).max()
        if scale == 0:
            continue
        v = np.abs(x[part]) / scale
        above = np.minimum(np.searchsorted(numbers, v, side="left"), len(numbers) - 1)
        below = np.where(numbers[above] == v, above, np.maximum(above - 1, 0))
        distance = np.where(above > below, numbers[above] - numbers[below], 1)
        share = (v - numbers[below]) / distance
        # The uniform numbers round down and up on the line, where whole numbers have one distance; floats by magnitude.
        if u is None:
            up, border = share > 0.5, 0.5
        else:
            mirrored = (x[part] < 0) & (not isinstance(method, FP8))
            up = np.where(mirrored, u[part] < share, u[part] >= 1 - share)
            border = np.where(mirrored, u[part], 1 - u[part])
        sure[part] = np.abs(share - border) * distance > BORDER * v
        result[part] = np.sign(x[part]) * numbers[np.where(up, above, below)] * scale
    return result, sure


def draw(seed: int, shape: tuple[int, ...], power: int) -> np.ndarray:
    """Numbers of many sizes, and zeros."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * 10.0 ** (power + rng.uniform(-4, 0, shape)) * (rng.random(shape) < 0.9)
    return np.asarray(x, np.float32)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("method", SETTINGS, ids=str)
@given(shape=st.lists(st.integers(1, 30), max_size=3).map(tuple), seed=st.integers(0, 999), power=st.integers(-12, 12))
def test_codes_stand_for_the_neighbors_of_elements(
    method: BlockQuantizer, rounding: str, shape: tuple[int, ...], seed: int, power: int
) -> None:
    compressor = parse_compressor(f"{method}{',' if ':' in str(method) else ':'}rounding={rounding}")
    assert isinstance(compressor, BlockQuantizer)
    x, size = draw(seed, shape, power), number_of_elements(shape)
    u = None
    if rounding == "stochastic":
        key = rank_key(Context("w", seed, 0, 0, 1), method.name)
        u = ((random_words(numpy_arrays, key, size, np.zeros(1, np.float32)) >> 9) & 0x7FFFFF) / 2.0**23
    expected, sure = stated(compressor, x.reshape(-1).astype(np.float64), u)
    for backend in INSTALLED:
        exchanged = run_lockstep(compressor, [make(backend, x)], step=seed)
        codes = size if method.bits == 8 else (size + 1) // 2
        assert exchanged.bytes_sent() == codes + 4 * -(-size // method.block) == compressor.payload_bytes(shape)
        sent = as_numpy(exchanged.outcomes[0].sent)
        assert sent.shape == shape
        np.testing.assert_allclose(sent.reshape(-1)[sure], expected[sure], rtol=1e-6)


@pytest.mark.parametrize("method", [Int4(), Int4(block=16), Int8(block=4096)], ids=str)
def test_ties_go_to_the_even_code(method: BlockQuantizer) -> None:
    largest = 2 ** (method.bits - 1) - 1
    assert np.float32(1) / np.float32(largest) * np.float32(largest) == 1  # so that a tie is one after scaling, too
    halves = np.arange(-largest, largest, dtype=np.float32) + np.float32(0.5)
    x = np.stack([np.full_like(halves, largest), halves]).T.reshape(-1)  # no block without the largest
    decoded = method.decode(numpy_arrays, method.encode(numpy_arrays, x, Context("w", 0, 0, 0, 1)), x.shape)
    np.testing.assert_allclose(decoded[1::2], np.rint(halves), rtol=1e-6)


@pytest.mark.skipif(torch is None, reason="needs PyTorch")
@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
def test_floats_are_those_of_pytorch(format: str) -> None:
    """Every code, and rounding to nearest with its ties."""
    method = FP8(block=4096, format=format)
    kind = torch.float8_e4m3fn if format == "e4m3" else torch.float8_e5m2
    codes = np.arange(256, dtype=np.uint8)
    values = torch.from_numpy(codes).view(kind).float().numpy()
    finite, largest = np.isfinite(values), np.nanmax(np.where(np.isinf(values), 0, values))
    scales = np.full((1, 1), largest, np.float32)
    decoded = method.decode(numpy_arrays, (codes, scales), codes.shape)
    np.testing.assert_allclose(decoded[finite], values[finite], rtol=2e-7)

    ordered = np.unique(np.abs(values[finite]))
    middle = (ordered[1:] + ordered[:-1]) / 2
    x = np.concatenate([ordered, middle, np.nextafter(middle, 0), np.nextafter(middle, 1e9)]).astype(np.float32)
    x = np.concatenate([x, -x])
    context = Context("w", 0, 0, 0, 1)
    packed, found = method.encode(numpy_arrays, x, context)
    assert found.tolist() == [[largest]]
    v = x * (np.float32(1) / found[0, 0] * np.float32(largest))
    expected = torch.from_numpy(v.clip(-largest, largest)).to(kind).view(torch.uint8).numpy()
    np.testing.assert_array_equal(packed, expected)


def error_of(method: BlockQuantizer, x: np.ndarray, step: int = 0) -> np.ndarray:
    parts = method.encode(numpy_arrays, x, Context("w", step, 0, 0, 1))
    error: np.ndarray = x.astype(np.float64) - method.decode(numpy_arrays, parts, x.shape)
    return error


@given(seed=st.integers(0, 999), block=st.sampled_from([1, 16, 128, 1000]), power=st.floats(-3, 0))
def test_int4_is_a_contraction(seed: int, block: int, power: float) -> None:
    """Also with all elements but the largest just too small for a code, where the bound is reached."""
    method = Int4(block=block)
    bound = (block - 1) / (block - 1 + 196)
    rng = np.random.default_rng(seed)
    drawn = (rng.standard_normal(2000) * 10.0 ** rng.uniform(power, 0, 2000)).astype(np.float32)
    hardest = np.full(3 * block, 0.0714, np.float32)
    hardest[::block] = 1
    for x in (drawn, hardest):
        assert np.sum(error_of(method, x) ** 2) <= bound * np.sum(x.astype(np.float64) ** 2) + 1e-9
    assert np.sum(error_of(method, hardest) ** 2) >= 0.99 * bound * np.sum(hardest.astype(np.float64) ** 2)


@pytest.mark.parametrize("spec", [f"{name}:rounding=stochastic" for name in ("int8", "int4", "fp8")])
def test_random_rounding_is_unbiased_and_nearest_is_always_the_same(spec: str) -> None:
    method = parse_compressor(spec)
    assert isinstance(method, BlockQuantizer)
    x = np.random.default_rng(1).uniform(-1, 1, 64).astype(np.float32)
    errors = np.array([error_of(method, x, step) for step in range(3000)])
    assert np.all(np.abs(errors.mean(0)) <= 5 * errors.std(0) / np.sqrt(len(errors)) + 1e-5)
    assert errors.std(0).max() > 0
    nearest = parse_compressor(spec.replace("stochastic", "nearest"))
    assert isinstance(nearest, BlockQuantizer)
    np.testing.assert_array_equal(error_of(nearest, x, 1), error_of(nearest, x, 2))


def test_an_outlier_costs_its_own_block_alone_precision() -> None:
    x = draw(2, (512,), 0)
    with_outlier = x.copy()
    with_outlier[130] = 1e6
    before, after = error_of(Int8(), x), error_of(Int8(), with_outlier)
    np.testing.assert_array_equal(before[:128], after[:128])
    np.testing.assert_array_equal(before[256:], after[256:])
    np.testing.assert_array_equal(after[131:256], x[131:256])


@pytest.mark.parametrize("backend", INSTALLED)
@pytest.mark.parametrize(("rounding", "steps_of_largest"), [("nearest", 13), ("stochastic", 6)])
def test_residuals_stay_a_fraction_of_the_largest_gradient(backend: str, rounding: str, steps_of_largest: int) -> None:
    """An error is at most 1 / 14, or 1 / 7, of the largest magnitude of what is to be sent, residual included."""
    engine = Engine(
        LoopbackCommunicator(), infos({"w": (64, 64)}), Int4(rounding=rounding), ErrorFeedback(), min_numel=0
    )
    rng = np.random.default_rng(3)
    largest = 0.0
    for _ in range(60):
        gradient = rng.standard_normal((64, 64)).astype(np.float32)
        engine.step({"w": make(backend, gradient)})
        largest = max(largest, float(np.abs(gradient).max()))
        assert np.abs(as_numpy(engine.states["w"].memory[0])).max() <= 1.0001 * largest / steps_of_largest


def test_who_keeps_what_is_left() -> None:
    assert [parse_compressor(spec).default_memory for spec in ("int8", "fp8", "int4", "int4:rounding=stochastic")] == [
        NoMemory(), NoMemory(), ErrorFeedback(), NoMemory(),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("int8:rounding=up", 'int8: rounding=\'up\' is not allowed; it must be "nearest" or "stochastic"'),
        ("int4:block=0", "int4: block=0 is not allowed; it must be a whole number of at least 1"),
        ("fp8:format=e3m4", 'fp8: format=\'e3m4\' is not allowed; it must be "e4m3" or "e5m2"'),
    ],
)
def test_what_is_wrong_is_refused(spec: str, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        parse_compressor(spec)


@pytest.mark.parametrize("method", SETTINGS, ids=str)
def test_zeros_and_what_is_too_small_become_zero(method: BlockQuantizer) -> None:
    for value in (0.0, -0.0, 1e-45, 1e-30):
        x = np.full(300, value, np.float32)
        np.testing.assert_array_equal(x - error_of(method, x), 0)


def test_everything_is_made_where_the_gradient_is() -> None:
    """Shapes and types of what is sent, in each framework."""
    for backend in INSTALLED:
        x: Any = make(backend, draw(0, (3, 50), 0))
        codes, scales = Int4(block=64).encode(arrays_for(x), x, Context("w", 0, 0, 0, 1))
        assert (tuple(codes.shape), tuple(scales.shape)) == ((75,), (3, 1))
        assert arrays_for(x).dtype_name(codes) == "uint8"
