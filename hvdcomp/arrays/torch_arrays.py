"""Array operations in PyTorch, on CPU and CUDA. A function waits for the device only if its docstring says so.

The docstring of each function is in `numpy_arrays`, at the function of the same name.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from hvdcomp.arrays.alignment import CACHE_LINE

# An array in this file is a torch.Tensor. Its type is Any, because `types.AllFunctions` asks for functions that accept
# every `types.Array`.
Array = Any

# Pass these functions to `map`, which takes a third of the time of a loop over the tensors of a step.
_IS_CONTIGUOUS, _ADDRESS = torch.Tensor.is_contiguous, torch.Tensor.data_ptr


def dtype_name(x: Array) -> str:
    return str(x.dtype).removeprefix("torch.")


def device(x: Array) -> str:
    return str(x.device)


def waits(x: Array) -> bool:
    return not x.is_cpu


def astype(x: Array, dtype: str) -> Array:
    return x.to(getattr(torch, dtype))


def flatten(x: Array) -> Array:
    return x.reshape(-1)


def reshape(x: Array, shape: Sequence[int]) -> Array:
    return x.reshape(tuple(shape))


def zeros(shape: Sequence[int], like: Array) -> Array:
    return torch.zeros(tuple(shape), dtype=like.dtype, device=like.device)


def arange(count: int, like: Array) -> Array:
    return torch.arange(count, dtype=like.dtype, device=like.device)


def from_numpy(x: np.ndarray, like: Array) -> Array:
    array = torch.from_numpy(x)
    if like.is_cuda:
        array = array.pin_memory()  # a copy from pageable memory may wait for the device
    return array if like.is_cpu else array.to(like.device, non_blocking=True)


def to_numpy(x: Array) -> np.ndarray:
    return x.detach().numpy() if x.requires_grad else x.numpy()


def hosted(arrays: Sequence[Array], dtype: str = "float32") -> tuple[Sequence[Array], list[int]] | None:
    if {x.dtype for x in arrays} - {getattr(torch, dtype)} or False in {x.is_cpu for x in arrays}:
        return None
    dense = arrays if all(map(_IS_CONTIGUOUS, arrays)) else [x.contiguous() for x in arrays]
    return dense, list(map(_ADDRESS, dense))


def concatenate(arrays: Sequence[Array], axis: int = 0) -> Array:
    return torch.cat(list(arrays), axis)


def as_bytes(x: Array) -> Array:
    # Sets strides of 1, which torch does not guarantee for tensors of at most one element.
    return x.contiguous().as_strided((x.numel(),), (1,)).view(torch.uint8)


def from_bytes(x: Array, like: Array) -> Array:
    if not x.numel():  # the address of an empty array may not be aligned for a view with another type
        return x.new_empty(like.shape, dtype=like.dtype)
    return x.view(like.dtype).view(like.shape)


def to_bfloat16_bits(x: Array) -> Array:
    return x.to(torch.bfloat16).view(torch.int16)


def from_bfloat16_bits(bits: Array) -> Array:
    return bits.view(torch.bfloat16).float()


def top(x: Array, k: int) -> Array:
    return torch.topk(x, k, sorted=False).indices


def first_places(x: Array, low: Any, high: Any, limit: int) -> Array:
    # True element number j of a mask is at the first index at which the running count of true elements exceeds j. This
    # search needs neither the number of true elements on the host nor a scatter.
    index = torch.int32 if x.shape[0] < 2**31 else torch.int64
    front = x >= high
    in_front, behind = (torch.cumsum(mask, 0, dtype=index) for mask in (front, ~(front | (x < low))))
    places = torch.arange(limit, dtype=index, device=x.device)
    remaining = places - in_front[-1]
    return torch.where(remaining < 0, interval_index(in_front, places), interval_index(behind, remaining))


def count_nonzero(x: Array) -> Array:
    return torch.count_nonzero(x)


def sort(x: Array) -> Array:
    return x.sort().values


def block_counts(indices: Array, block: int, blocks: int) -> Array:
    starts = torch.arange(blocks, dtype=indices.dtype, device=indices.device) * block
    places = torch.searchsorted(indices, starts)
    return torch.diff(places, append=places.new_full((1,), indices.shape[0])).int()


def unique(x: Array) -> tuple[Array, Array]:
    """Waits for an accelerator."""
    values, places = x.unique(return_inverse=True)
    return values, places


def counts(x: Array, length: int) -> Array:
    """Waits for an accelerator."""
    return x.bincount(minlength=length)


def repeat(x: Array, counts: Array, total: int) -> Array:
    return torch.repeat_interleave(x, counts, output_size=total)


def norms(arrays: Sequence[Array]) -> Array:
    if all(x.dtype == torch.float32 for x in arrays):
        return torch.stack(torch._foreach_norm(list(arrays))).double()
    wide = [torch.float32 if x.element_size() < 4 else x.dtype for x in arrays]
    values = [torch.linalg.vector_norm(x, dtype=dtype) for x, dtype in zip(arrays, wide, strict=True)]
    return torch.stack(values).double()  # `stack` converts mixed types to the widest type


def mean_to_std(arrays: Sequence[Array]) -> Array:
    parts = [torch.std_mean(x.float() if x.element_size() < 4 else x, correction=0) for x in arrays]
    return torch.stack([(mean.abs() / std).double() for std, mean in parts])


def add_scaled(totals: Sequence[Array], arrays: Sequence[Array], factor: float, found_inf: Array) -> list[Array]:
    if waits(found_inf):
        added = torch._foreach_add(list(totals), list(arrays), alpha=factor)
        return [torch.where(found_inf.to(old.device) == 0, new, old) for new, old in zip(added, totals, strict=True)]
    if found_inf.item() == 0:
        torch._foreach_add_(list(totals), list(arrays), alpha=factor)
    return list(totals)


def take(x: Array, indices: Array) -> Array:
    return torch.index_select(x, 0, indices)


def add_at(x: Array, indices: Array, values: Array) -> Array:
    return x.index_add_(0, indices, values)


def reciprocal_or_zero(x: Array, threshold: Array) -> Array:
    return torch.where(x > threshold, x.reciprocal(), 0.0)


def finite_or_zero(x: Array) -> Array:
    return torch.nan_to_num_(x, nan=0.0, posinf=0.0, neginf=0.0)


def aligned(x: Array) -> Array:
    if x.is_contiguous() and x.data_ptr() % CACHE_LINE == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)  # PyTorch's allocators begin with a cache line


def eigenvectors(x: Array) -> Array:
    try:
        return torch.linalg.eigh(x).eigenvectors.t().flip(0)
    except torch.linalg.LinAlgError:
        return torch.eye(x.shape[0], dtype=x.dtype, device=x.device)


def interval_index(bounds: Array, points: Array) -> Array:
    return torch.searchsorted(bounds, points, right=True).clamp_(max=bounds.shape[0] - 1)


def where(condition: Array, x: Array, y: Array) -> Array:
    return torch.where(condition, x, y)


def bitcast(x: Array, dtype: str) -> Array:
    return x.view(getattr(torch, dtype))


def floor(x: Array) -> Array:
    return x.floor_()


def row_norms(x: Array) -> Array:
    return torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=torch.float64).to(x.dtype)


def row_dots(x: Array, y: Array) -> Array:
    return (x.double() * y.double()).sum(1, keepdim=True)


def hadamard(x: Array) -> Array:
    apart = 1
    while apart < x.shape[1]:
        pairs = x.reshape(x.shape[0], -1, 2, apart)
        x = torch.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], 2).flatten(1)
        apart *= 2
    return x


def row_largest(x: Array) -> Array:
    return x.abs().amax(1, keepdim=True)


def found_inf(arrays: Sequence[Array]) -> Array:
    filled = [x for x in arrays if x.numel()]
    if not filled:
        return torch.zeros(1, device=arrays[0].device)
    # If a sum is finite, all elements are finite, and this is the fastest test on the host. But a sum of finite
    # elements may overflow.
    if all(not waits(x) and math.isfinite(x.sum().item()) for x in filled):
        return torch.zeros(1)
    # The largest magnitude is inf or NaN if and only if some element is inf or NaN. Then x - x is NaN, otherwise 0.
    largest = torch.stack([norm.to(filled[0].device) for norm in torch._foreach_norm(filled, float("inf"))])
    return (largest - largest).sum().float().reshape(1)


def select(found_inf: Array, x: Array, y: Array) -> Array:
    if waits(found_inf):
        return torch.where(found_inf.to(x.device) == 0, x, y)
    return x if found_inf.item() == 0 else y


def spoil(x: Array, found_inf: Array) -> Array:
    if x.numel() and (waits(found_inf) or found_inf.item() != 0):
        x[(0,) * x.dim()].add_(found_inf[0].to(x.device))  # x.view(-1)[0] fails for channels_last
    return x


def read_later(x: Array) -> Callable[[], float]:
    if not x.is_cuda:
        return x.item
    host_copy = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    host_copy.copy_(x, non_blocking=True)
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(x.device))

    def read() -> float:
        done.synchronize()
        return float(host_copy)

    return read


def like_original(x: Array, original: Array) -> Array:
    x = x.reshape(original.shape).to(original.dtype)
    if x.stride() == original.stride():
        return x
    return torch.empty_like(original).copy_(x)


def like_originals(arrays: Sequence[Array], originals: Sequence[Array]) -> Sequence[Array]:
    if arrays is originals or all(map(operator.is_, arrays, originals)):
        return arrays
    return [
        x if x is original or (original.is_contiguous() and x.dtype is original.dtype) else like_original(x, original)
        for x, original in zip(arrays, originals, strict=True)
    ]


def protected(x: Array) -> Array:
    return x


def changes(x: Array) -> int | None:
    return None if x.is_inference() else x._version


def share_storage(x: Array, y: Array) -> bool:
    return x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


def stream(x: Array) -> Any:
    return torch.cuda.current_stream(x.device) if x.is_cuda else None


def mark(like: Array, spare: Any = None) -> Any:
    if not like.is_cuda:
        return time.perf_counter()
    fits = spare is not None and spare.device == like.device
    event = spare if fits else torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(like.device))
    return event


def seconds_between(start: Any, end: Any) -> float | None:
    if isinstance(start, float):
        return end - start
    if not end.query():
        return None
    return start.elapsed_time(end) / 1000
