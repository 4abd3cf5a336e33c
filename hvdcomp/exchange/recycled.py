"""Memory for the results of steps. It is used again when all arrays in it are deleted.

New memory is slow: the system clears each page when the page is first written, and this takes more time than a copy
into the page. Without this file, every step would need new memory for the results of the whole model, unless results
overwrite gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np

from hvdcomp.arrays.alignment import CACHE_LINE, empty_aligned
from hvdcomp.arrays.types import number_of_elements

ALIGNMENT = CACHE_LINE // 4  # float32 elements


class Recycled:
    """Memory for arrays of one element type.

    Args:
        shapes: the shapes of the arrays.
        dtype: a NumPy type of 4 or 2 bytes.
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
        """An uninitialized array of each shape, and the addresses of these arrays. Each array begins at a cache line.

        No other array uses the same storage.
        """
        free = [storage for storage, whole in self._used if whole() is None]
        storage = free[0] if free else empty_aligned(self._count, self._dtype)
        # `whole` is an array over a memoryview. The returned arrays keep `whole` alive, so `whole` lives as long as any
        # of them. Without the memoryview, they would keep `storage` alive instead.
        whole = np.frombuffer(storage.data, self._dtype)
        self._used = [entry for entry in self._used if entry[1]() is not None] + [(storage, weakref.ref(whole))]
        return [whole[place].reshape(shape) for place, shape in self._parts], storage.ctypes.data + self._offsets
