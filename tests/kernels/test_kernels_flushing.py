"""The kernels where the processor takes denormal floats for zero, as in graphs of TensorFlow and after
`torch.set_flush_denormal(True)`: the same bits."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from hvdcomp import kernels
from hvdcomp.compressors.parsing import parse_compressor
from tests.kernel_buckets import run_buckets
from tests.kernel_calls import instruction_set  # noqa: F401
from tests.kernels.test_kernels_parallel import parallel

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.skipif(not kernels.available(), reason=f"no kernels: {kernels.why_not()}")


def flushing_and_not(function: Callable[[], bytes]) -> list[bytes]:
    found = []
    for flush in (False, True):
        assert torch.set_flush_denormal(flush)
        found.append(function())
    torch.set_flush_denormal(False)
    return found


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("length", [7, 61, 2**16])
def test_every_number_of_half_precision_is_read_as_it_is(length: int) -> None:
    library = kernels.library()
    assert library is not None
    halves = np.arange(2**16, dtype=np.uint16)

    def widened() -> bytes:
        floats = np.zeros(2**16, np.float32)
        for start in range(0, 2**16, length):
            parts = halves[start:], floats[start:]
            size = min(length, 2**16 - start)
            library.hvd_half_widen(parts[0].ctypes.data, size, parts[1].ctypes.data, 1)
        return floats.tobytes()

    expected = halves.view(np.float16).astype(np.float32)
    for found in flushing_and_not(widened):
        floats = np.frombuffer(found, np.float32)
        assert np.array_equal(np.isnan(floats), np.isnan(expected))
        counts = ~np.isnan(expected)
        assert floats[counts].tobytes() == expected[counts].tobytes()


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize(
    "spec",
    [
        "fp16", "fp16:exchange=gather", "fp16:exchange=gather,rounding=stochastic", "bf16", "bf16:rounding=stochastic",
        "topk:ratio=0.3,values=fp16", "randomk:ratio=0.3,values=fp16", "randomk:ratio=0.3,unbiased=True,values=fp16",
        "chunkedtopk:chunk=64,k=16,values=fp16", "efsignsgd", "onebit", "qsgd:bits=4", "natural", "globalqsgd", "int8",
        "int4:rounding=stochastic", "fp8", "fp8:format=e5m2,rounding=stochastic", "terngrad",
    ],
)  # fmt: skip
@pytest.mark.parametrize("keeps", [False, True])
def test_no_bit_of_a_step_changes(spec: str, keeps: bool) -> None:
    """Of normal floats, most of which are denormal or zero in half precision."""
    random = np.random.default_rng(0)
    sizes = (1, 5, 77, 1030, 66_000)
    signed = [[random.choice([-1, 1], size) * 10 ** random.uniform(-9, -3, size) for size in sizes] for _ in range(2)]
    xs = [[x.astype(np.float32) for x in own] for own in signed]

    def step() -> bytes:
        steps = run_buckets([parse_compressor(spec)] * len(sizes), xs, 1, keeps, threads=2)
        return b"".join(array.tobytes() for step in steps for array in (*step.means, *step.x))

    before, flushing = flushing_and_not(step)
    assert before == flushing


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize(
    ("spec", "value"),
    [
        *((spec, 3e38) for spec in ("qsgd:bits=4,bucket=1", "int8", "int4", "fp8", "terngrad", "globalqsgd")),
        ("natural", -1e-39),
    ],
)
def test_numbers_whose_reciprocals_are_denormal_and_the_signs_of_denormal_numbers_are_read(
    spec: str, value: float
) -> None:
    x = np.full(77, value, np.float32)

    def step() -> bytes:
        (found,) = run_buckets([parse_compressor(spec)], [[x]])
        return found.means[0].tobytes()

    before, flushing = flushing_and_not(step)
    assert before == flushing
    assert np.frombuffer(before, np.float32).any()


def test_workers_do_arithmetic_as_the_caller_does() -> None:
    """Those that were there before the caller's way changed, too."""
    for flush in (False, True, False):
        barrier, seen = threading.Barrier(3, timeout=30), []

        def work(_: int, barrier: threading.Barrier = barrier, seen: list[bool] = seen) -> None:
            barrier.wait()
            seen.append(not (np.full(4, 1e-40, np.float32) * np.float32(1)).view(np.uint32).any())

        torch.set_flush_denormal(flush)
        parallel(3, 3, work)
        assert seen == [flush] * 3
