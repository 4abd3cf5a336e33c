"""The kernels for CUDA devices, in Triton's interpreter, beside those in C: the same bits, of payloads too; and how far
apart they may be where numbers are added up in another order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from hvdcomp import ErrorFeedback, MomentumCorrection
from hvdcomp.communicators.in_process import InProcessCommunicator
from hvdcomp.compressors.memory import Memory, NoMemory
from tests.exchange.test_buckets import needs_kernels
from tests.harness import as_numpy, bits
from tests.interpreted import needs_triton

torch = pytest.importorskip("torch")
from tests.gpu.ranks import HOST, Named, Ranks  # noqa: E402

pytestmark = [
    needs_triton,
    pytest.mark.usefixtures("in_interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, of numbers that overflow
    needs_kernels,
]

Tensors = Mapping[str, tuple[tuple[int, ...], str]]  # shapes and kinds of numbers

NUMBERS: dict[str, Callable[[np.random.Generator, tuple[int, ...]], Any]] = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "ties": lambda rng, shape: rng.integers(-3, 4, shape),
    "some zero": lambda rng, shape: rng.standard_normal(shape) * (rng.random(shape) < 0.2),  # with both signs
    "zero": lambda rng, shape: 0.0 * rng.choice([-1, 1], shape),
    "denormal": lambda rng, shape: rng.standard_normal(shape) * 1e-39,
    "of many sizes": lambda rng, shape: rng.standard_normal(shape) * 10.0 ** rng.uniform(-42, 4, shape),
}
SMALL: Tensors = {
    "denormals": ((513,), "denormal"), "more than a piece": ((3, 2_732), "of many sizes"), "one": ((), "normal"),
    "ties": ((7, 11), "ties"), "zeros": ((5, 13), "some zero"),
}  # fmt: skip
"""Beyond the ends of bytes, groups and pieces."""

LONG: Tensors = {
    "a piece": ((8_192,), "zero"), "blocks": ((3, 22_001), "of many sizes"), "ties in blocks": ((65_537,), "ties"),
}  # fmt: skip
"""Longer than a block of 2**16 too."""

QUICK = ("fp16", "signsgd", "fp8:rounding=stochastic")
EXACT = (
    *QUICK, "randomk:ratio=0.1", "natural", "globalqsgd", "topkc:ratio=0.3,chunk=100",
    "none", "bf16", "terngrad", "topk:ratio=0.01", "topk:ratio=0.3",
    "topk:ratio=0.3,values=fp16", "qsgd:bits=4", "int8",
    "randomk:ratio=0.1,unbiased=True,values=fp16",
    "signsgd:zeros=elements", "qsgd:bits=1,bucket=100", "qsgd:bits=7", "qsgd:bits=8,bucket=5000", "terngrad:clip=0",
    "globalqsgd:bits=5", "int8:rounding=stochastic,block=5000", "int4", "int4:block=7", "int4:rounding=stochastic",
    "fp16:rounding=stochastic,exchange=gather", "bf16:rounding=stochastic",
    "topkc:ratio=0.1,chunk=5000", "chunkedtopk:chunk=300,k=20", "chunkedtopk", "chunkedtopk:chunk=200,k=3,values=fp16",
    "chunkedtopk:chunk=9000,k=100,values=float32", "chunkedtopk:chunk=8,k=1,values=sign",
    "chunkedtopk:chunk=64,k=5,values=sign", "chunkedtopk:chunk=50,k=1",
    "chunkedtopk:chunk=1000,k=10,values=sign", "fp8", "fp8:block=100", "fp8:format=e5m2",
    "fp8:format=e5m2,rounding=stochastic", "eden", "eden:bits=1,block=512", "eden:bits=3", "eden:bits=4",
    "eden:bits=1,scaled=True",
)  # fmt: skip


def gradients(tensors: Tensors, rank: int, step: int) -> Named:
    rng = np.random.default_rng([rank, step])
    return {name: np.asarray(NUMBERS[kind](rng, shape), np.float32) for name, (shape, kind) in tensors.items()}


class Steps:
    """Two steps of a method on some ranks.

    Args:
        place: of the gradients, as of `Ranks`.
        before: what the ranks keep before each step, if that is given.

    Attributes:
        payloads: bytes of what each rank hands to each collective, by its name, the rank and the step.
        results: by the tensor's name, the rank and the step.
        kept: what the ranks keep of tensors after the last step, by the same and a number.
        states: what the ranks keep before each step.
    """

    def __init__(
        self,
        spec: str,
        place: str,
        tensors: Tensors,
        size: int,
        memory: Callable[[], Memory] = ErrorFeedback,
        before: Sequence[Any] = (),
    ) -> None:
        shapes = {name: shape for name, (shape, _) in tensors.items()}
        ranks = Ranks(spec, shapes, place, size, memory, min_numel=0, min_ndim=0)
        self.payloads: dict[tuple[str, int, int], bytes] = {}
        self.results: dict[tuple[str, int, int], np.ndarray] = {}
        self.states = []
        for step in range(2):
            self.states.append(ranks.states())
            if before:
                ranks.set_states(before[step])
            with pytest.MonkeyPatch.context() as patch:
                self._record(patch, step)
                found = ranks.step([gradients(tensors, rank, step) for rank in range(size)])
            for rank, of_rank in enumerate(found):
                self.results |= {(name, rank, step): as_numpy(result) for name, result in of_rank.items()}
        for engine in ranks.engines:
            assert {name for group in engine.buckets.with_kernels for name in group.names} == {*tensors}
            assert all((group.bucket.device is None) == (place == HOST) for group in engine.buckets.with_kernels)
        self.kept = {
            (name, rank, number): array
            for rank, memories in enumerate(ranks.memories())
            for name, arrays in memories.items()
            for number, array in enumerate(arrays)
        }

    def _record(self, patch: pytest.MonkeyPatch, step: int) -> None:
        for kind in ("start_allgather", "start_allreduce", "start_alltoall"):
            start = getattr(InProcessCommunicator, kind)

            def begin(communicator: Any, array: Any, *rest: str, start: Any = start) -> Any:
                self.payloads[rest[-1], communicator.rank, step] = bits(array)
                return start(communicator, array, *rest)

            patch.setattr(InProcessCommunicator, kind, begin)


def assert_same_bits(found: Mapping[Any, np.ndarray], expected: Mapping[Any, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for key, right in expected.items():
        apart = found[key].view(np.uint32) != right.view(np.uint32)
        said = [(float(mine), float(other)) for mine, other in zip(found[key][apart], right[apart], strict=True)][:3]
        assert not said, f"{key}: {apart.sum()} of {apart.size} are apart: {said}"


def check_bits(spec: str, tensors: Tensors, size: int, memory: Callable[[], Memory] = ErrorFeedback) -> None:
    if spec.startswith("randomk"):  # whose draws from few elements are repeated many times, slowly here
        tensors = {name: (shape, kind) for name, (shape, kind) in tensors.items() if np.prod(shape) > 100}
    device, host = (Steps(spec, place, tensors, size, memory) for place in ("cpu", HOST))
    assert len(host.payloads) >= 2 * size
    assert any(array.any() for array in host.kept.values()) == (spec != "none")
    assert_same_bits(device.results, host.results)
    assert_same_bits(device.kept, host.kept)
    assert device.payloads.keys() == host.payloads.keys()
    for key, right in host.payloads.items():
        mine = device.payloads[key]
        if spec.startswith("randomk") and "blocks" in tensors:
            mine, right = (np.sort(np.frombuffer(one, np.uint32)).tobytes() for one in (mine, right))
        assert mine == right, key


@pytest.mark.parametrize(
    "spec", [pytest.param(one, marks=[pytest.mark.thorough] * (one not in QUICK)) for one in EXACT]
)
def test_the_bits_are_those_of_the_kernels_in_c(spec: str) -> None:
    check_bits(spec, SMALL, 2)


def test_an_unbiased_value_that_would_be_clipped_counts_as_not_finite_unless_the_excess_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(NUMBERS, "beyond", lambda rng, shape: rng.standard_normal(shape) * 1e4)
    for memory, counts in ((ErrorFeedback, True), (NoMemory, False)):
        for place in ("cpu", HOST):
            spec = "randomk:ratio=0.5,unbiased=True,values=fp16"
            found = Steps(spec, place, {"beyond": ((200,), "beyond")}, 1, memory)
            assert {bool(np.isfinite(result).all()) for result in found.results.values()} == {counts}


CUT: Tensors = {"matrix": ((30, 13), "normal"), "one": ((), "normal"), "ties": ((7, 11), "ties")}


@pytest.mark.parametrize(
    ("spec", "size"),
    [
        ("fp16:exchange=scatter", 3), ("int8:exchange=scatter", 2), ("eden:bits=1,back=3,exchange=scatter", 2),
        ("eden:bits=1,back=3,exchange=scatter", 5),  # a rank owns no block
        ("eden:bits=1,block=512,scaled=True,exchange=scatter", 2),
        *(
            pytest.param(f"{one}exchange=scatter", size, marks=pytest.mark.thorough)
            for one in (
                "bf16:rounding=stochastic,", "int4:block=12,", "fp8:rounding=stochastic,", "natural:",
                "qsgd:bits=4,bucket=64,", "qsgd:bits=1,bucket=3,", "terngrad:", "eden:",
                "eden:bits=4,back=1,block=512,",
            )
            for size in (2, 3, 5)
        ),
    ],
)  # fmt: skip
def test_the_bits_of_what_is_scattered(spec: str, size: int) -> None:
    check_bits(spec, CUT, size)


@pytest.mark.thorough
@pytest.mark.parametrize("spec", [one for one in EXACT if one != "none"])
def test_the_bits_with_momentum(spec: str) -> None:
    check_bits(spec, SMALL, 2, lambda: MomentumCorrection(0.9, nesterov=True))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "spec",
    [
        "topk:ratio=0.01", "randomk:ratio=0.1", "signsgd", "qsgd:bits=8,bucket=5000", "terngrad", "globalqsgd:bits=5",
        "int4:block=5000", "int8:block=100000", "fp8", "topkc:ratio=0.02", "chunkedtopk:chunk=65536,k=500",
    ],
)  # fmt: skip
def test_the_bits_of_long_tensors(spec: str) -> None:
    """On three ranks. Random-k in C has blocks, so there values of one tensor travel in another order."""
    check_bits(spec, LONG, 3)


def with_largest(largest: float) -> Callable[[np.random.Generator, tuple[int, ...]], Any]:
    """Elements half-way between two codes of blocks, whose largest magnitude this is."""

    def draw(rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
        whole = rng.integers(-15, 16, shape) / 2
        floats = rng.integers(-63, 64, shape) / 32 * 2.0 ** rng.integers(-18, 15, shape)
        x = np.where(rng.random(shape) < 0.5, whole, floats).clip(-largest, largest)
        x[::32] = largest
        return x

    return draw


def denormal_beside_small(rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
    """In blocks whose scale hardly counts as one, so that as floats of 8 bits they are sometimes rounded up."""
    x = rng.standard_normal(shape) * 3e-39
    x[::64] = 2.0**-96 * 1.01
    return x


@pytest.mark.parametrize(
    ("spec", "largest"),
    [
        ("int8", 127), ("int4", 7), ("fp8", 448), ("fp8:rounding=stochastic", 448),
        ("fp8:format=e5m2,rounding=stochastic", 57344),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (("int8:rounding=stochastic", 127), ("int4:rounding=stochastic", 7), ("fp8:format=e5m2", 57344))
        ),
    ],
)  # fmt: skip
def test_the_bits_of_blocks_at_borders(spec: str, largest: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NUMBERS, "half-way", with_largest(largest))
    monkeypatch.setitem(NUMBERS, "denormal beside small", denormal_beside_small)
    check_bits(spec, {"half-way": ((2_000,), "half-way"), "denormal": ((1_030,), "denormal beside small")}, 1)


def both(spec: str) -> tuple[Steps, Steps]:
    """On a device and on the host; each step from equal residuals."""
    device = Steps(spec, "cpu", SMALL, 2)
    return device, Steps(spec, HOST, SMALL, 2, before=device.states)


def assert_near(found: Steps, expected: Steps, share: float) -> None:
    """Results and what is kept are apart by a share of the tensor's largest number at most."""
    for mine, right in ((found.results, expected.results), (found.kept, expected.kept)):
        assert mine.keys() == right.keys()
        for key, array in right.items():
            atol = share * float(np.abs(array).max())
            np.testing.assert_allclose(mine[key], array, rtol=0, atol=atol, err_msg=str(key))


@pytest.mark.parametrize(("spec", "values"), [("efsignsgd", 1), ("onebit", 2)])
def test_signs_are_the_same_and_magnitudes_nearly(spec: str, values: int) -> None:
    """values: that travel for each tensor."""
    device, host = both(spec)
    assert_near(device, host, 1e-6)
    bytes_of_values = 4 * values * len(SMALL)
    assert device.payloads.keys() == host.payloads.keys()
    for key, right in host.payloads.items():
        mine = device.payloads[key]
        assert mine[bytes_of_values:] == right[bytes_of_values:], key
        magnitudes = (np.frombuffer(one[:bytes_of_values], np.float32) for one in (mine, right))
        np.testing.assert_allclose(*magnitudes, rtol=1e-6, err_msg=str(key))


@pytest.mark.thorough
@pytest.mark.parametrize("spec", ["powersgd:rank=2", "powersgd:rank=4,alternating=True"])
def test_products_are_nearly_the_same(spec: str) -> None:
    assert_near(*both(spec), 1e-4)
