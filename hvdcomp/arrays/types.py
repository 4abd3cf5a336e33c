"""The type of arrays, and the sizes of element types. This file does not depend on a framework."""

from __future__ import annotations

from typing import Any

# A NumPy array or a torch.Tensor. `hvdcomp.arrays` says which operations work for both. It is not a Protocol, because
# array functions are attributes of a module (`xp`), and mypy does not know their result types.
Array = Any

FLOATING = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
"""The element types that gradients may have, each with the number of bytes of an element."""

DTYPE_BYTES = {"bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, **FLOATING}
"""Bytes of an element, for each element type that may be sent, by its common name."""


def number_of_elements(shape: tuple[int, ...]) -> int:
    """The product of the dimensions; 1 for a scalar."""
    count = 1
    for dimension in shape:
        count *= dimension
    return count


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """The shape of a tensor viewed as a matrix: the first dimension by the product of the others."""
    rows = shape[0] if shape else 1
    return rows, number_of_elements(shape[1:])


def dtype_bytes(dtype: str) -> int:
    """The number of bytes of an element of a floating-point type."""
    return FLOATING[dtype]


def wide_dtype(dtype: str) -> str:
    """The element type in which to compute with numbers of a floating-point type: the type itself, or float32 if the
    type is narrower."""
    return dtype if FLOATING[dtype] > 2 else "float32"


def allreduce_dtype(dtype: str) -> str:
    """The element type in which to allreduce numbers of a type. The result is the type itself, but float32 for
    bfloat16, which Horovod cannot add."""
    return "float32" if dtype == "bfloat16" else dtype
