"""Launches kernels for a bucket, on one device.

Nothing here waits for the device. How often it is launched does not depend on the number of tensors.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from hvdcomp.kernels.cuda import (
    casts,
    chunks,
    dense,
    lowrank,
    quant,
    quant_more,
    random,
    signs,
    sparse,
    sparse_decode,
    together,
)
from hvdcomp.kernels.cuda.aside import Aside
from hvdcomp.kernels.cuda.language import INTERPRETED, tl, triton
from hvdcomp.kernels.cuda.x import COLUMNS, SOURCED
from hvdcomp.kernels.tables import Table

PIECE = 8192
"""Elements of a program: a multiple of `packing.GROUP`."""

_BLOCK = 1024  # elements that a program works on at a time
_FLAGS = 64  # of a step; more are not asked for
_LAUNCHERS: dict[str, Callable[..., Any]] = {
    name: launcher
    for module in (dense, casts, signs, quant, quant_more, sparse, sparse_decode, chunks, random, lowrank, together)
    for name, launcher in module.KERNELS.items()
}
_interpreter = threading.Lock()  # Triton's interpreter serves one thread at a time


def brought(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """An array of NumPy on a device. Nobody waits for the copy; the array is not to be changed."""
    there = torch.from_numpy(array)
    if device.type == "cuda":
        # From other memory, a copy may wait for the device. PyTorch keeps pinned memory from others until
        # the copy is done.
        there = there.pin_memory()
    return there.to(device, non_blocking=True)


class _Rows:
    """The table as it was last brought to a device.

    Attributes:
        sent: addresses of what says what was sent of the kept x, and where that of x goes, int64 (2, tensors).
        there: the table on the device.
    """

    def __init__(self, table: Table) -> None:
        tensors = len(table.segments)
        self._fixed = {
            "first_task": np.searchsorted(table.tasks["segment"], np.arange(tensors)),
            "tasks": np.bincount(table.tasks["segment"], minlength=tensors),
        }
        self.sent = np.zeros((2, tensors), np.int64)
        self._now = np.zeros((len(COLUMNS), tensors), np.int64)
        self._before: np.ndarray | None = None
        self.there: torch.Tensor

    def bring(self, segments: np.ndarray, device: torch.device) -> None:
        """Brings it to the device, if it has changed."""
        for number, name in enumerate(COLUMNS):
            if name.startswith("place"):
                self._now[number] = segments["place"][:, int(name[-1])]
            elif name in ("kept_sent", "x_sent"):
                self._now[number] = self.sent[int(name == "x_sent")]
            else:
                self._now[number] = self._fixed[name] if name in self._fixed else segments[name].astype(np.int64)
        if self._before is None or not np.array_equal(self._now, self._before):
            self._before = self._now.copy()
            self.there = brought(self._before, device)


class DeviceKernels:
    """The kernels of a bucket on a device.

    Args:
        table: of the bucket, with pieces of `PIECE`.
        device: of PyTorch.
        keeps: 0 if the memory keeps nothing, else 1 and the element type of what it keeps, as of `NARROW`.

    Attributes:
        factor: of the step, what gradients are multiplied with, float32 (1,) on the device.
        moves: whether there is momentum correction.
        flag: address of what says whether the kernels of the call under way have found an inf or NaN.
        plans: what kernels have worked out of the tensors and levels once, beside `static`.
        room: memory that each call uses anew (`scratch`); buckets whose kernels are launched in turn may have the same.
    """

    interpreting = INTERPRETED
    block = PIECE if INTERPRETED else _BLOCK
    piece = PIECE

    def __init__(self, table: Table, device: torch.device, keeps: int) -> None:
        self.table = table
        self.device = device
        self.keeps = keeps
        self._rows = _Rows(table)
        self._memory: dict[str, torch.Tensor] = {}
        self.room: dict[str, torch.Tensor] = {}
        self.plans: dict[str, Any] = {}
        pieces = np.stack([table.tasks["segment"], table.tasks["start"]], axis=1).astype(np.int64)
        self._pieces = self.static("pieces", lambda: pieces)
        self.factor = self.static("one", lambda: np.ones(1, np.float32))
        tensors = len(table.segments)
        # What says what was sent of x, where nobody keeps it from step to step.
        sent = self.static("sent", lambda: np.zeros((2, tensors, 4), np.float32))
        self.sent[:] = sent.data_ptr() + 16 * np.arange(2 * tensors).reshape(2, tensors)
        self.moves = False
        self._flags: torch.Tensor
        self._asked = self.flag = 0
        self._aside = Aside(device) if device.type == "cuda" else None
        self._is_aside = False  # the call under way

    @property
    def segments(self) -> np.ndarray:
        """The table's rows, on the host."""
        return self.table.segments

    @property
    def tasks(self) -> int:
        """Number of pieces."""
        return len(self.table.tasks)

    @property
    def rows(self) -> torch.Tensor:
        """The table on the device."""
        return self._rows.there

    @property
    def sent(self) -> np.ndarray:
        """As of `_Rows`."""
        return self._rows.sent

    def begin(self, factor: torch.Tensor | None, moves: bool) -> None:
        """Before the first kernel of a step."""
        self.factor = self._memory["one"] if factor is None else factor.to(torch.float32)
        self.moves = moves
        self._flags = torch.zeros(_FLAGS, device=self.device)
        self._asked = 0

    def zeros(self, count: int, dtype: str) -> torch.Tensor:
        """A vector on the device."""
        return torch.zeros(count, dtype=getattr(torch, dtype), device=self.device)

    def scratch(self, name: str, count: int, dtype: str) -> torch.Tensor:
        """Memory that only one kernel after the other looks at."""
        found = self.room.get(name)
        if found is None or found.shape[0] < count:
            found = self.room[name] = self.zeros(count, dtype)
        return found

    def passing(self, count: int, dtype: str) -> torch.Tensor:
        """Memory for this call alone, not filled: too much to be kept for the next one."""
        return torch.empty(count, dtype=getattr(torch, dtype), device=self.device)

    def static(self, name: str, make: Callable[[], np.ndarray]) -> torch.Tensor:
        """Numbers that follow from the tensors and levels alone, on the device."""
        found = self._memory.get(name)
        if found is None:
            found = self._memory[name] = brought(make(), self.device)
        return found

    def call(self, name: str, *arguments: Any, aside: bool = False) -> torch.Tensor:
        """Launches what `name` needs.

        Args:
            aside: whether the network need not wait for it; then it neither finds inf or NaN nor uses `scratch`.

        Returns:
            What says whether it has found an inf or NaN, float32 (1,): NaN if so, else 0.
        """
        if self._aside is not None and not aside:
            self._aside.join()
        self._rows.bring(self.segments, self.device)
        flag = self._flags[self._asked : self._asked + 1]
        self._asked += 1
        self.flag = flag.data_ptr()
        self._is_aside = aside
        with _on(self.device):
            _LAUNCHERS[name](self, *arguments)
        return flag

    def pieces(self, kernel: Any, *arguments: Any, x: bool = False, **constants: Any) -> None:
        """Launches a program for each piece of the tensors. x: whether it makes x."""
        common: tuple[Any, ...] = (self.rows, len(self.segments), self._pieces, self.flag)
        if x:
            common += self.arguments_of_x()
            constants |= self.constants_of_x()
        constants = {"PIECE": PIECE, "BLOCK": self.block} | constants
        self.launch(kernel, self.tasks, *common, *arguments, **constants)

    def arguments_of_x(self) -> tuple[Any, ...]:
        """What `make_x` takes behind the table."""
        return self.factor, self.table.bucket.decay, self.table.bucket.momentum

    def constants_of_x(self) -> dict[str, int]:
        """What `make_x` is compiled for."""
        nesterov = bool(self.table.bucket.nesterov)
        return {"KEEPS": self.keeps, "MOMENTUM": self.moves, "NESTEROV": nesterov, "FROM": self.origin}

    @property
    def narrow(self) -> int:
        """The element type of gradients, as of `NARROW`."""
        return int(self.segments["narrow"][0])

    @property
    def origin(self) -> int:
        """Where what is compressed comes from: from `source`, or from gradients of this type."""
        return SOURCED.value if self.segments["source"][0] else self.narrow

    def tensors(self, kernel: Any, *arguments: Any, **constants: Any) -> None:
        """Launches a program for each tensor."""
        self.launch(kernel, len(self.segments), self.rows, len(self.segments), *arguments, **constants)

    def launch(self, kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
        """Launches a number of programs; of tensors they get the addresses.

        Multiplications and additions are not fused, so that results are those of the kernels in C.
        """
        numbers = numbers_of(arguments)
        beside = self._aside if self._is_aside else None
        with nullcontext() if beside is None else torch.cuda.stream(beside.after_main()):
            if self.interpreting:
                with _interpreter:
                    kernel[(programs,)](*numbers, **constants)
            else:
                _launch(kernel.fn, programs, numbers, constants)
        if beside is not None:
            beside.launched(*arguments)


_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
"""The kernels that were launched, and their constants in the order of their parameters: by function, device, constants
and types."""


def _launch(function: Callable[..., Any], programs: int, numbers: Sequence[Any], constants: dict[str, Any]) -> None:
    """Launches a kernel on the current device.

    Triton looks at each argument of each launch to find the kernel that was compiled for such, which takes it longer
    than the launch. Here their types alone decide, so what was found is kept.
    """
    types = tuple([_type_of(number) for number in numbers])
    key = function, triton.runtime.driver.active.get_current_device(), types, *constants.items()
    if key in _compiled:
        kernel, values = _compiled[key]
        kernel[(programs, 1, 1)](*numbers, *values)
        return
    launched = for_all_numbers(function)
    kernel = launched[(programs,)](*numbers, **constants, enable_fp_fusion=False)
    if kernel is not None:  # a hook of Triton's may take the launch for itself
        names = [param.name for param in launched.params if param.is_constexpr]
        _compiled[key] = kernel, tuple(constants[name] for name in names)


def _type_of(number: Any) -> Any:
    """What tells apart the types that Triton has for numbers: integers of 32 bits and longer ones, and others."""
    return -(2**31) <= number < 2**31 if type(number) is int else type(number)


def numbers_of(arguments: Sequence[Any]) -> list[Any]:
    """What kernels are given: of tensors the addresses."""
    return [argument.data_ptr() if isinstance(argument, torch.Tensor) else argument for argument in arguments]


@functools.cache
def for_all_numbers(function: Callable[..., Any]) -> Any:
    """A kernel that is compiled once, and not again for an argument that is 1, or that 16 divides: addresses and counts
    change from bucket to bucket, and each compilation would hold up a step."""
    parameters = inspect.signature(function).parameters.items()
    numbers = [name for name, one in parameters if one.annotation is not tl.constexpr]
    return triton.jit(function, do_not_specialize=numbers, do_not_specialize_on_alignment=numbers)


@functools.cache
def _index_of(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _on(device: torch.device) -> Any:
    return torch.cuda.device(_index_of(device)) if device.type == "cuda" else nullcontext()
