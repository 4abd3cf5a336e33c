"""Packs small codes without gaps. For example, eight 3-bit codes need three bytes.

If the width of a code does not divide eight, the code is split into planes whose widths divide eight. For example,
3-bit codes have a plane of their two low bits, and then a plane of their high bit. A plane is packed in groups of 512
codes; the last group may be shorter. Byte j of a group of n bytes contains the codes j, j + n, j + 2 n, ..., and the
lowest bits contain code j. With this order, packing needs only a few shifts of neighboring bytes, both in the kernels
(`kernels/src/packing.h`) and in array functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hvdcomp.arrays.types import Array, ArrayFunctions, number_of_elements, wide_dtype
from hvdcomp.compressors.protocol import Context, Outcome

GROUP = 512


def pack(xp: ArrayFunctions, codes: Array, bits: int) -> Array:
    """Packs codes below 2**bits, uint8 (count,), into bytes, uint8. Each plane is padded to a whole byte."""
    planes, shift = [], 0
    for width in _planes_of(bits):
        part = codes >> shift if shift else codes
        planes.append(_pack_plane(xp, part, width) if width < 8 else part)
        shift += width
    return planes[0] if len(planes) == 1 else xp.concatenate(planes)


def unpack(xp: ArrayFunctions, packed: Array, bits: int, count: int) -> Array:
    """The codes, uint8 (count,), that `pack` has packed. With 8 bits the result is the array `packed` itself, otherwise
    a new array."""
    codes: Array | None = None
    start = shift = 0
    for width in _planes_of(bits):
        end = start + -(-count * width // 8)
        part = _unpack_plane(xp, packed[start:end], width, count) if width < 8 else packed
        codes = part if codes is None else codes | (part << shift)
        start, shift = end, shift + width
    assert codes is not None  # `bits` is at least 1
    return codes


def packed_bytes(bits: Any, count: Any) -> Any:
    """The number of bytes of `count` packed codes of `bits` bits. If the arguments are arrays, the result is
    elementwise."""
    return sum(-(-count * width // 8) * (bits & width != 0) for width in (8, 4, 2, 1))


def _planes_of(bits: int) -> list[int]:
    """The widths of the planes, beginning with the plane of the lowest bits."""
    return [width for width in (8, 4, 2, 1) if bits & width]


def groups(xp: ArrayFunctions, vector: Array, length: int) -> list[Array]:
    """Splits a vector into a matrix (groups, length) and a matrix (1, remainder) of the remaining elements. Empty
    matrices are omitted."""
    whole = vector.shape[0] // length
    parts = []
    if whole:
        parts.append(xp.reshape(vector[: whole * length], (whole, length)))
    if whole * length < vector.shape[0]:
        parts.append(xp.reshape(vector[whole * length :], (1, vector.shape[0] - whole * length)))
    return parts


def _pack_plane(xp: ArrayFunctions, codes: Array, width: int) -> Array:
    together = 8 // width
    packed = []
    for group in groups(xp, pad(xp, codes & ((1 << width) - 1), together), GROUP):
        for bits in (4, 2, 1):
            if bits >= width:  # combines the two halves: codes of the second half are shifted up by `bits` bits
                half = group.shape[1] // 2
                group = group[:, :half] | (group[:, half:] << bits)
        packed.append(xp.flatten(group))
    return packed[0] if len(packed) == 1 else xp.concatenate(packed)


def _unpack_plane(xp: ArrayFunctions, packed: Array, width: int, count: int) -> Array:
    codes = []
    shifts = xp.reshape(xp.arange(8 // width, like=packed) * width, (-1, 1))
    for group in groups(xp, packed, GROUP * width // 8):
        codes.append(xp.flatten(xp.reshape(group, (group.shape[0], 1, group.shape[1])) >> shifts))
    return (codes[0] if len(codes) == 1 else xp.concatenate(codes))[:count] & ((1 << width) - 1)


def pad(xp: ArrayFunctions, vector: Array, multiple: int) -> Array:
    """The vector, padded with zeros until its length is a multiple of `multiple`. Returns the vector itself if no zeros
    are needed."""
    missing = -vector.shape[0] % multiple
    return xp.concatenate([vector, xp.zeros((missing,), like=vector)]) if missing else vector


def cut(xp: ArrayFunctions, vector: Array, shapes: Iterable[tuple[int, ...]]) -> list[Array]:
    """Cuts a vector into consecutive arrays of these shapes."""
    arrays, start = [], 0
    for shape in shapes:
        end = start + number_of_elements(shape)
        arrays.append(xp.reshape(vector[start:end], shape))
        start = end
    return arrays


def average_decoded(
    ranks: Sequence[tuple[Array, ...]], decode: Callable[..., Array], context: Context
) -> tuple[Array, Array]:
    """Decodes the parts of every rank, one rank at a time and in rank order, and averages them.

    Args:
        ranks: the payload parts of each rank, as the answer to an `AllGather`.
        decode: function that decodes the parts of one rank to a new array.
        context: the tensor's name, the step, the seed, the rank and the number of ranks.

    Returns:
        The mean, and the decoded parts of this rank. The mean and the decoded parts are the same array if there is only
        one rank.
    """
    total = sent = decode(*ranks[0])
    for rank, parts in enumerate(ranks[1:], start=1):
        values = decode(*parts)
        if rank == context.rank:
            sent = values
        if rank == 1:
            total = total + values  # not in place, because `total` and `sent` may be the same array
        else:
            total += values
    if len(ranks) > 1:
        total *= 1 / len(ranks)
    return total, sent


def outcome_like(xp: ArrayFunctions, x: Array, mean: Array, sent: Array) -> Outcome:
    """The outcome of a method that has no state. The mean and `sent` get the shape of `x`, and `sent` gets the element
    type of `x`, or float32 if this is wider."""
    sent = xp.astype(sent, wide_dtype(xp.dtype_name(x)))
    return Outcome(xp.reshape(mean, x.shape), xp.reshape(sent, x.shape))
