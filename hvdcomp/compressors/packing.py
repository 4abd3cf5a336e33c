"""Small codes packed without gaps: 3-bit codes take 3 bits, eight of them three bytes.

The codes are cut into a few long segments, and code i of every segment goes into the bits of byte i, so that packing
is a handful of shifts of whole segments. Where eight is no multiple of the width, the packed bytes lie in several
planes, and a code may begin in one plane and end in the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import ModuleType

from hvdcomp.arrays.types import Array
from hvdcomp.compressors.protocol import Context, Outcome


def pack(xp: ModuleType, codes: Array, bits: int) -> Array:
    """Packs codes below 2**bits, uint8 (count,), into as few bytes, uint8, as hold them."""
    count, segments = _layout(bits)
    if segments == 1:
        return codes
    rows = xp.reshape(pad(xp, codes, segments), (segments, -1))
    planes = []
    for plane in range(count):
        first, end = _starting_in(plane, bits)
        merged = xp.column_sums(xp.shift_left(rows[first:end], _places(xp, plane, bits, like=rows)))
        begun = 8 * plane - (first - 1) * bits  # bits of the code before that lie in the plane before
        if begun < bits:
            merged += xp.shift_right(rows[first - 1], begun)
        planes.append(merged)
    return planes[0] if count == 1 else xp.concatenate(planes)


def unpack(xp: ModuleType, packed: Array, bits: int, count: int) -> Array:
    """The codes, uint8 (count,), that `pack` packed; for 8 bits the same array, else in fresh storage."""
    planes, segments = _layout(bits)
    if segments == 1:
        return packed
    rows = xp.reshape(packed, (planes, -1))
    pieces = []
    for plane in range(planes):
        _, end = _starting_in(plane, bits)
        shifted = xp.shift_right(rows[plane : plane + 1], _places(xp, plane, bits, like=rows))
        begun = 8 * (plane + 1) - (end - 1) * bits
        if begun < bits:
            last = shifted[-1] | xp.shift_left(rows[plane + 1], begun)
            pieces += [xp.flatten(shifted[:-1]), last]
        else:
            pieces.append(xp.flatten(shifted))
    codes = pieces[0] if len(pieces) == 1 else xp.concatenate(pieces)
    codes &= (1 << bits) - 1
    return codes[:count]


def pad(xp: ModuleType, vector: Array, multiple: int) -> Array:
    """The vector with zeros appended up to a multiple of a length; itself if there is nothing to append."""
    missing = -vector.shape[0] % multiple
    return xp.concatenate([vector, xp.zeros((missing,), like=vector)]) if missing else vector


def average_decoded(
    xp: ModuleType, x: Array, ranks: Sequence[tuple[Array, ...]], decode: Callable[..., Array], context: Context
) -> Outcome:
    """Decodes every rank's parts, one rank at a time and in rank order, and averages them.

    Args:
        x: what this rank compressed.
        ranks: the parts of each rank, as an `AllGather` answers.
        decode: makes a fresh array of as many elements as `x` of one rank's parts.
    """
    total = sent = decode(*ranks[0])
    for rank, parts in enumerate(ranks[1:], start=1):
        values = decode(*parts)
        if rank == context.rank:
            sent = values
        if rank == 1:
            total = total + values  # the first rank's values may be what this rank sent
        else:
            total += values
    if len(ranks) > 1:
        total *= 1 / len(ranks)
    return outcome_like(xp, x, total, sent)


def outcome_like(xp: ModuleType, x: Array, mean: Array, sent: Array) -> Outcome:
    """The outcome of a method without a state, in the shape of `x`; what was sent also in its element type."""
    return Outcome(xp.reshape(mean, x.shape), xp.reshape(xp.astype(sent, xp.dtype_name(x)), x.shape))


def _layout(bits: int) -> tuple[int, int]:
    """Planes of packed bytes, and segments of codes that share them: the fewest that fill whole bytes."""
    common = math.gcd(bits, 8)
    return bits // common, 8 // common


def _starting_in(plane: int, bits: int) -> tuple[int, int]:
    """The segments, first and end, whose codes begin in a plane."""
    return -(-8 * plane // bits), -(-8 * (plane + 1) // bits)


def _places(xp: ModuleType, plane: int, bits: int, like: Array) -> Array:
    """At which bit (segments, 1) of its bytes the codes that begin in a plane begin."""
    first, end = _starting_in(plane, bits)
    places = xp.arange(end - first, like=like)
    places *= bits
    places += first * bits - 8 * plane
    return xp.reshape(places, (-1, 1))
