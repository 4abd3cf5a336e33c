"""Limits of the arithmetic, which are the same in array functions, in C kernels and in Triton kernels.

Array functions and Triton kernels import the limits from this file. The C headers repeat the limits, and
`tests/kernels/test_kernels_build.py` checks that they are equal.
"""

import struct

SMALLEST_SCALE = 2.0**-96
"""A scale up to this number counts as zero, so that dividing by a scale does not overflow float32."""

SMALLEST_NORM = 2.0**-110
"""A column of PowerSGD whose norm is at most this number counts as zero, so that dividing by the norm does not overflow
float32."""

MOST_HALVINGS = 7
"""The largest scale of an element in a block is 1, and the smallest possible scale is 1, halved this number of times
(`EDEN` with `scaled`)."""

SQUARES_KEPT, SQUARES_ADDED = 0.9, 0.1
"""The factors of the running mean of squares and of a new square, in the next running mean (`EDEN` with `scaled`). In
the first step, all scales are 1, so the result has the same error for all elements. The scales have to forget this step
soon."""

LARGEST_SQUARED = 1e15
"""For running means of squares, larger numbers count as this number, so that their squares are finite."""

LARGEST = {"float16": 65504.0, "bfloat16": (2 - 2.0**-7) * 2.0**127}
"""The largest finite number of each 16-bit type."""

_MANTISSA_BITS = {"float16": 10, "bfloat16": 7}
_MANTISSA_BITS_OF_FLOAT32 = 23

LARGEST_BITS = {dtype: struct.unpack("<I", struct.pack("<f", largest))[0] for dtype, largest in LARGEST.items()}
"""The bits of each number in `LARGEST`, as a float32."""

INFINITE_BITS = {
    dtype: bits + (1 << (_MANTISSA_BITS_OF_FLOAT32 - _MANTISSA_BITS[dtype] - 1)) for dtype, bits in LARGEST_BITS.items()
}
"""The float32 bits of the smallest number that rounds to infinity. It is half a step above `LARGEST`."""
