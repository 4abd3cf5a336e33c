"""Memory for the results of steps, which is used again when nobody holds an array in it any more.

Memory that is new to a process costs more time than a copy into it: the system clears each page when it is first
written. A model's results are such memory in each step, unless they take the gradients' place.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np

from hvdcomp.arrays.types import number_of_elements

ALIGNMENT = 16  # float32 elements: a cache line


class Recycled:
    """Memory for arrays of float32.

    Args:
        shapes: of the arrays.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        sizes = [number_of_elements(shape) for shape in shapes]
        ends = np.cumsum([-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]).tolist()
        starts = [0, *ends[:-1]]
        self._parts = [
            (slice(start, start + size), shape) for start, size, shape in zip(starts, sizes, shapes, strict=True)
        ]
        self._offsets = 4 * np.array(starts, np.uint64)
        self._count = ends[-1]
        self._used: list[tuple[np.ndarray, weakref.ref[np.ndarray]]] = []

    def arrays(self) -> tuple[list[np.ndarray], np.ndarray]:
        """An array of each shape, not filled, that begins with a cache line, and their addresses.

        Nobody else uses their storage.
        """
        free = [storage for storage, whole in self._used if whole() is None]
        storage = free[0] if free else aligned(self._count)
        # An array over a memoryview: the others keep this one alive, and not the storage behind it.
        whole = np.frombuffer(storage.data, np.float32)
        self._used = [entry for entry in self._used if entry[1]() is not None] + [(storage, weakref.ref(whole))]
        return [whole[place].reshape(shape) for place, shape in self._parts], storage.ctypes.data + self._offsets


def aligned(count: int) -> np.ndarray:
    """A float32 vector, not filled, that begins with a cache line."""
    room = np.empty(count + ALIGNMENT, np.float32)
    start = -room.ctypes.data % (4 * ALIGNMENT) // 4
    return room[start : start + count]
