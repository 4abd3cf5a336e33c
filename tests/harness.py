"""Common helpers of the core's tests: all array backends, engines on ranks in one process, and spies."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, NamedTuple

import hypothesis
import numpy as np
import pytest

from hvdcomp import Compressor, ErrorFeedback, TwoLevel, compressors
from hvdcomp.adaptation.previews import Previews
from hvdcomp.arrays import arrays_for
from hvdcomp.arrays.types import Array
from hvdcomp.communicators.in_process import InProcessCommunicator, run_ranks
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.compressors.protocol import SparseVector, TensorInfo
from hvdcomp.exchange.engine import Engine

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]
try:
    import ml_dtypes  # noqa: F401  # NumPy's bfloat16, in which TensorFlow hands out its own
except ImportError:
    _BFLOAT16: list[str] = []
else:
    _BFLOAT16 = ["bfloat16"]


def needing(backend: str, *values: Any, thorough: bool = False) -> Any:
    """A test's parameters, skipped without the backend; with `thorough`, only in `make test-all`."""
    marks = [pytest.mark.skipif(find_spec(backend) is None, reason=f"needs {backend}")]
    return pytest.param(*values, marks=[*marks, *[pytest.mark.thorough] * thorough])


DTYPES = {
    "numpy": ["float16", *_BFLOAT16, "float32", "float64"],
    "torch": ["float16", "bfloat16", "float32", "float64"],
}
INSTALLED = [backend for backend in DTYPES if find_spec(backend) is not None]
EVERY_BACKEND = [needing(backend, backend) for backend in DTYPES]
EVERY_DTYPE = [needing(backend, backend, dtype) for backend, dtypes in DTYPES.items() for dtype in dtypes]
BACKENDS = EVERY_BACKEND
# What is written with the array functions knows no framework: `tests.arrays.test_arrays` holds these functions equal in
# both, `tests.bindings.test_two_frameworks` the compressors. So the quick tests run in NumPy's own types, and in
# PyTorch's float32.
BACKENDS_AND_DTYPES = [
    needing(backend, backend, dtype, thorough=dtype == "bfloat16" or (backend == "torch" and dtype != "float32"))
    for backend, dtypes in DTYPES.items()
    for dtype in dtypes
]


def in_turns(values: Iterable[Any], others: Iterable[Any] = ((),)) -> list[Any]:
    """Parameters: each value with each of others, which may be tuples, and each backend; in the quick tests with one of
    these combinations, in turns."""

    def as_tuple(value: Any) -> tuple[Any, ...]:
        return value if isinstance(value, tuple) else (value,)

    combinations = list(itertools.product(others, DTYPES))
    return [
        needing(backend, *as_tuple(value), *as_tuple(other), backend, thorough=turn != place % len(combinations))
        for place, value in enumerate(values)
        for turn, (other, backend) in enumerate(combinations)
    ]


def some_of(share: int, *axes: Iterable[Any]) -> list[Any]:
    """Parameters: each combination of values; in the quick tests one in `share` of them, along diagonals, so that each
    value is among them where another axis has `share` values."""
    found = []
    for combination in itertools.product(*(enumerate(axis) for axis in axes)):
        places, values = zip(*combination, strict=True)
        found.append(pytest.param(*values, marks=[pytest.mark.thorough] * (sum(places) % share > 0)))
    return found


def fewer_examples(share: int) -> hypothesis.settings:
    """Settings with 1/`share` of the usual random examples, for tests of many cases."""
    return hypothesis.settings(max_examples=max(1, hypothesis.settings().max_examples // share))


# Every compressor in each of its forms; a larger share is sent of tensors as small as they are here.
def _of_small(specs: Iterable[str]) -> list[str]:
    return [
        str(compressor.at_level(0.1) if compressor.level_name == "ratio" else compressor)
        for compressor in map(parse_compressor, specs)
    ]


EXAMPLES = _of_small(compressors.EXAMPLES)
TWO_LEVELS = _of_small(TwoLevel.examples)
# One of each kind of payload, for what knows of payloads only.
SPECS = ["none", "fp16", "bf16", "topk:ratio=0.3", "randomk:ratio=0.3", "powersgd:rank=2"]


def make(backend: str, values: Any, dtype: str = "float32") -> Array:
    """A fresh array of a backend, with the values rounded to the element type."""
    if backend == "numpy":
        return np.array(values, dtype)
    return torch.tensor(np.asarray(values)).to(getattr(torch, dtype))


def as_numpy(x: Array) -> np.ndarray:
    """A copy of the values in NumPy (bfloat16 as float32)."""
    if isinstance(x, np.ndarray | np.generic):
        return np.array(x, np.float32 if dtype_of(x) == "bfloat16" else None)
    return (x.float() if x.dtype == torch.bfloat16 else x).detach().cpu().numpy().copy()


def framework_of(x: Array) -> str:
    """The backend of an array."""
    return type(x).__module__.partition(".")[0]


def dtype_of(x: Array) -> str:
    """The element type by its common name."""
    return arrays_for(x).dtype_name(x)


def replaced(x: Array, place: tuple[int, ...], value: float) -> Array:
    """A copy of the array with another element at one place."""
    values = as_numpy(x)
    values[place] = value
    return make(framework_of(x), values, dtype_of(x))


def bits(x: Array) -> bytes:
    """The elements' bit patterns, row-major."""
    if isinstance(x, np.ndarray | np.generic):
        return np.asarray(x).tobytes()
    flat = x.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if len(flat) else b""


def copy(x: Array) -> Array:
    """A copy of the array."""
    if isinstance(x, np.ndarray | np.generic):
        return np.array(x)
    return x.detach().clone()


def densify(sent: Array | SparseVector, shape: Sequence[int]) -> np.ndarray:
    """The sent values as a dense NumPy array; fails on a repeated index."""
    if not isinstance(sent, SparseVector):
        return as_numpy(sent).reshape(tuple(shape))
    indices, values = as_numpy(sent.indices), as_numpy(sent.values)
    assert len(set(indices.tolist())) == len(indices) == len(values)
    dense = np.zeros(int(np.prod(shape)), values.dtype)
    dense[indices] = values
    return dense.reshape(tuple(shape))


@contextmanager
def random_states_untouched(backend: str) -> Iterator[None]:
    """Fails if the block changes the global random state of Python, NumPy or the backend."""

    def states() -> list[Any]:
        drawn = torch.get_rng_state().tolist() if backend == "torch" else None
        return [random.getstate(), np.random.get_state()[1].tolist(), drawn]

    before = states()
    yield
    assert states() == before


class Kept(NamedTuple):
    """One passage of one tensor through error feedback, in copies.

    Attributes:
        left: x, and what the results of 16 bits lack of the mean: sent + after.
    """

    gradient: Array
    before: Array
    x: Array
    left: Array
    sent: Array | SparseVector
    after: Array


@dataclass(frozen=True)
class SpyFeedback(ErrorFeedback):
    """Error feedback that records its inputs and outputs; for engines of a single tensor."""

    seen: list[tuple[Array, ...]] = field(default_factory=list, compare=False, repr=False)
    log: list[Kept] = field(default_factory=list, compare=False, repr=False)

    def compensate(self, xp: Any, gradient: Array, state: tuple[Array, ...]) -> Any:
        x, memory = super().compensate(xp, gradient, state)
        self.seen.append((copy(gradient), copy(state[0]), copy(x)))
        return x, memory

    def update(self, xp: Any, x: Array, sent: Array | SparseVector, state: tuple[Array, ...]) -> Any:
        kept = SparseVector(*map(copy, sent)) if isinstance(sent, SparseVector) else copy(sent)
        left = copy(x)
        result = super().update(xp, x, sent, state)
        self.log.append(Kept(*self.seen[-1], left, kept, copy(result[0])))
        return result


class CountingCommunicator:
    """Forwards to another communicator, and counts collectives and bytes.

    Attributes:
        started: one (kind, dtype, name, bytes) for each collective, those of groups of ranks among them.
        at_wait: called before each wait, if set.
    """

    def __init__(self, inner: InProcessCommunicator, started: list[tuple[str, str, str, int]] | None = None) -> None:
        self.inner = inner
        self.rank, self.world_size = inner.rank, inner.world_size
        self.started = [] if started is None else started
        self.at_wait: Callable[[], None] | None = None

    def part(self, group: str) -> CountingCommunicator:
        return self if group == "all" else CountingCommunicator(self.inner.part(group), self.started)

    def start_allreduce(self, array: Array, op: str, name: str) -> Any:
        self.started.append((f"allreduce {op}", dtype_of(array), name, len(bits(array))))
        return self.inner.start_allreduce(array, op, name)

    def start_allgather(self, array: Array, name: str) -> Any:
        assert dtype_of(array) == "uint8"
        assert array.ndim == 1
        self.started.append(("allgather", "uint8", name, array.shape[0]))
        return self.inner.start_allgather(array, name)

    def start_alltoall(self, array: Array, name: str) -> Any:
        assert dtype_of(array) == "uint8"
        assert array.ndim == 1
        self.started.append(("alltoall", "uint8", name, array.shape[0]))
        return self.inner.start_alltoall(array, name)

    def start_reducescatter(self, array: Array, op: str, name: str) -> Any:
        self.started.append((f"reducescatter {op}", dtype_of(array), name, len(bits(array))))
        return self.inner.start_reducescatter(array, op, name)

    def start_broadcast(self, array: Array, name: str) -> Any:
        return self.inner.start_broadcast(array, name)

    def wait(self, started: Any) -> Array:
        if self.at_wait is not None:
            self.at_wait()
        return self.inner.wait(started)


class Run(NamedTuple):
    """The engine of one rank after the run, and the results of each step."""

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


def previews_of(engine: Engine) -> Previews:
    """Previews of what an engine would send."""
    return Previews(engine.tensors, engine.states)


def states_of(engine: Engine) -> dict[str, tuple[bytes, ...]]:
    """The bits of all residuals and compressor states."""
    return {
        name: tuple(bits(array) for array in (*state.memory, *state.compressor))
        for name, state in engine.states.items()
    }


def set_to(engine: Engine, compressor: Compressor) -> None:
    """Gives every tensor this compressor, without routing."""
    engine.set_plan(dict.fromkeys(engine.tensors, compressor))


def assert_same_on_all_ranks(runs: Sequence[Run]) -> None:
    """Fails unless the results of all ranks are equal bit for bit."""
    for run in runs[1:]:
        for result, first in zip(run.results, runs[0].results, strict=True):
            assert {name: bits(x) for name, x in result.items()} == {name: bits(x) for name, x in first.items()}
