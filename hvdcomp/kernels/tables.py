"""The description of a bucket for kernels: a table of its tensors and of the threads' tasks.

The fields and numbers in this file, and their order, are the same as in `src/bucket.h` and `src/sparse.h`.
`tests/kernels/test_kernels_build.py` checks that they are equal.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import numpy as np

FACTORS = np.dtype([("p", "u8"), ("q", "u8"), ("rank", "i8"), ("columns", "i8")], align=True)
"""A record that describes a matrix P Q' by the addresses of its factors, which are stored column by column."""

UNIONS = (
    ("values", "codes", "signs", "p_factor", "blocks"),
    ("indices", "scales", "exponents", "row_votes", "q_factor", "ends", "chosen"),
    ("block_counts", "sent_of_chunk", "columns", "shift", "votes", "taken"),
    ("index_bytes", "found", "length"),
)
"""Fields that share the same place in a record, because each method uses only one of them."""


def _with_unions(dtype: np.dtype) -> np.dtype:
    """Extends the type of a record by all members of its unions. The members of a union share an offset."""
    fields = dict(dtype.fields or {})
    fields |= {name: fields[names[0]] for names in UNIONS for name in names}
    formats, offsets = zip(*(field[:2] for field in fields.values()), strict=True)
    return np.dtype(
        {"names": list(fields), "formats": formats, "offsets": offsets, "itemsize": dtype.itemsize}, align=True
    )


SEGMENT = _with_unions(
    np.dtype(
        [
            ("size", "i8"),
            *((name, "u8") for name in ("gradient", "result", "source", "kept", "x", "velocity", "next_velocity")),
            ("count", "i8"),
            *((names[0], "i8") for names in UNIONS),
            ("key", "u8"),
            *((name, "f4") for name in ("above", "below", "sent_above", "sent_below")),
            ("rule", "i4"),
            ("sent_rule", "i4"),
            ("product", FACTORS),
            ("sent_product", FACTORS),
            ("total", "u8"),
            ("sums", "f8", 4),
            ("narrowed", "u8"),
            ("narrow", "i8"),
            ("rounded", "u8"),
            ("kept_type", "i8"),
            ("squares", "u8"),
            ("next_squares", "u8"),
        ],
        align=True,
    )
)
"""A record that describes one tensor of a bucket to kernels. Addresses are numbers, and 0 means no address."""

TASK = np.dtype(
    [("segment", "i8"), ("start", "i8"), ("length", "i8"), ("sums", "f8", 4), ("counts", "i8", 2)], align=True
)
"""A record that describes a piece of a tensor. One thread processes one piece at a time."""

NOTHING, NOT_NEGATIVE, POSITIVE, PRODUCT, EVERYTHING = range(5)
"""Values of `rule` and `sent_rule`, which describe the part of a kept x that was sent."""

NARROW = {"float32": 0, "float16": 1, "bfloat16": 2}
"""The numbers that stand for the element types of gradients, payloads and residuals in kernels."""

KTH_LARGEST, BISECT, SAMPLED, FITTED = range(4)
"""How a sparsifier searches for a threshold: the k-th largest magnitude; bisection between the mean and the largest
magnitude; steps from the threshold of a sample; or stages of a fitted distribution."""

CHOICE = np.dtype(
    [
        *((name, "i8") for name in ("first_task", "tasks", "most", "need", "sample", "sampled", "reaching", "stride")),
        ("first", "f4"),
        ("later", "f4"),
        ("floor", "u4"),
        ("whole", "i4"),
    ],
    align=True,
)
"""A record that describes how the sent elements of a tensor are chosen by their magnitude."""

CANDIDATES = np.dtype(
    [
        *((name, "i8") for name in ("place", "room", "stored", "reached")),
        ("sum", "f8"),
        ("largest", "u4"),
        ("unused", "i4"),
    ],
    align=True,
)
"""A record that describes the candidates in a task: the elements from which the sent elements are chosen."""

SLACK = 16
"""Number of elements that kernels may write after the last candidate of a task."""


class SparseStruct(ctypes.Structure):
    """The arguments that kernels of sparsifiers need in addition to the bucket."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("choices", "candidates", "values", "places", "sample")),
        *((name, ctypes.c_int32) for name in ("method", "rounds", "type", "unused")),
    ]


FOUR_MEANS, IN_HALF, IN_FLOAT, IN_SIGN = range(4)
"""The encodings of the values that chunked top-k sends. Kernels get the encoding as one of these numbers."""

CODE_BITS = {FOUR_MEANS: 2, IN_SIGN: 1}
"""Number of bits that encode a value. With `FOUR_MEANS`, the bits are the number of a mean. With `IN_SIGN`, the bit is
the sign of the value."""

CHUNK_PIECE = 1 << 16
"""Largest number of elements in a task of chunked top-k, and in a chunk. A task consists of whole chunks."""

_NONE = np.zeros(0, np.float32)
_PIECE = 1 << 16  # number of elements of a task; a multiple of HVD_BLOCK


def product(factors: np.ndarray, size: int) -> np.ndarray:
    """The matrix P Q' as a vector. The bits are the same as in the kernels, because this function and the kernels add
    the products of the columns in the same order.

    Args:
        factors: a record of type `FACTORS`.
        size: number of elements of the matrix.
    """
    p, q = (
        np.ctypeslib.as_array((ctypes.c_float * int(factors["rank"] * length)).from_address(int(factors[name])))
        for name, length in (("p", size // factors["columns"]), ("q", factors["columns"]))
    )
    total = np.zeros(0, np.float32)
    for k, (left, right) in enumerate(zip(np.split(p, factors["rank"]), np.split(q, factors["rank"]), strict=True)):
        column = np.multiply.outer(left, right).reshape(-1)
        total = column if k == 0 else total + column
    return total


class BucketStruct(ctypes.Structure):
    _fields_ = [
        ("segments", ctypes.c_void_p),
        ("tasks", ctypes.c_void_p),
        ("segment_count", ctypes.c_int64),
        ("task_count", ctypes.c_int64),
        ("factor", ctypes.c_float),
        ("decay", ctypes.c_float),
        ("momentum", ctypes.c_float),
        ("nesterov", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("share", ctypes.c_float),
        ("keeps", ctypes.c_int32),
    ]


class Table:
    """The table of a bucket.

    Args:
        sizes: the number of elements of each tensor, at least 1.
        piece: the number of elements of a task.

    Attributes:
        segments: an array with a record `SEGMENT` for each tensor. Kernels read its storage.
        tasks: an array with a record `TASK` for each piece.
        elements: number of elements of all tensors.
        bucket: the C structure, with settings such as `factor`.
        address: address of the C structure, the kernels' argument.
    """

    def __init__(self, sizes: Sequence[int], piece: int = _PIECE) -> None:
        self.segments = np.zeros(len(sizes), SEGMENT)
        self.segments["size"] = sizes
        self.elements = sum(sizes)
        pieces = [(number, start) for number, size in enumerate(sizes) for start in range(0, size, piece)]
        self.tasks = np.zeros(len(pieces), TASK)
        if pieces:
            self.tasks["segment"], self.tasks["start"] = np.array(pieces, np.int64).T
        sizes_of_tasks = self.segments["size"][self.tasks["segment"]]
        self.tasks["length"] = np.minimum(sizes_of_tasks - self.tasks["start"], piece)
        self.bucket = BucketStruct(
            self.segments.ctypes.data, self.tasks.ctypes.data, len(self.segments), len(self.tasks), 1.0, 1.0, 0.0
        )
        self.address = ctypes.addressof(self.bucket)

    def vectors(self, column: str) -> list[np.ndarray]:
        """The memory that a column of the table points to: a float32 vector for each tensor. The vector is empty if the
        address is null."""
        parts = zip(self.segments[column].tolist(), self.segments["size"].tolist(), strict=True)
        return [_floats(address, size) if address else _NONE for address, size in parts]


class Tasks:
    """Parts of a bucket's tensors, such as rows, columns or chunks, divided into tasks for threads.

    Args:
        pieces: for each tensor, the number of parts, and the number of parts in a task.

    Attributes:
        passed: the kernels' arguments: the address of a `TASK` vector, and the number of tasks.
    """

    def __init__(self, pieces: Sequence[tuple[int, int]]) -> None:
        tasks = [
            (number, start, min(step, length - start))
            for number, (length, step) in enumerate(pieces)
            for start in range(0, length, step)
        ]
        self._vector = np.zeros(len(tasks), TASK)
        for field, values in zip(("segment", "start", "length"), np.array(tasks, np.int64).T, strict=True):
            self._vector[field] = values
        self.passed = self._vector.ctypes.data, len(tasks)


@functools.lru_cache(4096)  # most addresses recur in later steps, and making a view takes a microsecond
def _floats(address: int, size: int) -> np.ndarray:
    return np.frombuffer(memoryview((ctypes.c_float * size).from_address(address)), np.float32)
