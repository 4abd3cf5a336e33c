"""The kernel `found_inf`."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdcomp import kernels
from tests.kernel_calls import found_inf, instruction_set  # noqa: F401

BAD = (np.inf, -np.inf, np.nan, -np.nan)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.usefixtures("instruction_set")
def test_one_number_that_is_not_finite_is_found_wherever_it_is(threads: int) -> None:
    parts = [np.full(size, np.finfo(np.float32).max, np.float32) for size in (0, 1, 7, 65536, 131075)]
    parts[2][:] = [-0.0, 1e-45, -1e-45, -np.finfo(np.float32).max, 0, 1, -1]
    assert found_inf(parts, threads) == 0
    for part in parts[1:]:
        for place in {0, part.size // 2, part.size - 1}:
            for bad in BAD:
                kept, part[place] = part[place], bad
                assert found_inf(parts, threads) == 1, (part.size, place, bad)
                part[place] = kept
    assert found_inf([], threads) == 0


@given(
    bits=st.lists(st.integers(0, 2**32 - 1), max_size=70), start=st.integers(0, 17), name=st.sampled_from(["plain", ""])
)
def test_it_is_what_numpy_says_of_any_bits_at_any_place(bits: list[int], start: int, name: str) -> None:
    numbers = np.array([0] * start + bits, np.uint32).view(np.float32)[start:]
    before = kernels.instruction_set()
    assert before is not None, kernels.why_not()
    kernels.use(name or before)
    try:
        assert found_inf([numbers]) == (not np.isfinite(numbers).all())
    finally:
        kernels.use(before)
