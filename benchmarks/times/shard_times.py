"""Measures how many milliseconds a rank works on its part of a flat gradient. The part is exchanged between nodes. The
work is measured once with plain arithmetic and once with kernels.

    OMP_NUM_THREADS=1 python -m benchmarks.times.shard_times --elements 4000000

There are several nodes with one rank each. The rank gets its own payloads back, so that no exchange is timed. Both ways
take turns on one thread. The output consists of medians with quartiles.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Generator
from typing import Any

import click
import numpy as np

from hvdcomp.arrays import numpy_arrays
from hvdcomp.compressors.gathering import Gathering
from hvdcomp.compressors.memory import ErrorFeedback, Memory, NoMemory
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.compressors.protocol import Context
from hvdcomp.compressors.reduce_scatter import ShardKernels, reduce_scatter

METHODS = ("int4", "int8", "fp8", "bf16")


def ended(steps: Generator[Any, Any, Any]) -> Any:
    """Runs a step to its end, and returns its result. The only exchange of the step returns the payload that was
    sent."""
    sent = next(steps).parts
    try:
        steps.send(list(zip(*sent, strict=True)))
    except StopIteration as stop:
        return stop.value
    raise AssertionError("the step made more than one exchange")


def ways(spec: str, memory: Memory, rows: np.ndarray) -> tuple[Callable[[], None], Callable[[], None]]:
    """Two functions that run the same step: one with plain arithmetic, and one with kernels."""
    method, context = parse_compressor(spec), Context("w", 0, 0, 0, len(rows))
    assert isinstance(method, Gathering)
    kernels = ShardKernels(method, memory, rows.shape[1], context)
    state = memory.prepare(numpy_arrays, rows[1:], ())
    residual = np.zeros_like(rows[1:]) if state else None

    def plain() -> None:
        nonlocal state
        _, state = ended(reduce_scatter(method, memory, numpy_arrays, rows, state, context))

    return plain, lambda: ended(kernels.reduce_scatter(rows, residual, context))


@click.command(help=__doc__)
@click.option("--elements", type=click.IntRange(1), default=4_000_000, show_default=True)
@click.option("--nodes", type=click.IntRange(2), default=4, show_default=True)
@click.option("--turns", type=click.IntRange(3), default=15, show_default=True)
def main(elements: int, nodes: int, turns: int) -> None:
    rows = np.random.default_rng(0).normal(size=(nodes, -(-elements // nodes))).astype(np.float32)
    for spec in METHODS:
        memory = ErrorFeedback() if parse_compressor(spec).biased else NoMemory()
        ms: tuple[list[float], list[float]] = ([], [])
        steps = ways(spec, memory, rows)
        for turn in range(-1, turns):  # the first turn is a warm-up
            for step, times in zip(steps, ms, strict=True):
                start = time.perf_counter()
                step()
                if turn >= 0:
                    times.append(1000 * (time.perf_counter() - start))
        low, median, high = zip(*(statistics.quantiles(times, n=4) for times in ms), strict=True)
        texts = [f"{median[way]:.0f} ms ({low[way]:.0f} to {high[way]:.0f})" for way in range(2)]
        click.echo(f"{spec:6} {memory}: plain {texts[0]}, kernels {texts[1]}")


if __name__ == "__main__":
    main()
