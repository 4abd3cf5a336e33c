"""Computes the error of the mean gradient if ranks send EDEN's levels, in two tables.

The first table compares one rotation for all ranks, which hvdcomp uses, with a separate rotation for each rank. The
second table is for a scattered exchange with different numbers of bits for chunks and for means.

    python -m benchmarks.quality.eden_rotations

A rank's gradient has a normal distribution, and a part of its energy is common to all ranks. Errors are
|error of the mean|^2 / |mean|^2, in percent. The program takes about a minute.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import click
import numpy as np

from hvdcomp import EDEN
from hvdcomp.arrays import numpy_arrays
from hvdcomp.communicators.in_process import InProcessCommunicator, run_ranks
from hvdcomp.compressors.protocol import Context, TensorInfo
from hvdcomp.exchange.engine import Engine

BLOCKS = 60
SCATTERED = ((1, 1), (1, 2), (2, 1), (1, 3), (2, 2), (2, 3), (3, 2), (2, 4), (3, 3), (4, 2))
"""Pairs of the bits of chunks and the bits of means."""


def gradients(ranks: int, shared: float, seed: int) -> np.ndarray:
    """Gradients (ranks, elements). The part `shared` of their energy is the same on all ranks."""
    rng = np.random.default_rng(seed)
    common = rng.standard_normal(BLOCKS * 1024, np.float32)
    own = rng.standard_normal((ranks, BLOCKS * 1024), np.float32)
    return np.sqrt(np.float32(shared)) * common + np.sqrt(np.float32(1 - shared)) * own


def error(method: EDEN, x: np.ndarray, one_for_all: bool) -> float:
    """The squared error of the mean divided by the squared norm of the mean, in percent."""
    total = np.zeros_like(x[0])
    for rank, gradient in enumerate(x):
        context = Context("w", 0, 0, rank, len(x))
        if not one_for_all:
            context = dataclasses.replace(context, name=f"w{rank}")
        parts = method.encode(numpy_arrays, gradient, context)
        total += method.decoded(numpy_arrays, parts, gradient.shape, context)
    return _percent(total / len(x), x)


def scattered_error(method: EDEN, x: np.ndarray) -> float:
    """The same error with a scattered exchange."""

    def work(communicator: InProcessCommunicator) -> np.ndarray:
        engine = Engine(communicator, [TensorInfo("w", x[0].shape)], method, min_numel=0, min_ndim=0)
        return np.asarray(engine.step({"w": x[communicator.rank]})["w"])

    return _percent(run_ranks(len(x), work)[0], x)


def _percent(result: np.ndarray, x: np.ndarray) -> float:
    mean = x.mean(0)
    return 100 * float(np.sum((result - mean) ** 2) / np.sum(mean**2))


@click.command(help=__doc__)
def main() -> None:
    print("| shared energy | ranks | 1 bit, one rotation | 1 bit, own | 2 bits, one rotation | 2 bits, own |")
    print("|--:|--:|--:|--:|--:|--:|")
    for shared, ranks in itertools.product((0.0, 0.1, 0.5, 0.9), (4, 16, 64)):
        x = gradients(ranks, shared, ranks)
        cells = [error(EDEN(bits=bits), x, one) for bits in (1, 2) for one in (True, False)]
        _print_row(shared, ranks, cells)
    print("\nScattered, bits of chunks + bits of means:\n")
    print("| shared energy | ranks | " + " | ".join(f"{bits} + {back}" for bits, back in SCATTERED) + " |")
    print("|--:|--:|" + "--:|" * len(SCATTERED))
    for shared, ranks in itertools.product((0.0, 0.1, 0.5, 0.9), (4, 16, 64)):
        x = gradients(ranks, shared, ranks)
        methods = [EDEN(bits=bits, back=back, exchange="scatter") for bits, back in SCATTERED]
        _print_row(shared, ranks, [scattered_error(method, x) for method in methods])


def _print_row(shared: float, ranks: int, errors: Sequence[float]) -> None:
    print(f"| {shared:.0%} | {ranks} | " + " | ".join(f"{error:.1f} %" for error in errors) + " |", flush=True)


if __name__ == "__main__":
    main()
