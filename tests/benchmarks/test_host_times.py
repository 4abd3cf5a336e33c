"""The host's work in a step does not grow with tensors and ranks, and has a bound."""

from __future__ import annotations

import pytest

from hvdcomp import kernels
from hvdcomp.kernels import cuda

pytest.importorskip("torch")
from benchmarks.times.host_times import METHODS, calls_of, no_kernels, no_launches, warm_step

needs_kernels = pytest.mark.skipif(not kernels.available(), reason="needs compiled kernels")
needs_triton = pytest.mark.skipif(not cuda.available(), reason=f"no kernels for CUDA: {cuda.why_not()}")

# Calls of Python functions in a step of one bucket, before the path of a launch or a collective. Raise a number only
# with a reason: on a GPU, the host launches a bucket while the backward pass waits.
MOST_ON_HOST, MOST_ON_DEVICE = 280, 390


def calls(path: str, spec: str, tensors: int, ranks: int) -> int:
    if path == "host":
        step = warm_step(spec, tensors, ranks)
        with no_kernels():
            return calls_of(step)["call"]
    with no_launches():
        return calls_of(warm_step(spec, tensors, ranks))["call"]


@needs_kernels
@pytest.mark.parametrize("spec", [*METHODS, "int4:exchange=scatter"])
def test_a_host_calls_the_same_for_any_number_of_tensors_and_ranks(spec: str) -> None:
    few = calls("host", spec, 4, 2)
    assert calls("host", spec, 40, 2) == few
    assert calls("host", spec, 4, 32) == few
    assert few <= MOST_ON_HOST * (2 if "scatter" in spec else 1)


@needs_triton
@pytest.mark.parametrize("spec", [*METHODS, "int4:exchange=scatter"])
def test_a_device_calls_the_same_for_any_number_of_tensors_and_ranks(spec: str) -> None:
    few = calls("device", spec, 4, 2)
    assert calls("device", spec, 40, 2) == few
    assert calls("device", spec, 4, 32) == few
    assert few <= MOST_ON_DEVICE * (2 if "scatter" in spec else 1)
