"""Array operations in PyTorch, on CPU and CUDA. None of them waits for the device unless its docstring says so.

The docstrings of `numpy_arrays` hold for the functions of the same name.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hvdcomp.collectives import Array


def dtype_name(x: Array) -> str:
    return str(x.dtype).removeprefix("torch.")


def item_size(x: Array) -> int:
    return x.element_size()


def device(x: Array) -> str:
    return str(x.device)


def astype(x: Array, dtype: str) -> Array:
    return x.to(getattr(torch, dtype))


def flatten(x: Array) -> Array:
    return x.reshape(-1)


def reshape(x: Array, shape: Sequence[int]) -> Array:
    return x.reshape(tuple(shape))


def zeros(shape: Sequence[int], like: Array) -> Array:
    return torch.zeros(tuple(shape), dtype=like.dtype, device=like.device)


def from_numpy(x: np.ndarray, like: Array) -> Array:
    return torch.from_numpy(x).to(like.device, non_blocking=True)


def concatenate(arrays: Sequence[Array]) -> Array:
    return torch.cat(list(arrays))


def concatenate_columns(matrices: Sequence[Array]) -> Array:
    return torch.cat(list(matrices), dim=1)


def as_bytes(x: Array) -> Array:
    return x.contiguous().view(-1).view(torch.uint8)


def from_bytes(x: Array, like: Array) -> Array:
    return x.view(like.dtype).view(like.shape)


def to_bfloat16_bits(x: Array) -> Array:
    return x.to(torch.bfloat16).view(torch.int16)


def from_bfloat16_bits(bits: Array) -> Array:
    return bits.view(torch.bfloat16).float()


def scale(x: Array, factor: float) -> Array:
    return x.mul_(factor)


def top_k_indices(x: Array, k: int) -> Array:
    indices = torch.topk(x.abs(), k, sorted=False).indices
    return indices.int() if x.shape[0] < 2**31 else indices


def take(x: Array, indices: Array) -> Array:
    return torch.index_select(x, 0, indices)


def add_at(x: Array, indices: Array, values: Array) -> Array:
    return x.index_add_(0, indices, values)


def matmul(a: Array, b: Array) -> Array:
    return torch.mm(a, b)


def transpose(x: Array) -> Array:
    return x.t()


def column_norms(x: Array) -> Array:
    return torch.linalg.vector_norm(x, dim=0, keepdim=True)


def reciprocal_or_zero(x: Array, threshold: Array) -> Array:
    return torch.where(x > threshold, x.reciprocal(), 0.0)


def where(condition: Array, x: Array, y: Array) -> Array:
    return torch.where(condition, x, y)


def poison(arrays: Sequence[Array]) -> Array:
    # The largest magnitude is inf or NaN exactly where an element is; x - x is then NaN, otherwise 0.
    largest = torch._foreach_norm([x for x in arrays if x.numel()], float("inf"))
    spread = torch.stack([(norm - norm).float() for norm in largest])
    return spread.sum().reshape(1)


def select(poison: Array, x: Array, y: Array) -> Array:
    if poison.is_cuda:
        return torch.where(poison == 0, x, y)
    return x if poison.item() == 0 else y


def spoil(x: Array, poison: Array) -> Array:
    if x.numel():
        x.view(-1)[:1].add_(poison)
    return x


def is_zero(poison: Array) -> bool:
    return poison.item() == 0


def like_original(x: Array, original: Array) -> Array:
    x = x.reshape(original.shape).to(original.dtype)
    if x.stride() == original.stride():
        return x
    return torch.empty_like(original).copy_(x)


def mark(like: Array) -> Any:
    if not like.is_cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(like.device))
    return event


def seconds_between(start: Any, end: Any) -> float | None:
    if isinstance(start, float):
        return end - start
    if not end.query():
        return None
    return start.elapsed_time(end) / 1000
