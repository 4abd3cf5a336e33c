"""Memory for the results of steps, which is used again when nobody holds an array in it any more.

Memory that is new to a process costs more time than a copy into it: the system clears each page when it is first
written. A model's results are such memory in each step, unless they take the gradients' place.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np

from hvdcomp.arrays.alignment import CACHE_LINE, empty_aligned
from hvdcomp.arrays.types import number_of_elements

ALIGNMENT = CACHE_LINE // 4  # float32 elements


class Recycled:
    """Memory for arrays of one type.

    Args:
        shapes: of the arrays.
        dtype: of NumPy, of 4 or 2 bytes.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtype: str = "float32") -> None:
        self._dtype = dtype
        width = np.dtype(dtype).itemsize
        sizes = [number_of_elements(shape) for shape in shapes]
        line = CACHE_LINE // width
        ends = np.cumsum([-(-size // line) * line for size in sizes]).tolist()
        starts = [0, *ends[:-1]]
        self._parts = [
            (slice(start, start + size), shape) for start, size, shape in zip(starts, sizes, shapes, strict=True)
        ]
        self._offsets = width * np.array(starts, np.uint64)
        self._count = ends[-1]
        self._used: list[tuple[np.ndarray, weakref.ref[np.ndarray]]] = []

    def arrays(self) -> tuple[list[np.ndarray], np.ndarray]:
        """An array of each shape, not filled, that begins with a cache line, and their addresses.

        Nobody else uses their storage.
        """
        free = [storage for storage, whole in self._used if whole() is None]
        storage = free[0] if free else empty_aligned(self._count, self._dtype)
        # An array over a memoryview: the others keep this one alive, and not the storage behind it.
        whole = np.frombuffer(storage.data, self._dtype)
        self._used = [entry for entry in self._used if entry[1]() is not None] + [(storage, weakref.ref(whole))]
        return [whole[place].reshape(shape) for place, shape in self._parts], storage.ctypes.data + self._offsets
