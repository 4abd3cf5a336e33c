"""Arrays without elements answer with the shapes and types that NumPy gives, and compressors are counted on them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import pytest

from hvdcomp import ConfigurationError, PowerSGD, RandomK
from hvdcomp.arrays import numpy_arrays, shapes
from hvdcomp.arrays.magnitudes import Magnitudes
from hvdcomp.arrays.shapes import ShapeArray
from hvdcomp.compressors.base import Compressor
from hvdcomp.compressors.protocol import Aggregation, AllReduce, Context, Outcome
from hvdcomp.compressors.sizes import SentPayload

VECTOR, MATRIX, COLUMN, CODES = np.ones(24), np.ones((4, 6), np.float32), np.ones((4, 1)), np.ones(24, np.uint8)
PLACES = np.arange(5, dtype=np.int32)

CASES: dict[str, Callable[[Any, Any, Any, Any, Any, Any], Any]] = {
    "operators": lambda xp, v, m, c, u, p: (m * 2 - 1) / c + (m > c),
    "reversed operators": lambda xp, v, m, c, u, p: 1 - np.float64(2.0) * v,
    "whole quotients and rests": lambda xp, v, m, c, u, p: (p // 3) % 2 + 7 % (p + 1) + 9 // (p + 1),
    "powers": lambda xp, v, m, c, u, p: 2.0 ** -(m**2),
    "bits": lambda xp, v, m, c, u, p: ~(u | 1) & (u ^ 1),
    "indices": lambda xp, v, m, c, u, p: m[1:, -1],
    "an index": lambda xp, v, m, c, u, p: m[2],
    "slices": lambda xp, v, m, c, u, p: v[3:-2:2],
    "astype": lambda xp, v, m, c, u, p: xp.astype(m, "float16"),
    "reshape": lambda xp, v, m, c, u, p: xp.reshape(v, (2, -1, 3)),
    "flatten": lambda xp, v, m, c, u, p: xp.flatten(m),
    "zeros": lambda xp, v, m, c, u, p: xp.zeros((3, 2), like=u),
    "arange": lambda xp, v, m, c, u, p: xp.arange(7, like=p),
    "from_numpy": lambda xp, v, m, c, u, p: xp.from_numpy(MATRIX, like=v),
    "concatenate": lambda xp, v, m, c, u, p: xp.concatenate([m, m]),
    "columns side by side": lambda xp, v, m, c, u, p: xp.concatenate([m, m[:, :2]], axis=1),
    "bfloat16": lambda xp, v, m, c, u, p: xp.to_bfloat16_bits(m),
    "top": lambda xp, v, m, c, u, p: Magnitudes(xp, v, 3).top(3),
    "pick": lambda xp, v, m, c, u, p: Magnitudes(xp, v, 4).pick(v[0], v[1], 3, 4),
    "block_counts": lambda xp, v, m, c, u, p: xp.block_counts(p, 2, 3),
    "take": lambda xp, v, m, c, u, p: xp.take(m, p[:3]),
    "matmul": lambda xp, v, m, c, u, p: m.T @ m,
    "eigenvectors": lambda xp, v, m, c, u, p: xp.eigenvectors(m @ m.T),
    "interval_index": lambda xp, v, m, c, u, p: xp.interval_index(v, v[:3]),
    "where": lambda xp, v, m, c, u, p: xp.where(c > 0, m, m * 2),
    "where of a number": lambda xp, v, m, c, u, p: xp.where(c > 0, 0.0, c),
    "shift_left": lambda xp, v, m, c, u, p: xp.reshape(u, (1, -1)) << xp.reshape(u[:2], (2, 1)),
    "bitcast": lambda xp, v, m, c, u, p: xp.bitcast(u, "int8"),
    "largest_magnitude": lambda xp, v, m, c, u, p: xp.reshape(abs(v).max(), (1,)),
    "row_sums": lambda xp, v, m, c, u, p: m.sum(1, keepdims=True) + xp.row_norms(m),
    "row_largest": lambda xp, v, m, c, u, p: xp.row_largest(m),
    "row_counts": lambda xp, v, m, c, u, p: xp.astype((m > 0).sum(1, keepdims=True), "float32"),
    "rows_with_nonzero": lambda xp, v, m, c, u, p: (m != 0).any(1),
}


@pytest.mark.parametrize("case", CASES)
def test_shapes_and_types_are_those_of_numpy(case: str) -> None:
    arrays = [VECTOR, MATRIX, COLUMN, CODES, PLACES]
    expected = CASES[case](numpy_arrays, *[array.copy() for array in arrays])
    found = CASES[case](shapes, *[ShapeArray(array.shape, array.dtype.name) for array in arrays])
    assert (found.shape, found.dtype, found.nbytes) == (expected.shape, expected.dtype.name, expected.nbytes)


def test_every_function_is_one_of_numpys() -> None:
    own = {name for name, value in vars(shapes).items() if callable(value) and name.islower() and name[0] != "_"}
    assert own - {"number_of_elements"} <= set(vars(numpy_arrays))


def test_elements_cannot_be_looked_at() -> None:
    x = ShapeArray((3, 4), "float32")
    with pytest.raises(TypeError, match="must not use the values of the gradient"):
        bool(x > 0)
    with pytest.raises(TypeError):
        x[x > 0]
    with pytest.raises(IndexError, match="index 3 is out of range"):
        x[3]
    with pytest.raises(ValueError, match="broadcast"):
        x + ShapeArray((5,), "float32")


@dataclass(frozen=True)
class Looking(Compressor):
    """Sends nothing of a gradient that is zero, so that its size is not known before the gradient."""

    name: ClassVar[str] = "looking"

    def aggregate(self, xp: ModuleType, x: Any, state: tuple[Any, ...], context: Context) -> Aggregation:
        mean = yield AllReduce(x if x[0] > 0 else x[:0])
        return Outcome(mean, x)


def test_a_size_that_depends_on_the_gradient_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="runs the compressor on arrays without values"):
        Looking().payload_bytes((4,))


def test_large_tensors_take_no_time_and_nothing_is_drawn() -> None:
    start = time.process_time()
    assert RandomK(0.5).payload_bytes((2**33,)) == 4 * 2**32
    assert PowerSGD(8).payload_bytes((2**20, 2**20)) == 4 * 8 * 2 * 2**20
    assert time.process_time() - start < 1


def test_sizes_that_alternate_are_counted_as_their_mean() -> None:
    method = PowerSGD(2, alternating=True)
    assert method.payloads((30, 10)) == (SentPayload("allreduce", 4 * 2 * 20, "mean float32"),)
    assert method.payload_bytes((30, 10), dtype="float64") == 8 * 2 * 20
