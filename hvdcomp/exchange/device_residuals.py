"""Flat storage for what is kept of float32 tensors on a device between steps: as `residuals`, but on the device.

The host does not know whether a step counts, and waits for no answer. So places change their roles after every step,
and of a step that does not count, a kernel (`settle`) leaves what was kept where the next step looks for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from hvdcomp.arrays.types import Array
from hvdcomp.compressors.memory import Memory, NoMemory
from hvdcomp.kernels.tables import EVERYTHING, NOT_NEGATIVE, NOTHING

_ALIGNMENT = 32  # elements: what a device reads at once


class DeviceResiduals:
    """What is kept of some tensors, by their numbers.

    Args:
        sizes: elements of each tensor.
        xp: the array functions.
        like: an array of no elements, float32, on the device.

    Attributes:
        keepers, holds, released: as of `Residuals`.
        sent: what was sent of x, of each half and tensor, float32 on the device: the rule as of `kernels.tables`, and
            the two numbers that it speaks of.
    """

    def __init__(self, sizes: Sequence[int], xp: ModuleType, like: Array) -> None:
        padded = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
        self._sizes = sizes
        self._starts = np.concatenate([[0], np.cumsum(padded)]).astype(np.int64)
        self._xp, self._like = xp, like
        self._x: list[Array] = []
        self._velocity: list[Array] = []
        self._turn = np.zeros(len(sizes), np.int64)  # which half holds what is kept
        self.keepers = np.full(len(sizes), NoMemory(), object)
        self.holds = np.zeros(len(sizes), bool)
        self.released = 0
        self.sent = xp.zeros((2, len(sizes), 4), like=like)

    def arrays(self, number: int) -> tuple[Array, ...]:
        """What is kept of a tensor, as the arrays of its keeper's state: vectors, whose storage a later step reuses."""
        if not self.holds[number]:
            return ()
        x = self._part(self._x, number, self._turn[number])
        rule, above, below, _ = self._sent(number)
        where = self._xp.where
        sent = where((x > 0) | ((x == 0) & (rule == NOT_NEGATIVE)), above, below)
        x -= where(rule == EVERYTHING, x, where(rule == NOTHING, 0.0, sent))
        self._sent(number)[:] = 0
        if not self.keepers[number].is_momentum:
            return (x,)
        return self._part(self._velocity, number, self._turn[number]), x

    def keep(self, number: int, keeper: Memory, arrays: Sequence[Array]) -> None:
        """Keeps arrays of a memory's state for a tensor, in place of what is kept; nothing if there are none."""
        self.keepers[number] = keeper
        self.holds[number] = bool(arrays)
        self._sent(number)[:] = 0
        if arrays:
            *velocity, x = arrays
            self._allocate(keeper)
            self._part(self._x, number, self._turn[number])[:] = self._xp.flatten(x)
            if velocity:
                self._part(self._velocity, number, self._turn[number])[:] = self._xp.flatten(velocity[0])

    def scale(self, number: int, factor: float, momentum: bool) -> None:
        """Multiplies the residual, and the velocity if `momentum`."""
        for array in self.arrays(number)[0 if momentum else -1 :]:
            array *= factor
            self._xp.finite_or_zero(array)

    # A step.

    def enter(self, kernels: Any, numbers: np.ndarray, memory: Memory) -> None:
        """Writes into a bucket's table where what is kept lies, and where x goes.

        Args:
            kernels: of the bucket of the tensors `numbers`.
            memory: of all of them.
        """
        self._allocate(memory)
        segments = kernels.segments
        holds, turn, starts = self.holds[numbers], self._turn[numbers], self._starts[numbers]
        for buffers, old, new in ((self._x, "kept", "x"), (self._velocity, "velocity", "next_velocity")):
            if new == "x" or memory.is_momentum:
                addresses = np.array([buffer.data_ptr() for buffer in buffers], np.uint64)
                offsets = (starts * 4).astype(np.uint64)
                segments[old] = np.where(holds, addresses[turn] + offsets, 0)
                segments[new] = addresses[1 - turn] + offsets
        begin = self.sent.data_ptr()
        for row, half in enumerate((turn, 1 - turn)):
            kernels.sent[row] = begin + 16 * (half * len(self._sizes) + numbers)

    def commit(self, numbers: np.ndarray, memory: Memory) -> None:
        """After a step: what is left of x is what is kept."""
        self._turn[numbers] ^= 1
        self.holds[numbers] = True
        self.keepers[numbers] = memory

    def drop(self, numbers: np.ndarray) -> None:
        """Forgets what is kept."""
        self.holds[numbers] = False

    def _sent(self, number: int) -> Array:
        return self.sent[int(self._turn[number]), number]

    def _part(self, buffers: list[Array], number: int, turn: int) -> Array:
        start = int(self._starts[number])
        return buffers[int(turn)][start : start + self._sizes[number]]

    def _allocate(self, memory: Memory) -> None:
        for buffers in (self._x, self._velocity) if memory.is_momentum else (self._x,):
            while len(buffers) < 2:
                buffers.append(self._xp.zeros((int(self._starts[-1]),), like=self._like))
