"""The same gradients, names and seed in NumPy and PyTorch: the same payloads, and the same aggregates.

`AGREEMENT` says of each method how nearly. What selects, casts and packs does so bit by bit; what adds many numbers up
(norms, means, matrix products) adds them in another order in each framework, and what follows from the sum differs as
far as the last bits of it do.

Each tensor goes by itself here: buckets lay out their payloads otherwise (`test_buckets.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

from hvdcomp.arrays.types import Array
from hvdcomp.communicators.in_process import InProcessCommunicator, run_ranks
from hvdcomp.compressors.parsing import parse_compressor
from hvdcomp.exchange.engine import Engine
from tests.harness import DTYPES, EXAMPLES, INSTALLED, as_numpy, bits, dtype_of, infos, make

pytestmark = pytest.mark.usefixtures("without_kernels")
SHAPES = {"conv": (8, 3, 3, 3), "linear": (37, 29), "bias": (37,), "scale": ()}
STEPS = 3


class Sent(NamedTuple):
    """One buffer that a rank handed to a collective."""

    kind: str
    dtype: str
    content: bytes


class RecordingCommunicator:
    """Passes on to another communicator, and keeps a copy of every buffer."""

    def __init__(self, inner: InProcessCommunicator) -> None:
        self._inner = inner
        self.rank, self.world_size = inner.rank, inner.world_size
        self.sent: list[Sent] = []

    def part(self, group: str) -> RecordingCommunicator:
        assert group == "all"
        return self

    def start_allreduce(self, array: Array, op: str, name: str) -> Any:
        self.sent.append(Sent(f"allreduce {op} {name}", dtype_of(array), bits(array)))
        return self._inner.start_allreduce(array, op, name)

    def start_allgather(self, array: Array, name: str) -> Any:
        self.sent.append(Sent(f"allgather {name}", dtype_of(array), bits(array)))
        return self._inner.start_allgather(array, name)

    def start_alltoall(self, array: Array, name: str) -> Any:
        self.sent.append(Sent(f"alltoall {name}", dtype_of(array), bits(array)))
        return self._inner.start_alltoall(array, name)

    def wait(self, handle: Any) -> Array:
        return self._inner.wait(handle)


class Run(NamedTuple):
    """What one rank sent in all steps, and what it got in each."""

    sent: list[Sent]
    results: list[dict[str, np.ndarray]]


def run(backend: str, spec: str, dtype: str, size: int) -> Sequence[Run]:
    def work(inner: InProcessCommunicator) -> Run:
        communicator = RecordingCommunicator(inner)
        tensors = infos(SHAPES, dtype)
        engine = Engine(communicator, tensors, parse_compressor(spec), seed=3, min_numel=0, min_ndim=0)
        results = []
        for step in range(STEPS):
            random = np.random.default_rng([inner.rank, step])
            drawn = {name: random.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}
            results.append(engine.step({name: make(backend, x, dtype) for name, x in drawn.items()}))
        return Run(communicator.sent, [{name: as_numpy(x) for name, x in step.items()} for step in results])

    return run_ranks(size, work)


# A unit in the last place, relative to the largest element.
ROUNDING = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}


class Agreement(NamedTuple):
    """How nearly the frameworks agree on what one method sends and makes.

    Attributes:
        reason: why not bit by bit; "" if it is.
        rounding: by how many units in the last place of the precision it computes in (single at least, and double
            only if `doubles`) elements of allreduced vectors and of the result may differ, relative to the largest
            element. In half precision two units in the last place of that are allowed besides.
        gathered: the share of the bytes of an allgather buffer that may differ.
        doubles: whether float64 gradients are computed with in double precision.
        halves_only: whether float32 and float64 gradients agree bit by bit.
        others_chosen: the share of elements of the result, in half precision, that may differ by any amount, because
            another element was chosen. The chosen lie in no particular order, and so allgather buffers are then not
            compared.
    """

    reason: str = ""
    rounding: float = 0
    gathered: float = 0
    doubles: bool = True
    halves_only: bool = False
    others_chosen: float = 0

    def exact(self, dtype: str) -> bool:
        return not self.reason or (self.halves_only and ROUNDING[dtype] <= ROUNDING["float32"])

    def may_choose_others(self, dtype: str) -> bool:
        return self.others_chosen > 0 and ROUNDING[dtype] > ROUNDING["float32"]

    def tolerance(self, dtype: str) -> float:
        """Relative to the largest element."""
        if self.exact(dtype):
            return 0.0
        unit = ROUNDING["float64" if dtype == "float64" and self.doubles else "float32"]
        return self.rounding * unit + (2 * ROUNDING[dtype] if ROUNDING[dtype] > ROUNDING["float32"] else 0)


MEANS = Agreement("means are sums of the elements, added in another order", rounding=8, gathered=0.1, doubles=False)
# What is not named here agrees bit by bit. Norms are added up in double precision, and rounded to the same float32.
AGREEMENT = {
    "randomk:unbiased": Agreement(
        "PyTorch multiplies half precision by d / k itself, NumPy by d / k in half precision", halves_only=True
    ),
    "dgc": Agreement(
        "PyTorch adds momentum times velocity in one rounding, NumPy in two; of elements that are nearly equal "
        "another may then be sent",
        rounding=8,
        gathered=0.1,
        others_chosen=0.01,
    ),
    "arctopk": Agreement("its sketch is a product of matrices, which are sums added in another order", rounding=200),
    "powersgd": Agreement("matrix products are sums, added in another order", rounding=200),
    "atomo": Agreement(
        "an eigenvector's sign is free, and LAPACK is not the same one everywhere", rounding=1000, gathered=1
    ),
    "onebit": MEANS,
    "efsignsgd": MEANS,
}


def agreement_of(spec: str) -> Agreement:
    name = "randomk:unbiased" if "unbiased=True" in spec else spec.partition(":")[0]
    return AGREEMENT.get(name, Agreement())


@pytest.mark.skipif(len(INSTALLED) < 2, reason="needs PyTorch")
# In the quick tests in float32, and in one of the other types in turns.
@pytest.mark.parametrize(
    ("spec", "dtype", "size"),
    [
        pytest.param(
            spec, dtype, size,
            marks=[pytest.mark.thorough] * (size > 2 or (dtype != "float32" and (place + turn) % 3 > 0)),
        )
        for place, spec in enumerate(EXAMPLES)
        for turn, (dtype, size) in enumerate([
            ("float32", 2), *((dtype, 2) for dtype in ROUNDING if dtype != "float32"), ("float32", 4),
        ])
    ],
)  # fmt: skip
def test_every_framework_sends_and_makes_the_same(spec: str, dtype: str, size: int) -> None:
    first, *others = (backend for backend in INSTALLED if dtype in DTYPES[backend])
    expected, agreement = run(first, spec, dtype, size), agreement_of(spec)
    for other in others:
        for ours, theirs in zip(expected, run(other, spec, dtype, size), strict=True):
            compare_sent(ours.sent, theirs.sent, agreement, dtype)
            for one, another in zip(ours.results, theirs.results, strict=True):
                compare_results(one, another, agreement, dtype)


def compare_sent(ours: list[Sent], theirs: list[Sent], agreement: Agreement, dtype: str) -> None:
    assert [(sent.kind, sent.dtype, len(sent.content)) for sent in ours] == [
        (sent.kind, sent.dtype, len(sent.content)) for sent in theirs
    ]
    if agreement.exact(dtype):
        assert ours == theirs
        return
    for one, another in zip(ours, theirs, strict=True):
        mine, other = (np.frombuffer(sent.content, sent.dtype) for sent in (one, another))
        if one.kind.startswith("allreduce"):
            assert_near(mine, other, agreement.tolerance(dtype))
        elif not agreement.may_choose_others(dtype):
            assert np.mean(mine != other) <= agreement.gathered


def compare_results(
    ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray], agreement: Agreement, dtype: str
) -> None:
    for name, mine in ours.items():
        if agreement.exact(dtype):
            np.testing.assert_array_equal(mine, theirs[name], strict=True)
        else:
            chosen = agreement.others_chosen if agreement.may_choose_others(dtype) else 0
            assert_near(mine, theirs[name], agreement.tolerance(dtype), chosen)


def assert_near(mine: np.ndarray, other: np.ndarray, tolerance: float, share: float = 0) -> None:
    """All elements but a share differ by no more than the tolerance, relative to the largest."""
    assert mine.shape == other.shape
    assert mine.dtype == other.dtype
    difference = np.abs(mine.astype(np.float64) - other.astype(np.float64))
    far = np.count_nonzero(difference > tolerance * np.abs(mine.astype(np.float64)).max())
    assert far <= share * mine.size, f"{far} of {mine.size} differ, by up to {difference.max()}"
