"""Encodes chosen elements. Values are unchanged or in half precision, and indices take as few bytes as possible.

In a tensor of at most 65536 elements, an index takes two bytes. Larger tensors are cut into blocks of 65536 elements.
An index is then the position within a block, and takes two bytes. For each block, a count of four bytes tells how many
of the indices belong to this block. If only a few elements are sent, the counts would take more bytes than the shorter
indices save. No counts are sent in this case, and each index takes four bytes (eight bytes for tensors of 2**31 or more
elements).

All sizes depend only on the number of elements of the tensor and the number of chosen elements. So every rank knows all
sizes before the exchange.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Annotated

from hvdcomp.arrays.types import Array, ArrayFunctions, dtype_bytes, wide_dtype
from hvdcomp.compressors.protocol import Context, SparseVector
from hvdcomp.kernels.limits import LARGEST
from hvdcomp.specs.described import Rule
from hvdcomp.specs.levels import Level

_MEANINGS = "'same' (as in the gradient) or 'fp16' (half precision)"
How = Annotated[str, Rule(lambda how: how in ("same", "fp16"), _MEANINGS)]
# the largest number that float16 and bfloat16 have in common; float16's largest number becomes 65536 in bfloat16
_LARGEST_COMMON = 65280.0
_BLOCK = 1 << 16  # number of elements that 16 bits can index


def elements_kept(ratio: Level, size: int) -> int:
    """The number of elements to keep out of `size`: max(1, ceil(ratio * size)), but at most `size`."""
    # The last factor undoes rounding errors: 0.07 * 100 is 7.000000000000001 in floating point, but must give 7.
    return min(size, max(1, math.ceil(ratio * size * (1 - 2.0**-50))))


def carried_dtype(values: str, dtype: str) -> str:
    """The element type of values in the payload."""
    return "float16" if values == "fp16" else dtype


def value_bytes(values: str, dtype: str = "float32") -> int:
    """The number of bytes of a value in the payload."""
    return dtype_bytes(carried_dtype(values, dtype))


def most_elements(budget: float, size: int, bytes_of_value: float) -> int:
    """The largest number of elements, from 1 to `size`, whose payload has at most `budget` bytes; 1 if there is no such
    number."""
    blocks = 0 if size <= _BLOCK else 4 * _blocks(size)
    in_blocks = math.floor((budget - blocks) / (bytes_of_value + 2))
    whole = math.floor(budget / (bytes_of_value + _whole_bytes(size)))
    return min(size, max(1, in_blocks, whole))


def round_values(xp: ArrayFunctions, values: Array, how: str, bound: float = LARGEST["float16"]) -> Array:
    """Rounds values to the type in which they are sent. With "fp16", magnitudes are clipped to `bound`, and the excess
    is not sent."""
    if how == "same":
        return values
    if xp.dtype_name(values) == "bfloat16":
        bound = min(bound, _LARGEST_COMMON)
    return xp.astype(values.clip(-bound, bound), "float16")


def encode(xp: ArrayFunctions, vector: Array, indices: Array, values: str) -> tuple[tuple[Array, ...], SparseVector]:
    """Encodes the elements of `vector` at `indices`. Returns the parts to gather, and the elements as receivers decode
    them.

    Args:
        xp: array functions.
        vector: the vector from which elements are sent, (d,).
        indices: the indices of the sent elements, (k,), int32 or int64. Each index occurs at most once. The indices may
            be in any order.
        values: the element type of the sent values. "same" means the type of the vector. The alternative is "fp16".

    Returns:
        The parts of the payload, and the sparse vector that receivers decode. The parts are (values, indices) or
        (values, positions within the blocks, counts of the blocks).
    """
    size = vector.shape[0]
    blocks = counted_blocks(indices.shape[0], size)
    if blocks:
        indices = xp.sort(indices)
    carried = round_values(xp, xp.take(vector, indices), values)
    sent = SparseVector(indices, xp.astype(carried, xp.dtype_name(vector)))
    if not blocks:
        return (carried, xp.astype(indices, "int16") if size <= _BLOCK else indices), sent
    return (carried, xp.astype(indices, "int16"), xp.block_counts(indices, _BLOCK, blocks)), sent


def decode_indices(xp: ArrayFunctions, parts: Sequence[Array], size: int) -> Array:
    """Decodes the indices of the sent elements, (k,), from the payload parts of one rank."""
    if len(parts) == 2 and size > _BLOCK:
        return parts[1]
    wide = "int32" if size < 2**31 else "int64"
    indices = xp.astype(parts[1], wide) & (_BLOCK - 1)
    if len(parts) == 3:
        starts = xp.arange(parts[2].shape[0], like=indices) * _BLOCK
        indices = indices + xp.repeat(starts, parts[2], indices.shape[0])
    return indices


def mean_of_sparse(xp: ArrayFunctions, ranks: Iterable[Sequence[Array]], like: Array, context: Context) -> Array:
    """The mean of the ranks' sparse vectors, added in rank order, as a dense array with the shape of `like`.

    Half-precision values are added in float32. The parts of only one rank are unpacked at a time.
    """
    wide = wide_dtype(xp.dtype_name(like))
    total = xp.zeros(like.shape, like=xp.astype(like[:0], wide))
    for parts in ranks:
        values = xp.astype(parts[0], wide)
        if context.world_size > 1:
            values = values * (1 / context.world_size)
        total = xp.add_at(total, decode_indices(xp, parts, like.shape[0]), values)
    return total


def counted_blocks(count: int, size: int) -> int:
    """The number of blocks that have a count in the payload, if `count` elements of a tensor are sent; 0 if indices do
    not use blocks."""
    blocks = _blocks(size)
    return blocks if size > _BLOCK and 2 * count + 4 * blocks < _whole_bytes(size) * count else 0


def index_bytes(count: int, size: int) -> int:
    """The number of bytes of an index in the payload, if `count` elements of a tensor are sent."""
    return 2 if size <= _BLOCK or counted_blocks(count, size) else _whole_bytes(size)


def _blocks(size: int) -> int:
    return -(-size // _BLOCK)


def _whole_bytes(size: int) -> int:
    return 4 if size < 2**31 else 8
