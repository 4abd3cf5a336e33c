"""Random choices that every rank can repeat, drawn from private generators.

A generator is keyed by the run's seed, the tensor's name, the step and (for choices that must differ between ranks)
the rank. The global random state of Python, NumPy or a framework is never read or changed, and Python's `hash`,
which differs between processes, is not used.
"""

from __future__ import annotations

import hashlib

import numpy as np

from hvdcomp.collectives import Context


def shared_generator(context: Context, purpose: str) -> np.random.Generator:
    """A generator that is the same on every rank for this tensor, step and purpose."""
    text = f"{context.seed}|{context.name}|{context.step}|{purpose}"
    key = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")
    return np.random.Generator(np.random.Philox(key=key))


def distinct_indices(generator: np.random.Generator, count: int, size: int) -> np.ndarray:
    """`count` different indices in [0, size), in ascending order, each set equally likely.

    Returns:
        int32 where the indices fit (size < 2**31), else int64; shape (count,).
    """
    indices = generator.choice(size, count, replace=False, shuffle=False)
    indices.sort()
    return indices.astype(np.int32 if size < 2**31 else np.int64)
