"""Finds operations with which the host would wait for a device, on machines without one."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hvdcomp.arrays import torch_arrays
from hvdcomp.kernels import cuda

Places = frozenset[tuple[str, str]]

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
_PINNING = frozenset({("device.py", "brought"), ("torch_arrays.py", "from_numpy")})  # from memory that is pinned first


class WaitedError(AssertionError):
    """An operation would have waited for the device."""


class NothingWaits(TorchDispatchMode):
    """Makes operations that would wait for a device fail within the block.

    Args:
        is_on_host: says of a tensor whether it is on the host all the same.

    Attributes:
        is_on_host: as given.
        operations: the number of calls of each operation that would launch work on a device.
    """

    def __init__(self, is_on_host: Callable[[torch.Tensor], bool] = lambda x: False) -> None:
        super().__init__()
        self.is_on_host = is_on_host
        self.operations: Counter[str] = Counter()

    def refuse(self, why: str, allowed: Places = frozenset()) -> None:
        """Raises an error, unless one of the callers, by file and function, is allowed to wait."""
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if (Path(frame.f_code.co_filename).name, frame.f_code.co_name) in allowed:
                return
            frame = frame.f_back
        raise WaitedError(why)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name in READING and not self.is_on_host(args[0]):
            self.refuse(f"{name} reads what is on the device")
        if name in ("index", "index_put", "index_put_") and any(map(_truths, args[1])):
            self.refuse(f"{name} by truth values: how many are true is known on the device only")
        if name == "repeat_interleave" and (kwargs or {}).get("output_size") is None:
            self.refuse("the length of repeat_interleave's result is known on the device only")
        if name == "lift_fresh" and args[0].dim() and args[0].numel():  # a number is told with a kernel
            self.refuse("a copy of memory that is not pinned", _PINNING)
        if name not in _VIEWS:
            self.operations[name] += 1
        return function(*args, **(kwargs or {}))


def _truths(index: torch.Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


@contextmanager
def on_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Treats tensors on the CPU as tensors on a device within the block, with kernels and without."""
    with monkeypatch.context() as patch, cuda.serving_host():
        patch.setattr(torch_arrays, "waits", lambda x: True)
        yield


@contextmanager
def nothing_waits(is_on_host: Callable[[torch.Tensor], bool] = lambda x: False) -> Iterator[NothingWaits]:
    """Makes operations of this thread that would wait for a device raise `WaitedError` within the block."""
    with pytest.MonkeyPatch.context() as patch, NothingWaits(is_on_host) as mode:
        for name in _METHODS:
            patch.setattr(torch.Tensor, name, _refused(name, getattr(torch.Tensor, name), mode))
        yield mode


def _refused(name: str, real: Any, mode: NothingWaits) -> Any:
    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not mode.is_on_host(self):
            mode.refuse(f"{name} reads what is on the device")
        return real(self, *args, **kwargs)

    return method
