"""What the tests of the core share: both array backends, engines on ranks in one process, and spies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest

from hvdcomp import Compressor, ErrorFeedback
from hvdcomp.collectives import Array, SparseVector, TensorInfo
from hvdcomp.communicators.in_process import InProcessCommunicator, run_ranks
from hvdcomp.engine import Engine

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]

BACKENDS = ["numpy", pytest.param("torch", marks=pytest.mark.skipif(torch is None, reason="needs PyTorch"))]
DTYPES = {"numpy": ["float16", "float32", "float64"], "torch": ["float16", "bfloat16", "float32", "float64"]}
BACKENDS_AND_DTYPES = [
    pytest.param(backend, dtype, marks=pytest.mark.skipif(backend == "torch" and torch is None, reason="needs PyTorch"))
    for backend, dtypes in DTYPES.items()
    for dtype in dtypes
]
SPECS = ["none", "fp16", "bf16", "topk:ratio=0.3", "randomk:ratio=0.3", "powersgd:rank=2"]


def make(backend: str, values: Any, dtype: str = "float32") -> Array:
    """A fresh array of a backend, with the values rounded to the element type."""
    if backend == "numpy":
        return np.array(values, dtype)
    return torch.tensor(np.asarray(values)).to(getattr(torch, dtype))


def as_numpy(x: Array) -> np.ndarray:
    """The same values in NumPy (bfloat16 as float32), in storage of its own."""
    if isinstance(x, np.ndarray | np.generic):
        return np.array(x)
    return (x.float() if x.dtype == torch.bfloat16 else x).detach().cpu().numpy().copy()


def bits(x: Array) -> bytes:
    """The elements' bit patterns, row-major."""
    if isinstance(x, np.ndarray | np.generic):
        return np.asarray(x).tobytes()
    return x.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def copy(x: Array) -> Array:
    """The same array in storage of its own."""
    return np.array(x) if isinstance(x, np.ndarray | np.generic) else x.detach().clone()


def densify(sent: Array | SparseVector, shape: Sequence[int]) -> np.ndarray:
    """What was sent, as a dense NumPy array; fails on an index that occurs twice."""
    if not isinstance(sent, SparseVector):
        return as_numpy(sent).reshape(tuple(shape))
    indices, values = as_numpy(sent.indices), as_numpy(sent.values)
    assert len(set(indices.tolist())) == len(indices) == len(values)
    dense = np.zeros(int(np.prod(shape)), values.dtype)
    dense[indices] = values
    return dense.reshape(tuple(shape))


class Kept(NamedTuple):
    """One passage of one tensor through error feedback, in copies."""

    gradient: Array
    before: Array
    x: Array
    sent: Array | SparseVector
    after: Array


@dataclass(frozen=True)
class SpyFeedback(ErrorFeedback):
    """Error feedback that writes down what it saw and made; for engines of a single tensor."""

    seen: list[tuple[Array, ...]] = field(default_factory=list, compare=False, repr=False)
    log: list[Kept] = field(default_factory=list, compare=False, repr=False)

    def compensate(self, xp: Any, gradient: Array, state: tuple[Array, ...]) -> Any:
        x, rest = super().compensate(xp, gradient, state)
        self.seen.append((copy(gradient), copy(state[0]), copy(x)))
        return x, rest

    def update(self, xp: Any, x: Array, sent: Array | SparseVector, state: tuple[Array, ...]) -> Any:
        kept = SparseVector(*map(copy, sent)) if isinstance(sent, SparseVector) else copy(sent)
        result = super().update(xp, x, sent, state)
        self.log.append(Kept(*self.seen[-1], kept, copy(result[0])))
        return result


class CountingCommunicator:
    """Passes on to another communicator, and counts collectives and bytes.

    Attributes:
        started: one (kind, dtype, name, bytes) for each collective.
        at_wait: called before each wait, if set.
    """

    def __init__(self, inner: InProcessCommunicator) -> None:
        self.inner = inner
        self.rank, self.size = inner.rank, inner.size
        self.started: list[tuple[str, str, str, int]] = []
        self.at_wait: Callable[[], None] | None = None

    def start_allreduce(self, array: Array, op: str, name: str) -> Any:
        self.started.append((f"allreduce {op}", str(array.dtype).removeprefix("torch."), name, array.nbytes))
        return self.inner.start_allreduce(array, op, name)

    def start_allgather(self, array: Array, name: str) -> Any:
        assert str(array.dtype).removeprefix("torch.") == "uint8"
        assert array.ndim == 1
        self.started.append(("allgather", "uint8", name, array.nbytes))
        return self.inner.start_allgather(array, name)

    def wait(self, handle: Any) -> Array:
        if self.at_wait is not None:
            self.at_wait()
        return self.inner.wait(handle)


class Run(NamedTuple):
    """What one rank was left with: its engine, and the results of each step."""

    engine: Engine
    results: list[dict[str, Array]]


def infos(shapes: Mapping[str, Sequence[int]], dtype: str = "float32") -> list[TensorInfo]:
    """Descriptions of tensors of one element type."""
    return [TensorInfo(name, tuple(shape), dtype) for name, shape in shapes.items()]


def run_engines(
    size: int,
    tensors: Iterable[TensorInfo],
    compressor: Compressor,
    gradients: Callable[[int, int], Mapping[str, Array]],
    steps: int = 1,
    *,
    before: Callable[[Engine, int], None] = lambda engine, step: None,
    memory: Callable[[], Any] = lambda: None,
    **options: Any,
) -> Sequence[Run]:
    """Runs an engine on each of `size` ranks, with a counting communicator, and compresses tensors of any size.

    Args:
        gradients: of (rank, step).
        before: called with the engine and the step before each.
        memory: makes the memory of one rank.
        options: of `Engine`.
    """
    described = list(tensors)
    options = {"min_numel": 0, "min_ndim": 0} | options

    def work(communicator: InProcessCommunicator) -> Run:
        engine = Engine(CountingCommunicator(communicator), described, compressor, memory=memory(), **options)
        results = []
        for step in range(steps):
            before(engine, step)
            engine.begin()
            results.append(engine.step(gradients(communicator.rank, step)))
        return Run(engine, results)

    return run_ranks(size, work)


def states_of(engine: Engine) -> dict[str, tuple[bytes, ...]]:
    """The bits of all residuals and compressor states."""
    return {
        name: tuple(bits(array) for array in (*state.memory, *state.compressor))
        for name, state in engine.states.items()
    }


def set_to(engine: Engine, compressor: Compressor) -> None:
    """Gives every tensor this very compressor, whatever it would be routed to."""
    engine.set_plan(dict.fromkeys(engine.tensors, compressor))


def assert_same_on_all_ranks(runs: Sequence[Run]) -> None:
    """Results must be equal bit for bit."""
    for run in runs[1:]:
        for mine, first in zip(run.results, runs[0].results, strict=True):
            assert {name: bits(x) for name, x in mine.items()} == {name: bits(x) for name, x in first.items()}
