"""Reproducible random numbers, the same on every rank, from private generators.

Numbers follow from the run's seed, the tensor's name, the purpose, the step and, where ranks must differ, the rank. For
a few numbers, a NumPy generator is used. For one number per element, `random_words` computes each word from a key and
the index of the word, without state, with the same result in every framework and in C. The global random state of
Python, NumPy or a framework is never read or changed. Python's `hash` is not used, as it differs between processes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np

from hvdcomp.arrays.shapes import ShapeArray
from hvdcomp.arrays.types import Array
from hvdcomp.compressors.protocol import Context

_ALL_BITS = 2**64 - 1
_ROUNDS = 8  # of the bijection; after six, some pairs of elements of a small tensor are still 1 % likelier than others
_LEAST_BITS = 6  # least bits of its domain; with fewer, some choices are likelier than others


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
    """The array from `draw`, on the device of `like`; if `like` is a `ShapeArray`, its shape and type, not drawn."""
    return ShapeArray(shape, dtype) if isinstance(like, ShapeArray) else xp.from_numpy(draw(), like=like)


def distinct_indices(xp: ModuleType, key: int, count: int, size: int, like: Array) -> Array:
    """`count` different indices in [0, size), in ascending order, on the device of `like`.

    The indices are the images of 0, 1, 2 ... under a bijection chosen by the key: a Feistel network of eight rounds on
    numbers of as many bits as `size` needs, at least six, applied again to results that are not below `size` ("cycle
    walking", Black and Rogaway 2002, doi:10.1007/3-540-45760-7_9). Its halves have at most 32 bits, enough for sizes up
    to 2**63. All indices are then shifted by `rotations`, which makes each index equally likely for any bijection.
    `kernels/src/isa_sparse_random.c` has the same in C.

    Args:
        xp: array functions.
        key: 64-bit key.
        count: number of indices, at most `size`.
        size: bound of the indices.
        like: array whose device the result gets.

    Returns:
        int32 where the indices fit (size < 2**31), else int64; shape (count,).
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
    """The shift, modulo the size, of the indices that `distinct_indices` draws by each key; uint64, below `sizes`."""
    return step_keys(keys, 0, None) % sizes.astype(np.uint64)


def _permuted(numbers: np.ndarray, bits: int, key: int) -> np.ndarray:
    """A permutation of the numbers below 2**bits, uint64, chosen by the key."""
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
    """64-bit keys, uint64 (names,), the input of `step_keys`."""
    digests = [hashlib.blake2b(f"{seed}|{name}|{purpose}".encode(), digest_size=8).digest() for name in names]
    return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)


def step_keys(keys: np.ndarray, step: int, rank: int | None) -> np.ndarray:
    """The keys of a step, made from `tensor_keys`; rank None gives keys that all ranks share.

    Each key goes through the generator SplitMix64 twice (Steele et al. 2014, doi:10.1145/2660193.2660195): output
    `step` of the generator seeded by the key seeds a second one, and its output `rank` is the step's key.
    """
    return _mixed(_mixed(keys, step), -1 if rank is None else rank)


def _mixed(keys: Any, number: int) -> Any:
    """Output `number` of SplitMix64 seeded by each key: a uint64 array, or an int, which takes far less time."""
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
    """As `step_keys` has it."""
    key: int = _mixed(_mixed(_name_key(context.name, context.seed, purpose), context.step), rank)
    return key


@lru_cache(maxsize=4096)
def _name_key(name: str, seed: int, purpose: str) -> int:
    return int(tensor_keys([name], seed, purpose)[0])


def random_words(xp: ModuleType, key: int, count: int, like: Array) -> Array:
    """Uniform 32-bit words, the same bits in every framework and in the kernels, made on the device of `like`.

    Word i depends on i and the key only: term i of a Weyl sequence that starts at the key's low half goes through the
    two rounds of Wellons's integer hash "lowbias32" (https://github.com/skeeto/hash-prospector), with the key's high
    half XORed in between. Without the Weyl sequence, elements 1024 apart would be correlated; if the high half were
    added instead, tensors with nearby low halves would be. `kernels/src/randomness.h` has the same in C.

    Args:
        xp: array functions.
        key: 64-bit key.
        count: number of words.
        like: float32 array whose device the words get.

    Returns:
        int32 (count,), in fresh storage. The high bits are the better ones.
    """
    low, high = np.array([key], np.uint64).view(np.int32).tolist()
    words = xp.arange(count, like=xp.bitcast(like, "int32"))
    words *= 0x9E3779B9 - 2**32
    words += low
    words ^= (words >> 16) & 0xFFFF  # the sign bit is repeated: only the lower bits were shifted in
    words *= 0x21F0AAAD
    words ^= (words >> 15) & 0x1FFFF
    words ^= high
    words *= 0xD35A2D97 - 2**32
    return words


def uniform(xp: ModuleType, key: int, count: int, like: Array) -> Array:
    """Uniform numbers in [0, 1), float32 (count,), multiples of 2**-24, in fresh storage; see `random_words`."""
    numbers = xp.astype((random_words(xp, key, count, like) >> 8) & 0xFFFFFF, "float32")
    numbers *= 2.0**-24
    return numbers
