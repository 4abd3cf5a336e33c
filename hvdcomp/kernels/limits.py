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
