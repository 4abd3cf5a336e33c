"""The kernels for buckets on CUDA devices, written in Triton. They have the same names and do the same arithmetic as
the kernels in C.

Triton and PyTorch are imported at the first use of a kernel, not with hvdcomp. If TRITON_INTERPRET=1 is set at the
first use, Triton's interpreter runs the same kernels on a CPU. Tests use this (`serving_host`).
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from hvdcomp.errors import warn_alone

__all__ = [
    "METHODS", "MOST_ELEMENTS", "available", "compiled_ahead", "described", "let_go", "placed", "serves", "serves_host",
    "serving_host", "split_like", "takes", "warn_where_none", "way_out", "why_not",
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
    "eden",
    "topk",
    "mstopk",
    "redsync",
    "dgc",
    "chunkedtopk",
    "randomk",
    "topkc",
    "arctopk",
    "powersgd",
}
"""The methods for which this folder has all kernels."""

MOST_ELEMENTS = 2**31 - 2**16
"""The largest number of elements of a tensor. Kernels use 32-bit integers as indices of elements. These indices may
exceed the size of the tensor by up to one block of a sparse payload (`sparse_decode.COUNTED`)."""

_COMPILED_AHEAD = "HVDCOMP_TRITON_CACHE"
_OLDEST = 3, 6  # the oldest version of Triton that works
# Highest rank of low-rank factors. It is limited because the products of all pairs of their columns must fit into the
# registers of one program.
_HIGHEST_RANK = 32
_ALIGNMENT = 32  # number of elements that a device reads at once
_serves_host = False
_warn_once = functools.cache(warn_alone)


def available() -> bool:
    """Whether kernels for CUDA devices can be used."""
    return not why_not()


def why_not() -> str:
    """The reason why there are no kernels for CUDA devices; empty if there are kernels."""
    return _reason_and_remedy()[0]


def way_out() -> str:
    """Advice on how to get kernels for CUDA devices; an empty text if there are kernels."""
    return _reason_and_remedy()[1]


def _reason_and_remedy() -> tuple[str, str]:
    if os.environ.get("HVDCOMP_KERNELS", "") == "off":
        return "HVDCOMP_KERNELS=off is set in the environment", "Unset HVDCOMP_KERNELS."
    return _missing()


@functools.cache
def _missing() -> tuple[str, str]:
    install = "Install PyTorch 2.11 or later for CUDA: its packages bring Triton."
    try:
        import torch

        installed = version("triton")
        if tuple(map(int, installed.split(".")[:2])) < _OLDEST:
            return f"Triton {installed} is installed, but {'.'.join(map(str, _OLDEST))} or later is needed", install

        from hvdcomp.kernels.cuda import language
    except PackageNotFoundError:
        return "Triton is not installed", install
    except ImportError as error:
        return str(error), install
    failure = "" if language.INTERPRETED or not torch.cuda.is_available() else _failure_of_loader(language.triton)
    return failure, failure and (
        f"Install gcc, or set CC to a C compiler (CC=/path/to/cc), or set {_COMPILED_AHEAD}=/path to a folder that "
        "already contains the compiled code."
    )


def _failure_of_loader(triton: Any) -> str:
    """The reason why Triton cannot load kernels although there is a device; empty if Triton can load them.

    Triton loads kernels with a C module, which it compiles when it first needs the module.
    """
    try:
        triton.runtime.driver.active.utils  # noqa: B018
    except Exception as error:  # compilers, linkers and file systems fail in many ways
        message = f"{error.cmd[0]} failed" if isinstance(error, subprocess.CalledProcessError) else str(error)
        first_line = next(iter(message.splitlines()), type(error).__name__)
        return f"Triton needs compiled code to load its kernels, but this code cannot be compiled here ({first_line})"
    return ""


def compiled_ahead() -> str:
    """The read-only folder of kernels that were compiled in advance: `HVDCOMP_TRITON_CACHE`, or a folder in the Python
    environment of the GPU image."""
    return os.environ.get(_COMPILED_AHEAD) or f"{sys.prefix}/share/hvdcomp/triton"


def described() -> str:
    """A text that names the kernels for gradients on CUDA devices. The text must be the same on all ranks, because
    ranks with different kernels may send payloads in different formats."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return "no CUDA"
    return f"Triton {version('triton')}" if available() else "none"


def takes(compressor: Any, size: int) -> bool:
    """Whether kernels support a compressor for a tensor with this number of elements."""
    if compressor.name == "two_level":
        return takes(compressor.compressor, size)
    return (
        compressor.name in METHODS
        and compressor.has_bucket_form
        and size <= MOST_ELEMENTS
        and getattr(compressor, "rank", getattr(compressor, "sketch", 1)) <= _HIGHEST_RANK
    )


def serves(array: Any) -> bool:
    """Whether there are kernels for the device on which a PyTorch tensor is."""
    return _is_served_device(array) and available()


def _is_served_device(array: Any) -> bool:
    return bool(array.is_cuda or (_serves_host and array.is_cpu))


def warn_where_none(array: Any) -> None:
    """Warns, only once, if a PyTorch array is on a device that has no kernels. Does not warn if HVDCOMP_KERNELS=off."""
    if hasattr(array, "is_cuda") and _is_served_device(array) and all(_missing()):
        reason, remedy = _missing()
        slower = "gradients on the GPU are compressed one tensor at a time, which is slower"
        _warn_once(f"{slower}: {reason}. {remedy}")


def serves_host() -> bool:
    """Whether these kernels also run for tensors on the CPU, as in tests with Triton's interpreter."""
    return _serves_host


@contextmanager
def serving_host() -> Iterator[None]:
    """A context manager in which these kernels also run for tensors on the CPU. For tests; do not nest it."""
    global _serves_host
    _serves_host = True
    try:
        yield
    finally:
        _serves_host = False


def placed(arrays: Sequence[Any], dtype: str = "float32") -> tuple[Sequence[Any], list[int]] | None:
    """Makes sure that PyTorch tensors are in row-major order, and gets the addresses of their first elements.

    Returns:
        The tensors and their addresses. A tensor that is not in row-major order is replaced with a copy. The result is
        None if a tensor has a different element type, or if the tensors are not all on one device that has kernels.
    """
    first = arrays[0]
    if not hasattr(first, "is_cuda") or not serves(first) or str(first.dtype) != f"torch.{dtype}":
        return None
    # `map` with methods of the class takes a third of the time of a loop over the tensors.
    of = type(first)
    if len({x.dtype for x in arrays}) > 1 or len(set(map(of.get_device, arrays))) > 1:
        return None
    dense = arrays if all(map(of.is_contiguous, arrays)) else [x.contiguous() for x in arrays]
    return dense, list(map(of.data_ptr, dense))


def split_like(arrays: Sequence[Any], wide: bool = False) -> tuple[list[Any], list[int]]:
    """Uninitialized arrays with the shapes of `arrays`, and their addresses.

    All arrays share one storage. Each array begins at a multiple of `_ALIGNMENT` elements.

    Args:
        arrays: PyTorch arrays. The new arrays get the shapes, the device and the element type of these arrays.
        wide: whether the element type of the new arrays is float32 instead.
    """
    sizes = [x.numel() for x in arrays]
    padded = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    like = arrays[0].new_empty(0).float() if wide else arrays[0]
    pieces = like.new_empty(sum(padded)).split(padded)
    parts = [piece[:size].view(x.shape) for piece, size, x in zip(pieces, sizes, arrays, strict=True)]
    return parts, [part.data_ptr() for part in parts]


def let_go(array: Any) -> None:
    """Call this before you delete the last reference to a tensor that the current stream may still use. Without this
    call, PyTorch would reuse the tensor's memory too early if it allocated the tensor on a different stream."""
    if array.is_cuda:
        import torch

        array.record_stream(torch.cuda.current_stream(array.device))
