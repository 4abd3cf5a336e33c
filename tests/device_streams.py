"""Follows a device's memory on machines without one: how much there is, and whether it could be handed out again while
another stream still uses it.

PyTorch's allocator on CUDA hands a freed block out again to the stream that took it, without waiting for others. So
before it launches anything, that stream must wait for the others' work on the block, unless they were recorded
(`record_stream`). Here streams are numbers of operations, and each knows how much of the others it has waited for.
"""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hvdcomp.arrays import torch_arrays
from hvdcomp.kernels import cuda
from hvdcomp.kernels.cuda.device import DeviceKernels
from tests.device_waits import on_device

_ADDRESSES = "gradient", "result", "source", "kept", "x", "velocity", "next_velocity", "total", "narrowed", "rounded"
"""Columns of a bucket's table."""


class Stream:
    """In place of a device's.

    Attributes:
        launched: number of operations so far.
        behind: by stream, how many of its operations have ended before what comes next on this one.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.launched = 0
        self.behind: dict[Stream, int] = {}

    def __repr__(self) -> str:
        return self.name

    def wait_stream(self, other: Stream) -> None:
        for stream, count in {**other.behind, other: other.launched}.items():
            self.behind[stream] = max(count, self.behind.get(stream, 0))


class _Block:
    """Memory of a tensor, and its latest use on each stream."""

    def __init__(self, taken_on: Stream, size: int) -> None:
        self.taken_on = taken_on
        self.size = size
        self.tensors = 0
        self.used: dict[Stream, int] = {}
        self.recorded: set[Stream] = set()


class Streams(TorchDispatchMode):
    """Notes on which streams memory is taken, used and freed: by PyTorch's operations and by launches.

    Attributes:
        now: the current stream.
        wrong: uses of freed memory that may not have ended, as sentences.
        freed: number of blocks that more than one stream had used.
        taken: bytes of memory that tensors have now.
        most: the most that they had at any time; to be set to `taken` before what is looked at.
    """

    def __init__(self, now: Stream) -> None:
        super().__init__()
        self.now = now
        self.wrong: list[str] = []
        self.freed = self.taken = self.most = 0
        self._blocks: dict[int, _Block] = {}  # by address
        self._free: list[_Block] = []
        self._known: set[int] = set()  # ids of tensors that are alive

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = function(*args, **(kwargs or {}))
        self.use(*tree_leaves((args, kwargs, results)))
        return results

    def use(self, *arguments: Any) -> None:
        """An operation of the current stream on tensors, and on numbers that may be addresses."""
        self.now.launched += 1
        for block in [block for block in self._free if block.taken_on is self.now]:
            self._free.remove(block)
            for stream in block.used.keys() - {self.now} - block.recorded:
                if self.now.behind.get(stream, 0) < block.used[stream]:
                    self.wrong.append(f"{self.now} reuses {block.size} bytes that {stream} may still use")
        addresses = sorted(self._blocks)
        for argument in arguments:
            block = None
            if isinstance(argument, torch.Tensor):
                block = self._block_of(argument)
            elif type(argument) is int and (place := bisect.bisect_right(addresses, argument)):
                start = addresses[place - 1]
                block = self._blocks[start] if argument < start + self._blocks[start].size else None
            if block is not None:
                block.used[self.now] = self.now.launched

    def record(self, tensor: torch.Tensor) -> None:
        """As `Tensor.record_stream` with the current stream."""
        self._block_of(tensor).recorded.add(self.now)

    def _block_of(self, tensor: torch.Tensor) -> _Block:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        block = self._blocks.get(address)
        if block is None:
            block = self._blocks[address] = _Block(self.now, storage.nbytes())
            self.taken += block.size
            self.most = max(self.most, self.taken)
        if id(tensor) not in self._known:
            self._known.add(id(tensor))
            block.tensors += 1
            weakref.finalize(tensor, self._gone, id(tensor), address, block).atexit = False
        return block

    def _gone(self, tensor: int, address: int, block: _Block) -> None:
        self._known.discard(tensor)
        block.tensors -= 1
        if block.tensors:
            return
        self._blocks.pop(address, None)
        self.taken -= block.size
        self._free.append(block)
        self.freed += len(block.used) > 1


@contextmanager
def streams(monkeypatch: pytest.MonkeyPatch, now: Stream) -> Iterator[Streams]:
    """Notes what happens to memory within the block, where kernels are noted instead of launched."""

    def launch(self: Any, kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
        noted.use(*arguments, *(int(one) for name in _ADDRESSES for one in self.segments[name] if one))

    with on_device(monkeypatch), monkeypatch.context() as patch, Streams(now) as noted:
        patch.setattr(torch_arrays, "stream", lambda x: noted.now)
        patch.setattr(cuda, "let_go", noted.record)
        patch.setattr(DeviceKernels, "launch", launch)
        yield noted
