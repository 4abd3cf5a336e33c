"""The kernels of buckets on CUDA devices, in Triton: the same names and the same arithmetic as those in C.

Triton and PyTorch are imported at the first use, not with hvdcomp. Where TRITON_INTERPRET=1 is in the environment then,
Triton's interpreter runs the same kernels on a CPU, for tests (`serving_host`).
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

__all__ = [
    "METHODS", "MOST_ELEMENTS", "available", "described", "placed", "serves", "serves_host", "serving_host", "split_like",
    "takes", "why_not",
]  # fmt: skip

METHODS = {
    "none",
    "fp16",
    "bf16",
    "signsgd",
    "efsignsgd",
    "onebit",
    "qsgd",
    "terngrad",
    "natural",
    "globalqsgd",
    "int8",
    "int4",
    "fp8",
    "topk",
    "mstopk",
    "redsync",
    "dgc",
    "randomk",
    "powersgd",
}
"""Whose bucket forms find all their kernels here."""

MOST_ELEMENTS = 2**31 - 2**16
"""Of a tensor. Kernels number elements in 32 bits, and up to a block of a sparse payload (`sparse_decode.COUNTED`)
beyond the last one."""

_OLDEST = 3, 7  # of Triton
_HIGHEST_RANK = 32  # whose products a program can hold
_ALIGNMENT = 32  # elements: what a device reads at once
_serves_host = False


def available() -> bool:
    """Whether there are kernels for CUDA devices."""
    return not why_not()


def why_not() -> str:
    """Why there are none; empty where there are some."""
    if os.environ.get("HVDCOMP_KERNELS", "") == "off":
        return "HVDCOMP_KERNELS=off is in the environment"
    return _missing()


@functools.cache
def _missing() -> str:
    try:
        import torch  # noqa: F401

        found = version("triton")
        if tuple(map(int, found.split(".")[:2])) < _OLDEST:
            return f"Triton {found} is installed, and {'.'.join(map(str, _OLDEST))} or later is needed"

        from hvdcomp.kernels.cuda import language  # noqa: F401
    except ImportError as error:
        return f"{error}; PyTorch's packages for CUDA bring Triton"
    return ""


def described() -> str:
    """What ranks compare, for their payloads to fit: whether gradients on CUDA devices have these kernels."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return "no CUDA"
    return f"Triton {version('triton')}" if available() else "none"


def takes(compressor: Any, size: int) -> bool:
    """Whether kernels take a tensor of a number of elements and its compressor."""
    scatters = getattr(compressor, "exchange", "gather") != "gather"  # in chunks, which are cut on the host alone
    return (
        compressor.name in METHODS
        and not scatters
        and size <= MOST_ELEMENTS
        and getattr(compressor, "rank", 1) <= _HIGHEST_RANK
    )


def serves(array: Any) -> bool:
    """Whether kernels can work on an array of PyTorch where it is."""
    return bool(array.is_cuda or (_serves_host and array.is_cpu)) and available()


def serves_host() -> bool:
    """Whether arrays on the CPU are served too."""
    return _serves_host


@contextmanager
def serving_host() -> Iterator[None]:
    """Within it, these kernels serve arrays on the CPU too. For tests, one at a time."""
    global _serves_host
    _serves_host = True
    try:
        yield
    finally:
        _serves_host = False


def placed(arrays: Sequence[Any]) -> tuple[list[Any], list[int]] | None:
    """The arrays in row-major order, and the addresses of their first elements.

    Returns:
        The arrays themselves, or copies of those that lie otherwise; None if they are not all of float32, on one device
        that kernels serve.
    """
    first = arrays[0]
    if not hasattr(first, "is_cuda") or not serves(first):
        return None
    if any(x.dtype != first.dtype or x.device != first.device or x.element_size() != 4 for x in arrays):
        return None
    dense = [x if x.is_contiguous() else x.contiguous() for x in arrays]
    return dense, [x.data_ptr() for x in dense]


def split_like(arrays: Sequence[Any]) -> tuple[list[Any], list[int]]:
    """Fresh arrays, not filled, in the shapes of the given ones, in one storage, and their addresses.

    Each begins at a multiple of what a device reads at once, if the storage does.
    """
    sizes = [x.numel() for x in arrays]
    padded = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    pieces = arrays[0].new_empty(sum(padded)).split(padded)
    parts = [piece[:size].view(x.shape) for piece, size, x in zip(pieces, sizes, arrays, strict=True)]
    return parts, [part.data_ptr() for part in parts]
