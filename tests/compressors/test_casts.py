"""No compression, fp16 and bf16, against plain NumPy."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from hvdcomp import BF16, FP16, Compressor, NoCompression, NoMemory, SpecError
from hvdcomp.arrays import arrays_for, numpy_arrays
from hvdcomp.compressors.protocol import Context
from hvdcomp.compressors.randomness import random_words, rank_key
from tests.harness import (
    BACKENDS,
    BACKENDS_AND_DTYPES,
    as_numpy,
    assert_same_on_all_ranks,
    bits,
    dtype_of,
    infos,
    make,
    run_engines,
)

SHAPES = {"matrix": (6, 7), "scalar": (), "vector": (5,), "empty": (0, 3), "image": (2, 3, 2, 2)}


def gradients_of(backend: str, dtype: str, rank: int, step: int) -> dict:
    rng = np.random.default_rng([rank, step])
    return {name: make(backend, rng.normal(size=shape), dtype) for name, shape in SHAPES.items()}


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Rounds normal numbers to eight significant binary digits, ties to even."""
    fraction, exponent = np.frexp(x.astype(np.float32))
    return np.ldexp(np.rint(np.ldexp(fraction, 8)), exponent - 8).astype(np.float32)


def mean_of(wire: list[np.ndarray]) -> np.ndarray:
    """The mean in the wire's element type, added in rank order."""
    total = wire[0].copy()
    for other in wire[1:]:
        total = total + other
    return total * wire[0].dtype.type(1 / len(wire))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("compressor", [NoCompression(), FP16(), BF16()], ids=str)
@pytest.mark.parametrize(("backend", "dtype"), BACKENDS_AND_DTYPES)
def test_mean_is_that_of_the_cast_values(backend: str, dtype: str, compressor: Compressor, size: int) -> None:
    runs = run_engines(size, infos(SHAPES, dtype), compressor, lambda r, s: gradients_of(backend, dtype, r, s), 2)
    assert_same_on_all_ranks(runs)
    for step in range(2):
        for name, shape in SHAPES.items():
            local = [as_numpy(gradients_of(backend, dtype, rank, step)[name]) for rank in range(size)]
            if compressor.name == "fp16":
                local = [x.astype(np.float16) for x in local]
            elif compressor.name == "bf16":
                local = [to_bfloat16(x) for x in local]
            expected = as_numpy(make(backend, mean_of(local), dtype))
            result = runs[0].results[step][name]
            assert dtype_of(result) == dtype
            assert tuple(result.shape) == shape
            np.testing.assert_allclose(as_numpy(result), expected, rtol=0 if size in (1, 2, 4) else 1e-3, atol=0)
    assert all(not state.memory for run in runs for state in run.engine.states.values())  # no memory by default


BYTES = {
    "none": {"float16": 2, "bfloat16": 4, "float32": 4, "float64": 8},  # Horovod cannot add bfloat16
    "fp16": {"float16": 2, "bfloat16": 2, "float32": 2, "float64": 2},
    "bf16": {"float16": 2, "bfloat16": 2, "float32": 2, "float64": 2},
}


@pytest.mark.parametrize("compressor", [NoCompression(), FP16(), BF16()], ids=str)
@pytest.mark.parametrize(("backend", "dtype"), BACKENDS_AND_DTYPES)
def test_bytes(backend: str, dtype: str, compressor: Compressor) -> None:
    runs = run_engines(2, infos(SHAPES, dtype), compressor, lambda r, s: gradients_of(backend, dtype, r, s))
    for name, shape in SHAPES.items():
        cost = runs[0].engine.ledger.last.tensors[name]
        elements = int(np.prod(shape))
        size = BYTES[compressor.name][dtype] * elements
        assert cost.bytes_sent == compressor.payload_bytes(shape, dtype=dtype) == size
        assert cost.dense_bytes == elements * {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}[dtype]
        floats = elements * (1 if compressor.name == "none" else 0.5)
        assert cost.floats_sent == compressor.payload_floats(shape) == floats


@pytest.mark.parametrize("compressor", [NoCompression(), FP16(), BF16()], ids=str)
def test_casts_have_no_level(compressor: Compressor) -> None:
    assert compressor.level is None
    assert compressor.level_for(10, (3, 4)) is None
    assert compressor.at_level(None) is compressor
    assert compressor.default_memory == NoMemory()
    with pytest.raises(SpecError, match=f"{compressor.name} has no level, so it cannot be set to level 3"):
        compressor.at_level(3)
    with pytest.raises(SpecError, match=r"0\.5 is not allowed: it must be at least 1"):
        compressor.level_for(0.5, (3, 4))


def test_wire_types() -> None:
    assert [NoCompression().wire_dtype(dtype) for dtype in ("float16", "bfloat16", "float32", "float64")] == [
        "float16", "float32", "float32", "float64",
    ]  # fmt: skip
    assert FP16().wire_dtype("float32") == "float16"
    assert FP16(exchange="scatter").wire_dtype("float32") is None
    assert BF16().wire_dtype("float32") is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_small_numbers_keep_their_sign_and_subnormals_underflow_as_ieee_says(backend: str) -> None:
    values = [2.0**-24, -(2.0**-24), 2.0**-25, 3 * 2.0**-25, 1e-8, -0.0, 65504.0, 2049.0]
    runs = run_engines(1, infos({"w": (8,)}), FP16(), lambda r, s: {"w": make(backend, values)})
    expected = np.array(values, np.float16).astype(np.float32)
    assert bits(runs[0].results[0]["w"]) == expected.tobytes()  # that of -0.0 too


# Rounding at random ---------------------------------------------------------------------------------------------------

AT_RANDOM = [FP16("stochastic", exchange="gather"), BF16("stochastic")]
DIGITS = {"fp16": (10, -14, 19), "bf16": (7, -126, 16)}
"""Of a fraction; the exponent below which numbers are equally far apart; random bits of a rounding."""


def context(step: int = 0, rank: int = 0) -> Context:
    return Context("w", step, 0, rank, 2)


def sent(method: Any, x: Any, step: int = 0, rank: int = 0) -> np.ndarray:
    """What receivers read of a vector."""
    xp = arrays_for(x)
    return as_numpy(method.decode(xp, method.encode(xp, x, context(step, rank)), tuple(x.shape)))


def stated_at_random(method: Compressor, x: np.ndarray, step: int, rank: int) -> np.ndarray:
    """Between two neighbors, the one further from zero if the random bits are among the highest share of all.

    Args:
        x: normal numbers of float32.
    """
    digits, least, bits_of_rounding = DIGITS[method.name]
    words = random_words(numpy_arrays, rank_key(context(step, rank), method.name), x.size, like=x).view(np.uint32)
    distance = np.ldexp(1.0, np.maximum(np.frexp(x)[1] - 1, least) - digits)
    below = np.floor(np.abs(x) / distance)
    share = np.floor((np.abs(x) / distance - below) * 2.0**bits_of_rounding)
    above = share + (words >> np.uint32(32 - bits_of_rounding)) >= 2.0**bits_of_rounding
    return np.copysign((below + above) * distance, x).astype(np.float32)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("method", AT_RANDOM, ids=str)
def test_rounding_at_random_is_what_was_stated(method: Any, backend: str) -> None:
    random = np.random.default_rng(0)
    x = (random.normal(size=20_000) * 2.0 ** random.integers(-30, 13, 20_000)).astype(np.float32)
    seen = [sent(method, make(backend, x), step, rank) for step, rank in ((0, 0), (1, 0), (0, 1))]
    for one, (step, rank) in zip(seen, ((0, 0), (1, 0), (0, 1)), strict=True):
        np.testing.assert_array_equal(one, stated_at_random(method, x, step, rank))
    assert len({bits(one) for one in seen}) == 3  # otherwise in each step, and on each rank
    if method.name == "fp16":
        np.testing.assert_array_equal(seen[0].astype(np.float16), seen[0])


@pytest.mark.parametrize("method", AT_RANDOM, ids=str)
def test_the_mean_over_many_draws_is_the_number_itself(method: Any) -> None:
    """Of numbers whose halves have all digits, of denormal halves, and of what rounding to nearest makes zero."""
    x = np.array([1.0003, -3.14159, 1e-3, 6.2e-5, -1.1e-6, 2.0e-8, -3e-9, 60001.0, 0.1, 1 / 3], np.float32)
    draws = 40_000
    many = np.concatenate([sent(method, np.tile(x, 400), step).reshape(400, -1) for step in range(draws // 400)])
    many = many.astype(np.float64)
    error, deviation = many.mean(0) - x, many.std(0)
    assert (deviation > 0).all()
    assert (np.abs(error) < 4.5 * deviation / np.sqrt(draws)).all()
    assert all(len(np.unique(column)) == 2 for column in many.T)  # its neighbors
    nearest = sent(dataclasses.replace(method, rounding="nearest"), x)
    assert (np.abs(nearest - x) > 4.5 * deviation / np.sqrt(draws)).sum() > 5  # which is not so to nearest


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("method", AT_RANDOM, ids=str)
def test_numbers_of_16_bits_are_sent_exactly_however_they_are_rounded(method: Any, backend: str) -> None:
    """All of them, with signs of zeros, denormals and infinities."""
    patterns = np.arange(2**16, dtype=np.uint16).view(np.int16)
    x = method.decode(numpy_arrays, (patterns,), patterns.shape)
    x = x[~np.isnan(x)]
    nearest = dataclasses.replace(method, rounding="nearest")
    for one in (method, nearest):
        for step in range(3):
            assert bits(sent(one, make(backend, x), step)) == x.tobytes()
        assert np.isnan(sent(one, make(backend, np.array([np.nan, -np.nan])))).all()


@pytest.mark.parametrize(
    ("method", "largest", "beyond"), [(AT_RANDOM[0], 65504, 65520), (AT_RANDOM[1], 3.3895314e38, 3.4e38)], ids=str
)
def test_the_same_numbers_become_infinite_at_random_as_to_nearest(method: Any, largest: float, beyond: float) -> None:
    x = np.full(1000, beyond, np.float32)
    below = np.nextafter(x, 0) if method.name == "fp16" else np.full(1000, 3.394e38, np.float32)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(sent(method, -x), -np.inf)
        np.testing.assert_array_equal(sent(method, below), np.float32(largest))


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS_AND_DTYPES)
@pytest.mark.parametrize("method", AT_RANDOM, ids=str)
def test_to_nearest_is_as_it_was(method: Any, backend: str, dtype: str) -> None:
    """The bits of a plain cast, whose payloads no random number has a part in."""
    nearest = dataclasses.replace(method, rounding="nearest")
    x = make(backend, np.random.default_rng(0).normal(size=999), dtype)
    first, second = ((nearest.encode(arrays_for(x), x, context(step)))[0] for step in (0, 1))
    plain = as_numpy(x).astype(np.float16) if method.name == "fp16" else to_bfloat16(as_numpy(x).astype(np.float32))
    np.testing.assert_array_equal(nearest.decode(arrays_for(x), (first,), (999,)), plain.astype(np.float32))
    assert bits(first) == bits(second)
    assert type(method)() == dataclasses.replace(type(method)(), rounding="nearest")  # the default
