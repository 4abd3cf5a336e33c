"""Sums of squares of x and of what compression loses of it, beside NumPy's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdcomp.adaptation.energies import densified, of_arrays, of_errors
from hvdcomp.arrays import arrays_for
from hvdcomp.compressors.protocol import SparseVector
from tests.adaptation.test_gradient_sums import PRECISION, wide
from tests.harness import BACKENDS, BACKENDS_AND_DTYPES, as_numpy, bits, copy, make

every_dtype = pytest.mark.parametrize(("backend", "dtype"), BACKENDS_AND_DTYPES)


@every_dtype
@settings(max_examples=25)
@given(size=st.integers(1, 60), share=st.floats(0, 1), exact=st.booleans(), seed=st.integers(0, 2**16))
def test_sparse_and_dense_messages_against_numpy(
    backend: str, dtype: str, size: int, share: float, exact: bool, seed: int
) -> None:
    """Whether the sent values are those of x, or rounded ones; in a tensor of two dimensions."""
    rng = np.random.default_rng(seed)
    x = make(backend, rng.normal(size=(size, 2)), dtype)
    xp = arrays_for(x)
    chosen = rng.permutation(2 * size)[: int(share * 2 * size)].astype(np.int32)
    values = wide(x).reshape(-1)[chosen] + (0 if exact else rng.normal(size=len(chosen)) / 8)
    sent = SparseVector(xp.from_numpy(chosen, like=x), make(backend, values, dtype))
    dense = np.zeros(2 * size)
    dense[chosen] = wide(sent.values)
    dense = dense.reshape(size, 2)
    before = bits(x), as_numpy(sent.values).tolist()
    full = densified(xp, x, sent)
    assert tuple(full.shape) == (size, 2)
    assert full.dtype == x.dtype
    np.testing.assert_array_equal(wide(full), dense)
    energies = of_arrays(xp, {"x": x})
    assert energies.total() == pytest.approx(np.sum(wide(x) ** 2), rel=1e-5)
    right = np.sum((wide(x) - dense) ** 2)
    rounding = {"float16": 2e-3, "bfloat16": 2e-2}.get(dtype, PRECISION[dtype])
    for message in (sent, make(backend, dense, dtype)):
        lost = of_errors(xp, {"x": (x, message)})
        assert abs(lost.total() - right) <= rounding * energies.total()
        assert lost.numbers() == {"x": pytest.approx(lost.total())}
        both = of_arrays(xp, {"x": x})
        both.extend(lost)
        assert both.total() == pytest.approx(np.sum(wide(x) ** 2) + lost.total(), rel=1e-5)
    assert (bits(x), as_numpy(sent.values).tolist()) == before
    flat = xp.flatten(copy(full))
    assert bits(densified(xp, x, flat)) == bits(full)
    assert tuple(densified(xp, x, flat).shape) == (size, 2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_is_lost_where_all_is_sent_and_all_where_nothing_is(backend: str) -> None:
    x = make(backend, [[3.0, 0.0], [0.0, 4.0]])
    xp = arrays_for(x)
    some = SparseVector(xp.from_numpy(np.array([0], np.int32), like=x), make(backend, [3.0]))
    none = SparseVector(some.indices[:0], some.values[:0])
    assert of_errors(xp, {"x": (x, x)}).total() == 0
    assert of_errors(xp, {"x": (x, x * 0)}).total() == 25
    assert of_errors(xp, {"x": (x, some)}).total() == 16
    assert of_errors(xp, {"x": (x, none)}).total() == 25
    assert not as_numpy(densified(xp, x, none)).any()
