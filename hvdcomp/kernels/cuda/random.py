"""Random-k: a tensor's element number j goes to where a keyed bijection puts j.

The bijection is that of `distinct_indices` in `hvdcomp/compressors/randomness.py`, moved on by place 2. Where an
element is can be worked out again wherever that is asked, so nothing is sorted and no places are kept. Values lie in
the order of j.
"""

import numpy as np

from hvdcomp.kernels.cuda.dense import dense_encode
from hvdcomp.kernels.cuda.language import tl, triton
from hvdcomp.kernels.cuda.x import (
    COUNT,
    KEY,
    NEXT_VELOCITY,
    PLACE0,
    PLACE2,
    RESULT,
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

_CHUNK = 1024  # elements that a program draws


@triton.jit
def _mixed(half, key, WIDTH: tl.constexpr):
    """The highest bits of a word, as many as the other half has."""
    word = half * 0x9E3779B9 + key.to(tl.uint32)
    word = (word ^ (word >> 16)) * 0x21F0AAAD
    word = (word ^ (word >> 15) ^ (key >> 32).to(tl.uint32)) * 0xD35A2D97
    return word >> (32 - WIDTH)


@triton.jit
def _permuted(number, bits, key):
    """Numbers below 2**bits, uint32, become others, one to one: a Feistel network of eight rounds."""
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
    """This program's tensor, the elements that it draws, where they are in the tensor, and whether there are such."""
    chunk = pointer(chunks, tl.int64) + 3 * tl.program_id(0)
    segment = tl.load(chunk)
    number = tl.load(chunk + 1).to(tl.int32) + tl.arange(0, CHUNK)
    bits = tl.load(chunk + 2).to(tl.uint32)
    there = number < entry(table, segments, segment, COUNT).to(tl.int32)
    key = entry(table, segments, segment, KEY).to(tl.uint64)
    size = size_of(table, segments, segment).to(tl.uint32)
    i = _permuted(number.to(tl.uint32), bits, key)
    beyond = there & (i >= size)
    while tl.max(beyond.to(tl.int32), 0) != 0:
        i = tl.where(beyond, _permuted(i, bits, key), i)
        beyond = there & (i >= size)
    i += entry(table, segments, segment, PLACE2).to(tl.uint32)
    return segment, number, tl.where(i >= size, i - size, i).to(tl.int32), there


@triton.jit
def random_take(
    table, segments, flag, chunks, wire, sent, scales, bound,
    KEEPS: tl.constexpr, FROM: tl.constexpr, HALF: tl.constexpr, UNBIASED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Values of the drawn elements of x, which is made: in `wire` as they travel, in `sent` as receivers read them."""
    segment, number, i, there = _drawn(table, segments, chunks, CHUNK)
    x = made(table, segments, segment, i, there, KEEPS, FROM)
    if UNBIASED:
        x *= tl.load(pointer(scales, tl.float32) + segment)
    report(flag, tl.where(there, magnitude(x), 0))
    at = entry(table, segments, segment, PLACE0) + number
    if HALF:
        half = tl.where(x > bound, bound, tl.where(x < -bound, -bound, x)).to(tl.float16)
        tl.store(pointer(wire, tl.float16) + at, half, mask=there)
        x = half.to(tl.float32)
    else:
        tl.store(pointer(wire, tl.float32) + at, x, mask=there)
    tl.store(pointer(sent, tl.float32) + at, x, mask=there)


@triton.jit
def zero_results(table, segments, tasks, flag, PIECE: tl.constexpr, BLOCK: tl.constexpr):
    """Before the means are written."""
    segment, start, end = piece(table, segments, tasks, PIECE)
    for block in range(start, end, BLOCK):
        i = block + tl.arange(0, BLOCK)
        tl.store(floats(table, segments, segment, RESULT) + i, tl.zeros((BLOCK,), tl.float32), mask=i < end)


@triton.jit
def random_put(table, segments, flag, chunks, mean, HALF: tl.constexpr, CHUNK: tl.constexpr):
    """Means of the drawn elements; the results hold zeros."""
    segment, number, i, there = _drawn(table, segments, chunks, CHUNK)
    at = entry(table, segments, segment, PLACE0) + number
    if HALF:
        value = tl.load(pointer(mean, tl.float16) + at, mask=there, other=0.0).to(tl.float32)
    else:
        value = tl.load(pointer(mean, tl.float32) + at, mask=there, other=0.0)
    # Added to zero, as by the kernel in C, -0.0 is 0.0.
    tl.store(floats(table, segments, segment, RESULT) + i, value + 0.0, mask=there)
    report(flag, magnitude(value))


@triton.jit
def random_keep(table, segments, flag, chunks, sent, MASKING: tl.constexpr, CHUNK: tl.constexpr):
    """Takes what was sent off x; MASKING: ends the momentum of these elements."""
    segment, number, i, there = _drawn(table, segments, chunks, CHUNK)
    value = tl.load(pointer(sent, tl.float32) + entry(table, segments, segment, PLACE0) + number, mask=there, other=0.0)
    x = floats(table, segments, segment, X) + i
    tl.store(x, tl.load(x, mask=there, other=0.0) - value, mask=there)
    if MASKING:
        tl.store(floats(table, segments, segment, NEXT_VELOCITY) + i, tl.zeros((CHUNK,), tl.float32), mask=there)


def _launch(on, kernel, *arguments, **constants):
    """Programs take chunks of drawn elements: their tensor, the number of the first, and the bits of a number."""

    def make():
        fewest = 6  # bits: with fewer, not all choices are equally likely
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
    read = {"KEEPS": on.keeps, "FROM": on.origin}
    _launch(on, random_take, wire, sent, scales, bound, HALF=bound > 0, UNBIASED=bool(unbiased), **read)


def _decode(on, mean, half):
    on.pieces(zero_results)
    _launch(on, random_put, mean, HALF=bool(half))


KERNELS = {
    "random_take": _encode,
    "random_put": _decode,
    "random_take_off": lambda on, sent, masking: _launch(on, random_keep, sent, MASKING=bool(masking)),
}
"""How each is launched, by its name. The kernels in C keep places, and so have other arguments."""
