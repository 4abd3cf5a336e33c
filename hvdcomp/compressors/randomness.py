"""Reproducible random numbers from private generators. The numbers are the same on every rank, unless ranks must
differ.

The numbers depend on the run's seed, the tensor's name, the purpose, the step and, if ranks must differ, the rank. If a
method needs only a few numbers, it uses a NumPy generator. If a method needs one number for each element, the method
uses `random_words`. This function computes each word from a key and the word's index, without state, and gives the same
result in every framework and in C. This module never reads or changes the global random state of Python, NumPy or a
framework. The module does not use Python's `hash`, which differs between processes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from hvdcomp.arrays.shapes import ShapeArray
from hvdcomp.arrays.types import Array, ArrayFunctions
from hvdcomp.compressors.protocol import Context

_ALL_BITS = 2**64 - 1
# The bijection has eight rounds. After only six rounds, some pairs of elements of a small tensor are 1 % more likely
# than other pairs.
_ROUNDS = 8
_LEAST_BITS = 6  # fewest bits of the bijection's domain; with fewer bits, some choices are more likely than others


def shared_generator(context: Context, purpose: str) -> np.random.Generator:
    """A random generator for this tensor, step and purpose. The generator gives the same numbers on every rank."""
    text = f"{context.seed}|{context.name}|{context.step}|{purpose}"
    key = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")
    return np.random.Generator(np.random.Philox(key=key))


def rank_generator(context: Context, purpose: str) -> np.random.Generator:
    """A random generator for this tensor, step, purpose and rank. The generator gives different numbers on each
    rank."""
    return shared_generator(context, f"{purpose}|rank {context.rank}")


def drawn(xp: ArrayFunctions, draw: Callable[[], np.ndarray], shape: tuple[int, ...], dtype: str, like: Array) -> Array:
    """Calls `draw`, and copies the result to the device of `like`. If `like` is a `ShapeArray`, nothing is drawn, and
    the result is a `ShapeArray`."""
    return ShapeArray(shape, dtype) if isinstance(like, ShapeArray) else xp.from_numpy(draw(), like=like)


def distinct_indices(xp: ArrayFunctions, key: int, count: int, size: int, like: Array) -> Array:
    """Draws `count` different indices in [0, size). The indices are in ascending order and on the device of `like`.

    A bijection, chosen by the key, maps 0, 1, 2, ... to the indices. The bijection is a Feistel network of eight
    rounds. The numbers in the network have the number of bits that `size` needs, but at least six bits. If a result is
    not below `size`, the bijection is applied again ("cycle walking", Black and Rogaway 2002,
    doi:10.1007/3-540-45760-7_9). The network splits each number into two halves. A half has at most 32 bits, which is
    enough for sizes up to 2**63. At the end, all indices are shifted by `rotations`, so that each index is equally
    likely for any bijection. `kernels/src/isa_sparse_random.c` does the same in C.

    Args:
        xp: array functions.
        key: the 64-bit key of the random numbers.
        count: number of indices, at most `size`.
        size: number of elements. The indices are below this number.
        like: an array on the device on which the result is needed.

    Returns:
        The indices (count,), int32 if size < 2**31, otherwise int64.
    """
    dtype = "int32" if size < 2**31 else "int64"

    def draw() -> np.ndarray:
        bits = max(_LEAST_BITS, (size - 1).bit_length())
        indices = _permuted(np.arange(count, dtype=np.uint64), bits, key)
        while (beyond := indices >= size).any():
            indices[beyond] = _permuted(indices[beyond], bits, key)
        indices += rotations(np.array([key], np.uint64), np.array([size], np.uint64))
        indices[indices >= size] -= np.uint64(size)
        indices.sort()
        return indices.astype(dtype)

    return drawn(xp, draw, (count,), dtype, like)


def rotations(keys: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """For each key, the number that `distinct_indices` adds to all its indices, modulo the size. The result is uint64,
    and each number is below its size."""
    return step_keys(keys, 0, None) % sizes.astype(np.uint64)


def _permuted(numbers: np.ndarray, bits: int, key: int) -> np.ndarray:
    """The images of numbers, uint64, under a permutation of the numbers below 2**bits. The key chooses the
    permutation."""
    low = bits // 2
    halves = [(numbers >> np.uint64(low)).astype(np.uint32), (numbers & np.uint64(2**low - 1)).astype(np.uint32)]
    widths = [bits - low, low]
    for number in range(_ROUNDS):
        key = (key + 0x9E3779B97F4A7C15) % 2**64
        changed = number % 2
        word = halves[1 - changed] * np.uint32(0x9E3779B9) + np.uint32(key % 2**32)
        word = (word ^ word >> np.uint32(16)) * np.uint32(0x21F0AAAD)
        word = (word ^ word >> np.uint32(15) ^ np.uint32(key >> 32)) * np.uint32(0xD35A2D97)
        halves[changed] = halves[changed] ^ word >> np.uint32(32 - widths[changed])
    return halves[0].astype(np.uint64) << np.uint64(low) | halves[1]


def tensor_keys(names: Sequence[str], seed: int, purpose: str) -> np.ndarray:
    """A 64-bit key for each tensor, uint64 (names,). `step_keys` turns these keys into the keys of a step."""
    digests = [hashlib.blake2b(f"{seed}|{name}|{purpose}".encode(), digest_size=8).digest() for name in names]
    return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)


def step_keys(keys: np.ndarray, step: int, rank: int | None) -> np.ndarray:
    """The keys of a step, computed from `tensor_keys`. With rank None, all ranks get the same keys.

    The generator SplitMix64 is applied to each key twice (Steele et al. 2014, doi:10.1145/2660193.2660195). The key is
    the seed of a first generator, and output number `step` of this generator is the seed of a second generator. Output
    number `rank` of the second generator is the result.
    """
    return _mixed(_mixed(keys, step), -1 if rank is None else rank)


def _mixed(keys: Any, number: int) -> Any:
    """Output `number` of SplitMix64 with each key as the seed. `keys` is a uint64 array, or an int, for which the
    function is much faster."""
    keys = keys + (number + 1) * 0x9E3779B97F4A7C15 % 2**64 & _ALL_BITS
    keys = (keys ^ keys >> 30) * 0xBF58476D1CE4E5B9 & _ALL_BITS
    keys = (keys ^ keys >> 27) * 0x94D049BB133111EB & _ALL_BITS
    return keys ^ keys >> 31


def shared_key(context: Context, purpose: str) -> int:
    """The key of this tensor, step and purpose that all ranks share."""
    return _key(context, purpose, -1)


def rank_key(context: Context, purpose: str) -> int:
    """The key of this tensor, step and purpose for this rank only."""
    return _key(context, purpose, context.rank)


def _key(context: Context, purpose: str, rank: int) -> int:
    """Computes the same key as `step_keys` for one tensor, but much faster."""
    key: int = _mixed(_mixed(_name_key(context.name, context.seed, purpose), context.step), rank)
    return key


@lru_cache(maxsize=4096)
def _name_key(name: str, seed: int, purpose: str) -> int:
    return int(tensor_keys([name], seed, purpose)[0])


def random_words(xp: ArrayFunctions, key: int, count: int, like: Array) -> Array:
    """Uniform 32-bit words, computed on the device of `like`. The bits are the same in every framework and in the
    kernels.

    Word i depends only on i and the key. The function takes term i of a Weyl sequence that starts at the low half of
    the key. The function applies the two rounds of Wellons's integer hash "lowbias32"
    (https://github.com/skeeto/hash-prospector), with an XOR of the key's high half between the rounds. Without the Weyl
    sequence, elements that are 1024 apart would be correlated. With an addition instead of the XOR, tensors whose keys
    have similar low halves would be correlated. `kernels/src/randomness.h` does the same in C.

    Args:
        xp: array functions.
        key: the 64-bit key of the random numbers.
        count: number of random words.
        like: a float32 array on the device on which the words are needed.

    Returns:
        int32 (count,), in new storage. The high bits are more random than the low bits.
    """
    low, high = np.array([key], np.uint64).view(np.int32).tolist()
    words = xp.arange(count, like=xp.bitcast(like, "int32"))
    words *= 0x9E3779B9 - 2**32
    words += low
    words ^= (words >> 16) & 0xFFFF  # `>>` repeats the sign bit, so only the low bits are used
    words *= 0x21F0AAAD
    words ^= (words >> 15) & 0x1FFFF
    words ^= high
    words *= 0xD35A2D97 - 2**32
    return words


def uniform(xp: ArrayFunctions, key: int, count: int, like: Array) -> Array:
    """Uniform numbers in [0, 1), float32 (count,), which are multiples of 2**-24, in new storage (`random_words`)."""
    numbers = xp.astype((random_words(xp, key, count, like) >> 8) & 0xFFFFFF, "float32")
    numbers *= 2.0**-24
    return numbers
