"""Arrays that have a shape and an element type, but no elements, and operations on such arrays. To count the bytes of a
payload, hvdcomp runs a compressor on such arrays.

The module has the functions of `numpy_arrays` that compressors call. These functions, and the methods of a
`ShapeArray`, return only the shape and the type of the result, without computation or memory.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdcomp.arrays.types import DTYPE_BYTES, Array, number_of_elements

# If the operands have different types, the result has the type that comes later in this table, which is the wider type.
_WIDTH = {dtype: place for place, dtype in enumerate(DTYPE_BYTES)}


class ShapeArray:
    """An array with a shape and an element type, but no elements.

    Attributes:
        shape: the size of each dimension.
        dtype: name of the element type, such as "float32".
    """

    __slots__ = ("dtype", "shape")
    __array_ufunc__ = None  # makes NumPy scalars use the operators below

    def __init__(self, shape: Sequence[int], dtype: str) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype

    @property
    def nbytes(self) -> int:
        """The number of bytes of all elements."""
        return number_of_elements(self.shape) * DTYPE_BYTES[self.dtype]

    def __getitem__(self, key: Any) -> ShapeArray:
        keys = key if isinstance(key, tuple) else (key,)
        shape: list[int] = []
        for index, length in zip(keys, self.shape, strict=False):
            if isinstance(index, slice):
                shape.append(len(range(*index.indices(length))))
            elif not -length <= operator.index(index) < length:
                raise IndexError(f"index {index} is out of range for a dimension of {length}")
        return ShapeArray((*shape, *self.shape[len(keys) :]), self.dtype)

    def __bool__(self) -> bool:
        raise TypeError(
            "a compressor must not use the values of the gradient to decide what it sends, because hvdcomp also runs "
            "the compressor on arrays without values, to count the bytes. Use xp.where instead of an if"
        )

    def itself(self, *_: Any, **__: Any) -> ShapeArray:
        """This array. Every operation that changes neither shape nor type returns this array itself."""
        return self

    __neg__ = __invert__ = __abs__ = clip = cumsum = itself

    @property
    def T(self) -> ShapeArray:  # noqa: N802
        """The transposed matrix."""
        return ShapeArray(self.shape[::-1], self.dtype)

    def sum(self, axis: int | None = None, keepdims: bool = False) -> ShapeArray:
        """A sum. The shape of the sum is () for all elements, or (r,) or (r, 1) for the rows of a matrix."""
        shape = () if axis is None else (self.shape[0], 1) if keepdims else self.shape[:1]
        return ShapeArray(shape, self.dtype)

    any = max = mean = sum

    def __matmul__(self, other: ShapeArray) -> ShapeArray:
        return ShapeArray((self.shape[0], other.shape[1]), self.dtype)

    def _combined(self, other: Any) -> ShapeArray:
        if not isinstance(other, ShapeArray):
            return self
        dtype = max(self.dtype, other.dtype, key=_WIDTH.__getitem__)
        shape = self.shape if self.shape == other.shape else np.broadcast_shapes(self.shape, other.shape)
        return ShapeArray(shape, dtype)

    def _compared(self, other: Any) -> Any:
        return ShapeArray(self._combined(other).shape, "bool")

    __add__ = __sub__ = __mul__ = __truediv__ = __floordiv__ = __mod__ = __pow__ = _combined
    __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rfloordiv__ = __rmod__ = __rpow__ = _combined
    __and__ = __or__ = __xor__ = __lshift__ = __rshift__ = __rand__ = __ror__ = __rxor__ = _combined
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _compared
    __hash__ = None  # type: ignore[assignment]


def _same(x: Array, *_: Any, **__: Any) -> Array:
    return x


aligned = floor = finite_or_zero = hadamard = sort = eigenvectors = add_at = reciprocal_or_zero = _same


def waits(x: Array) -> bool:
    return True  # there are no elements to read


def dtype_name(x: Array) -> str:
    name: str = x.dtype
    return name


def astype(x: Array, dtype: str) -> Array:
    return x if x.dtype == dtype else ShapeArray(x.shape, dtype)


bitcast = astype


def flatten(x: Array) -> ShapeArray:
    return ShapeArray((number_of_elements(x.shape),), x.dtype)


def reshape(x: Array, shape: Sequence[int]) -> ShapeArray:
    known = -number_of_elements(tuple(shape))  # if a dimension is -1
    return ShapeArray([number_of_elements(x.shape) // known if length == -1 else length for length in shape], x.dtype)


def zeros(shape: Sequence[int], like: Array) -> ShapeArray:
    return ShapeArray(shape, like.dtype)


def arange(count: int, like: Array) -> ShapeArray:
    return ShapeArray((count,), like.dtype)


def from_numpy(x: np.ndarray, like: Array) -> ShapeArray:
    return ShapeArray(x.shape, x.dtype.name)


def concatenate(arrays: Sequence[Array], axis: int = 0) -> ShapeArray:
    shape = list(arrays[0].shape)
    shape[axis] = sum(x.shape[axis] for x in arrays)
    return ShapeArray(shape, arrays[0].dtype)


def to_bfloat16_bits(x: Array) -> ShapeArray:
    return ShapeArray(x.shape, "int16")


def from_bfloat16_bits(bits: Array) -> ShapeArray:
    return ShapeArray(bits.shape, "float32")


def top(x: Array, k: int) -> ShapeArray:
    return ShapeArray((*x.shape[:-1], k), "int64")


def first_places(x: Array, low: Any, high: Any, limit: int) -> ShapeArray:
    return ShapeArray((limit,), "int64")


def count_nonzero(x: Array) -> ShapeArray:
    return ShapeArray((), "int64")


def block_counts(indices: Array, block: int, blocks: int) -> ShapeArray:
    return ShapeArray((blocks,), "int32")


def repeat(x: Array, counts: Array, total: int) -> ShapeArray:
    return ShapeArray((total,), x.dtype)


def take(x: Array, indices: Array) -> ShapeArray:
    return ShapeArray((*indices.shape, *x.shape[1:]), x.dtype)


def interval_index(bounds: Array, points: Array) -> ShapeArray:
    return ShapeArray(points.shape, "int64")


def where(condition: Array, x: Any, y: Any) -> Array:
    return condition * x * y


def row_norms(x: Array) -> Array:
    return x.sum(1, keepdims=True)


row_largest = row_norms


def row_dots(x: Array, y: Array) -> ShapeArray:
    return ShapeArray((x.shape[0], 1), "float64")
