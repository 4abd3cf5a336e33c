"""Arrays whose memory begins at a cache line (a multiple of 64 bytes)."""

from __future__ import annotations

import numpy as np

CACHE_LINE = 64
"""The size of a cache line in bytes. The widest vector registers have the same size."""


def empty_aligned(count: int, dtype: str = "float32") -> np.ndarray:
    """An uninitialized vector whose memory begins at a cache line."""
    size = np.dtype(dtype).itemsize
    room = np.empty(count + CACHE_LINE // size, dtype)
    start = -room.ctypes.data % CACHE_LINE // size
    return room[start : start + count]
