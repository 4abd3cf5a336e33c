"""Random choices that every rank can repeat, drawn from private generators.

A generator is keyed by the run's seed, the tensor's name, the step and (for choices that must differ between ranks)
the rank. The global random state of Python, NumPy or a framework is never read or changed, and Python's `hash`,
which differs between processes, is not used.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from types import ModuleType

import numpy as np

from hvdcomp.arrays.shapes import ShapeArray
from hvdcomp.arrays.types import Array
from hvdcomp.compressors.protocol import Context


def shared_generator(context: Context, purpose: str) -> np.random.Generator:
    """A generator that is the same on every rank for this tensor, step and purpose."""
    text = f"{context.seed}|{context.name}|{context.step}|{purpose}"
    key = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")
    return np.random.Generator(np.random.Philox(key=key))


def rank_generator(context: Context, purpose: str) -> np.random.Generator:
    """A generator of this rank's own for this tensor, step and purpose."""
    return shared_generator(context, f"{purpose}|rank {context.rank}")


def drawn(
    xp: ModuleType, draw: Callable[[], np.ndarray], shape: tuple[int, ...], dtype: str, like: Array
) -> Array:
    """What `draw` makes, of this shape and type, on the device of `like`; where arrays have no elements, not drawn."""
    return ShapeArray(shape, dtype) if isinstance(like, ShapeArray) else xp.from_numpy(draw(), like=like)


def distinct_indices(xp: ModuleType, generator: np.random.Generator, count: int, size: int, like: Array) -> Array:
    """`count` different indices in [0, size), in ascending order, each set equally likely, on the device of `like`.

    Returns:
        int32 where the indices fit (size < 2**31), else int64; shape (count,).
    """
    dtype = "int32" if size < 2**31 else "int64"

    def draw() -> np.ndarray:
        indices = generator.choice(size, count, replace=False, shuffle=False)
        indices.sort()
        return indices.astype(dtype)

    return drawn(xp, draw, (count,), dtype, like)


def random_words(xp: ModuleType, generator: np.random.Generator, count: int, like: Array) -> Array:
    """Uniform 32-bit words, the same bits in every framework, made on the device of `like`.

    Simple tabulation hashing (Patrascu and Thorup 2012, arXiv:1011.5200): element i is the exclusive or of two random
    words, one chosen by the high and one by the low digit of i. Each element is exactly uniform and any three are
    independent, so that sums over elements have the variance of independent draws; and the host draws no more than
    about 2 sqrt(count) words. The product, which maps words one to one, hides that four elements can depend on each
    other: without it the top bits of a block of elements are a matrix of rank one.

    Returns:
        int32 (count,), in fresh storage. The high bits are the better ones.
    """
    columns = 1 << (count.bit_length() + 1) // 2
    rows = -(-count // columns)
    drawn = generator.integers(-(2**31), 2**31, rows + columns, dtype=np.int32)
    high, low = xp.from_numpy(drawn[:rows], like=like), xp.from_numpy(drawn[rows:], like=like)
    words = xp.flatten(xp.reshape(high, (rows, 1)) ^ low)[:count]
    words *= 0x2C1B3C6D
    return words


def uniform(xp: ModuleType, generator: np.random.Generator, count: int, like: Array) -> Array:
    """Uniform numbers in [0, 1), float32 (count,), multiples of 2**-24, in fresh storage; see `random_words`."""
    numbers = xp.astype(xp.shift_right(random_words(xp, generator, count, like), 8), "float32")
    numbers *= 2.0**-24
    numbers += 0.5
    return numbers
