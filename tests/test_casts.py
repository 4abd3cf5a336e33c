"""No compression, fp16 and bf16, against plain NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from hvdcomp import BF16, FP16, Compressor, NoCompression, NoMemory, SpecError
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
    with pytest.raises(SpecError, match=f"{compressor.name} has no level to set; it was given level 3"):
        compressor.at_level(3)
    with pytest.raises(SpecError, match=r"0\.5 is not allowed: it must be at least 1"):
        compressor.level_for(0.5, (3, 4))


def test_wire_types() -> None:
    assert [NoCompression().wire_dtype(dtype) for dtype in ("float16", "bfloat16", "float32", "float64")] == [
        "float16", "float32", "float32", "float64",
    ]  # fmt: skip
    assert FP16().wire_dtype("float32") == "float16"
    assert BF16().wire_dtype("float32") is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_small_numbers_keep_their_sign_and_subnormals_underflow_as_ieee_says(backend: str) -> None:
    values = [2.0**-24, -(2.0**-24), 2.0**-25, 3 * 2.0**-25, 1e-8, -0.0, 65504.0, 2049.0]
    runs = run_engines(1, infos({"w": (8,)}), FP16(), lambda r, s: {"w": make(backend, values)})
    expected = np.array(values, np.float16).astype(np.float32)
    assert bits(runs[0].results[0]["w"]) == expected.tobytes()  # that of -0.0 too
