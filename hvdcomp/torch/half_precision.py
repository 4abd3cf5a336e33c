"""Means in half precision of vectors that lie in one piece, as DistributedDataParallel's buckets do."""

from __future__ import annotations

import torch

from hvdcomp import kernels

_MOST_HOLDING = 1 << 17  # elements of a call that keeps the interpreter's lock, for a tenth of a millisecond


def divided(vector: torch.Tensor, divisor: int, dtype: torch.dtype) -> torch.Tensor:
    """The elements divided, in another element type; may change the vector.

    Dividing comes first: the sum of what all ranks have must not overflow in half precision.
    """
    if not _has_kernel(vector, dtype):
        return vector.div_(divisor).to(dtype)
    halves = torch.empty_like(vector, dtype=dtype)
    size = vector.numel()
    library = kernels.library(release=size > _MOST_HOLDING)
    assert library is not None
    library.hvd_half_quotients(vector.data_ptr(), size, divisor, halves.data_ptr(), kernels.threads())
    return halves


def widen(halves: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
    """Puts what `divided` returned, or the sum of all ranks', into the vector; returns the vector."""
    if not _has_kernel(vector, halves.dtype):
        return vector.copy_(halves)
    size = vector.numel()
    library = kernels.library(release=size > _MOST_HOLDING)
    assert library is not None
    library.hvd_half_widen(halves.data_ptr(), size, vector.data_ptr(), kernels.threads())
    return vector


def _has_kernel(vector: torch.Tensor, dtype: torch.dtype) -> bool:
    return (
        vector.device.type == "cpu"
        and (vector.dtype, dtype) == (torch.float32, torch.float16)
        and vector.is_contiguous()
        and kernels.available()
    )
