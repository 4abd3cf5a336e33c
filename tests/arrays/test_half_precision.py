"""Half precision of flat vectors: the kernels give the bits of PyTorch's own operations."""

from __future__ import annotations

import pytest

from hvdcomp import kernels
from tests.kernel_calls import instruction_set  # noqa: F401

torch = pytest.importorskip("torch")
half_precision = pytest.importorskip("hvdcomp.torch.half_precision")

needs_kernels = pytest.mark.skipif(not kernels.available(), reason=f"no kernels: {kernels.why_not()}")


def numbers(size: int) -> torch.Tensor:
    """Of all magnitudes: beyond half precision, below its least, ties, inf and NaN."""
    drawn = torch.randint(0, 2**32, (size,), generator=torch.Generator().manual_seed(size))
    x = drawn.to(torch.int64).sub_(2**31).to(torch.int32).view(torch.float32)
    small = torch.randn(size, generator=torch.Generator().manual_seed(size + 1))
    return torch.where(torch.arange(size) % 3 == 0, x, small)


@needs_kernels
@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("size", [0, 1, 511, 70_001, 3_000_001])
def test_the_kernels_give_the_bits_of_torch(size: int) -> None:
    x = numbers(size)
    expected = x.to(torch.float16)
    halves = half_precision.narrow(x, torch.float16)
    assert halves.dtype == torch.float16
    assert torch.equal(torch.nan_to_num(halves, nan=1.0), torch.nan_to_num(expected, nan=1.0))
    assert torch.equal(halves.isnan(), expected.isnan())
    into = torch.empty(size + 1)[1:]  # whose lines begin elsewhere
    assert half_precision.widen(halves, into) is into
    assert torch.equal(torch.nan_to_num(into, nan=1.0), torch.nan_to_num(halves.float(), nan=1.0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_what_has_no_kernel_is_cast_by_torch(dtype: torch.dtype) -> None:
    x = numbers(1000).nan_to_num(0.5, 2.0, -2.0).to(dtype)
    expected = x.to(torch.float16)
    halves = half_precision.narrow(x, torch.float16)
    assert torch.equal(halves, expected)
    assert torch.equal(half_precision.widen(halves, x), expected.to(dtype))
