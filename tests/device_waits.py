"""What would make the host wait for a device, found where there is none."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hvdcomp.arrays import torch_arrays
from hvdcomp.kernels import cuda

READING = {
    "_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "nonzero_static", "masked_select", "unique_dim",
    "_unique2", "unique_consecutive", "bincount", "_linalg_check_errors", "_linalg_eigh",
}  # fmt: skip
"""Operations whose result, or its shape, the host has to know: to make it, a device has to come to its end."""

_VIEWS = {
    "view", "slice", "select", "split", "split_with_sizes", "detach", "as_strided", "empty", "new_empty", "t", "unbind",
    "alias", "expand", "unsqueeze", "squeeze", "transpose", "permute", "_unsafe_view", "empty_like", "empty_strided",
}  # fmt: skip
_METHODS = "numpy", "tolist", "cpu", "__array__"  # which read a tensor on the CPU without an operation
_PINNING = {("device.py", "brought"), ("torch_arrays.py", "from_numpy")}  # these copy from memory that is pinned before


class WaitedError(AssertionError):
    """Something would have waited."""


class NothingWaits(TorchDispatchMode):
    """Within it, what would wait for a device fails.

    Attributes:
        operations: how often each was called that a device would have to be told of.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name in READING:
            raise WaitedError(f"{name} reads what is on the device")
        if name in ("index", "index_put", "index_put_") and any(map(_truths, args[1])):
            raise WaitedError(f"{name} by truth values: how many are true is known on the device only")
        if name == "repeat_interleave" and (kwargs or {}).get("output_size") is None:
            raise WaitedError("the length of repeat_interleave's result is known on the device only")
        if name == "lift_fresh" and args[0].dim() and not _pinned(sys._getframe()):  # a number is told with a kernel
            raise WaitedError("a copy of memory that is not pinned")
        if name not in _VIEWS:
            self.operations[name] += 1
        return function(*args, **(kwargs or {}))


def _truths(index: torch.Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _pinned(frame: FrameType | None) -> bool:
    while frame is not None:
        if (Path(frame.f_code.co_filename).name, frame.f_code.co_name) in _PINNING:
            return True
        frame = frame.f_back
    return False


@contextmanager
def on_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within it, tensors on the CPU are treated as those on a device, with kernels and without."""
    with monkeypatch.context() as patch, cuda.serving_host():
        patch.setattr(torch_arrays, "waits", lambda x: True)
        yield


@contextmanager
def nothing_waits() -> Iterator[NothingWaits]:
    """Within it, on this thread, what would wait for a device raises `WaitedError`."""

    def refused(name: str) -> Any:
        def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            raise WaitedError(f"{name} reads what is on the device")

        return method

    with pytest.MonkeyPatch.context() as patch, NothingWaits() as mode:
        for name in _METHODS:
            patch.setattr(torch.Tensor, name, refused(name))
        yield mode
