"""Flat storage for what is kept of float32 tensors on the host between steps.

Each tensor has two places, in one of two flat buffers each. A step reads what is kept in one place and writes x to the
other; if the step counts, the places change their roles, and what is left of x after sending is the residual. If it
does not, nothing has changed.

A residual is kept as x, with a rule that says what of it was sent: the next step takes that off when it reads x anyway.
Whoever else asks for a residual makes it real first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvdcomp.compressors.memory import Memory, NoMemory
from hvdcomp.exchange.recycled import ALIGNMENT, aligned
from hvdcomp.kernels.tables import EVERYTHING, FACTORS, NOT_NEGATIVE, NOTHING, PRODUCT, product


class Residuals:
    """What is kept of some tensors, by their numbers.

    Args:
        sizes: elements of each tensor.

    Attributes:
        keepers: (tensors,), the memory whose arrays are kept of each tensor.
        holds: (tensors,), whether anything is kept.
        released: how often what is kept of a tensor was taken to lie elsewhere.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        padded = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
        self._sizes = sizes
        self._starts = np.concatenate([[0], np.cumsum(padded)]).astype(np.int64)
        self._x: list[np.ndarray] = []
        self._velocity: list[np.ndarray] = []
        self._x_at: np.ndarray
        self._velocity_at: np.ndarray
        self._turn = np.zeros(len(sizes), np.int64)  # which buffer holds what is kept
        self.keepers = np.full(len(sizes), NoMemory(), object)
        self.holds = np.zeros(len(sizes), bool)
        self.released = 0
        self._rule = np.zeros(len(sizes), np.int32)
        self._above = np.zeros(len(sizes), np.float32)
        self._below = np.zeros(len(sizes), np.float32)
        self._product = np.zeros(len(sizes), FACTORS)
        self._factors = np.full(len(sizes), None, object)  # whose storage `_product` points into

    def arrays(self, number: int) -> tuple[np.ndarray, ...]:
        """What is kept of a tensor, as the arrays of its keeper's state: vectors, whose storage a later step reuses."""
        if not self.holds[number]:
            return ()
        x = self._part(self._x, number, self._turn[number])
        if self._rule[number] == PRODUCT:
            x -= product(self._product[number], x.size)
        elif self._rule[number] == EVERYTHING:
            x[:] = 0
        elif self._rule[number] != NOTHING:
            upper = x >= 0 if self._rule[number] == NOT_NEGATIVE else x > 0
            x -= np.where(upper, self._above[number], self._below[number])
        self._rule[number] = NOTHING
        if not self.keepers[number].is_momentum:
            return (x,)
        return self._part(self._velocity, number, self._turn[number]), x

    def keep(self, number: int, keeper: Memory, arrays: Sequence[np.ndarray]) -> None:
        """Keeps arrays of a memory's state for a tensor, in place of what is kept; nothing if there are none."""
        self.keepers[number] = keeper
        self.holds[number] = bool(arrays)
        self._rule[number] = NOTHING
        if arrays:
            *velocity, x = arrays
            self._allocate(keeper)
            self._part(self._x, number, self._turn[number])[:] = x.reshape(-1)
            if velocity:
                self._part(self._velocity, number, self._turn[number])[:] = velocity[0].reshape(-1)

    def scale(self, number: int, factor: float, momentum: bool) -> None:
        """Multiplies the residual, and the velocity if `momentum`."""
        for array in self.arrays(number)[0 if momentum else -1 :]:
            with np.errstate(over="ignore"):
                array *= np.float32(factor)
            array[~np.isfinite(array)] = 0

    # A step.

    def enter(self, segments: np.ndarray, numbers: np.ndarray, memory: Memory) -> None:
        """Writes into a bucket's table where what is kept lies, and where x goes.

        Args:
            segments: of the tensors `numbers`.
            memory: of all of them.
        """
        self._allocate(memory)
        holds, turn = self.holds[numbers], self._turn[numbers]
        segments["kept"] = np.where(holds, self._x_at[turn, numbers], 0)
        segments["x"] = self._x_at[1 - turn, numbers]
        if memory.is_momentum:
            segments["velocity"] = np.where(holds, self._velocity_at[turn, numbers], 0)
            segments["next_velocity"] = self._velocity_at[1 - turn, numbers]
        segments["rule"] = self._rule[numbers]
        segments["above"] = self._above[numbers]
        segments["below"] = self._below[numbers]
        segments["product"] = self._product[numbers]

    def commit(self, segments: np.ndarray, numbers: np.ndarray, memory: Memory, factors: object = None) -> None:
        """After a step that counts: what is left of x is what is kept.

        Args:
            factors: the object (no sequence) whose storage `sent_product` points into.
        """
        self._turn[numbers] ^= 1
        self.holds[numbers] = True
        self._rule[numbers] = segments["sent_rule"]
        self._above[numbers] = segments["sent_above"]
        self._below[numbers] = segments["sent_below"]
        self._product[numbers] = segments["sent_product"]
        self._factors[numbers] = factors
        self.keepers[numbers] = memory

    def drop(self, numbers: np.ndarray) -> None:
        """Forgets what is kept."""
        self.holds[numbers] = False

    def x(self, number: int) -> np.ndarray:
        """x of the step under way, a vector."""
        return self._part(self._x, number, 1 - self._turn[number])

    def _part(self, buffers: list[np.ndarray], number: int, turn: int) -> np.ndarray:
        start = self._starts[number]
        return buffers[turn][start : start + self._sizes[number]]

    def _allocate(self, memory: Memory) -> None:
        if not self._x:
            self._x, self._x_at = self._buffers()
        if memory.is_momentum and not self._velocity:
            self._velocity, self._velocity_at = self._buffers()

    def _buffers(self) -> tuple[list[np.ndarray], np.ndarray]:
        """Two buffers, and the addresses of all tensors' places in them, (2, tensors)."""
        buffers = [aligned(int(self._starts[-1])) for _ in range(2)]
        return buffers, np.stack([buffer.ctypes.data + 4 * self._starts[:-1] for buffer in buffers]).astype(np.uint64)
