"""Casts contiguous vectors, such as DistributedDataParallel's buckets, to half precision and back."""

from __future__ import annotations

import torch

from hvdcomp import kernels

_MOST_HOLDING = 1 << 17  # a call with at most this number of elements (0.1 ms) keeps the interpreter's lock


def narrow(vector: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The vector, cast to the given element type."""
    if not _has_kernel(vector, dtype):
        return vector.to(dtype)
    halves = torch.empty_like(vector, dtype=dtype)
    size = vector.numel()
    library = kernels.library(release=size > _MOST_HOLDING)
    assert library is not None
    library.hvd_half_narrow(vector.data_ptr(), size, halves.data_ptr(), kernels.threads())
    return halves


def widen(halves: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
    """Casts a result of `narrow`, or the mean of such results over the ranks, back into the vector, and returns the
    vector."""
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
