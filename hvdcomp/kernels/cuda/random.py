"""Random-k: a keyed bijection maps j to the index of the j-th drawn element of a tensor.

The bijection is that of `distinct_indices` in `hvdcomp/compressors/randomness.py`, shifted by `shift`. Every kernel
recomputes the places of drawn elements, so nothing is sorted and no places are stored. Values are stored in the order
of j.
"""

import numpy as np

from hvdcomp.kernels.cuda.dense import dense_encode
from hvdcomp.kernels.cuda.language import tl, triton
from hvdcomp.kernels.cuda.x import (
    COUNT,
    INFINITE,
    KEY,
    NEXT_VELOCITY,
    RESULT,
    SHIFT,
    VALUES,
    X,
    entry,
    floats,
    made,
    magnitude,
    piece,
    pointer,
    report,
    size_of,
)

_CHUNK = 1024  # number of elements that a program draws


@triton.jit
def _mixed(half, key, WIDTH: tl.constexpr):
    """The highest WIDTH bits of a hash of one half of a number. WIDTH is the number of bits of the other half."""
    word = half * 0x9E3779B9 + key.to(tl.uint32)
    word = (word ^ (word >> 16)) * 0x21F0AAAD
    word = (word ^ (word >> 15) ^ (key >> 32).to(tl.uint32)) * 0xD35A2D97
    return word >> (32 - WIDTH)


@triton.jit
def _permuted(number, bits, key):
    """The image of a number, uint32, under a keyed permutation of the numbers below 2**bits: a Feistel network of eight
    rounds."""
    low = bits // 2
    left = number >> low
    right = number & ((low * 0 + 1 << low) - 1)
    for _ in tl.static_range(0, 4):
        key += 0x9E3779B97F4A7C15
        left ^= _mixed(right, key, bits - low)
        key += 0x9E3779B97F4A7C15
        right ^= _mixed(left, key, low)
    return (left << low) | right


@triton.jit
def _drawn(table, segments, chunks, CHUNK: tl.constexpr):
    """Returns this program's tensor; the numbers of the program's draws; the places of the drawn elements in the
    tensor; and a mask of the valid draws."""
    chunk = pointer(chunks, tl.int64) + 3 * tl.program_id(0)
    segment = tl.load(chunk)
    number = tl.load(chunk + 1).to(tl.int32) + tl.arange(0, CHUNK)
    bits = tl.load(chunk + 2).to(tl.uint32)
    valid = number < entry(table, segments, segment, COUNT).to(tl.int32)
    key = entry(table, segments, segment, KEY).to(tl.uint64)
    size = size_of(table, segments, segment).to(tl.uint32)
    i = _permuted(number.to(tl.uint32), bits, key)
    beyond = valid & (i >= size)
    while tl.max(beyond.to(tl.int32), 0) != 0:
        i = tl.where(beyond, _permuted(i, bits, key), i)
        beyond = valid & (i >= size)
    i += entry(table, segments, segment, SHIFT).to(tl.uint32)
    return segment, number, tl.where(i >= size, i - size, i).to(tl.int32), valid


@triton.jit
def random_take(
    table, segments, flag, chunks, wire, sent, scales, bound,
    KEEPS: tl.constexpr, FROM: tl.constexpr, HALF: tl.constexpr, UNBIASED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Writes the drawn elements of x to two arrays. `wire` gets them in the format in which they are sent, and `sent`
    gets the values that receivers decode. Earlier kernels have computed x."""
    segment, number, i, valid = _drawn(table, segments, chunks, CHUNK)
    x = made(table, segments, segment, i, valid, KEEPS, FROM)
    if UNBIASED:
        x *= tl.load(pointer(scales, tl.float32) + segment)
    found = magnitude(x)
    if HALF and UNBIASED and not KEEPS:  # clipping would bias the estimate
        found = tl.where(tl.abs(x) > bound, INFINITE, found)
    report(flag, tl.where(valid, found, 0))
    at = entry(table, segments, segment, VALUES) + number
    if HALF:
        half = tl.where(x > bound, bound, tl.where(x < -bound, -bound, x)).to(tl.float16)
        tl.store(pointer(wire, tl.float16) + at, half, mask=valid)
        x = half.to(tl.float32)
    else:
        tl.store(pointer(wire, tl.float32) + at, x, mask=valid)
    tl.store(pointer(sent, tl.float32) + at, x, mask=valid)


@triton.jit
def zero_results(table, segments, tasks, flag, PIECE: tl.constexpr, BLOCK: tl.constexpr):
    """Sets the results to zero before the means are written."""
    segment, start, end = piece(table, segments, tasks, PIECE)
    for block in range(start, end, BLOCK):
        i = block + tl.arange(0, BLOCK)
        tl.store(floats(table, segments, segment, RESULT) + i, tl.zeros((BLOCK,), tl.float32), mask=i < end)


@triton.jit
def random_put(table, segments, flag, chunks, mean, HALF: tl.constexpr, CHUNK: tl.constexpr):
    """Writes the means of the drawn elements to the results, which contain zeros."""
    segment, number, i, valid = _drawn(table, segments, chunks, CHUNK)
    at = entry(table, segments, segment, VALUES) + number
    if HALF:
        value = tl.load(pointer(mean, tl.float16) + at, mask=valid, other=0.0).to(tl.float32)
    else:
        value = tl.load(pointer(mean, tl.float32) + at, mask=valid, other=0.0)
    # The C kernel adds the mean to zero, so -0.0 becomes 0.0.
    tl.store(floats(table, segments, segment, RESULT) + i, value + 0.0, mask=valid)
    report(flag, magnitude(value))


@triton.jit
def random_keep(table, segments, flag, chunks, sent, MASKING: tl.constexpr, CHUNK: tl.constexpr):
    """Subtracts the sent values from x. MASKING: whether to set the velocity of the sent elements to zero."""
    segment, number, i, valid = _drawn(table, segments, chunks, CHUNK)
    value = tl.load(pointer(sent, tl.float32) + entry(table, segments, segment, VALUES) + number, mask=valid, other=0.0)
    x = floats(table, segments, segment, X) + i
    tl.store(x, tl.load(x, mask=valid, other=0.0) - value, mask=valid)
    if MASKING:
        tl.store(floats(table, segments, segment, NEXT_VELOCITY) + i, tl.zeros((CHUNK,), tl.float32), mask=valid)


def _launch(on, kernel, *arguments, **constants):
    """Launches a program for each chunk of draws. A chunk is a tensor, the number of the first draw, and the number of
    bits of an index."""

    def make():
        fewest = 6  # smallest number of bits of an index; with fewer bits, not all choices are equally likely
        pairs = zip(on.segments["size"].tolist(), on.segments["count"].tolist(), strict=True)
        chunks = [
            (tensor, first, max(fewest, (size - 1).bit_length()))
            for tensor, (size, count) in enumerate(pairs)
            for first in range(0, count, _CHUNK)
        ]
        return np.array(chunks, np.int64)

    chunks = on.static("chunks of what is drawn", make)
    on.launch(
        kernel, chunks.shape[0], on.rows, len(on.segments), on.flag, chunks, *arguments, CHUNK=_CHUNK, **constants
    )


def _encode(on, wire, sent, scales, bound, unbiased):
    on.pieces(dense_encode, 0, x=True, COPIES=False)
    constants = {"HALF": bound > 0, "UNBIASED": bool(unbiased)} | on.constants_of_made()
    _launch(on, random_take, wire, sent, scales, bound, **constants)


def _decode(on, mean, half):
    on.pieces(zero_results)
    _launch(on, random_put, mean, HALF=bool(half))


KERNELS = {
    "random_take": _encode,
    "random_put": _decode,
    "random_take_off": lambda on, sent, masking: _launch(on, random_keep, sent, MASKING=bool(masking)),
}
"""For each operation, by name, the function that launches its kernels. The arguments differ from those of the kernels
in C, which store the places of sent elements."""
