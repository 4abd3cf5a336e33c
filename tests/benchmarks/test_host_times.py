"""The host's work in a step does not grow with tensors and ranks, and has a bound."""

from __future__ import annotations

import pytest

from hvdcomp import kernels
from hvdcomp.kernels import cuda

pytest.importorskip("torch")
from benchmarks.times.host_times import METHODS, calls_of, without_kernels

# Calls of Python functions in a step of one bucket, before the path of a launch or a collective. Raise a number only
# with a reason: on a GPU, the host launches a bucket while the backward pass waits.
MOST = {"host": 185, "device": 270}
_LACKING = {"host": kernels.why_not(), "device": cuda.why_not()}


def calls(path: str, spec: str, tensors: int, ranks: int) -> int:
    with without_kernels(path, spec, tensors, ranks) as step:
        return calls_of(step)["call"]


@pytest.mark.parametrize(
    "path", [pytest.param(path, marks=pytest.mark.skipif(bool(why), reason=why)) for path, why in _LACKING.items()]
)
@pytest.mark.parametrize("spec", [*METHODS, "int4:exchange=scatter"])
def test_a_step_calls_the_same_for_any_number_of_tensors_and_ranks(path: str, spec: str) -> None:
    few = calls(path, spec, 4, 2)
    assert calls(path, spec, 40, 2) == few
    assert calls(path, spec, 4, 32) == few
    assert few <= MOST[path] * (2 if "scatter" in spec else 1)
