"""Measures the host's work in a step, without kernels and network: the number of Python calls, and microseconds.

    OMP_NUM_THREADS=1 python -m benchmarks.times.host_times --path device --ranks 2 --ranks 64

Kernels are replaced with functions that do nothing, and collectives return results that were computed before. What
remains is the work of the engine: addresses, tables, requests, flags and the ledger. On the path `device`, gradients on
the CPU are treated as if they were on a CUDA device. The time of PyTorch's or Horovod's collectives, and of kernel
launches, is not included.

The output has a row for each method: the number of calls of Python functions and of C functions in a step
(`sys.setprofile`), and the median and quartiles of the microseconds of a step.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import click
import torch

from hvdcomp.communicators.loopback import LoopbackCommunicator
from hvdcomp.compressors.bucket import Bucket
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.compressors.protocol import TensorInfo
from hvdcomp.exchange.engine import Engine
from hvdcomp.kernels import cuda

METHODS = ("none", "topk:ratio=0.01", "efsignsgd", "qsgd:bits=4", "int4", "eden", "powersgd:rank=4")
SHAPE = 64, 64
WARM_STEPS = 5


class Prepared(LoopbackCommunicator):
    """Ranks whose collectives return at once. They return the result of the first collective with the same kind, length
    and type."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._results: dict[Any, torch.Tensor] = {}

    def _first(self, key: Any, start: Callable[[torch.Tensor], torch.Tensor], array: torch.Tensor) -> torch.Tensor:
        key = *key, tuple(array.shape), array.dtype
        if key not in self._results:
            self._results[key] = start(array.clone())
        return self._results[key]

    def start_allgather(self, array: torch.Tensor, name: str) -> torch.Tensor:
        return self._first(("gather",), lambda own: super(Prepared, self).start_allgather(own, name), array)

    def start_alltoall(self, array: torch.Tensor, name: str) -> torch.Tensor:
        return self._first(("to all",), lambda own: super(Prepared, self).start_alltoall(own, name), array)

    def start_allreduce(self, array: torch.Tensor, op: str, name: str) -> torch.Tensor:
        return self._first((op,), lambda own: super(Prepared, self).start_allreduce(own, op, name), array)


def warm_step(spec: str, tensors: int, ranks: int) -> Callable[[], None]:
    """A function that runs a step of an engine. The engine has already run `WARM_STEPS` steps with kernels."""
    infos = [TensorInfo(f"tensor {number}", SHAPE) for number in range(tensors)]
    gradients = {info.name: torch.randn(SHAPE) for info in infos}
    engine = Engine(Prepared(ranks), infos, parse_compressor(spec), min_numel=0)

    def step() -> None:
        engine.begin()
        engine.step(gradients, in_place=True)

    for _ in range(WARM_STEPS):
        step()
    return step


def calls_of(step: Callable[[], None]) -> Counter[str]:
    """The number of calls in a step: "call" of Python functions, and "c_call" of functions in C. Calls of the garbage
    collector are left out, because it may run at any time."""
    events: Counter[str] = Counter()

    def note(frame: Any, event: str, argument: Any) -> None:
        events[event] += 1

    gc.disable()
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
        gc.enable()
    events["c_call"] -= 1  # setprofile itself
    return events


@contextmanager
def without_kernels(path: str, spec: str, tensors: int, ranks: int) -> Iterator[Callable[[], None]]:
    """A `warm_step` whose kernels do nothing. On the path "device", gradients on the CPU are treated as if they were on
    a CUDA device."""
    if path == "host":
        step = warm_step(spec, tensors, ranks)
        with mock.patch.object(Bucket, "call", _nothing_found):
            yield step
        return
    from hvdcomp.kernels.cuda.device import DeviceKernels

    with cuda.serving_host(), mock.patch.object(DeviceKernels, "launch", _nothing_launched):
        yield warm_step(spec, tensors, ranks)


def _nothing_found(bucket: Bucket, kernel: str, *arguments: Any, aside: bool = False) -> bool:
    return False


def _nothing_launched(kernels: Any, kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    pass


def _measured(step: Callable[[], None], steps: int) -> str:
    calls = calls_of(step)
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        times.append(1e6 * (time.perf_counter() - start))
    low, median, high = statistics.quantiles(times, n=4)
    return f"{calls['call']:5} {calls['c_call']:5} {median:8.0f} ({low:.0f} to {high:.0f})"


@click.command(help=__doc__)
@click.option("--path", "paths", type=click.Choice(["host", "device"]), multiple=True, default=("host", "device"))
@click.option("--method", "methods", multiple=True, default=METHODS, show_default=True)
@click.option("--tensors", "numbers", type=click.IntRange(1), multiple=True, default=(16, 148), show_default=True)
@click.option("--ranks", type=click.IntRange(2), multiple=True, default=(2,), show_default=True)
@click.option("--steps", type=click.IntRange(4), default=300, show_default=True)
def main(
    paths: tuple[str, ...], methods: tuple[str, ...], numbers: tuple[int, ...], ranks: tuple[int, ...], steps: int
) -> None:
    click.echo(f"{'path':7} {'method':18} {'tensors':>7} {'ranks':>5} {'calls':>5} {'in C':>5} {'µs':>8}")
    for path in paths:
        for spec in methods:
            for tensors in numbers:
                for size in ranks:
                    with without_kernels(path, spec, tensors, size) as step:
                        measured = _measured(step, steps)
                    click.echo(f"{path:7} {spec:18} {tensors:7} {size:5} {measured}")


if __name__ == "__main__":
    main()
