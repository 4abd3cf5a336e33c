"""Times one method in a separate process, so that the peak memory of the process is the peak memory of the method.

A step is all the work that compression adds to training, without the network: error feedback, the check for non-finite
gradients, encoding, packing, and decoding. Steps alternate with copies of the gradients, so that changes in the
machine's speed do not affect the ratio of their times.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hvdcomp import kernels
from hvdcomp.communicators import LoopbackCommunicator
from hvdcomp.compressors.parsing import parse_compressor, parse_memory
from hvdcomp.exchange import Engine
from hvdcomp.perfmodel.shapes import tensors_of
from hvdcomp.tools.bench.encode.gradients import FRAMEWORKS, Gradients, TorchGradients
from hvdcomp.tools.bench.encode.peers import PEERS, peer

# Frameworks use OpenMP, OpenBLAS and MKL. Each of these libraries reads its environment variable when it is loaded.
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
# The number of copies before each measured copy. After two copies of the gradients of a small model, the caches contain
# the same data for every method.
_WARM_COPIES = 2
_DEVICE_TURNS = 20


class MeasurementError(Exception):
    """A method could not be measured. The message names the method and the reason."""


@dataclass(frozen=True)
class Request:
    """A description of a measurement to make, as plain data that can be sent to another process.

    Attributes:
        method: spec of a compressor, or a name in `PEERS`.
        repeats: minimum number of measured pairs. A pair consists of a copy and a step.
        seconds: minimum duration of all measurements together, in seconds.
        ranks: the number of ranks whose payloads are decoded.
        threads: number of threads of the framework and of the libraries that it calls.
        dtype: element type of the gradients.
        memory: the spec of the memory; None for the default memory of each method.
    """

    method: str
    model: str
    framework: str = "torch"
    device: str = "cpu"
    threads: int = 1
    ranks: int = 1
    repeats: int = 5
    seconds: float = 0.0
    dtype: str = "float32"
    memory: str | None = None

    @property
    def is_peer(self) -> bool:
        """Whether the method is one of PyTorch's hooks."""
        return self.method in PEERS


@dataclass(frozen=True)
class Spread:
    """The median and the quartiles of a list of values."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of one or more values."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        return cls(*statistics.quantiles(values, n=4, method="inclusive"))


@dataclass(frozen=True)
class Measurement:
    """The results of one method on one model.

    Attributes:
        turns: number of pairs of a copy and a step that were measured.
        step_ms, copy_ms: the times of steps, and of copies of all gradients, in milliseconds.
        ratio_to_copy: for each pair, the time of the step divided by the time of the copy.
        cpu_ms: the processor time of all threads of the process in a step. The processor time is more reliable than
            `step_ms` if other programs use the cores.
        encode_ms, decode_ms: median milliseconds of encoding and of decoding, including the memory; None for a method
            of PyTorch.
        peak_mb: the peak memory of the process in MiB, minus the memory of the process with the gradients and two
            copies of them.
        kept_bytes: bytes of state per parameter on the device of the gradients (residuals, velocities and warm starts);
            None for a method of PyTorch.
        bytes_sent: bytes that one rank sends in a step; None for a method of PyTorch.
        operations: the number of operations of the framework in one step; None if they cannot be counted.
        kernel_launches: number of kernel launches on the accelerator in one step; None on a CPU.
        device_ms, device_copy_ms: the milliseconds that an accelerator needs for a step and for a copy if the host has
            launched all work in advance; None on a CPU.
        native_kernels: the instruction set of hvdcomp's compiled kernels; None if there are no compiled kernels.
    """

    request: Request
    turns: int
    step_ms: Spread
    copy_ms: Spread
    ratio_to_copy: Spread
    cpu_ms: Spread
    encode_ms: float | None = None
    decode_ms: float | None = None
    peak_mb: float = 0.0
    kept_bytes: float | None = None
    bytes_sent: int | None = None
    compression_factor: float | None = None
    operations: int | None = None
    kernel_launches: int | None = None
    device_ms: Spread | None = None
    device_copy_ms: Spread | None = None
    native_kernels: str | None = None


def measure(request: Request) -> Measurement:
    """Measures one method in a new process.

    Raises:
        MeasurementError: if the new process fails.
    """
    context = multiprocessing.get_context("spawn")
    with _variables({name: str(request.threads) for name in _THREADS}), ProcessPoolExecutor(1, context) as pool:
        try:
            return pool.submit(measure_here, request).result()
        except BrokenProcessPool:
            raise MeasurementError(
                f"the process that measured {request.method} was killed, perhaps because memory ran out"
            ) from None
        except Exception as error:
            raise MeasurementError(f"{request.method}: {type(error).__name__}: {error}") from error


@contextmanager
def _variables(values: dict[str, str]) -> Iterator[None]:
    """A context manager that sets environment variables for processes that are started in its block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def measure_here(request: Request) -> Measurement:
    """Measures one method in this process.

    Unlike `measure`, this function does not set the environment variables for the number of threads. On a CPU, the peak
    memory is the peak since the start of the process.
    """
    tensors = [dataclasses.replace(tensor, dtype=request.dtype) for tensor in tensors_of(request.model)]
    gradients = FRAMEWORKS[request.framework](tensors, request.threads, request.device)
    engine: Engine | None = None
    if request.is_peer:
        assert isinstance(gradients, TorchGradients)
        step = peer(request.method, gradients, request.device)
    else:
        memory = None if request.memory is None else parse_memory(request.memory)
        engine = Engine(LoopbackCommunicator(request.ranks), tensors, parse_compressor(request.method), memory)
        step = _engine_step(engine, gradients)

    start_memory = _peak_memory(request.device, forget=True)
    for _ in range(3):  # the first step creates the state and compiles kernels
        gradients.restore()
        step()
    peak_memory = _peak_memory(request.device) - start_memory

    steps: list[float] = []
    copies: list[float] = []
    processor: list[float] = []
    encoding: list[float] = []
    decoding: list[float] = []
    start = time.perf_counter()
    while len(steps) < request.repeats or time.perf_counter() - start < request.seconds:
        for _ in range(_WARM_COPIES):
            gradients.copy()
        copies.append(_timed(gradients.copy, gradients))
        gradients.restore()
        before = time.process_time()
        steps.append(_timed(step, gradients))
        processor.append(1000 * (time.process_time() - before))
        last = engine.ledger.last if engine is not None else None
        if last is not None and last.encode_seconds is not None and last.decode_seconds is not None:
            encoding.append(1000 * last.encode_seconds)
            decoding.append(1000 * last.decode_seconds)
    device_steps, device_copies = _on_device(step, gradients, min(len(steps), _DEVICE_TURNS))
    last = engine.ledger.last if engine is not None else None
    return Measurement(
        request=request,
        turns=len(steps),
        step_ms=Spread.of(steps),
        copy_ms=Spread.of(copies),
        ratio_to_copy=Spread.of([step / copy for step, copy in zip(steps, copies, strict=True)]),
        cpu_ms=Spread.of(processor),
        encode_ms=statistics.median(encoding) if encoding else None,
        decode_ms=statistics.median(decoding) if decoding else None,
        peak_mb=peak_memory / 2**20,
        kept_bytes=None if engine is None else _kept_bytes(engine),
        bytes_sent=None if last is None else last.bytes_sent,
        compression_factor=None if last is None else last.compression_factor,
        operations=_counted(gradients.operations, step, gradients),
        kernel_launches=_counted(gradients.kernel_launches, step, gradients),
        device_ms=Spread.of(device_steps) if device_steps else None,
        device_copy_ms=Spread.of(device_copies) if device_copies else None,
        native_kernels=kernels.instruction_set(),
    )


def _kept_bytes(engine: Engine) -> float:
    """The bytes of state that a method keeps per parameter."""
    unbucketed = sum(state.own_bytes for state in engine.states.values())
    return (engine.buckets.kept_bytes + unbucketed) / sum(tensor.size for tensor in engine.tensors.values())


def _engine_step(engine: Engine, gradients: Gradients) -> Callable[[], Any]:
    def step() -> None:
        engine.begin()
        gradients.through(engine.step)

    return step


def _timed(work: Callable[[], Any], gradients: Gradients) -> float:
    """The milliseconds that `work` takes."""
    gradients.synchronize()
    start = time.perf_counter()
    work()
    gradients.synchronize()
    return 1000 * (time.perf_counter() - start)


def _on_device(step: Callable[[], Any], gradients: Gradients, turns: int) -> tuple[list[float], list[float]]:
    """Runs steps and copies alternately. Returns the milliseconds that an accelerator needs for each step and for each
    copy. Both lists are empty on a CPU."""
    steps, copies = [], []
    for _ in range(turns):
        for _ in range(_WARM_COPIES):
            gradients.copy()
        copy = gradients.device_ms(gradients.copy)
        gradients.restore()
        spent = gradients.device_ms(step)
        if spent is None or copy is None:
            break
        copies.append(copy)
        steps.append(spent)
    return steps, copies


def _counted(
    count: Callable[[Callable[[], Any]], int | None], step: Callable[[], Any], gradients: Gradients
) -> int | None:
    gradients.restore()
    return count(step)


def _peak_memory(device: str, forget: bool = False) -> int:
    """The peak memory so far, in bytes. On an accelerator, `forget` resets the peak."""
    if device == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    import torch

    if forget:
        torch.cuda.reset_peak_memory_stats()
    return torch.cuda.max_memory_allocated()
