"""Launches a bucket's kernels on one device.

No function in this file waits for the device. The number of launches does not depend on the number of tensors.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Sequence
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
    rotated,
    signs,
    sparse,
    sparse_decode,
    together,
)
from hvdcomp.kernels.cuda.aside import Aside
from hvdcomp.kernels.cuda.language import INTERPRETED, tl, triton
from hvdcomp.kernels.cuda.x import FIELDS, FLOAT, HALF, SOURCED
from hvdcomp.kernels.tables import SEGMENT, Table

PIECE = 8192
"""Number of elements that one program of a kernel processes; a multiple of `packing.GROUP`."""

_BLOCK = 1024  # number of elements that a program works on at a time
_FLAGS = 64  # number of flags in one tensor; few steps need more
_LAUNCHERS: dict[str, Callable[..., Any]] = {
    name: launcher
    for module in (
        dense,
        casts,
        signs,
        quant,
        quant_more,
        rotated,
        sparse,
        sparse_decode,
        chunks,
        random,
        lowrank,
        together,
    )
    for name, launcher in module.KERNELS.items()
}
_NUMBERS = int, float, bool
_interpreter = threading.Lock()  # Triton's interpreter cannot run in two threads at once


def brought(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copies a NumPy array to a device. The copy is asynchronous, so do not change the array afterwards."""
    host = torch.from_numpy(array)
    if device.type == "cuda":
        # A copy from pageable memory may wait for the device. PyTorch does not reuse pinned memory until the copy is
        # done.
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


def _fields() -> np.ndarray:
    """Two numbers for each 64-bit field of `SEGMENT`: the field's column in the table on the device, and the field's
    position in a record, counted in 64-bit words. The result is int64 with shape (2, fields)."""
    places = []
    fields = dict(SEGMENT.fields or {})
    for column, name in enumerate(FIELDS):
        if name in fields and name != "sent_rule":  # `sent_rule` has 32 bits
            places.append((column, fields[name][1] // 8))
    return np.array(places).T


_FIELDS = _fields()
_SENT_RULE = FIELDS.index("sent_rule")
_RECORDS = [FIELDS.index("kept_sent"), FIELDS.index("x_sent")]


class _DeviceTable:
    """The table of a bucket on a device.

    Attributes:
        sent: the addresses of two records for each tensor, int64 with shape (2, tensors). The first record describes
            which values of the kept x were sent, and the second record does so for the current x (`x.FIELDS`).
        table_on_device: the latest copy of the table.
    """

    def __init__(self, table: Table) -> None:
        tensors = len(table.segments)
        self.sent = np.zeros((2, tensors), np.int64)
        self._columns = np.zeros((len(FIELDS), tensors), np.int64)
        self._columns[FIELDS.index("first_task")] = np.searchsorted(table.tasks["segment"], np.arange(tensors))
        self._columns[FIELDS.index("tasks")] = np.bincount(table.tasks["segment"], minlength=tensors)
        self._segments = table.segments
        self._words = table.segments.view(np.int64).reshape(tensors, table.segments.itemsize // 8).T
        self._copied: tuple[bytes, bytes] | None = None
        self.table_on_device: torch.Tensor

    def bring(self, device: torch.device) -> None:
        """Copies the table to the device, if it has changed."""
        now = self._segments.tobytes(), self.sent.tobytes()
        if now == self._copied:
            return
        self._copied = now
        columns, words = _FIELDS
        self._columns[columns] = self._words[words]
        self._columns[_SENT_RULE] = self._segments["sent_rule"]
        self._columns[_RECORDS] = self.sent
        # The transfer may begin later, so it gets a copy that does not change.
        self.table_on_device = brought(self._columns.copy(), device)


class DeviceKernels:
    """The kernels of a bucket on a device.

    Args:
        table: the table of the bucket, with pieces of `PIECE` elements.
        device: the PyTorch device.
        keeps: 0 if the memory keeps no residuals; otherwise 1 plus the number in `NARROW` of the element type of the
            residuals.

    Attributes:
        factor: the number by which this step multiplies the gradients, float32 (1,) on the device.
        moves: whether momentum correction is on.
        segments: the table's rows, on the host.
        rows: the table on the device. This attribute exists after the first call.
        sent: the addresses in `_DeviceTable.sent`.
        tasks: the number of pieces.
        flag: address of a number that is set to NaN if a kernel of the current call finds an inf or NaN.
        plans: further cached results, besides the arrays of `static`, that depend only on the tensors and levels.
        room: memory that a call uses (`scratch`). Buckets may share this memory if their kernels never run at the same
            time.
    """

    interpreting = INTERPRETED
    block = PIECE if INTERPRETED else _BLOCK
    piece = PIECE

    def __init__(self, table: Table, device: torch.device, keeps: int) -> None:
        self.table = table
        self.device = device
        self.keeps = keeps
        self.segments, self.tasks = table.segments, len(table.tasks)
        self._count = len(table.segments)
        self.rows: torch.Tensor
        self._on_device = _DeviceTable(table)
        self.sent = self._on_device.sent
        self._memory: dict[str, torch.Tensor] = {}
        self.room: dict[str, torch.Tensor] = {}
        self.plans: dict[str, Any] = {}
        pieces = np.stack([table.tasks["segment"], table.tasks["start"]], axis=1).astype(np.int64)
        self._pieces = self.static("pieces", lambda: pieces)
        self.factor = self.static("one", lambda: np.ones(1, np.float32))
        tensors = len(table.segments)
        # Records of the values sent from x, for memories that do not keep these records between steps.
        sent = self.static("sent", lambda: np.zeros((2, tensors, 4), np.float32))
        self.sent[:] = sent.data_ptr() + 16 * np.arange(2 * tensors).reshape(2, tensors)
        self.moves = False
        self._flags: torch.Tensor
        self._flags_used = self.flag = 0
        self._aside = Aside(device) if device.type == "cuda" else None
        self._is_aside = False  # whether the current call launches on the side stream

    def begin(self, factor: torch.Tensor | None, moves: bool) -> None:
        """Call this before the first kernel of a step."""
        self.factor = self._memory["one"] if factor is None else factor.to(torch.float32)
        self.moves = moves
        self._flags = torch.zeros(_FLAGS, device=self.device)
        self._flags_used = 0

    def zeros(self, count: int, dtype: str) -> torch.Tensor:
        """Creates a vector of zeros on the device."""
        return torch.zeros(count, dtype=getattr(torch, dtype), device=self.device)

    def scratch(self, name: str, count: int, dtype: str) -> torch.Tensor:
        """Uninitialized memory for the kernels of one call. The next call uses the same memory again."""
        memory = self.room.get(name)
        if memory is None or memory.shape[0] < count:
            memory = self.room[name] = self.zeros(count, dtype)
        return memory

    def passing(self, count: int, dtype: str) -> torch.Tensor:
        """Uninitialized memory for this call only. Use it for arrays that are too large to keep for the next call."""
        return torch.empty(count, dtype=getattr(torch, dtype), device=self.device)

    def static(self, name: str, make: Callable[[], np.ndarray]) -> torch.Tensor:
        """An array on the device that depends only on the tensors and levels. The array is made only once, by
        `make`."""
        array = self._memory.get(name)
        if array is None:
            array = self._memory[name] = brought(make(), self.device)
        return array

    def call(self, name: str, *arguments: Any, aside: bool = False) -> torch.Tensor:
        """Launches the kernels of an operation.

        Args:
            name: name of the operation, a key of a module's `KERNELS`.
            aside: whether to launch on the side stream. Collectives do not wait for the side stream. An operation on
                the side stream must not check for inf or NaN, and must not use `scratch`.

        Returns:
            A flag, float32 (1,) on the device: NaN if the operation found an inf or NaN, otherwise 0.
        """
        if self._aside is not None and not aside:
            self._aside.join()
        self._on_device.bring(self.device)
        self.rows = self._on_device.table_on_device
        if self._flags_used == _FLAGS:
            self._flags, self._flags_used = torch.zeros(_FLAGS, device=self.device), 0
        flag = self._flags[self._flags_used : self._flags_used + 1]
        self._flags_used += 1
        self.flag = flag.data_ptr()
        self._is_aside = aside
        if self.device.type != "cuda":
            _LAUNCHERS[name](self, *arguments)
        else:
            with torch.cuda.device(_index_of(self.device)):
                _LAUNCHERS[name](self, *arguments)
        return flag

    def pieces(self, kernel: Any, *arguments: Any, x: bool = False, **constants: Any) -> None:
        """Launches a program for each piece of the tensors. x: whether the kernel computes x."""
        common: tuple[Any, ...] = (self.rows, self._count, self._pieces, self.flag)
        if x:
            common += self.arguments_of_x()
            constants |= self.constants_of_x()
        constants = {"PIECE": PIECE, "BLOCK": self.block} | constants
        self.launch(kernel, self.tasks, *common, *arguments, **constants)

    def arguments_of_x(self) -> tuple[Any, ...]:
        """The arguments of `make_x` that follow the table."""
        return self.factor, self.table.bucket.decay, self.table.bucket.momentum

    def constants_of_x(self, makes: bool = True) -> dict[str, int]:
        """The constants of `make_x` for a kernel that computes x. Pass makes=False if the kernel only reads x, with
        `made`."""
        origin = self.origin
        if not makes or origin == SOURCED.value:  # a source is read even if the kernel does not compute x
            return self.constants_of_made() | {"MOMENTUM": False, "NESTEROV": False}
        nesterov = bool(self.table.bucket.nesterov)
        return {"KEEPS": self.keeps, "MOMENTUM": self.moves, "NESTEROV": nesterov, "FROM": origin}

    def constants_of_made(self) -> dict[str, int]:
        """The compile-time constants of the kernel function `made`. Two origins for which `made` reads the same memory
        have the same constants, so that Triton compiles fewer kernels."""
        keeps = self.keeps > 0
        is_gradient = keeps or not self.narrow
        origin = SOURCED if self.origin == SOURCED.value else FLOAT if is_gradient else HALF
        return {"KEEPS": keeps, "FROM": origin.value}

    @property
    def narrow(self) -> int:
        """The element type of gradients, as in `NARROW`."""
        return int(self.segments["narrow"][0])

    @property
    def origin(self) -> int:
        """Where the numbers to compress come from: `SOURCED` if they come from a source, otherwise the element type of
        the gradients."""
        return SOURCED.value if self.segments["source"][0] else self.narrow

    def tensors(self, kernel: Any, *arguments: Any, **constants: Any) -> None:
        """Launches a program for each tensor."""
        self.launch(kernel, self._count, self.rows, self._count, *arguments, **constants)

    def launch(self, kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
        """Launches `programs` programs. Tensor arguments are passed as addresses.

        Multiplications and additions are not fused, so that results are identical, bit for bit, to those of the C
        kernels.
        """
        numbers = numbers_of(arguments)
        if self._aside is None or not self._is_aside:
            self._launch(kernel, programs, numbers, constants)
            return
        with torch.cuda.stream(self._aside.after_main()):
            self._launch(kernel, programs, numbers, constants)
        self._aside.launched(*arguments)

    def _launch(self, kernel: Any, programs: int, numbers: Sequence[Any], constants: dict[str, Any]) -> None:
        if not self.interpreting:
            _launch(kernel.fn, programs, numbers, constants)
            return
        with _interpreter:
            kernel[(programs,)](*numbers, **constants)


_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
"""Kernels that have been launched, each with its constants in the order of its parameters. The keys are the function,
the device, the constants and the types of arguments."""


def _launch(function: Callable[..., Any], programs: int, numbers: Sequence[Any], constants: dict[str, Any]) -> None:
    """Launches a kernel on the current device.

    To find the compiled kernel, Triton examines each argument of each launch, which takes longer than the launch. This
    function uses only the types of the arguments, and caches the kernel that Triton finds.
    """
    # The types that Triton gives to numbers: 32-bit integers, longer integers, and other types. This line calls no
    # function for each number, because calls would take longer.
    types = tuple([-(2**31) <= number < 2**31 if type(number) is int else type(number) for number in numbers])
    key = function, triton.runtime.driver.active.get_current_device(), types, *constants.items()
    if key in _compiled:
        kernel, values = _compiled[key]
        kernel[(programs, 1, 1)](*numbers, *values)
        return
    launched = for_all_numbers(function)
    kernel = launched[(programs,)](*numbers, **constants, enable_fp_fusion=False)
    if kernel is not None:  # a hook in Triton may replace the launch
        names = [param.name for param in launched.params if param.is_constexpr]
        _compiled[key] = kernel, tuple(constants[name] for name in names)


def numbers_of(arguments: Sequence[Any]) -> list[Any]:
    """The arguments of a kernel, with each tensor replaced by its address."""
    return [
        argument if type(argument) in _NUMBERS or not isinstance(argument, torch.Tensor) else argument.data_ptr()
        for argument in arguments
    ]


@functools.cache
def for_all_numbers(function: Callable[..., Any]) -> Any:
    """A kernel that Triton does not specialize for arguments that equal 1 or are divisible by 16. Addresses and counts
    differ between buckets, and each compilation would delay a step."""
    parameters = inspect.signature(function).parameters.items()
    numbers = [name for name, parameter in parameters if parameter.annotation is not tl.constexpr]
    return triton.jit(function, do_not_specialize=numbers, do_not_specialize_on_alignment=numbers)


@functools.cache
def _index_of(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
