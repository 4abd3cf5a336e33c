"""The error of the mean of ranks that send EDEN's levels: with one rotation for all ranks, as hvdcomp has it, and with
a rotation of each rank's own.

    python benchmarks/eden_rotations.py

A rank's gradient is normal, and shares a part of its energy with those of all others. Errors are |error of the
mean|^2 / |mean|^2, in percent. It takes seconds.
"""

from __future__ import annotations

import dataclasses
import itertools

import click
import numpy as np

from hvdcomp import EDEN
from hvdcomp.arrays import numpy_arrays
from hvdcomp.compressors.protocol import Context

BLOCKS = 60


def gradients(ranks: int, shared: float, seed: int) -> np.ndarray:
    """Gradients (ranks, elements) of which this part of the energy is the same on all ranks."""
    rng = np.random.default_rng(seed)
    common = rng.standard_normal(BLOCKS * 1024, np.float32)
    own = rng.standard_normal((ranks, BLOCKS * 1024), np.float32)
    return np.sqrt(np.float32(shared)) * common + np.sqrt(np.float32(1 - shared)) * own


def error(method: EDEN, x: np.ndarray, one_for_all: bool) -> float:
    """The squared error of the mean over that of the mean itself, in percent."""
    total = np.zeros_like(x[0])
    for rank, gradient in enumerate(x):
        context = Context("w", 0, 0, rank, len(x))
        if not one_for_all:
            context = dataclasses.replace(context, name=f"w{rank}")
        parts = method.encode(numpy_arrays, gradient, context)
        total += method.decoded(numpy_arrays, parts, gradient.shape, context)
    mean = x.mean(0)
    return 100 * float(np.sum((total / len(x) - mean) ** 2) / np.sum(mean**2))


@click.command(help=__doc__)
def main() -> None:
    print("| shared energy | ranks | 1 bit, one rotation | 1 bit, own | 2 bits, one rotation | 2 bits, own |")
    print("|--:|--:|--:|--:|--:|--:|")
    for shared, ranks in itertools.product((0.0, 0.1, 0.5, 0.9), (4, 16, 64)):
        x = gradients(ranks, shared, ranks)
        cells = [error(EDEN(bits=bits), x, one) for bits in (1, 2) for one in (True, False)]
        print(f"| {shared:.0%} | {ranks} | " + " | ".join(f"{cell:.1f} %" for cell in cells) + " |", flush=True)


if __name__ == "__main__":
    main()
